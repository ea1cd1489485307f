"""Several engines as one: each request has one of them, and goes on at another one where that is lost."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isnan
from typing import Any

import numpy as np

from dflash_jax import protocol
from dflash_jax.cluster.routing import ADDED, Beginning, Replica, Replicas, beginnings_of, session
from dflash_jax.engine.request import FIRST_VERSION, Times
from dflash_jax.errors import EngineError, QueueFullError, UnavailableError
from dflash_jax.server.engine_client import EngineClient, Inbox, LostError, RemoteSequence
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import RequestContext, current

log = logging.getLogger("dflash_jax.cluster")

# Engines that lose a request one after the other without a token of it, after which it is given up.
ATTEMPTS = 4
# Engines that lose a request at all before it is given up: it may be what ends them.
MOST_LOSSES = 16
# Seconds between two looks at an engine, seconds that it has to answer, and looks without an answer after which it
# counts as dead. After the first of them it gets no requests.
LOOK_S, ANSWER_S, LOOKS = 1.0, 3.0, 10
# Seconds by which a timer is late where this process had no processor.
LATE_S = 1.0
# Seconds in which all engines must answer a question to all.
ALL_S = 10.0
# Statuses of an engine that lives and has no place.
NO_PLACE = (429, 503)
GIVEN_UP = "the engine of this request was lost, and no other can go on with it: send the request again"
# A family of metrics: its name, its comments, and its samples, as prometheus_client writes them; their label.
_FAMILY = re.compile(rb"# HELP (\S+) .*\n# TYPE .*\n((?:[^#\n].*\n)*)")
_ENGINE = re.compile(rb'(?<=[{,])engine="(?:[^"\\]|\\.)*"')


class Engine(Replica):
    """An engine of a fleet. A connection to it begins with `EngineClient.receive` of its hello.

    Args:
        name: Its name.
        send: As `EngineClient` takes it.
        break_off: Ends the connection to it, which has no answers.

    Attributes:
        client: The engine.
        is_leaving: Whether it gets no further requests.
        is_foreign: Whether it has another model than the fleet.
        missed: Looks without an answer, one after the other.
    """

    def __init__(self, name: str, send: Callable[[protocol.FromFront], None], break_off: Callable[[], None]):
        super().__init__(name)
        self.client, self.break_off = EngineClient(send), break_off
        self.is_leaving, self.is_foreign, self.missed = False, False, 0

    @property
    def is_well(self) -> bool:
        """Whether it takes requests."""
        state = self.client.state
        return state.is_ready and state.failure is None and not (self.is_leaving or self.is_foreign or self.missed)


@dataclass(eq=False)
class _Choice:
    """One sequence of a request, at a place of the submission, with the id that clients know."""

    sequence: RemoteSequence
    place: int
    name: str
    # Those in the inbox of the submission, and those that are taken out of it.
    tokens: list[int] = field(default_factory=list)
    # Where it is submitted; None where it waits for an engine, or is over.
    engine: Engine | None = None
    # Engines that have lost it, and those of them since its last token.
    losses: int = 0
    failures: int = 0
    # Whether its last event is in the inbox, and whether its owner has aborted it.
    is_over: bool = False
    is_aborted: bool = False
    # Its times so far, and the prompt tokens that its first engine had.
    times: Times | None = None
    cached: int = 0


class _Request:
    """The sequences of one submission, wherever they are.

    Attributes:
        fleet: The engines.
        inbox: The events.
        owner: Who may abort them.
        beginnings: What decides which engine gets them.
    """

    def __init__(self, fleet: "Fleet", sequences: Sequence[RemoteSequence], context: RequestContext):
        self.fleet, self.inbox, self.owner = fleet, Inbox(), context.owner
        names = [context.ids.get(sequence, context.answer_id) for sequence in sequences]
        self._choices = [_Choice(*entry) for entry in zip(sequences, range(len(names)), names, strict=True)]
        self.beginnings = fleet.beginnings(sequences, context)
        # What ends them at the engines that have accepted them.
        self._leaves: list[Callable[[], None]] = []
        # Choices that are lost, and those engines that have lost them last.
        self._lost: list[_Choice] = []
        self._tried: list[Engine] = []
        self._moving: asyncio.Task | None = None

    async def begin(self) -> None:
        """Submits all sequences, all of them or none. Raises what `EngineClient.submitted` raises."""
        if self._choices:
            await self._place(self._choices, False)

    def end(self) -> None:
        """Aborts what has not ended."""
        if self._moving is not None:
            self._moving.cancel()
        for leave in self._leaves:
            leave()
        for choice in self._choices:
            self._detach(choice)

    def abort(self, names: Collection[str] | None) -> None:
        """Ends choices that have no engine now; engines end the others, or are lost before. None: of any name."""
        for choice in self._choices:
            if not choice.is_over and (names is None or choice.name in names):
                choice.is_aborted = True
                if choice.engine is None:
                    self._put(choice, protocol.Event(choice.place, finish_reason="abort"))

    def _detach(self, choice: _Choice) -> None:
        """A choice is at its engine no more. One that was aborted, and that the engine has not ended, is over."""
        if choice.engine is None:
            return
        self.fleet.replicas.count(choice.engine, -1)
        choice.engine = None
        if choice.is_aborted and not choice.is_over:
            self._put(choice, protocol.Event(choice.place, finish_reason="abort"))

    def _put(self, choice: _Choice, event: protocol.Event) -> None:
        if event.finish_reason is not None or event.failure is not None:
            choice.is_over = True
            self._detach(choice)
        self.inbox.put(choice.place, event)

    def _take(self, choice: _Choice, event: protocol.Event) -> None:
        """Takes an event of a choice's engine. What earlier engines have said is not said again."""
        if (engine := choice.engine) is None:
            # The client has left.
            return
        if event.failure is not None and event.failure.kind != "input":
            log.info("%s at %s: %s", choice.name, engine.name, event.failure.message)
            self._lose(choice, engine)
            return
        choice.tokens += event.tokens
        choice.failures = 0 if event.tokens else choice.failures
        if event.times is not None:
            # Each engine has a clock of its own.
            ahead = self.fleet.clock - engine.client.clock
            times = Times(*(seconds + ahead for seconds in vars(event.times).values()))
            if choice.times is None:
                choice.times, choice.cached = times, event.cached
            else:
                known = {name: seconds for name, seconds in vars(choice.times).items() if not isnan(seconds)}
                choice.times = replace(times, **known)
            event.times, event.cached = choice.times, choice.cached
        self._put(choice, event)

    def _lose(self, choice: _Choice, engine: Engine) -> None:
        """An engine has lost a choice: another one gets it."""
        self._detach(choice)
        if choice.is_over:
            return
        choice.losses += 1
        choice.failures += 1
        if choice.failures == ATTEMPTS or choice.losses == MOST_LOSSES:
            self._fail([choice], UnavailableError(GIVEN_UP))
            return
        self._tried = [*self._tried, engine] if choice.failures > 1 else [engine]
        self._lost.append(choice)
        if self._moving is None or self._moving.done():
            self._moving = asyncio.get_running_loop().create_task(self._move())

    async def _move(self) -> None:
        """Brings choices that are lost to other engines."""
        while self._lost:
            choices, self._lost = self._lost, []
            try:
                await self._place(choices, True)
            except Exception as e:
                self._fail(choices, e)

    def _fail(self, choices: Sequence[_Choice], error: Exception) -> None:
        log.warning("%d sequences are given up: %s", len(choices), error)
        failure = protocol.failure_of(error)
        if isinstance(error, ApiError):
            failure = protocol.Failure("api", error.message, error.status_code, error.param)
        for choice in choices:
            if not choice.is_over:
                self._put(choice, protocol.Event(choice.place, failure=failure))

    async def _place(self, choices: Sequence[_Choice], is_lost: bool) -> None:
        """Has an engine take choices, all of them or none.

        Args:
            choices: The choices.
            is_lost: Whether an engine has lost them: then they wait for a place.
        """
        replicas, loop = self.fleet.replicas, asyncio.get_running_loop()
        until = loop.time() + (self.fleet.wait_s if replicas.has_begun else 0)
        refusal: Exception = UnavailableError(GIVEN_UP if replicas.has_begun else "no engine is ready yet")
        while True:
            engine = await replicas.wait(self.beginnings, self._tried, until - loop.time())
            # What was aborted meanwhile is over.
            if not (choices := [choice for choice in choices if not choice.is_over]):
                return
            if engine is None:
                raise refusal
            try:
                await self._submit(engine, choices)
                return
            except LostError:
                # Each choice has an event of it.
                return
            except (QueueFullError, ApiError, EngineError) as e:
                if isinstance(e, ApiError) and e.status_code not in NO_PLACE:
                    raise
                if type(e) is EngineError:
                    log.info("a request at %s: %s", engine.name, e)
                    for choice in choices:
                        self._lose(choice, engine)
                    return
                refusal = e
            self._tried = [*self._tried, engine]
            if all(replica in self._tried for replica in replicas.open):
                if not is_lost or loop.time() >= until:
                    raise refusal
                await replicas.changed(min(LOOK_S, until - loop.time()))
                self._tried = []

    async def _submit(self, engine: Engine, choices: Sequence[_Choice]) -> None:
        """Submits choices to an engine, all of them or none. Raises what `EngineClient.submit` raises."""
        self.fleet.replicas.count(engine, len(choices))
        for choice in choices:
            choice.engine = engine
        try:
            leave = await engine.client.submit(
                [choice.sequence for choice in choices],
                lambda place, event: self._take(choices[place], event),
                [(list(choice.tokens), choice.losses) for choice in choices],
                self.beginnings[-ADDED:],
            )
        except BaseException:
            for choice in choices:
                self._detach(choice)
            raise
        self._leaves.append(leave)


