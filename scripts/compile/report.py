"""What XLA makes of a system at full size. See `dflash_jax.tools.compile_report`."""

import sys

from dflash_jax.tools.compile_report import main

if __name__ == "__main__":
    sys.exit(main())
