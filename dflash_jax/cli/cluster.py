"""``dflash cluster``. What it runs imports this package, so that it is imported by its name."""

from importlib import import_module


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return import_module("dflash_jax.cluster.command").main(argv)
