"""``python -m dflash_jax.serve``: the HTTP server. See `dflash_jax.cli.serve`."""

from dflash_jax.cli.serve import main
from dflash_jax.process import exit_process

if __name__ == "__main__":
    exit_process(main)
