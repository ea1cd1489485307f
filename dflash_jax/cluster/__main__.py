"""``python -m dflash_jax.cluster``: replicas behind one address. See `dflash_jax.cli.cluster`."""

from dflash_jax.cli.cluster import main
from dflash_jax.cli.options import exit_process

if __name__ == "__main__":
    exit_process(main)
