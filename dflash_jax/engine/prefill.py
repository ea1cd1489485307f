"""Prefill of prompts: in chunks, in turns, and from the prefix cache."""

import itertools
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dflash_jax.decoding.prefill import MediaChunk
from dflash_jax.engine.config import RECOMPUTE, EngineConfig
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.pages import Pages
from dflash_jax.engine.prefix_cache import Prefix, PrefixCache, PrefixKeys, chunks, cut_points, outside
from dflash_jax.engine.request import Request
from dflash_jax.engine.statistics import Statistics

# Tokens of a chunk with log-probabilities, at most: its logits are [tokens, V] in float32.
MAX_SCORED = 64
# Aligned blocks of an earlier run's tokens that a turn feeds.
RECOMPUTED_BLOCKS = 8


def scored_size(sizes: Sequence[int]) -> int:
    """The chunk size for log-probabilities of prompts, out of the prefill ``sizes``."""
    return max((s for s in sizes if s <= MAX_SCORED), default=sizes[0])


@dataclass(eq=False)
class _Prefill:
    """The prefill of one request.

    Attributes:
        request: The request.
        tokens: What is fed, all but the last token.
        end: Tokens in the caches at the end: more than those where blocks of an earlier run's tokens follow.
        order: Number of its arrival.
        drafting: Whether the drafter's context is filled too. Then only prefixes with the drafter's part can be used.
        cuts: Positions at which prefixes are cached.
        lasting: Those whose snapshots are not thinned out: the end of the first message, and where prompts part.
        keys: The cache keys of its prefixes.
        parent: The last cached prefix that was reached.
        can_cache: Whether what follows ``parent`` can still become a prefix.
        uses_cache: Whether it may share the pages of cached prefixes.
    """

    request: Request
    tokens: list[int]
    end: int
    order: int
    drafting: bool
    cuts: list[int]
    lasting: set[int]
    keys: PrefixKeys
    parent: Prefix | None = None
    can_cache: bool = True
    uses_cache: bool = True

    @property
    def next_cut(self) -> int:
        """The first cut that is not reached."""
        return self.cuts[bisect_right(self.cuts, self.request.prefilled)]

    @property
    def is_fed(self) -> bool:
        """Whether only blocks of an earlier run's tokens are left."""
        return self.request.prefilled >= len(self.tokens) - 1

    @property
    def has_media(self) -> bool:
        """Whether images or videos are left to prefill: then chunks run alone, with their rotary positions."""
        return self.request.media is not None and self.request.prefilled < self.request.media.end