class Fleet:
    """Several engines, with what `EngineClient` has.

    Args:
        wait_s: Seconds that a request waits for an engine where all are lost, or for a place where one has lost it.

    Attributes:
        replicas: The engines.
        hello: What the first engine said first; None before.
        has_hello: Set when there is one.
        markers: Token ids that open a message.
        wait_s: As above.
        submits_again: See `EngineClient`.
    """

    submits_again = True

    def __init__(self, wait_s: float = 120.0):
        self.replicas, self.wait_s = Replicas[Engine](), wait_s
        self.hello: protocol.Hello | None = None
        self.has_hello = asyncio.Event()
        self.markers: frozenset[int] = frozenset()
        self._requests: set[_Request] = set()
        # Updates of weights so far, and whether one of several parts has begun.
        self._updates, self._has_begun = 0, False

    # Engines come and go.
    def set_leaving(self, engine: Engine, is_leaving: bool) -> None:
        """Gives an engine no further requests, or requests again. Those that it has go on."""
        engine.is_leaving = is_leaving
        self.replicas.set_open(engine, engine.is_well)

    def receive(self, engine: Engine, record: protocol.FromEngine) -> None:
        """Takes a record of an engine."""
        engine.client.receive(record)
        if isinstance(record, protocol.Hello):
            self.hello = self.hello or record
            self.has_hello.set()
            engine.missed, engine.is_foreign = 0, model_of(record) != model_of(self.hello)
            if engine.is_foreign:
                both = engine.name, model_of(record), model_of(self.hello)
                log.error("engine %s gets no requests: it has the model %s, and this server began with %s", *both)
        elif isinstance(record, protocol.State):
            self.replicas.set_open(engine, engine.is_well)
        elif isinstance(record, protocol.Begun):
            self.replicas.learn(record.beginnings, engine)
            self.replicas.observe(engine, record.requests)

    def lose(self, engine: Engine, reason: str) -> None:
        """The connection to an engine has ended. What it had goes on elsewhere."""
        log.warning("engine %s is lost: %s", engine.name, reason)
        self.replicas.set_open(engine, False)
        self.replicas.observe(engine, 0)
        engine.client.lost(reason)

    async def watch(self, engine: Engine) -> None:
        """Looks at a connected engine, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look(engine)
            except Exception:
                # An engine that is closed for now is to be looked at again.
                log.exception("engine %s was not looked at", engine.name)

    async def _look(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_S
        try:
            async with asyncio.timeout_at(until):
                figures = await engine.client.ask("figures")
        except TimeoutError:
            if loop.time() > until + LATE_S:
                # This process stood still itself: the answer may be there.
                return
            engine.missed += 1
            if engine.missed == 1:
                log.warning("engine %s gets no requests until it answers", engine.name)
            if engine.missed >= LOOKS:
                engine.break_off()
        except EngineError:
            # `lose` has the reason.
            return
        else:
            engine.missed = 0
            self.replicas.observe(engine, figures["running"] + figures["waiting"])
        self.replicas.set_open(engine, engine.is_well)

    def _connected(self) -> list[Engine]:
        return [engine for engine in self.replicas.all if engine.client.state.is_ready]

    # What a front asks of an engine.
    @property
    def state(self) -> protocol.State:
        """Whether any engine takes requests. A fleet does not fail: engines are replaced."""
        states = [engine.client.state for engine in self._connected()]
        # During an update, or after one that a replica has not seen, there are several versions.
        versions = dict.fromkeys(state.version for state in states) or [FIRST_VERSION]
        rests = {state.rest for state in states} or {""}
        refuses = bool(states) and all(state.refuses for state in states)
        rest = "" if "" in rests else "sleeping" if "sleeping" in rests else "paused"
        return protocol.State(bool(self.replicas.open), None, ", ".join(versions), rest, refuses)

    @property
    def takes_requests(self) -> bool:
        """Whether requests may come: they wait where all engines are lost."""
        return self.replicas.has_begun

    @property
    def clock(self) -> float:
        """The fleet's clock, in seconds."""
        return time.monotonic()

    @property
    def plain_round_s(self) -> float | None:
        """As of `EngineClient`, of any engine."""
        seconds = (engine.client.plain_round_s for engine in self._connected())
        return next((s for s in seconds if s is not None), None)

    def beginnings(self, sequences: Sequence[RemoteSequence], context: RequestContext) -> Sequence[Beginning]:
        """What decides which engine gets a request: the beginnings of its first prompt, or its session."""
        if (name := context.headers.get("x-session-id")) is not None:
            return session(name)
        return beginnings_of(sequences[0].request.prompt, self.markers) if sequences else []

    @contextlib.asynccontextmanager
    async def submitted(self, sequences: Sequence[RemoteSequence]) -> AsyncIterator[Inbox]:
        """As of `EngineClient`. Sequences that an engine loses go on at another one after their tokens."""
        request = _Request(self, sequences, current())
        self._requests.add(request)
        try:
            await request.begin()
            yield request.inbox
        finally:
            self._requests.discard(request)
            request.end()

    def abort(self, owner: bytes, name: str | None) -> None:
        """As of `EngineClient`, at all engines and between them."""
        for engine in self._connected():
            engine.client.abort(owner, name)
        for request in self._requests:
            if request.owner == owner:
                request.abort(None if name is None else {name})

    async def manage(self, action: str, tensors: np.ndarray | None = None, **arguments: Any) -> Any:
        """As of `EngineClient`, at all engines: new weights at one after the other, so that the others answer.

        Returns:
            The answer of the first one; of "abort", the sum.

        Raises:
            ApiError: 503, an engine does not answer; 409, engines have different weights, or not all of them have done
                it.
        """
        engines, answers = self._connected(), []
        if action == "abort":
            names = None if arguments["names"] is None else set(arguments["names"])
            for request in self._requests:
                request.abort(names)
        if not engines:
            raise UnavailableError("no engine is ready")
        if action == "give":
            # An engine that has joined since would take a part for the whole.
            arguments["has_begun"] = self._has_begun
        elif action in ("begin", "update", "finish"):
            self._has_begun = action == "begin"
        if action in ("update", "finish"):
            self._updates += 1
            # The same at all engines, whatever each of them counts.
            arguments["version"] = arguments.get("version") or str(self._updates)
        calls = [partial(engine.client.manage, action, tensors, **arguments) for engine in engines]
        if action in ("update", "give", "finish"):
            for engine, call in zip(engines, calls, strict=True):
                try:
                    answers.append(await call())
                except Exception as e:
                    if not answers:
                        raise
                    message = f"{len(answers)} of {len(engines)} engines have done it, and not {engine.name}: {e}"
                    raise ApiError(409, message) from None
        else:
            answers = await asyncio.gather(*(call() for call in calls))
        if action == "abort":
            return sum(answers)
        if action == "checksums" and any(answer != answers[0] for answer in answers):
            raise ApiError(409, "the engines have different weights")
        return answers[0]

    async def compile(self, form: protocol.Form) -> list[str]:
        """As of `EngineClient`: the same form at the same engine, where it can be."""
        return await self._at_any(lambda client: client.compile(form), session(repr(form)))

    async def ask(self, question: str) -> Any:
        """The answer of any engine, or of all as one.

        Raises:
            UnavailableError: No engine is ready.
            ApiError: 503, one that lives does not answer.
        """
        if question == "generate":
            return await self._at_any(lambda client: client.ask(question), ())
        answers = await self._of_all(question)
        match question:
            case "figures":
                return summed(list(answers.values()))
            case "metrics":
                return await asyncio.to_thread(merged, answers)
            case "flush":
                return all(answers.values())

    async def _at_any(self, call: Callable[[EngineClient], Coroutine], beginnings: Sequence[Beginning]) -> Any:
        tried, refusal = [], UnavailableError("no engine is ready")
        for _ in range(ATTEMPTS):
            engine = await self.replicas.wait(beginnings, tried, self.wait_s if self.replicas.has_begun else 0)
            if engine is None:
                break
            try:
                return await call(engine.client)
            except UnavailableError as e:
                refusal = e
                tried.append(engine)
        raise refusal

    async def _of_all(self, question: str) -> dict[str, Any]:
        """The answers of all engines that live, by name."""
        # For `metrics` and `figures` an engine that does not answer is no reason to have none.
        is_needed = question in ("flush", "reset")
        engines = [engine for engine in self._connected() if is_needed or not engine.missed]

        async def answer(engine: Engine) -> Any:
            async with asyncio.timeout(ALL_S if is_needed else ANSWER_S):
                return await engine.client.ask(question)

        results = await asyncio.gather(*(answer(engine) for engine in engines), return_exceptions=True)
        answers, missing = {}, []
        for engine, result in zip(engines, results, strict=True):
            if not isinstance(result, BaseException):
                answers[engine.name] = result
            elif not isinstance(result, LostError):
                # One that is lost has nothing any more that the question is of.
                missing.append(engine.name)
        if missing and is_needed:
            message = f"{len(answers)} of {len(engines)} engines have answered, and not {', '.join(missing)}"
            raise ApiError(503, message)
        if not answers and question != "metrics":
            raise UnavailableError("no engine is ready")
        return answers


