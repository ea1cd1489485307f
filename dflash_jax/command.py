"""What command lines share: bad input is one line on stderr and exit code 2."""

import sys
from collections.abc import Callable

from dflash_jax.errors import InputError


def call(run: Callable[[list[str] | None], None], argv: list[str] | None) -> int:
    """The exit code of ``run(argv)``."""
    try:
        run(argv)
    except InputError as e:
        print(f"error: {e.args[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0
