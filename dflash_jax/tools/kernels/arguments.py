"""Arguments of kernels and of their references, over sizes and dtypes: for tests and for a check on a card.

What a kernel must not read is NaN: what was never written, what is not kept, rows of a state that take no part.
"""

from dataclasses import dataclass

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


def attention(source, rows, tokens, heads, kv_heads, dim, capacity, window=None, sinks=0, dtype=jnp.float32):
    """(q, k, v, cache, length, bounds) of `ops.attention.attention`.

    Contexts are empty, partly filled and full. The rows are those of a larger cache, of which the first is past the
    end. What was never written is NaN.
    """
    q, k, v = (source.normal(rows, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cache = KVCache.create(rows + 1, kv_heads, dim, capacity, dtype, window, sinks)
    length = np.resize([capacity * 2 // 3, capacity, 0, min(30, capacity)], rows)
    # A row past the end stands for the last one.
    slots = np.array([rows + 1, 0, *range(2, rows)][:rows])
    used = np.zeros(rows + 1, np.int32)
    used[np.minimum(slots, rows)] = np.minimum(length, cache.capacity)
    is_written = jnp.arange(cache.capacity)[None, :, None] < jnp.asarray(used)[:, None, None, None]
    contents = (source.normal(*cache.k.shape, dtype=dtype) for _ in "kv")
    cached_k, cached_v = (jnp.where(is_written, x, jnp.nan).astype(dtype) for x in contents)
    cache = KVCache(cached_k, cached_v, jnp.asarray(slots, jnp.int32), cache.sinks, cache.ring)
    length, bounds = jnp.asarray(length, jnp.int32), Bounds.none(rows, tokens)
    if window is not None:
        zero, positions = jnp.zeros(rows, jnp.int32), length[:, None] + jnp.arange(tokens, dtype=jnp.int32)
        first = jnp.zeros_like(positions) if sinks else positions - 5 * window // 6
        bounds = Bounds(first, length - 3 * window // 5 if sinks else zero, zero + sinks)
    return q, k, v, cache, length, bounds


def written(source, rows, tokens, kv_heads, dim, capacity, window=None, dtype=jnp.float32):
    """(cache, k, v, positions) of `ops.attention.write`: rows of a larger cache, and one that is past its end."""
    cache = KVCache.create(rows + 1, kv_heads, dim, capacity, dtype, window)
    cached_k, cached_v = (source.normal(*cache.k.shape, dtype=dtype) for _ in "kv")
    slots = np.arange(rows, 0, -1)
    slots[1:2] = rows + 7
    cache = KVCache(cached_k, cached_v, jnp.asarray(slots, jnp.int32), cache.sinks, cache.ring)
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
