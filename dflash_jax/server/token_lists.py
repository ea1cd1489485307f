"""Long lists of numbers in a body, such as the token ids of a prompt, parsed in pieces.

The parsers of JSON and of its fields hold Python's interpreter lock from beginning to end: 0.1 s for a million numbers.
"""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import WrapValidator

from dflash_jax.server.schema_base import Items, TokenId

# Least bytes of a body whose numbers are parsed separately.
LONG_BODY = 2**17
# Bytes that are searched for numbers, or parsed, in one step.
STEP_BYTES = 2**16
_NUMBERS = re.compile(rb"[\d,\s]{4096,}")


class WholeNumbers(list[int]):
    """Whole numbers of a body, none of them negative: they need no further validation."""


def _validated(value: Any, validate: Callable[[Any], list[int]]) -> list[int]:
    return value if isinstance(value, WholeNumbers) else validate(value)


# Token ids of a prompt.
TokenList = Annotated[Items[TokenId], WrapValidator(_validated)]


async def parse(body: bytes, parse_rest: Callable[[bytes], Any]) -> Any:
    """Parses JSON. Other requests have turns while its numbers are parsed.

    Args:
        body: The JSON.
        parse_rest: Parses the body in which a short name stands for each long run of numbers.

    Raises:
        json.JSONDecodeError: A run of numbers is none; or what ``parse_rest`` raises.
    """
    rest, runs, at = [], {}, 0
    mark = os.urandom(16).hex()
    for start, end in await _runs(body) if len(body) > LONG_BODY else ():
        name = f"{mark}{len(runs)}"
        rest += [body[at:start], b'"', name.encode(), b'"']
        runs[name], at = await _numbers(body, start, end), end
    if not runs:
        return parse_rest(body)
    # The value stands in a list, so that it can be replaced itself.
    whole = [parse_rest(b"".join([*rest, body[at:]]))]
    waiting: list[Any] = [whole]
    while waiting:
        value = waiting.pop()
        for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(child, list) and any(isinstance(part, str) and part in runs for part in child):
                child = value[key] = await _joined(child, runs)
            if isinstance(child, dict) or (isinstance(child, list) and not isinstance(child, WholeNumbers)):
                waiting.append(child)
    return whole[0]


async def split(body: bytes, step: int) -> AsyncIterator[tuple[int, list[bytes], bool]]:
    """Yields each step through a body of JSON, between turns for other requests.

    Args:
        body: The body; what is yielded of one that is not JSON is arbitrary.
        step: Bytes of a step.

    Yields:
        Where the step begins; its pieces, which are in turn outside and inside of strings, without the quotes between
        them and with other bytes for escapes; and whether the first one is inside.
    """
    at, is_text = 0, False
    while at < len(body):
        part = body[at : at + step]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            # A backslash belongs to the character after it.
            part = body[at : at + step + 1]
        if is_text and b'"' not in part:
            # A part of a string, such as of an image, takes a tenth of the time.
            pieces = [part]
        else:
            pieces = part.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
        yield at, pieces, is_text
        at, is_text = at + len(part), is_text ^ (len(pieces) % 2 == 0)
        if at < len(body):
            await asyncio.sleep(0)


async def _runs(body: bytes) -> list[tuple[int, int]]:
    """(start, end) of long runs of whole numbers outside of strings, between two commas each."""
    runs = []
    async for place, pieces, is_text in split(body, STEP_BYTES):
        for i, piece in enumerate(pieces):
            if i % 2 == is_text:
                for match in _NUMBERS.finditer(piece):
                    start = body.find(b",", place + match.start(), place + match.end()) + 1
                    end = body.rfind(b",", place + match.start(), place + match.end())
                    if 0 < start < end:
                        runs.append((start, end))
            place += len(piece) + 1
    return runs


async def _numbers(body: bytes, start: int, end: int) -> list[int]:
    """The numbers of a run, which is no longer than a step."""
    values = json.loads(b"[" + body[start:end] + b"]")
    if len(values) != body.count(b",", start, end) + 1:
        raise json.JSONDecodeError("Expecting value", "", start)
    await asyncio.sleep(0)
    return values


async def _joined(values: list, runs: Mapping[str, list[int]]) -> list:
    """A list with its runs of numbers in place of their names."""
    joined, is_whole = cast("list[Any]", WholeNumbers()), True
    for value in values:
        if isinstance(value, str) and value in runs:
            joined += runs[value]
            await asyncio.sleep(0)
        else:
            joined.append(value)
            is_whole = is_whole and type(value) is int and value >= 0
    return joined if is_whole else list(joined)
