"""The caches of a whole model: one a layer, and how a record is committed to them."""

import jax.numpy as jnp

from dflash_jax.models.config import AttentionSpec, LayerSpec, ModelConfig
from dflash_jax.ops import attention
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import DeltaRecord, DeltaState, KVCache, KVRecord
from dflash_jax.ops.gated_delta import replay

Cache = tuple  # one KVCache or DeltaState a layer


def init_layer_cache(spec: LayerSpec, rows: int, capacity: int, dtype) -> KVCache | DeltaState:
    """An empty cache of one layer; see `init_cache`."""
    mixer = spec.mixer
    if isinstance(mixer, AttentionSpec):
        return KVCache.create(rows, mixer.num_kv_heads, mixer.head_dim, capacity, dtype)
    g, r = mixer.num_key_heads, mixer.values_per_key
    return DeltaState(
        jnp.zeros((rows, g, r, mixer.key_dim, mixer.value_dim), jnp.float32),
        jnp.zeros((rows, mixer.conv_kernel - 1, g, mixer.channels_per_key), dtype),
    )


def init_cache(config: ModelConfig, rows: int, capacity: int, dtype) -> Cache:
    """Empty caches for ``rows`` rows of ``capacity`` positions each."""
    return tuple(init_layer_cache(spec, rows, capacity, dtype) for spec in config.layers)


def commit_layer(backend: Backend, cache, record: KVRecord | DeltaRecord | DeltaState, start, n):
    """One layer's cache after the first n int [B] recorded tokens, at positions ``start`` int [B] onwards. A record
    that is a `DeltaState` is that cache already: the layer knew n."""
    if isinstance(record, DeltaState):
        return record
    if isinstance(cache, DeltaState):
        return replay(backend, cache, record, n)
    steps = jnp.arange(record.k.shape[1])[None]
    return attention.write(backend, cache, record.k, record.v, start[:, None] + steps, steps < n[:, None])
