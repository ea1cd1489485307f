"""The model behind the server: sequences in, pieces of text out, with metrics."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.request import Event
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.engine.warm_up import WarmUp
from dflash_jax.errors import EngineError, UnavailableError
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.server.additions import Additions
from dflash_jax.server.body import Bodies
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.constraint import grammar_tokens
from dflash_jax.server.errors import ApiError, TooLongError
from dflash_jax.server.grammar import GrammarProcesses
from dflash_jax.server.limits import DEFAULT_LIMITS, Limits
from dflash_jax.server.media import MEDIA_PATHS, RequestMedia
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.request_context import RequestContext, current
from dflash_jax.server.response_store import Responses, ResponseStore
from dflash_jax.server.templates import Templates
from dflash_jax.server.texts import Texts
from dflash_jax.server.tower import TowerTurns

# SGLang's name for the one model of a server.
ANY_MODEL = "default"
# Items of a conversation that are parsed or written in one step.
STEP_ITEMS = 512
# Sequences of a request that begin or end in one step.
STEP_SEQUENCES = 64
# Stored items of conversations that are parsed at a time, of those that have more than `STEP_ITEMS`. Each is several
# objects in up to three forms, and a collection of garbage, which stops all threads, takes 0.1 s for a million objects.
LONG_ITEMS = 2**14
# Requests that may wait for them.
WAITING = 256


class _Spacing:
    """Collects the events of a sequence until they bring ``interval`` tokens.

    The first and the last event and an error are passed on at once.
    """

    def __init__(self, sequence: TextSequence, interval: int):
        self._sequence, self._interval, self._is_first = sequence, interval, True
        self._events, self._count = [], 0

    def push(self, events: Sequence[Event]) -> Iterator[Piece]:
        """Yields the piece that these events complete, if any. Raises the error that ended the request, if one did."""
        end = events[-1]
        fine = events if end.error is None else events[:-1]
        self._events += fine
        self._count += sum(len(event.tokens) for event in fine)
        is_last = end.finish_reason is not None or end.error is not None
        if self._events and (self._is_first or is_last or self._count >= self._interval):
            first, *later = [self._take(e) for e in self._events]
            self._is_first, self._events, self._count = False, [], 0
            yield first.joined(*later) if later else first
        if end.error is not None:
            self._take(end)

    def _take(self, event: Event) -> Piece:
        self._sequence.take(event)
        self._sequence.raise_failure()
        return self._sequence.pieces.popleft()


class Serving:
    """One LLM and its engine, under the names that clients may use.

    Attributes:
        llm: The model.
        engine: The engine on its own thread.
        names: Names of the model.
        limits: Limits of a request.
        response_store: Stored responses.
        info: What /server_info shows beside counters.
        stream_interval: Tokens between two pieces of a text. The first and the last piece never wait.
        keep_alive_s: Seconds without an event after which a stream says that it goes on; 0 for never.
        additions: Additions to all answers.
        created: When the server started, in seconds since the epoch.
        warm_up: Compiles the engine's programs.
        is_ready: Whether requests are answered.
        is_draining: Whether the server shuts down.
        requests: HTTP requests for text without a complete answer.
        bodies: The bodies of all requests.
        long_conversations: Stored items that are parsed, of long conversations.
        metrics: Prometheus metrics.
        grammar: Structured output; None without a tokenizer's file.
        templates: Chat templates; None without a tokenizer.
        texts: Tokenisation.
        media: Images and videos; None for a model of text.
    """

    def __init__(
        self,
        llm: LLM,
        engine: AsyncEngine,
        names: Sequence[str],
        limits: Limits = DEFAULT_LIMITS,
        info=None,
        response_store: Responses | None = None,
        stream_interval: int = 1,
        additions: Additions | None = None,
        keep_alive_s: float = 15.0,
    ):
        self.llm, self.engine, self.names, self.limits = llm, engine, tuple(names), limits
        self.response_store: Responses = ResponseStore() if response_store is None else response_store
        self.info: dict = info or {}
        self.stream_interval, self.additions = stream_interval, additions or Additions()
        self.keep_alive_s = keep_alive_s
        self.created = int(time.time())
        self.warm_up = WarmUp(engine.engine)
        self.is_ready, self.is_draining = False, False
        self.requests: set[RequestContext] = set()
        self.bodies, self._turns = Bodies(self.turn), asyncio.Lock()
        self._long_steps = FairCapacity(1, "the reading of large bodies")
        self.long_conversations = FairCapacity(LONG_ITEMS, "the reading of long conversations", WAITING)
        self.metrics = Metrics(self.name, engine)
        self.grammar = None
        if llm.tokenizer is not None and llm.tokenizer.file is not None:
            tokens = grammar_tokens(llm.tokenizer, llm.config.vocab_size, llm.defaults.stop_ids)
            self.grammar = GrammarProcesses(tokens)
        self.templates = Templates(llm.tokenizer) if llm.tokenizer is not None else None
        self.texts = Texts(llm, self.capacity)
        self.media = None
        if llm.media is not None and llm.encoder is not None:
            self.media = RequestMedia(llm.media, TowerTurns(llm.encoder))

    def prepare(self) -> None:
        """Imports and starts what the first request would wait for otherwise."""
        if self.llm.tokenizer is not None:
            # transformers takes seconds to import.
            _ = self.llm.tokenizer.chat_template
            _ = self.llm.tokenizer.longest_token
        if self.templates is not None:
            self.templates.start()
        for processes in (self.grammar, self.media):
            if processes is not None:
                processes.start()

    async def turn(self) -> None:
        """Lets everything else that waits run once. Await it before a step that takes the event loop milliseconds."""
        async with self._turns:
            # A piece of a stream needs several turns of the event loop to reach the socket.
            for _ in range(8):
                await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def long_step(self, nbytes: int) -> AsyncGenerator[None, None]:
        """Held during a step that reads or copies ``nbytes``; without effect for no more than a body of text has.

        Larger ones take the event loop tens of milliseconds. They run one at a time, those of several clients by turns.
        Between two of them, everything else has as long as the first one took: the engine needs the interpreter
        several times for each of its own steps.
        """
        if nbytes <= self.limits.body_bytes:
            yield
            return
        loop = asyncio.get_running_loop()
        share = await self._long_steps.take(1)
        began = loop.time()
        try:
            await self.turn()
            began = loop.time()
            yield
        finally:
            loop.call_later(loop.time() - began, share.release)

    async def in_steps(self, items: Sequence) -> AsyncIterator[Sequence]:
        """Yields parts of many items, with a `turn` before each part."""
        for first in range(0, len(items), STEP_ITEMS):
            await self.turn()
            yield items[first : first + STEP_ITEMS]

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.names[0]

    @property
    def in_flight(self) -> int:
        """The number of ``requests``."""
        return len(self.requests)

    @property
    def capacity(self) -> int:
        """Positions of a slot."""
        return self.engine.engine.runner.capacity

    def most_body_bytes(self, path: str) -> int:
        """Most bytes of the body of a request to ``path``."""
        limits, takes_media = self.limits, self.media is not None and path in MEDIA_PATHS
        return max(limits.body_bytes, limits.media_body_bytes) if takes_media else limits.body_bytes

    @property
    def clock(self) -> float:
        """The engine's clock, in seconds."""
        return self.engine.engine.runner.clock

    @property
    def plain_round_s(self) -> float | None:
        """Measured seconds of a plain round with as many sequences as run now; None where none was measured."""
        engine = self.engine.engine
        sequences_per_shard = max(1, -(-engine.running // engine.runner.shards))
        batch_size = next((n for n in engine.runner.batch_sizes() if n >= sequences_per_shard), sequences_per_shard)
        measured = [engine.policy.seconds.get((batch_size, spec)) for spec in (Speculation(1), NO_DRAFTER)]
        return min((seconds for seconds in measured if seconds is not None), default=None)

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; None while it works."""
        if self.is_ready and not self.engine.is_alive:
            return "its thread has ended"
        return self.engine.engine.failure

    def stop_workers(self) -> None:
        """Ends the processes of templates, grammars, images and videos, for good."""
        for processes in (self.templates, self.grammar, self.media):
            if processes is not None:
                processes.stop()

    def check_model(self, model: str | None) -> None:
        """Checks the model's name.

        Raises:
            ApiError: 404, it is not served here.
        """
        if model and model not in (*self.names, ANY_MODEL):
            raise ApiError(404, f"model {model!r} is not served here: {', '.join(self.names)}", "model")

    def check_room(self, prompt: Sequence[int], most: int | None, param: str, default: int | None = None) -> int:
        """The number of new tokens that a prompt may have.

        Args:
            prompt: Token ids.
            most: The request's limit; None: ``default``.
            param: The field, for errors.
            default: The default; None: as many as there is room for.

        Raises:
            ApiError: There is no room for them.
        """
        room = self.capacity - len(prompt)
        if most is None and default is not None:
            most = min(default, max(room, 1))
        if room < 1 or (most is not None and most > room):
            new_tokens = "at least one new one" if most is None else f"{most} new ones"
            message = f"{len(prompt)} prompt tokens and {new_tokens} do not fit: at most {self.capacity} tokens do"
            raise TooLongError(message, param)
        return room if most is None else most

    def abort(self, request_id: str | None, owner: bytes) -> None:
        """Ends all sequences of the owner's request with that id; None: of all of the owner's requests."""
        for context in [context for context in self.requests if context.owner == owner]:
            for sequence in context.sequences:
                is_meant = request_id in (None, context.ids.get(sequence, context.answer_id))
                if is_meant and sequence.request.finish_reason is None:
                    self.engine.abort(sequence.request)

    async def pieces(self, sequence: TextSequence) -> AsyncIterator[Piece]:
        """Yields the pieces of a sequence. Closing the iterator aborts the sequence."""
        async with contextlib.aclosing(self.merged([sequence])) as pieces:
            async for _, piece in pieces:
                yield piece

    async def _events(self, sequence: TextSequence) -> AsyncGenerator[list[Event], None]:
        batches = self.engine.submit_batched(sequence.request)
        current().submit(sequence)
        try:
            async for events in batches:
                for event in events:
                    self.metrics.observe(event)
                yield events
                if events[-1].error is not None:
                    return
            self.metrics.finish(sequence)
        finally:
            self.metrics.forget(sequence)
            await batches.aclose()

    async def run(self, sequences: Sequence[TextSequence]) -> None:
        """Runs all sequences to their ends."""
        async for _ in self.merged(sequences):
            pass

    async def merged(self, sequences: Sequence[TextSequence]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (index, piece) of several sequences as they arrive. A sequence counts only yielded pieces.

        Pieces of an earlier run of the request come first. A consumer that asks for the next piece has sent all events
        of the one before. Everything else that waits has a turn between two pieces, however many are there already.
        """
        run = current().run
        over = run.ended()
        # All of them or none, since a part would run for nothing; and before the first event of a resumed stream, whose
        # refusal then sets the status, so that another server may go on.
        with self.engine.reserved([sequence.request for i, sequence in enumerate(sequences) if i not in over]):
            for i, piece in run.replayed(sequences):
                yield i, piece
                await asyncio.sleep(0)
            await run.end_replay()
            try:
                async with contextlib.aclosing(self._live(sequences)) as pieces:
                    async for i, piece in pieces:
                        yield i, piece
                        await run.record(i, sequences[i], piece)
                        await asyncio.sleep(0)
            except (EngineError, UnavailableError):
                await run.lose()
                raise

    async def _live(self, sequences: Sequence[TextSequence]) -> AsyncGenerator[tuple[int, Piece], None]:
        """`merged` of what the engine generates."""
        places = [i for i, sequence in enumerate(sequences) if sequence.request.finish_reason is None]
        spacings = {i: _Spacing(sequences[i], self.stream_interval) for i in places}
        if len(places) == 1:
            (i,) = places
            async with contextlib.aclosing(self._events(sequences[i])) as batches:
                async for events in batches:
                    for piece in spacings[i].push(events):
                        yield i, piece
            return
        queue: asyncio.Queue = asyncio.Queue()

        async def feed(i: int) -> None:
            try:
                async with contextlib.aclosing(self._events(sequences[i])) as batches:
                    async for events in batches:
                        queue.put_nowait((i, events))
                queue.put_nowait((i, None))
            except Exception as e:
                queue.put_nowait((i, e))

        tasks, unfinished = [], len(places)
        try:
            for first in range(0, len(places), STEP_SEQUENCES):
                tasks += [asyncio.create_task(feed(i)) for i in places[first : first + STEP_SEQUENCES]]
                await asyncio.sleep(0)
            while unfinished:
                i, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    unfinished -= 1
                else:
                    for piece in spacings[i].push(item):
                        yield i, piece
        finally:
            try:
                for first in range(0, len(tasks), STEP_SEQUENCES):
                    step = tasks[first : first + STEP_SEQUENCES]
                    for task in step:
                        task.cancel()
                    await asyncio.gather(*step, return_exceptions=True)
            finally:
                # All of them, even where this task is cancelled meanwhile.
                for task in tasks:
                    task.cancel()
