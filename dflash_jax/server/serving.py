"""The model behind the server: rows in, pieces of text out, counted."""

import asyncio
import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from dflash_jax.engine.request import Event
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.server.additions import Additions
from dflash_jax.server.errors import ApiError, TooLongError
from dflash_jax.server.grammar import GrammarProcesses, grammar_tokens
from dflash_jax.server.metrics import Metrics
from dflash_jax.server.observe import begun
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.templates import Templates
from dflash_jax.server.texts import Texts

if TYPE_CHECKING:
    from dflash_jax.server.body import Body

# SGLang's name for the one model of a server, whatever it is.
ANY_MODEL = "default"
# Items of a conversation that are parsed or written in one step.
STEP_ITEMS = 512


@dataclass(frozen=True)
class Limits:
    """What one HTTP request may ask for.

    Attributes:
        body_bytes: Bytes of its body.
        total_body_bytes: Bytes of the bodies of all requests in flight.
        values: Values in lists and objects of its body; for a longer capacity, twice that.
        objects: Objects in its body.
    """

    body_bytes: int = 10 * 2**20
    total_body_bytes: int = 2**30
    values: int = 2**18
    objects: int = 2**13
    choices: int = 16
    prompts: int = 128
    stops: int = 16
    stop_characters: int = 256
    tools: int = 128
    logprobs: int = 20
    # Unknown fields of a request: "refuse" or "warn".
    unknown_fields: str = "refuse"
    trust_request_chat_template: bool = False


# Sequences of the request at hand that the engine does not know yet.
_prepared: ContextVar[list[TextSequence] | None] = ContextVar("prepared", default=None)


def begin_rows() -> list[TextSequence]:
    """The list of the sequences that a request prepares, each until it is submitted."""
    _prepared.set(rows := [])
    return rows


def prepared(row: TextSequence) -> TextSequence:
    """Has ``row`` closed at the end of its request if it is not submitted by then."""
    if (rows := _prepared.get()) is not None:
        rows.append(row)
    return row


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def until_gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(http: HttpRequest, work: Awaitable):
    """The work's result. Cancels it, and raises ClientGoneError, when the client goes away first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(http.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class _Spacing:
    """Holds a row's events until they bring ``interval`` tokens. The first, the last and an error never wait."""

    def __init__(self, row: TextSequence, interval: int):
        self._row, self._interval, self._held, self._is_first = row, interval, [], True

    def push(self, event: Event) -> Iterator[Piece]:
        """Yields the piece that this event completes, if any. Raises the error that ended the request, if one did."""
        if event.error is None:
            self._held.append(event)
        is_last = event.finish_reason is not None or event.error is not None
        if self._held and (self._is_first or is_last or sum(len(e.tokens) for e in self._held) >= self._interval):
            self._is_first = False
            pieces = [self._take(e) for e in self._held]
            self._held = []
            yield functools.reduce(Piece.joined, pieces)
        if event.error is not None:
            self._take(event)

    def _take(self, event: Event) -> Piece:
        self._row.take(event)
        self._row.raise_failure()
        return self._row.pieces.popleft()


