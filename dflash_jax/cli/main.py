"""The console command `dflash`: chooses a command and passes the remaining words to it.

A command's module is imported when the command runs, so that ``dflash --help`` and ``dflash --version`` do not wait for
JAX.
"""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from dflash_jax import __version__
from dflash_jax.argument_checks import suggestion

COMMANDS = {
    "demo": "a question, answered with a drafter and without it",
    "generate": "text from a target and a DFlash drafter",
    "serve": "an HTTP server with OpenAI's, Anthropic's and SGLang's interfaces",
    "cluster": "several servers behind one address, on Ray Serve",
    "batch": "answers to a file of requests in OpenAI's batch format",
    "train": "a DFlash drafter for a target",
    "plan": "what fits on a device, what would, and tokens a second at most",
    "ops": "which implementation each operation takes on a device, and why",
    "benchmark": "the published tables, measured on this machine",
    "convert": "checkpoints between Hugging Face, Orbax and GGUF",
    "completion": "what makes bash or zsh complete commands and options",
}


def module_of(command: str) -> ModuleType:
    """The module of a command, which has its ``main`` and ``make_parser``."""
    return import_module("dflash_jax.cluster.command" if command == "cluster" else f"dflash_jax.cli.{command}")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `dflash`: a command, and its words."""
    prog = "dflash" if Path(sys.argv[0]).name != "__main__.py" else "python -m dflash_jax"
    p = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s COMMAND [OPTION ...]",
        description="DFlash speculative decoding in JAX.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:12}{text}" for name, text in COMMANDS.items()),
                "",
                f"{prog} COMMAND --help, or {prog} help COMMAND, lists a command's options.",
            ]
        ),
    )
    p.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code; 2 for a command that does not exist."""
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    name, *rest = argv
    if name == "help":
        if not rest:
            parser.print_help()
            return 0
        name, *rest = *rest, "--help"
    if name in COMMANDS:
        return module_of(name).main(rest)
    if name.startswith("-"):
        # --help and --version exit; what remains is no option. Its value may be a token.
        parser.parse_known_args([name])
        print(
            f"error: option {name.partition('=')[0]} is not known: --help or --version, or a command", file=sys.stderr
        )
        return 2
    hint = suggestion(name, COMMANDS, otherwise=f"commands are {', '.join(COMMANDS)}")
    print(f"error: command {name!r} is not known: {hint}", file=sys.stderr)
    return 2


def command() -> NoReturn:
    """The console command `dflash`: `main` as this process."""
    from dflash_jax.process import exit_process

    exit_process(main)
