"""Options under the names of vLLM, SGLang and transformers: adds them to a parser, and applies what they say."""

import argparse
from collections.abc import Sequence
from typing import Any

from dflash_jax.aliases import ALIASES, REQUEST_ALIASES, check_speculative_config, check_speculative_flags
from dflash_jax.errors import InputError
from dflash_jax.frontend.other_flags import NOTHING, REFUSED, SECRETS, is_neutral, read_word

# Options that are more than another name, by the option that a parser has for each.
READ_APART = {
    "tensor_parallel": "mesh",
    "data_parallel": "mesh",
    "speculative_config": "max_block_size",
    "speculative_algorithm": "max_block_size",
    "speculative_num_steps": "max_block_size",
    "reasoning_config": "chat_template",
}


class _Other(argparse.Action):
    """A flag of `NOTHING` or `REFUSED`, judged under the name that the user typed."""

    def __init__(self, option_strings, dest, reason="", neutral: tuple[str | bool, ...] | None = None, **options):
        super().__init__(
            option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options
        )
        # None: any value needs nothing.
        self.reason, self.neutral = reason, neutral

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if self.neutral is None:
            notices = getattr(namespace, "notices", ())
            namespace.notices = (*notices, f"{option_string} needs nothing here: {self.reason}")
            return
        typed = option_string or self.option_strings[0]
        given = (
            [typed.startswith("--no-")] if self.nargs == 0 else values if isinstance(values, list) else [str(values)]
        )
        wrong = [v for v in given if not is_neutral(v, self.neutral)]
        if wrong:
            is_shown = self.nargs != 0 and SECRETS.isdisjoint(self.option_strings)
            typed = f"{typed} {str(wrong[0])[:60]}" if is_shown else typed
            right = [v for v in self.neutral if isinstance(v, str)]
            hint = f" (possible: {', '.join(right)})" if right else ""
            raise InputError(f"{typed} is refused: {self.reason}{hint}")


class AddDraft(argparse.Action):
    """Stores a drafter, and a list where the option is given several times."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        """Stores ``values``, a drafter, behind those given before."""
        given = getattr(namespace, self.dest, None)
        if given is None or given is parser.get_default(self.dest):
            setattr(namespace, self.dest, values)
        else:
            setattr(namespace, self.dest, [*(given if isinstance(given, list) else [given]), values])


def add_aliases(parser: argparse.ArgumentParser, group=None) -> None:
    """Adds the other names of the options that a parser has, hidden from ``--help``.

    Each name is an action of its own, so that errors name what was typed.

    Args:
        parser: Has its own options already. A name that is one of them keeps its meaning.
        group: Where the names go; None: the parser.
    """
    ours = {action.dest: action for action in parser._actions}
    for alias in (*ALIASES, *REQUEST_ALIASES):
        if READ_APART.get(alias.dest, alias.dest) not in ours:
            continue
        options: dict[str, Any] = {"dest": alias.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if alias.const is not None:
            options |= {"action": "store_const", "const": alias.const}
        elif alias.type is not None:
            options |= {"type": alias.type}
        else:
            action = ours[alias.dest]
            options |= {"type": action.type, "choices": action.choices}
            if isinstance(action, AddDraft):
                options |= {"action": AddDraft}
        for name in alias.names:
            if name not in parser._option_string_actions:
                (group or parser).add_argument(name, **options)


def add_others(parser: argparse.ArgumentParser) -> None:
    """Adds the aliases, and the flags of other servers that need nothing here or are refused."""
    description = "Most are understood; docs/flags.md says what each does."
    group = parser.add_argument_group("flags of vLLM and SGLang", description)
    add_aliases(parser, group)
    for groups, is_refused in ((NOTHING, False), (REFUSED, True)):
        for each in groups:
            for word in each.words.split():
                _add(group, word, each.reason, is_refused)


def refuse_token(words: Sequence[str]) -> None:
    """Raises InputError where a command line has ``--hf-token``, before a parser can show the token in an error."""
    for word in words:
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--hf-token" or (name == "--no-hf-token" and value):
            raise InputError(f"{name} is refused: {next(g.reason for g in REFUSED if g.words == '--hf-token')}")


def take_aliases(args: argparse.Namespace) -> None:
    """Applies the options that are more than another name: numbers of devices, and vLLM's speculative decoding.

    Raises:
        InputError: A value is wrong, or contradicts another.
    """
    given = vars(args)
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


def _add(group, word: str, reason: str, is_refused: bool) -> None:
    names, is_on, several, values = read_word(word)
    options = {"action": _Other, "reason": reason}
    if values is None:
        names = [n for name in names for n in (name, *([f"--no-{name[2:]}"] if name[:2] == "--" else []))]
        names = [n for n in names if n not in group._option_string_actions]
        # A switch is neutral as by default: off, or on.
        neutral = (not is_on,)
        options |= {"nargs": 0}
    else:
        neutral = values
        options |= {"nargs": "*"} if several else {}
    group.add_argument(*names, neutral=neutral if is_refused else None, **options)
