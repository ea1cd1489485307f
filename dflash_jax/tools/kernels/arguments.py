"""Arguments of kernels and of their references, over sizes and dtypes: for tests and for a check on a card.

What a kernel must not read is NaN: what was never written, what is not kept, rows of a state that take no part.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.cache import Bounds, DeltaRecord, DeltaState, KVCache
from dflash_jax.ops.gated_delta import Weights
from dflash_jax.ops.weights import quantize


@dataclass
class Source:
    """Random arrays: NumPy's, or, where they are large, the device's own."""

    seed: int
    on_device: bool = False

    def __post_init__(self):
        self.rng, self.key = np.random.default_rng(self.seed), jax.random.key(self.seed)

    def normal(self, *shape: int, dtype=jnp.float32) -> jax.Array:
        """Normal numbers."""
        if not self.on_device:
            return jnp.asarray(self.rng.standard_normal(shape), dtype)
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, shape, dtype)

    def uniform(self, low: float, high: float, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
        """Uniform numbers."""
        return jnp.asarray(self.rng.uniform(low, high, shape), dtype)


def _paged(source, rows, kv_heads, dim, capacity, dtype) -> KVCache:
    """A cache of ``rows`` rows whose pages are in random order, with some that no row has."""
    cache = KVCache.create(rows, kv_heads, dim, capacity, dtype)
    pages = len(cache.k) + 2
    k, v = (source.normal(pages, *cache.k.shape[1:], dtype=dtype) for _ in "kv")
    table = source.rng.permutation(pages)[: cache.table.size].reshape(cache.table.shape)
    return KVCache(k, v, jnp.asarray(table, jnp.int32))


def attention(source, rows, tokens, heads, kv_heads, dim, capacity, window=None, sinks=0, dtype=jnp.float32):
    """(q, k, v, cache, length, bounds) of `ops.attention.attention`.

    Contexts are empty, partly filled and full. The rows are those of a larger cache, of which the first is past the
    end. What no token sees is NaN, and of pages that none sees there is no page.
    """
    q, k, v = (source.normal(rows, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cache = _paged(source, rows + 1, kv_heads, dim, capacity, dtype)
    length = np.resize([capacity * 2 // 3, capacity, 0, min(30, capacity)], rows)
    # A row past the end stands for the last one.
    slots = np.array([rows + 1, 0, *range(2, rows)][:rows])
    first, recent = np.zeros((rows, tokens), np.int32), np.zeros(rows, np.int32)
    if window is not None and sinks:
        recent = length - 3 * window // 5
    elif window is not None:
        first = length[:, None] + np.arange(tokens) - 5 * window // 6
    table = np.asarray(cache.table).copy()
    is_seen = np.zeros((len(cache.k), cache.page_size), bool)
    position = np.arange(cache.capacity)
    for row, n, lowest, begin in zip(np.minimum(slots, rows), length, first.min(1), recent, strict=True):
        seen = (position < n) & (position >= lowest) & ((position >= begin) | (position < sinks))
        pages = seen.reshape(-1, cache.page_size)
        is_seen[table[row]] = pages
        table[row] = np.where(pages.any(1), table[row], len(cache.k))
    where = jnp.asarray(is_seen)[:, None, :, None]
    cached_k, cached_v = (jnp.where(where, x, jnp.nan).astype(dtype) for x in (cache.k, cache.v))
    cache = KVCache(cached_k, cached_v, jnp.asarray(table), jnp.asarray(slots, jnp.int32))
    bounds = Bounds(*(jnp.asarray(x, jnp.int32) for x in (first, recent, np.full(rows, sinks if window else 0))))
    return q, k, v, cache, jnp.asarray(length, jnp.int32), bounds


def written(source, rows, tokens, kv_heads, dim, capacity, dtype=jnp.float32):
    """(cache, k, v, positions) of `ops.attention.write`: rows of a larger cache, and one that is past its end."""
    cache = _paged(source, rows + 1, kv_heads, dim, capacity, dtype)
    slots = np.arange(rows, 0, -1)
    slots[1:2] = rows + 7
    # The last page of one row does not exist.
    table = cache.table.at[int(slots[0]), -1].set(len(cache.k)) if cache.table.shape[1] > 1 else cache.table
    cache = replace(cache, table=table, rows=jnp.asarray(slots, jnp.int32))
    k, v = (source.normal(rows, tokens, kv_heads, dim, dtype=dtype) for _ in "kv")
    start = jnp.asarray(np.resize([7, 20, 33], rows), jnp.int32)
    return cache, k, v, start[:, None] + jnp.arange(tokens, dtype=jnp.int32)


def mixer(source, rows, tokens, g, r, dk, dv, dtype=jnp.float32, taps=4, alike=False):
    """Arguments of `ops.gated_delta.gated_delta`, but for eps.

    The state has two rows more than take part, in another order; the last of several is past its end. With ``alike``,
    the same token comes again and again with hardly any decay, where the inverse of a chunk is worst conditioned.
    """
    channels, num_slots = 2 * dk + r * dv, rows + 2
    where = [*source.rng.permutation(num_slots)[: rows - 1], num_slots] if rows > 1 else [1]
    conv = source.normal(num_slots, taps - 1, g, channels, dtype=dtype)
    state = DeltaState(source.normal(num_slots, g, r, dk, dv), conv, jnp.asarray(where, jnp.int32))
    inputs = source.normal(rows, tokens, g, channels + r * dv, dtype=dtype)
    gates = source.normal(rows, tokens, 2, g, r, dtype=dtype)
    if alike:
        inputs, gates = jnp.broadcast_to(inputs[:, :1], inputs.shape), jnp.full_like(gates, 8).at[:, :, 1].set(-12)
    a_log = jnp.log(source.uniform(1, 16, (g, r)))
    weights = source.normal(g, channels, taps), a_log, source.normal(g, r) - 3, source.normal(dv)
    return [inputs, gates, state, Weights(*(x.astype(dtype) for x in weights))]


def poisoned(state: DeltaState) -> DeltaState:
    """With NaN in the rows that take no part."""
    assert state.rows is not None
    unused = np.setdiff1d(np.arange(len(state.recurrent)), np.minimum(state.rows, len(state.recurrent) - 1))
    return DeltaState(state.recurrent.at[unused].set(jnp.nan), state.conv_inputs.at[unused].set(jnp.nan), state.rows)


def spoilt(record: DeltaRecord, count) -> DeltaRecord:
    """With NaN in all but the first ``count`` [B] tokens of a record."""
    left = jnp.arange(record.k.shape[1])[None] >= jnp.asarray(count)[:, None]

    def spoil(x):
        return jnp.where(left.reshape(*left.shape, *[1] * (x.ndim - 2)), jnp.nan, x).astype(x.dtype)

    return jax.tree.map(spoil, record)


def experts(
    source, tokens, top, experts, features, hidden, idle=0, quantized=None, shared=None, residual=True,
    dtype=jnp.float32,
):  # fmt: skip
    """Arguments of `ops.moe.mixture`, and its options.

    Routing has equal logits, the first quarter of experts is on another device, and some tokens are idle.

    Args:
        source: Random arrays.
        tokens: Number of tokens.
        top: Experts that a token is routed to.
        experts: Number of experts.
        features: Features inside an expert.
        hidden: Hidden size.
        idle: How many tokens, the last ones, are not live.
        quantized: What `quantize` takes after a weight, or None.
        shared: The size of a shared expert, or None.
        residual: Whether there is a residual.
        dtype: Dtype of the arrays.
    """
    there = experts - experts // 4
    x = source.normal(tokens, hidden, dtype=dtype)
    gate_up = source.normal(there, 2, features, hidden, dtype=dtype) * hidden**-0.5
    down = source.normal(there, hidden, features, dtype=dtype) * features**-0.5
    if shared:
        both = source.normal(2, shared, hidden, dtype=dtype), source.normal(hidden, shared, dtype=dtype)
        shared = (both[0] * hidden**-0.5, both[1] * shared**-0.5, source.normal(tokens))
    if quantized:
        gate_up, down = quantize(gate_up, *quantized), quantize(down, *quantized)
        shared = shared and (*(quantize(w, *quantized) for w in shared[:2]), shared[2])
    logits = jnp.round(source.normal(tokens, experts) * 2) / 2
    live = jnp.arange(tokens) < tokens - idle
    rest = source.normal(tokens, hidden, dtype=dtype) if residual else None
    return (
        x,
        logits,
        live,
        jnp.int32(experts // 4),
        gate_up,
        down,
        shared,
        rest,
        {"experts_per_token": top, "normalise": top != 3},
    )


def projections(source, rows, hidden, outputs, quantized=None, dtype=jnp.float32):
    """(x [rows, 1, hidden], norm, weights) of `ops.linear.linear`; of several weights the last one is an array."""
    x, norm = 3 * source.normal(rows, 1, hidden, dtype=dtype), source.normal(hidden, dtype=dtype)
    weights = [source.normal(*size, hidden, dtype=dtype) * hidden**-0.5 for size in outputs]
    if quantized:
        some = max(len(weights) - 1, 1)
        weights[:some] = [quantize(w, *quantized) for w in weights[:some]]
    return x, norm, weights
