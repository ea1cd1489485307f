"""``python -m dflash_jax.plan``: what fits on a device. See `dflash_jax.cli.plan`."""

from dflash_jax.cli.plan import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
