"""The user's cache directory: compiled programs, the CPU's kernels, token ids of training data."""

import logging
from pathlib import Path

log = logging.getLogger("dflash_jax")

_reported: set[Path] = set()


def user_cache() -> Path:
    """This package's directory in the user's cache directory, which XDG_CACHE_HOME moves.

    Raises:
        ModuleNotFoundError: platformdirs is not installed, as in images with JAX alone.
    """
    from platformdirs import user_cache_path

    return Path(user_cache_path("dflash_jax"))


def report_unwritable(directory: Path, reason: str) -> None:
    """Logs that a cache directory cannot be written: one line for each directory, whatever is compiled.

    Args:
        directory: `user_cache`, or the directory in JAX_COMPILATION_CACHE_DIR.
        reason: Of the operating system.
    """
    if directory not in _reported:
        _reported.add(directory)
        log.warning("compiled programs are not kept: %s: %s", directory, reason)
