"""KV caches of zeros that take time and memory only where they are written."""

from dataclasses import replace
from typing import TypeVar

import jax

from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import KVCache
from dflash_jax.ops.kernels.cpu import calls as cpp

Caches = TypeVar("Caches")


def unwritten(backend: Backend, caches: Caches) -> Caches:
    """Empty caches without pages of their own.

    To clear the slots of a server takes a second for each one or two gigabytes, and most are never filled.

    Args:
        backend: Where the caches are. Only the C++ kernels of a CPU can do this.
        caches: A tree with every `KVCache` empty.

    Returns:
        The tree, with the same values.
    """

    def each(cache: KVCache | jax.Array) -> KVCache | jax.Array:
        return replace(cache, k=cpp.zeros(cache.k), v=cpp.zeros(cache.v)) if isinstance(cache, KVCache) else cache

    if not backend.has_cpp:
        return caches
    return jax.tree.map(each, caches, is_leaf=lambda x: isinstance(x, KVCache))
