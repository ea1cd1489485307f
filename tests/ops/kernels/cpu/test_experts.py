"""The CPU's mixture of experts: what XLA's gives, and a token's own whatever is beside it."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.backend import XLA
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.moe import mixture
from dflash_jax.ops.weights import PackedWeight
from tests import few_bits
from tests.float64 import assert_as_near

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")


def arguments(tokens, experts, features, hidden, short=True, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(jnp.bfloat16 if short else np.float32).astype(np.float32)

    x, logits = jnp.asarray(draw(tokens, hidden)), jnp.asarray(draw(tokens, experts))
    return x, logits, draw(experts, 2, features, hidden) / 4, draw(experts, hidden, features) / 4


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top", "features", "hidden", "short"),
    [(1, 8, 2, 48, 192, True), (9, 8, 2, 48, 192, False), (40, 4, 4, 16, 80, True), (130, 64, 1, 112, 32, True)],
)
def test_mixture_in_cpp_equals_its_definition(tokens, experts, top, features, hidden, short, normalise):
    x, logits, gate_up, down = arguments(tokens, experts, features, hidden, short)
    live = jnp.arange(tokens) % 5 != 1

    def definition(x, logits, gate_up, down):
        return mixture(XLA, x, logits, live, 0, gate_up, down, experts_per_token=top, normalise=normalise)

    got = cpu.mixture(x, logits, live, PackedWeight.of(gate_up, 1), PackedWeight.of(down, 1), top, normalise)
    assert_as_near(got, definition, x, logits, jnp.asarray(gate_up), jnp.asarray(down))
    assert not np.asarray(got)[~np.asarray(live)].any()


def test_of_equal_experts_the_first():
    x, _, gate_up, down = arguments(1, 8, 16, 32)
    logits = jnp.asarray([[1.0, 2.0, 0.0, 2.0, 2.0, 2.0, -1.0, 0.0]])
    args = x, logits, jnp.array([True]), 0, jnp.asarray(gate_up), jnp.asarray(down)
    expected = mixture(XLA, *args, experts_per_token=2, normalise=True)
    got = cpu.mixture(x, logits, jnp.array([True]), PackedWeight.of(gate_up, 1), PackedWeight.of(down, 1), 2, True)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("form", [None, "int4", "fp8"])
def test_a_token_is_the_same_alone_and_among_others(form):
    x, logits, gate_up, down = arguments(50, 8, 48, 192)
    if form is not None:
        rng = np.random.default_rng(0)
        gate_up, down = (few_bits.weight(rng, w.shape[:-1], w.shape[-1], 48, form) for w in (gate_up, down))
    panels = PackedWeight.of(gate_up, 1), PackedWeight.of(down, 1)
    together = cpu.mixture(x, logits, jnp.ones(50, bool), *panels, 3, True)
    for n in (1, 2, 13, 49):
        # What is no token's may hold anything.
        held = x.at[n:].set(jnp.nan)
        some = cpu.mixture(held, logits.at[n:].set(jnp.nan), jnp.arange(50) < n, *panels, 3, True)
        np.testing.assert_array_equal(some[:n], together[:n])
    assert not cpu.mixture(x, logits, jnp.zeros(50, bool), *panels, 3, True).any()


@pytest.mark.parametrize("form", [None, "int4"])
def test_more_experts_than_weights_are_refused(form):
    """The kernel would read past the end of the panels."""
    x, logits, *weights = arguments(5, 8, 48, 192)
    if form is not None:
        rng = np.random.default_rng(0)
        weights = [few_bits.weight(rng, w.shape[:-1], w.shape[-1], 48, form) for w in weights]
    for counts in ((7, 8), (8, 7)):
        some = (PackedWeight.of(weight[:count], 1) for weight, count in zip(weights, counts, strict=True))
        with pytest.raises(Exception, match="more experts than panels hold"):
            cpu.mixture(x, logits, jnp.ones(5, bool), *some, 3, True).block_until_ready()
