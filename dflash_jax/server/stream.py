"""Answers: server-sent events, and JSON, made and sent in pieces.

Log-probabilities of 8,191 tokens are 10 MB of JSON, which takes a second. Everything else has a turn between two
pieces, and a piece costs little, whatever was asked for.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from time import thread_time

from fastapi import Request
from starlette.responses import Response

from dflash_jax.server.body import release
from dflash_jax.server.errors import ApiError, as_api_error, dumped
from dflash_jax.server.request_context import current

DONE = b"data: [DONE]\n\n"
# A comment, which readers of server-sent events leave out.
KEEP_ALIVE = b": keep-alive\n\n"
# Most bytes of a piece, and the processor time after which it ends.
PIECE_BYTES, PIECE_S = 2**16, 0.004
# Elements of a list of numbers or texts that are written in one step.
STEP_ELEMENTS = 512
# A server-sent event, or the parts of a large one.
Frame = bytes | Iterator[bytes]


def frame(value: dict, event: str | None = None) -> bytes:
    """One event, in ASCII, so that no Unicode line separator can break it."""
    return b"".join([_frame_head(event), dumped(value), b"\n\n"])


def frame_parts(value: dict, event: str | None = None) -> Iterator[bytes]:
    """Yields the parts of an event whose value may be large; ``value`` as of `json_parts`."""
    yield _frame_head(event)
    yield from json_parts(value)
    yield b"\n\n"


def _frame_head(event: str | None) -> bytes:
    return b"event: %b\ndata: " % event.encode("ascii") if event else b"data: "


def json_parts(value: object) -> Iterator[bytes]:
    """Yields parts of a value as JSON, equal to `dumped` in total.

    Args:
        value: The value. An iterator in it is a list whose elements are made when they are written. Bytes are JSON
            already; in an iterator, empty ones are no element, and say that the next one takes long.
    """
    if isinstance(value, dict) and value:
        for i, (key, inner) in enumerate(value.items()):
            yield (b"," if i else b"{") + dumped(key) + b":"
            yield from json_parts(inner)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], int | float | str | None):
        for first in range(0, len(value), STEP_ELEMENTS):
            yield (b"," if first else b"[") + dumped(value[first : first + STEP_ELEMENTS])[1:-1]
        yield b"]"
    elif isinstance(value, list | Iterator):
        separator = b"["
        for element in value:
            if element == b"":
                yield element
                continue
            yield separator
            yield from json_parts(element)
            separator = b","
        yield b"[]" if separator == b"[" else b"]"
    else:
        yield value if isinstance(value, bytes) else dumped(value)


def pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Joins parts to pieces that have at most twice `PIECE_BYTES`, and take `PIECE_S` and what one part takes."""
    piece, size, until = [], 0, thread_time() + PIECE_S
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            if size >= PIECE_BYTES:
                yield b"".join(piece)
                piece, size, until = [], 0, thread_time() + PIECE_S
            piece.append(part[at : at + PIECE_BYTES])
            size += len(piece[-1])
        if thread_time() >= until:
            yield b"".join(piece)
            piece, size, until = [], 0, thread_time() + PIECE_S
    if piece:
        yield b"".join(piece)


async def event_frames(events: AsyncGenerator[dict, None], are_numbered: bool = False) -> AsyncGenerator[Frame, None]:
    """Yields events as frames under their types, with their numbers in the stream where they ``are_numbered``."""
    number = 0
    async for event in events:
        yield frame_parts(event | {"sequence_number": number} if are_numbered else event, event["type"])
        number += 1


class JsonAnswer(Response):
    """A JSON answer of any size, sent while it is made."""

    media_type = "application/json"

    def __init__(self, value: object):
        """Prepares an answer; ``value`` as of `json_parts`."""
        self._value, self.status_code, self.background = value, 200, None

    async def __call__(self, scope, receive, send) -> None:
        """Sends the answer. An error before the third piece has a status of its own."""
        turn, produced = scope["app"].state.serving.turn, pieces(json_parts(self._value))
        self.body, following = next(produced), next(produced, None)
        self.init_headers()
        if following is not None:
            del self.headers["content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while following is not None:
            await send({"type": "http.response.body", "body": self.body, "more_body": True})
            await turn()
            self.body, following = following, next(produced, None)
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class Later(Response):
    """The response that ``work`` returns.

    The work begins when the route has returned, since FastAPI keeps the request's body until then.
    """

    def __init__(self, http: Request, work: Awaitable[Response], keeps_parsed: bool = False):
        """Prepares the response; ``keeps_parsed`` as in `release`."""
        self._http, self._work, self._keeps_parsed = http, work, keeps_parsed
        self.status_code, self.background = 200, None

    async def __call__(self, scope, receive, send) -> None:
        """Releases the request's body, does the work, and sends its response."""
        release(self._http, self._keeps_parsed)
        response = await self._work
        await response(scope, receive, send)


def error_frame(error: ApiError) -> bytes:
    """The event of an error in the shape that OpenAI's and SGLang's streams have."""
    return frame(error.body)


class EventStream(Response):
    """A stream of frames. Its generator is closed when the request ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[Frame, None],
        *,
        last: bytes = DONE,
        idle: bytes = KEEP_ALIVE,
        error: Callable[[ApiError], bytes] = error_frame,
    ):
        """Prepares a stream.

        Args:
            frames: The frames; a large one as an iterator of its parts.
            last: What ends the stream.
            idle: What is sent while no frame comes.
            error: The frame of an error after `start`.
        """
        self._frames, self._first = frames, asyncio.get_running_loop().create_future()
        self._last, self._idle, self._error = last, idle, error
        # When the last bytes were sent, on the loop's clock, and whether they are inside of a frame.
        self._sent_at, self._is_inside = 0.0, False
        self.status_code, self.background = 200, None
        # The length is unknown, so no Content-Length is sent.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def start(self) -> "EventStream":
        """Waits until the engine has the request, and returns itself. An error before has a status of its own."""
        first = self._first = asyncio.ensure_future(anext(self._frames, None))
        submitted = asyncio.ensure_future(current().submitted.wait())
        try:
            await asyncio.wait({first, submitted}, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await self._frames.aclose()
            raise
        finally:
            submitted.cancel()
        return self

    async def __call__(self, scope, receive, send) -> None:
        """Sends the frames."""
        tasks: list[asyncio.Future] = [self._first]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._sent_at = asyncio.get_running_loop().time()
            if seconds := scope["app"].state.serving.keep_alive_s:
                tasks.append(asyncio.create_task(self._keep_alive(send, seconds)))
            await self._send(send, scope["app"].state.serving.turn)
        except OSError:
            # The client disconnected during a write.
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()

    async def _send(self, send, turn: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()

        async def write(frame: Frame) -> None:
            if isinstance(frame, bytes):
                self._sent_at = loop.time()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                return
            self._is_inside = True
            for i, piece in enumerate(pieces(frame)):
                if i:
                    await turn()
                await write(piece)
            self._is_inside = False

        try:
            if (first := await self._first) is not None:
                await write(first)
            async for frame in self._frames:
                await write(frame)
        except OSError:
            raise
        except Exception as e:
            await write(self._error(as_api_error(e)))
        await send({"type": "http.response.body", "body": self._last, "more_body": False})

    async def _keep_alive(self, send, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + seconds - loop.time()))
            if loop.time() - self._sent_at >= seconds:
                self._sent_at = loop.time()
                if not self._is_inside:
                    await send({"type": "http.response.body", "body": self._idle, "more_body": True})
