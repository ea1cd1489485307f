"""Values of tool parameters that a model writes as text: what types a schema lets in, and the value of a text."""

import ast
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.json_text import loaded

# JSON Schema's types. An integer is a number, too.
TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# What a schema without types lets in, as text can say it: other values would be guesses.
UNTYPED = frozenset({"string", "object", "array"})
# References of references, values that a schema may name, and characters of a Python literal.
DEEPEST, MOST_VALUES, LONGEST_LITERAL = 32, 4096, 20_000


@dataclass(frozen=True)
class Kinds:
    """What a schema lets in.

    Attributes:
        types: Types of JSON Schema of which it lets in any value; those of UNTYPED where the schema names none.
        values: Values beside them.
    """

    types: frozenset[str]
    values: tuple[Any, ...] = ()

    @property
    def has_text(self) -> bool:
        """Whether any text is a value."""
        return "string" in self.types

    @property
    def has_null(self) -> bool:
        """Whether null is a value."""
        return "null" in self.types or any(value is None for value in self.values)

    def is_only_text(self, beginning: str) -> bool:
        """Whether every text with this beginning is its own value, so that it may be passed on at once."""
        if not self.has_text or (self.has_null and "null".startswith(beginning)):
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
    return Kinds(UNTYPED if types is None else types, tuple(values.values()))


# The types of which any value is let in, None for all, and further values by type and text.
_Resolved = tuple[frozenset[str] | None, dict[tuple[str, str], Any]]
_ANY: _Resolved = (None, {})


class _Resolver:
    """Resolves schemas of one root. Each reference is resolved once, and lets in anything inside itself."""

    def __init__(self, root: Any):
        self._root, self._targets = root, dict[str, _Resolved]()

    def resolve(self, schema: Any, depth: int) -> _Resolved:
        if not isinstance(schema, dict) or not depth:
            return _ANY
        found = _ANY
        if (named := schema.get("type")) is not None:
            names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
            types = frozenset(name for name in names if isinstance(name, str)) & TYPES
            if types:
                found = types | ({"integer"} if "number" in types else set()), {}
        parts = [self.resolve(part, depth - 1) for part in _schemas(schema, "allOf")]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._target(reference, depth - 1))
        for name in ("anyOf", "oneOf"):
            if choices := _schemas(schema, name):
                parts.append(_union([self.resolve(choice, depth - 1) for choice in choices]))
        enum = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(enum, list):
            parts.append(_bounded(frozenset(), {(_type(value), as_text(value)): value for value in enum}))
        for part in parts:
            found = _both(found, part)
        types, values = found
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


def _bounded(types: frozenset[str] | None, values: dict[tuple[str, str], Any]) -> _Resolved:
    """Types and values; with too many values, their types."""
    if len(values) <= MOST_VALUES:
        return types, values
    return None if types is None else types | {kind for kind, _ in values}, {}


def _union(parts: Sequence[_Resolved]) -> _Resolved:
    types, values = frozenset[str](), dict[tuple[str, str], Any]()
    for part_types, part_values in parts:
        types = None if types is None or part_types is None else types | part_types
        types, values = _bounded(types, values | part_values)
    return types, values


def _both(one: _Resolved, other: _Resolved) -> _Resolved:
    """What both let in; what the first one does where they contradict each other."""
    (types, values), (more_types, more_values) = one, other
    shared = types if more_types is None else more_types if types is None else types & more_types
    left = {key: x for key, x in values.items() if more_types is None or key[0] in more_types or key in more_values}
    right = {key: x for key, x in more_values.items() if types is None or key[0] in types or key in values}
    found = shared, left | right
    return one if shared is not None and not shared and not found[1] else found


def _schemas(schema: dict, name: str) -> list:
    parts = schema.get(name)
    return parts if isinstance(parts, list) else []


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


def parameters_of(schema: Any) -> tuple[dict[str, Any], list[str]]:
    """The properties of an object and the required ones, by its schema, its reference and its intersections.

    Those of the parts of a union are none that is required. Each reference is followed once.
    """
    found, required, followed = dict[str, list](), list[str](), set[str]()
    in_unions = set[str]()

    def collect(part: Any, is_sure: bool, depth: int) -> None:
        if not isinstance(part, dict) or not depth:
            return
        named, needed = part.get("properties"), part.get("required")
        for name, value in named.items() if isinstance(named, dict) else ():
            found.setdefault(name, []).append(value)
            if not is_sure:
                in_unions.add(name)
        if is_sure and isinstance(needed, list):
            required.extend(name for name in needed if isinstance(name, str))
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            collect(_at(schema, reference), is_sure, depth - 1)
        for kind in ("allOf", "anyOf", "oneOf"):
            for inner in _schemas(part, kind):
                collect(inner, is_sure and kind == "allOf", depth - 1)

    collect(schema, True, DEEPEST)
    properties = {}
    for name, values in found.items():
        several = {"anyOf" if name in in_unions else "allOf": values}
        properties[name] = values[0] if len(values) == 1 else several
    return properties, required


def _type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object"}
    return kinds.get(type(value), "array")


def as_text(value: Any) -> str:
    """A value as a model writes it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def value_of(text: str, kinds: Kinds) -> Any:
    """The value that a text between tags stands for: of the schema's values or types, or else the text itself."""
    stripped = text.strip()
    if kinds.has_null and (stripped == "null" or (stripped == "None" and not kinds.has_text)):
        return None
    # Models write values of an enumeration in quotes, too. Where any text is a value, a text is no other one.
    for written in () if kinds.has_text or not kinds.values else (text, stripped, unquoted(stripped)):
        matching = [value for value in kinds.values if as_text(value) == written]
        if matching:
            return next((value for value in matching if isinstance(value, str)), matching[0])
    types = kinds.types or frozenset(map(_type, kinds.values))
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
        with warnings.catch_warnings():
            # Of escapes that are none.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        # What is no JSON, such as a set or a NaN, is none of ours either.
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
