"""``python -m dflash_jax.cluster``: replicas behind one address. See `dflash_jax.cluster.command`."""

from dflash_jax.cluster.command import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
