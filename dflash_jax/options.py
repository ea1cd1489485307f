"""What the command lines share: errors as one line and exit code 2, and defaults from a system's TOML."""

import argparse
import os
import sys
from collections.abc import Callable

from dflash_jax.errors import InputError


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(message)


def silence_stdout() -> None:
    """What Python would flush at exit goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(command: Callable[[], int]) -> int:
    """Runs a command line: bad input is one line on stderr."""
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed: there is nowhere to write to")
        code = command()
        sys.stdout.flush()
        return code
    except InputError as e:
        print(f"error: {' '.join(str(e.args[0]).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads any more.
        silence_stdout()
        return 141
    except OSError as e:
        print(f"error: {e.filename or 'stdout'}: {e.strerror}", file=sys.stderr)
        silence_stdout()
        return 2


def with_config(parser: argparse.ArgumentParser, argv: list[str] | None):
    """Parsed arguments, defaults taken from ``--config``; and the `System`, or None."""
    args = parser.parse_args(argv)
    if args.config is None:
        return args, None
    from dflash_jax.system import read_system

    system = read_system(args.config)
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in system.options.items() if k in known})
    return parser.parse_args(argv), system
