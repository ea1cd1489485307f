"""What of each request goes to the log and to OpenTelemetry: ids, sampling parameters, counts and times.

`Observer` wraps the application; `begun` is called for every sequence that the engine takes. Observers of a request run
after its answer and cannot change it.
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

# Sequences of a request that are logged one by one, and ids of a prompt that are decoded for it.
MOST_LOGGED, MOST_DECODED = 16, 4096


@dataclass
class Observed:
    """One HTTP request: its id, its headers of the trace that it belongs to, the name of the model, and its sequences
    so far.

    began: seconds since the epoch. status: of the answer; 499 where the client left before it.
    """

    request_id: str
    path: str
    trace: dict[str, str]
    began: float
    status: int = 499
    model: str = ""
    rows: list[TextSequence] = field(default_factory=list)
    on_begin: Sequence[Callable] = ()


_current: ContextVar[Observed | None] = ContextVar("observed", default=None)


def begun(row: TextSequence, model: str) -> None:
    """The engine takes a sequence of the request at hand, for the model of that name."""
    observed = _current.get()
    if observed is not None:
        observed.request_id = request_id.current() or observed.request_id
        observed.model = model
        observed.rows.append(row)
        for observer in observed.on_begin:
            observer(observed, row)


class Observer:
    """An ASGI application around another one. ``on_begin`` are called with (request, sequence), ``on_end`` with the
    request after its answer."""

    def __init__(self, app, on_begin: Sequence[Callable] = (), on_end: Sequence[Callable] = ()):
        self.app, self._on_begin, self._on_end = app, on_begin, on_end

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        trace = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k in (b"traceparent", b"tracestate")}
        observed = Observed(uuid.uuid4().hex, scope["path"], trace, time.time(), on_begin=self._on_begin)
        _current.set(observed)

        async def watched(message) -> None:
            if message["type"] == "http.response.start":
                observed.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            for observer in self._on_end if observed.rows else ():
                observer(observed)


class RequestLog:
    """Lines of the log: for each sequence when it begins, for each request when it ends. ``decode`` shows prompts, cut
    at ``max_length`` characters; None keeps them out."""

    def __init__(self, decode: Callable | None = None, max_length: int = 2048):
        self._decode, self._max_length = decode, max_length

    def begin(self, observed: Observed, row: TextSequence) -> None:
        number = len(observed.rows) - 1
        if number >= MOST_LOGGED:
            return
        request = row.request
        params = json.dumps({k: self._shown(v) for k, v in asdict(request.params).items() if _is_given(v)})
        line = f"request {_plain(observed.request_id)}-{number}: {len(request.prompt)} prompt tokens, params {params}"
        if self._decode is not None:
            text = self._decode(request.prompt[:MOST_DECODED])
            line += f", prompt {json.dumps(text[: self._max_length])}"
        log.info("%s", line)

    def _shown(self, value):
        """A parameter as it is logged: lists, which hold what the client wrote, by their length."""
        if isinstance(value, (list, tuple, dict)) and self._decode is None:
            return f"{len(value)} given"
        return value if isinstance(value, (bool, int, float)) else str(value)[: self._max_length]

    def end(self, observed: Observed) -> None:
        tokens = sum(len(row.request.tokens) for row in observed.rows)
        reasons = ", ".join(sorted({row.request.finish_reason or "aborted" for row in observed.rows}))
        seconds = time.time() - observed.began
        line = "request %s: status %d, %d sequences, %d new tokens, %s, %.3f s"
        values = (_plain(observed.request_id), observed.status, len(observed.rows), tokens, reasons, seconds)
        log.info(line, *values)


def _is_given(value) -> bool:
    return value is not None and value is not False and value not in ((), [], {}, "")


def _plain(text: str) -> str:
    return json.dumps(text)[1:-1]