class Serving:
    """One LLM and its engine, under the names that clients may use. stream_interval: tokens between two pieces of a
    text, the first and the last of which never wait. additions: what answers hold without being asked."""

    def __init__(
        self,
        llm: LLM,
        engine: AsyncEngine,
        names: Sequence[str],
        limits: Limits = Limits(),
        info=None,
        response_store: ResponseStore | None = None,
        stream_interval: int = 1,
        additions: Additions | None = None,
    ):
        self.llm, self.engine, self.names, self.limits = llm, engine, tuple(names), limits
        self.response_store = ResponseStore() if response_store is None else response_store
        self.info: dict = info or {}
        self.stream_interval, self.additions = stream_interval, additions or Additions()
        self.created = int(time.time())
        self.is_ready, self.is_draining = False, False
        # HTTP requests for text that were let in and have no whole answer yet.
        self.in_flight = 0
        # Id and owner of every sequence under way, for `abort`.
        self._ids: weakref.WeakKeyDictionary[TextSequence, tuple[str, bytes]] = weakref.WeakKeyDictionary()
        # Bytes of request bodies that are in memory, and of each client's.
        self.body_bytes, self.client_body_bytes = 0, Counter()
        # Bodies that are being received.
        self.arriving: set[Body] = set()
        self.large_bodies, self._turns = asyncio.Lock(), asyncio.Lock()
        self.metrics = Metrics(self)
        self.grammar = None
        if llm.tokenizer is not None and llm.tokenizer.file is not None:
            tokens = grammar_tokens(llm.tokenizer, llm.config.vocab_size, llm.defaults.stop_ids)
            self.grammar = GrammarProcesses(tokens)
        self.templates = Templates(llm.tokenizer) if llm.tokenizer is not None else None
        self.texts = Texts(llm, self.capacity)

    async def turn(self) -> None:
        """To be awaited before a step that takes the event loop milliseconds: between two such steps, of any requests,
        everything else that waits has its turn."""
        async with self._turns:
            # A piece of a stream takes several turns of the event loop on its way to the socket.
            for _ in range(8):
                await asyncio.sleep(0)

    async def in_steps(self, items: Sequence) -> AsyncIterator[Sequence]:
        """Parts of many items, each for one such step."""
        for first in range(0, len(items), STEP_ITEMS):
            await self.turn()
            yield items[first : first + STEP_ITEMS]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def capacity(self) -> int:
        """Positions of a slot."""
        return self.engine.engine.runner.capacity

    @property
    def clock(self) -> float:
        """Seconds on the engine's clock."""
        return self.engine.engine.runner.clock

    @property
    def failure(self) -> str | None:
        if self.is_ready and not self.engine.is_alive:
            return "its thread has ended"
        return self.engine.engine.failure

    def stop_workers(self) -> None:
        """Ends the processes of templates and grammars, for good."""
        for processes in (self.templates, self.grammar):
            if processes is not None:
                processes.stop()

    def check_model(self, model: str | None) -> None:
        if model and model not in (*self.names, ANY_MODEL):
            raise ApiError(404, f"model {model!r} is not served here: {', '.join(self.names)}", "model")

    def check_room(self, prompt: Sequence[int], most: int | None, param: str, default: int | None = None) -> int:
        """New tokens that a prompt may have: ``most``, where that is None ``default`` or what there is room for. Raises
        ApiError where it leaves no room."""
        room = self.capacity - len(prompt)
        if most is None and default is not None:
            most = min(default, max(room, 1))
        if room < 1 or (most is not None and most > room):
            wanted = "at least one new one" if most is None else f"{most} new ones"
            message = f"{len(prompt)} prompt tokens and {wanted} do not fit: at most {self.capacity} tokens do"
            raise TooLongError(message, param)
        return room if most is None else most

    def register(self, rows: Sequence[TextSequence], request_id: str, owner: bytes) -> None:
        """Makes the sequences of a request known to `abort`. They are forgotten with the request."""
        self._ids.update(dict.fromkeys(rows, (request_id, owner)))

    def abort(self, request_id: str | None, owner: bytes) -> None:
        """Ends the owner's request of that id, all choices of it; None: all of the owner's requests."""
        for row, known in list(self._ids.items()):
            if known[1] == owner and request_id in (None, known[0]) and row.request.finish_reason is None:
                self.engine.abort(row.request)

    async def pieces(self, row: TextSequence) -> AsyncIterator[Piece]:
        """What the engine brings to a row, until it has all. Whoever stops listening aborts it."""
        spacing = _Spacing(row, self.stream_interval)
        async with contextlib.aclosing(self._events(row)) as events:
            async for event in events:
                for piece in spacing.push(event):
                    yield piece

    async def _events(self, row: TextSequence) -> AsyncGenerator[Event, None]:
        if row in (rows := _prepared.get() or ()):
            rows.remove(row)
        events = self.engine.submit(row.request)
        begun(row, self.name)
        try:
            async for event in events:
                self.metrics.observe(event)
                yield event
                if event.error is not None:
                    return
            self.metrics.finish(row)
        finally:
            self.metrics.forget(row)
            await events.aclose()

    async def run(self, rows: Sequence[TextSequence]) -> None:
        """All of the rows to their ends."""
        async for _ in self.merged(rows):
            pass

    async def merged(self, rows: Sequence[TextSequence]) -> AsyncIterator[tuple[int, Piece]]:
        """(index, piece) of several rows, as they come. A row counts what was yielded of it, and no more."""
        if len(rows) == 1:
            async for piece in self.pieces(rows[0]):
                yield 0, piece
            return
        queue: asyncio.Queue = asyncio.Queue()

        async def feed(i: int) -> None:
            try:
                async with contextlib.aclosing(self._events(rows[i])) as events:
                    async for event in events:
                        queue.put_nowait((i, event))
                queue.put_nowait((i, None))
            except Exception as e:
                queue.put_nowait((i, e))

        spacings = [_Spacing(row, self.stream_interval) for row in rows]
        tasks, left = [asyncio.create_task(feed(i)) for i in range(len(rows))], len(rows)
        try:
            while left:
                i, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    left -= 1
                else:
                    for piece in spacings[i].push(found):
                        yield i, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
