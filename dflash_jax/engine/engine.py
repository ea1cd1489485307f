"""The engine: requests in, token events out."""

import itertools
import logging
import time
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import replace
from math import isnan
from typing import Any

from dflash_jax.engine.config import EngineConfig
from dflash_jax.engine.dispatch import Dispatch, Outcome, StepTicket
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.masking import WAIT_S as MASK_WAIT_S
from dflash_jax.engine.masking import Masking, RoundOfMasks
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import FIRST_VERSION, NO_SLOT, Event, Request, RequestLimits, Times
from dflash_jax.engine.results import Results, as_failure, reason, take_scores
from dflash_jax.engine.scheduler import DecodeScheduler
from dflash_jax.engine.slots import Slots
from dflash_jax.engine.statistics import Statistics
from dflash_jax.engine.turns import NEW_TOKEN, Turns
from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError

log = logging.getLogger("dflash_jax")

# Seconds that a step without other work waits for a late mask, or for a program that is being compiled.
WAIT_S = 0.005
# Requests that may have a slot or wait, if many clients use their shares, over those of one client.
MOST_SHARES = 2


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
        version: The version of the weights.
        is_paused: Whether `step` starts nothing. Requests wait, with what they have.
        has_caches: Whether the decoding state and prefixes have memory.
        is_closed: Whether no step follows.
    """

    def __init__(self, runner: ModelRunner, config: EngineConfig, policy: DraftLengthPolicy | None = None):
        self.runner, self.config = runner, config
        self.limits = RequestLimits(runner.capacity, config.largest_block)
        self.policy = policy or DraftLengthPolicy(config.speculations)
        self.statistics = Statistics()
        self.failure: str | None = None
        self.version, self.is_paused, self.has_caches, self.is_closed = FIRST_VERSION, False, True, False
        self._order = itertools.count()
        self._clear()

    def _clear(self, masking: Masking | None = None) -> None:
        # Requests that have not ended, in the order of arrival.
        self._live: dict[Request, None] = {}
        self._turns = Turns()
        self._scheduler = DecodeScheduler(self.runner, self.config, self.policy)
        self._slots = Slots(self.runner, self.config, self._turns, self._scheduler, self.statistics, self._collect_all)
        self._waiting, self._prefiller = self._slots.waiting, self._slots.prefiller
        self.pages, self.prefix_cache = self._slots.pages, self._slots.prefix_cache
        # With masks that are asked for.
        self._masking = masking or Masking(self.runner.mask_words, self.runner.aligned, self._fail_one)
        parts = self.runner, self._scheduler, self._masking, self.prefix_cache, self.statistics, self.config
        self._results = Results(*parts, self._event, self._end)
        self._tickets: deque[StepTicket] = deque()
        # The step that was read last, whose events are not made yet.
        self._outcome: tuple[StepTicket, Outcome] | None = None
        # Events of ends outside of the results, returned by the next step.
        self._events: list[Event] = []
        self._last_done = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        if self.is_paused:
            return bool(self._tickets or self._events)
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
        """Prompt tokens of the requests in the queue that are to be prefilled."""
        return sum(len(request.prompt) for request in self._waiting if request.swapped is None)

    @property
    def free_slots(self) -> int:
        """Slots without a request."""
        return len(self._slots.free)

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
        self.limits.check(r.prompt, r.params, r.block_size, r.stops)

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

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def abort_all(self) -> None:
        """Ends all requests, as `abort` does."""
        for request in list(self._live):
            self.abort(request)

    def forget(self) -> None:
        """Drops all that weights have computed: caches of requests and prefixes.

        Requests that have not ended keep their tokens, and compute them again.
        """
        if self.failure is not None or not self.has_caches:
            return
        try:
            self._collect_all()
            self._events += [self._end(r, "length") for r in self._read_only() if r.is_read]
            self._slots.give_up_all()
            self.prefix_cache.clear()
        except Exception as e:
            log.exception("the device failed")
            self._events = self._fail(e)

    def release_caches(self) -> None:
        """Frees the memory of the decoding state and of prefixes. The engine must be paused; see `forget`."""
        assert self.is_paused, "the engine runs"
        self.forget()
        self.runner.release()
        self.has_caches = False

    def restore_caches(self) -> None:
        """Undoes `release_caches`."""
        if self.has_caches:
            return
        waiting, events = list(self._live), self._events
        self.runner.reset()
        self._clear(self._masking)
        self.has_caches, self._events = True, events
        for request in waiting:
            self._live[request] = None
            self._turns.begin(request.client)
            self._waiting.push(request)

    def flush(self) -> bool:
        """Clears the prefix cache. Does nothing, and returns False, while requests run; in a pause, see `forget`."""
        if self.is_paused:
            self.forget()
            return True
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
        computed = self.statistics.computed_tokens
        try:
            launched = self._launch()
            results = self._collect(keep=1 if launched else 0)
        except InputError:
            raise
        except Exception as e:
            log.exception("the device failed")
            return self._fail(e)
        if not (launched or results or self._events or self.is_paused) and self._lacks_program():
            time.sleep(WAIT_S)
        self.statistics.host_s += self.runner.clock - began - (self.statistics.wait_s - waited)
        if count := self.statistics.computed_tokens - computed:
            self.statistics.step_tokens[count] += 1
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
        self.is_closed = True
        for request in self._live:
            request.close()

    def restart(self) -> None:
        """Empties the engine after a failure."""
        self.runner.reset()
        self._clear()
        self.failure, self.has_caches = None, True

    def _launch(self) -> bool:
        """Starts the device's next work; False where there is none."""
        if self.is_paused:
            return False
        self._slots.assign()
        started, prefills = self.runner.clock, self._prefill()
        batch, dispatch, handle = self._decode()
        if not prefills and dispatch is None:
            return False
        self._tickets.append(StepTicket(prefills, batch, dispatch, handle, started))
        return True

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
        absent = self._read_only()
        self._events += [self._end(r, "length") for r in absent if r.is_read]
        can_mask, others = self._scheduler.can_mask(), [r for r in self._scheduler.requests if r not in absent]
        late = [r for r in others if r.mask and not (can_mask and not self._masking.is_late(r))]
        absent += [r for r in others if not r.is_resident and r not in late]
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

    def _read_only(self) -> list[Request]:
        """Requests without new tokens, of which only the prompt is read."""
        return [r for r in self._scheduler.requests if not r.params.max_tokens]

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

    def _collect_all(self) -> None:
        self._events += self._collect(keep=0)

    def _read(self) -> list[Event]:
        """Reads the results of the oldest step: masks advance, and requests that end have their events.

        `_rest` has the other events.
        """
        assert self._outcome is None, "the rest of the last results is not taken"
        ticket, began, events = self._tickets.popleft(), self.runner.clock, []
        for request, handle in ticket.prefills:
            if request.is_read:
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
            is_whole, tokens = not any(dispatch.prices), sum(len(r.prompt) + len(r.tokens) for r in ticket.batch)
            self.policy.observe_seconds(*key, seconds / rounds, rounds, is_whole, tokens)
        if outcome.outcomes is not None and dispatch.speculation.drafter is not None:
            counted = sum(map(len, outcome.yielded))
            self.policy.observe_outcomes(dispatch.speculation.drafter, outcome.outcomes, counted)

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
            self._slots.leave(request)
        return self._event(request, list(tokens), list(yielded), finish_reason=finish_reason, **fields)

    def _event(self, request: Request, *args: Any, **fields: Any) -> Event:
        return Event(request, *args, version=self.version, **fields)
