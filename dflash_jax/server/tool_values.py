"""Values of tool parameters that a model writes as text: what types a schema lets in, and the value of a text."""

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.json_text import loaded

# JSON Schema's types. An integer is a number, too.
TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# What a schema without types lets in, as text can say it: other values would be guesses.
UNTYPED = frozenset({"string", "object", "array"})
# References of references, and characters of a Python literal.
DEEPEST, LONGEST_LITERAL = 32, 100_000


@dataclass(frozen=True)
class Kinds:
    """What a schema lets in.

    Attributes:
        types: Types of JSON Schema; those of UNTYPED where the schema names none.
        values: The only values; None for any of the types.
    """

    types: frozenset[str]
    values: tuple[Any, ...] | None = None

    @property
    def has_text(self) -> bool:
        """Whether any text is a value."""
        return "string" in self.types and self.values is None

    def is_only_text(self, beginning: str) -> bool:
        """Whether every text with this beginning is its own value, so that it may be passed on at once."""
        if not self.has_text or ("null" in self.types and "null".startswith(beginning)):
            return False
        first = beginning.lstrip()[:1]
        return not self.types & {"object", "array"} or (bool(first) and first not in "{[")


def kinds_of(schema: Any, root: Any = None) -> Kinds:
    """What a schema lets in, by its types, references, unions, intersections and values.

    Args:
        schema: A JSON schema.
        root: What its references point into; None: itself.
    """
    types, values = _Resolver(schema if root is None else root).resolve(schema, DEEPEST)
    return Kinds(UNTYPED if types is None else types, values)


# Types and values; None for any.
_Resolved = tuple[frozenset[str] | None, tuple[Any, ...] | None]
_ANY: _Resolved = (None, None)


class _Resolver:
    """Resolves schemas of one root. Each reference is resolved once, and lets in anything inside itself."""

    def __init__(self, root: Any):
        self._root, self._targets = root, dict[str, _Resolved]()

    def resolve(self, schema: Any, depth: int) -> _Resolved:
        if not isinstance(schema, dict) or not depth:
            return _ANY
        types = values = None
        if (named := schema.get("type")) is not None:
            names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
            types = frozenset(name for name in names if isinstance(name, str)) & TYPES or None
            if types is not None and "number" in types:
                types |= {"integer"}
        parts = [self.resolve(part, depth - 1) for part in _schemas(schema, "allOf")]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._target(reference, depth - 1))
        for name in ("anyOf", "oneOf"):
            if choices := _schemas(schema, name):
                parts.append(_union([self.resolve(choice, depth - 1) for choice in choices]))
        enum = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(enum, list):
            parts.append((frozenset(map(_type, enum)), tuple(enum)))
        for other_types, other_values in parts:
            types = other_types if types is None else types if other_types is None else types & other_types or types
            values = values if other_values is None else other_values
        if types is None and "properties" in schema:
            types = frozenset({"object"})
        if schema.get("nullable") is True and types is not None:
            types |= {"null"}
        return types, values

    def _target(self, reference: str, depth: int) -> _Resolved:
        if reference not in self._targets:
            self._targets[reference] = _ANY
            self._targets[reference] = self.resolve(_at(self._root, reference), depth)
        return self._targets[reference]


def _schemas(schema: dict, name: str) -> list:
    parts = schema.get(name)
    return parts if isinstance(parts, list) else []


def _union(parts: Sequence[_Resolved]) -> _Resolved:
    types, values = zip(*parts, strict=True)
    return (
        None if None in types else frozenset().union(*types),
        None if None in values else tuple(value for some in values for value in some),
    )


def _at(root: Any, reference: str) -> Any:
    """What a reference inside a schema points to; None where there is nothing."""
    path, found = reference.removeprefix("#").split("/")[1:], root
    for name in path if reference.startswith("#") else ():
        key = name.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (ValueError, KeyError, IndexError, TypeError):
            return None
    return found if reference.startswith("#") else None


def _type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}
    return kinds.get(type(value), "array")


def as_text(value: Any) -> str:
    """A value as a model writes it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def value_of(text: str, kinds: Kinds) -> Any:
    """The value that a text between tags stands for: of the schema's types, or else the text itself."""
    stripped, types = text.strip(), kinds.types
    # Models write values of an enumeration in quotes, too.
    for written in (text, stripped, unquoted(stripped)) if kinds.values is not None else ():
        matching = [value for value in kinds.values or () if as_text(value) == written]
        if matching:
            return next((value for value in matching if isinstance(value, str)), matching[0])
    if "null" in types and (stripped == "null" or (stripped == "None" and "string" not in types)):
        return None
    if types & {"object", "array"} and stripped[:1] in ("{", "["):
        value = structure(stripped)
        if value is not None and ("object" if isinstance(value, dict) else "array") in types:
            return value
    if "string" in types:
        return text
    if types & {"integer", "number"} and (number := _number(stripped)) is not None:
        is_whole = isinstance(number, int) or number.is_integer()
        if is_whole and "integer" in types:
            return int(number) if isinstance(number, int) or "number" not in types else number
        if "number" in types:
            return number
    if "boolean" in types and stripped.lower() in ("true", "false", "1", "0"):
        return stripped.lower() in ("true", "1")
    return text


def unquoted(text: str) -> str | None:
    """The text of a JSON string; None for what is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _number(text: str) -> int | float | None:
    try:
        value = loaded(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def structure(text: str) -> dict | list | None:
    """The object or list that a text is as JSON, or as a literal of Python; None where it is none."""
    try:
        value = loaded(text, strict=False)
    except RecursionError:
        return None
    except ValueError:
        value = _literal(text)
    return value if isinstance(value, dict | list) else None


def _literal(text: str) -> Any:
    if len(text) > LONGEST_LITERAL:
        return None
    try:
        # What is no JSON, such as a set or a NaN, is none of ours either.
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
