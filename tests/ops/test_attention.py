"""Attention over a cache in pieces, as a CPU and as an accelerator reads it, against a plain softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import attention
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import KVCache

ROWS, T, HEADS, GROUP, DIM = 5, 3, 2, 2, 8


def filled(length, capacity, window):
    """A cache of these lengths, and the keys and values [rows, positions, heads, dim] that it was given; NaN where a
    row has nothing."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, ROWS, max(length), HEADS, DIM)).astype(np.float32)
    cache = KVCache.create(ROWS, HEADS, DIM, capacity, jnp.float32, window, 4)
    cache = KVCache(cache.k + jnp.nan, cache.v + jnp.nan, None, cache.sinks, cache.ring)
    for start in range(0, max(length), 100):
        positions = np.tile(np.arange(start, min(start + 100, max(length))), (ROWS, 1))
        kept = positions < np.asarray(length)[:, None]
        cache = attention.write(
            Backend.xla(), cache, k[:, positions[0]], v[:, positions[0]], jnp.asarray(positions), jnp.asarray(kept)
        )
    return cache, k, v


def reference(q, k, v, context, length, seen):
    """Each new token sees ``seen(position, length)`` of the context, itself and the new ones before it."""
    held_k, held_v = context
    y = np.zeros((ROWS, T, HEADS * GROUP, DIM))
    for b, t, n in np.ndindex(ROWS, T, HEADS * GROUP):
        past = [p for p in range(length[b]) if seen(p, length[b])]
        keys = np.concatenate([held_k[b, past, n // GROUP], k[b, : t + 1, n // GROUP]]).astype(np.float64)
        values = np.concatenate([held_v[b, past, n // GROUP], v[b, : t + 1, n // GROUP]])
        scores = keys @ q[b, t, n] * DIM**-0.5
        weights = np.exp(scores - scores.max())
        y[b, t, n] = weights @ values / weights.sum()
    return y


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(("capacity", "window"), [(256, None), (768, None), (1024, None), (1024, 500)])
def test_attention_over_every_context_length_equals_softmax_in_float64(platform, capacity, window, monkeypatch):
    """768 is no multiple of an accelerator's piece here: its last one overlaps the one before."""
    monkeypatch.setattr(attention, "WIDE_CHUNK", 512)
    length = [0, 1, capacity - 1, capacity // 2 + 3, capacity]
    cache, held_k, held_v = filled(length, capacity, window)
    assert cache.ring == (window is not None)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((ROWS, T, HEADS * GROUP, DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, ROWS, T, HEADS, DIM)).astype(np.float32)
    got = jax.jit(lambda *args: attention.attention(Backend.xla(platform), *args))(
        q, k, v, None, cache, jnp.asarray(length)
    )
    remembered = cache.capacity - cache.sinks

    def seen(position, length):
        return window is None or position < cache.sinks or position >= length - remembered

    want = reference(q, k, v, (held_k, held_v), length, seen)
    np.testing.assert_allclose(got, want, atol=1e-5)
