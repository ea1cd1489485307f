"""Prompts on their way into the caches: in chunks, in turn, and past what the store knows."""

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_jax.engine.model_runner import Device
from dflash_jax.engine.options import Options, Statistics
from dflash_jax.engine.prefix_cache import Prefix, PrefixCache, chunks, cut_points, keys
from dflash_jax.engine.request import Request

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
    """Runs chunks of prompts, of several together where they are short. Whoever had a turn goes behind the others of
    its priority."""

    def __init__(self, device: Device, store: PrefixCache, options: Options, statistics: Statistics):
        self.device, self.store, self.options, self.statistics = device, store, options, statistics
        self.sizes, self.padding, self.markers = options.prefill_sizes, options.prefill_padding, options.markers
        self._order = itertools.count()
        self._queue: deque[_Prefill] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, drafting: bool = True) -> None:
        """A request of two tokens or more that has a slot."""
        cuts = cut_points(request.prompt, len(request.prompt) - 1, self.markers)
        is_scored = request.prompt_logprobs is not None
        found, can_keep = keys(request.prompt, cuts, request.cache_salt), self.store.budget > 0 and not is_scored
        drafting = drafting and not is_scored
        if self.store.budget and not is_scored:
            self.store.queries += 1
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

    def rows(self, size: int) -> tuple[int, ...]:
        """Compiled numbers of prompts of a data shard, for chunks of ``size`` tokens: one, and as many as there may
        be."""
        return tuple(sorted({1, min(self.options.rows_of(size), self.device.slots // self.device.shards)}))

    def run(self, budget: int) -> tuple[list[tuple[Request, object]], list[Request]]:
        """Chunks of about ``budget`` tokens: (request, what to wait for) of each, and the requests that are done."""
        started, done, turn = [], [], deque(sorted(self._queue, key=lambda p: p.request.priority))
        while turn and budget > 0:
            prefill = turn.popleft()
            if self._awaits_another(prefill):
                continue
            group, tokens, ticket = self._advance(prefill, turn, budget)
            budget -= tokens
            for member in group:
                if ticket is not None:
                    started.append((member.request, ticket))
                self._queue.remove(member)
                if member is not prefill:
                    turn.remove(member)
                if member.request.prefilled < len(member.request.prompt) - 1:
                    self._queue.append(member)
                    turn.append(member)
                else:
                    done.append(member.request)
        return started, done

    def _awaits_another(self, prefill: _Prefill) -> bool:
        """Whether an earlier request is computing the very prefix that this one needs next."""
        if not self.store.budget or prefill.request.prompt_logprobs is not None:
            return False
        key = prefill.keys[prefill.next_cut]
        if self._find(prefill, key) is not None:
            return False
        return any(
            key == other.keys[other.next_cut]
            for other in self._queue
            if other.can_keep and other.order < prefill.order and other.request.priority <= prefill.request.priority
        )

    def _advance(self, prefill: _Prefill, others: Sequence[_Prefill], budget: int) -> tuple[list, int, object]:
        """A jump to the furthest prefix that the store has, or one chunk, with those of ``others`` that can go along:
        (who moved, tokens computed, what to wait for)."""
        if (known := self._known(prefill)) is not None:
            self._jump(prefill, known)
            return [prefill], 0, None
        if prefill.request.prompt_logprobs is not None:
            return [prefill], *self._score(prefill)
        size = self._chunk(prefill)[2]
        group = self._group(prefill, others, size, budget // size)
        found = [self._chunk(member) for member in group]
        slots = [member.request.slot for member in group]
        together = max(Counter(map(self.device.shard, slots)).values())
        rows = self.rows(size)[together > 1]
        ticket = self.device.prefill(slots, [tokens for _, tokens, _ in found], size, rows, prefill.drafting)
        for member, (start, tokens, _) in zip(group, found, strict=True):
            nearest = member.next_cut
            member.request.prefilled = start + tokens
            if member.can_keep:
                member.segments.append((start, self.device.save(member.request.slot, start, size)))
                if member.request.prefilled == member.cuts[nearest]:
                    self._keep(member, nearest)
        # Those of nobody are computed, too.
        return group, size * max(rows, len(group)), ticket

    def _chunk(self, prefill: _Prefill) -> tuple[int, int, int]:
        """The next one: (start, tokens, size of the program)."""
        return chunks(prefill.request.prefilled, prefill.cuts[prefill.next_cut], self.sizes, self.padding)[0]

    def _group(self, first: _Prefill, others: Sequence[_Prefill], size: int, most: int) -> list[_Prefill]:
        """``first`` and those of ``others``, of its priority, whose next chunk the same program takes, at most ``most``
        of them."""
        group, held, room = [first], Counter([self.device.shard(first.request.slot)]), self.rows(size)[-1]
        for other in others:
            shard = self.device.shard(other.request.slot)
            if (
                len(group) < most
                and held[shard] < room
                and other.drafting == first.drafting
                and other.request.priority == first.request.priority
                and other.request.prompt_logprobs is None
                and self._chunk(other)[2] == size
                and self._known(other) is None
                and not self._awaits_another(other)
            ):
                group.append(other)
                held[shard] += 1
        return group

    def _score(self, prefill: _Prefill) -> tuple[int, object]:
        request, size = prefill.request, scored_size(self.sizes)
        tokens = min(size, len(request.prompt) - 1 - request.prefilled)
        ticket = self.device.score(request.slot, tokens, size)
        request.prefilled += tokens
        return size, ticket

    def _known(self, prefill: _Prefill) -> Prefix | None:
        """The longest prefix in the store that leads further."""
        request = prefill.request
        if not self.store.budget or request.prompt_logprobs is not None:
            return None
        if request.prefilled not in (0, *prefill.cuts):
            return None
        for cut, key in reversed(list(zip(prefill.cuts, prefill.keys, strict=True))):
            if cut <= request.prefilled:
                break
            if (found := self._find(prefill, key)) is not None:
                return found
        return None

    def _jump(self, prefill: _Prefill, found: Prefix) -> None:
        """Copies a known prefix into the slot."""
        request = prefill.request
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

    def _keep(self, prefill: _Prefill, at: int) -> None:
        snapshot = self.device.snapshot(prefill.request.slot)
        size = self.device.bytes(([arrays for _, arrays in prefill.segments], snapshot))
        cut, key = prefill.cuts[at], prefill.keys[at]
        prefill.parent = self.store.add(key, cut, prefill.parent, prefill.segments, snapshot, size)
        prefill.segments, prefill.can_keep = [], prefill.parent is not None
