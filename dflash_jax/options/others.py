"""The flags of vLLM and SGLang that mean none of our options, and what those say that are more than another name."""

import argparse
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.options.readers import check_speculative_config, check_speculative_flags

# Values that mean "as by default" for any flag.
NEUTRAL = {"", "none", "null"}
# Flags whose values no message shows.
SECRETS = {"--hf-token", "--watermark-key", "--watermark-key-b"}


@dataclass(frozen=True)
class Flag:
    """A flag of another server that means none of our options.

    Attributes:
        names: Its names.
        reason: Why it needs nothing here, or is refused.
        is_refused: Whether other values than neutral ones are refused; otherwise any value is accepted, with a notice.
        is_on: Of a switch, whether on is neutral.
        has_several: Whether it takes several values.
        neutral: Neutral values; None for a switch.
    """

    names: tuple[str, ...]
    reason: str
    is_refused: bool
    is_on: bool
    has_several: bool
    neutral: tuple[str, ...] | None

    @classmethod
    def read(cls, word: str, reason: str, is_refused: bool) -> "Flag":
        """Reads a word of other_flags.toml."""
        match = re.fullmatch(r"([^!+=]+)(!?)(\+?)(=.*)?", word)
        assert match is not None, word
        names, is_on, several, values = match.groups()
        neutral = None if values is None else tuple(filter(None, values[1:].split("|")))
        return cls(tuple(names.split("/")), reason, is_refused, bool(is_on), bool(several), neutral)


FLAGS = tuple(
    Flag.read(word, reason, table == "refused")
    for table, groups in tomllib.loads(Path(__file__).with_name("other_flags.toml").read_text(encoding="utf-8")).items()
    for reason, words in groups.items()
    for word in words.split()
)


def is_neutral(value: str | bool, neutral: Sequence[str | bool]) -> bool:
    """Whether a value of a flag means "as by default", by itself or as one of ``neutral``."""
    if isinstance(value, bool):
        return value in neutral
    return value.lower() in NEUTRAL or any(isinstance(v, str) and _equal(value, v) for v in neutral)


def _equal(a: str, b: str) -> bool:
    try:
        return float(a) == float(b)
    except ValueError:
        return a.lower() == b.lower()


class _Other(argparse.Action):
    """A flag of `FLAGS`, judged under the name that the user typed."""

    def __init__(self, option_strings, dest, flag: Flag, **settings):
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        super().__init__(option_strings, argparse.SUPPRESS, **hidden, **settings)
        self.flag = flag

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        flag, typed = self.flag, option_string or self.option_strings[0]
        if not flag.is_refused:
            notices = getattr(namespace, "notices", ())
            namespace.notices = (*notices, f"{typed} needs nothing here: {flag.reason}")
            return
        # A switch is neutral as by default: off, or on.
        neutral = (not flag.is_on,) if flag.neutral is None else flag.neutral
        given = values if isinstance(values, list) else [str(values)]
        given = [typed.startswith("--no-")] if flag.neutral is None else given
        if wrong := [v for v in given if not is_neutral(v, neutral)]:
            is_shown = flag.neutral is not None and SECRETS.isdisjoint(flag.names)
            typed = f"{typed} {str(wrong[0])[:60]}" if is_shown else typed
            hint = f" (possible: {', '.join(flag.neutral)})" if flag.neutral else ""
            raise InputError(f"{typed} is refused: {flag.reason}{hint}")


def add_others(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of other servers that need nothing here or are refused."""
    for flag in FLAGS:
        names, settings = [*flag.names], {"nargs": "*"} if flag.has_several else {}
        if flag.neutral is None:
            names = [n for name in names for n in (name, *([f"--no-{name[2:]}"] if name[:2] == "--" else []))]
            names = [n for n in names if n not in group._option_string_actions]
            settings = {"nargs": 0}
        group.add_argument(*names, action=_Other, flag=flag, **settings)


def refuse_token(words: Sequence[str]) -> None:
    """Raises InputError where a command line has ``--hf-token``, before a parser can show the token in an error."""
    for word in words:
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--hf-token" or (name == "--no-hf-token" and value):
            raise InputError(f"{name} is refused: {next(f.reason for f in FLAGS if '--hf-token' in f.names)}")


def take_aliases(args: argparse.Namespace) -> None:
    """Applies the options that are more than another name: numbers of devices, and vLLM's speculative decoding.

    Raises:
        InputError: A value is wrong, or contradicts another.
    """
    given = vars(args)
    # It was checked as it was read.
    given.pop("reasoning_config", None)
    method, steps = (given.pop(f"speculative_{name}", None) for name in ("algorithm", "num_steps"))
    if (config := given.pop("speculative_config", None)) is not None:
        given.update(check_speculative_config(config, "--speculative-config"))
    if method is not None or steps is not None:
        # A config's drafter is a default.
        draft = None if method == "mtp" and given.get("config") else given["draft"]
        given.update(check_speculative_flags(method, steps, draft, given["max_block_size"], "--"))
    parts = {axis: given.pop(f"{axis}_parallel") for axis in ("tensor", "data") if f"{axis}_parallel" in given}
    if parts:
        if args.mesh is not None:
            raise InputError(f"--mesh {args.mesh} and a number of devices: give one of them")
        args.mesh = ",".join(f"{axis}={n}" for axis, n in sorted(parts.items()))
