"""Answers: server-sent events, and JSON.

Large ones are built on a thread: log-probabilities of 8,191 tokens are 10 MB of JSON, which takes a second. The event
loop runs only between two steps of a thread, so each step must be short.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from fastapi import Request
from starlette.responses import Response

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.json_text import dumped
from dflash_jax.server.body import release
from dflash_jax.server.errors import ApiError, JsonResponse, as_api_error
from dflash_jax.server.request_context import current

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
    """A stream of frames. Its generator is closed when the request ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        last: bytes = DONE,
        idle: bytes = KEEP_ALIVE,
        error: Callable[[ApiError], bytes] = error_frame,
    ):
        """Prepares a stream.

        Args:
            frames: The frames.
            last: What ends the stream.
            idle: What is sent while no frame comes.
            error: The frame of an error after `start`.
        """
        self._frames, self._first = frames, asyncio.get_running_loop().create_future()
        self._last, self._idle, self._error = last, idle, error
        # When the last bytes were sent, on the loop's clock.
        self._sent_at = 0.0
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
            current().run.record_in(send)
            self._sent_at = asyncio.get_running_loop().time()
            if seconds := scope["app"].state.serving.keep_alive_s:
                tasks.append(asyncio.create_task(self._keep_alive(send, seconds)))
            await self._send(send)
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

    async def _keep_alive(self, send, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + seconds - loop.time()))
            if loop.time() - self._sent_at >= seconds:
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


# Most log-probabilities that are written on the event loop.
FEW = 256
# Elements from which on a list is written element by element.
LONG_LIST = 32
_executor = ThreadPoolExecutor(2, "answers")


def logprob_count(sequences: Iterable[TextSequence]) -> int:
    """Positions of sequences that have log-probabilities."""
    return sum(len(sequence.logprobs or ()) + len(sequence.request.prompt_entries or ()) for sequence in sequences)


async def offload(count: int, work: Callable, *args):
    """Calls ``work(*args)``, on a thread unless ``count`` log-probabilities or tokens are few."""
    if count <= FEW:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_executor, work, *args)


async def large_frame(count: int, build: Callable[[], dict], name: str | None = None) -> bytes:
    """A server-sent event, made on a thread where it is large.

    Args:
        count: Log-probabilities in it.
        build: Returns its data.
        name: Its name; None: without one.
    """
    if count <= FEW:
        return frame(build(), name)
    head = f"event: {name}\n".encode("ascii") if name else b""
    return await offload(count, lambda: b"".join([head, b"data: ", *json_pieces(build()), b"\n\n"]))


async def json_response(sequences: Iterable[TextSequence], build: Callable[[], object], tokens: int = 0) -> Response:
    """A JSON response, made on a thread where it is large.

    Args:
        sequences: The sequences, whose log-probabilities are counted.
        build: Returns the content.
        tokens: Tokens that ``build`` decodes beside them.
    """
    count = logprob_count(sequences) + tokens
    if count <= FEW:
        return JsonResponse(build())
    body = await offload(count, lambda: b"".join(json_pieces(build())))
    return Response(body, media_type=JsonResponse.media_type)


def json_pieces(value: object) -> Iterator[bytes]:
    """Yields pieces of ``value`` as JSON, equal to `JsonResponse` in total."""
    if isinstance(value, dict) and value:
        for i, (key, each) in enumerate(value.items()):
            yield (b"," if i else b"{") + dumped(key) + b":"
            yield from json_pieces(each)
        yield b"}"
    elif isinstance(value, list) and value:
        for i, each in enumerate(value):
            yield b"," if i else b"["
            if len(value) > LONG_LIST:
                yield dumped(each)
            else:
                yield from json_pieces(each)
        yield b"]"
    else:
        yield dumped(value)
