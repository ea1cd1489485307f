"""Reads request bodies, and counts their values before anything parses them.

The parsers of JSON and of its fields hold Python's interpreter lock from beginning to end, and no other request
advances meanwhile. Their time follows from the numbers of values and objects, which are counted here in steps of a few
milliseconds.
"""

import asyncio
import contextlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from dflash_jax.media.parts import TYPES
from dflash_jax.server.errors import ApiError, ClientGoneError
from dflash_jax.server.limits import Limits
from dflash_jax.server.token_lists import WholeNumbers, parse, split

STEP_BYTES = 2**18
# A body up to this size, with the memory of its values, is read even when other bodies have taken all memory.
SMALL_BYTES = 2**16
# Larger bodies are parsed one after another, with turns for other requests between them.
TURN_BYTES = 2**12
# Seconds that a body has to arrive before it may be dropped for another one.
SURE_S = 5.0
# Fields of an object, on average of as many objects as are possible: a field takes the parser longer than a number.
MOST_FIELDS = 8
# Memory of a parsed value beside its text, in bytes: a parsed body may be larger than the raw one.
VALUE_BYTES = 64
# Share of the memory for bodies that one client may take.
CLIENT_SHARE = 0.5
# Most escapes of a body that is larger than one of text, as a share of the bytes of one of text: eight million, which
# are 48 MB, would take the parser three times as long as their bytes.
ESCAPE_SHARE = 0.25
# Fields of a body below which images, videos and tensors are, the fields between, and those of their URLs or base64.
_DATA = ("image_data", "video_data", "serialized_named_tensors")
MEDIA_ROOTS = frozenset({"messages", "input", "update_info", *_DATA})
MEDIA_SOURCES = frozenset({"url", "data", *_DATA, *(key for _, key in TYPES.values())})
MEDIA_FIELDS = MEDIA_SOURCES | {"content", "output", "source"}


async def _counted(body: bytes) -> AsyncIterator[tuple[int, int, int, int]]:
    """Yields upper bounds of (values, objects, fields, bytes of strings beyond ASCII) after each step through the body.

    The counts of invalid JSON are arbitrary.
    """
    values = objects = fields = wide = 0
    is_ascii = body.isascii()
    # The bytes of the last string so far, and whether it is beyond ASCII.
    length, is_wide = 0, False
    async for _, pieces, is_text in split(body, STEP_BYTES):
        outside = b"".join(pieces[is_text::2])
        objects += outside.count(b"{")
        fields += outside.count(b":")
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        for i in () if is_ascii else range(not is_text, len(pieces), 2):
            if i:
                wide, length, is_wide = wide + length * is_wide, 0, False
            length, is_wide = length + len(pieces[i]), is_wide or not pieces[i].isascii()
        yield values, objects, fields, wide + length * is_wide


async def check(body: bytes, values: int, objects: int, text: int | None = None) -> int:
    """Counts the values of a body.

    Args:
        body: The raw body.
        values: Most values in its lists and objects.
        objects: Most objects. They have `MOST_FIELDS` each on average, at most.
        text: Most bytes of its strings beyond ASCII, of which images and videos have none; None: any. One such
            character makes Python use up to four bytes for each character of a string.

    Returns:
        An upper bound of its values.

    Raises:
        ApiError: It has more.
    """
    counts = 0, 0, 0, 0
    async for counts in _counted(body):
        if counts[0] > values:
            raise ApiError(400, f"the body has more than {values} values in its lists and objects")
        if counts[1] > objects:
            raise ApiError(400, f"the body has more than {objects} objects")
        if counts[2] > MOST_FIELDS * objects:
            raise ApiError(400, f"the body has more than {MOST_FIELDS * objects} fields in its objects")
        if text is not None and counts[3] > text:
            raise ApiError(413, f"the body has more than {text} bytes beside its images and videos")
    return counts[0]


def has_body(headers: dict[bytes, bytes]) -> bool:
    """Whether a request has a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def already_read(body: bytes) -> Callable:
    """A ``receive`` that returns ``body``, then waits forever."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return next_message


