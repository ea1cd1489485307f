"""Weights in few bits in the C++ kernels: scales that are no numbers, stacks. Others: tests/models/test_packing.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.weights import SCALES, PackedWeight, QuantizedWeight
from tests import few_bits

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("run", [8, 6])
@pytest.mark.parametrize("dtype", SCALES)
def test_a_scale_that_is_no_number_makes_its_output_none_and_no_other(dtype, run, rows):
    """In each place of a word; the scales beside it are the largest and the least."""
    with_none = 4 * np.arange(5)
    for none in (np.nan, -np.nan, np.inf):
        scale = np.resize([1, float(jnp.finfo(dtype).max), 0], (21, 5)).astype(dtype)
        scale[with_none, np.arange(5)] = none
        weight = QuantizedWeight(np.full((21, 5 * run // 2), 0x9F, np.uint8), scale, code="int4")
        # So small that no product is infinite.
        x, panels = np.full((rows, 5 * run), 2.0**-10, np.float32), jax.device_put(PackedWeight.of(weight, 1))
        found = np.asarray(cpu.linear(x, [panels])[0])
        assert not np.isfinite(found[:, with_none]).any()
        found, right = (np.delete(y, with_none, 1) for y in (found, x @ few_bits.of(weight).T))
        np.testing.assert_allclose(found, right, rtol=1e-6)


@pytest.mark.parametrize("form", few_bits.NUMBERS)
def test_a_weight_of_a_stack_has_the_bits_of_the_weight_alone(form):
    rng = np.random.default_rng(0)
    stack = few_bits.weight(rng, (3, 2, 32), 72, 24, form, has_zero=True, has_factor=True)
    packed, x = jax.device_put(PackedWeight.of(stack, 1)), rng.standard_normal((5, 72)).astype(np.float32)
    of_stack = jax.jit(lambda i: cpu.linear(x, [packed.of_stack(i).reshape(64, 72)], swiglu=True)[0])
    for i in range(3):
        alone = cpu.linear(x, [PackedWeight.of(stack[i], 1).reshape(64, 72)], swiglu=True)[0]
        np.testing.assert_array_equal(of_stack(jnp.int32(i)), alone)
        jax.tree.map(np.testing.assert_array_equal, packed.of_stack(jnp.int32(i)).unpacked(), stack[i])
