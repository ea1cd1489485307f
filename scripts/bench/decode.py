"""Decoding at real shapes, part by part, beside the bandwidth floor. See `dflash_jax.tools.decode.bench`."""

import sys

from dflash_jax.tools.decode.bench import main

if __name__ == "__main__":
    sys.exit(main())
