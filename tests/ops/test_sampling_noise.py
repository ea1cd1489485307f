"""The noise of draws against Threefry in NumPy and against statistics; and its arg-max on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.extend.random import threefry2x32_p

from dflash_jax.ops import argmax
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.sampling_noise import gumbel_noise, threefry_elementwise

noise_of = jax.jit(
    lambda seed, positions, n: gumbel_noise(Backend.detect(), seed, positions, jnp.arange(n)), static_argnums=2
)


def threefry(key, counter, rounds=20):
    """Threefry-2x32 (Salmon et al. 2011) in NumPy: the first word."""
    keys = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0]) ^ np.uint32(key[1]) ^ np.uint32(0x1BD11BDA)]
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(rounds):
        turn = np.uint32([13, 15, 26, 6, 17, 29, 16, 24][i % 8])
        x = x + y
        y = ((y << turn) | (y >> (np.uint32(32) - turn))) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x, y = x + keys[j % 3], y + keys[(j + 1) % 3] + np.uint32(j)
    return x


def test_noise_is_threefry_of_seed_position_and_id():
    seeds, positions = np.array([0, 1, 2**32 - 1], np.uint32), np.array([[0, 5], [3, 4], [100_000, 262_143]])
    found = np.asarray(noise_of(jnp.asarray(seeds), jnp.asarray(positions), 50))
    with np.errstate(over="ignore"):
        for b in range(3):
            for t in range(2):
                ids = np.arange(50, dtype=np.uint32)
                bits = threefry((seeds[b], positions[b, t]), (ids, np.zeros_like(ids)))
                u = (bits.astype(np.float64) + 0.5) / 2**32
                np.testing.assert_allclose(found[b, t], -np.log(-np.log1p(-u)), rtol=1e-5, atol=1e-6)


def test_both_forms_of_threefry_are_one():
    """The CPU's and the accelerators'."""
    words = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (4, 1000), np.uint32))
    np.testing.assert_array_equal(threefry_elementwise(*words), threefry2x32_p.bind(*words)[0])


@pytest.mark.parametrize("size", [1, 63, 64, 640, 641])
@pytest.mark.parametrize("fill", ["random", "ties", "nothing", "nan"])
def test_argmax_equals_numpy_with_ties_and_nan(size, fill):
    rng = np.random.default_rng(size)
    x = rng.normal(0, 1, (3, 5, size)).astype(np.float32)
    if fill == "ties":
        x = np.round(x)
    if fill == "nothing":
        x[:] = -np.inf
    if fill == "nan":
        x[:, :, rng.integers(0, size, 3)] = np.nan
    np.testing.assert_array_equal(jax.jit(partial(argmax.argmax, XLA))(x), x.argmax(-1))


def test_noise_depends_on_nothing_else():
    seeds, positions = jnp.asarray([7, 7, 9], jnp.uint32), jnp.asarray([[0, 1, 2], [2, 1, 9], [0, 1, 2]])
    whole = np.asarray(noise_of(seeds, positions, 64))
    np.testing.assert_array_equal(whole[0, 2], whole[1, 0])
    np.testing.assert_array_equal(whole[0, 1], whole[1, 1])
    np.testing.assert_array_equal(noise_of(seeds[1:2], positions[1:2, 2:], 64)[0, 0], whole[1, 2])
    np.testing.assert_array_equal(noise_of(seeds, positions, 33), whole[..., :33])
    assert not np.isclose(whole[0, 0], whole[2, 0]).any()
    assert not np.isclose(whole[0, 0], whole[0, 1]).any()


def test_noise_is_gumbel_and_uncorrelated():
    noise = np.asarray(noise_of(jnp.arange(20, dtype=jnp.uint32), jnp.tile(jnp.arange(20), (20, 1)), 200), np.float64)
    assert np.isfinite(noise).all()
    assert scipy.stats.kstest(noise.ravel(), "gumbel_r").pvalue > 1e-3
    for other in (np.roll(noise, 1, 0), np.roll(noise, 1, 1), np.roll(noise, 1, 2), noise.swapaxes(0, 1)):
        distinct = other != noise
        assert abs(np.corrcoef(noise[distinct], other[distinct])[0, 1]) < 0.02
