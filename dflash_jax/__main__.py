"""``python -m dflash_jax COMMAND``: the same as the console command `dflash`. See `dflash_jax.cli.main`."""

import sys

from dflash_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
