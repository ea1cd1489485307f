"""``python -m dflash_jax.train``: drafter training. See `dflash_jax.cli.train`."""

from dflash_jax.cli.train import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
