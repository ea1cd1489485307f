"""``python -m dflash_jax.serve``: the HTTP server. See `dflash_jax.cli.serve`."""

from dflash_jax.cli.options import exit_process
from dflash_jax.cli.serve import main

if __name__ == "__main__":
    exit_process(main)
