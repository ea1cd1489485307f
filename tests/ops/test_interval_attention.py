"""Interval attention against the plain form: values, logarithms, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.interval_attention import interval_attention


def plain(q, k, v, low, high):
    """The same with all scores at once; every query sees something."""
    at = jnp.arange(k.shape[1])
    sees = (at >= low[..., None]) & (at < high[..., None])
    scores = jnp.where(sees[:, :, None, None], jnp.einsum("bqkrd,bskd->bqkrs", q, k), -jnp.inf)
    return jnp.einsum("bqkrs,bskd->bqkrd", jax.nn.softmax(scores, -1), v), jax.nn.logsumexp(scores, -1)


def inputs(queries=37, keys=29):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=s).astype(np.float32) for s in ((2, queries, 2, 3, 8), *[(2, keys, 2, 8)] * 2))
    ends = np.sort(rng.integers(0, keys + 1, (2, queries, 2)), axis=-1)
    low, high = np.minimum(ends[..., 0], keys - 1), np.maximum(ends[..., 1], np.minimum(ends[..., 0], keys - 1) + 1)
    return q, k, v, low, high


@pytest.mark.parametrize("sizes", [(8, 8), (5, 64), (64, 7)])
def test_interval_attention_equals_masked_softmax(sizes):
    args = inputs()
    for found, expected in zip(jax.jit(interval_attention, static_argnums=5)(*args, sizes), plain(*args), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_gradients_of_interval_attention_equal_those_of_the_plain_form():
    q, k, v, low, high = inputs()
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=q.shape), rng.normal(size=q.shape[:-1])

    def total(function, *more):
        def value(q, k, v):
            out, log_sum = function(q, k, v, low, high, *more)
            return jnp.sum(out * a) + jnp.sum(log_sum * b)

        return jax.jit(jax.grad(value, (0, 1, 2)))(q, k, v)

    for found, expected in zip(total(interval_attention, (8, 8)), total(plain), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_who_sees_nothing_gets_nothing():
    q, k, v, low, _ = inputs()
    out, log_sum = interval_attention(q, k, v, low, low, (8, 8))
    assert not np.any(out)
    assert np.all(log_sum < -1e29)
    grads = jax.grad(lambda q, k, v: interval_attention(q, k, v, low, low, (8, 8))[0].sum(), (0, 1, 2))(q, k, v)
    assert not any(np.any(g) for g in grads)
