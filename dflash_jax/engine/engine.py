"""The engine: requests in, token events out."""

import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dflash_jax.engine.device import MAX_LOGPROBS, Device, Dispatch, Outcome
from dflash_jax.engine.request import Event, Request, Times
from dflash_jax.engine.store import Prefix, PrefixStore, chunks, cut_points, keys
from dflash_jax.engine.width import Acceptance, WidthPolicy
from dflash_jax.errors import InputError
from dflash_jax.params import SamplingParams

log = logging.getLogger("dflash_jax")

PREFILL_SIZES = (16, 64, 256, 1024)
# Plain rounds a dispatch may have (wider ones: as many as its report holds), and the seconds it should take.
MOST_ROUNDS, LEAST_ROUNDS, DISPATCH_S = 32, 2, 0.02
# Rounds while nobody knows what one takes, plain and drafting; seconds of decoding before another width is compiled.
UNKNOWN_ROUNDS, PATIENCE_S = (16, 4), 2.0


# What rows are warmed up with.
_FILLER = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0)


class EngineError(RuntimeError):
    """The device failed; `Engine.restart` starts anew."""


class QueueFullError(RuntimeError):
    """More requests wait than are allowed to."""


@dataclass(frozen=True)
class Options:
    """widths: compiled ones, ascending, from 1 (the drafter's own block at most); max_num_batched_tokens: of prefill
    and one round, in a step; max_queue: requests that may wait; rows_per_dispatch: decoded together (1 makes a row's
    arithmetic independent of the others); prefix_bytes: for prefixes, 0 for none; markers: token ids that open a
    message; adaptive: whether "auto" chooses, or takes the widest."""

    widths: tuple[int, ...] = (1,)
    prefill_sizes: tuple[int, ...] = PREFILL_SIZES
    max_num_batched_tokens: int = 2048
    max_queue: int | None = None
    rows_per_dispatch: int | None = None
    prefix_bytes: int = 0
    markers: frozenset[int] = frozenset()
    adaptive: bool = True


@dataclass
class Statistics:
    """Totals since the start. dispatches: by (compiled rows, width); accepted: rounds by the tokens they yielded;
    host_s: seconds of a step without waiting for the device; wait_s: waiting."""

    requests: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    accepted: Counter = field(default_factory=Counter)
    dispatches: Counter = field(default_factory=Counter)
    host_s: float = 0.0
    wait_s: float = 0.0


