"""A request's id as its client gives it, in the header X-Request-Id or in a field. It comes back in that header."""

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

from dflash_jax.server.errors import ApiError

HEADER = b"x-request-id"
GOOD = re.compile(rb"[!-~]{1,128}")


@dataclass
class Given:
    """Of the request at hand: what its header says, the id that its answer tells, and the answer's own id."""

    header: bytes | None
    told: bytes | None = None
    chosen: str | None = None


_given: ContextVar[Given] = ContextVar("request_id")


def begin(scope, is_always: bool = False) -> Given:
    """Reads the header of the request at hand. ``is_always``: its answer tells an id in any case."""
    header = next((value for name, value in scope["headers"] if name == HEADER), None)
    given = Given(header, header if header is not None and GOOD.fullmatch(header) else None)
    if header is None and is_always:
        given.told = uuid.uuid4().hex.encode()
    _given.set(given)
    return given


def choose(prefix: str, request_id: str | None = None, rid: str | None = None) -> str:
    """The id of an answer.

    Args:
        prefix: What it begins with, as OpenAI's do.
        request_id: vLLM's field; the header goes first.
        rid: SGLang's field: the whole id, without a prefix.

    Raises:
        ApiError: The header is nothing that can be repeated.
    """
    given = _given.get()
    if given.header is not None and not GOOD.fullmatch(given.header):
        raise ApiError(400, "X-Request-Id must be 1 to 128 printable ASCII characters, without spaces")
    if rid is not None:
        given.told, given.chosen = rid.encode(), rid
        return rid
    if given.header is None and request_id is not None:
        given.told = request_id.encode()
    given.chosen = prefix + (given.told.decode() if given.told else uuid.uuid4().hex)
    return given.chosen


def current() -> str | None:
    """The id of the answer to the request at hand, once it has one."""
    return _given.get().chosen


def headers(given: Given) -> list[tuple[bytes, bytes]]:
    return [] if given.told is None else [(HEADER, given.told)]
