"""Prompts on their way into the caches: in chunks, in turn, and past what the store knows."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_jax.engine.device import Device
from dflash_jax.engine.options import Options, Statistics
from dflash_jax.engine.request import Request
from dflash_jax.engine.store import Prefix, PrefixStore, chunks, cut_points, keys

# Most tokens of a chunk whose log-probabilities are asked for: its logits are [tokens, V] in float32.
MOST_SCORED = 64


def scored_size(sizes: Sequence[int]) -> int:
    return max((s for s in sizes if s <= MOST_SCORED), default=sizes[0])


# Before the key of a prefix that has no part of the drafter's.
ALONE_KEY = b"alone "


@dataclass(eq=False)
class _Prefill:
    """A request on its way into the caches: what is left to run, and the prefixes it is to leave in the store.
    ``drafting``: into the drafter's, too; then only prefixes that have its part are of use."""

    request: Request
    order: int
    drafting: bool
    cuts: list[int]
    keys: list[bytes]
    parent: Prefix | None = None
    # Segments since the last cut: (start, arrays), and whether they can still become a prefix.
    segments: list = field(default_factory=list)
    can_keep: bool = True

    @property
    def next_cut(self) -> int:
        """Index of the first cut that is not reached."""
        return next(i for i, cut in enumerate(self.cuts) if cut > self.request.prefilled)


class Prefiller:
    """Runs chunks of prompts. Whoever had a turn goes behind the others of its priority."""

    def __init__(self, device: Device, store: PrefixStore, options: Options, statistics: Statistics):
        self.device, self.store, self.statistics = device, store, statistics
        self.sizes, self.markers = options.prefill_sizes, options.markers
        self._order = itertools.count()
        self._queue: deque[_Prefill] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, drafting: bool = True) -> None:
        """A request of two tokens or more that has a slot."""
        cuts = cut_points(request.prompt, len(request.prompt) - 1, self.markers)
        is_scored = request.prompt_logprobs is not None
        found, can_keep = keys(request.prompt, cuts), self.store.budget > 0 and not is_scored
        drafting = drafting and not is_scored
        if not drafting:
            found = [ALONE_KEY + key for key in found]
        self._queue.append(_Prefill(request, next(self._order), drafting, cuts, found, can_keep=can_keep))

    def _find(self, prefill: _Prefill, key: bytes) -> Prefix | None:
        found = self.store.find(key)
        if found is None and not prefill.drafting:
            found = self.store.find(key.removeprefix(ALONE_KEY))
        return found

    def remove(self, request: Request) -> None:
        self._queue = deque(p for p in self._queue if p.request is not request)

    def run(self, budget: int) -> tuple[list[tuple[Request, object]], list[Request]]:
        """Chunks of about ``budget`` tokens: (request, what to wait for) of each, and the requests that are done."""
        started, done, turn = [], [], deque(sorted(self._queue, key=lambda p: p.request.priority))
        while turn and budget > 0:
            prefill = turn.popleft()
            if self.store.budget and self._awaits_another(prefill):
                continue
            tokens, ticket = self._advance(prefill)
            budget -= tokens
            if ticket is not None:
                started.append((prefill.request, ticket))
            self._queue.remove(prefill)
            if prefill.request.prefilled < len(prefill.request.prompt) - 1:
                self._queue.append(prefill)
                turn.append(prefill)
            else:
                done.append(prefill.request)
        return started, done

    def _awaits_another(self, prefill: _Prefill) -> bool:
        """Whether an earlier request is computing the very prefix that this one needs next."""
        if prefill.request.prompt_logprobs is not None:
            return False
        key = prefill.keys[prefill.next_cut]
        if self._find(prefill, key) is not None:
            return False
        return any(
            key == other.keys[other.next_cut]
            for other in self._queue
            if other.can_keep and other.order < prefill.order and other.request.priority <= prefill.request.priority
        )

    def _advance(self, prefill: _Prefill) -> tuple[int, object]:
        """One chunk, or a jump to the furthest prefix that the store has: (tokens computed, what to wait for)."""
        request = prefill.request
        if request.prefilled in (0, *prefill.cuts) and self._jump(prefill):
            return 0, None
        if request.prompt_logprobs is not None:
            return self._score(prefill)
        nearest = prefill.next_cut
        end = prefill.cuts[nearest]
        start, tokens, size = chunks(request.prefilled, end, self.sizes)[0]
        ticket = self.device.prefill(request.slot, tokens, size, prefill.drafting)
        request.prefilled = start + tokens
        if prefill.can_keep:
            prefill.segments.append((start, self.device.save(request.slot, start, size)))
            if request.prefilled == end:
                self._keep(prefill, nearest)
        return size, ticket

    def _score(self, prefill: _Prefill) -> tuple[int, object]:
        request, size = prefill.request, scored_size(self.sizes)
        tokens = min(size, len(request.prompt) - 1 - request.prefilled)
        ticket = self.device.score(request.slot, tokens, size)
        request.prefilled += tokens
        return size, ticket

    def _jump(self, prefill: _Prefill) -> bool:
        """Copies the longest known prefix into the slot; whether there was one that leads further."""
        request = prefill.request
        if not self.store.budget or request.prompt_logprobs is not None:
            return False
        if request.prefilled == 0:
            self.store.queries += 1
        for cut, key in reversed(list(zip(prefill.cuts, prefill.keys, strict=True))):
            if cut <= request.prefilled:
                return False
            found = self._find(prefill, key)
            if found is None:
                continue
            for prefix in found.chain():
                if prefix.length > request.prefilled:
                    for start, segment in prefix.segments:
                        self.device.load(request.slot, start, segment)
            self.device.restore(request.slot, found.length, found.snapshot)
            if not request.cached:
                self.store.hits += 1
            request.cached += found.length - request.prefilled
            self.statistics.cached_tokens += found.length - request.prefilled
            request.prefilled, prefill.parent, prefill.segments = found.length, found, []
            return True
        return False

    def _keep(self, prefill: _Prefill, at: int) -> None:
        snapshot = self.device.snapshot(prefill.request.slot)
        size = self.device.bytes(([arrays for _, arrays in prefill.segments], snapshot))
        cut, key = prefill.cuts[at], prefill.keys[at]
        prefill.parent = self.store.add(key, cut, prefill.parent, prefill.segments, snapshot, size)
        prefill.segments, prefill.can_keep = [], prefill.parent is not None
