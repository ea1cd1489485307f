"""The engine's side of the protocol: what fronts ask of one engine, with grammars, metrics and warm-up beside it.

Everything here runs in one event loop; the engine has a thread of its own (`AsyncEngine`).
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec.structs import astuple

from dflash_jax import protocol
from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.media import PromptMedia
from dflash_jax.engine.request import Event
from dflash_jax.engine.router import Message
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up import WarmUp
from dflash_jax.errors import EngineError, QueueFullError, UnavailableError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.process import leave_out_of_collections
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.server import wire
from dflash_jax.server.answer_splitter import FirstCall
from dflash_jax.server.capacity import Share
from dflash_jax.server.engine_client import EngineClient
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar import GrammarProcesses, grammar_tokens
from dflash_jax.server.management import Management
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.request_context import RequestContext
from dflash_jax.server.tower import TowerTurns
from dflash_jax.workers.process import STOPPED

log = logging.getLogger("dflash_jax.server")

# The probe's priority, before all that clients can choose.
FIRST = -(2**31) - 1
# Seconds that the probe's token may take, and seconds between two checks of other requests' tokens.
TOKEN_S, LOOK_S = 10.0, 0.05
# Seconds in which the engine's thread must run a command.
COMMAND_S = 30.0
# Seconds for the last events of requests that the end of the engine ends.
LAST_S = 2.0
# Log-probabilities and events of a record, with what one event has beyond them: each is a dict, which takes long.
MOST_ENTRIES = 512


@dataclass(eq=False)
class _Choices:
    """What the requests of one prompt share.

    Attributes:
        users: Those that have not ended.
        share: The memory of the rows of its images and videos, which is released when the last one ends.
        longest: New tokens of the longest one that has ended.
    """

    users: int = 0
    share: Share | None = None
    longest: int = 0

    def leave(self) -> None:
        """One of the requests has ended."""
        self.users -= 1
        if not self.users and self.share is not None:
            self.share.release()


@dataclass(eq=False)
class _Live:
    """A request of a front.

    Attributes:
        sequence: Its sequence.
        owner: Who may abort it.
        name: The id that clients know.
        choices: What it shares with the other requests of its prompt.
        has_begun: Whether an event of it was sent.
        version: That of its last event.
    """

    sequence: TextSequence
    owner: bytes
    name: str
    choices: _Choices
    has_begun: bool = False
    version: str | None = None

    def __post_init__(self):
        self.choices.users += 1


class EngineHost:
    """What fronts ask of one engine.

    Attributes:
        llm: The model.
        name: Its first name.
        fronts: Fronts that are connected.
        engine: The engine on its own thread.
        metrics: Prometheus metrics, of the requests of all fronts.
        warm_up: Compiles the engine's programs.
        management: What an administrator does with the engine.
        grammar: Structured output; None without a tokenizer's file.
        tower: The vision tower; None for a model of text.
        is_ready: Whether requests are taken.
        has_stopped: Whether no request is taken any more, for good.
    """

    def __init__(self, llm: LLM, engine: AsyncEngine, name: str, info: dict[str, Any] | None = None):
        self.llm, self.engine, self.warm_up = llm, engine, WarmUp(engine.engine)
        self.name, self.metrics, self._info = name, Metrics(name, engine), info or {}
        self.is_ready, self.has_stopped = False, False
        self.grammar = None
        if llm.tokenizer is not None and llm.tokenizer.file is not None:
            tokens = grammar_tokens(llm.tokenizer, llm.config.vocab_size, llm.defaults.stop_ids)
            self.grammar = GrammarProcesses(tokens)
        self.tower = None if llm.encoder is None else TowerTurns(llm.encoder)
        self.fronts: set[FrontConnection] = set()
        self.management = Management(llm, engine, self.tell_state)
        self._probe: asyncio.Task | None = None
        engine.on_change = self.tell_state

    @property
    def summary(self) -> str:
        """How much is compiled, and under which name it is served."""
        return f"{self.warm_up.compiled} of {self.warm_up.total} programs compiled; as {self.name}"

    def hello(self) -> protocol.Hello:
        """The first record of a connection."""
        config, capacity = self.engine.engine.config, self.engine.engine.runner.capacity
        return protocol.Hello(capacity, config.largest_block, config.masks, asdict(self.llm.facts), self._info)

    def connect(self, send: Callable[[protocol.FromEngine], None]) -> "FrontConnection":
        """A new front; ``send`` sends a record to it, in the event loop that calls the connection."""
        front = FrontConnection(self, send)
        self.fronts.add(front)
        send(self.hello())
        send(self.state())
        return front

    def new_channel(self) -> wire.Channel:
        """The channel of a front that connects over a socket."""
        channel = wire.Channel(protocol.FromFront, lambda record: front.receive(record), lambda: front.close())
        front = self.connect(channel.send)
        front.channel = channel
        return channel

    async def close_channels(self) -> None:
        """Closes all connections when fronts have what ended their requests, or after some seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_S
        while any(front.live for front in self.fronts) and loop.time() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        for front in self.fronts:
            if front.channel is not None:
                front.channel.close()
        while self.fronts and loop.time() < until:
            await asyncio.sleep(0.01)

    def state(self) -> protocol.State:
        """Whether requests are taken, and why the engine has failed."""
        failure = self.engine.engine.failure
        if self.is_ready and not self.engine.takes_requests:
            failure = failure or "its thread has ended"
        resting = self.management
        return protocol.State(self.is_ready, failure, self.llm.weight_version, resting.rest, resting.refuses)

    def tell_state(self) -> None:
        """Sends the state to all fronts. Any thread may call it."""
        self.tell(self.state())

    def tell(self, record: protocol.FromEngine, besides: "FrontConnection | None" = None) -> None:
        """Sends a record to all fronts but one. Any thread may call it."""
        for front in list(self.fronts):
            if front is not besides:
                front.tell(record)

    def set_ready(self) -> None:
        """Starts the engine's thread, and takes requests from now on. Any thread may call it."""
        self.engine.start()
        self.is_ready = True
        self.tell_state()

    def start(
        self,
        is_full: bool = False,
        on_ready: Callable[[], object] = lambda: None,
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        """Compiles the programs that the first request needs, and takes requests; others are compiled beside them.

        Args:
            is_full: Whether every program is compiled before the first request.
            on_ready: Called on a thread when requests are taken.
            on_failure: Called on a thread when they never will be.
        """
        # Not a pool's, which the process would wait for at its end.
        work = (is_full, on_ready, on_failure)
        threading.Thread(target=self._warm_up, args=work, name="warm-up", daemon=True).start()

    def _warm_up(self, is_full: bool, on_ready: Callable[[], object], on_failure: Callable[[], object]) -> None:
        try:
            with ThreadPoolExecutor(1, "prepare") as beside:
                workers = beside.submit(self.start_workers)
                if is_full:
                    self.warm_up.all()
                    self._compile_tower()
                else:
                    self.warm_up.first(workers.result)
                workers.result()
        except Exception:
            log.exception("warm-up failed")
            on_failure()
            return
        leave_out_of_collections()
        self.set_ready()
        on_ready()
        if self.tower is not None and not is_full:
            threading.Thread(target=self._compile_tower, name="vision-warm-up", daemon=True).start()
        if self.warm_up.compiled < self.warm_up.total:
            self._compile_others()
        self.engine.engine.policy.keep()

    def _compile_tower(self) -> None:
        if self.tower is not None:
            self.tower.compile(self.engine.engine.runner.capacity)

    def _compile_others(self) -> None:
        warm, began = self.warm_up, time.monotonic()
        log.info("compiling %d programs beside requests", warm.total - warm.compiled)
        try:
            warm.others()
        except Exception:
            log.exception("the other programs are not compiled: requests go on with those that are")
        log.info("%d of %d programs compiled after %.0f s", warm.compiled, warm.total, time.monotonic() - began)

    def stop(self) -> None:
        """Ends the engine and what runs beside it; open requests get an error."""
        self.warm_up.stop()
        if self.is_ready:
            self.engine.stop()
            self.engine.engine.policy.keep()
        self.stop_workers()

    def start_workers(self) -> None:
        """Starts the processes of grammars."""
        if self.grammar is not None:
            self.grammar.start()

    def stop_workers(self) -> None:
        """Ends the processes of grammars and the tower's thread, for good."""
        self.has_stopped = True
        for workers in (self.grammar, self.tower):
            if workers is not None:
                workers.stop()

    @property
    def plain_round_s(self) -> float | None:
        """Measured seconds of a plain round with as many sequences as run now; None where none was measured."""
        engine = self.engine.engine
        sequences_per_shard = max(1, -(-engine.running // engine.runner.shards))
        batch_size = next((n for n in engine.runner.batch_sizes() if n >= sequences_per_shard), sequences_per_shard)
        measurements = engine.policy.measurements()
        measured = [measurements.get((batch_size, spec)) for spec in (Speculation(1), NO_DRAFTER)]
        return min((seconds for seconds in measured if seconds is not None), default=None)

    def abort(self, owner: bytes | None, names: Collection[str] | None) -> int:
        """Ends the owner's requests, of all fronts; with names only those of them. Returns how many are ended.

        Args:
            owner: None: any.
            names: The ids that clients know; None: any.
        """
        return sum(front.abort(owner, names) for front in self.fronts)

    # The questions of `protocol.Ask`.

    async def answer(self, question: str) -> Any:
        """The answer to a question.

        Raises:
            EngineError: The engine does not answer.
        """
        engine = self.engine.engine
        match question:
            case "figures":
                return self._figures()
            case "metrics":
                return self.metrics.text()
            case "flush":
                return await self._on_engine(engine.flush)
            case "reset":
                return await self._on_engine(engine.prefix_cache.clear)
            case "generate":
                return await self._generates()
        raise KeyError(question)

    def _figures(self) -> dict[str, Any]:
        """The counters behind /server_info and the measures of load."""
        engine = self.engine.engine
        s, rounds = engine.statistics, engine.statistics.rounds.copy()
        return {
            "running": engine.running,
            "waiting": engine.waiting,
            "waiting_tokens": engine.waiting_tokens,
            "slots": engine.runner.slots,
            "usage": engine.usage,
            "positions": engine.positions,
            "requests": dict(s.requests),
            "rounds": rounds.total(),
            "drafts": rounds.drafts,
            "accepted": rounds.accepted_tokens,
            "prompt_tokens": s.prompt_tokens,
            "cached_tokens": s.cached_tokens,
            "dispatches": {f"{rows}x{spec}": count for (rows, spec), count in dict(s.dispatches).items()},
            "round_seconds": {f"{rows}x{spec}": v for (rows, spec), v in engine.policy.measurements().items()},
            "warm_up": {name: getattr(self.warm_up, name) for name in ("compiled", "failed", "total")},
        }

    async def _on_engine(self, function: Callable[[], Any]) -> Any:
        """Calls ``function()`` on the engine's thread."""
        if not self.is_ready:
            raise UnavailableError("the server is warming up")
        try:
            return await asyncio.wait_for(self.engine.call(function), COMMAND_S)
        except (TimeoutError, EngineError):
            raise UnavailableError("the engine does not answer") from None

    async def _generates(self) -> str | None:
        """Why the engine does not generate a token now; None where it does. Concurrent callers share one token."""
        if self.management.rest:
            return self.management.rest
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._test())
        # Shielded: when one caller leaves, the others still wait.
        return await asyncio.shield(self._probe)

    async def _test(self) -> str | None:
        statistics = self.engine.engine.statistics
        before, token = statistics.new_tokens, asyncio.create_task(self._generate())
        try:
            async with asyncio.timeout(TOKEN_S):
                while not token.done():
                    await asyncio.wait({token}, timeout=LOOK_S)
                    if self.management.rest:
                        return self.management.rest
                    # When every slot is busy, tokens of other requests are sufficient proof.
                    if self.engine.engine.free_slots == 0 and statistics.new_tokens > before:
                        return None
                return token.result()
        except TimeoutError:
            return f"no token came within {TOKEN_S:g} s"
        finally:
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)

    async def _generate(self) -> str | None:
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        sequence = self.llm.new_sequence([0], params, 1, priority=FIRST)
        try:
            async for event in self.engine.submit(sequence.request):
                if event.error is not None:
                    return str(event.error)
        except QueueFullError:
            # No place in the queue: only tokens of running requests can show that the engine generates.
            await asyncio.sleep(TOKEN_S)
            return f"no token came within {TOKEN_S:g} s"
        except EngineError as e:
            return str(e)
        return None


def in_process(host: EngineHost) -> EngineClient:
    """A front's side in the process and the event loop of ``host``: records are passed on as objects."""

    def send(record: protocol.FromFront) -> None:
        asyncio.get_running_loop().call_soon(front.receive, record)

    client = EngineClient(send)
    front = host.connect(client.receive)
    return client


class FrontConnection:
    """One front's requests and calls.

    Attributes:
        send: Sends a record to the front.
        channel: What the records go over; None in one process.
        live: Its requests that have not ended, by number.
    """

    def __init__(self, host: EngineHost, send: Callable[[protocol.FromEngine], None]):
        self._host, self.send = host, send
        self.channel: wire.Channel | None = None
        self.live: dict[int, _Live] = {}
        # Of the connection, or of its first record.
        self._loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Task] = {}
        # By call: the owner of a submission that is being prepared, and what was aborted of it (None: all).
        self._preparing: dict[int, tuple[bytes, set[str | None]]] = {}
        # What the next turns of the loop send.
        self._unsent: deque[protocol.Event | protocol.Scores] = deque()

    def receive(self, record: protocol.FromFront) -> None:
        """Takes a record of the front."""
        self._loop = self._loop or asyncio.get_running_loop()
        match record:
            case protocol.Submit():
                self._preparing[record.number] = record.owner, set()
                self._begin(record.number, lambda: self._submit(record))
            case protocol.Compile():
                self._begin(record.number, lambda: self._compile(record))
            case protocol.Ask():
                self._begin(record.number, lambda: self._host.answer(record.question))
            case protocol.Leave():
                if (task := self._calls.pop(record.number, None)) is not None:
                    task.cancel()
                self._preparing.pop(record.number, None)
                self._leave(record.requests)
            case protocol.Abort():
                self._host.abort(record.owner, None if record.name is None else {record.name})
            case protocol.Manage(action="abort"):
                names = record.arguments.get("names")
                aborted = self._host.abort(None, None if names is None else set(names))
                self.send(protocol.Answered(record.number, aborted))
            case protocol.Manage():
                self._begin(record.number, lambda: self._host.management.answer(record))

    def tell(self, record: protocol.FromEngine) -> None:
        """Sends a record that answers none. Any thread may call it."""
        running = None
        with contextlib.suppress(RuntimeError):
            running = asyncio.get_running_loop()
        if self._loop in (None, running):
            # Before the answer to the call that has changed something.
            self.send(record)
            return
        # A closed loop waits for no record.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.send, record)

    def close(self) -> None:
        """The front has gone: its calls and requests end."""
        self._host.fronts.discard(self)
        for task in self._calls.values():
            task.cancel()
        self._leave(list(self.live))

    def _begin(self, number: int, work: Callable[[], Coroutine]) -> None:
        async def call() -> None:
            try:
                self.send(protocol.Answered(number, await work()))
            except Exception as e:
                self.send(protocol.Failed(number, self._failure(e)))
            finally:
                self._calls.pop(number, None)

        self._calls[number] = asyncio.create_task(call())

    def _failure(self, error: Exception) -> protocol.Failure:
        if self._host.has_stopped:
            # Whatever it was: a process that was ended, say.
            return protocol.failure_of(UnavailableError(STOPPED))
        if isinstance(error, ApiError):
            return protocol.Failure("api", error.message, error.status_code, error.param)
        if not isinstance(error, tuple(protocol.FAILURES.values())):
            log.error("a call of a front failed", exc_info=error)
        return protocol.failure_of(error)

    async def _compile(self, record: protocol.Compile) -> list[str]:
        RequestContext(client=record.client).enter()
        assert self._host.grammar is not None, "a form without a tokenizer's file"
        return (await self._host.grammar.grammar(record.form)).notes

    async def _submit(self, record: protocol.Submit) -> list[float]:
        RequestContext(client=record.client).enter()
        begun: dict[int, _Live] = {}
        _, aborted = self._preparing[record.number]
        try:
            self._host.management.check()
            seconds = [await self._prepare(record, prompt, begun) for prompt in record.prompts]
            # A pause may have begun meanwhile.
            self._host.management.check()
            numbers = {live.sequence.request: number for number, live in begun.items()}
            self._host.engine.begin(list(numbers), lambda request, message: self._take(numbers[request], message))
        except BaseException:
            for live in begun.values():
                live.sequence.request.close()
                live.choices.leave()
            raise
        finally:
            self._preparing.pop(record.number, None)
        self.live |= begun
        for live in begun.values():
            if aborted & {None, live.name}:
                self._host.engine.abort(live.sequence.request)
        self._host.tell(protocol.Begun(self._host.engine.open_requests, record.beginnings), besides=self)
        self._host.metrics.count_losses([choice for prompt in record.prompts for choice in prompt.choices])
        return seconds

    async def _prepare(self, record: protocol.Submit, prompt: protocol.Prompt, begun: dict[int, _Live]) -> float:
        """Adds the requests of a prompt to ``begun``, and encodes its images and videos: the seconds of the tower."""
        choices, tower, media = _Choices(), self._host.tower, None
        if prompt.media is not None:
            assert tower is not None, "media for a model of text"
            self._host.management.check_awake()
            media = tower.encoder.prompt_media(prompt.media)
        params = SamplingParams(**prompt.params)
        for choice in prompt.choices:
            sequence = await self._sequence(record, prompt, replace(params, seed=choice.seed), media)
            request = sequence.request
            if request.monitor and choice.tokens:
                request.monitor(choice.tokens)
            request.tokens += choice.tokens
            begun[choice.number] = _Live(sequence, record.owner, choice.name, choices)
            # Others have a turn: there may be thousands, of thousands of tokens each.
            await asyncio.sleep(0)
        if media is None or tower is None:
            return 0.0
        before = time.perf_counter()
        # Last, when no value of the prompt is wrong.
        choices.share = await tower.encode(record.client, media)
        prompt.preparation["tower"] = time.perf_counter() - before
        return prompt.preparation["tower"]

    async def _sequence(
        self, record: protocol.Submit, prompt: protocol.Prompt, params: SamplingParams, media: PromptMedia | None
    ) -> TextSequence:
        llm, mask = self._host.llm, None
        if prompt.form is not None:
            assert self._host.grammar is not None, "a form without a tokenizer's file"
            mask = (await self._host.grammar.grammar(prompt.form)).mask(prompt.thought)
        try:
            return llm.new_sequence(
                prompt.ids.tolist(),
                params,
                prompt.block_size,
                mask=mask,
                must_end=prompt.form is not None and prompt.form.begins,
                budget=prompt.budget,
                records_drafts=prompt.records_drafts,
                ends=None if prompt.ends is None else FirstCall(*astuple(prompt.ends)),
                client=record.client,
                priority=prompt.priority,
                cache_salt=prompt.cache_salt,
                media=media,
                preparation=prompt.preparation,
                streamed=False,
            )
        except BaseException:
            if mask is not None:
                mask.close()
            raise

    def abort(self, owner: bytes | None, names: Collection[str] | None) -> int:
        """As `EngineHost.abort`, of this front's requests; also of those that are being prepared."""
        for preparing, aborted in self._preparing.values():
            if owner in (None, preparing):
                aborted |= {None} if names is None else set(names)
        ended = [live for live in self.live.values() if owner in (None, live.owner)]
        ended = [live for live in ended if names is None or live.name in names]
        for live in ended:
            self._host.engine.abort(live.sequence.request)
        return len(ended)

    def _leave(self, numbers: Sequence[int]) -> None:
        gone = [live for number in numbers if (live := self.live.pop(number, None)) is not None]
        for live in gone:
            self._host.metrics.forget(live.sequence)
            live.choices.leave()
        self._host.engine.leave([live.sequence.request for live in gone])

    def _take(self, number: int, message: Message) -> None:
        """Adds an event of the engine to the next record."""
        if (live := self.live.get(number)) is None:
            return
        if isinstance(message, Exception):
            event = protocol.Event(number, failure=protocol.failure_of(message))
        else:
            self._host.metrics.observe(message)
            event = self._event(number, live, message)
        if event.finish_reason is not None or event.failure is not None:
            del self.live[number]
            live.choices.leave()
            if event.failure is None:
                live.choices.longest = max(live.choices.longest, len(live.sequence.request.tokens))
                self._host.metrics.finish(live.sequence, None if live.choices.users else live.choices.longest)
            self._host.metrics.forget(live.sequence)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        if not live.has_begun:
            live.has_begun, entries = True, live.sequence.request.prompt_entries
            for first in range(0, len(entries), MOST_ENTRIES):
                self._unsent.append(protocol.Scores(number, entries[first : first + MOST_ENTRIES]))
        self._unsent.append(event)

    @staticmethod
    def _event(number: int, live: _Live, message: Event) -> protocol.Event:
        request, is_first = live.sequence.request, not live.has_begun
        event = protocol.Event(number, message.tokens, message.yielded, list(message.drafted), message.drafter)
        event.finish_reason, event.logprobs = message.finish_reason, message.logprobs
        event.proposals = live.sequence.proposals(message)
        if message.error is not None:
            event.failure = protocol.failure_of(message.error)
        if is_first or message.finish_reason is not None:
            event.times, event.cached = request.times, request.cached
        if message.version != live.version:
            event.version = live.version = message.version
        return event

    def _flush(self) -> None:
        """Sends as much as one turn may."""
        events, size = list[protocol.Event](), 0
        while self._unsent and size < MOST_ENTRIES:
            record = self._unsent.popleft()
            if isinstance(record, protocol.Scores):
                self._send_of([record], lambda scores: scores[0])
                size += len(record.entries)
            else:
                events.append(record)
                size += 1 + len(record.logprobs or ())
        if self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        if events:
            self._send_of(events, self._events)

    def _events(self, events: list[protocol.Event]) -> protocol.Events:
        return protocol.Events(self._host.engine.engine.runner.clock, self._host.plain_round_s, events)

    def _send_of(self, parts: list, record_of: Callable[[list], protocol.FromEngine]) -> None:
        """Sends the record of some parts. One that cannot be sent ends its request with an error, and no other."""
        try:
            self.send(record_of(parts))
        except Exception as e:
            first, *others = dict.fromkeys(part.number for part in parts)
            if others:
                for number in (first, *others):
                    self._send_of([part for part in parts if part.number == number], record_of)
                return
            log.error("an event of a request cannot be sent", exc_info=e)
            self._unsent = deque(part for part in self._unsent if part.number != first)
            self._leave([first])
            self.send(self._events([protocol.Event(first, failure=protocol.failure_of(e))]))
