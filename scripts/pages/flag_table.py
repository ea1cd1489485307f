"""Writes docs/flags.md: every flag of vLLM and SGLang that the server knows, and what it does here.

    python scripts/pages/flag_table.py

The page is made of `dflash_jax.aliases` and `dflash_jax.frontend.other_flags`; a test holds it to them.
"""

import argparse
from pathlib import Path

from dflash_jax.aliases import ALIASES
from dflash_jax.frontend.other_flags import NOTHING, REFUSED, read_word

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
INTRODUCTION = """\
# Flags of vLLM and SGLang

Made by `python scripts/pages/flag_table.py` from the server's own tables; do not edit. The flags are those of vLLM 0.33
and SGLang 0.5.23. Dotted flags, such as `--compilation-config.mode`, are not known. Flags may be written with
underscores. The common ones are on one page with the Python API: [For vLLM and SGLang users](vllm_and_sglang.md).
"""


def code(text: str) -> str:
    return f"`{text}`"


def split(word: str) -> tuple[list[str], str]:
    """The names of a word of a `Group`, and the values that it accepts as a page says them."""
    names, is_on, _, neutral = read_word(word)
    if neutral is None:
        return names, "on only" if is_on else "off only"
    return names, " or ".join(map(code, neutral)) if neutral else "`none` only"


def with_an_effect() -> list[str]:
    lines = ["", "## Flags with an effect", "", "| flag | option here |", "| --- | --- |"]
    for alias in ALIASES:
        option = "--" + alias.dest.replace("_", "-")
        value = "" if alias.const is None else f" {str(alias.const).lower()}"
        special = {"--tensor-parallel": "--mesh tensor=N", "--data-parallel": "--mesh data=N"}
        special |= {"--speculative-config": "--draft, --draft-revision and the largest block, from JSON"}
        special |= {"--speculative-algorithm": "DFLASH, or --draft mtp by NEXTN, EAGLE, mtp and vLLM's names of it"}
        special |= {"--speculative-num-steps": "--max-block-size of an MTP head; DFlash takes 1"}
        special |= {"--reasoning-config": "must name `<think>` and `</think>`"}
        here = special.get(option, option + value)
        lines.append(f"| {', '.join(map(code, alias.names))} | {code(here) if here.startswith('--mesh') else here} |")
    return lines


def without_effect() -> list[str]:
    lines = ["", "## Flags that need nothing here", "", "Any value is accepted. A line in the log gives the reason."]
    for group in NOTHING:
        names = sorted({name for word in group.words.split() for name in split(word)[0]})
        lines += ["", f"### {group.reason[0].upper()}{group.reason[1:]}", "", ", ".join(map(code, names))]
    return lines


def refused() -> list[str]:
    text = "These could change memory, numbers or text. The values below change nothing and are accepted; any other is"
    lines = ["", "## Flags that are refused", "", text, "an error that gives the reason."]
    for group in REFUSED:
        lines += ["", f"### {group.reason[0].upper()}{group.reason[1:]}", "", "| flag | accepted |", "| --- | --- |"]
        rows = [split(word) for word in group.words.split()]
        lines += [f"| {', '.join(map(code, names))} | {values} |" for names, values in sorted(rows)]
    return lines


def page() -> str:
    return INTRODUCTION + "\n".join([*with_an_effect(), *without_effect(), *refused()]) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
