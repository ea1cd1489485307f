"""The model behind the server: sequences in, pieces of text out, with metrics."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from time import thread_time
from typing import TypeVar

from dflash_jax.frontend.prompts import Prompts
from dflash_jax.frontend.sequence import Piece
from dflash_jax.protocol import Event
from dflash_jax.server.body import Bodies
from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.engine_client import EngineClient, RemoteSequence
from dflash_jax.server.errors import ApiError, TooLongError, too_long
from dflash_jax.server.limits import DEFAULT_LIMITS, Additions, Limits
from dflash_jax.server.media import MEDIA_PATHS, RequestMedia
from dflash_jax.server.request_context import RequestContext, current
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.templates import Templates
from dflash_jax.server.texts import Texts

T = TypeVar("T")

# SGLang's name for the one model of a server.
ANY_MODEL = "default"
# Paths of requests that may have tensors, and the one where a body may be their bytes, of this type.
TENSOR_PATHS = frozenset(("/update_weights", "/update_weights_from_tensor"))
BYTES_PATH, BYTES_TYPE = "/update_weights", b"application/octet-stream"
# Processor time of a step through many items, in seconds.
STEP_S = 0.004
# Items of a long conversation.
STEP_ITEMS = 512
# Stored items of long conversations that are parsed at a time. Each is several
# objects in up to three forms, and a collection of garbage, which stops all threads, takes 0.1 s for a million objects.
LONG_ITEMS = 2**14
# Requests that may wait for them.
WAITING = 256


class _Spacing:
    """Collects the events of a sequence until they bring ``interval`` tokens.

    The first and the last event and an error are passed on at once.
    """

    def __init__(self, sequence: RemoteSequence, interval: int):
        self._sequence, self._interval, self._is_first = sequence, interval, True
        self._events: list[Event] = []
        self._count = 0

    def push(self, events: Sequence[Event]) -> Iterator[Piece]:
        """Yields the piece that these events complete, if any. Raises the error that ended the request, if one did."""
        end = events[-1]
        fine = events if end.failure is None else events[:-1]
        self._events += fine
        self._count += sum(len(event.tokens) for event in fine)
        is_last = end.finish_reason is not None or end.failure is not None
        if self._events and (self._is_first or is_last or self._count >= self._interval):
            first, *later = [self._take(e) for e in self._events]
            self._is_first, self._events, self._count = False, [], 0
            yield first.joined(*later) if later else first
        if end.failure is not None:
            self._take(end)

    def _take(self, event: Event) -> Piece:
        self._sequence.receive(event)
        self._sequence.raise_failure()
        return self._sequence.pieces.popleft()


class Serving:
    """One LLM and its engine, under the names that clients may use.

    Attributes:
        llm: The model.
        engine: The engine.
        hello: What the engine said first.
        names: Names of the model.
        limits: Limits of a request.
        response_store: Stored responses.
        stream_interval: Tokens between two pieces of a text. The first and the last piece never wait.
        keep_alive_s: Seconds without an event after which a stream says that it goes on; 0 for never.
        additions: Additions to all answers.
        call_syntax: How the model writes calls, "xml", "json" or "bare" (JSON without tags); None: as its template.
        begins_in_thought: Whether every answer begins in a thought that no tag closes before.
        json_blanks: Blanks of JSON where a request does not choose them, as of a `Form`.
        requires_answer: Whether no answer of a chat ends inside its thought, where a request does not choose.
        on_begin, on_end: Observers of all requests, as of `RequestContext`.
        created: When the server started, in seconds since the epoch.
        is_draining: Whether the server shuts down.
        requests: HTTP requests for text without a complete answer.
        bodies: The bodies of all requests but those with new weights, which are in ``tensor_bodies``.
        long_conversations: Stored items that are parsed, of long conversations.
        templates: Chat templates; None without a tokenizer.
        texts: Tokenisation.
        media: Images and videos; None for a model of text.
    """

    def __init__(
        self,
        llm: Prompts,
        engine: EngineClient,
        names: Sequence[str],
        limits: Limits = DEFAULT_LIMITS,
        response_store: ResponseStore | None = None,
        stream_interval: int = 1,
        additions: Additions | None = None,
        keep_alive_s: float = 15.0,
        call_syntax: str | None = None,
        begins_in_thought: bool = False,
        json_blanks: str | None = None,
        requires_answer: bool = False,
    ):
        self.llm, self.engine, self.names, self.limits = llm, engine, tuple(names), limits
        self.response_store = ResponseStore() if response_store is None else response_store
        assert engine.hello is not None, "the engine has not said hello"
        self.hello = engine.hello
        self.stream_interval, self.additions = stream_interval, additions or Additions()
        self.keep_alive_s, self.call_syntax, self.begins_in_thought = keep_alive_s, call_syntax, begins_in_thought
        self.json_blanks, self.requires_answer = json_blanks, requires_answer
        self.on_begin: list[Callable] = []
        self.on_end: list[Callable] = []
        self.created = int(time.time())
        self.is_draining = False
        self.requests: set[RequestContext] = set()
        self.bodies, self.tensor_bodies, self._turns = Bodies(self.turn), Bodies(self.turn), asyncio.Lock()
        self._long_steps = FairCapacity(1, "the reading of large bodies")
        self.long_conversations = FairCapacity(LONG_ITEMS, "the reading of long conversations", WAITING)
        self.templates = Templates(llm.tokenizer) if llm.tokenizer is not None else None
        self.texts = Texts(llm, self.capacity)
        self.media = RequestMedia(llm.media) if llm.media is not None else None

    def prepare(self) -> None:
        """Imports and starts what the first request would wait for otherwise."""
        if self.llm.tokenizer is not None:
            # transformers takes seconds to import.
            _ = self.llm.tokenizer.chat_template
            _ = self.llm.tokenizer.longest_token
        if self.templates is not None:
            self.templates.start()
        if self.media is not None:
            self.media.start()

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

    async def in_steps(self, items: Iterable[T]) -> AsyncIterator[T]:
        """Yields items, with a `turn` whenever what is done with them has taken the processor time of a step."""
        until = 0.0
        for item in items:
            if thread_time() >= until:
                await self.turn()
                until = thread_time() + STEP_S
            yield item

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
        return self.hello.capacity

    def most_body_bytes(self, path: str, is_json: bool = True) -> int:
        """Most bytes of the body of a request to ``path``."""
        limits, takes_media = self.limits, self.media is not None and path in MEDIA_PATHS
        if not is_json:
            return limits.tensor_body_bytes
        takes_media = takes_media or path in TENSOR_PATHS
        return max(limits.body_bytes, limits.media_body_bytes) if takes_media else limits.body_bytes

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.engine.state.is_ready

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; None while it works."""
        return self.engine.state.failure

    def stop_workers(self) -> None:
        """Ends the processes of templates, images and videos, for good."""
        for processes in (self.templates, self.media):
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
        if room < 1:
            raise too_long(len(prompt), self.capacity, param)
        if most is None:
            return room if default is None else min(default, room)
        if most > room:
            message = (
                f"{len(prompt)} prompt tokens and {most} new ones do not fit: this model's maximum context length is"
            )
            raise TooLongError(f"{message} {self.capacity} tokens", param)
        return most

    async def pieces(self, sequence: RemoteSequence) -> AsyncIterator[Piece]:
        """Yields the pieces of a sequence. Closing the iterator aborts the sequence."""
        async with contextlib.aclosing(self.merged([sequence])) as pieces:
            async for _, piece in pieces:
                yield piece

    async def run(self, sequences: Sequence[RemoteSequence]) -> None:
        """Runs all sequences to their ends."""
        async for _ in self.merged(sequences):
            pass

    async def merged(self, sequences: Sequence[RemoteSequence]) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yields (index, piece) of several sequences as they arrive. A sequence counts only yielded pieces.

        Everything else that waits has a turn between two pieces, however many are there already.
        """
        # All of them or none, since a part would run for nothing.
        async with self.engine.submitted(sequences) as inbox:
            current().submit(sequences)
            spacings = {i: _Spacing(sequence, self.stream_interval) for i, sequence in enumerate(sequences)}
            while spacings:
                i, events = await inbox.get()
                for piece in spacings[i].push(events):
                    yield i, piece
                    if inbox.has_some:
                        await asyncio.sleep(0)
                if events[-1].finish_reason is not None:
                    del spacings[i]
