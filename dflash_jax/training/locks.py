"""Locks of what a command writes: two processes never write the same files."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dflash_jax.checkpoint.files import writing
from dflash_jax.errors import InputError
from dflash_jax.parallel import distributed

# File systems that have no locks.
WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def locked(path: Path, what: str, wait: bool = False) -> Iterator[None]:
    """Holds the lock of the file ``path``; the system releases it when the process ends.

    Args:
        path: The file, which stays.
        what: What is written, for the error.
        wait: Whether to wait for another process.

    Raises:
        InputError: Another process has the lock, or the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise InputError(f"another process writes {what}: it holds {path}") from None
        except OSError as e:
            if e.errno not in WITHOUT_LOCKS:
                raise InputError(f"{path} cannot be locked: {e.strerror}") from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_by_first(path: Path, what: str) -> Iterator[None]:
    """`locked` in the first of several processes that write together; all raise its error."""
    with ExitStack() as stack:
        error = None
        if distributed.is_first():
            try:
                stack.enter_context(locked(path, what))
            except InputError as e:
                error = e
        if distributed.agreed(error is not None):
            raise error or InputError(f"the first process cannot lock {path}")
        yield
