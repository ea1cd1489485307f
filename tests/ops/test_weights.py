"""Weights in four and eight bits: what they stand for, their axes, their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.ops.weights import CODES, GROUPS, QuantizedWeight, quantize
from tests import few_bits


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    runs=st.sampled_from([1, 2, 6]),
    run=st.sampled_from([2, 16, 64]),
    form=st.sampled_from(few_bits.NUMBERS),
    has_zero=st.booleans(),
    has_factor=st.booleans(),
    tokens=st.sampled_from([1, 65]),
    parts=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
def test_a_weight_in_any_form_is_the_array_that_it_stands_for(
    rows, runs, run, form, has_zero, has_factor, tokens, parts, seed
):
    rng, size = np.random.default_rng(seed), runs * run
    weight = few_bits.weight(rng, tuple(rows), size, run, form, has_zero, has_factor)
    expected = few_bits.of(weight)
    assert (weight.shape, weight.ndim, weight.run) == (expected.shape, expected.ndim, run)
    assert QuantizedWeight.of(weight.arrays()).arrays().keys() == weight.arrays().keys()

    def check(found, right):
        np.testing.assert_allclose(found.dense(jnp.float32), right, rtol=1e-6)

    check(weight, expected)
    check(weight[0], expected[0])
    check(weight.reshape(-1, size), expected.reshape(-1, size))
    # Leading axes join the last one, where the runs stay what they are.
    flat = weight.reshape(1, expected.size)
    check(flat, expected.reshape(1, -1))
    if size % (2 * parts) == 0:
        spread = weight.spread(parts)
        check(spread, expected)
        assert spread.scale.shape[-1] % parts == 0
    matrix, x = weight.reshape(-1, size), rng.standard_normal((tokens, size)).astype(np.float32)
    right = x @ expected.reshape(-1, size).T
    scale = np.abs(x) @ np.abs(expected.reshape(-1, size)).T
    for converts_first in (False, True):
        found = matrix.matmul(jnp.asarray(x), converts_first=converts_first)
        assert (np.abs(found - right) <= 1e-5 * scale + 1e-6).all()


@pytest.mark.parametrize("code", CODES)
def test_numbers_of_four_bits_are_exact_in_bfloat16(code):
    every = np.arange(256, dtype=np.uint8)[None]
    weight = QuantizedWeight(every, np.ones((1, 1), np.float32), np.full((1, 1), -8, np.int8), code=code)
    np.testing.assert_array_equal(weight.numbers(jnp.bfloat16).astype(np.float32), weight.numbers(jnp.float32))


# Quantizing.


def test_loading_quantizes_to_what_there_is():
    assert ("none", "int8", "fp8", *GROUPS) == QUANTIZE


@pytest.mark.parametrize("kind", GROUPS)
def test_four_bits_are_the_nearest_numbers_of_the_best_scale(kind):
    rng = np.random.default_rng(0)
    weight = rng.standard_t(4, (3, 5, 256)).astype(np.float32) * 0.02
    weight[0, 0] = 0
    weight[1, 1, :128] *= 1e-4
    found = jax.jit(quantize, static_argnums=1)(jnp.asarray(weight), kind)
    every = np.arange(-8, 8) if found.code == "int4" else few_bits.of_e2m1(np.arange(16))
    split = weight.reshape(3, 5, -1, found.run)
    assert found.run == GROUPS[kind]

    def error(scale) -> np.ndarray:
        """The squared error of the nearest numbers."""
        numbers = scale[..., None, None] * every
        return np.square(np.abs(numbers - split[..., None]).min(-1)).sum(-1)

    actual = np.square(np.asarray(found.dense(jnp.float32)).reshape(split.shape) - split).sum(-1)
    np.testing.assert_allclose(actual, error(np.asarray(found.scales())), rtol=1e-4, atol=1e-12)
    # No worse than the scale of the largest magnitude, which others take.
    top = np.abs(split).max(-1)
    usual = error((top / every.max()).astype(found.scale.dtype if found.code == "int4" else np.float32))
    if found.code == "int4":
        assert (actual <= usual * 1.001 + 1e-12).all()
    assert actual.sum() < 0.9 * usual.sum()
    if found.factor is not None:
        assert len(np.unique(found.factor)) == 1
        assert np.frexp(np.asarray(found.factor).flat[0])[0] == 0.5
        # The largest scale uses the range of its dtype.
        assert 128 <= np.asarray(found.scale).astype(np.float32).max() <= 448


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_between_two_numbers_the_one_with_an_even_code_is_taken(kind):
    every = np.arange(-8, 8) if kind == "int4" else few_bits.of_e2m1(np.arange(8))
    middle = (every[1:] + every[:-1]) / 2
    # A run for each, beside numbers for which 1 is by far the best scale.
    others = [*every, *every[1:]] if kind == "int4" else [*6 * [6], *4 * [4], *every[1:6]]
    runs = np.stack([[*others, n] for n in middle]).astype(np.float32)
    for sign in (1, -1):
        found = quantize(jnp.asarray(sign * runs), kind)
        np.testing.assert_array_equal(np.abs(found.scales()), 1)
        expected = sign * np.where(np.arange(len(middle)) % 2, every[1:], every[:-1])
        np.testing.assert_array_equal(found.dense(jnp.float32)[:, -1], expected)


@pytest.mark.parametrize("kind", QUANTIZE[1:])
@pytest.mark.parametrize("none", [np.nan, np.inf])
def test_a_weight_that_is_no_number_stays_none(kind, none):
    weight = np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32)
    weight[0, 70] = none
    dense = np.asarray(quantize(jnp.asarray(weight), kind).dense(jnp.float32))
    assert not np.isfinite(dense[0, 70])
    assert np.isfinite(dense[1]).all()


@pytest.mark.parametrize("kind", GROUPS)
def test_rows_that_do_not_divide_into_bytes_have_eight_bits(kind):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 7)), jnp.float32)
    found, right = quantize(weight, kind), quantize(weight, "int8")
    assert found.code is None
    np.testing.assert_array_equal(found.dense(jnp.float32), right.dense(jnp.float32))


@pytest.mark.parametrize("kind", GROUPS)
def test_zeros_and_tiny_weights_stay_finite(kind):
    for weight in (np.zeros((2, 64)), np.full((2, 64), 1e-38), np.eye(2, 64) * 3e38):
        found = quantize(jnp.asarray(weight, jnp.float32), kind)
        assert np.isfinite(found.dense(jnp.float32)).all()
        np.testing.assert_allclose(found.dense(jnp.float32), weight, rtol=0.2, atol=1e-37)
