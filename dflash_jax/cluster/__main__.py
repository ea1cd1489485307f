"""``python -m dflash_jax.cluster``: replicas behind one address. See `dflash_jax.cluster.command`."""

from dflash_jax.cli.options import exit_process
from dflash_jax.cluster.command import main

if __name__ == "__main__":
    exit_process(main)
