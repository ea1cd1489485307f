"""The CPU's noise: that of XLA's elementwise form, but for the last places; of a token alone whatever is beside it."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.backend import XLA
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.sampling_noise import gumbel_noise

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")

SEEDS, POSITIONS = jnp.asarray([3, 2**32 - 1], jnp.uint32), jnp.asarray([[0, 5, 70_000], [1, 2, 2**31 - 1]])


@pytest.mark.parametrize("size", [1, 15, 500, 50_021])
def test_noise_in_cpp_equals_xlas_to_1e_6(size):
    got = cpu.noise(SEEDS, POSITIONS, jnp.arange(size))
    expected = np.asarray(gumbel_noise(XLA, SEEDS, POSITIONS, jnp.arange(size)), np.float64)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    # Largest where u is smallest, of 300,000 about 5 · 10⁻⁶; least where it is nearest to 1.
    assert size < 1e4 or (expected.max() > 10 and expected.min() < -2)


def test_noise_is_by_token():
    ids = jnp.asarray([7, 4099, 0, 17, 2**31 - 1])
    got, whole = cpu.noise(SEEDS, POSITIONS, ids), cpu.noise(SEEDS, POSITIONS, jnp.arange(5000))
    np.testing.assert_array_equal(got[..., :4], whole[..., ids[:4]])
    for t in range(3):
        alone = cpu.noise(SEEDS[1:], POSITIONS[1:, t : t + 1], ids)
        np.testing.assert_array_equal(alone[0, 0], got[1, t])
    assert len(np.unique(got)) == got.size
