"""Decoding at real shapes, part by part, beside the bandwidth floor. See `dflash_jax.tools.decode.bench`.

From a checkout that is not installed: PYTHONPATH=. python scripts/bench/decode.py
"""

import sys

from dflash_jax.tools.decode.bench import main

if __name__ == "__main__":
    sys.exit(main())
