"""``python -m dflash_jax.train``: drafter training. See `dflash_jax.cli.train`."""

from dflash_jax.cli.options import exit_process
from dflash_jax.cli.train import main

if __name__ == "__main__":
    exit_process(main)
