"""The context of an HTTP request, from its arrival to its end."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers

from dflash_jax.engine.statistics import Rounds
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server.errors import ApiError, ClientGoneError

log = logging.getLogger("dflash_jax.server")

ID_HEADER, NOTE_HEADER = "x-request-id", "x-dflash-note"
# Anthropic's clients show this header.
ANTHROPIC_HEADER = "request-id"
ID = re.compile(r"[!-~]{1,128}")
# Most notes of an answer, and most characters of a note.
MOST_NOTES, LONGEST_NOTE = 8, 300
# Most different notes that are logged, since clients influence their text.
MOST_LOGGED = 256
_logged: set[str] = set()


def fresh_id() -> str:
    """128 random bits in hexadecimal."""
    return secrets.token_hex(16)


@dataclass(eq=False)
class RequestContext:
    """The context of an HTTP request.

    The application's gate makes it when the request arrives. Handlers see its attributes as ``http.state``, and code
    below them asks `current`.

    Attributes:
        headers: Its headers.
        model: Name of the server's model.
        unknown_fields: How fields that no schema has are treated: "refuse" or "warn".
        on_begin: Called with (context, sequence) for each sequence that the engine gets.
        on_end: Called with the context at the end of the request, if the engine has got a sequence.
        owner: A digest of its key: who may abort it and continue its response.
        client: A digest of its key, or its address where there are no keys: who shares capacities by turns.
        body: The `Body`, whose bytes count until the request ends.
        answer_id: The id of the answer, and of its sequences.
        ids: Ids of sequences that have other ones.
        returned_id: The id in the answer's header; None for none.
        anthropic_id: The id in the header and the errors of answers in Anthropic's shape; None for others.
        status: Status of the answer; 499 where the client left before it.
        is_answered: Whether the whole answer is sent.
        began: When it began, in seconds since the epoch.
        notes: Notes to the client, each in a header of the answer.
        sequences: Sequences that the engine got.
        submitted: Set when the engine has got all of them: no value of the request is wrong then.
        until_submitted: Called when the engine has all of them, or the request ends.
        endings: Called when the request ends, however it ends.
    """

    headers: Headers = field(default_factory=Headers)
    model: str = ""
    unknown_fields: str = "refuse"
    on_begin: Sequence[Callable] = ()
    on_end: Sequence[Callable] = ()
    owner: bytes = b""
    client: str | None = None
    body: Any = None
    answer_id: str = field(default_factory=fresh_id)
    ids: dict[TextSequence, str] = field(default_factory=dict)
    returned_id: str | None = None
    anthropic_id: str | None = None
    status: int = 499
    is_answered: bool = False
    began: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list)
    sequences: list[TextSequence] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    until_submitted: ExitStack = field(default_factory=ExitStack)
    endings: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self):
        given = self.headers.get(ID_HEADER, "")
        self.returned_id = given if ID.fullmatch(given) else None

    @property
    def created(self) -> int:
        """When it began, in whole seconds since the epoch."""
        return int(self.began)

    @property
    def rounds(self) -> Rounds:
        """The rounds of all sequences."""
        rounds = Rounds()
        for sequence in self.sequences:
            rounds.update(sequence.rounds)
        return rounds

    def enter(self) -> None:
        """Makes this the current request."""
        _current.set(self)

    def choose_id(self, prefix: str, request_id: str | None = None, rid: str | None = None) -> str:
        """Chooses the id of the answer.

        Args:
            prefix: The beginning of the id, as OpenAI's ids have it.
            request_id: vLLM's field; the header X-Request-Id has precedence.
            rid: SGLang's field: the complete id, without a prefix.

        Raises:
            ApiError: The header cannot be returned.
        """
        header = self.headers.get(ID_HEADER)
        if header is not None and not ID.fullmatch(header):
            raise ApiError(400, "X-Request-Id must be 1 to 128 printable ASCII characters, without spaces")
        if rid is not None:
            self.returned_id = self.answer_id = rid
            return rid
        if header is None and request_id is not None:
            self.returned_id = request_id
        self.answer_id = prefix + (self.returned_id or fresh_id())
        return self.answer_id

    def note(self, text: str) -> None:
        """Adds a note to the answer, and logs it once."""
        text = text.encode("ascii", "backslashreplace").decode()
        text = "".join(c if c.isprintable() else " " for c in text)[:LONGEST_NOTE]
        if len(self.notes) < MOST_NOTES and text not in self.notes:
            self.notes.append(text)
        if text not in _logged and len(_logged) < MOST_LOGGED:
            _logged.add(text)
            log.warning("%s", text)

    @property
    def answer_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer: its notes and its ids."""
        ids = ((ID_HEADER, self.returned_id), (ANTHROPIC_HEADER, self.anthropic_id))
        values = [*((NOTE_HEADER, text) for text in self.notes), *ids]
        return [(name.encode("ascii"), value.encode("ascii")) for name, value in values if value is not None]

    def submit(self, sequences: Sequence[TextSequence]) -> None:
        """Notes that the engine has the sequences."""
        self.submitted.set()
        self.until_submitted.close()
        for sequence in sequences:
            self.sequences.append(sequence)
            for observe in self.on_begin:
                observe(self, sequence)

    def end(self) -> None:
        """Calls the endings and the observers.

        The sequences are left out then: what was started for the request, such as a process, keeps its context.
        """
        self.until_submitted.close()
        self.endings.close()
        try:
            for observe in self.on_end if self.sequences else ():
                observe(self)
        finally:
            self.sequences.clear()
            self.ids.clear()


_current: ContextVar[RequestContext | None] = ContextVar("request", default=None)


def current() -> RequestContext:
    """The current request; outside of requests a new one, of no client."""
    return _current.get() or RequestContext()


async def while_connected(receive: Callable, work: Awaitable[None]) -> None:
    """Awaits the answer to the current request.

    Args:
        receive: The request's, all of whose body is received.
        work: Sends the answer.

    Raises:
        ClientGoneError: The client disconnected first, and ``work`` was cancelled.
    """

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        # To a server, the end of the answer is a disconnection too.
        if not task.done() and not current().is_answered:
            raise ClientGoneError
        await task
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
