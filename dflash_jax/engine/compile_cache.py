"""The directory in which XLA keeps compiled programs between runs."""

import os
import queue
import secrets
import tempfile
import threading
from functools import cache
from pathlib import Path

import jax

from dflash_jax.user_cache import is_private, report_once, report_unwritable, user_cache

# Roughly the size of a compiled program: a directory without room for it counts as full.
PROBE_BYTES = 2**20
# Seconds in which a storage must answer.
STORAGE_S = 30.0


def enable_disk_cache() -> None:
    """Keeps compiled programs in the user's cache directory, or in JAX_COMPILATION_CACHE_DIR where that is set.

    Where other users can write the former, it is not used; the latter is the user's choice, and used with a warning.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
        except ModuleNotFoundError:
            # Images with JAX alone run the benchmarks of decoding without a cache.
            return
    directory = jax.config.values["jax_compilation_cache_dir"]
    is_read, reason = True, None
    if directory is not None and "://" in directory:
        is_read, reason = _of_storage(directory)
        if reason is not None:
            report_unwritable(directory, reason)
    elif directory is not None:
        path, reason = Path(directory), _why_unwritable(Path(directory))
        is_own = "JAX_COMPILATION_CACHE_DIR" not in os.environ and path == user_cache() / "xla"
        is_read = path.is_dir()
        if is_read and not is_private(path.stat()):
            is_read = not is_own
            says = "they are not used: chmod 700, or remove it" if is_own else "they run in this process"
            report_once(path, f"other users can write the compiled programs in {path}: {says}")
        elif reason is not None:
            # The CPU's kernels are in the user's cache, too: one line is for both.
            report_unwritable(user_cache() if is_own else path, reason)
    # Otherwise JAX warns for each program that it cannot be written. Programs that are there are read all the same.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1 if reason is None else float("inf"))
    jax.config.update("jax_enable_compilation_cache", is_read)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory() -> Path | None:
    """The directory of compiled programs on this machine; None where none are kept."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None or "://" in directory or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(directory)


@cache
def _of_storage(directory: str) -> tuple[bool, str | None]:
    """Whether programs can be read from a directory of a storage such as gs://, and why they cannot be written there.

    JAX would raise an error or a warning for the first program only, in the middle of it.
    """
    answers: queue.SimpleQueue[tuple[bool, str | None]] = queue.SimpleQueue()

    def ask() -> None:
        can_read = False
        try:
            # What JAX takes, too.
            from etils import epath

            path = epath.Path(directory)
            path.mkdir(parents=True, exist_ok=True)
            can_read = True
            probe = path / f"probe-{secrets.token_hex(8)}"
            probe.write_bytes(b"")
            probe.unlink()
        except Exception as e:
            answers.put((can_read, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"))
        else:
            answers.put((True, None))

    threading.Thread(target=ask, name="compile cache", daemon=True).start()
    try:
        return answers.get(timeout=STORAGE_S)
    except queue.Empty:
        return False, f"no answer in {STORAGE_S:g} s"


@cache
def _why_unwritable(directory: Path) -> str | None:
    """The reason why programs cannot be written to ``directory``, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as e:
        return e.strerror or str(e)
    return None
