"""An option is a field of a frozen dataclass: its flag, keyword, TOML key, check and line of docs/flags.md follow."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from dflash_jax.argument_checks import hints_of
from dflash_jax.options.readers import json_object


class Add(argparse.Action):
    """Adds values to those given before, in place of the default. A value that takes no list stays alone."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Stores ``values``, one or a list, after those given before."""
        given = getattr(namespace, self.dest, None)
        if given is None or given is parser.get_default(self.dest):
            setattr(namespace, self.dest, values)
            return
        before, added = (each if isinstance(each, list) else [each] for each in (given, values))
        setattr(namespace, self.dest, [*before, *added])


@dataclass(frozen=True)
class Alias:
    """Names of an option in vLLM, SGLang or transformers.

    Attributes:
        names: The flags, separated by spaces.
        read: Reads a value; None reads it as the option does.
        const: The value of a flag that takes none.
        dest: Where the value goes; None: to the option itself. `others.take_aliases` applies any other.
        means: What the flag does, for docs/flags.md; None: it sets the option.
        option: The option.
    """

    names: str
    read: Callable[[str], Any] | None = None
    const: Any = None
    dest: str | None = None
    means: str | None = None
    option: str = ""

    @property
    def flags(self) -> list[str]:
        """The names as flags."""
        return self.names.split()

    @property
    def keywords(self) -> dict[str, bool]:
        """The names as keywords, and whether the flag is the keyword's negation: ``--no-x`` is x."""
        names = [name[2:].replace("-", "_") for name in self.flags if name.startswith("--")]
        return {name.removeprefix("no_"): name.startswith("no_") for name in names}


@dataclass(frozen=True)
class Option:
    """An option.

    Attributes:
        name: The field: the keyword and the TOML key.
        annotation: Its type.
        default: Its value where none is given.
        text: What it is, for ``--help`` and docs/flags.md.
        metavar: Names its value in ``--help``.
        group: Title of its group in ``--help``.
        flag: Its flag, or, without dashes, its place among the words; "" makes a flag from the name, None is no flag.
        further: Further flags, separated by spaces.
        read: Reads a value of the command line; None reads it by the type.
        action: argparse's action, where the type does not say it.
        choices: Its values.
        least: The least value.
        above: A value that it must be greater than.
        most: The largest value.
        zero: What 0 means, for errors.
        aliases: Its names in other servers: flags that are read in the same way, an `Alias`, or several of them.
        is_free: Whether a run that goes on may have another value.
        is_required: Whether a command line must have it.
    """

    name: str
    annotation: Any
    default: Any
    text: str
    metavar: str | None = None
    group: str | None = None
    flag: str | None = ""
    further: str = ""
    read: Callable[[str], Any] | None = None
    action: Any = None
    choices: tuple[Any, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    zero: str | None = None
    aliases: str | Alias | tuple[str | Alias, ...] = ()
    is_free: bool = False
    is_required: bool = False

    @property
    def kind(self) -> Any:
        """The type of one value: the first of a union, or of a collection's members."""
        kinds = [each for each in get_args(self.annotation) if each is not NoneType]
        kind = self.annotation if get_origin(self.annotation) in (None, list, tuple) or not kinds else kinds[0]
        return get_args(kind)[0] if get_origin(kind) in (list, tuple) else kind

    @property
    def has_several(self) -> bool:
        """Whether its value is a list or a tuple."""
        parts = (self.annotation, *get_args(self.annotation))
        return any(get_origin(each) is list or get_args(each)[1:] == (Ellipsis,) for each in parts)

    @property
    def help(self) -> str:
        """Its text, with the default where the text does not say one."""
        default = f"{self.default:g}" if isinstance(self.default, float) else self.default
        is_said = "default" in self.text or self.has_several or default is None or default is False or default == ""
        return self.text if is_said else f"{self.text} (default: {default})"

    def arguments(self, is_unset: bool = False) -> dict[str, Any]:
        """The arguments of argparse's ``add_argument``; ``is_unset``: None is the value where it is not given."""
        given: dict[str, Any] = {"default": None if is_unset else self.default, "help": self.help.replace("%", "%%")}
        if self.kind is bool:
            is_pair = is_unset or self.default is not False
            return given | {"action": argparse.BooleanOptionalAction if is_pair else "store_true"}
        read = self.read or {dict: json_object, int: int, float: float, Path: Path}.get(self.kind)
        given |= {"type": read, "choices": self.choices or None, "metavar": self.metavar}
        if self.has_several and self.action != "append":
            given["nargs"] = "+"
        if self.is_required and str(self.flag)[0] == "-":
            given["required"] = True
        return given | ({} if self.action is None else {"action": self.action})

    @property
    def right(self) -> str | None:
        """What a value must be, for errors; None for any value of the type."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.above is not None:
            return f"above {self.above:g}" + ("" if self.most is None else f" and at most {self.most:g}")
        if self.least is None:
            return None
        least = f"{self.least:g}" + ("" if self.zero is None else f" ({self.zero})")
        return f"{least} or more" if self.most is None else f"{least} to {self.most}"

    def is_good(self, value: Any) -> bool:
        """Whether a value, of the right type, or each of several is possible. NaN is not."""
        if value is None or self.right is None:
            return True
        if isinstance(value, list | tuple):
            return all(map(self.is_good, value))
        if self.choices:
            return value in self.choices
        is_large = value > self.above if self.above is not None else self.least is None or value >= self.least
        return is_large and (self.most is None or value <= self.most)


def option(default: Any, text: str, metavar: str | None = None, **details: Any) -> Any:
    """A field that is an option.

    Args:
        default: Its default, or what makes it, such as the type of an empty one.
        text: See `Option`.
        metavar: See `Option`.
        **details: Further attributes of `Option`.
    """
    value: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**value, metadata={"text": text, "metavar": metavar, **details})


@cache
def options_of(cls: type) -> dict[str, Option]:
    """Returns the options of a dataclass by name. Inherited ones come first."""
    hints, result = hints_of(cls), {}
    for each in fields(cls):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        made = Option(each.name, hints[each.name], default, **each.metadata)
        flag = f"--{each.name.replace('_', '-')}" if made.flag == "" else made.flag
        result[each.name] = replace(made, flag=flag)
    return result


def aliases_of(cls: type) -> list[Alias]:
    """The names of a dataclass's options in other servers."""
    result = []
    for name, each in options_of(cls).items():
        for given in each.aliases if isinstance(each.aliases, tuple) else (each.aliases,):
            alias = Alias(given) if isinstance(given, str) else given
            result.append(replace(alias, option=name, dest=alias.dest or name))
    return result


def faults(cls: type, values: Mapping[str, Any]) -> Iterator[tuple[Option, Any]]:
    """The options of a dataclass whose values are not possible, with the values."""
    for name, each in options_of(cls).items():
        if name in values and not each.is_good(values[name]):
            yield each, values[name]
