"""JSON that every parser reads: without NaN, infinities, and numbers that no double holds."""

import json
import re
from math import isfinite
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
# One for all: json.dumps makes one for each call.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
# A string, or anything else that is not punctuation.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[^\s{}\[\],:"]+', re.DOTALL)


def dumped(value: object) -> bytes:
    """``value`` as JSON in ASCII, since text from clients may have unpaired surrogates. NaN and infinities are null."""
    try:
        return _ENCODER.encode(value).encode("ascii")
    except ValueError:
        return _ENCODER.encode(_without_infinities(value)).encode("ascii")


def _without_infinities(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_infinities(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_without_infinities, value))
    return None if isinstance(value, float) and not isfinite(value) else value


def loaded(text: str) -> Any:
    """The value of a model's JSON. What looks like a number and is none of JSON, or too large, is text.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, parse_constant=str, parse_float=_number(float), parse_int=_number(int))


def _number(kind: type[float] | type[int]):
    return lambda word: kind(word) if isfinite(float(word)) else word


def word(text: str) -> str:
    """A word of a model's JSON, outside of strings, as JSON: quoted where it looks like a number and is none.

    Words that look like nothing of JSON stay as they are.
    """
    try:
        number = float(text)
    except ValueError:
        return text
    return text if isfinite(number) and _NUMBER.fullmatch(text) else json.dumps(text)


def reworded(text: str) -> str:
    """A model's JSON with each `word`, complete or broken."""
    return _TOKEN.sub(lambda token: token[0] if token[0].startswith('"') else word(token[0]), text)
