"""Gated DeltaNet on a TPU, in Pallas' interpreter, against the reference in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.backend import XLA, Backend, choose
from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.gated_delta import (
    ADVANCES,
    IMPLEMENTATIONS,
    REPLAYS,
    advance_reference,
    reference,
    replay_reference,
    works_in_place,
)
from dflash_jax.ops.kernels.tpu.delta import heads_of_program, why_not
from dflash_jax.ops.kernels.tpu.replay import why_not as why_not_replayed
from tests.helpers import in_one_program
from tests.ops.kernels.tpu.interpreter import TPU, interpreted, pallas
from tools.float64_reference import Exact, assert_tree_near, in_both_of
from tools.kernels import arguments
from tools.kernels.arguments import Source, poisoned

EPS = 1e-6
mix = pallas("gated_delta", IMPLEMENTATIONS, EPS)
replay = pallas("replay", REPLAYS)


def advance_by_xla(inputs, gates, state, weights, n):
    y, after = advance_reference(XLA, inputs, gates, state, weights, EPS, n)
    return y, after.recurrent, after.conv_inputs


def replay_by_xla(*args):
    after = replay_reference(XLA, *args)
    return after.recurrent, after.conv_inputs


def advance_by_kernel(inputs, gates, state, weights, n):
    implementation = choose("advance", ADVANCES, TPU, inputs, gates, state, weights, EPS, n)
    assert implementation.name == "pallas"
    return implementation.call(TPU, inputs, gates, state, weights, EPS, n)


advance = interpreted(advance_by_kernel)
mix_plain = in_one_program(partial(reference, XLA, eps=EPS))


def mixer(rows, tokens, g=1, r=2, dtype=jnp.float32, **options):
    inputs, gates, state, weights = arguments.mixer(Source(tokens), rows, tokens, g, r, 128, 128, dtype, **options)
    return inputs, gates, poisoned(state), weights


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("rows", "tokens", "g", "r", "taps"), [(1, 1, 1, 3, 4), (3, 5, 2, 1, 2), (2, 16, 1, 2, 4), (2, 70, 1, 2, 4)]
)
def test_tokens_and_their_record_are_the_reference(rows, tokens, g, r, taps, alike):
    args = mixer(rows, tokens, g, r, taps=taps, alike=alike)
    assert_tree_near(mix(*args), in_both_of(partial(reference, XLA, eps=EPS), *args))


@pytest.mark.parametrize(("rows", "tokens"), [(2, 9), (1, 70)])
def test_tokens_in_bfloat16_are_near_float32_of_the_same_values(rows, tokens):
    """Sums of products are float32, of three products in bfloat16 each: the result is rounded once."""
    args = mixer(rows, tokens, dtype=jnp.bfloat16)
    single = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    (y, record), (expected, plain) = mix(*args), mix_plain(*single)
    assert y.dtype == record.conv_inputs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(record.conv_inputs, args[0][..., :512])
    np.testing.assert_allclose(record.log_decay, plain.log_decay, rtol=1e-6)
    for found, want, bits in ((record.k, plain.k, 20), (record.delta, plain.delta, 15), (y, expected, 8)):
        assert np.abs(found.astype(jnp.float32) - want).max() <= 2.0**-bits * np.abs(want).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_is_the_same_in_a_block_of_any_length_and_in_any_company(dtype):
    """To the bit."""
    inputs, gates, state, weights = mixer(3, 16, dtype=dtype)
    whole = mix(inputs, gates, state, weights)
    for tokens in (1, 3, 15):
        some = mix(inputs[:, :tokens], gates[:, :tokens], state, weights)
        jax.tree.map(lambda a, b, t=tokens: np.testing.assert_array_equal(a, b[:, :t]), some, whole)
    alone = mix(inputs[1:2], gates[1:2], replace(state, rows=state.rows[1:2]), weights)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[1:2]), alone, whole)


@pytest.mark.parametrize("counts", [(150, 150, 150), (1, 64, 65), (0, 127, 150)])
def test_the_state_after_the_tokens_that_count_is_the_reference(counts):
    """The last row is padding: what is after a row's last token may be anything, and other rows stay as they are."""
    inputs, gates, state, weights = mixer(3, 150)
    n = jnp.asarray(counts, jnp.int32)
    counted = np.arange(150) < np.array(counts)[:, None]
    spoilt = jnp.where(counted[..., None, None], inputs, jnp.nan)
    y, after = advance(spoilt, gates, state, weights, n)
    expected, *exact = in_both_of(advance_by_xla, inputs, gates, state, weights, n)
    counted[2] = False
    assert_tree_near(np.asarray(y)[counted], Exact(expected.value[counted], expected.single[counted]))
    rows = np.asarray(state.rows[:2])
    assert_tree_near(after.recurrent[rows], exact[0][rows])
    np.testing.assert_array_equal(after.conv_inputs[rows], exact[1].single[rows])
    others = np.setdiff1d(np.arange(5), rows)
    np.testing.assert_array_equal(after.recurrent[others], state.recurrent[others])
    np.testing.assert_array_equal(after.conv_inputs[others], state.conv_inputs[others])


