"""The id of a request, from the header X-Request-Id or from a field. The answer returns it in that header."""

import re
from contextvars import ContextVar
from dataclasses import dataclass

from dflash_jax.server.errors import ApiError
from dflash_jax.server.resume import fresh_id

HEADER = b"x-request-id"
GOOD = re.compile(rb"[!-~]{1,128}")


@dataclass
class RequestIds:
    """The ids of the current request.

    Attributes:
        header: The request's header.
        returned: The id in the answer's header.
        answer_id: The id of the answer itself.
    """

    header: bytes | None
    returned: bytes | None = None
    answer_id: str | None = None


_current: ContextVar[RequestIds] = ContextVar("request_id")


def begin(scope, is_always: bool = False) -> RequestIds:
    """Reads the header of the current request; with ``is_always``, its answer has an id in any case."""
    header = next((value for name, value in scope["headers"] if name == HEADER), None)
    ids = RequestIds(header, header if header is not None and GOOD.fullmatch(header) else None)
    if header is None and is_always:
        ids.returned = fresh_id().encode()
    _current.set(ids)
    return ids


def choose(prefix: str, request_id: str | None = None, rid: str | None = None) -> str:
    """Chooses the id of an answer.

    Args:
        prefix: The beginning of the id, as OpenAI's ids have it.
        request_id: vLLM's field; the header has precedence.
        rid: SGLang's field: the complete id, without a prefix.

    Raises:
        ApiError: The header cannot be returned.
    """
    ids = _current.get()
    if ids.header is not None and not GOOD.fullmatch(ids.header):
        raise ApiError(400, "X-Request-Id must be 1 to 128 printable ASCII characters, without spaces")
    if rid is not None:
        ids.returned, ids.answer_id = rid.encode(), rid
        return rid
    if ids.header is None and request_id is not None:
        ids.returned = request_id.encode()
    ids.answer_id = prefix + (ids.returned.decode() if ids.returned else fresh_id())
    return ids.answer_id


def current() -> str | None:
    """The id of the answer to the current request, once it has one."""
    return _current.get().answer_id


def headers(ids: RequestIds) -> list[tuple[bytes, bytes]]:
    """Headers of the answer."""
    return [] if ids.returned is None else [(HEADER, ids.returned)]
