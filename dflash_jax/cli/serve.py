"""OpenAI's and SGLang's HTTP interfaces over one model and its engine."""

import logging
import sys

from dflash_jax.options.serve import make_parser, parse
from dflash_jax.process import exit_code
from dflash_jax.server.launch import check_extra, set_logging
from dflash_jax.server.supervisor import Supervisor

__all__ = ["main", "make_parser"]


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        logging.basicConfig(format="%(message)s")
        words = sys.argv[1:] if argv is None else argv
        args, _ = parse(words)
        set_logging(args)
        check_extra()
        return Supervisor(args, words).run()

    return exit_code(command)