class Prefiller:
    """Runs chunks of prompts, short ones together, of each client by turns.

    After its turn a prompt goes after the others of its client and priority.

    Args:
        runner: The device's work.
        pages: The pages of all slots.
        prefix_cache: Prefixes of earlier prompts.
        config: The engine's configuration.
        statistics: Gets the cached and the computed tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pages: Pages,
        prefix_cache: PrefixCache,
        config: EngineConfig,
        statistics: Statistics,
    ):
        self.runner, self.prefix_cache, self.config, self.statistics = runner, prefix_cache, config, statistics
        self._pages = pages
        self.sizes, self.padding = config.prefill_sizes, config.prefill_padding
        self._order = itertools.count()
        self._queue: deque[_Prefill] = deque()
        # The number of each client's last chunk, or of its arrival, while it has prompts here.
        self._last_turns: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request, drafting: bool = True) -> None:
        """Queues a request that has a slot and a prompt of two tokens or more; ``drafting``: for the drafter too."""
        tokens, end = request.context, len(request.context) - 1
        if self.runner.aligned:
            # As the earlier run fed its tokens: the bits are the same.
            tokens, size = request.prompt, self.runner.settings.block_size
            end = len(tokens) - 1 + request.resumed // size * size
        spacing, aligned = self.config.cut_spacing, self.runner.aligned
        cuts = cut_points(tokens, len(tokens) - 1, self.config.markers, spacing, request.media, aligned)
        is_scored = request.prompt_logprobs is not None
        uses_cache = self.prefix_cache.budget > 0 and not is_scored
        drafting = drafting and not is_scored
        has_media = request.media is not None
        if not self._sizes(drafting, has_media) and self._sizes(not drafting, has_media):
            drafting = not drafting
        keys = PrefixKeys(tokens[:-1] if uses_cache else (), request.cache_salt, request.media, drafting)
        lasting = {next((cut for cut in cuts if tokens[cut] in self.config.markers), 0)}
        if not aligned and uses_cache and (parting := self._parting(keys, request)):
            lasting.add(parting)
            cuts = sorted({*cuts, parting})
        order = next(self._order)
        prefill = _Prefill(request, tokens, end, order, drafting, cuts, lasting, keys, can_cache=uses_cache)
        self._queue.append(prefill)
        self._last_turns.setdefault(request.client, order)

    def _parting(self, keys: PrefixKeys, request: Request) -> int:
        """Where a prompt parts from a cached one, if it cannot be restored up to there; otherwise 0.

        With a cut there, prompts that follow with the same beginning can be.
        """
        longest = self.prefix_cache.longest(keys, 0)
        start = longest.length if longest else 0
        parting = outside(self.prefix_cache.shared(keys), start, request.media)
        return parting if start + self.config.cut_spacing[0] <= parting < len(keys) else 0

    def _sizes(self, drafting: bool, has_media: bool) -> list[int]:
        """Chunk sizes of the programs that may run."""
        kind = ("media",) if has_media else ("prefill", 1)
        return [size for size in self.sizes if self.runner.can_run(*kind, size, drafting)]

    def remove(self, request: Request) -> None:
        """Drops a request."""
        for prefill in [p for p in self._queue if p.request is request]:
            self._continue_from(prefill, None)
            self._queue.remove(prefill)

    def stop_caching(self, request: Request) -> bool:
        """Lets the prefixes go that a request's next one would continue; False where it has none."""
        has_parent = False
        for prefill in self._queue:
            if prefill.request is request:
                has_parent = prefill.parent is not None
                prefill.can_cache = False
                self._continue_from(prefill, None)
        return has_parent

    def batch_sizes(self, size: int) -> tuple[int, ...]:
        """Compiled batch sizes of a data shard for chunks of ``size`` tokens: one prompt, and the largest number."""
        return tuple(sorted({1, min(self.config.prefill_batch(size), self.runner.slots // self.runner.shards)}))

    def run(self, budget: int) -> tuple[list[tuple[Request, object]], list[Request]]:
        """Starts chunks of about ``budget`` tokens.

        Returns:
            (request, ticket of the runner) of each chunk, and the requests whose prefill is complete.
        """
        clients = {prefill.request.client for prefill in self._queue}
        self._last_turns = {each: self._last_turns[each] for each in clients}

        def turn(prefill: _Prefill) -> tuple[int, int, int]:
            request = prefill.request
            return request.level, self._last_turns[request.client], request.priority

        started, complete, turns = [], [], list(self._queue)
        while turns and budget > 0:
            prefill = min(turns, key=turn)
            turns.remove(prefill)
            if not prefill.request.is_resident:
                continue
            if self._awaits_another(prefill) or not self._can_advance(prefill):
                continue
            batch, tokens, ticket = self._advance(prefill, turns, budget)
            budget -= tokens
            self.statistics.prefilled_tokens += tokens
            for member in batch:
                self._last_turns[member.request.client] = next(self._order)
                if ticket is not None:
                    started.append((member.request, ticket))
                self._queue.remove(member)
                if member is not prefill:
                    turns.remove(member)
                if member.request.prefilled < member.end:
                    self._queue.append(member)
                    turns.append(member)
                else:
                    self._continue_from(member, None)
                    complete.append(member.request)
        return started, complete

    def waiting(self) -> list[tuple[str, Request]]:
        """(kind of program, request) of the requests that wait for a program."""
        return [(self._kind(p), p.request) for p in self._queue if not self._can_advance(p)]

    def _kind(self, prefill: _Prefill) -> str:
        """The kind of program for the next chunk, as `ModelRunner.can_run` takes it."""
        if prefill.is_fed:
            return "decode"
        if prefill.request.prompt_logprobs is not None:
            return "media score" if prefill.has_media else "score"
        return "media" if prefill.has_media else "prefill"

    def _can_advance(self, prefill: _Prefill) -> bool:
        """Whether the program for the next chunk may run."""
        kind = self._kind(prefill)
        if kind == "decode":
            return self.runner.can_run(kind, 1, RECOMPUTE)
        if prefill.request.prompt_logprobs is not None:
            return self.runner.can_run(kind)
        return bool(self._sizes(prefill.drafting, prefill.has_media))

    def _awaits_another(self, prefill: _Prefill) -> bool:
        """Whether an earlier request is computing the prefix that this one needs next."""
        if not self.prefix_cache.budget or prefill.is_fed or prefill.request.prompt_logprobs is not None:
            return False
        if self._cached(prefill) is not None:
            return False
        cut = prefill.next_cut
        return any(
            prefill.keys.of(cut) == other.keys.of(cut)
            for other in self._queue
            if other.can_cache
            and other.request.is_resident
            and not other.is_fed
            and other.next_cut == cut
            and self._can_advance(other)
            and other.order < prefill.order
            and other.request.level <= prefill.request.level
            and (other.request.client != prefill.request.client or other.request.priority <= prefill.request.priority)
        )

    def _advance(self, prefill: _Prefill, others: Sequence[_Prefill], budget: int) -> tuple[list, int, object]:
        """Shares the longest cached prefix, or runs one chunk together with those of ``others`` that fit.

        Returns:
            The prefills that advanced (none where pages are missing), the tokens computed, and the runner's ticket or
            None.
        """
        if prefill.is_fed:
            return self._recompute(prefill)
        if (prefix := self._cached(prefill)) is not None:
            return [prefill] if self._copy(prefill, prefix) else [], 0, None
        if prefill.request.prompt_logprobs is not None:
            return self._score(prefill)
        size = self._chunk(prefill)[2]
        batch = self._batch(prefill, others, size, budget // size)
        # To give one its pages may take them from another.
        covered = []
        for member in batch:
            if member.request.is_resident and self._cover(member.request, sum(self._chunk(member)[:2])):
                covered.append(member)
        batch = [member for member in covered if member.request.is_resident]
        if not batch:
            return [], 0, None
        self._pages.send()
        next_chunks = [self._chunk(member) for member in batch]
        slots = [member.request.slot for member in batch]
        largest = max(Counter(map(self.runner.shard, slots)).values())
        compiled = 1 if largest == 1 else self.batch_sizes(size)[-1]
        counts = [tokens for _, tokens, _ in next_chunks]
        ticket = self.runner.prefill(slots, counts, size, compiled, prefill.drafting, self._media(prefill, size))
        for member, (start, tokens, _) in zip(batch, next_chunks, strict=True):
            if start == 0 and member.can_cache:
                self.prefix_cache.tiers.count(None)
            member.can_cache = member.can_cache and self.runner.can_run("prefix")
            is_cut = start + tokens == member.next_cut
            member.request.prefilled = start + tokens
            if member.can_cache and is_cut:
                self._cache(member)
        # Padding is computed too.
        return batch, size * max(compiled, len(batch)), ticket

    def _chunk(self, prefill: _Prefill) -> tuple[int, int, int]:
        """The next chunk: (start, tokens, size of the program)."""
        return chunks(
            prefill.request.prefilled,
            prefill.next_cut,
            self._sizes(prefill.drafting, prefill.has_media),
            self.padding,
        )[0]

    def _media(self, prefill: _Prefill, size: int) -> MediaChunk | None:
        """The images and videos of the next chunk; None where only text is left."""
        if not prefill.has_media:
            return None
        assert prefill.request.media is not None
        return MediaChunk(*prefill.request.media.chunk(prefill.request.prefilled, size, *self.runner.embedding))

    def _batch(self, first: _Prefill, others: Sequence[_Prefill], size: int, limit: int) -> list[_Prefill]:
        """``first`` and those of ``others`` that run with it, ``limit`` in all at most.

        Those are of the same level, and the program of ``size`` tokens takes their next chunk.
        """
        batch, room = [first], self.batch_sizes(size)[-1]
        if first.has_media:
            return batch
        if not self.runner.can_run("prefill", room, size, first.drafting):
            room = 1
        used = Counter([self.runner.shard(first.request.slot)])
        for other in others:
            shard = self.runner.shard(other.request.slot)
            if (
                len(batch) < limit
                and used[shard] < room
                and other.drafting == first.drafting
                and other.request.level == first.request.level
                and other.request.prompt_logprobs is None
                and other.request.is_resident
                and not other.has_media
                and not other.is_fed
                and self._chunk(other)[2] == size
                and self._cached(other) is None
                and not self._awaits_another(other)
            ):
                batch.append(other)
                used[shard] += 1
        return batch

    def _cover(self, request: Request, end: int) -> bool:
        """Gives a request the pages for its prompt up to ``end``; False where they are missing."""
        return self._pages.cover(request.slot, end, end)

    def _recompute(self, prefill: _Prefill) -> tuple[list, int, object]:
        request, size = prefill.request, self.runner.settings.block_size
        blocks = min(RECOMPUTED_BLOCKS, (prefill.end - request.prefilled) // size)
        if not self._pages.cover(request.slot, request.prefilled, request.prefilled + blocks * size):
            return [], 0, None
        self._pages.send()
        request.prefilled += blocks * size
        return [prefill], blocks * size, self.runner.recompute(request.slot, blocks)

    def _score(self, prefill: _Prefill) -> tuple[list, int, object]:
        request, size = prefill.request, scored_size(self.sizes)
        tokens = min(size, len(prefill.tokens) - 1 - request.prefilled)
        if not self._cover(request, request.prefilled + tokens):
            return [], 0, None
        self._pages.send()
        ticket = self.runner.score(request.slot, tokens, size, self._media(prefill, size))
        request.prefilled += tokens
        return [prefill], size, ticket

    def _cached(self, prefill: _Prefill) -> Prefix | None:
        """The longest cached prefix that is longer than what is prefilled."""
        request = prefill.request
        if not self.prefix_cache.budget or request.prompt_logprobs is not None or not prefill.uses_cache:
            return None
        # What other cuts have computed may differ in its last bits.
        lengths = prefill.cuts if self.runner.aligned else None
        return self.prefix_cache.longest(prefill.keys, request.prefilled, lengths)

    def _copy(self, prefill: _Prefill, prefix: Prefix) -> bool:
        """Lets the slot share the pages of a cached prefix; False where pages are missing."""
        request, cache, pages = prefill.request, self.prefix_cache, self._pages
        slot, shard = request.slot, self.runner.shard(request.slot)
        cache.pin(prefix)
        has_room = self._has_room_for(prefix, request)
        if has_room:
            if not request.cached and not request.is_recomputed:
                cache.tiers.count(cache.is_on_device(prefix, request.prefilled))
            self._continue_from(prefill, prefix)
        else:
            prefill.uses_cache = False
        cache.unpin(prefix)
        if not has_room:
            return False
        snapshot = None
        for piece, may_stay in cache.parts(prefix, request.prefilled):
            kept, is_piece = cache.tiers.on_device(piece, shard, may_stay)
            own = kept if kept.shard == shard else pages.in_shard(kept, shard)
            pages.adopt(slot, own)
            snapshot = own.snapshot
            if own is not kept:
                pages.drop(own)
            if not is_piece:
                pages.drop(kept)
        pages.own(slot, prefix.length)
        pages.send()
        self.runner.restore(slot, prefix.length, snapshot)
        if not request.is_recomputed:
            cached = min(request.cached + prefix.length - request.prefilled, len(request.prompt))
            self.statistics.cached_tokens += cached - request.cached
            request.cached = cached
        request.prefilled = prefix.length
        return True

    def _has_room_for(self, prefix: Prefix, request: Request) -> bool:
        """Makes the pages free that `_copy` takes; False where that is not possible."""
        shard = self.runner.shard(request.slot)

        def needed() -> tuple[int, int]:
            is_partial = prefix.length % self._pages.size > 0
            full, windowed = int(is_partial), int(is_partial)
            for piece, _ in self.prefix_cache.parts(prefix, request.prefilled):
                if piece.device is None or piece.device.shard != shard:
                    kept = piece.host if piece.device is None else piece.device
                    full, windowed = full + len(kept.pages), windowed + len(kept.windowed)
            return full, windowed if self._pages.pools[1].count else 0

        before = None
        while (now := needed()) != before:
            # Parts of the prefix itself may have left the device.
            if not self._pages.has_room(request.slot, *now):
                return False
            before = now
        return True

    def _cache(self, prefill: _Prefill) -> None:
        """Adds what is prefilled, up to a cut, to the cache."""
        slot, end = prefill.request.slot, prefill.request.prefilled
        start = prefill.parent.length if prefill.parent else 0
        segments, snapshot = self._pages.of_slot(slot, start, end), self._pages.snapshot(slot, end)
        sizes = self._pages.bytes(segments), self._pages.bytes(snapshot)
        key, digests = prefill.keys.of(end), prefill.keys.block_digests(start, end)
        may_thin = end not in prefill.lasting
        prefix = self.prefix_cache.add(key, prefill.parent, segments, snapshot, *sizes, digests, may_thin)
        prefill.can_cache = prefix is not None
        self._continue_from(prefill, prefix)

    def _continue_from(self, prefill: _Prefill, prefix: Prefix | None) -> None:
        """Pins the prefix that the next one will continue, in place of the one before."""
        if prefix is not None:
            self.prefix_cache.pin(prefix)
        if prefill.parent is not None:
            self.prefix_cache.unpin(prefill.parent)
        prefill.parent = prefix
