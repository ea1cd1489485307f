"""The delta rule of many tokens in Triton against XLA's form, from chunk to chunk and through the whole mixer."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops.backend import XLA
from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.gated_delta import ADVANCES, IMPLEMENTATIONS, reference, replay
from dflash_jax.ops.kernels.triton import delta_chunks as triton_chunks
from tests.helpers import in_one_program
from tools.kernels.arguments import Source, mixer
from tools.kernels.comparisons import kernel_of
from tools.triton_interpreter import interpreting

mix, replay_plain = in_one_program(partial(reference, XLA)), in_one_program(partial(replay, XLA))
mix_in_chunks = in_one_program(kernel_of(IMPLEMENTATIONS, "triton, chunks"))
advance_in_chunks = in_one_program(kernel_of(ADVANCES, "triton, chunks"))


def arguments(rng, tokens, m, rows, g, r, dk, dv, dtype=jnp.float32):
    """A state and what `from_chunk_to_chunk` takes."""
    heads = (-(-tokens // m), rows, g, r)
    u, w, q, k = (rng.standard_normal((*heads, m, n)) / np.sqrt(dk) for n in (dv, dk, dk, dk))
    scores = np.tril(rng.standard_normal((*heads, m, m))) / 4
    left, state = rng.uniform(0.1, 1, heads), rng.standard_normal((rows, g, r, dk, dv))
    state, u, left = (jnp.asarray(x, jnp.float32) for x in (state, u, left))
    return state, (u, *(jnp.asarray(x, dtype) for x in (w, q, scores, k)), left)


def by_kernel(state, chunks, tokens, card=HOPPER):
    return triton_chunks.from_chunk_to_chunk(card, DeltaState(state, jnp.zeros((1, 3, 1, 1))), *chunks, tokens)


def plain(state, chunks, tokens):
    """The same in NumPy."""
    made, state, chunks = [], np.asarray(state), map(np.asarray, chunks)
    for u, w, q, scores, k, left in zip(*chunks, strict=True):
        delta = u - w @ state
        made.append((q @ state + scores @ delta, delta))
        state = state * left[..., None, None] + k.swapaxes(-1, -2) @ delta
    # [count, B, G, R, M, Dv] → [B, T, G, R, Dv]
    every = (np.concatenate(x, axis=-2)[..., :tokens, :] for x in zip(*made, strict=True))
    return [np.moveaxis(x, -2, 1) for x in every]


SIZES = [
    # tokens, chunk, rows, key heads, values on each, key and value size
    (20, 32, 1, 1, 2, 16, 16),
    (64, 64, 2, 2, 1, 16, 32),
    (150, 32, 2, 1, 3, 32, 64),
    (97, 16, 1, 2, 2, 16, 128),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_from_chunk_to_chunk(sizes, multiprocessors):
    """One chunk and several, the last one full or not; all values of a head in one program and in several."""
    args, card = arguments(np.random.default_rng(sizes[0]), *sizes), replace(HOPPER, multiprocessors=multiprocessors)
    for got, want in zip(by_kernel(*args, sizes[0], card), plain(*args, sizes[0]), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_sixteen_bits_lose_no_small_change_of_a_large_state():
    """Each chunk adds a half to 2,048, where half precision's numbers lie 2 apart."""
    state, chunks = arguments(np.random.default_rng(0), 640, 32, 1, 1, 1, 16, 16, jnp.float16)
    u, w, q, scores, k, left = (jnp.zeros_like(x) for x in chunks)
    chunks = u.at[..., 0, :].set(0.5), w, q + 1, scores, k.at[..., 0, :].set(1 / 16), left + 1
    out, _ = by_kernel(0 * state + 2048 / 16, chunks, 640)
    np.testing.assert_allclose(out[0, ::32, 0, 0, 0], 2048 + 0.5 * np.arange(20), atol=1)


@pytest.mark.parametrize(
    "sizes", [(1, 17, 1, 1, 16, 16), (2, 64, 2, 3, 16, 32), (2, 70, 1, 2, 32, 16), (1, 150, 2, 2, 16, 16)]
)
@pytest.mark.parametrize("alike", [False, True])
def test_mix_in_chunks_equals_the_plain_mixer(sizes, alike):
    """``alike``: the same token again and again with hardly any decay, where the inverse of a chunk is worst
    conditioned."""
    args = mixer(Source(sizes[1]), *sizes, alike=alike)
    found, expected = mix_in_chunks(*args, 1e-6), mix(*args, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, expected)


