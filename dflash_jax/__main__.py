"""``python -m dflash_jax COMMAND``: the same as the console command `dflash`. See `dflash_jax.cli.main`."""

from dflash_jax.cli.main import command

if __name__ == "__main__":
    command()
