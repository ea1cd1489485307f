"""What the parsers of all commands share: errors with the nearest option."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from dflash_jax.argument_checks import suggestion
from dflash_jax.errors import InputError
from dflash_jax.options.others import refuse_token


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are InputErrors, for `exit_code` to print.

    Attributes:
        where: What the error of an unknown option says where no known one is near.
        others: Options that the same words may have, of another parser.
    """

    where = "--help lists the options"
    others: Iterable[str] = ()

    def parse_args(self, args=None, namespace=None):
        """Parses all arguments. Raises InputError for unknown ones, with the nearest known option."""
        namespace, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)} ({self._hint(rest)})")
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
