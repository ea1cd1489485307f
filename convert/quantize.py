"""The same as ``dflash convert quantize``. See `dflash_jax.cli.convert`."""

import sys

from dflash_jax.cli.convert import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(lambda: main(["quantize", *sys.argv[1:]]))
