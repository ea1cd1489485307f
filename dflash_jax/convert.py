"""``python -m dflash_jax.convert``: checkpoints from one format to another. See `dflash_jax.cli.convert`."""

from dflash_jax.cli.convert import main
from dflash_jax.cli.options import exit_process

if __name__ == "__main__":
    exit_process(main)
