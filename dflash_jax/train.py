"""``python -m dflash_jax.train``: drafter training. See `dflash_jax.cli.train`."""

import sys

from dflash_jax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
