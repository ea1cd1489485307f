"""What Triton makes of every kernel. See `dflash_jax.tools.compile_kernels`."""

import sys

from dflash_jax.tools.compile_kernels import main

if __name__ == "__main__":
    sys.exit(main())
