"""What the parsers of all commands share: options from dataclasses, errors with the nearest option."""

import argparse
import sys
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from dflash_jax.argument_checks import shown, suggestion
from dflash_jax.errors import InputError
from dflash_jax.options.option import Option, aliases_of, options_of
from dflash_jax.options.others import refuse_token, take_aliases


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors, for `exit_code` to print.

    Attributes:
        where: What the error of an unknown option says where no known one is near.
        others: Options that the same words may have, of another parser.
        options: The options of `add_options`, by name.
    """

    where = "--help lists the options"
    others: Iterable[str] = ()

    def __init__(self, allow_abbrev: bool = False, **settings: Any):
        self.options: dict[str, Option] = {}
        super().__init__(allow_abbrev=allow_abbrev, **settings)

    def add_options(
        self,
        cls: type,
        names: Container[str] | None = None,
        *,
        group: str | None = None,
        is_unset: bool = False,
        listed: Container[str] | None = None,
    ) -> None:
        """Adds the flags of a dataclass's options, each to the group of its title.

        Args:
            cls: The dataclass.
            names: The options; None: all.
            group: The title of the group of flags, in place of the options' own groups.
            is_unset: Whether what is not given is None in place of the default.
            listed: What ``--help`` lists; None: all.
        """
        groups: dict[str | None, Any] = {each.title: each for each in self._action_groups} | {None: self}
        for name, each in options_of(cls).items():
            if each.flag is None or not (names is None or name in names):
                continue
            title = group or each.group
            if title not in groups:
                groups[title] = self.add_argument_group(title)
            given = each.arguments(is_unset)
            if listed is not None and name not in listed:
                given["help"] = argparse.SUPPRESS
            if each.flag[0] == "-":
                given["dest"] = name
            elif not each.is_required:
                given["nargs"] = "?"
            groups[title].add_argument(each.flag, *each.further.split(), **given)
            self.options[name] = each

    def add_aliases(self, cls: type, group: Any = None) -> None:
        """Adds the other names of the options that the parser has, hidden from ``--help``.

        Each name is an action of its own, so that errors name what was typed.

        Args:
            cls: The dataclass that has the names. A name that the parser has already keeps its meaning.
            group: Where the names go; None: the parser.
        """
        for alias in aliases_of(cls):
            if alias.option not in self.options:
                continue
            given: dict[str, Any] = {"type": alias.read}
            if alias.read is None:
                given = self.options[alias.option].arguments()
            if alias.const is not None:
                given = {"action": "store_const", "const": alias.const}
            given |= {"dest": alias.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            for name in alias.flags:
                if name not in self._option_string_actions:
                    (group or self).add_argument(name, **given)

    def parse_args(self, args=None, namespace=None):
        """Parses all arguments, under our names. Raises InputError for unknown ones, with the nearest known option."""
        namespace, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)} ({self._hint(rest)})")
        take_aliases(namespace)
        return namespace

    def _hint(self, words: Iterable[str]) -> str:
        """What the error about the first unknown option of some words says."""
        known = {**self._option_string_actions, **dict.fromkeys(self.others)}
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        return suggestion(next((name for name in names if name not in known), ""), known, otherwise=self.where)

    def _check_value(self, action: argparse.Action, value) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            hint = suggestion(str(value), known, otherwise=f"choose from {', '.join(known)}")
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} ({hint})")
        option = self.options.get(action.dest)
        if option is not None and not option.is_good(value):
            # As typed, but for another name that gives another value.
            flag = action.option_strings[0] if action.type == option.arguments()["type"] else option.flag
            raise InputError(f"{flag} {shown(value)}: it must be {option.right}")

    def parse_known_args(self, args=None, namespace=None):
        """Parses arguments. Raises InputError for a token among them."""
        self._words = sys.argv[1:] if args is None else list(args)
        refuse_token(self._words)
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        """Raises InputError."""
        # Perhaps a required option was given under a wrong name.
        if "are required" in message and (hint := self._hint(self._words)) != self.where:
            message += f" ({hint})"
        raise InputError(message)


def program(command: str) -> str:
    """How this process ran ``command``: as ``dflash``, ``python -m dflash_jax`` or ``python -m dflash_jax.COMMAND``."""
    run = Path(sys.argv[0])
    if run.stem == "dflash":
        return f"dflash {command}"
    if run.name == "__main__.py" and run.parent.name == "dflash_jax":
        return f"python -m dflash_jax {command}"
    return f"python -m dflash_jax.{command}"
