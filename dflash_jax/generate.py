"""``python -m dflash_jax.generate``: text from a target and a DFlash drafter. See `dflash_jax.cli.generate`."""

from dflash_jax.cli.generate import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
