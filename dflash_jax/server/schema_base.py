"""The base of request schemas: how strictly fields are read, and which ones are ignored.

A table of neutral_fields.toml maps the name of a field of another server that has no effect here to its allowed values
beside null. `Strict` removes such fields from a request before it is validated, and refuses other values by name. A
field that has an effect is a field of a schema, and in no table.
"""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from dflash_jax.argument_checks import suggestion
from dflash_jax.server.request_context import current

T = TypeVar("T")
# Validation stops at the first wrong item.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0)]
Json = dict[str, Any]
Salt = Annotated[str, Field(min_length=1, max_length=1024)]
# Printable ASCII, since the id goes into headers and logs.
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Most fields of an object that are looked at: more than any schema has.
MOST_FIELDS = 128
# Longest text that a request keeps until its answer has ended, in characters.
MOST_KEPT = 1024
# Characters of an unknown field's name that messages repeat.
MOST_CHARACTERS = 64


# Of neutral fields: the allowed values of each, or ANY.
Allowed = tuple | Literal["any"]
ANY: Literal["any"] = "any"
Table = Mapping[str, Allowed]
_TABLES = tomllib.loads(Path(__file__).with_name("neutral_fields.toml").read_text(encoding="utf-8"))
# Reasons for refusing a field where the allowed values do not explain it.
_REASONS = {"custom_logit_processor": "is refused: it is a pickled program, and the server runs no code of its clients"}


def neutral_table(name: str) -> Table:
    """A table of neutral_fields.toml, merged with the tables that it names."""
    own = dict(_TABLES[name])
    others, without = own.pop("+", ()), own.pop("-", ())
    table: dict[str, Allowed] = {}
    for other in others:
        table |= {field: allowed for field, allowed in neutral_table(other).items() if field not in without}
    for field, values in own.items():
        table[field] = ANY if values == ANY else tuple(values)
    return table


def is_neutral(allowed: Allowed, value: Any) -> bool:
    """Whether a field without effect may have this value."""
    # 1.0 equals 1, but True does not.
    return (
        value is None
        or allowed == ANY
        or any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in allowed)
    )


def check_neutral(name: str, allowed: Allowed, value: Any) -> None:
    """Raises the error of a value that is not ``allowed``."""
    if is_neutral(allowed, value):
        return
    if name in _REASONS:
        raise wrong(name, _REASONS[name])
    values = " or ".join(json.dumps(each) for each in allowed or (None,))
    raise wrong(name, f"is not supported: only {values} is possible")


def wrong(field: str, reason: str, kind: Literal["wrong_field", "unknown_field"] = "wrong_field"):
    """An error about a field, which a validator of the whole model raises."""
    name = field[:MOST_CHARACTERS].encode("ascii", "backslashreplace").decode()
    return PydanticCustomError(kind, "{reason}", {"field": name, "reason": reason})


@cache
def _fields(model: type[BaseModel]) -> dict[str, bool]:
    """The names and aliases of a model's fields, and whether null is no default there."""
    fields = model.model_fields.items()
    names = {field.alias: True for _, field in fields if field.alias is not None}
    return names | {name: field.is_required() for name, field in fields}


class Strict(BaseModel):
    """A model that refuses unknown fields. Fields in the table ``neutral`` are accepted and ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    neutral: ClassVar[Table] = {}

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, given: Any) -> Any:
        """Drops neutral fields, and nulls where a field has a default."""
        if not isinstance(given, dict):
            return given
        fields, known, unknown = _fields(cls), {}, []
        for name, value in given.items():
            if name in fields:
                # JSON has one kind of number: 5.0 equals 5.
                if value is not None or fields[name]:
                    known[name] = int(value) if isinstance(value, float) and value.is_integer() else value
            elif name not in cls.neutral:
                unknown.append(name)
            else:
                check_neutral(name, cls.neutral[name], value)
        if unknown:
            cls._take_unknown(unknown)
        return known

    @classmethod
    def _take_unknown(cls, names: list[str]) -> None:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        hint = suggestion(names[0], [*known, *cls.neutral], otherwise="")
        raise wrong(names[0], f"is not supported{hint and f': {hint}'}", "unknown_field")


class Open(BaseModel):
    """A model that keeps unknown fields, in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)


class Lenient(BaseModel):
    """A model that ignores unknown fields, so that they do not reach the chat template."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)


def _is_small(value: Any) -> bool:
    if isinstance(value, BaseModel):
        return all(map(_is_small, vars(value).values()))
    if isinstance(value, list):
        return len(value) <= MOST_FIELDS and all(isinstance(v, int | list) and _is_small(v) for v in value)
    return len(value) <= MOST_KEPT if isinstance(value, str) else not isinstance(value, dict)


class Body(Strict):
    """A request, whose unknown fields are ignored with ``--unknown-fields warn``."""

    def without_large(self) -> Self:
        """A copy without large values (prompts, messages, tools, forms), which are None in it.

        The answer uses it, since an answer may take long and the sequences have copies of what they need.
        """
        return self.model_copy(update={name: None for name, value in self if not _is_small(value)})

    @classmethod
    def _take_unknown(cls, names: list[str]) -> None:
        if current().unknown_fields == "refuse":
            super()._take_unknown(names)
        shown = ", ".join(name[:MOST_CHARACTERS] for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        current().note(f"unknown fields, left out: {shown}{more}")
