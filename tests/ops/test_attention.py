"""Attention over a cache in pieces, as a CPU and as an accelerator reads it, against a plain softmax in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import attention, cache_write
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import Bounds, KVCache

ROWS, T, HEADS, GROUP, DIM = 5, 3, 2, 2, 8


def filled(length, capacity):
    """A cache of these lengths in pages of any order, and the keys and values [rows, positions, heads, dim] that it
    was given; NaN where a row has nothing."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, ROWS, max(length), HEADS, DIM)).astype(np.float32)
    cache = KVCache.create(ROWS, HEADS, DIM, capacity, jnp.float32)
    table = rng.permutation(cache.table.size).reshape(cache.table.shape).astype(np.int32)
    cache = KVCache(cache.k + jnp.nan, cache.v + jnp.nan, jnp.asarray(table))
    for start in range(0, max(length), 100):
        positions = np.tile(np.arange(start, min(start + 100, max(length))), (ROWS, 1))
        kept = positions < np.asarray(length)[:, None]
        cache = cache_write.write(
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
    """768 is no multiple of an accelerator's piece here. Pages that a window leaves out do not exist."""
    monkeypatch.setattr(attention, "WIDE_CHUNK", 512)
    length, sinks = [0, 1, capacity - 1, capacity // 2 + 3, capacity], 4
    cache, held_k, held_v = filled(length, capacity)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((ROWS, T, HEADS * GROUP, DIM)).astype(np.float32)
    k, v = rng.standard_normal((2, ROWS, T, HEADS, DIM)).astype(np.float32)
    bounds, table = None, np.array(cache.table)
    if window is not None:
        recent = np.asarray(length, np.int32) - window
        bounds = Bounds(jnp.zeros((ROWS, T), jnp.int32), jnp.asarray(recent), jnp.full(ROWS, sinks, jnp.int32))
        for row, start in enumerate(recent):
            table[row, 1 : max(start // cache.page_size, 1)] = table.size
        assert (table == table.size).any()
    cache = replace(cache, table=jnp.asarray(table))
    got = jax.jit(lambda *args: attention.attention(Backend.xla(platform), *args))(
        q, k, v, None, cache, jnp.asarray(length), bounds
    )

    def seen(position, length):
        return window is None or position < sinks or position >= length - window

    want = reference(q, k, v, (held_k, held_v), length, seen)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_pages_in_any_order_give_the_same_bits():
    length = [0, 1, 1023, 515, 1024]
    cache, _, _ = filled(length, 1024)
    in_order = KVCache(
        cache.k[cache.table.ravel()],
        cache.v[cache.table.ravel()],
        jnp.sort(cache.table.ravel()).reshape(cache.table.shape),
    )
    rng = np.random.default_rng(2)
    q = jnp.asarray(rng.standard_normal((ROWS, T, HEADS * GROUP, DIM)), jnp.float32)
    k, v = jnp.asarray(rng.standard_normal((2, ROWS, T, HEADS, DIM)), jnp.float32)
    for backend in (Backend.xla("cpu"), Backend.xla("cuda"), Backend.detect()):
        run = jax.jit(
            lambda cache, backend=backend: attention.attention(backend, q, k, v, None, cache, jnp.asarray(length))
        )
        np.testing.assert_array_equal(run(cache), run(in_order))
