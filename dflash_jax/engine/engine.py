"""The engine: requests in, token events out."""

import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_jax.decoding.sampling import NOTHING_ALLOWED, Logprobs
from dflash_jax.engine.draft_length import ALONE, Acceptance, DraftLengthPolicy
from dflash_jax.engine.masking import WAIT_S, Masking, RoundOfMasks
from dflash_jax.engine.model_runner import Device, Dispatch, Outcome
from dflash_jax.engine.options import Options, Statistics
from dflash_jax.engine.prefill import Prefiller
from dflash_jax.engine.prefix_cache import PrefixCache
from dflash_jax.engine.request import Event, Request, Times
from dflash_jax.errors import EngineError, InputError, UnavailableError
from dflash_jax.sampling_params import MAX_LOGPROBS, MAX_STOPS

log = logging.getLogger("dflash_jax")

# Plain rounds a dispatch may have (wider ones: as many as its report holds), and the seconds it should take.
MOST_ROUNDS, LEAST_ROUNDS, DISPATCH_S = 32, 2, 0.02
# Rounds while nobody knows what one takes, plain and drafting; seconds of decoding before another width is compiled.
UNKNOWN_ROUNDS, PATIENCE_S = (16, 4), 2.0
# Seconds that a step without other work waits for a late mask.
LATE_S = 0.005


class QueueFullError(RuntimeError):
    """More requests wait than are allowed to."""


@dataclass(frozen=True)
class _Ticket:
    """A step under way."""

    prefills: list
    requests: list[Request]
    dispatch: Dispatch | None
    handle: object
    started: float


