"""Writes docs/flags.md: all options, every flag of vLLM and SGLang that the server knows, and what it does here.

    python scripts/pages/flag_table.py

The page is made of the options of `dflash_jax.options`; a test holds it to them.
"""

import argparse
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from dflash_jax.options.option import Option, aliases_of, options_of
from dflash_jax.options.others import FLAGS, Flag
from dflash_jax.options.serve import ServeOptions
from dflash_jax.options.shared import CommandOptions, LLMOptions

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
OPTIONS = options_of(ServeOptions)
INTRODUCTION = """\
# Options, and flags of vLLM and SGLang

Made by `python scripts/pages/flag_table.py` from the options themselves; do not edit. The flags of other servers are
those of vLLM 0.33 and SGLang 0.5.23. Dotted flags, such as `--compilation-config.mode`, are not known. Flags may be
written with underscores. The common ones are on one page with the Python API:
[For vLLM and SGLang users](vllm_and_sglang.md).
"""
SHARED = """
## Options of the library and the commands

Keywords of `LLM`, keys of a system's TOML, and flags of `generate`, `serve`, `batch` and `cluster`: the flag
`--max-len` is the keyword and the key `max_len`.
"""
OF_SERVE = """
## Options of serve, batch and cluster
"""


def code(text: str) -> str:
    return f"`{text}`"


def accepted(flag: Flag) -> str:
    """The values that a flag accepts, as the page says them."""
    if flag.neutral is None:
        return "on only" if flag.is_on else "off only"
    return " or ".join(map(code, flag.neutral)) if flag.neutral else "`none` only"


def item(option: Option) -> str:
    """An option as an item of a list."""
    forms = [] if option.flag is None else [code(f"{option.flag} {option.metavar or ''}".strip())]
    if option.flag is None or option.flag[2:].replace("-", "_") != option.name:
        forms.append(f"{code(option.name)} of `LLM`")
    values = f" ({', '.join(map(str, option.choices))})" if option.choices else ""
    return f"- {', '.join(forms)}{values}: {option.help.replace('*', chr(92) + '*').replace('<', '&lt;')}"


def options() -> list[str]:
    shared, commands = options_of(LLMOptions), options_of(CommandOptions)
    own = [each for name, each in OPTIONS.items() if name not in shared and name not in commands]
    return [SHARED, *map(item, shared.values()), OF_SERVE, *map(item, own)]


def with_an_effect() -> list[str]:
    lines = ["", "## Flags with an effect", "", "| flag | option here |", "| --- | --- |"]
    for alias in aliases_of(ServeOptions):
        value = (
            "" if alias.const is None else f" {repr(alias.const) if alias.const == '' else str(alias.const).lower()}"
        )
        here = alias.means or f"{OPTIONS[alias.option].flag}{value}"
        lines.append(f"| {', '.join(map(code, alias.flags))} | {here} |")
    return lines


def groups(is_refused: bool) -> Iterable[tuple[str, list[Flag]]]:
    """The flags that are refused, or need nothing, by their reason."""
    flags = [flag for flag in FLAGS if flag.is_refused == is_refused]
    return ((reason, list(group)) for reason, group in groupby(flags, key=lambda flag: flag.reason))


def heading(reason: str) -> list[str]:
    return ["", f"### {reason[0].upper()}{reason[1:]}", ""]


def without_effect() -> list[str]:
    lines = ["", "## Flags that need nothing here", "", "Any value is accepted. A line in the log gives the reason."]
    for reason, group in groups(is_refused=False):
        names = sorted({name for flag in group for name in flag.names})
        lines += [*heading(reason), ", ".join(map(code, names))]
    return lines


def refused() -> list[str]:
    text = "These could change memory, numbers or text. The values below change nothing and are accepted; any other is"
    lines = ["", "## Flags that are refused", "", text, "an error that gives the reason."]
    for reason, group in groups(is_refused=True):
        rows = sorted((list(flag.names), accepted(flag)) for flag in group)
        lines += [*heading(reason), "| flag | accepted |", "| --- | --- |"]
        lines += [f"| {', '.join(map(code, names))} | {values} |" for names, values in rows]
    return lines


def page() -> str:
    return INTRODUCTION + "\n".join([*options(), *with_an_effect(), *without_effect(), *refused()]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
