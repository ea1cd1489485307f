"""JSON that every parser reads: without NaN, infinities, and numbers that no double holds."""

import json
import re
from math import isfinite
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
# A string, or anything else that is not punctuation.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[^\s{}\[\],:"]+', re.DOTALL)


def loaded(text: str, strict: bool = True) -> Any:
    """The value of a model's JSON. What looks like a number and is none of JSON, or too large, is text.

    Args:
        text: The JSON.
        strict: Whether line breaks and other control characters in strings are errors.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, strict=strict, parse_constant=str, parse_float=_number(float), parse_int=_number(int))


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
