"""Triton kernels against their plain definitions, over odd sizes, lengths, dtypes and windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import Bounds, KVCache, attend_in_pieces
from dflash_jax.models.moe import experts_gathered
from dflash_jax.models.weights import quantize


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("tokens", "top", "experts", "idle", "quantized"),
    [
        (1, 2, 7, 0.0, None),
        (5, 3, 7, 0.3, None),
        (5, 3, 7, 0.3, ("int8", 1)),
        (5, 3, 7, 0.3, ("fp8", 1)),
        (5, 3, 7, 0.3, ("fp8", 2)),
        (16, 8, 20, 0.2, None),
        (170, 2, 3, 0.1, None),
        (70, 4, 5, 0.1, ("fp8", 2)),
        (3, 2, 8, 1.0, None),
        (33, 2, 3, 0.5, ("int8", 1)),
    ],
)
def test_experts(tokens, top, experts, idle, quantized):
    """More choices than a program sorts, several blocks of an expert, experts that nobody chose, idle tokens."""
    from dflash_jax.kernels.triton_experts import experts_triton, fits

    rng, features, hidden = np.random.default_rng(tokens), 96, 192
    x, gate_up = normal(rng, tokens, hidden), normal(rng, experts, 2, features, hidden) / 20
    down = normal(rng, experts, hidden, features) / 14
    if quantized:
        gate_up, down = quantize(gate_up, *quantized), quantize(down, *quantized)
    chosen = jnp.asarray([rng.permutation(experts)[:top] for _ in range(tokens)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (tokens, top)) * (rng.uniform(size=(tokens, top)) >= idle), jnp.float32)
    assert fits(experts, gate_up, down)
    got = experts_triton(x, weights, chosen, gate_up, down)
    np.testing.assert_allclose(got, experts_gathered(x, weights, chosen, gate_up, down), atol=2e-6)


def test_rows_do_not_depend_on_one_another():
    """The same bits for a token among others as among copies of itself."""
    from dflash_jax.kernels.triton_experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    chosen = jnp.asarray([rng.permutation(8)[:2] for _ in range(6)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (6, 2)), jnp.float32)
    among = experts_triton(x, weights, chosen, gate_up, down)
    for i in range(6):
        copies = (jnp.repeat(y[i : i + 1], 6, axis=0) for y in (x, weights, chosen))
        np.testing.assert_array_equal(experts_triton(*copies, gate_up, down)[0], among[i])


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "dim", "capacity", "window", "sinks"),
    [
        (3, 1, 4, 2, 16, 300, None, 0),
        (3, 5, 6, 2, 32, 700, None, 0),
        (2, 16, 8, 1, 16, 512, None, 0),
        (3, 4, 4, 2, 16, 2000, 300, 0),
        (4, 3, 4, 2, 16, 2000, 200, 50),
        (2, 33, 4, 2, 16, 300, None, 0),
        (3, 2, 4, 2, 16, 120, 100, 50),
        (3, 2, 4, 2, 16, 60, 100, 50),
    ],
)
def test_attention(rows, tokens, heads, kv_heads, dim, capacity, window, sinks):
    """Empty, partly filled and full contexts; rings with and without sinks; rows of a larger cache; what was never
    written is NaN."""
    from dflash_jax.kernels.triton_attention import attend_triton, fits

    rng = np.random.default_rng(tokens)
    q, k, v = (normal(rng, rows, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    cache = KVCache.create(rows + 1, kv_heads, dim, capacity, jnp.float32, window, sinks)
    length = np.array([capacity * 2 // 3, capacity, 0, 30][:rows])
    held = np.full((2, *cache.k.shape), np.nan, np.float32)
    # The first is a compiled row that nobody has: its number is past the end.
    taken = np.array([rows + 1, 0, 2, 3][:rows])
    for b, row in enumerate(np.minimum(taken, rows)):
        held[:, row, :, : min(length[b], cache.capacity)] = rng.standard_normal(
            (2, kv_heads, min(length[b], cache.capacity), dim)
        )
    cache = KVCache(jnp.asarray(held[0]), jnp.asarray(held[1]), jnp.asarray(taken), cache.sinks, cache.ring)
    length = jnp.asarray(length, jnp.int32)
    bounds = Bounds.none(rows, tokens)
    if window is not None:
        size = 120 if sinks else None
        positions = length[:, None] + jnp.arange(tokens)
        zero = jnp.zeros(rows, jnp.int32)
        bounds = Bounds(
            jnp.zeros_like(positions) if sinks else positions - 250,
            length - size if sinks else zero,
            zero + sinks,
        )
    own = jnp.tril(jnp.ones((tokens, tokens), bool))
    assert fits(q)
    for mask in (own, jnp.broadcast_to(own, (rows, tokens, tokens)).at[0].set(True)):
        got = attend_triton(q, k, v, mask, cache, length, bounds)
        np.testing.assert_allclose(got, attend_in_pieces(q, k, v, mask, cache, length, bounds, 256), atol=1e-6)


def test_what_a_kernel_computes_has_a_gradient(monkeypatch):
    """That of a plain form: a target can be trained where kernels are."""
    from dflash_jax import kernels
    from dflash_jax.kernels import triton_experts
    from dflash_jax.models.moe import experts

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    chosen = jnp.asarray([rng.permutation(8)[:2] for _ in range(6)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (6, 2)), jnp.float32)

    def gradient():
        return jax.jit(jax.grad(lambda x, *held: jnp.sum(experts(x, weights, chosen, *held) ** 2)))(x, gate_up, down)

    plain, calls = gradient(), []

    def absent(kernel, args, out, grid, **meta):
        # Like a kernel, it cannot be differentiated.
        calls.append(kernel)
        return jax.pure_callback(lambda *args: None, tuple(out), *args)

    monkeypatch.setattr(triton_experts, "triton_call", absent)
    monkeypatch.setattr(kernels, "_choice", "triton")
    np.testing.assert_allclose(gradient(), plain, rtol=1e-5)
    assert calls