def check_type(headers: dict[bytes, bytes]) -> None:
    """Checks the Content-Type of a body.

    Raises:
        ApiError: It is not JSON.
    """
    content_type = headers.get(b"content-type", b"").decode("latin-1")
    if not re.fullmatch(r"application/(json|[\w.+-]+\+json)\s*(;.*)?", content_type, re.IGNORECASE | re.ASCII):
        says = f"Content-Type is {content_type!a}" if content_type else "there is no Content-Type"
        raise ApiError(415, f"{says}: send JSON, with Content-Type: application/json")


def text_bytes(value: Any, name: str = "", fields: frozenset[str] = MEDIA_ROOTS) -> int:
    """An upper bound of the bytes of a parsed body's texts, images and videos left out.

    Args:
        value: The body, or a value in it.
        name: Its field, if it is where images and videos are.
        fields: Fields below which images and videos may be.
    """
    if isinstance(value, dict):
        count = sum(map(_most_bytes, value))
        for key, each in value.items():
            is_medium = key in fields
            count += text_bytes(each, key if is_medium else "", MEDIA_FIELDS if is_medium else frozenset())
        return count
    if isinstance(value, WholeNumbers):
        return 0
    if isinstance(value, list):
        count = sum(text_bytes(each, name, fields) for each in value if isinstance(each, dict | list))
        texts = [each for each in value if isinstance(each, str)]
    else:
        count, texts = 0, [value] if isinstance(value, str) else []
    # URLs and base64 are ASCII.
    is_medium = name in MEDIA_SOURCES
    return count + sum(0 if is_medium and text.isascii() else _most_bytes(text) for text in texts)


def _most_bytes(text: str) -> int:
    return len(text) * (1 if text.isascii() else 4)


class MediaRequest(Request):
    """A request whose body may be larger than one of text, or have a million numbers."""

    async def body(self) -> bytes:
        """The raw body. `Body` has it in one piece, which is not copied."""
        if not hasattr(self, "_body"):
            self._body = b"".join([part async for part in self.stream() if part])
        return self._body

    async def json(self) -> Any:
        """The parsed body.

        Raises:
            json.JSONDecodeError: It is not JSON.
            ApiError: It has more text than a body without images and videos may have.
        """
        if not hasattr(self, "_json"):
            content, serving = await self.body(), self.app.state.serving
            text_limit = serving.limits.body_bytes
            async with serving.long_step(len(content)):
                self._json = await parse(content, json.loads if len(content) <= text_limit else _quickly)
                if len(content) > text_limit and text_bytes(self._json) > text_limit:
                    raise ApiError(413, f"the body has more than {text_limit} bytes beside its images and videos")
            if len(content) > TURN_BYTES:
                # Its validation is a step of its own.
                await asyncio.sleep(0)
        return self._json


def _quickly(content: bytes) -> Any:
    try:
        return from_json(content)
    except ValueError as e:
        raise json.JSONDecodeError(str(e)[:200], "", 0) from None


class MediaRoute(APIRoute):
    """A route whose requests may have images and videos, or long lists of token ids."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handles a `MediaRequest`."""
        handle = super().get_route_handler()

        async def handle_media(request: Request) -> Response:
            return await handle(MediaRequest(request.scope, request.receive))

        return handle_media


async def check_escapes(body: bytes, most: int) -> None:
    """Checks a body that is larger than one of text. Images and videos have few escapes.

    Raises:
        ApiError: It has more than ``most``, which take the parser as long as values.
    """
    count = 0
    for at in range(0, len(body), STEP_BYTES):
        count += body.count(b"\\", at, at + STEP_BYTES)
        if count > most:
            raise ApiError(413, f"the body has more than {most} backslashes")
        await asyncio.sleep(0)


class Bodies:
    """The request bodies of a server.

    Attributes:
        nbytes: Bytes of all bodies in memory.
        nbytes_of: Bytes of the bodies of each client.
        arriving: Bodies that are being received.
        large: Held while a large body is counted.
        turn: Awaited before a body is parsed that is not tiny.
    """

    def __init__(self, turn: Callable[[], Awaitable[None]] | None = None):
        self.nbytes, self.nbytes_of, self.turn = 0, Counter(), turn or partial(asyncio.sleep, 0)
        self.arriving: set[Body] = set()
        self.large = asyncio.Lock()


