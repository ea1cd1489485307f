"""Server-sent events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from fastapi import Request
from starlette.responses import Response

from dflash_jax.json_text import dumped
from dflash_jax.server import resume
from dflash_jax.server.body import release
from dflash_jax.server.errors import ApiError, as_api_error
from dflash_jax.server.request_scope import until_gone, until_submitted, while_connected

DONE = b"data: [DONE]\n\n"
# A comment, which readers of server-sent events leave out.
KEEP_ALIVE = b": keep-alive\n\n"


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


def error_frame(error: ApiError) -> bytes:
    """The event of an error in the shape that OpenAI's and SGLang's streams have."""
    return frame(error.body)


class EventStream(Response):
    """A stream of frames. Its generator is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        first: asyncio.Future[bytes | None],
        keep_alive_s: float,
        *,
        last: bytes,
        idle: bytes,
        error: Callable[[ApiError], bytes],
    ):
        self._frames, self._first, self._keep_alive_s = frames, first, keep_alive_s
        self._last, self._idle, self._error = last, idle, error
        # When the last bytes were sent, on the loop's clock.
        self._sent_at = 0.0
        self.status_code, self.background = 200, None
        # The length is unknown, so no Content-Length is sent.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    @classmethod
    async def start(
        cls,
        http: Request,
        frames: AsyncGenerator[bytes, None],
        *,
        last: bytes = DONE,
        idle: bytes = KEEP_ALIVE,
        error: Callable[[ApiError], bytes] = error_frame,
    ) -> "EventStream":
        """Waits until the engine has the request. An error before becomes an answer with its own status.

        Args:
            http: The request.
            frames: The frames.
            last: What ends the stream.
            idle: What is sent while no frame comes.
            error: The frame of a later error.
        """
        first = asyncio.ensure_future(anext(frames, None))
        submitted = asyncio.ensure_future(until_submitted())
        try:
            waiting = asyncio.wait({first, submitted}, return_when=asyncio.FIRST_COMPLETED)
            await while_connected(http, waiting)
            if first.done():
                first.result()
        except BaseException:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await frames.aclose()
            raise
        finally:
            submitted.cancel()
        return cls(frames, first, http.app.state.serving.keep_alive_s, last=last, idle=idle, error=error)

    async def __call__(self, scope, receive, send) -> None:
        """Sends the frames until they end or the client disconnects."""
        tasks: list[asyncio.Future] = [self._first]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            resume.current().record_in(send)
            self._sent_at = asyncio.get_running_loop().time()
            sending, gone = asyncio.create_task(self._send(send)), asyncio.create_task(until_gone(receive))
            tasks += [sending, gone]
            if self._keep_alive_s:
                tasks.append(asyncio.create_task(self._keep_alive(send)))
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:
            # The client disconnected during a write.
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()

    async def _send(self, send) -> None:
        loop = asyncio.get_running_loop()
        async for body in self._bodies():
            self._sent_at = loop.time()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + self._keep_alive_s - loop.time()))
            if loop.time() - self._sent_at >= self._keep_alive_s:
                self._sent_at = loop.time()
                await send({"type": "http.response.body", "body": self._idle, "more_body": True})

    async def _bodies(self) -> AsyncIterator[bytes]:
        try:
            if (first := await self._first) is not None:
                yield first
            async for body in self._frames:
                yield body
        except Exception as e:
            yield self._error(as_api_error(e))
        if self._last:
            yield self._last
