"""``python -m dflash_jax.batch``: a file of requests in OpenAI's batch format. See `dflash_jax.cli.batch`."""

from dflash_jax.cli.batch import main
from dflash_jax.cli.options import exit_process

if __name__ == "__main__":
    exit_process(main)
