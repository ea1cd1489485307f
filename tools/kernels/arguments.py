"""Arguments of kernels and of their references, over sizes and dtypes: for tests and for a check on a card.

Elements that a kernel must not read are NaN: never written or not kept, or of rows of a state that take no part.
Small arguments are computed by NumPy: JAX would compile a program for each operation and shape.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.cache import Bounds, DeltaRecord, DeltaState, KVCache
from dflash_jax.ops.gated_delta import Weights
from dflash_jax.ops.linear import DeferredNorm
from dflash_jax.ops.weights import QuantizedWeight, quantize

# Weights in four bits: code, inputs of a scale if the form says it, dtype of the scales, whether there are zeros and
# whether there are factors.
FOUR_BITS = {
    "nvfp4": ("e2m1", 16, jnp.float8_e4m3fn, False, True),
    "mxfp4": ("e2m1", 32, jnp.bfloat16, False, False),
    "int4": ("int4", None, jnp.bfloat16, False, False),
    "int4 with zeros": ("int4", None, jnp.float16, True, False),
}
_quantize = jax.jit(quantize, static_argnums=(1, 2))


@dataclass
class Source:
    """Random arrays: NumPy's, or, where they are large, the device's own."""

    seed: int
    on_device: bool = False

    def __post_init__(self):
        self.rng, self.key = np.random.default_rng(self.seed), jax.random.key(self.seed)

    @property
    def numpy(self) -> ModuleType:
        """The module that computes with what `draw` returns."""
        return jnp if self.on_device else np

    def draw(self, *shape: int, dtype=jnp.float32):
        """Normal numbers, an array of `numpy`."""
        if not self.on_device:
            return self.rng.standard_normal(shape).astype(dtype)
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, shape, dtype)

    def normal(self, *shape: int, dtype=jnp.float32) -> jax.Array:
        """Normal numbers."""
        return jnp.asarray(self.draw(*shape, dtype=dtype))


def _placed(tree):
    """``tree`` with JAX's arrays."""
    return jax.tree.map(jnp.asarray, tree)


