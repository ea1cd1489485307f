"""The delta rule of many tokens in Triton against XLA's form, from chunk to chunk and through the whole mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.kernels import triton_chunks
from dflash_jax.models import gated_delta


def arguments(rng, tokens, m, rows, g, r, dk, dv):
    """What `gated_delta.chunk_by_chunk` takes, of the sizes that it has in a model."""
    count = -(-tokens // m)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    heads = (count, rows, g, r)
    uw, q, k = (normal(*heads, m, n) / np.sqrt(dk) for n in (dv + dk, dk, dk))
    scores = jnp.tril(normal(*heads, m, m)) / 4
    left = jnp.asarray(rng.uniform(0.1, 1, heads), jnp.float32)
    return normal(rows, g, r, dk, dv), uw, q, scores, k, left


SIZES = [
    # tokens, chunk, rows, key heads, values on each, key and value size
    (20, 32, 1, 1, 2, 16, 16),
    (64, 64, 2, 2, 1, 16, 32),
    (150, 32, 2, 1, 3, 32, 64),
    (97, 16, 1, 2, 2, 16, 128),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("programs", [1, 132])
def test_from_chunk_to_chunk(monkeypatch, sizes, programs):
    """One chunk and several, the last one full or not; all values of a head in one program and in several."""
    monkeypatch.setattr(triton_chunks, "PROGRAMS", programs)
    args = arguments(np.random.default_rng(sizes[0]), *sizes)
    assert triton_chunks.fits(args[0], jnp.bfloat16)
    found = triton_chunks.chunks_triton(*args, sizes[0], jnp.float32)
    for got, want in zip(found, gated_delta.chunk_by_chunk(*args, sizes[0]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_in_sixteen_bits():
    """Half precision rounds what is multiplied and nothing else: the state, sums and δ stay in float32."""
    args = arguments(np.random.default_rng(0), *SIZES[2])
    found = triton_chunks.chunks_triton(*args, 150, jnp.float16)
    for got, want in zip(found, gated_delta.chunk_by_chunk(*args, 150), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=2e-2)
        assert jnp.abs(got - want).max() > 1e-5


def test_sixteen_bits_lose_no_small_change_of_a_large_state():
    """Each chunk adds a half to 2,048, where half precision's numbers lie 2 apart."""
    state, *rest, left = (jnp.zeros_like(x) for x in arguments(np.random.default_rng(0), 640, 32, 1, 1, 1, 16, 16))
    uw, q, scores, k = rest
    out, _ = triton_chunks.chunks_triton(
        state + 2048 / 16, uw.at[..., 0, :16].set(0.5), q + 1, scores, k.at[..., 0, :].set(1 / 16), left + 1, 640,
        jnp.float16,
    )  # fmt: skip
    np.testing.assert_allclose(out[0, ::32, 0, 0, 0], 2048 + 0.5 * np.arange(20), atol=1)


@pytest.mark.parametrize("tokens", [17, 70])
def test_the_whole_mixer(monkeypatch, tokens):
    rng = np.random.default_rng(tokens)
    g, r, dk, dv = 2, 2, 16, 32
    arrays = [rng.standard_normal(s) for s in [(2, tokens, g, dk)] * 2 + [(2, tokens, g, r, dv)]]
    arrays = [jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.float32) for x in arrays]
    arrays += [jnp.asarray(rng.uniform(*span, (2, tokens, g, r)), jnp.float32) for span in ((0, 1), (-2, 0))]
    arrays.append(jnp.asarray(rng.standard_normal((2, g, r, dk, dv)), jnp.float32))
    expected = gated_delta.delta_rule(*arrays)
    calls = []

    def chosen(*args, **forms):
        calls.append(forms["cuda"].func)
        return forms["cuda"](*args)

    monkeypatch.setattr(gated_delta.kernels, "_choice", "triton")
    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
    for got, want in zip(gated_delta.delta_rule(*arrays, dtype=jnp.float16), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-3)
    assert calls == [triton_chunks.chunks_triton]
