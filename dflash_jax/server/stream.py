"""Server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable

from fastapi import Request
from starlette.responses import Response

from dflash_jax.server.body import release
from dflash_jax.server.errors import as_api_error
from dflash_jax.server.serving import until_gone, while_connected

DONE = b"data: [DONE]\n\n"


def frame(value: dict, event: str | None = None) -> bytes:
    """One event; ASCII, so that no line separator of Unicode's can break it."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(value, separators=(',', ':'))}\n\n".encode("ascii")


class Later(Response):
    """What ``work`` returns, which begins when the route has returned: until then FastAPI keeps the request's body.

    ``keeps_parsed``: as for `release`.
    """

    def __init__(self, http: Request, work: Awaitable[Response], keeps_parsed: bool = False):
        self._http, self._work, self._keeps_parsed = http, work, keeps_parsed
        self.status_code, self.background = 200, None

    async def __call__(self, scope, receive, send) -> None:
        release(self._http, self._keeps_parsed)
        response = await self._work
        await response(scope, receive, send)


class EventStream(Response):
    """An answer whose frames are sent as they are made; whoever makes them is stopped when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], first: bytes | None, last: bytes):
        self._frames, self._first, self._last = frames, first, last
        self.status_code, self.background = 200, None
        # Without a body that is known there is no length to tell.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def start(cls, http: Request, frames: AsyncGenerator[bytes, None], last: bytes = DONE) -> "EventStream":
        """Waits for the first frame: what goes wrong before it is an answer with a status of its own."""
        try:
            first = await while_connected(http, anext(frames, None))
        except BaseException:
            await frames.aclose()
            raise
        return cls(frames, first, last)

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            # The client went away while it was written to.
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
