"""The delta rule of few tokens in Triton: the mixer, and what is accepted of it, against their plain definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import DeltaRecord, DeltaState, replay_plain
from dflash_jax.kernels.triton_delta import fits, mix_triton, replay_triton
from dflash_jax.models.gated_delta import mix


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("rows", "tokens", "key_heads", "values", "key_dim", "value_dim", "alike"),
    [
        (1, 1, 2, 2, 16, 32, False),
        (2, 5, 1, 3, 16, 16, False),
        (1, 16, 2, 1, 32, 16, False),
        (2, 16, 1, 2, 16, 16, True),
    ],
)
def test_delta_rule(rows, tokens, key_heads, values, key_dim, value_dim, alike):
    """Convolution, gates, rule and norm; then the state after every count of tokens. ``alike``: the same token again
    and again with hardly any decay, where the inverse of a chunk is worst conditioned."""
    rng = np.random.default_rng(tokens)
    g, r, channels = key_heads, values, 2 * key_dim + values * value_dim
    state = DeltaState(normal(rng, rows, g, r, key_dim, value_dim), normal(rng, rows, 3, g, channels))
    qkvz, gates = normal(rng, rows, tokens, g, channels + r * value_dim), normal(rng, rows, tokens, 2, g, r)
    if alike:
        qkvz, state = jnp.broadcast_to(qkvz[:, :1], qkvz.shape), DeltaState(state.recurrent, 0 * state.conv)
        gates = jnp.full_like(gates, 8).at[:, :, 1].set(-12)
    weights = (
        normal(rng, g, channels, 4), jnp.log(jnp.asarray(rng.uniform(1, 16, (g, r)), jnp.float32)),
        normal(rng, g, r) - 3, normal(rng, value_dim),
    )  # fmt: skip
    assert fits(tokens, state)
    y, record = mix_triton(qkvz, gates, state, *weights, 1e-6)
    expected, plain = mix(qkvz, gates, state, *weights, 1e-6)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), DeltaRecord(*record), plain)
    for n in range(tokens + 1):
        # What is not kept may hold anything.
        left = jnp.arange(tokens) >= n
        spoilt = DeltaRecord(
            *(jnp.where(left.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in jax.tree.leaves(plain))
        )
        count = jnp.asarray([n, max(n - 1, 0)][:rows], jnp.int32)
        for a, b in zip(
            jax.tree.leaves(replay_triton(state, spoilt, count)),
            jax.tree.leaves(replay_plain(state, plain, count)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_delta_rule_of_some_rows_of_a_state(tokens):
    """In another order, the last one nobody's; other rows, and those of which nothing is kept, stay as they are."""
    rng = np.random.default_rng(tokens)
    held = normal(rng, 4, 1, 2, 16, 16), normal(rng, 4, 3, 1, 64)
    state = DeltaState(*held, jnp.array([3, 0, 1, 4], jnp.int32))
    inputs = normal(rng, 4, tokens, 1, 96), normal(rng, 4, tokens, 2, 1, 2)
    weights = normal(rng, 1, 64, 4), normal(rng, 1, 2), normal(rng, 1, 2), normal(rng, 16)
    y, record = mix_triton(*inputs, state, *weights, 1e-6)
    expected, plain = mix(*inputs, state, *weights, 1e-6)
    np.testing.assert_allclose(y[:3], expected[:3], atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:3], b[:3], atol=2e-5), DeltaRecord(*record), plain)
    count = jnp.array([tokens, 0, 1, tokens], jnp.int32)
    after = DeltaState(*replay_triton(state, plain, count), state.rows)
    right = state.put(replay_plain(state.taken(), plain, count))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), after, right)
    for new, old in zip((after.recurrent, after.conv), held, strict=True):
        np.testing.assert_array_equal(new[jnp.array([0, 2])], old[jnp.array([0, 2])])
