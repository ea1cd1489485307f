"""What is recorded of each request, in the log and in OpenTelemetry: ids, sampling parameters, counts and times.

`Observer` wraps the application; `observe_sequence` is called for every sequence that the engine gets. Observers run
after a request's answer and cannot change it.
"""

import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server import request_id

log = logging.getLogger("dflash_jax.requests")

# Most sequences of a request that are logged, and most ids of a prompt that are decoded for the log.
MOST_LOGGED, MOST_DECODED = 16, 4096


@dataclass
class Observed:
    """One HTTP request.

    Attributes:
        request_id: Its id.
        path: Its path.
        trace: Its headers of the trace that it belongs to.
        began: When it began, in seconds since the epoch.
        status: Status of the answer; 499 where the client left before it.
        model: Name of the model.
        sequences: Its sequences so far.
        on_begin: Called with (request, sequence) for each sequence.
    """

    request_id: str
    path: str
    trace: dict[str, str]
    began: float
    status: int = 499
    model: str = ""
    sequences: list[TextSequence] = field(default_factory=list)
    on_begin: Sequence[Callable] = ()


_current: ContextVar[Observed | None] = ContextVar("observed", default=None)


def observe_sequence(sequence: TextSequence, model: str) -> None:
    """Records that the engine gets a sequence of the current request, for the model of this name."""
    observed = _current.get()
    if observed is not None:
        observed.request_id = request_id.current() or observed.request_id
        observed.model = model
        observed.sequences.append(sequence)
        for observer in observed.on_begin:
            observer(observed, sequence)


class Observer:
    """An ASGI application around another one."""

    def __init__(self, app, on_begin: Sequence[Callable] = (), on_end: Sequence[Callable] = ()):
        """Wraps ``app``.

        Args:
            app: The application.
            on_begin: Called with (request, sequence) when a sequence begins.
            on_end: Called with the request after its answer.
        """
        self.app, self._on_begin, self._on_end = app, on_begin, on_end

    async def __call__(self, scope, receive, send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        trace = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in (b"traceparent", b"tracestate")}
        observed = Observed(uuid.uuid4().hex, scope["path"], trace, time.time(), on_begin=self._on_begin)
        _current.set(observed)

        async def send_and_note(message) -> None:
            if message["type"] == "http.response.start":
                observed.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            for observer in self._on_end if observed.sequences else ():
                observer(observed)


class RequestLog:
    """Lines of the log: one when a sequence begins, one when a request ends."""

    def __init__(self, decode: Callable | None = None, max_length: int = 2048):
        """Prepares the log.

        Args:
            decode: Decodes prompts for the log; None: prompts are not logged.
            max_length: Most characters of a prompt.
        """
        self._decode, self._max_length = decode, max_length

    def begin(self, observed: Observed, sequence: TextSequence) -> None:
        """Logs a sequence."""
        number = len(observed.sequences) - 1
        if number >= MOST_LOGGED:
            return
        request = sequence.request
        params = json.dumps({k: self._shown(v) for k, v in asdict(request.params).items() if _is_given(v)})
        line = f"request {_plain(observed.request_id)}-{number}: {len(request.prompt)} prompt tokens, params {params}"
        if self._decode is not None:
            text = self._decode(request.prompt[:MOST_DECODED])
            line += f", prompt {json.dumps(text[: self._max_length])}"
        log.info("%s", line)

    def _shown(self, value):
        """A parameter for the log: a list, which has text of the client, by its length."""
        if isinstance(value, (list, tuple, dict)) and self._decode is None:
            return f"{len(value)} given"
        return value if isinstance(value, (bool, int, float)) else str(value)[: self._max_length]

    def end(self, observed: Observed) -> None:
        """Logs a finished request."""
        tokens = sum(len(sequence.request.tokens) for sequence in observed.sequences)
        reasons = ", ".join(sorted({sequence.request.finish_reason or "aborted" for sequence in observed.sequences}))
        seconds = time.time() - observed.began
        line = "request %s: status %d, %d sequences, %d new tokens, %s, %.3f s"
        values = (_plain(observed.request_id), observed.status, len(observed.sequences), tokens, reasons, seconds)
        log.info(line, *values)


def _is_given(value) -> bool:
    return value is not None and value is not False and value not in ((), [], {}, "")


def _plain(text: str) -> str:
    return json.dumps(text)[1:-1]
