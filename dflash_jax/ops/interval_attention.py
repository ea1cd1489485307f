"""Attention of many queries over a long sequence, each query over an interval of it, in tiles of scores.

It serves full sequences: documents packed into a sequence, and a drafter's blocks over the context before them. Forward
and backward pass are those of FlashAttention (arXiv 2205.14135, algorithms 1 and 4), by XLA; tiles that no query sees
are skipped.
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Queries and keys of a tile of scores.
QUERIES, KEYS = 256, 256
_MASKED = -1e30


def _chunked(x: Array, size: int) -> Array:
    """[B, Q, …] → [Q / size, B, size, …], padded with zeros."""
    pad = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _joined(x: Array, length: int) -> Array:
    """The inverse of `_chunked`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _bounds(low: Array, high: Array, size: int) -> tuple[Array, Array]:
    """The first chunk of keys that any of these queries sees, and the one after the last."""
    some = high > low
    first = jnp.min(jnp.where(some, low, jnp.iinfo(jnp.int32).max)) // size
    last = (jnp.max(jnp.where(some, high, 0)) + size - 1) // size
    # Both of one dtype, whatever the dtypes of low and high are.
    return jnp.minimum(first, last).astype(last.dtype), last


def _visible(low: Array, high: Array, start: Array, size: int) -> Array:
    """Which keys of a chunk each query sees, bool [B, 1, 1, q, s]."""
    at = start + jnp.arange(size)
    return ((at >= low[..., None]) & (at < high[..., None]))[:, None, None]


def _scores(q: Array, k: Array) -> Array:
    return jnp.einsum("bqkrd,bskd->bkrqs", q, k, preferred_element_type=jnp.float32)


def _keys(k: Array, size: int) -> Array:
    """Keys padded to full chunks: a dynamic slice past the end would be shifted back."""
    return jnp.pad(k, ((0, 0), (0, -k.shape[1] % size), (0, 0), (0, 0)))


def interval_attention(
    q: Float[Array, "B Q K R D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    low: Int[Array, "B Q"],
    high: Int[Array, "B Q"],
    sizes: tuple[int, int] = (QUERIES, KEYS),
) -> tuple[Float[Array, "B Q K R D"], Float[Array, "B Q K R"]]:
    """Softmax attention in which query i sees the keys low[i] ≤ j < high[i].

    Queries in the order of their intervals skip most of the keys that they do not see.

    Args:
        q: Queries, already scaled, [B, Q, K, R, D].
        k: Keys, [B, T, K, D].
        v: Values, [B, T, K, D].
        low: int [B, Q].
        high: int [B, Q].
        sizes: Queries and keys of a tile: the scores of one tile are in memory.

    Returns:
        The weighted means of values, [B, Q, K, R, D] in q's dtype (zeros where a query sees no key), and the logarithms
        of the sums of exponentials, float32 [B, Q, K, R].
    """
    return _interval_attention(q, k, v, low, high, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _interval_attention(
    q: Array, k: Array, v: Array, low: Array, high: Array, sizes: tuple[int, int]
) -> tuple[Array, Array]:
    return _forward(q, k, v, low, high, sizes)[0]


def _forward(
    q: Array, k: Array, v: Array, low: Array, high: Array, sizes: tuple[int, int]
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    size = min(sizes[1], k.shape[1])
    keys, values = _keys(k, size), _keys(v, size)

    def some_queries(x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        q, low, high = x
        shape = (q.shape[0], q.shape[2], q.shape[3], q.shape[1])
        first, last = _bounds(low, high, size)

        def fold(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            running_max, total, acc = carry
            k, v = (jax.lax.dynamic_slice_in_dim(y, i * size, size, 1) for y in (keys, values))
            visible = _visible(low, high, i * size, size)
            scores = jnp.where(visible, _scores(q, k), _MASKED)
            new_max = jnp.maximum(running_max, scores.max(-1))
            weights = jnp.where(visible, jnp.exp(scores - new_max[..., None]), 0.0)
            mixed = jnp.einsum("bkrqs,bskd->bkrqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            scale = jnp.exp(running_max - new_max)
            return new_max, total * scale + weights.sum(-1), acc * scale[..., None] + mixed

        start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
        running_max, total, acc = jax.lax.fori_loop(first, last, fold, start)
        out = acc / jnp.where(total > 0, total, 1.0)[..., None]
        log_sum = running_max + jnp.log(jnp.where(total > 0, total, 1.0))
        return jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(log_sum, 3, 1)

    count = min(sizes[0], q.shape[1])
    out, log_sum = jax.lax.map(some_queries, tuple(_chunked(x, count) for x in (q, low, high)))
    result = _joined(out, q.shape[1]), _joined(log_sum, q.shape[1])
    return result, (q, k, v, low, high, *result)


def _backward(
    sizes: tuple[int, int], saved: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, low, high, out, log_sum = saved
    d_out, d_log_sum = gradients
    size, count, length = min(sizes[1], k.shape[1]), min(sizes[0], q.shape[1]), k.shape[1]
    keys, values = _keys(k, size), _keys(v, size)
    # Added to the gradient of each of a query's weights: softmax's -Σ o · do, and the log-sum's gradient.
    offset = d_log_sum - jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def some_queries(carry: tuple[Array, Array], x: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        q, low, high, d_out, log_sum, offset = x
        first, last = _bounds(low, high, size)
        log_sum, offset = (jnp.moveaxis(y, 1, 3)[..., None] for y in (log_sum, offset))

        def fold(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            dq, dk, dv = carry
            k, v = (jax.lax.dynamic_slice_in_dim(y, i * size, size, 1) for y in (keys, values))
            visible = _visible(low, high, i * size, size)
            weights = jnp.where(visible, jnp.exp(_scores(q, k) - log_sum), 0.0)
            d_scores = weights * (
                jnp.einsum("bqkrd,bskd->bkrqs", d_out, v, preferred_element_type=jnp.float32) + offset
            )
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
            dq = dq + jnp.einsum("bkrqs,bskd->bqkrd", d_scores, k, preferred_element_type=jnp.float32)

            def add(total: Array, added: Array) -> Array:
                previous = jax.lax.dynamic_slice_in_dim(total, i * size, size, 1)
                return jax.lax.dynamic_update_slice_in_dim(total, previous + added, i * size, 1)

            dk = add(dk, jnp.einsum("bkrqs,bqkrd->bskd", d_scores, q, preferred_element_type=jnp.float32))
            dv = add(dv, jnp.einsum("bkrqs,bqkrd->bskd", weights, d_out, preferred_element_type=jnp.float32))
            return dq, dk, dv

        start = (jnp.zeros(q.shape, jnp.float32), *carry)
        dq, dk, dv = jax.lax.fori_loop(first, last, fold, start)
        return (dk, dv), dq

    zeros = jnp.zeros(keys.shape, jnp.float32)
    xs = tuple(_chunked(x, count) for x in (q, low, high, d_out, log_sum, offset))
    (dk, dv), dq = jax.lax.scan(some_queries, (zeros, zeros), xs)
    dq, dk, dv = _joined(dq, q.shape[1]), dk[:, :length], dv[:, :length]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_interval_attention.defvjp(_forward, _backward)
