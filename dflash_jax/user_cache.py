"""The user's cache directory: compiled programs, the CPU's kernels, token ids of training data.

Programs and kernels are code that this process runs: they are read only from directories that no other user can write.
"""

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger("dflash_jax")

_reported: set[Path | str] = set()


class NotPrivateError(PermissionError):
    """Other users can write a directory of code."""


def user_cache() -> Path:
    """This package's directory in the user's cache directory, which XDG_CACHE_HOME moves.

    Raises:
        ModuleNotFoundError: platformdirs is not installed, as in images with JAX alone.
    """
    from platformdirs import user_cache_path

    return Path(user_cache_path("dflash_jax"))


def is_private(status: os.stat_result) -> bool:
    """Whether a file or directory belongs to this user or to root, and no other user can write it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(directory: Path) -> None:
    """Creates a directory for this user alone, unless there is one.

    Raises:
        NotPrivateError: Other users can write it.
        OSError: It cannot be created.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_private(directory.stat()):
        raise NotPrivateError(f"{directory} must be this user's and not writable by others: chmod 700, or remove it")


def report_unwritable(directory: Path | str, reason: str) -> None:
    """Logs that a cache directory cannot be written: one line for each directory, whatever is compiled.

    Args:
        directory: `user_cache`, or the directory in JAX_COMPILATION_CACHE_DIR.
        reason: Of the operating system.
    """
    report_once(directory, f"compiled programs are not kept: {directory}: {reason}")


def report_once(directory: Path | str, message: str) -> None:
    """Logs a warning about a directory, unless there was one."""
    if directory not in _reported:
        _reported.add(directory)
        log.warning("%s", message)
