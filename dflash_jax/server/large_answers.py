"""Large answers, built on a thread: log-probabilities of 8,191 tokens are 10 MB of JSON, which takes a second.

The event loop runs only between two steps of a thread, so each step must be short.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from starlette.responses import Response

from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.json_text import dumped
from dflash_jax.server.errors import JsonResponse
from dflash_jax.server.stream import frame

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


async def event(count: int, build: Callable[[], dict], name: str | None = None) -> bytes:
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
