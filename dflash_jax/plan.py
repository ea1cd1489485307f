"""``python -m dflash_jax.plan``: what fits on a device. See `dflash_jax.cli.plan`."""

from dflash_jax.cli.options import exit_process
from dflash_jax.cli.plan import main

if __name__ == "__main__":
    exit_process(main)
