"""``python -m dflash_jax.convert``: checkpoints from one format to another. See `dflash_jax.cli.convert`."""

import sys

from dflash_jax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
