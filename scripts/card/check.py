"""Checks and measures everything on a machine with an NVIDIA card. See `dflash_jax.tools.card.check`.

From a checkout that is not installed: PYTHONPATH=. python scripts/card/check.py --minutes 30
"""

import sys

from dflash_jax.tools.card.check import main

if __name__ == "__main__":
    sys.exit(main())
