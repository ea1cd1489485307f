"""Attention of many queries over a long sequence, each over an interval of it, whose scores are never held at once.

For whole sequences: documents packed into a row, and a drafter's blocks over the context before them.
"""

from functools import partial

import jax
import jax.numpy as jnp

# Queries and keys whose scores are held at a time.
QUERIES, KEYS = 256, 256
_MASKED = -1e30


def _chunked(x, size: int):
    """[B, Q, …] → [Q / size, B, size, …], padded with zeros."""
    pad = -x.shape[1] % size
    x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _joined(x, length: int):
    """The inverse."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _bounds(low, high, size: int):
    """Which chunks of keys any of these queries sees: from, to."""
    some = high > low
    first = jnp.min(jnp.where(some, low, jnp.iinfo(jnp.int32).max)) // size
    last = (jnp.max(jnp.where(some, high, 0)) + size - 1) // size
    # Of one type, whatever those of low and high are.
    return jnp.minimum(first, last).astype(last.dtype), last


def _sees(low, high, start, size: int):
    """bool [B, 1, 1, q, s]"""
    at = start + jnp.arange(size)
    return ((at >= low[..., None]) & (at < high[..., None]))[:, None, None]


def _scores(q, k):
    return jnp.einsum("bqkrd,bskd->bkrqs", q, k, preferred_element_type=jnp.float32)


def _keys(k, size: int):
    """Padded so that the last chunk is whole: a slice past the end would slide back."""
    return jnp.pad(k, ((0, 0), (0, -k.shape[1] % size), (0, 0), (0, 0)))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def interval_attention(q, k, v, low, high, sizes: tuple[int, int] = (QUERIES, KEYS)):
    """Softmax attention in which query i sees the keys low[i] ≤ j < high[i].

    q [B, Q, K, R, D], already scaled; k, v [B, T, K, D]; low, high int [B, Q]. Returns the mean of values [B, Q, K, R,
    D] (zeros where nothing is seen) and the logarithm of the sum of exponentials, float32 [B, Q, K, R]. Queries in
    order of their intervals skip most of what they do not see. Memory: scores of ``sizes`` queries × keys.
    """
    return _forward(q, k, v, low, high, sizes)[0]


def _forward(q, k, v, low, high, sizes):
    size = min(sizes[1], k.shape[1])
    keys, values = _keys(k, size), _keys(v, size)

    def some_queries(x):
        q, low, high = x
        shape = (q.shape[0], q.shape[2], q.shape[3], q.shape[1])
        first, last = _bounds(low, high, size)

        def fold(i, carry):
            best, total, acc = carry
            k, v = (jax.lax.dynamic_slice_in_dim(y, i * size, size, 1) for y in (keys, values))
            sees = _sees(low, high, i * size, size)
            scores = jnp.where(sees, _scores(q, k), _MASKED)
            new = jnp.maximum(best, scores.max(-1))
            weights = jnp.where(sees, jnp.exp(scores - new[..., None]), 0.0)
            mixed = jnp.einsum("bkrqs,bskd->bkrqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            scale = jnp.exp(best - new)
            return new, total * scale + weights.sum(-1), acc * scale[..., None] + mixed

        start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1])))
        best, total, acc = jax.lax.fori_loop(first, last, fold, start)
        out = acc / jnp.where(total > 0, total, 1.0)[..., None]
        log_sum = best + jnp.log(jnp.where(total > 0, total, 1.0))
        return jnp.moveaxis(out, 3, 1).astype(q.dtype), jnp.moveaxis(log_sum, 3, 1)

    count = min(sizes[0], q.shape[1])
    out, log_sum = jax.lax.map(some_queries, tuple(_chunked(x, count) for x in (q, low, high)))
    found = _joined(out, q.shape[1]), _joined(log_sum, q.shape[1])
    return found, (q, k, v, low, high, *found)


def _backward(sizes, kept, given):
    q, k, v, low, high, out, log_sum = kept
    d_out, d_log_sum = given
    size, count, length = min(sizes[1], k.shape[1]), min(sizes[0], q.shape[1]), k.shape[1]
    keys, values = _keys(k, size), _keys(v, size)
    # What every score of a query loses, and gains by its logarithm.
    offset = d_log_sum - jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def some_queries(carry, x):
        q, low, high, d_out, log_sum, offset = x
        first, last = _bounds(low, high, size)
        log_sum, offset = (jnp.moveaxis(y, 1, 3)[..., None] for y in (log_sum, offset))

        def fold(i, carry):
            dq, dk, dv = carry
            k, v = (jax.lax.dynamic_slice_in_dim(y, i * size, size, 1) for y in (keys, values))
            sees = _sees(low, high, i * size, size)
            weights = jnp.where(sees, jnp.exp(_scores(q, k) - log_sum), 0.0)
            d_scores = weights * (
                jnp.einsum("bqkrd,bskd->bkrqs", d_out, v, preferred_element_type=jnp.float32) + offset
            )
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(q.dtype)
            exact = {"preferred_element_type": jnp.float32}
            dq = dq + jnp.einsum("bkrqs,bskd->bqkrd", d_scores, k, **exact)

            def add(total, more):
                held = jax.lax.dynamic_slice_in_dim(total, i * size, size, 1)
                return jax.lax.dynamic_update_slice_in_dim(total, held + more, i * size, 1)

            dk = add(dk, jnp.einsum("bkrqs,bqkrd->bskd", d_scores, q, **exact))
            dv = add(dv, jnp.einsum("bkrqs,bqkrd->bskd", weights, d_out, **exact))
            return dq, dk, dv

        dq, *carry = jax.lax.fori_loop(first, last, fold, (jnp.zeros(q.shape, jnp.float32), *carry))
        return tuple(carry), dq

    nothing = jnp.zeros(keys.shape, jnp.float32)
    xs = tuple(_chunked(x, count) for x in (q, low, high, d_out, log_sum, offset))
    (dk, dv), dq = jax.lax.scan(some_queries, (nothing, nothing), xs)
    dq, dk, dv = _joined(dq, q.shape[1]), dk[:, :length], dv[:, :length]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


interval_attention.defvjp(_forward, _backward)
