"""Reading of request bodies: how large they are, counted before anything is made of them.

The parsers of JSON and of its fields hold Python's interpreter lock from their beginning to their end, and no other
request advances meanwhile. Their time follows from the numbers of values and of objects, which are counted here in
steps of a few milliseconds.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from typing import Protocol

from starlette.requests import Request

from dflash_jax.server.errors import ApiError, ClientGoneError

STEP_BYTES = 2**19
# A body up to this size, with what its values take, is read however much memory those of others take.
SMALL_BYTES = 2**16
# Bodies of more are parsed one after another, with turns for others between them.
TURN_BYTES = 2**12
# Seconds that a body has to arrive before it may be given up for another one.
SURE_S = 5.0
# Bytes that a value takes in memory beside its text: what the parser makes of a body may be larger than that.
VALUE_BYTES = 64
# Of the memory for bodies, what those of one client may take.
CLIENT_SHARE = 0.5


async def _counted(body: bytes) -> AsyncIterator[tuple[int, int]]:
    """(values, objects) at most, of more and more of the body; of what is no JSON, any numbers."""
    values = objects = at = 0
    is_text = False
    while at < len(body):
        part = body[at : at + STEP_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            # A backslash belongs to what follows it.
            part = body[at : at + STEP_BYTES + 1]
        at += len(part)
        part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        outside = b"".join(pieces[is_text::2])
        is_text ^= len(pieces) % 2 == 0
        objects += outside.count(b"{")
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        yield values, objects
        if at < len(body):
            await asyncio.sleep(0)


async def check(body: bytes, values: int, objects: int) -> int:
    """The values of a body. Raises ApiError where it has more than ``values``, or ``objects``."""
    seen = 0, 0
    async for seen in _counted(body):
        if seen[0] > values:
            raise ApiError(400, f"the body has more than {values} values in its lists and objects")
        if seen[1] > objects:
            raise ApiError(400, f"the body has more than {objects} objects")
    return seen[0]


def has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


def replayed(body: bytes, receive: Callable) -> Callable:
    """Receives ``body``, and then what ``receive`` does."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict:
        return left.pop() if left else await receive()

    return next_message


def check_type(headers: dict[bytes, bytes]) -> None:
    """Raises ApiError where a body is not said to be JSON."""
    given = headers.get(b"content-type", b"").decode("latin-1")
    if not re.fullmatch(r"application/(json|[\w.+-]+\+json)\s*(;.*)?", given, re.IGNORECASE | re.ASCII):
        says = f"Content-Type is {given!a}" if given else "there is no Content-Type"
        raise ApiError(415, f"{says}: send JSON, with Content-Type: application/json")


class BodyLimits(Protocol):
    """Limits of bodies, as `Limits` has them."""

    body_bytes: int
    total_body_bytes: int
    values: int
    objects: int


class BodyTable(Protocol):
    """What a server counts of all bodies together, as `Serving` does.

    Attributes:
        arriving: Bodies that are being read.
        large_bodies: Held while one large body is checked.
        limits: Limits of one body, and of all.
        capacity: Tokens of the longest request.
        body_bytes: Bytes of all bodies.
        client_body_bytes: The same by client.
    """

    arriving: set["Body"]
    large_bodies: asyncio.Semaphore | asyncio.Lock
    limits: BodyLimits
    capacity: int
    body_bytes: int
    client_body_bytes: Counter

    async def turn(self) -> None: ...


class Body:
    """The body of one request, counted in ``serving`` until it is closed: when its answer needs it no longer.

    Where bodies take all the memory that they may, the slowest of those that still arrive gives way to a large one.
    Those of one ``client`` (its key and address) may take a part of it only, however quickly they arrive.
    """

    def __init__(self, serving: BodyTable, client: Hashable = None):
        self._serving, self._client, self._size = serving, client, 0
        self._began, self._until = 0.0, asyncio.timeout(None)

    async def read(self, receive: Callable) -> bytes:
        """All of it. Raises ApiError where it is too large or gives way, and ClientGoneError."""
        self._began = asyncio.get_running_loop().time()
        self._serving.arriving.add(self)
        try:
            async with self._until:
                body = b"".join([part async for part in self._parts(receive)])
        except TimeoutError:
            raise ApiError(408, "the body arrives more slowly than others, which need its memory") from None
        finally:
            self._serving.arriving.discard(self)
        # One large body at a time: the parsers' steps of several ones would add up between two turns of others.
        async with self._serving.large_bodies if len(body) > STEP_BYTES else contextlib.nullcontext():
            limits = self._serving.limits
            values = await check(body, max(limits.values, 2 * self._serving.capacity), limits.objects)
        self._take(VALUE_BYTES * values)
        if len(body) > TURN_BYTES:
            # The framework parses and validates it in one step.
            await self._serving.turn()
        return body

    async def _parts(self, receive: Callable) -> AsyncIterator[bytes]:
        limits, more = self._serving.limits, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part, more = message.get("body", b""), message.get("more_body")
            if self._size + len(part) > limits.body_bytes:
                raise ApiError(413, f"the body has more than {limits.body_bytes} bytes")
            self._take(len(part))
            yield part

    def _take(self, more: int) -> None:
        """Counts further bytes. Raises ApiError where a large body takes too much of its client's memory, or of all."""
        most = self._serving.limits.total_body_bytes
        self._count(more)
        if self._size > SMALL_BYTES and self._of_client() > CLIENT_SHARE * most:
            raise ApiError(429, "this client's requests take too much of the server's memory: try again later")
        while self._size > SMALL_BYTES and self._serving.body_bytes > most:
            self._make_room()

    def _make_room(self) -> None:
        """Gives up the slowest large body that has had its time. Raises ApiError where there is none."""
        now = asyncio.get_running_loop().time()
        slow = [b for b in self._serving.arriving if b._size > SMALL_BYTES and now - b._began > SURE_S]
        slowest = min(slow, key=lambda b: b._size / (now - b._began), default=self)
        if slowest is self:
            raise ApiError(503, "the server reads too many large requests: try again later")
        slowest.close()
        self._serving.arriving.discard(slowest)
        slowest._until.reschedule(now)

    def _of_client(self) -> int:
        """Bytes of all bodies of its client."""
        return self._serving.client_body_bytes[self._client]

    def _count(self, more: int) -> None:
        self._size += more
        self._serving.body_bytes += more
        self._serving.client_body_bytes[self._client] += more
        if not self._of_client():
            del self._serving.client_body_bytes[self._client]

    def close(self) -> None:
        self._count(-self._size)


def release(http: Request, keeps_parsed: bool) -> None:
    """Drops the raw body and what JSON makes of it, which Starlette keeps as long as the request. The body counts no
    longer, unless the request ``keeps_parsed`` parts of it that may be large."""
    for name in ("_body", "_json"):
        vars(http).pop(name, None)
    if not keeps_parsed:
        http.state.body.close()
