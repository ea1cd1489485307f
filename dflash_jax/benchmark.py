"""``python -m dflash_jax.benchmark``: the published tables, measured here. See `dflash_jax.cli.benchmark`."""

import sys

from dflash_jax.cli.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
