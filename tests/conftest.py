"""jax on the CPU in float32, and compiled programs kept between runs."""

from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", False)
jax.config.update("jax_default_matmul_precision", "float32")
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def pytest_collection_modifyitems(items):
    """The longest file first, so that the others fill the time beside it."""
    items.sort(key=lambda item: "tests/mesh" not in item.nodeid)
