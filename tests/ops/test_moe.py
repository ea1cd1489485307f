"""Mixture of experts: all forms against a plain loop in NumPy, and tokens that take no part."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.layers import with_backend
from dflash_jax.models.moe import Moe
from dflash_jax.ops import moe as module
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.moe import experts_gathered, experts_grouped, experts_in_blocks, experts_looped, experts_ragged
from dflash_jax.ops.weights import QuantizedWeight, TransposedWeight, common_outputs, quantize, shares_scales
from tests.helpers import HIDDEN, MOE, randomise

forward = jax.jit(Moe.__call__)
gathered, looped = (jax.jit(partial(form, XLA)) for form in (experts_gathered, experts_looped))


def route(logits, spec=MOE):
    return module.route(logits, spec.experts_per_token, spec.normalise_top_k)


@pytest.fixture(params=["cpu", "tpu", "tpu, reproducible", "cuda"])
def platform(request):
    """The forms that a CPU, a TPU and a GPU take, all run here."""
    name, _, mode = request.param.partition(", ")
    return replace(Backend.xla(name), reproducible=bool(mode))


@pytest.fixture(scope="module")
def moe():
    return randomise(Moe(MOE, HIDDEN, None, jnp.float32), 1)


def silu(x):
    return x / (1 + np.exp(-x))


def reference(moe, x):
    """x [T, H] → [T, H] in float64, token by token."""
    w = {
        name: np.asarray(value, np.float64)
        for name, value in {
            "router": moe.router[...],
            "gate_up": moe.gate_up[...],
            "down": moe.down[...],
            "shared_gate_up": moe.shared.gate_up[...],
            "shared_down": moe.shared.down[...],
            "shared_gate": moe.shared_gate[...],
        }.items()
    }
    y = np.zeros(x.shape)
    for i, token in enumerate(np.asarray(x, np.float64)):
        score = w["router"] @ token
        chance = np.exp(score - score.max())
        chance /= chance.sum()
        best = np.argsort(-chance)[: MOE.experts_per_token]
        for e in best:
            gate, up = w["gate_up"][e] @ token
            y[i] += chance[e] / chance[best].sum() * (w["down"][e] @ (silu(gate) * up))
        gate, up = w["shared_gate_up"] @ token
        y[i] += (w["shared_down"] @ (silu(gate) * up)) / (1 + np.exp(-w["shared_gate"] @ token))
    return y


def sample(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*shape, HIDDEN)), jnp.float32)


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 17)], ids=["one", "gathered", "looped"])
def test_mixture_on_each_platform_equals_a_loop_in_numpy(moe, platform, shape):
    x = sample(*shape)
    got = forward(with_backend(moe, platform), x, jnp.ones(shape, bool))
    np.testing.assert_allclose(got.reshape(-1, HIDDEN), reference(moe, x.reshape(-1, HIDDEN)), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8, 32])
@pytest.mark.parametrize("skewed", [False, True])
def test_forms_of_the_mixture_give_equal_outputs(moe, rows, skewed, monkeypatch):
    """``rows`` of a pass: where one expert is all tokens' first choice, many passes are needed."""
    monkeypatch.setattr(module, "GROUP_ROWS", 0)
    monkeypatch.setattr(module, "MIN_GROUP_ROWS", rows)
    x = sample(40, seed=1)
    scores = x @ moe.router[...].T
    weights, chosen = route(scores.at[:, 2].add(100.0 * skewed), MOE)
    # Some choices belong to nobody here.
    weights = weights.at[5].set(0.0).at[7:20, 1].set(0.0)
    arrays = (x, weights, chosen, moe.gate_up[...], moe.down[...])
    want = gathered(*arrays)
    np.testing.assert_allclose(want, looped(*arrays), atol=1e-5)
    monkeypatch.setattr(module, "BLOCK_ROWS", (rows, rows))
    transposed = [TransposedWeight.of(w) for w in arrays[3:]]
    for form in (experts_grouped, experts_in_blocks, experts_ragged):
        np.testing.assert_allclose(jax.jit(partial(form, XLA))(*arrays), want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(partial(experts_ragged, XLA))(*arrays[:3], *transposed), want, atol=1e-5)
    # In passes of 128 rows, and sums of some tokens at a time.
    monkeypatch.setattr(module, "ELEMENTS_OF_PASS", 0)
    in_passes = jax.jit(partial(experts_ragged, XLA))
    many = [jnp.tile(a, (4, 1)) for a in arrays[:3]]
    np.testing.assert_allclose(in_passes(*many, *transposed), np.tile(want, (4, 1)), atol=1e-5)
    for kind in ("int8", "nvfp4"):
        quantized = [quantize(w, kind) for w in arrays[3:]]
        want = gathered(*arrays[:3], *quantized)
        for form in (experts_grouped, experts_in_blocks):
            np.testing.assert_allclose(jax.jit(partial(form, XLA))(*arrays[:3], *quantized), want, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_rows_of_the_products_of_a_tpu_are_a_multiple_of_eight(moe, tokens):
    """Of others XLA makes products of all experts."""
    spec = replace(MOE, experts_per_token=3)
    x = sample(tokens, seed=1)
    weights, chosen = route(x @ moe.router[...].T, spec)
    args = x, weights, chosen, moe.gate_up[...], moe.down[...]
    program = jax.make_jaxpr(partial(experts_ragged, XLA))(*args)
    rows = [e.invars[0].aval.shape[0] for e in program.jaxpr.eqns if e.primitive.name.startswith("ragged_dot")]
    assert rows == [-(-3 * tokens // 8) * 8] * 2
    np.testing.assert_allclose(experts_ragged(XLA, *args), looped(*args), atol=1e-5)


@pytest.mark.parametrize("elements", [0, module.ELEMENTS_OF_PASS])
@pytest.mark.parametrize("kind", ["int8", "fp8", "blocks of gate_up", "blocks of down", "blocks"])
def test_transposed_experts_in_eight_bits_give_what_they_stand_for(kind, elements, monkeypatch):
    """With scales of outputs, and with scales of inputs that some outputs share; in passes of 128 rows, too."""
    moe = randomise(Moe(replace(MOE, intermediate_size=12), HIDDEN, None, jnp.float32), 1)
    monkeypatch.setattr(module, "ELEMENTS_OF_PASS", elements)
    x = sample(150, seed=1)
    weights, chosen = route((x @ moe.router[...].T).at[:, 2].add(1.0), MOE)
    weights = weights.at[5].set(0.0).at[7:20, 1].set(0.0)
    quantized, transposed = [], []
    for name in ("gate_up", "down"):
        weight = quantize(getattr(moe, name)[...], "int8" if kind == "int8" else "fp8")
        width = 0
        if kind in ("blocks", f"blocks of {name}"):
            width = 2
            scale = np.random.default_rng(3).uniform(0.001, 0.003, (*weight.shape[:-2], weight.shape[-2] // 2, 2))
            weight = QuantizedWeight(weight.values, jnp.asarray(scale.repeat(2, axis=-2), jnp.float32))
            assert shares_scales(weight, width)
            assert not shares_scales(weight, 2 * width)
        assert common_outputs(weight, 2) == width
        quantized.append(weight)
        transposed.append(TransposedWeight.of(weight, width))
        assert (transposed[-1].shape, transposed[-1].has_parts) == (weight.shape, width > 0)
        jax.tree.map(np.testing.assert_array_equal, transposed[-1].untransposed(), weight)
    want = gathered(x, weights, chosen, *quantized)
    assert np.abs(want).max() > 0.01
    found = jax.jit(partial(experts_ragged, XLA))(x, weights, chosen, *transposed)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("form", [experts_grouped, experts_in_blocks, experts_ragged])
def test_a_token_does_not_depend_on_others(moe, form):
    """A token's own sum, bit for bit, whatever the others choose."""
    x = sample(48, seed=5)
    weights, chosen = route(x @ moe.router[...].T, MOE)
    outputs = jax.jit(partial(form, XLA))
    alone = outputs(x, weights.at[1:].set(0.0), chosen, moe.gate_up[...], moe.down[...])
    together = outputs(x, weights, chosen, moe.gate_up[...], moe.down[...])
    np.testing.assert_array_equal(alone[0], together[0])
    assert not np.any(alone[1:])
    # In another place, among others.
    order = jnp.asarray(np.random.default_rng(6).permutation(48))
    moved = outputs(x[order], weights[order], chosen[order], moe.gate_up[...], moe.down[...])
    np.testing.assert_array_equal(moved, together[order])


def test_experts_in_blocks_read_the_chosen_experts_only(moe):
    x = sample(12, seed=5)
    weights, chosen = route(x @ moe.router[...].T, MOE)
    weights = weights.at[3:].set(0.0)
    unused = np.setdiff1d(np.arange(MOE.num_experts), np.asarray(chosen[:3]))
    args = (x, weights, chosen, moe.gate_up[...], moe.down[...])
    want = experts_in_blocks(XLA, *args)
    broken = (w.at[unused].set(jnp.nan) for w in args[3:])
    np.testing.assert_array_equal(experts_in_blocks(XLA, *args[:3], *broken), want)


@pytest.mark.parametrize("form", [experts_in_blocks, experts_ragged])
def test_what_no_expert_has_written_is_in_no_sum(moe, form, monkeypatch):
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(module, "ELEMENTS_OF_PASS", 0)
    x = sample(60, seed=5)
    weights, chosen = route(x @ moe.router[...].T, MOE)
    weights = weights.at[1:].set(0.0)
    got = form(XLA, x, weights, chosen, moe.gate_up[...], moe.down[...])
    np.testing.assert_allclose(got, looped(x, weights, chosen, moe.gate_up[...], moe.down[...]), atol=1e-5)


def test_choices_of_weight_0_go_to_no_expert():
    weights, chosen = jnp.asarray([[0.5, 0.0], [0.0, 0.0], [0.2, 0.8]]), jnp.asarray([[2, 0], [1, 1], [0, 2]])
    order, places, counts = module._by_expert(weights, chosen, 4)
    assert counts.tolist() == [1, 0, 2, 0]
    assert order[:3].tolist() == [4, 0, 5]
    np.testing.assert_array_equal(order[places], np.arange(6).reshape(3, 2))


@pytest.mark.parametrize("shape", [(4, 2, 6, 10), (4, 10, 6)])
def test_transposed_weights_have_the_shape_and_numbers_of_theirs(shape):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(shape))
    transposed = TransposedWeight.of(weight)
    assert (transposed.shape, transposed.ndim) == (shape, len(shape))
    assert transposed.matrices.shape == (4, shape[-1], np.prod(shape[1:-1]))
    np.testing.assert_array_equal(transposed.untransposed(), weight)


def test_route_normalises_only_where_told():
    scores = jnp.asarray(np.random.default_rng(2).standard_normal((5, 9)), jnp.bfloat16)
    chance = jax.nn.softmax(scores.astype(jnp.float32))
    for normalise in (True, False):
        weights, chosen = module.route(scores, 4, normalise)
        assert weights.dtype == jnp.float32
        want = np.sort(chance, axis=-1)[:, ::-1][:, :4]
        want = want / want.sum(-1, keepdims=True) if normalise else want
        np.testing.assert_allclose(weights, want, rtol=1e-5)
        assert all(len(set(row)) == 4 for row in np.asarray(chosen).tolist())


@pytest.mark.parametrize("shape", [(2, 8), (3, 17)], ids=["gathered", "looped"])
@pytest.mark.parametrize("junk", [3.0, np.inf, np.nan])
def test_invalid_tokens_change_no_other(moe, platform, shape, junk):
    valid = np.ones(shape, bool)
    valid[0] = False
    valid[1, 3:] = False
    x = sample(*shape, seed=3)
    dirty, moe = np.where(valid[..., None], x, np.float32(junk)), with_backend(moe, platform)
    clean = np.asarray(forward(moe, x, jnp.asarray(valid)))
    got = np.asarray(forward(moe, dirty, jnp.asarray(valid)))
    np.testing.assert_array_equal(got[valid], clean[valid])
    np.testing.assert_allclose(
        got[valid], np.asarray(forward(moe, x, jnp.ones(shape, bool)))[valid], atol=1e-6, err_msg="valid tokens"
    )


@pytest.mark.parametrize("platform", ["cpu", "tpu, reproducible", "cuda"], indirect=True)
@pytest.mark.parametrize("shape", [(2, 8), (3, 17)], ids=["gathered", "looped"])
def test_invalid_tokens_go_to_no_expert_of_their_own(moe, platform, shape):
    """Experts that no valid token chooses are filled with NaN: an invalid one that read them would show it.

    Not on a TPU's `jax.lax.ragged_dot`, which a CPU computes with all experts and a mask.
    """
    valid = np.zeros(shape, bool)
    valid[1, 2] = True
    x, moe = sample(*shape, seed=4), with_backend(moe, platform)
    _, chosen = route(x.reshape(-1, HIDDEN) @ moe.router[...].T, MOE)
    chosen = np.asarray(chosen).reshape(*shape, -1)
    unused = np.setdiff1d(np.arange(MOE.num_experts), chosen[valid])
    assert np.isin(chosen[~valid], unused).any()
    structure = jax.tree.structure(moe)
    broken = jax.tree.unflatten(structure, jax.tree.leaves(moe))
    broken.gate_up[...] = moe.gate_up[...].at[unused].set(jnp.nan)
    got = forward(broken, x, jnp.asarray(valid))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[1, 2], forward(moe, x, jnp.asarray(valid))[1, 2])
    assert np.isnan(forward(broken, x, jnp.ones(shape, bool))).any(), "the test's own experts are not read"


@pytest.mark.parametrize("shape", [(2, 8), (3, 17)], ids=["few", "many"])
def test_invalid_tokens_take_nothing_from_the_experts(moe, platform, shape):
    """Where experts are read in groups, they would fill the first valid one's."""
    x, valid, moe = sample(*shape, seed=6), np.zeros(shape, bool), with_backend(moe, platform)
    valid[1, 2] = True
    got = forward(moe, x, jnp.asarray(valid))
    shared = jax.nn.sigmoid(x @ moe.shared_gate[...])[..., None] * moe.shared(x)
    np.testing.assert_allclose(np.asarray(got)[~valid], np.asarray(shared)[~valid], atol=1e-6)
    assert not np.allclose(got[1, 2], shared[1, 2], atol=1e-3)


@pytest.mark.parametrize("backend", [XLA, Backend.detect()], ids=["xla", "detected"])
def test_what_follows_the_mixture_reads_the_residual_sum_of_a_dense_layer_on_a_cpu_in_bfloat16(moe, backend):
    """To the bit: a sum of flat tokens is rounded elsewhere, which `fuses_residual` prevents."""
    moe = with_backend(jax.tree.map(lambda x: x.astype(jnp.bfloat16), moe), backend)
    rng, valid = np.random.default_rng(3), jnp.ones((3, 8), bool)
    x, residual = (jnp.asarray(rng.normal(size=(3, 8, HIDDEN)), jnp.bfloat16) for _ in range(2))

    def normed(y):
        y = y.astype(jnp.float32)
        return y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True))

    def given(moe, x, residual):
        return normed(moe(x, valid, residual))

    def added(moe, x, residual):
        return normed(residual + moe(x, valid))

    actual, expected = (jax.jit(f)(moe, x, residual) for f in (given, added))
    np.testing.assert_array_equal(actual, expected)