class Engine:
    """Many requests over the slots of one `Device`: `submit`, then `step` while `has_work`.

    A step starts what the device does next, and then reads what the step before brought: the host's work is done while
    the device is busy. A request joins and leaves between steps.
    """

    def __init__(self, device: Device, options: Options):
        self.device, self.options = device, options
        self.store = PrefixCache(options.prefix_bytes)
        self.policy = DraftLengthPolicy(options.widths, device.first_width)
        self.statistics = Statistics()
        self.failure: str | None = None
        self._order = itertools.count()
        self._clear()

    def _clear(self) -> None:
        # All that have not ended, in the order they came.
        self._live: dict[Request, None] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._prefiller = Prefiller(self.device, self.store, self.options, self.statistics)
        self._decoding: list[Request] = []
        self._free = list(range(self.device.slots))
        self._tickets: deque[_Ticket] = deque()
        self._acceptance: dict[Request, Acceptance] = {}
        self._masking = Masking(self.device.mask_words, self.device.aligned, self._fail_one)
        self._is_drafting = True
        self._told: list[Event] = []
        self._last_done = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefiller or self._decoding or self._tickets or self._told)

    @property
    def running(self) -> int:
        return len(self._prefiller) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(len(request.prompt) for _, _, request in list(self._waiting))

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of all slots' positions that requests take now."""
        held = sum(r.prefilled + len(r.tokens) for r in list(self._live) if r.slot is not None)
        return held / (self.device.slots * self.device.capacity)

    def prefill_rows(self, size: int) -> tuple[int, ...]:
        """Compiled numbers of prompts, of each data shard, for chunks of ``size`` tokens."""
        return self._prefiller.rows(size)

    def check(self, request: Request) -> None:
        """Raises InputError for a request that can never run here."""
        if request.need > self.device.capacity:
            raise InputError(
                f"{len(request.prompt)} prompt tokens and {request.params.max_tokens} new ones are {request.need}: "
                f"at most {self.device.capacity} fit"
            )
        if not request.prompt:
            raise InputError("a prompt is empty: it must have at least one token")
        if len(request.stops) > MAX_STOPS:
            raise InputError(f"{len(request.stops)} stop token ids: at most {MAX_STOPS} are possible")
        widest = self.options.widths[-1]
        if request.block_size != "auto" and not 1 <= request.block_size <= widest:
            raise InputError(f"block size {request.block_size}: it must be 1 to {widest}")
        for name, wanted in (
            ("logprobs", request.params.logprobs),
            ("prompt_logprobs", request.prompt_logprobs),
        ):
            if (wanted or 0) > MAX_LOGPROBS:
                raise InputError(f"{name} is {wanted}: it must be at most {MAX_LOGPROBS}")

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InputError for what cannot fit, QueueFullError, and UnavailableError after a
        failure, until `restart`."""
        if self.failure is not None:
            raise UnavailableError(self.failure)
        self.check(request)
        most = self.options.max_queue
        if most is not None and len(self._waiting) >= most + len(self._free):
            raise QueueFullError(f"{len(self._waiting)} requests are waiting: {most} may")
        request.times = Times(self.device.clock)
        self._live[request] = None
        heapq.heappush(self._waiting, (request.priority, next(self._order), request))

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is; no event comes but that of its end."""
        if request not in self._live:
            return
        self._waiting = [entry for entry in self._waiting if entry[2] is not request]
        heapq.heapify(self._waiting)
        self._told.append(self._end(request, "abort", [], []))

    def flush(self) -> bool:
        """Forgets all known prefixes. Does nothing, and returns False, while requests are under way."""
        if self._live:
            return False
        self.store.clear()
        return True

    def step(self) -> list[Event]:
        """Starts the next work, and tells what the step before brought."""
        if self.failure is not None:
            raise EngineError(self.failure)
        began, waited = self.device.clock, self.statistics.wait_s
        try:
            launched = self._launch()
            events = self._collect(keep=1 if launched else 0)
        except InputError:
            raise
        except Exception as e:
            log.exception("the device failed")
            return self._fail(e)
        self.statistics.host_s += self.device.clock - began - (self.statistics.wait_s - waited)
        told, self._told = self._told, []
        return told + events

    def _fail(self, error: Exception) -> list[Event]:
        """Ends everything. Nothing is started until `restart`."""
        self.failure = _reason(error)
        failure = EngineError(self.failure)
        events = self._told + [self._end(r, "error", [], [], error=failure) for r in list(self._live)]
        self._clear()
        self.store.clear()
        return events

    def close(self) -> None:
        """Closes the requests that have not ended, where no step follows."""
        for request in self._live:
            request.close()

    def restart(self) -> None:
        """An empty state after a failure."""
        self._clear()
        self.store.clear()
        self.device.reset()
        self.failure = None

    # What the device does next.

    def _launch(self) -> bool:
        self._admit()
        started, prefills = self.device.clock, self._prefill()
        requests, dispatch, handle = self._decode()
        if not prefills and dispatch is None:
            return False
        self._tickets.append(_Ticket(prefills, requests, dispatch, handle, started))
        return True

    def _admit(self) -> None:
        while self._waiting and self._free:
            _, _, request = heapq.heappop(self._waiting)
            # The data shard with the most room.
            room = Counter(self.device.shard(s) for s in self._free)
            slot = max(self._free, key=lambda s: (room[self.device.shard(s)], -s))
            self._free.remove(slot)
            request.slot = slot
            request.times = replace(request.times, admitted=self.device.clock)
            self.device.admit(slot, request)
            self.statistics.prompt_tokens += len(request.prompt)
            if len(request.prompt) > 1:
                is_auto = request.block_size == "auto"
                self._prefiller.add(request, self._is_drafting if is_auto else request.block_size > 1)
            else:
                self._start_decoding(request)

    def _start_decoding(self, request: Request) -> None:
        self._decoding.append(request)
        self._acceptance[request] = Acceptance()

    def _prefill(self) -> list[tuple[Request, object]]:
        """Chunks of prompts beside one round of the rows that decode: (request, what to wait for)."""
        if not self._prefiller:
            return []
        budget = self.options.max_num_batched_tokens - len(self._decoding) * self.options.widths[-1]
        started, done = self._prefiller.run(max(budget, self.options.prefill_sizes[0]))
        for request in done:
            self._start_decoding(request)
        return started

    def _decode(self) -> tuple[list[Request], Dispatch | None, object]:
        if any(r.mask for r in self._decoding):
            # A mask needs all tokens before it.
            self._told += self._collect(keep=0)
        late = [r for r in self._decoding if r.mask and self._masking.is_late(r)]
        rows = [r for r in self._decoding if r not in late]
        most = self.options.rows_per_dispatch
        if most is not None and len(rows) > most:
            rows, rest = rows[:most], rows[most:]
            self._decoding = rest + rows + [r for r in late if r.finish_reason is None]
        if not rows:
            if late and not self._prefiller:
                # Nothing else is to be done.
                self._masking.wait(late, LATE_S)
            return [], None, None
        dispatch = self._dispatch(rows)
        if any(r.mask for r in rows):
            # Prompts do not wait for masks either.
            masks = RoundOfMasks(self._masking, rows, 0.0 if self._prefiller else WAIT_S)
            return rows, dispatch, self.device.decode_masked(replace(dispatch, rounds=1), masks)
        return rows, dispatch, self.device.decode(dispatch)

    def _dispatch(self, rows: list[Request]) -> Dispatch:
        slots = tuple(r.slot for r in rows)
        compiled = self.device.rows_for(slots)
        fixed = [r.block_size for r in rows if r.block_size != "auto"]
        least = max(fixed, default=1)
        widths = self.options.widths
        if not self.options.adaptive and len(fixed) < len(rows):
            window = widths[-1]
        elif len(fixed) == len(rows):
            # Nobody asks the drafter.
            window = ALONE if least == 1 and widths[-1] > 1 else next(w for w in widths if w >= least)
        else:
            own = [self._acceptance[r] for r in rows]
            patience = max(PATIENCE_S, self.device.last_compile_s)
            window = self.policy.choose(compiled, own, least, self.device.is_compiled, patience)
        if any(r.mask for r in rows):
            # Two widths are compiled for these.
            window = 1 if window <= 1 else widths[-1]
        cost = self.policy.cost(compiled, window)
        # Who waits for a first token is told soon.
        seconds = DISPATCH_S if all(r.tokens for r in rows) else DISPATCH_S / 4
        rounds = UNKNOWN_ROUNDS[window > 1] if cost is None else int(seconds / cost)
        rounds = max(LEAST_ROUNDS, min(rounds, MOST_ROUNDS))
        # Hosts measure other times: all do what the first one decides.
        window, rounds = divmod(self.device.agree(window * 1024 + rounds), 1024)
        self._is_drafting = window != ALONE
        most = max(window, 1)
        each = tuple(most if r.block_size == "auto" else min(r.block_size, most) for r in rows)
        return Dispatch(slots, each, rounds, window)

    def _fail_one(self, request: Request, error: Exception) -> None:
        """Ends a request that failed by itself: the others go on."""
        if request.finish_reason is None:
            self._told.append(self._end(request, "error", [], [], error=_as_failure(error)))

    # What the device brought.

    def _collect(self, keep: int) -> list[Event]:
        """Reads all steps but the last ``keep``."""
        events = []
        while len(self._tickets) > keep:
            ticket = self._tickets.popleft()
            began = self.device.clock
            for request, handle in ticket.prefills:
                if request.prompt_logprobs is None:
                    self.device.wait(handle)
                else:
                    self._take_scores(request, self.device.read_scores(handle))
                request.times = replace(request.times, prefilled=self.device.clock)
            if ticket.dispatch is None:
                self.statistics.wait_s += self.device.clock - began
                self._last_done = self.device.clock
                continue
            wanted = any(r.params.wants_logprobs and r.finish_reason is None for r in ticket.requests)
            outcome = self.device.read(ticket.handle, wanted)
            done = self.device.clock
            self.statistics.wait_s += done - began
            self._measure(ticket, outcome, done)
            self._last_done = done
            for i, request in enumerate(ticket.requests):
                if request.finish_reason is None:
                    events += self._take(request, ticket, outcome, i)
        return events

    @staticmethod
    def _take_scores(request: Request, record: Logprobs) -> None:
        start = 1 + len(request.prompt_entries)
        tokens = request.prompt[start : start + len(record.chosen)]
        ids = request.params.logprob_token_ids
        request.prompt_entries += _entries(tokens, record, request.prompt_logprobs, ids)

    def _measure(self, ticket: _Ticket, outcome: Outcome, done: float) -> None:
        rounds, dispatch = max(len(a) for a in outcome.accepted), ticket.dispatch
        key = self.device.rows_for(dispatch.slots), dispatch.window
        self.statistics.dispatches[key] += 1
        masked = any(r.mask for r in ticket.requests)
        if rounds and not ticket.prefills and not masked:
            seconds = done - max(ticket.started, self._last_done)
            self.policy.observe_seconds(*key, seconds / rounds, rounds)

    def _take(self, request: Request, ticket: _Ticket, outcome: Outcome, i: int) -> list[Event]:
        tokens, accepted, done = outcome.tokens[i], outcome.accepted[i], outcome.done[i]
        if not tokens:
            return []
        if tokens[-1] >= 0:
            return [self._take_tokens(request, ticket, outcome, i, tokens, accepted, done)]
        # The tokens before count as if they had come alone: a stop string among them ends the text first.
        *tokens, wrong = tokens
        accepted = _trimmed(accepted, len(tokens))
        events = [self._take_tokens(request, ticket, outcome, i, tokens, accepted, False)] if tokens else []
        if request.finish_reason is None:
            events.append(self._end(request, "error", [], [], error=self._no_token(request, wrong)))
        return events

    def _take_tokens(
        self,
        request: Request,
        ticket: _Ticket,
        outcome: Outcome,
        i: int,
        tokens: list[int],
        accepted: list[int],
        done: bool,
    ) -> Event:
        width = ticket.dispatch.widths[i]
        own = self._acceptance[request]
        for n in accepted:
            self.policy.observe_round(own, n, width)
        if not request.tokens:
            request.times = replace(request.times, first_token=self.device.clock)
        try:
            if request.mask:
                self._take_masked(request, tokens)
            keep = request.monitor(tokens) if request.monitor else None
        except Exception as e:
            # The request's fault, not the device's: the others go on.
            return self._end(request, "error", [], [], error=_as_failure(e))
        reason = None
        if keep is not None:
            tokens, accepted, reason = tokens[:keep], _trimmed(accepted, keep), "stop"
        elif done:
            reason = "stop" if tokens[-1] in request.stops else "length"
        params, entries = request.params, None
        if params.wants_logprobs:
            entries = _entries(tokens, outcome.logprobs[i], params.logprobs or 0, params.logprob_token_ids)
        request.tokens += tokens
        self.statistics.new_tokens += len(tokens)
        self.statistics.rounds += len(accepted)
        self.statistics.accepted.update(accepted)
        if width > 1:
            self.statistics.drafts += len(accepted)
            self.statistics.draft_tokens += len(accepted) * (width - 1)
        if reason is None:
            return Event(request, tokens, accepted, entries, width=width)
        return self._end(request, reason, tokens, accepted, entries, width=width)

    def _take_masked(self, request: Request, tokens: Sequence[int]) -> None:
        request.mask.take(tokens)
        if request.mask.is_over:
            # Without a mask, a dispatch has many rounds.
            self._drop_mask(request)

    def _drop_mask(self, request: Request) -> None:
        self._masking.forget(request)
        mask, request.mask = request.mask, None
        mask.close()

    def _no_token(self, request: Request, wrong: int) -> Exception:
        """Why no token follows a request's own: ``wrong`` as in `sampling.checked`."""
        behind = len(request.tokens)
        if wrong == NOTHING_ALLOWED:
            return InputError(f"the text's form, penalties or biases leave no token behind {behind} new ones")
        log.error("a request ended: the model's logits are not finite")
        # What was computed from the same numbers may be among the known prefixes.
        self.store.clear()
        return EngineError(f"the model's logits behind {behind} new tokens are NaN or infinite")

    def _end(self, request: Request, reason: str, tokens, accepted, logprobs=None, error=None, width=1) -> Event:
        request.finish_reason = reason
        request.times = replace(request.times, finished=self.device.clock)
        self.statistics.requests[reason] += 1
        del self._live[request]
        if request.mask is not None:
            self._drop_mask(request)
        if request.slot is not None:
            self._free.append(request.slot)
            self._decoding = [r for r in self._decoding if r is not request]
            self._prefiller.remove(request)
            self._acceptance.pop(request, None)
        return Event(request, tokens, accepted, logprobs, reason, error, width)


def _as_failure(error: Exception) -> Exception:
    """The error of a request that failed by itself."""
    if isinstance(error, InputError):
        return error
    log.error("a request's monitor or mask failed", exc_info=error)
    return EngineError(_reason(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _trimmed(accepted: list[int], tokens: int) -> list[int]:
    """What rounds yielded of the first ``tokens``."""
    kept = []
    for n in accepted:
        if tokens > 0:
            kept.append(min(n, tokens))
        tokens -= n
    return kept


def _entries(tokens: Sequence[int], record: Logprobs, top: int, named: Sequence[int]) -> list[dict]:
    entries = []
    for j, token in enumerate(tokens):
        best = zip(record.ids[j, :top].tolist(), record.values[j, :top].tolist(), strict=True)
        entry = {"token_id": token, "logprob": float(record.chosen[j]), "top": dict(best)}
        if named:
            entry["named"] = dict(zip(named, record.named[j].tolist(), strict=False))
        entries.append(entry)
    return entries
