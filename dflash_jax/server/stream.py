"""Server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

from fastapi import Request
from starlette.responses import Response

from dflash_jax.json_text import dumped
from dflash_jax.server import resume
from dflash_jax.server.body import release
from dflash_jax.server.errors import as_api_error
from dflash_jax.server.request_scope import until_gone, while_connected

DONE = b"data: [DONE]\n\n"


def frame(value: dict, event: str | None = None) -> bytes:
    """One event, in ASCII, so that no Unicode line separator can break it."""
    name = f"event: {event}\n" if event else ""
    return b"".join([name.encode("ascii"), b"data: ", dumped(value), b"\n\n"])


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


class EventStream(Response):
    """A stream of frames. Its generator is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], first: bytes | None, last: bytes):
        self._frames, self._first, self._last = frames, first, last
        self.status_code, self.background = 200, None
        # The length is unknown, so no Content-Length is sent.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def start(cls, http: Request, frames: AsyncGenerator[bytes, None], last: bytes = DONE) -> "EventStream":
        """Waits for the first frame. An error before it becomes an answer with its own status."""
        try:
            first = await while_connected(http, anext(frames, None))
        except BaseException:
            await frames.aclose()
            raise
        return cls(frames, first, last)

    async def __call__(self, scope, receive, send) -> None:
        """Sends the frames until they end or the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        resume.current().record_in(send)
        sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            # The client disconnected during a write.
            return
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._frames.aclose()

    async def _send(self, send) -> None:
        async for body in self._bodies():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bodies(self) -> AsyncIterator[bytes]:
        try:
            if self._first is not None:
                yield self._first
            async for body in self._frames:
                yield body
        except Exception as e:
            yield frame(as_api_error(e).body)
        if self._last:
            yield self._last