@pytest.mark.parametrize("counts", [(5, 2, 3, 4), (0, 0, 5, 1), (0, 0, 0, 5)])
def test_a_replay_is_the_reference_and_leaves_other_rows(counts):
    """Tokens that do not count are NaN, and so are rows that take no part. The last row is padding."""
    inputs, gates, state, weights = mixer(4, 5, 2, 2)
    record, n = mix_plain(inputs, gates, state, weights)[1], jnp.asarray(counts, jnp.int32)
    record = arguments.spoilt(record, n)
    after = replay(state, record, n)
    exact = in_both_of(replay_by_xla, state, record, n)
    written = np.asarray(state.rows[:3])[np.asarray(counts[:3]) > 0]
    if len(written):
        assert_tree_near(after.recurrent[written], exact[0][written])
    np.testing.assert_array_equal(after.conv_inputs, exact[1].single)
    others = np.setdiff1d(np.arange(6), written)
    np.testing.assert_array_equal(after.recurrent[others], state.recurrent[others])


def test_a_replay_is_the_same_in_any_blocks_and_in_any_company():
    """To the bit."""
    inputs, gates, state, weights = mixer(3, 16)
    record, n = mix_plain(inputs, gates, state, weights)[1], jnp.asarray([13, 6, 0], jnp.int32)
    whole = replay(state, record, n)
    for cut in (1, 4):
        some, rest = (jax.tree.map(lambda x, p=part: x[:, p], record) for part in (slice(cut), slice(cut, 16)))
        before = replay(state, some, jnp.minimum(n, cut))
        np.testing.assert_array_equal(replay(before, rest, jnp.maximum(n - cut, 0)).recurrent, whole.recurrent)
    alone = replay(replace(state, rows=state.rows[1:2]), jax.tree.map(lambda x: x[1:2], record), n[1:2])
    np.testing.assert_array_equal(alone.recurrent[state.rows[1]], whole.recurrent[state.rows[1]])


def test_what_is_not_supported_has_a_reason_and_goes_to_xla():
    args = mixer(2, 5)
    state, n = args[2], jnp.zeros(2, jnp.int32)
    record = jax.eval_shape(mix_plain, *args)[1]
    for kernels, name in (("all", "pallas"), ("auto", "reference"), ("xla", "reference")):
        backend = Backend.for_tpu(kernels)
        assert choose("gated_delta", IMPLEMENTATIONS, backend, *args, EPS).name == name
        assert choose("replay", REPLAYS, backend, state, record, n).name == name
        assert works_in_place(backend, state, 5) == (name == "pallas")
    assert not works_in_place(TPU, state, 17)
    assert choose("gated_delta", IMPLEMENTATIONS, TPU, *args, EPS, n).name == "reference"
    assert choose("advance", ADVANCES, TPU, *args, EPS, n).name == "reference"
    assert "float16" in why_not(jnp.float16, state)
    assert "17 tokens" in why_not_replayed(17, state)
    small = DeltaState(state.recurrent[..., :64], state.conv_inputs)
    assert "heads of [128, 64]" in why_not(jnp.float32, small)
    assert "heads of [128, 64]" in why_not_replayed(1, small)
    assert "over 11 tokens" in why_not(jnp.float32, replace(state, conv_inputs=jnp.zeros((4, 10, 1, 512))))


@pytest.mark.parametrize(
    ("g", "r", "round_heads", "chunk_heads"), [(16, 2, 8, 4), (16, 3, 4, 2), (2, 2, 2, 2), (1, 20, 1, 1), (6, 2, 6, 3)]
)
def test_a_program_has_as_many_key_heads_as_divide_them(g, r, round_heads, chunk_heads):
    state = DeltaState(jnp.zeros((1, g, r, 1, 1)), jnp.zeros((1, 1, 1, 1)))
    assert [heads_of_program(tokens, state) for tokens in (16, 17)] == [round_heads, chunk_heads]
