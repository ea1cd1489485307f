"""``python -m dflash_jax.batch``: a file of requests in OpenAI's batch format. See `dflash_jax.cli.batch`."""

import sys

from dflash_jax.cli.batch import main

if __name__ == "__main__":
    sys.exit(main())
