"""The CPU's delta rule: what XLA's gives, and the same bits token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.backend import XLA
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.gated_delta import Weights, reference, replay_reference
from dflash_jax.ops.kernels.cpu import calls as cpu
from tests.float64 import assert_as_near
from tests.helpers import in_one_program

gated_delta, replay = in_one_program(cpu.gated_delta), in_one_program(cpu.replay)
pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")

# B, T, G, R, Dk, Dv, taps.
SHAPES = [(2, 7, 2, 2, 32, 48, 4), (1, 1, 3, 1, 128, 128, 4), (2, 70, 2, 4, 16, 16, 3), (1, 16, 4, 2, 256, 80, 2)]


def definition(qkvz, gates, state, *weights):
    return reference(XLA, qkvz, gates, state, Weights(*weights), 1e-6)


mix, replay_plain = in_one_program(definition), in_one_program(partial(replay_reference, XLA))


def arguments(b, t, g, r, dk, dv, taps):
    rng = np.random.default_rng(t)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    channels = 2 * dk + r * dv
    state = DeltaState(draw(b, g, r, dk, dv), draw(b, taps - 1, g, channels))
    inputs = draw(b, t, g, channels + r * dv), draw(b, t, 2, g, r)
    return *inputs, state, draw(g, channels, taps), draw(g, r), draw(g, r), draw(dv)


def one_by_one(args, tokens: int):
    """(y, state) by calls of one token each."""
    # Slices of NumPy's arrays: JAX would compile each.
    (qkvz, gates), (_, _, state, *weights) = map(np.asarray, args[:2]), args
    made, one = [], jnp.ones(len(qkvz), jnp.int32)
    for t in range(tokens):
        y, *record = gated_delta(qkvz[:, t : t + 1], gates[:, t : t + 1], state, *weights, 1e-6)
        state = DeltaState(*replay(state, DeltaRecord(*record), one))
        made.append(y)
    return np.concatenate(made, axis=1), state


@pytest.mark.parametrize("shape", SHAPES)
def test_mix_and_replay_equal_the_plain_definition(shape):
    args, (b, t) = arguments(*shape), shape[:2]
    y, *record = gated_delta(*args, 1e-6)
    record = DeltaRecord(*record)
    assert_as_near((y, record), definition, *args)

    n = np.random.default_rng(0).integers(0, t + 1, b).astype(np.int32)
    # What is not kept may hold anything.
    late = np.arange(t) >= n[:, None]
    dirty = jax.tree.map(
        lambda x: np.where(late.reshape(b, t, *[1] * (x.ndim - 2)), np.float32(np.nan), np.asarray(x)), record
    )
    for wanted in (n, np.zeros_like(n), np.full_like(n, t)):
        kept = record if wanted is not n else dirty
        got, right = DeltaState(*replay(args[2], kept, wanted)), replay_plain(args[2], record, wanted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, right)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_token_by_token(shape):
    args, (b, t) = arguments(*shape), shape[:2]
    y, *record = gated_delta(*args, 1e-6)
    state = DeltaState(*replay(args[2], DeltaRecord(*record), jnp.full(b, t, jnp.int32)))
    alone, stepped = one_by_one(args, t)
    np.testing.assert_array_equal(y, alone)
    jax.tree.map(np.testing.assert_array_equal, state, stepped)


def test_the_state_is_written_where_it_lies():
    """With the state given up: some rows go on and others stay, as in a loop."""
    args = arguments(3, 5, 2, 2, 32, 48, 4)
    _, *record = gated_delta(*args, 1e-6)
    record, n = DeltaRecord(*record), jnp.array([2, 0, 5], jnp.int32)
    expected = replay_plain(args[2], record, n)
    held = args[2].recurrent.unsafe_buffer_pointer()
    got = jax.jit(lambda *x: DeltaState(*cpu.replay(*x)), donate_argnums=0)(args[2], record, n)
    assert got.recurrent.unsafe_buffer_pointer() == held
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_some_rows_of_a_state():
    """In another order, the last one nobody's; other rows stay as they are."""
    qkvz, gates, held, *weights = arguments(4, 3, 2, 2, 32, 48, 4)
    state = DeltaState(held.recurrent, held.conv_inputs, jnp.array([3, 0, 1, 4], jnp.int32))
    y, *_ = gated_delta(qkvz, gates, state, *weights, 1e-6)
    expected, plain = mix(qkvz, gates, state, *weights)
    np.testing.assert_allclose(y[:3], expected[:3], rtol=1e-4, atol=1e-5)
    count = jnp.array([3, 0, 1, 3], jnp.int32)
    after = DeltaState(*replay(state, plain, count), state.rows)
    right = replay_plain(state, plain, count)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), after, right)
    np.testing.assert_array_equal(*(np.asarray(x.recurrent)[[0, 2]] for x in (after, held)))


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_delta_rule_with_large_gates_equals_its_definition(scale):
    """What decays to nothing and what does not decay, and gates that are shut."""
    qkvz, gates, *rest = arguments(1, 6, 2, 2, 32, 48, 4)
    args = (qkvz.at[..., -96:].multiply(scale), scale * gates, *rest)
    y, *_ = gated_delta(*args, 1e-6)
    np.testing.assert_allclose(y, mix(*args)[0], rtol=1e-4, atol=1e-4)
