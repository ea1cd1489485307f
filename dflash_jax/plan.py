"""``python -m dflash_jax.plan``: what fits on a device. See `dflash_jax.cli.plan`."""

import sys

from dflash_jax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
