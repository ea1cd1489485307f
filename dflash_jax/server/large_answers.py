"""Answers that may be large, made on a thread: log-probabilities of 8,191 tokens are 10 MB of JSON, made in a second.

A thread lets the event loop run between two of its steps only, so each step must be short.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from starlette.responses import Response

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.server.errors import JsonResponse
from dflash_jax.server.stream import frame

# Log-probabilities that are written on the event loop.
FEW = 256
# A longer list is written element by element.
LONG_LIST = 32
_executor = ThreadPoolExecutor(2, "answers")


def entries(rows: Iterable[TextSequence]) -> int:
    """Positions of rows that have log-probabilities."""
    return sum(len(row.logprobs or ()) + len(row.request.prompt_entries or ()) for row in rows)


async def beside(count: int, work: Callable, *args):
    """``work(*args)``, on a thread unless ``count`` log-probabilities or tokens are few."""
    if count <= FEW:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_executor, work, *args)


async def event(count: int, build: Callable[[], dict], name: str | None = None) -> bytes:
    """What ``build`` returns, as one server-sent event of that ``name`` that has ``count`` log-probabilities."""
    if count <= FEW:
        return frame(build(), name)
    head = f"event: {name}\n".encode("ascii") if name else b""
    return await beside(count, lambda: b"".join([head, b"data: ", *pieces(build()), b"\n\n"]))


async def json_response(rows: Iterable[TextSequence], build: Callable[[], object], tokens: int = 0) -> Response:
    """What ``build`` returns, as JSON. ``tokens``: those that it decodes beside log-probabilities."""
    count = entries(rows) + tokens
    if count <= FEW:
        return JsonResponse(build())
    body = await beside(count, lambda: b"".join(pieces(build())))
    return Response(body, media_type=JsonResponse.media_type)


def pieces(value: object) -> Iterator[bytes]:
    """JSON as `JsonResponse` writes it."""
    if isinstance(value, dict) and value:
        for i, (key, each) in enumerate(value.items()):
            yield (b"," if i else b"{") + _dumped(key) + b":"
            yield from pieces(each)
        yield b"}"
    elif isinstance(value, list) and value:
        for i, each in enumerate(value):
            yield b"," if i else b"["
            if len(value) > LONG_LIST:
                yield _dumped(each)
            else:
                yield from pieces(each)
        yield b"]"
    else:
        yield _dumped(value)


def _dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
