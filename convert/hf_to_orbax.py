"""The same as ``dflash convert hf-to-orbax``. See `dflash_jax.cli.convert`."""

import sys

from dflash_jax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main(["hf-to-orbax", *sys.argv[1:]]))
