"""The same as ``dflash convert orbax-to-hf``. See `dflash_jax.cli.convert`."""

import sys

from dflash_jax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(["orbax-to-hf", *sys.argv[1:]]))
