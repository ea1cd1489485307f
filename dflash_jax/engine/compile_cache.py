"""The directory in which XLA keeps compiled programs between runs."""

import os
import tempfile
from functools import cache
from pathlib import Path

import jax

from dflash_jax.user_cache import report_unwritable, user_cache

# Roughly the size of a compiled program: a directory without room for it counts as full.
PROBE_BYTES = 2**20


def enable_disk_cache() -> None:
    """Keeps compiled programs in the user's cache directory, or in JAX_COMPILATION_CACHE_DIR where that is set."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
        except ModuleNotFoundError:
            # Images with JAX alone run the benchmarks of decoding without a cache.
            return
    directory = jax.config.values["jax_compilation_cache_dir"]
    # JAX itself handles other kinds of storage (gs://…).
    reason = None if directory is None or "://" in directory else _why_unwritable(Path(directory))
    if directory is not None and reason is not None:
        # The CPU's kernels are in the user's cache, too: one line is for both.
        is_users = "JAX_COMPILATION_CACHE_DIR" not in os.environ and Path(directory) == user_cache() / "xla"
        report_unwritable(user_cache() if is_users else Path(directory), reason)
    # Otherwise JAX warns for each program that it cannot be written. Programs that are there are read all the same.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1 if reason is None else float("inf"))
    jax.config.update(
        "jax_enable_compilation_cache", reason is None or (directory is not None and Path(directory).is_dir())
    )
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def cache_directory() -> Path | None:
    """The directory of compiled programs on this machine; None where none are kept."""
    directory = jax.config.values["jax_compilation_cache_dir"]
    if directory is None or "://" in directory or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return Path(directory)


@cache
def _why_unwritable(directory: Path) -> str | None:
    """The reason why programs cannot be written to ``directory``, or None."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as e:
        return e.strerror or str(e)
    return None