class Body:
    """The body of one request. Its memory counts in ``bodies`` until it is closed.

    When bodies have taken all their memory, the slowest arriving one is dropped for a large one. The bodies of one
    ``client`` (its key, or its address) may take only a share, however fast they arrive.
    """

    def __init__(
        self, bodies: Bodies, limits: Limits, client: Hashable = None, most_bytes: int | None = None, capacity: int = 0
    ):
        """Prepares a body.

        Args:
            bodies: All bodies of the server.
            limits: Limits of one body and of all bodies.
            client: Who sends it.
            most_bytes: Most bytes of it; None for the limit of all paths.
            capacity: Positions of a slot, twice as many of which are possible as values.
        """
        self._bodies, self._limits, self._client, self._size = bodies, limits, client, 0
        self._most_bytes = limits.body_bytes if most_bytes is None else most_bytes
        self._most_values = max(limits.values, 2 * capacity)
        self._began, self._until = 0.0, asyncio.timeout(None)

    async def read(self, receive: Callable, is_json: bool = True) -> bytes:
        """Receives the whole body, and checks it where it is JSON.

        Raises:
            ApiError: It is too large, or was dropped for another one.
            ClientGoneError: The client has disconnected.
        """
        self._began = asyncio.get_running_loop().time()
        self._bodies.arriving.add(self)
        try:
            async with self._until:
                parts = [part async for part in self._parts(receive)]
                # Without the interpreter lock: 60 MB take 30 ms.
                is_large = self._size > self._limits.body_bytes
                body = await asyncio.to_thread(b"".join, parts) if is_large else b"".join(parts)
                del parts
        except TimeoutError:
            raise ApiError(408, "the request body arrived too slowly: other requests needed its memory") from None
        finally:
            self._bodies.arriving.discard(self)
        if not is_json:
            return body
        # One large body at a time: the steps of several would add up between two turns of other requests.
        async with self._bodies.large if len(body) > STEP_BYTES else contextlib.nullcontext():
            most = self._limits.body_bytes if (is_large := len(body) > self._limits.body_bytes) else None
            values = await check(body, self._most_values, self._limits.objects, most)
            if is_large:
                await check_escapes(body, int(ESCAPE_SHARE * self._limits.body_bytes))
        self.reserve(VALUE_BYTES * values)
        if len(body) > TURN_BYTES:
            # The framework parses and validates the body in one step.
            await self._bodies.turn()
        return body

    async def _parts(self, receive: Callable) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part, more = message.get("body", b""), message.get("more_body")
            if self._size + len(part) > self._most_bytes:
                raise ApiError(413, f"the body has more than {self._most_bytes} bytes")
            self.reserve(len(part))
            yield part

    def reserve(self, more: int) -> None:
        """Counts further bytes, of the body or of images and videos that it names.

        Raises:
            ApiError: A large body exceeds its client's share or the memory of all bodies.
        """
        capacity = self._limits.total_body_bytes
        self._count(more)
        if self._size > SMALL_BYTES and self._bodies.nbytes_of[self._client] > CLIENT_SHARE * capacity:
            raise ApiError(429, "this client's requests take too much of the server's memory")
        while self._size > SMALL_BYTES and self._bodies.nbytes > capacity:
            self._make_room()

    def _make_room(self) -> None:
        """Drops the slowest large body that has had its time.

        Raises:
            ApiError: There is none.
        """
        now = asyncio.get_running_loop().time()
        slow = [b for b in self._bodies.arriving if b._size > SMALL_BYTES and now - b._began > SURE_S]
        slowest = min(slow, key=lambda b: b._size / (now - b._began), default=self)
        if slowest is self:
            raise ApiError(503, "the server reads too many large requests")
        slowest.close()
        self._bodies.arriving.discard(slowest)
        slowest._until.reschedule(now)

    def _count(self, more: int) -> None:
        self._size += more
        self._bodies.nbytes += more
        self._bodies.nbytes_of[self._client] += more
        if not self._bodies.nbytes_of[self._client]:
            del self._bodies.nbytes_of[self._client]

    def close(self) -> None:
        """Frees the body's memory in the count."""
        self._count(-self._size)


def release(http: Request, keeps_parsed: bool) -> None:
    """Drops the raw body and its parsed JSON, which Starlette keeps as long as the request.

    Args:
        http: The request.
        keeps_parsed: Whether the request keeps large parsed values, so that its memory still counts.
    """
    for name in ("_body", "_json"):
        vars(http).pop(name, None)
    if not keeps_parsed:
        http.state.body.close()