def in_few_bits(source, weight, kind, runs) -> QuantizedWeight:
    """A weight in int8 or FP8; or one of its shape and size in a form of `FOUR_BITS`, with random codes and scales."""
    if kind not in FOUR_BITS:
        return _quantize(weight, kind, runs)
    code, run, dtype, has_zeros, has_factors = FOUR_BITS[kind]
    *out, size = weight.shape
    runs = size // run if run else runs
    values: Any = np.frombuffer(source.rng.bytes(weight.size // 2), np.uint8).reshape(*out, size // 2)
    scale = source.rng.uniform(0.1, 0.5, (*out, runs))
    zero = source.rng.integers(-8, 8, scale.shape, np.int8) if has_zeros else None
    factor = source.rng.uniform(0.5, 1, (*out, 1)) * size**-0.5 / 100 if has_factors else None
    # The scales of factors are large.
    scale *= 100 if has_factors else size**-0.5
    return QuantizedWeight(
        values, scale.astype(dtype), zero, None if factor is None else factor.astype(np.float32), code
    )


def _paged(source, rows, kv_heads, dim, capacity, dtype) -> KVCache:
    """A cache of ``rows`` rows whose pages are in random order, with some that no row has. Its arrays are not JAX's."""
    cache = jax.eval_shape(partial(KVCache.create, rows, kv_heads, dim, capacity, dtype))
    pages = cache.k.shape[0] + 2
    k, v = (source.draw(pages, *cache.k.shape[1:], dtype=dtype) for _ in "kv")
    table = source.rng.permutation(pages)[: cache.table.size].reshape(cache.table.shape)
    return KVCache(k, v, table.astype(np.int32))


def attention(
    source, rows, tokens, heads, kv_heads, dim, capacity, window=None, sinks=0, dtype=jnp.float32, cached=None
):  # fmt: skip
    """(q, k, v, cache, length, bounds) of `ops.attention.attention`; ``cached``: dtype of keys and values, else q's.

    Contexts are empty, partly filled and full. The rows are those of a larger cache, of which the first is past the
    end. Positions that no token sees are NaN, and pages without a visible position are absent.
    """
    cached = dtype if cached is None else cached
    q = source.draw(rows, tokens, heads, dim, dtype=dtype)
    k, v = (source.draw(rows, tokens, kv_heads, dim, dtype=cached) for _ in "kv")
    cache = _paged(source, rows + 1, kv_heads, dim, capacity, cached)
    length = np.resize([capacity * 2 // 3, capacity, 0, min(30, capacity)], rows)
    # A row past the end stands for the last one.
    slots = np.array([rows + 1, 0, *range(2, rows)][:rows])
    first, recent = np.zeros((rows, tokens), np.int32), np.zeros(rows, np.int32)
    if window is not None and sinks:
        recent = length - 3 * window // 5
    elif window is not None:
        first = length[:, None] + np.arange(tokens) - 5 * window // 6
    table = cache.table.copy()
    is_seen = np.zeros((len(cache.k), cache.page_size), bool)
    position = np.arange(cache.capacity)
    for row, n, lowest, begin in zip(np.minimum(slots, rows), length, first.min(1), recent, strict=True):
        seen = (position < n) & (position >= lowest) & ((position >= begin) | (position < sinks))
        pages = seen.reshape(-1, cache.page_size)
        is_seen[table[row]] = pages
        table[row] = np.where(pages.any(1), table[row], len(cache.k))
    where = source.numpy.asarray(is_seen)[:, None, :, None]
    cached_k, cached_v = (source.numpy.where(where, x, np.nan).astype(cached) for x in (cache.k, cache.v))
    cache = KVCache(cached_k, cached_v, table, jnp.asarray(slots, jnp.int32))
    bounds = Bounds(*(jnp.asarray(x, jnp.int32) for x in (first, recent, np.full(rows, sinks if window else 0))))
    return _placed((q, k, v, cache, length.astype(np.int32), bounds))


def written(source, rows, tokens, kv_heads, dim, capacity, dtype=jnp.float32):
    """(cache, k, v, positions) of `ops.cache_write.write`: rows of a larger cache, and one that is past its end."""
    cache = _paged(source, rows + 1, kv_heads, dim, capacity, dtype)
    slots = np.arange(rows, 0, -1)
    slots[1:2] = rows + 7
    if cache.table.shape[1] > 1:
        # The last page of one row does not exist.
        cache.table[slots[0], -1] = len(cache.k)
    cache = replace(cache, rows=slots.astype(np.int32))
    k, v = (source.draw(rows, tokens, kv_heads, dim, dtype=dtype) for _ in "kv")
    positions = np.resize([7, 20, 33], rows)[:, None] + np.arange(tokens)
    return _placed((cache, k, v, positions.astype(np.int32)))


def mixer(source, rows, tokens, g, r, dk, dv, dtype=jnp.float32, taps=4, alike=False):
    """Arguments of `ops.gated_delta.gated_delta`, but for eps.

    The state has two rows more than take part, in another order; the last of several is past its end. With ``alike``,
    the same token comes again and again with hardly any decay, where the inverse of a chunk is worst conditioned.
    """
    channels, num_slots = 2 * dk + r * dv, rows + 2
    where = [*source.rng.permutation(num_slots)[: rows - 1], num_slots] if rows > 1 else [1]
    conv = source.draw(num_slots, taps - 1, g, channels, dtype=dtype)
    state = DeltaState(source.draw(num_slots, g, r, dk, dv), conv, jnp.asarray(where, jnp.int32))
    inputs = source.draw(rows, tokens, g, channels + r * dv, dtype=dtype)
    gates = source.draw(rows, tokens, 2, g, r, dtype=dtype)
    if alike:
        inputs = source.numpy.broadcast_to(inputs[:, :1], inputs.shape)
        gates = np.broadcast_to(np.array([8, -12])[:, None, None], gates.shape).astype(dtype)
    a_log = np.log(source.rng.uniform(1, 16, (g, r)))
    weights = source.draw(g, channels, taps), a_log, source.draw(g, r) - 3, source.draw(dv)
    return _placed([inputs, gates, state, Weights(*(x.astype(dtype) for x in weights))])


def poisoned(state: DeltaState) -> DeltaState:
    """A state with NaN in the rows that take no part."""
    assert state.rows is not None
    unused = np.setdiff1d(np.arange(len(state.recurrent)), np.minimum(state.rows, len(state.recurrent) - 1))
    return DeltaState(state.recurrent.at[unused].set(jnp.nan), state.conv_inputs.at[unused].set(jnp.nan), state.rows)


@jax.jit
def spoilt(record: DeltaRecord, count) -> DeltaRecord:
    """A record with NaN in all but its first ``count`` [B] tokens."""
    left = jnp.arange(record.k.shape[1])[None] >= jnp.asarray(count)[:, None]

    def spoil(x):
        return jnp.where(left.reshape(*left.shape, *[1] * (x.ndim - 2)), jnp.nan, x).astype(x.dtype)

    return jax.tree.map(spoil, record)


def experts(
    source, tokens, top, experts, features, hidden, idle=0, quantized=None, shared=None, residual=True,
    dtype=jnp.float32, plain_shared=False,
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
        quantized: What `in_few_bits` takes after a weight, or None.
        shared: The size of a shared expert, or None.
        plain_shared: Whether its weights are arrays nevertheless.
        residual: Whether there is a residual.
        dtype: Dtype of the arrays.
    """
    there = experts - experts // 4

    def matrix(*shape: int):
        return (source.draw(*shape, dtype=dtype) * shape[-1] ** -0.5).astype(dtype)

    x = source.draw(tokens, hidden, dtype=dtype)
    gate_up, down = matrix(there, 2, features, hidden), matrix(there, hidden, features)
    if shared:
        shared = matrix(2, shared, hidden), matrix(hidden, shared), source.draw(tokens)
    if quantized:
        kind, runs = quantized
        gate_up, down = in_few_bits(source, gate_up, kind, runs), in_few_bits(source, down, kind, runs)
        if shared and not plain_shared:
            shared = *(in_few_bits(source, w, kind, runs) for w in shared[:2]), shared[2]
    logits = source.numpy.round(source.draw(tokens, experts) * 2) / 2
    live = np.arange(tokens) < tokens - idle
    rest = source.draw(tokens, hidden, dtype=dtype) if residual else None
    placed = _placed((x, logits, live, np.int32(experts // 4), gate_up, down, shared, rest))
    return *placed, {"experts_per_token": top, "normalise": top != 3}


def block_convolution(source, blocks, width, hidden, taps, group, dtype=jnp.float32):
    """(x with its norm, projection, base) of `ops.block_convolution.block_convolution`."""
    x, norm = (3 * source.draw(blocks, width, hidden, dtype=dtype)).astype(dtype), source.draw(hidden, dtype=dtype)
    projection = (source.draw(2, taps, hidden // group, hidden, dtype=dtype) * hidden**-0.5).astype(dtype)
    return _placed((DeferredNorm(x, norm, 1e-6), projection, source.draw(taps, hidden, dtype=dtype)))


def divided(source, rows, heads, size, outputs, dtype=jnp.float32, parts=4):
    """(heads [rows, 1, heads, size], weight [outputs, heads, size], squares) of `ops.linear.linear` of heads."""
    x, weight = source.draw(rows, 1, heads, size, dtype=dtype), source.draw(outputs, heads, size, dtype=dtype)
    squares = source.draw(rows, 1, heads, parts) ** 2 * size
    return _placed((x, (weight * (heads * size) ** -0.5).astype(dtype), squares))


def projections(source, rows, hidden, outputs, quantized=None, dtype=jnp.float32):
    """(x [rows, 1, hidden], norm, weights) of `ops.linear.linear`; of several weights the last one is an array.

    ``quantized`` is what `in_few_bits` takes after a weight, or None.
    """
    x, norm = (3 * source.draw(rows, 1, hidden, dtype=dtype)).astype(dtype), source.draw(hidden, dtype=dtype)
    weights = [(source.draw(*size, hidden, dtype=dtype) * hidden**-0.5).astype(dtype) for size in outputs]
    if quantized:
        some = max(len(weights) - 1, 1)
        weights[:some] = [in_few_bits(source, w, *quantized) for w in weights[:some]]
    return _placed((x, norm, weights))
