"""What makes a shell complete the commands and options of `dflash`, on stdout.

bash, once: dflash completion bash > ~/.local/share/bash-completion/completions/dflash
zsh, once: dflash completion zsh > ~/.dflash.zsh && echo "source ~/.dflash.zsh" >> ~/.zshrc
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from dflash_jax.options.generate import command_parser
from dflash_jax.options.option import option
from dflash_jax.process import exit_code

# Completing runs nothing of this package: all words are in the script.
SCRIPT = """{head}_dflash() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" words=""
    local before="${{COMP_WORDS[COMP_CWORD - 1]}}" command="${{COMP_WORDS[1]}}"
    case "$COMP_CWORD $command $before" in
        1\\ *) words="{commands}" ;;
        *" help help") words="{commands}" ;;
{values}
        *) case "$command" in
{options}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _dflash dflash
"""
HEADS = {
    "bash": "",
    "zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"
    "autoload -Uz bashcompinit && bashcompinit\n",
}


@dataclass(frozen=True)
class CompletionOptions:
    """The options of `dflash completion`."""

    shell: str | None = option(None, "whose script", flag="shell", choices=tuple(HEADS), is_required=True)


make_parser = partial(
    command_parser, "completion", __doc__, CompletionOptions, formatter_class=argparse.RawDescriptionHelpFormatter
)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a parser, and of its subcommands, that --help shows; and positional choices."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield action
            for each in action.choices.values():
                yield from _actions(each)
        elif action.help != argparse.SUPPRESS or (action.choices and not action.option_strings):
            yield action


def script(shell: str) -> str:
    """The script for "bash" or "zsh"."""
    from dflash_jax.cli.main import COMMANDS, module_of
    from dflash_jax.cli.train import make_parser as training

    values: dict[str, dict[str, None]] = {}
    options = []
    for command in COMMANDS:
        words = {}
        actions = list(_actions(module_of(command).make_parser()))
        if command == "train":
            actions += [a for each in actions[0].choices or () for a in _actions(training(each))]
        for action in actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            chosen = [str(value) for value in action.choices or ()]
            words |= dict.fromkeys(names or chosen)
            for name in names if chosen else ():
                values.setdefault(f'*" {command} {name}"', {}).update(dict.fromkeys(chosen))
        options.append(f'            {command}) words="{" ".join(words)}" ;;')
    values_of = "\n".join(f'        {pattern}) words="{" ".join(words)}" ;;' for pattern, words in values.items())
    lines = {"values": values_of, "options": "\n".join(options)}
    return SCRIPT.format(head=HEADS[shell], commands=" ".join(["help", *COMMANDS]), **lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        print(script(make_parser().parse_args(argv).shell), end="")
        return 0

    return exit_code(command)
