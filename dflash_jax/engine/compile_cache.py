"""The directory in which XLA keeps compiled programs between runs."""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path

import jax

log = logging.getLogger("dflash_jax")

# Roughly the size of a compiled program: a directory without room for it counts as full.
PROBE_BYTES = 2**20


def enable_disk_cache() -> None:
    """Keeps compiled programs in the user's cache directory, or in JAX_COMPILATION_CACHE_DIR where that is set."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            from platformdirs import user_cache_path
        except ModuleNotFoundError:
            # Images with JAX alone run the benchmarks of decoding without a cache.
            return
        jax.config.update("jax_compilation_cache_dir", str(Path(user_cache_path("dflash_jax")) / "xla"))
    directory = jax.config.values["jax_compilation_cache_dir"]
    # JAX itself handles other kinds of storage (gs://…).
    is_writable = directory is None or "://" in directory or _is_writable(Path(directory))
    # Otherwise JAX warns for each program that it cannot be written. Programs that are there are read all the same.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1 if is_writable else float("inf"))
    jax.config.update(
        "jax_enable_compilation_cache", is_writable or (directory is not None and Path(directory).is_dir())
    )
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@cache
def _is_writable(directory: Path) -> bool:
    """Whether programs can be written to ``directory``; logs a warning, once, where they cannot."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as e:
        log.warning("compiled programs are not kept: %s: %s", directory, e.strerror)
        return False
    return True
