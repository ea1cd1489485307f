"""``python -m dflash_jax.generate``: text from a target and a DFlash drafter. See `dflash_jax.cli.generate`."""

import sys

from dflash_jax.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
