"""``python -m dflash_jax.serve``: the HTTP server. See `dflash_jax.cli.serve`."""

import sys

from dflash_jax.cli.serve import main

if __name__ == "__main__":
    sys.exit(main())