@dataclass(eq=False)
class _Prefill:
    """A request on its way into the caches: what is left to run, and the prefixes it is to leave in the store."""

    request: Request
    order: int
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
        self.store = PrefixStore(options.prefix_bytes)
        self.policy = WidthPolicy(options.widths, device.first_width)
        self.statistics = Statistics()
        self.failure: str | None = None
        self._order = itertools.count()
        self._clear()

    def _clear(self) -> None:
        # All that have not ended, in the order they came.
        self._live: dict[Request, None] = {}
        self._waiting: list[tuple[int, int, Request]] = []
        self._prefilling: deque[_Prefill] = deque()
        self._decoding: list[Request] = []
        self._free = list(range(self.device.slots))
        self._tickets: deque[_Ticket] = deque()
        self._acceptance: dict[Request, Acceptance] = {}
        self._told: list[Event] = []
        self._last_done = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding or self._tickets or self._told)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def warm_up(self) -> dict[str, float]:
        """Compiles all that requests may need, and lets "auto" know what rounds cost: seconds of each program.

        Only while nothing else runs. Programs for masks are compiled when the first mask comes.
        """
        device, options, found = self.device, self.options, {}

        def timed(name: str, work: Callable):
            before = device.compile_s
            result = work()
            found[name] = device.compile_s - before
            log.info("%s: compiled in %.1f s", name, found[name])
            return result

        filler = Request([1] * min(4, device.capacity - 1), _FILLER)
        filler.params = replace(_FILLER, max_tokens=device.capacity - len(filler.prompt))
        timed("admit", lambda: device.admit(0, filler))
        for size in options.prefill_sizes:
            device.admit(0, filler)
            device.wait(timed(f"prefill {size}", lambda size=size: device.prefill(0, 1, size)))
            if self.store.budget:
                segment = timed(f"save {size}", lambda size=size: device.save(0, 0, size))
                timed(f"load {size}", lambda segment=segment: device.load(0, 0, segment))
        if self.store.budget:
            snapshot = timed("snapshot", lambda: device.snapshot(0))
            timed("restore", lambda: device.restore(0, 1, snapshot))
        for rows in device.row_sizes():
            slots = device.first_slots(rows)
            for width in options.widths:
                dispatch = Dispatch(slots, (width,) * len(slots), UNKNOWN_ROUNDS[width > 1], width)
                for i in range(3):
                    for slot in slots:
                        device.admit(slot, filler)
                        device.prefill(slot, len(filler.prompt) - 1, options.prefill_sizes[0])
                    device.wait(device.prefill(slots[0], 0, options.prefill_sizes[0]))
                    began = device.clock
                    name = f"decode {rows} x {width}"
                    handle = timed(name, lambda d=dispatch: device.decode(d)) if i == 0 else device.decode(dispatch)
                    rounds = max(len(a) for a in device.read(handle, False).accepted)
                    self.policy.observe_seconds(rows, width, (device.clock - began) / max(rounds, 1), rounds)
        return found

    def check(self, request: Request) -> None:
        """Raises InputError for a request that can never run here."""
        if request.need > self.device.capacity:
            raise InputError(
                f"{len(request.prompt)} prompt tokens and {request.params.max_tokens} new ones are {request.need}: "
                f"at most {self.device.capacity} fit"
            )
        if not request.prompt:
            raise InputError("a prompt is empty: it must have at least one token")
        widest = self.options.widths[-1]
        if request.block_size != "auto" and not 1 <= request.block_size <= widest:
            raise InputError(f"block size {request.block_size}: it must be 1 to {widest}")
        if (request.params.logprobs or 0) > MAX_LOGPROBS:
            raise InputError(f"logprobs is {request.params.logprobs}: it must be at most {MAX_LOGPROBS}")

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InputError for what cannot fit, QueueFullError, and EngineError after a failure."""
        if self.failure is not None:
            raise EngineError(self.failure)
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
        self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        events = self._told + [self._end(r, "error", [], [], error=self.failure) for r in list(self._live)]
        self._clear()
        self.store.clear()
        return events

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
            last = len(request.prompt) - 1
            if last == 0:
                self._start_decoding(request)
                continue
            cuts = cut_points(request.prompt, last, self.options.markers)
            order, found = next(self._order), keys(request.prompt, cuts)
            self._prefilling.append(_Prefill(request, order, cuts, found, can_keep=self.store.budget > 0))

    def _start_decoding(self, request: Request) -> None:
        self._decoding.append(request)
        self._acceptance[request] = Acceptance()

    def _prefill(self) -> list[tuple[Request, object]]:
        """Chunks of prompts, in turn, as many as a step may have: (request, what to wait for)."""
        if not self._prefilling:
            return []
        decoding = len(self._decoding) * (self.options.widths[-1] if self._decoding else 0)
        budget = max(self.options.max_num_batched_tokens - decoding, self.options.prefill_sizes[0])
        started, turn = [], deque(sorted(self._prefilling, key=lambda p: p.request.priority))
        while turn and budget > 0:
            prefill = turn.popleft()
            if self.store.budget and self._awaits_another(prefill):
                continue
            tokens, ticket = self._advance(prefill)
            budget -= tokens
            if ticket is not None:
                started.append((prefill.request, ticket))
            # Whoever had a turn goes behind the others.
            self._prefilling.remove(prefill)
            if prefill.request.prefilled < len(prefill.request.prompt) - 1:
                self._prefilling.append(prefill)
                turn.append(prefill)
            else:
                self._start_decoding(prefill.request)
        return started

    def _awaits_another(self, prefill: _Prefill) -> bool:
        """Whether an earlier request is computing the very prefix that this one needs next."""
        key = prefill.keys[prefill.next_cut]
        if self.store.find(key) is not None:
            return False
        return any(
            key == other.keys[other.next_cut]
            for other in self._prefilling
            if other.can_keep and other.order < prefill.order and other.request.priority <= prefill.request.priority
        )

    def _advance(self, prefill: _Prefill) -> tuple[int, object]:
        """One chunk, or a jump to the furthest prefix that the store has: (tokens computed, what to wait for)."""
        request = prefill.request
        if request.prefilled in (0, *prefill.cuts) and self._jump(prefill):
            return 0, None
        nearest = prefill.next_cut
        end = prefill.cuts[nearest]
        start, tokens, size = chunks(request.prefilled, end, self.options.prefill_sizes)[0]
        ticket = self.device.prefill(request.slot, tokens, size)
        request.prefilled = start + tokens
        if prefill.can_keep:
            prefill.segments.append((start, self.device.save(request.slot, start, size)))
            if request.prefilled == end:
                self._keep(prefill, nearest)
        return size, ticket

    def _jump(self, prefill: _Prefill) -> bool:
        """Copies the longest known prefix into the slot; whether there was one that leads further."""
        if not self.store.budget:
            return False
        request = prefill.request
        if request.prefilled == 0:
            self.store.queries += 1
        for cut, key in reversed(list(zip(prefill.cuts, prefill.keys, strict=True))):
            if cut <= request.prefilled:
                return False
            found = self.store.find(key)
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

    def _decode(self) -> tuple[list[Request], Dispatch | None, object]:
        if any(r.mask for r in self._decoding):
            # A mask needs all tokens before it.
            self._told += self._collect(keep=0)
        rows = self._decoding
        most = self.options.rows_per_dispatch
        if most is not None and len(rows) > most:
            rows, rest = rows[:most], rows[most:]
            self._decoding = rest + rows
        if not rows:
            return [], None, None
        rows = list(rows)
        dispatch = self._dispatch(rows)
        if any(r.mask for r in rows):
            return rows, dispatch, self.device.decode_masked(replace(dispatch, rounds=1), self._masks(rows))
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
            window = next(w for w in widths if w >= least)
        else:
            own = [self._acceptance[r] for r in rows]
            patience = max(PATIENCE_S, self.device.last_compile_s)
            window = self.policy.choose(compiled, own, least, self.device.is_compiled, patience)
        window = self.device.agree(window)
        cost = self.policy.cost(compiled, window)
        # Who waits for a first token is told soon.
        seconds = DISPATCH_S if all(r.tokens for r in rows) else DISPATCH_S / 4
        rounds = UNKNOWN_ROUNDS[window > 1] if cost is None else int(seconds / cost)
        rounds = self.device.agree(max(LEAST_ROUNDS, min(rounds, MOST_ROUNDS)))
        each = tuple(window if r.block_size == "auto" else min(r.block_size, window) for r in rows)
        return Dispatch(slots, each, rounds, window)

    def _masks(self, rows: list[Request]) -> Callable:
        def make(drafts):
            import numpy as np

            window = drafts.shape[1] + 1
            found = {i: r.mask.masks(drafts[i].tolist()) for i, r in enumerate(rows) if r.mask}
            words = next(iter(found.values())).shape[-1]
            masks = np.full((len(rows), window, words), 0xFFFFFFFF, np.uint32)
            for i, mask in found.items():
                masks[i] = mask
            return masks

        return make

    # What the device brought.

    def _collect(self, keep: int) -> list[Event]:
        """Reads all steps but the last ``keep``."""
        events = []
        while len(self._tickets) > keep:
            ticket = self._tickets.popleft()
            began = self.device.clock
            for request, handle in ticket.prefills:
                self.device.wait(handle)
                request.times = replace(request.times, prefilled=self.device.clock)
            if ticket.dispatch is None:
                self.statistics.wait_s += self.device.clock - began
                self._last_done = self.device.clock
                continue
            wanted = any(r.params.logprobs is not None and r.finish_reason is None for r in ticket.requests)
            outcome = self.device.read(ticket.handle, wanted)
            done = self.device.clock
            self.statistics.wait_s += done - began
            self._measure(ticket, outcome, done)
            self._last_done = done
            for i, request in enumerate(ticket.requests):
                if request.finish_reason is None and (event := self._take(request, ticket, outcome, i)):
                    events.append(event)
        return events

    def _measure(self, ticket: _Ticket, outcome: Outcome, done: float) -> None:
        rounds, dispatch = max(len(a) for a in outcome.accepted), ticket.dispatch
        key = self.device.rows_for(dispatch.slots), dispatch.window
        self.statistics.dispatches[key] += 1
        masked = any(r.mask for r in ticket.requests)
        if rounds and not ticket.prefills and not masked:
            seconds = done - max(ticket.started, self._last_done)
            self.policy.observe_seconds(*key, seconds / rounds, rounds)

    def _take(self, request: Request, ticket: _Ticket, outcome: Outcome, i: int) -> Event | None:
        tokens, accepted, done = outcome.tokens[i], outcome.accepted[i], outcome.done[i]
        if not tokens:
            return None
        width = ticket.dispatch.widths[i]
        own = self._acceptance[request]
        for n in accepted:
            self.policy.observe_round(own, n, width)
        if not request.tokens:
            request.times = replace(request.times, first_token=self.device.clock)
        if request.mask:
            request.mask.take(tokens)
        keep = request.monitor(tokens) if request.monitor else None
        reason = None
        if keep is not None:
            tokens, accepted, reason = tokens[:keep], _trimmed(accepted, keep), "stop"
        elif done:
            reason = "stop" if tokens[-1] in request.stops else "length"
        entries = _entries(request, tokens, outcome.logprobs[i]) if request.params.logprobs is not None else None
        request.tokens += tokens
        self.statistics.new_tokens += len(tokens)
        self.statistics.rounds += len(accepted)
        self.statistics.accepted.update(accepted)
        if reason is None:
            return Event(request, tokens, accepted, entries)
        return self._end(request, reason, tokens, accepted, entries)

    def _end(self, request: Request, reason: str, tokens, accepted, logprobs=None, error=None) -> Event:
        request.finish_reason = reason
        request.times = replace(request.times, finished=self.device.clock)
        self.statistics.requests[reason] += 1
        del self._live[request]
        if request.slot is not None:
            self._free.append(request.slot)
            self._decoding = [r for r in self._decoding if r is not request]
            self._prefilling = deque(p for p in self._prefilling if p.request is not request)
            self._acceptance.pop(request, None)
        return Event(request, tokens, accepted, logprobs, reason, error)


def _trimmed(accepted: list[int], tokens: int) -> list[int]:
    """What rounds yielded of the first ``tokens``."""
    kept = []
    for n in accepted:
        if tokens > 0:
            kept.append(min(n, tokens))
        tokens -= n
    return kept


def _entries(request: Request, tokens: list[int], record: tuple) -> list[dict]:
    chosen, ids, values = record
    wanted = request.params.logprobs
    return [
        {
            "token_id": token,
            "logprob": float(chosen[j]),
            "top": {int(t): float(v) for t, v in zip(ids[j, :wanted], values[j, :wanted], strict=True)},
        }
        for j, token in enumerate(tokens)
    ]