def model_of(hello: protocol.Hello) -> str:
    """An engine's model and what it may be asked for: with other values, requests could not go on there.

    Hosts may have the files at different paths.
    """
    name, dtype, *others = map(hello.info.get, ("model_path", "dtype", "quantization", "kv_cache_dtype", "activations"))
    options = "quantize {}, kv_cache_dtype {}, activations {}".format(*others)
    masks = "with" if hello.has_masks else "without"
    return f"{name} in {dtype} ({options}), {hello.capacity} positions, blocks of {hello.largest_block}, {masks} masks"


def summed(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums the figures of several engines; "engines" lists those of each."""
    total: dict[str, Any] = {"engines": list(figures)}
    for name, value in figures[0].items():
        values = [each[name] for each in figures]
        if isinstance(value, dict):
            keys = {key: None for each in values for key in each}
            total[name] = {key: sum(each.get(key, 0) for each in values) for key in keys}
        else:
            total[name] = sum(values)
    used = sum(each["usage"] * each["positions"] for each in figures)
    total["usage"] = used / max(total["positions"], 1)
    return total


def _labelled(sample: bytes, label: bytes) -> bytes:
    """A line of a sample whose label ``engine`` is ``label``."""
    if b'engine="' in sample:
        return _ENGINE.sub(label, sample, count=1)
    name, brace, rest = sample.partition(b"{")
    if not brace:
        name, _, rest = sample.partition(b" ")
        rest = b"} " + rest
    return b"%s{%s%s%s" % (name, label, b"," if brace else b"", rest)


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Prometheus' text of several engines.

    It moves lines, since reading and writing each sample would hold the interpreter for a second where there are many
    engines.

    Args:
        texts: The text of each, by the name of the engine, which takes the place of the label ``engine``.
    """
    families: dict[bytes, list[bytes]] = {}
    for name, text in texts.items():
        label = b'engine="%s"' % name.encode()
        for family in _FAMILY.finditer(text):
            head = text[family.start() : family.start(2)]
            lines = families.setdefault(family[1], [head])
            lines += [_labelled(sample, label) for sample in family[2].splitlines(keepends=True)]
    count = b"# HELP dflash:replicas Engines that answer.\n# TYPE dflash:replicas gauge\ndflash:replicas %d\n"
    return b"".join(line for lines in families.values() for line in lines) + count % len(texts)
