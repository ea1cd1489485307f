"""The caches of all layers of a model, and the commit of records to them."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from dflash_jax.models.config import AttentionSpec, LayerSpec, ModelConfig
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import DeltaRecord, DeltaState, KVCache, KVRecord
from dflash_jax.ops.cache_write import write
from dflash_jax.ops.gated_delta import replay_layers
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout

# One entry a layer.
Cache = tuple[KVCache | DeltaState, ...]
# One entry a layer: what tokens of a pass would write to its cache.
Record = tuple[KVRecord | DeltaRecord | DeltaState, ...]


def init_layer_cache(
    spec: LayerSpec,
    slots: int,
    capacity: int,
    dtype: DTypeLike,
    layout: Layout = ONE_DEVICE,
    kv_dtype: DTypeLike | None = None,
) -> KVCache | DeltaState:
    """An empty cache of one layer.

    Args:
        spec: The layer.
        slots: Sequences that the cache holds.
        capacity: Positions of each.
        dtype: Dtype of convolution inputs; recurrent states are float32.
        layout: The mesh that the cache will be divided over.
        kv_dtype: Dtype of keys and values; None: ``dtype``.

    Returns:
        A `KVCache` for attention, a `DeltaState` for Gated DeltaNet.
    """
    mixer = spec.mixer
    if isinstance(mixer, AttentionSpec):
        positions = layout.positions(mixer.num_heads, mixer.num_kv_heads)
        kv_dtype = dtype if kv_dtype is None else kv_dtype
        return KVCache.create(slots, mixer.num_kv_heads, mixer.head_dim, capacity, kv_dtype, positions=positions)
    g, r = mixer.num_key_heads, mixer.values_per_key
    return DeltaState(
        jnp.zeros((slots, g, r, mixer.key_dim, mixer.value_dim), jnp.float32),
        jnp.zeros((slots, mixer.conv_kernel - 1, g, mixer.channels_per_key), dtype),
    )


def init_cache(
    config: ModelConfig,
    slots: int,
    capacity: int,
    dtype: DTypeLike,
    layout: Layout = ONE_DEVICE,
    kv_dtype: DTypeLike | None = None,
) -> Cache:
    """Empty caches of a target.

    Args:
        config: The target.
        slots: Sequences that the caches hold.
        capacity: Positions of each.
        dtype: As in `init_layer_cache`.
        layout: The mesh that the caches will be divided over.
        kv_dtype: As in `init_layer_cache`.

    Returns:
        A cache for each layer.
    """
    return tuple(init_layer_cache(spec, slots, capacity, dtype, layout, kv_dtype) for spec in config.layers)


def commit(backend: Backend, cache: Cache, record: Record, start: Int[Array, " B"], n: Int[Array, " B"]) -> Cache:
    """Writes recorded tokens to the caches of layers.

    Args:
        backend: Where operations run.
        cache: The caches that the record was made over.
        record: What the tokens would write. A `DeltaState` is the new cache itself: that layer was given n.
        start: Position of the first recorded token, int [B].
        n: Tokens to write, int [B].

    Returns:
        The caches with the first n tokens of the record.
    """
    pairs = list(zip(cache, record, strict=True))
    replays = [(c, r) for c, r in pairs if isinstance(c, DeltaState) and isinstance(r, DeltaRecord)]
    states, records = [c for c, _ in replays], [r for _, r in replays]
    replayed = iter(replay_layers(backend, states, records, n) if replays else ())

    def committed(cache: KVCache | DeltaState, record: KVRecord | DeltaRecord | DeltaState) -> KVCache | DeltaState:
        if isinstance(record, DeltaState):
            return record
        if isinstance(record, DeltaRecord):
            return next(replayed)
        assert isinstance(cache, KVCache)
        steps = jnp.arange(record.k.shape[1])[None]
        return write(backend, cache, record.k, record.v, start[:, None] + steps, steps < n[:, None])

    return tuple(committed(c, r) for c, r in pairs)
