"""``python -m dflash_jax.demo``: a question, answered with a drafter and without it. See `dflash_jax.cli.demo`."""

from dflash_jax.cli.demo import main
from dflash_jax.cli.options import exit_process

if __name__ == "__main__":
    exit_process(main)
