"""The delta rule of few tokens in Triton: the mixer, and what is accepted of it, against their plain definitions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.models.cache import commit
from dflash_jax.models.config import GatedDeltaSpec
from dflash_jax.models.gated_delta import GatedDelta
from dflash_jax.models.layers import with_backend
from dflash_jax.ops import gated_delta
from dflash_jax.ops.backend import XLA, Backend, choose
from dflash_jax.ops.cache import DeltaState, KVRecord
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.kernels.triton import delta
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.ops.linear import DeferredDivision
from tests.helpers import in_one_program
from tools.kernels.arguments import Source, mixer, spoilt
from tools.kernels.arguments import written as written_tokens
from tools.kernels.comparisons import kernel_of
from tools.triton_interpreter import interpreting

mix = in_one_program(kernel_of(gated_delta.IMPLEMENTATIONS, "triton, one chunk"))
mix_parts = in_one_program(kernel_of(gated_delta.IMPLEMENTATIONS, "triton, parts of heads"))
plain_mix = in_one_program(partial(gated_delta.reference, XLA))
replay = in_one_program(kernel_of(gated_delta.REPLAYS))
replay_layers = in_one_program(kernel_of(gated_delta.LAYERS_REPLAYS))
plain_replay = in_one_program(partial(gated_delta.replay_reference, XLA))


def assert_near(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    ("rows", "tokens", "key_heads", "values", "key_dim", "value_dim", "alike"),
    [
        (1, 1, 2, 2, 16, 32, False),
        (4, 1, 1, 2, 16, 16, False),
        (2, 5, 1, 3, 16, 16, False),
        pytest.param(4, 3, 1, 2, 16, 16, False, marks=pytest.mark.long),
        pytest.param(1, 16, 2, 1, 32, 16, False, marks=pytest.mark.long),
        (2, 16, 1, 2, 16, 16, True),
    ],
)
def test_delta_kernels_equal_their_definitions(rows, tokens, key_heads, values, key_dim, value_dim, alike):
    """Convolution, gates, rule and norm of some rows of a state, in another order, one of them past its end; then the
    state after every count of tokens. Rows of which nothing is kept stay as they are, to the bit."""
    args = mixer(Source(tokens), rows, tokens, key_heads, values, key_dim, value_dim, alike=alike)
    state = args[2]
    (y, record), (expected, plain) = (f(*args, 1e-6) for f in (mix, plain_mix))
    np.testing.assert_allclose(y, expected, atol=2e-5)
    assert_near(record, plain)
    for n in range(tokens + 1):
        count = jnp.asarray(np.resize([n, max(n - 1, 0)], rows), jnp.int32)
        # What is not kept may hold anything.
        after = replay(state, spoilt(plain, count), count)
        assert_near(after, plain_replay(state, plain, count))
        written = [row for row, kept in zip(state.rows.tolist(), count.tolist(), strict=True) if kept]
        others = np.setdiff1d(np.arange(rows + 2), written)
        for new, old in ((after.recurrent, state.recurrent), (after.conv_inputs, state.conv_inputs)):
            np.testing.assert_array_equal(new[others], old[others])


def layers(count: int, rows: int, tokens: int, dtype=jnp.float32):
    """States and records of so many layers, each with rows in an order of its own; and how many tokens are kept."""
    kept = jnp.asarray(np.resize([tokens, 0, max(tokens - 1, 1)], rows), jnp.int32)
    made = [mixer(Source(i), rows, tokens, 1, 2, 16, 16, dtype) for i in range(count)]
    return [args[2] for args in made], [spoilt(plain_mix(*args, 1e-6)[1], kept) for args in made], kept


@pytest.mark.parametrize(
    ("count", "rows", "tokens", "dtype"),
    [(2, 3, 5, jnp.float32), (17, 1, 1, jnp.bfloat16), pytest.param(33, 2, 16, jnp.float32, marks=pytest.mark.long)],
)
def test_layers_together_are_replayed_as_each_alone(count, rows, tokens, dtype):
    """To the bit, in one launch and in several."""
    states, records, kept = layers(count, rows, tokens, dtype)
    together = replay_layers(states, records, kept)
    for found, state, record in zip(together, states, records, strict=True):
        alone = replay(state, record, kept)
        assert found.rows is state.rows or np.array_equal(found.rows, state.rows)
        for name in ("recurrent", "conv_inputs"):
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))


def test_layers_are_launched_in_groups_of_about_one_size(monkeypatch):
    """As many launches as layers have room, whose compiled code depends on the number of layers alone."""
    launched = []

    def stub(launch):
        launched.append((launch.kernel.fn.__name__, launch.meta["LAYERS"], launch.grid, len(launch.in_place)))
        return tuple(launch.args[i] for i in launch.in_place)

    states, records, kept = layers(1, 3, 5)
    for count, sizes in ((2, [2]), (16, [16]), (17, [9, 8]), (30, [15, 15]), (45, [15] * 3), (48, [16] * 3)):
        launched.clear()
        with launching(stub):
            # An array that is written in place is one argument.
            several = [jax.tree.map(jnp.copy, states[0]) for _ in range(count)]
            after = delta.replay_layers_triton(HOPPER, several, records * count, kept)
        assert len(after) == count
        assert launched == [("_replay_layers", size, (6, size), 2 * size) for size in sizes]


def test_which_layers_are_replayed_together():
    """Several layers of one shape, where the user wants kernels that no card has run."""
    states, records, kept = layers(2, 1, 5)
    other, more, _ = layers(2, 1, 3)

    def name(kernels, *args):
        return choose("", gated_delta.LAYERS_REPLAYS, Backend.for_card(HOPPER, kernels), *args, kept).name

    assert name("all", states, records) == "triton"
    assert name("auto", states, records) == name("all", states[:1], records[:1]) == "reference"
    assert name("all", states + other, records + more) == "reference"


def test_a_commit_writes_each_layer_what_it_recorded():
    """Recurrent layers together, between layers of attention and one whose record is its new state."""
    states, records, kept = layers(3, 3, 5)
    caches, written = [], []
    for seed in (7, 8):
        keys, k, v, _ = written_tokens(Source(seed), 3, 5, 2, 16, 64)
        caches.append(keys)
        written.append(KVRecord(k, v))
    cache = states[0], caches[0], states[1], states[1], caches[1], states[2]
    record = records[0], written[0], states[0], records[1], written[1], records[2]
    start = jnp.asarray([3, 0, 11], jnp.int32)
    with interpreting() as ran:
        found = commit(Backend.for_card(HOPPER, "all"), cache, record, start, kept)
    assert (ran["_replay_layers"], ran["_replay"], ran["_write"]) == (1, 0, 2)
    assert_near(found, jax.jit(partial(commit, XLA))(cache, record, start, kept))


@pytest.mark.parametrize(
    ("rows", "tokens", "key_dim", "value_dim", "parts", "alike"),
    [
        (1, 1, 16, 64, 4, False),
        (4, 1, 16, 16, 1, False),
        (2, 5, 128, 64, 4, False),
        (1, 16, 32, 32, 2, True),
        (2, 16, 128, 32, 1, True),
    ],
)
def test_parts_of_heads_equal_their_definition(rows, tokens, key_dim, value_dim, parts, alike):
    """Values of a head in one program and in several, keys at once and in blocks; more rows than `linear` divides."""
    args = mixer(Source(tokens), rows, tokens, 2, 2, key_dim, value_dim, alike=alike)
    (y, record), (expected, plain) = (f(*args, 1e-6) for f in (mix_parts, plain_mix))
    assert isinstance(y, DeferredDivision) == (parts > 1)
    if isinstance(y, DeferredDivision):
        assert y.squares.shape == (rows, tokens, 2, 2, parts)
        y = y.apply()
    np.testing.assert_allclose(y, expected, atol=2e-5)
    assert_near(record, plain)


def test_many_heads_and_float16_are_not_in_parts():
    """Heads that fill the card, rows that `linear` leaves to XLA, numbers that may overflow before the division; and
    inputs that are kept in another dtype, which are not loaded through one pointer."""

    kernel = kernel_of(gated_delta.IMPLEMENTATIONS, "triton, parts of heads")

    def parts(rows, tokens, dtype=jnp.bfloat16, heads=16, kept=None):
        args = mixer(Source(0), rows, tokens, heads, 2, 16, 64, dtype)
        args[2] = replace(args[2], conv_inputs=args[2].conv_inputs.astype(kept or dtype))
        y, _ = jax.eval_shape(partial(kernel, eps=1e-6), *args)
        return y.squares.shape[-1] if isinstance(y, DeferredDivision) else 1

    assert [parts(1, 16), parts(2, 8), parts(1, 1)] == [4, 4, 4]
    assert [parts(2, 9), parts(4, 1, heads=32), parts(1, 4, jnp.float16)] == [1, 1, 1]
    assert parts(1, 4, kept=jnp.float32) == 1


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_output_projection_of_a_mixer_divides_its_heads(tokens):
    """With all kernels, as the operations are put together: two parts of each of four heads."""
    spec = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, conv_kernel=4)
    mixer, seen = GatedDelta(spec, 64, 1e-6, nnx.Rngs(0), jnp.float32), []
    source = Source(tokens)
    state = DeltaState(source.normal(3, 2, 2, 16, 32), source.normal(3, 3, 2, 96), jnp.asarray([2, 0]))
    x, residual = source.normal(2, tokens, 64), source.normal(2, tokens, 64)

    def run(backend):
        return with_backend(mixer, backend)(x, state, residual=residual)

    found, _ = run(replace(Backend.for_card(HOPPER, "all"), on_choice=seen.append))
    np.testing.assert_allclose(found, run(Backend.xla("cuda"))[0], atol=2e-5)
    assert [choice.implementation for choice in seen if choice.op == "gated_delta"] == ["triton, parts of heads"]
    assert seen[-1].op == "linear"
    assert seen[-1].implementation.startswith("triton")
