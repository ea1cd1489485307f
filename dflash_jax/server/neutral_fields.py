"""Fields of OpenAI, vLLM and SGLang that requests may have although they have no effect here.

A table of neutral_fields.toml maps a field's name to its allowed values beside null. `schema_base.Body` removes such
fields from a request before it is validated, and refuses other values by name. A field that has an effect is a field of
a schema, and in no table.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Table = Mapping[str, tuple]

_TYPES: dict[str, tuple] = {
    "<boolean>": (bool,),
    "<string>": (str,),
    "<integer>": (int,),
    "<number>": (int, float),
    "<object>": (dict,),
}
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _allowed(values: list) -> tuple:
    return tuple(each for v in values for each in (_TYPES.get(v, (v,)) if isinstance(v, str) else (v,)))


def _table(name: str) -> Table:
    """A table of the file, merged with the tables that it names."""
    own = dict(_TABLES[name])
    others, without = own.pop("+", ()), own.pop("-", ())
    merged = {field: values for other in others for field, values in _table(other).items() if field not in without}
    return merged | {field: _allowed(values) for field, values in own.items()}


CHAT, COMPLETION, RESPONSES = map(_table, ("chat", "completion", "responses"))
MESSAGES, SAMPLING, GENERATE = map(_table, ("messages", "sampling", "generate"))
TOKENIZE, DETOKENIZE, MESSAGE = map(_table, ("tokenize", "detokenize", "message"))

# Reasons for refusing a field where the allowed values do not explain it.
_REASONS = {"custom_logit_processor": "is refused: it is a pickled program, and the server runs no code of its clients"}
_NAMES = {bool: "true or false", str: "a string", int: "a whole number", float: "a number", dict: "an object"}


def _is(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, type):
        return type(value) is allowed
    # 1.0 equals 1, but True does not.
    is_alike = isinstance(value, bool) == isinstance(allowed, bool)
    return is_alike and value == allowed


def accepts(allowed: tuple, value: Any) -> bool:
    """Whether a field may have this value."""
    return value is None or any(_is(value, each) for each in allowed)


def reason(name: str, allowed: tuple) -> str:
    """Why a value that is not ``allowed`` is refused; follows the field's ``name`` in a message."""
    if name in _REASONS:
        return _REASONS[name]
    if allowed and all(isinstance(each, type) for each in allowed):
        return f"must be {' or '.join(_NAMES[each] for each in allowed)}"
    values = " or ".join(json.dumps(each) for each in allowed or (None,))
    return f"is not supported: only {values} is possible"