@pytest.mark.parametrize("counts", [(150, 150, 150), (1, 64, 65), (0, 127, 150)])
def test_the_state_after_the_tokens_that_count(counts):
    """Rows of a state in another order, the last one padding: what is behind a row's last token may hold anything and
    changes nothing; other rows, and those without a token, stay as they are."""
    inputs, gates, state, weights = mixer(Source(5), 3, 150, 2, 2, 16, 32)
    n = jnp.asarray(counts, jnp.int32)
    counted = np.arange(150) < np.array(counts)[:, None]
    y, record = mix(inputs, gates, state, weights, 1e-6)
    expected = replay_plain(state, record, n)
    spoilt = np.where(counted[..., None, None], inputs, np.float32(np.nan))
    found, after = advance_in_chunks(spoilt, gates, state, weights, 1e-6, n)
    counted[2] = False
    np.testing.assert_allclose(np.asarray(found)[counted], np.asarray(y)[counted], atol=3e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), after, expected)
    untouched = [i for i in range(5) if i not in state.rows.tolist()]
    if counts[0] == 0:
        untouched.append(int(state.rows[0]))
    for new, old in ((after.recurrent, state.recurrent), (after.conv_inputs, state.conv_inputs)):
        np.testing.assert_array_equal(np.asarray(new)[untouched], np.asarray(old)[untouched])


@pytest.mark.parametrize("taps", [2, 3])
def test_mixer_in_chunks_with_other_convolutions_equals_its_definition(taps):
    args = mixer(Source(taps), 1, 40, 1, 2, 16, 16, taps=taps)
    found, expected = mix_in_chunks(*args, 1e-6), mix(*args, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), found, expected)


def test_mix_in_chunks_in_float16_is_near_float32():
    """Half precision, which the interpreter has, in bfloat16's place, against float32 of the same values: keys are
    rounded once, δ is off by what that and products in 16 bits make of it."""
    half = mixer(Source(0), 1, 150, 1, 2, 32, 32, jnp.float16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float16 else x, half)
    (y, record), (expected, plain) = mix_in_chunks(*half, 1e-6), mix(*exact, 1e-6)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(record.log_decay, plain.log_decay, atol=1e-5)
    np.testing.assert_allclose(record.k, plain.k, atol=3e-4)
    scale = float(jnp.abs(plain.delta).max())
    assert 1e-5 * scale < jnp.abs(record.delta - plain.delta).max() < 3e-3 * scale
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.03)


def test_which_models_they_are_for():
    state = DeltaState(jnp.zeros((1, 2, 2, 128, 128)), jnp.zeros((1, 3, 2, 512), jnp.bfloat16))
    assert triton_chunks.why_not(state, jnp.bfloat16) is None
    assert "bfloat16" in triton_chunks.why_not(state, jnp.float32)
    assert "bfloat16" in triton_chunks.why_not(
        DeltaState(state.recurrent, state.conv_inputs.astype(jnp.float32)), jnp.bfloat16
    )
    assert "powers of two" in triton_chunks.why_not(
        DeltaState(state.recurrent[..., :96], state.conv_inputs), jnp.bfloat16
    )


@pytest.mark.parametrize("alike", [False, True])
def test_tf32_error_is_below_one_bfloat16_rounding(alike):
    """The inverse of a chunk and what is made of it are products in TF32, of bfloat16 models. Their error is less than
    one rounding to bfloat16 of the largest value, for random keys and where the inverse is worst conditioned."""
    args = mixer(Source(3), 1, 64, 1, 1, 128, 128, jnp.bfloat16, alike=alike)
    args = [*args[:3], *args[3][:3]]
    exact = triton_chunks.prepare(HOPPER, *args)
    with interpreting(emulate_tf32=True):
        truncated = triton_chunks.prepare(HOPPER, *args)
    for i, name in enumerate("uw"):
        one, other = (np.asarray(x[i], np.float64) for x in (truncated, exact))
        error = np.abs(one - other).max() / np.abs(other).max()
        print(name, alike, error * 2**8)
        assert 0 < error < 2**-8, name
