"""The engine: requests in, token events out."""

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import isnan

from dflash_jax.engine.config import EngineConfig, copied_pages
from dflash_jax.engine.dispatch import Dispatch, Outcome, StepTicket
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.masking import WAIT_S as MASK_WAIT_S
from dflash_jax.engine.masking import Masking, RoundOfMasks
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.pages import OnHost, Pages
from dflash_jax.engine.prefill import Prefiller
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.request import NO_SLOT, Event, Request, RequestLimits, Times
from dflash_jax.engine.results import Results, as_failure, reason, take_scores
from dflash_jax.engine.scheduler import DecodeScheduler
from dflash_jax.engine.statistics import Statistics
from dflash_jax.engine.turns import NEW_TOKEN, Turns, WaitingRequests
from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError

log = logging.getLogger("dflash_jax")

# Seconds that a step without other work waits for a late mask, or for a program that is being compiled.
WAIT_S = 0.005
# Seconds that a client waits before another one gives up a slot for it.
SLOT_WAIT_S = 0.5
# Requests that may have a slot or wait, if many clients use their shares, over those of one client.
MOST_SHARES = 2


def added(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The sums of two pairs."""
    return a[0] + b[0], a[1] + b[1]


class Engine:
    """Runs many requests over the slots of one `ModelRunner`: `submit`, then `step` while `has_work`.

    A step starts the device's next work and then reads the results of the step before, so that the host works while
    the device is busy. Requests join and leave between steps. One thread at a time may use an engine.

    Args:
        runner: The device's work.
        config: How the engine is set up.
        policy: Chooses block sizes and drafters; None: one that predicts the same cost for all.

    Attributes:
        runner: The device's work.
        config: How the engine is set up.
        limits: What a request may ask for.
        pages: The pages of the slots.
        prefix_cache: Prefixes of earlier prompts.
        policy: Chooses block sizes and drafters.
        statistics: Totals since the engine was made.
        failure: Why the device failed; None while it works.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, policy: DraftLengthPolicy | None = None):
        self.runner, self.config = runner, config
        self.limits = RequestLimits(runner.capacity, config.largest_block)
        self.policy = policy or DraftLengthPolicy(config.speculations)
        self.statistics = Statistics()
        self.failure: str | None = None
        self._order = itertools.count()
        self._clear()

    def _clear(self) -> None:
        # Requests that have not ended, in the order of arrival.
        self._live: dict[Request, None] = {}
        self._turns = Turns()
        self._waiting = WaitingRequests(self._turns)
        self._by_slot: dict[int, Request] = {}
        self.pages = Pages(self.runner, self._make_room)
        self.prefix_cache = PrefixCache(self.config.prefix_bytes, self.config.prefix_host_bytes, self.pages)
        self._prefiller = Prefiller(self.runner, self.pages, self.prefix_cache, self.config, self.statistics)
        self._scheduler = DecodeScheduler(self.runner, self.config, self.policy)
        self._masking = Masking(self.runner.mask_words, self.runner.aligned, self._fail_one)
        self._results = Results(
            self.runner, self._scheduler, self._masking, self.prefix_cache, self.statistics, self._end
        )
        self._free = list(range(self.runner.slots))
        self._tickets: deque[StepTicket] = deque()
        # The step that was read last, whose events are not made yet.
        self._outcome: tuple[StepTicket, Outcome] | None = None
        # Events of ends outside of the results, returned by the next step.
        self._events: list[Event] = []
        self._last_done = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting or self._prefiller or self._scheduler.requests or self._tickets or self._events)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._prefiller) + len(self._scheduler.requests)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests in the queue."""
        return sum(len(request.prompt) for request in self._waiting)

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return len(self._free)

    @property
    def swapped(self) -> int:
        """Requests whose pages are on the host."""
        return sum(request.swapped is not None for request in list(self._live))

    @property
    def usage(self) -> float:
        """The share of the pages that requests use."""
        return self.pages.usage

    @property
    def positions(self) -> int:
        """Positions of all pages, in caches that keep all positions."""
        return self.pages.pools[0].count * self.runner.shards * self.pages.size

    def prefill_batches(self, size: int) -> tuple[int, ...]:
        """Compiled batch sizes of a data shard for chunks of ``size`` tokens."""
        return self._prefiller.batch_sizes(size)

    def check(self, request: Request) -> None:
        """Raises InputError for a request that can never run on this engine."""
        r = request
        self.limits.check(r.prompt, r.params, r.block_size, r.stops, r.prompt_logprobs)

    def check_queue(self, unfinished: Mapping[Hashable, int], client: Hashable, new: int = 1) -> None:
        """Checks that further requests may wait: all that have not ended have a slot or a place in the queue.

        A client has room for its share of the places at least, if others have taken them.

        Args:
            unfinished: Requests that have not ended, by client.
            client: Whose requests the further ones are.
            new: How many.

        Raises:
            InputError: There are never so many places.
            QueueFullError: There are not as many now.
        """
        if self.config.max_queue is None:
            return
        places = self.config.max_queue + self.runner.slots
        if new > places:
            slots = f"{self.runner.slots} slots and {self.config.max_queue} places in the queue"
            raise InputError(f"{new} sequences at once do not fit into {slots}: at most {places} do")
        total, own = sum(unfinished.values()), unfinished.get(client, 0)
        share = places // len({*unfinished, client})
        if (own + new > share and total + new > places) or total + new > MOST_SHARES * places:
            waiting = max(0, total - self.runner.slots)
            whose = f"; this client has {own} of {total}, and its share is {share}" if own < total else ""
            raise QueueFullError(f"{waiting} requests are waiting: {self.config.max_queue} may{whose}")

    def submit(self, request: Request, has_place: bool = False) -> None:
        """Queues a request. One that has tokens already goes on after them.

        Args:
            request: The request.
            has_place: Whether it has a place in the queue, which is not checked then.

        Raises:
            InputError: The request can never run.
            QueueFullError: The queue is full.
            UnavailableError: The device has failed; `restart` helps.
        """
        if self.failure is not None:
            raise UnavailableError(self.failure)
        self.check(request)
        if not has_place:
            self.check_queue(self._turns.active, request.client)
        request.resumed = len(request.tokens)
        if request.tokens and request.mask is not None:
            self._results.advance_mask(request, request.tokens)
        request.times = Times(self.runner.clock)
        request.order = next(self._order)
        request.level = request.priority if self.config.trusts_priority else 0
        self._live[request] = None
        self._turns.begin(request.client)
        self._waiting.push(request)

    def abort(self, request: Request) -> None:
        """Ends a request at any stage. Its only further event has the finish reason "abort"."""
        if request not in self._live:
            return
        self._events.append(self._end(request, "abort"))

    def flush(self) -> bool:
        """Clears the prefix cache. Does nothing, and returns False, while there are requests."""
        if self._live:
            return False
        self.prefix_cache.clear()
        return True

    def step(self) -> list[Event]:
        """Starts the next work, and returns the events of the step before.

        A failure of the device ends all requests: their events have the error.

        Raises:
            EngineError: The device has failed before.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        began, waited = self.runner.clock, self.statistics.wait_s
        try:
            launched = self._launch()
            results = self._collect(keep=1 if launched else 0)
        except InputError:
            raise
        except Exception as e:
            log.exception("the device failed")
            return self._fail(e)
        if not (launched or results or self._events) and self._lacks_program():
            time.sleep(WAIT_S)
        self.statistics.host_s += self.runner.clock - began - (self.statistics.wait_s - waited)
        events, self._events = self._events, []
        return events + results

    def _lacks_program(self) -> bool:
        """Whether requests wait for a program that is being compiled; ends those for which it cannot be."""
        masked = [] if self._scheduler.can_mask() else [r for r in self._scheduler.requests if r.mask]
        waiting = [("masked", request) for request in masked] + self._prefiller.waiting()
        for kind, request in waiting:
            if self.runner.has_failed(kind):
                self._fail_one(request, EngineError("the program for this request cannot be compiled"))
        return bool(waiting)

    def _fail(self, error: Exception) -> list[Event]:
        """Ends all requests. Nothing is started until `restart`."""
        self.failure = reason(error)
        failure = EngineError(self.failure)
        events = self._events + [self._end(r, "error", error=failure) for r in list(self._live)]
        self._clear()
        return events

    def close(self) -> None:
        """Closes the requests that have not ended, where no step follows."""
        for request in self._live:
            request.close()

    def restart(self) -> None:
        """Empties the engine after a failure."""
        self.runner.reset()
        self._clear()
        self.failure = None

    def _launch(self) -> bool:
        """Starts the device's next work; False where there is none."""
        self._share_slots()
        self._requeue()
        self._swap_in()
        self._admit()
        started, prefills = self.runner.clock, self._prefill()
        batch, dispatch, handle = self._decode()
        if not prefills and dispatch is None:
            return False
        self._tickets.append(StepTicket(prefills, batch, dispatch, handle, started))
        return True

    def _make_room(self, slot: int, kinds: Sequence[int]) -> bool:
        """Takes pages of one of ``kinds`` from prefixes, or else from the last request after the one in a slot.

        Returns:
            False where there are none.
        """
        shard = self.runner.shard(slot)
        if self.prefix_cache.tiers.give_up_pages(shard, kinds):
            return True
        request = self._by_slot[slot]
        later = [r for r in self._in_shard(shard) if r.rank > request.rank]
        victims = [r for r in later if r.is_resident and any(self.pages.counts(r.slot)[kind] for kind in kinds)]
        if victims:
            self._swap_out(max(victims, key=lambda r: r.rank))
            return True
        # Then prefixes that it, or one that is swapped out, would have continued.
        has_stopped = [self._prefiller.stop_caching(r) for r in (request, *later)]
        return any(has_stopped)

    def _in_shard(self, shard: int) -> list[Request]:
        """The requests that have a slot of a data shard."""
        return [request for slot, request in self._by_slot.items() if self.runner.shard(slot) == shard]

    def _swap_out(self, request: Request) -> None:
        """Copies a request's pages to the host, where they wait until there is room for them.

        Where the host has no memory left for them, they are given up, and the request computes its tokens again.
        """
        self.statistics.preemptions += 1
        self._prefiller.stop_caching(request)
        may_swap, copy = self._may_swap(request), None
        while may_swap and (copy := self.pages.swap_out(request.slot)) is None:
            may_swap = self.prefix_cache.tiers.give_up_host_memory()
        request.swapped = copy
        if copy is None:
            self._give_up(request)

    def _may_swap(self, request: Request) -> bool:
        """Whether a request's pages may wait on the host beside those that do."""
        copies = [r.swapped for r in self._live if isinstance(r.swapped, OnHost)]
        counts = [self.pages.counts(request.slot), *(copy.counts for copy in copies)]
        limit = self.config.swap_bytes
        taken = sum(self.pages.bytes_of((copied_pages(full), copied_pages(windowed))) for full, windowed in counts)
        return limit is None or taken <= limit

    def _share_slots(self) -> None:
        """Takes a slot from the client with the most, for one that has fewer than its share and waits for a while."""
        if self._free or not self._waiting:
            return
        request = self._waiting.first()
        if self.runner.clock - request.times.submitted < SLOT_WAIT_S:
            return
        held = Counter(each.client for each in self._by_slot.values())
        richest = max(held, key=lambda client: held[client])
        owned = [each for each in self._by_slot.values() if each.client == richest and each.is_resident]
        if held[request.client] + 1 >= held[richest] or not owned:
            return
        victim = max(owned, key=lambda each: each.rank)
        shard, promised = self.runner.shard(victim.slot), self._promised()
        freed = zip(self._need(request), self.pages.counts(victim.slot), strict=True)
        full, windowed = (max(0, need - own) for need, own in freed)
        # Otherwise the victim would get the slot again, or it would stay free.
        is_next = self._waiting.turn(request) < self._waiting.turn(victim)
        if not is_next or not self.pages.fits(shard, (full, windowed), promised[shard]):
            return
        if not self.config.recomputes_exactly:
            if not (self.runner.can_run("prefix") and self._may_swap(victim)):
                return
            self._events += self._collect(keep=0)
            if victim.finish_reason is not None or (victim.tokens and not self._copy_out(victim)):
                return
        self.statistics.preemptions += 1
        if victim.swapped is None:
            self._give_up(victim)

    def _copy_out(self, request: Request) -> bool:
        """Copies all that a request has on the device to the host, for any slot; False without memory for it there."""
        request.swapped = self.pages.swap_out(request.slot, leaves_slot=True)
        if request.swapped is None:
            return False
        self._queue_again(request)
        return True

    def _give_up(self, request: Request) -> None:
        """Gives up a request's pages without a copy."""
        self._prefiller.stop_caching(request)
        request.must_recompute = True
        self.pages.release(request.slot)

    def _requeue(self) -> None:
        """Queues requests whose pages are given up. They go on after their tokens, as if submitted with them."""
        if not any(request.must_recompute for request in self._by_slot.values()):
            return
        # Chunks in flight may bring log-probabilities of a prompt that is scored anew.
        self._events += self._collect(keep=0)
        for request in [r for r in self._by_slot.values() if r.must_recompute]:
            request.must_recompute, request.prefilled, request.is_recomputed = False, 0, True
            if len(request.prompt_entries) < len(request.prompt) - 1:
                # Complete ones stay: others may be reading them with the first token.
                request.prompt_entries = []
            self._queue_again(request)

    def _queue_again(self, request: Request) -> None:
        """Takes a request's slot. It waits for another one, to go on after its tokens."""
        self._leave_slot(request)
        request.slot, request.resumed = NO_SLOT, len(request.tokens)
        self._waiting.push(request)

    def _swap_in(self) -> None:
        """Brings pages back from the host where there is room for them beside the requests ahead."""
        for request in sorted((r for r in self._by_slot.values() if r.swapped is not None), key=lambda r: r.rank):
            copy = request.swapped
            assert isinstance(copy, OnHost)
            ahead = [r for r in self._in_shard(self.runner.shard(request.slot)) if r.rank < request.rank]
            taken = (0, 0)
            for other in ahead:
                if other.is_resident:
                    taken = added(taken, added(self.pages.counts(other.slot), self._lacking(other)))
            # With room to go on, so that it does not leave at once. Those after it leave where they must.
            needs = zip(self._need(request), copy.counts, taken, self.pages.pools, strict=True)
            if all(max(n, has) + others <= pool.count for n, has, others, pool in needs if max(n, has)):
                # The last token is in no cache.
                length = len(request.prompt) + len(request.tokens) - 1
                request.swapped = None if self.pages.swap_in(request.slot, copy, length) else copy

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
        promised: dict[int, tuple[int, int]] = dict.fromkeys(range(self.runner.shards), (0, 0))
        for slot, request in self._by_slot.items():
            if request.is_resident:
                shard = self.runner.shard(slot)
                promised[shard] = added(promised[shard], self._lacking(request))
        return promised

    def _admit(self) -> None:
        if not self._waiting or not self._free:
            return
        promised = self._promised()
        while self._waiting and self._free:
            request = self._waiting.first()
            # A slot of the data shard that has the most free ones.
            room, needs = Counter(self.runner.shard(s) for s in self._free), self._need(request)
            shards = [shard for shard in room if self.pages.fits(shard, needs, promised[shard])]
            slots = [s for s in self._free if self.runner.shard(s) in shards]
            if not slots:
                return
            self._waiting.remove(request)
            slot = max(slots, key=lambda s: (room[self.runner.shard(s)], -s))
            self._free.remove(slot)
            request.slot, self._by_slot[slot] = slot, request
            shard = self.runner.shard(slot)
            promised[shard] = added(promised[shard], needs)
            self.runner.admit(slot, request)
            if isnan(request.times.admitted):
                request.times = replace(request.times, admitted=self.runner.clock)
                self.statistics.prompt_tokens += len(request.prompt)
                self._turns.spend(request.client, len(request.prompt))
            if request.swapped is not None:
                # `_swap_in` brings what it had.
                self._scheduler.add(request)
            elif len(request.context) > 1:
                block_size = request.block_size
                self._prefiller.add(request, self._scheduler.is_drafting if block_size == "auto" else block_size > 1)
            else:
                self._scheduler.add(request)

    def _prefill(self) -> list[tuple[Request, object]]:
        """Starts prefill chunks, of the tokens that a step has left beside one decoding round."""
        if not self._prefiller:
            return []
        decoding = len(self._scheduler.requests) * self.config.largest_block
        budget = self.config.max_num_batched_tokens - decoding
        started, complete = self._prefiller.run(max(budget, self.config.prefill_sizes[0]))
        for request in complete:
            self._scheduler.add(request)
        return started

    def _decode(self) -> tuple[list[Request], Dispatch | None, object]:
        """Starts a dispatch: (its batch, the dispatch, the runner's ticket)."""
        if any(r.mask for r in self._scheduler.requests):
            # A mask depends on all tokens before it. The events of the last step wait until the device has work.
            self._events += self._collect(keep=1)
            if self._tickets:
                self._events += self._read()
            if self.runner.aligned:
                # The place of a draft in its block counts from the tokens that are known.
                self._events += self._rest()
        can_mask = self._scheduler.can_mask()
        late = [r for r in self._scheduler.requests if r.mask and not (can_mask and not self._masking.is_late(r))]
        absent = [r for r in self._scheduler.requests if not r.is_resident]
        while batch := self._scheduler.batch(late + absent):
            dispatch = self._scheduler.plan(batch)
            if any(r.mask for r in batch):
                dispatch = replace(dispatch, rounds=1)
            # In their order, so that pages are taken from the last.
            for request in sorted(batch, key=lambda r: r.rank):
                if request.is_resident and not self._cover(request, dispatch):
                    absent.append(request)
            absent += [r for r in batch if r not in absent and not r.is_resident]
            if not any(r in absent for r in batch):
                break
        if not batch:
            self._events += self._rest()
            if late and not self._prefiller:
                self._masking.wait(late, WAIT_S)
            return [], None, None
        self.pages.send()
        for request in batch:
            request.ahead += dispatch.most_tokens
        if any(r.mask for r in batch):
            # Prefill does not wait for masks either.
            wait_s = 0.0 if self._prefiller else MASK_WAIT_S
            masks = RoundOfMasks(self._masking, batch, wait_s, lambda: self._events.extend(self._rest()))
            handle = self.runner.decode_masked(dispatch, masks)
            if not self._prefiller and all(r.finish_reason is None for r in batch):
                self.runner.propose_next(dispatch)
            return batch, dispatch, handle
        handle = self.runner.decode(dispatch)
        self._events += self._rest()
        return batch, dispatch, handle

    def _cover(self, request: Request, dispatch: Dispatch) -> bool:
        """Gives a request the pages that a dispatch may write; False where they are missing."""
        known = len(request.prompt) + len(request.tokens)
        most = min(known + request.ahead + dispatch.most_tokens, request.need)
        # The last token is in no cache.
        return self.pages.cover(request.slot, known - 1, most - 1)

    def _collect(self, keep: int) -> list[Event]:
        """Reads the results of all steps but the last ``keep``."""
        events = []
        while len(self._tickets) > keep:
            events += self._read() + self._rest()
        return events

    def _read(self) -> list[Event]:
        """Reads the results of the oldest step: masks advance, and requests that end have their events.

        `_rest` has the other events.
        """
        assert self._outcome is None, "the rest of the last results is not taken"
        ticket, began, events = self._tickets.popleft(), self.runner.clock, []
        for request, handle in ticket.prefills:
            if request.prompt_logprobs is None or len(request.prompt_entries) == len(request.prompt) - 1:
                self.runner.wait(handle)
            else:
                take_scores(request, self.runner.read_scores(handle))
            if isnan(request.times.first_token):
                request.times = replace(request.times, prefilled=self.runner.clock)
        if ticket.dispatch is None:
            self.statistics.wait_s += self.runner.clock - began
            self._last_done = self.runner.clock
            return events
        with_logprobs = any(r.params.wants_logprobs and r.finish_reason is None for r in ticket.batch)
        outcome = self.runner.read(ticket.handle, with_logprobs)
        done = self.runner.clock
        self.statistics.wait_s += done - began
        self._measure(ticket, outcome, done)
        self._last_done, self._outcome = done, (ticket, outcome)
        for i, request in enumerate(ticket.batch):
            tokens = outcome.tokens[i]
            if request.finish_reason is None and tokens:
                try:
                    self._results.advance_mask(request, tokens)
                except Exception as e:
                    # The request is at fault, not the device: the others go on.
                    events.append(self._end(request, "error", error=as_failure(e)))
                    continue
                if outcome.done[i] or tokens[-1] < 0:
                    events += self._events_of(ticket, outcome, i)
        return events

    def _rest(self) -> list[Event]:
        """The events of the results that were read last, of requests that go on."""
        if self._outcome is None:
            return []
        (ticket, outcome), self._outcome, events = self._outcome, None, []
        for i, request in enumerate(ticket.batch):
            assert ticket.dispatch is not None, "a step without decoding has no outcome"
            request.ahead -= ticket.dispatch.most_tokens
            if request.finish_reason is None:
                events += self._events_of(ticket, outcome, i)
        return events

    def _events_of(self, ticket: StepTicket, outcome: Outcome, i: int) -> list[Event]:
        assert ticket.dispatch is not None, "a step without decoding has no outcome"
        self._turns.spend(ticket.batch[i].client, NEW_TOKEN * len(outcome.tokens[i]))
        block_size, drafter = ticket.dispatch.block_sizes[i], ticket.dispatch.speculation.drafter
        return self._results.events(ticket.batch[i], outcome, i, block_size, drafter)

    def _measure(self, ticket: StepTicket, outcome: Outcome, done: float) -> None:
        """Counts a step's dispatch, and measures its rounds where the device did nothing else."""
        dispatch = ticket.dispatch
        assert dispatch is not None, "a step without decoding has no outcome"
        rounds = max(len(y) for y in outcome.yielded)
        key = dispatch.batch_size, dispatch.speculation
        self.statistics.dispatches[key] += 1
        has_masks = any(r.mask for r in ticket.batch)
        if rounds and not ticket.prefills and not has_masks:
            seconds = done - max(ticket.started, self._last_done)
            self.policy.observe_seconds(*key, seconds / rounds, rounds)

    def _fail_one(self, request: Request, error: Exception) -> None:
        """Ends a request whose mask raised; the others go on."""
        if request.finish_reason is None:
            self._events.append(self._end(request, "error", error=as_failure(error)))

    def _end(self, request: Request, finish_reason: str, *, tokens=(), yielded=(), **fields) -> Event:
        """Ends a request and frees its slot; ``fields``: further fields of its last event."""
        request.finish_reason = finish_reason
        request.times = replace(request.times, finished=self.runner.clock)
        self.statistics.requests[finish_reason] += 1
        del self._live[request]
        self._waiting.remove(request)
        self._turns.end(request.client)
        if request.mask is not None:
            self._results.close_mask(request)
        request.swapped = None
        if request.slot != NO_SLOT:
            self._leave_slot(request)
        return Event(request, list(tokens), list(yielded), finish_reason=finish_reason, **fields)

    def _leave_slot(self, request: Request) -> None:
        """Frees a request's slot and pages, and takes it from prefill and decoding."""
        self._free.append(request.slot)
        del self._by_slot[request.slot]
        self.pages.release(request.slot)
        self._scheduler.remove(request)
        self._prefiller.remove(request)
