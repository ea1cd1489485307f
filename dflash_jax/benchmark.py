"""``python -m dflash_jax.benchmark``: the published tables, measured here. See `dflash_jax.cli.benchmark`."""

from dflash_jax.cli.benchmark import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
