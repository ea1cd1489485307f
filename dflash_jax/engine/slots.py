"""Which requests have slots and pages: admission from the queue, and what gives way when slots or pages run out."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan

from dflash_jax.engine.config import EngineConfig, copied_pages
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.pages import OnHost, Pages
from dflash_jax.engine.prefill import Prefiller
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.request import NO_SLOT, Request
from dflash_jax.engine.scheduler import DecodeScheduler
from dflash_jax.engine.statistics import Statistics
from dflash_jax.engine.turns import Turns, WaitingRequests

# Seconds that a client waits before another one gives up a slot for it.
SLOT_WAIT_S = 0.5


def added(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The sums of two pairs."""
    return a[0] + b[0], a[1] + b[1]


def _cached(request: Request) -> int:
    """The tokens in the caches of a request that decodes: all but the last one."""
    return len(request.prompt) + len(request.tokens) - 1


class Slots:
    """The slots of an engine, and the queue for them.

    Args:
        runner: The device's work.
        config: How the engine is set up.
        turns: The turns of clients.
        scheduler: Gets the requests that decode.
        statistics: Counts what is admitted and what gives way.
        collect: Reads the results of all steps.

    Attributes:
        waiting: The queue.
        free: Slots without a request.
        pages: The pages of the slots.
        prefix_cache: Prefixes of earlier prompts.
        prefiller: Gets the requests whose prompts are not in the caches.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        turns: Turns,
        scheduler: DecodeScheduler,
        statistics: Statistics,
        collect: Callable[[], None],
    ):
        self._runner, self._config, self._turns, self._scheduler = runner, config, turns, scheduler
        self._statistics, self._collect = statistics, collect
        self.waiting, self.free = WaitingRequests(turns), list(range(runner.slots))
        self._by_slot: dict[int, Request] = {}
        # When a copy may be tried again, after one for which the host had no memory.
        self._next_copy = 0.0
        self._snapshot_bytes: int | None = None
        self.pages = Pages(runner, self._make_room)
        self.prefix_cache = PrefixCache(config.prefix_bytes, config.prefix_host_bytes, self.pages)
        self.prefiller = Prefiller(runner, self.pages, self.prefix_cache, config, statistics)

    def assign(self) -> None:
        """Gives slots and pages to requests, as far as there are some, and takes them from those that give way."""
        self._share()
        self._requeue()
        self._swap_in()
        self._admit()

    def _make_room(self, slot: int, kinds: Sequence[int]) -> bool:
        """Takes pages of one of ``kinds`` from prefixes, or else from the last request after the one in a slot.

        Returns:
            False where there are none.
        """
        shard = self._runner.shard(slot)
        if self.prefix_cache.tiers.give_up_pages(shard, kinds):
            return True
        request = self._by_slot[slot]
        later = [r for r in self._in_shard(shard) if r.rank > request.rank]
        victims = [r for r in later if r.is_resident and any(self.pages.counts(r.slot)[kind] for kind in kinds)]
        if victims:
            self.swap_out(max(victims, key=lambda r: r.rank))
            return True
        # Then prefixes that it, or one that is swapped out, would have continued.
        has_stopped = [self.prefiller.stop_caching(r) for r in (request, *later)]
        return any(has_stopped)

    def _in_shard(self, shard: int) -> list[Request]:
        """The requests that have a slot of a data shard."""
        return [request for slot, request in self._by_slot.items() if self._runner.shard(slot) == shard]

    def swap_out(self, request: Request) -> None:
        """Copies a request's pages to the host, where they wait until there is room for them.

        Where the host has no memory left for them, they are given up, and the request computes its tokens again.
        """
        self._statistics.preemptions += 1
        self.prefiller.stop_caching(request)
        if not self._copy(request):
            self._give_up(request)

    def _copy(self, request: Request, length: int | None = None) -> bool:
        """Copies a request's pages to the host, and with a ``length`` its slot; False without memory for them there."""
        may_swap, copy = self._may_swap(request, length is not None), None
        while may_swap and (copy := self.pages.swap_out(request.slot, length)) is None:
            may_swap = self.prefix_cache.tiers.give_up_host_memory()
        request.swapped = copy
        return copy is not None

    def _may_swap(self, request: Request, leaves_slot: bool = False) -> bool:
        """Whether what a request has may wait on the host beside what waits there.

        Args:
            request: The request.
            leaves_slot: Whether a snapshot of its slot waits, too.
        """
        limit = self._config.swap_bytes
        if limit is None:
            return True
        copies = [r.swapped for r in (*self._by_slot.values(), *self.waiting) if isinstance(r.swapped, OnHost)]
        counts = [self.pages.counts(request.slot), *(copy.counts for copy in copies)]
        taken = sum(self.pages.bytes_of((copied_pages(full), copied_pages(windowed))) for full, windowed in counts)
        snapshots = leaves_slot + sum(copy.snapshot is not None for copy in copies)
        if snapshots and self._snapshot_bytes is None:
            self._snapshot_bytes = self._runner.bytes(self._runner.snapshot(request.slot))
        return taken + snapshots * (self._snapshot_bytes or 0) <= limit

    def _share(self) -> None:
        """Takes a slot from the client with the most, for one that has fewer than its share and waits for a while."""
        if self.free or not self.waiting:
            return
        request = self.waiting.first()
        if self._runner.clock - request.times.submitted < SLOT_WAIT_S:
            return
        held = Counter(each.client for each in self._by_slot.values())
        richest = max(held, key=lambda client: held[client])
        owned = [each for each in self._by_slot.values() if each.client == richest and each.is_resident]
        if held[request.client] + 1 >= held[richest] or not owned:
            return
        victim = max(owned, key=lambda each: each.rank)
        shard, promised = self._runner.shard(victim.slot), self._promised()
        freed = zip(self._need(request), self.pages.counts(victim.slot), strict=True)
        full, windowed = (max(0, need - own) for need, own in freed)
        # Otherwise the victim would get the slot again, or it would stay free.
        is_next = self.waiting.turn(request) < self.waiting.turn(victim)
        if not is_next or not self.pages.fits(shard, (full, windowed), promised[shard]):
            return
        # What is still prefilled has nothing that it would not compute again anyway.
        if self._config.recomputes_exactly or victim not in self._scheduler.requests:
            self._statistics.preemptions += 1
            self._give_up(victim)
        elif self._runner.can_run("prefix") and self._runner.clock >= self._next_copy:
            self._collect()
            if self.free or victim.finish_reason is not None:
                return
            if self.copy_out(victim):
                self._statistics.preemptions += 1
            else:
                self._next_copy = self._runner.clock + SLOT_WAIT_S

    def copy_out(self, request: Request) -> bool:
        """Copies all that a request that decodes has on the device to the host, for any slot.

        The results of all steps must be read.

        Returns:
            False where the host has no memory for it.
        """
        if is_copied := self._copy(request, _cached(request)):
            self._queue_again(request)
        return is_copied

    def give_up_all(self) -> None:
        """Takes the slots of all requests, and drops what they have anywhere. They compute all their tokens again.

        The results of all steps must be read.
        """
        for request in self._by_slot.values():
            self._give_up(request)
        for request in (*self._by_slot.values(), *self.waiting):
            request.swapped = None
        self._requeue()

    def _give_up(self, request: Request) -> None:
        """Gives up a request's pages without a copy."""
        self.prefiller.stop_caching(request)
        request.must_recompute = True
        self.pages.release(request.slot)

    def _requeue(self) -> None:
        """Queues requests whose pages are given up. They go on after their tokens, as if submitted with them."""
        if not any(request.must_recompute for request in self._by_slot.values()):
            return
        # Chunks in flight may bring log-probabilities of a prompt that is scored anew.
        self._collect()
        for request in [r for r in self._by_slot.values() if r.must_recompute]:
            request.must_recompute, request.prefilled, request.is_recomputed = False, 0, True
            if len(request.prompt_entries) < len(request.prompt) - 1:
                # Complete ones stay: others may be reading them with the first token.
                request.prompt_entries = []
            self._queue_again(request)

    def _queue_again(self, request: Request) -> None:
        """Takes a request's slot. It waits for another one, to go on after its tokens."""
        self.leave(request)
        request.slot, request.resumed = NO_SLOT, len(request.tokens)
        self.waiting.push(request)

    def _swap_in(self) -> None:
        """Brings pages back from the host where there is room for them beside the requests ahead."""
        for request in sorted((r for r in self._by_slot.values() if r.swapped is not None), key=lambda r: r.rank):
            copy = request.swapped
            assert isinstance(copy, OnHost)
            ahead = [r for r in self._in_shard(self._runner.shard(request.slot)) if r.rank < request.rank]
            taken = (0, 0)
            for other in ahead:
                if other.is_resident:
                    taken = added(taken, added(self.pages.counts(other.slot), self._lacking(other)))
            # With room to go on, so that it does not leave at once. Those after it leave where they must.
            needs = zip(self._need(request), copy.counts, taken, self.pages.pools, strict=True)
            if all(max(n, has) + others <= pool.count for n, has, others, pool in needs if max(n, has)):
                is_back = self.pages.swap_in(request.slot, copy, _cached(request))
                request.swapped = None if is_back else copy

    def _need(self, request: Request) -> tuple[int, int]:
        """Pages of both kinds that a request needs soon: for the tokens that it has, and for some new ones."""
        known = len(request.prompt) + len(request.tokens)
        return self.pages.need(min(known + self.pages.size, request.need))

    def _lacking(self, request: Request) -> tuple[int, int]:
        """What a request lacks of the pages that it needs soon."""
        has = self.pages.counts(request.slot)
        full, windowed = (max(0, n - own) for n, own in zip(self._need(request), has, strict=True))
        return full, windowed

    def _promised(self) -> dict[int, tuple[int, int]]:
        """By data shard, pages of both kinds that requests with a slot need soon."""
        promised: dict[int, tuple[int, int]] = dict.fromkeys(range(self._runner.shards), (0, 0))
        for slot, request in self._by_slot.items():
            if request.is_resident:
                shard = self._runner.shard(slot)
                promised[shard] = added(promised[shard], self._lacking(request))
        return promised

    def _admit(self) -> None:
        if not self.waiting or not self.free:
            return
        promised = self._promised()
        while self.waiting and self.free:
            request = self.waiting.first()
            # A slot of the data shard that has the most free ones.
            room, needs = Counter(self._runner.shard(s) for s in self.free), self._need(request)
            shards = [shard for shard in room if self.pages.fits(shard, needs, promised[shard])]
            slots = [s for s in self.free if self._runner.shard(s) in shards]
            if not slots:
                return
            self.waiting.remove(request)
            slot = max(slots, key=lambda s: (room[self._runner.shard(s)], -s))
            self.free.remove(slot)
            request.slot, self._by_slot[slot] = slot, request
            shard = self._runner.shard(slot)
            promised[shard] = added(promised[shard], needs)
            self._runner.admit(slot, request)
            if isnan(request.times.admitted):
                request.times = replace(request.times, admitted=self._runner.clock)
                self._statistics.prompt_tokens += len(request.prompt)
                self._turns.spend(request.client, len(request.prompt))
            if request.swapped is not None:
                # `_swap_in` brings what it had.
                self._scheduler.add(request)
            elif len(request.context) > 1:
                block_size = request.block_size
                self.prefiller.add(request, self._scheduler.is_drafting if block_size == "auto" else block_size > 1)
            else:
                self._scheduler.add(request)

    def leave(self, request: Request) -> None:
        """Frees a request's slot and pages, and takes it from prefill and decoding."""
        self.free.append(request.slot)
        del self._by_slot[request.slot]
        self.pages.release(request.slot)
        self._scheduler.remove(request)
        self.prefiller.remove(request)
