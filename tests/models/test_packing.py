"""Weights in panels: the same products, and back again. Those of FP8 checkpoints: tests/parity/test_fp8.py."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.load import load_drafter, save_module
from dflash_jax.checkpoint.parameters import FEW_BITS
from dflash_jax.engine.model_size import weigh
from dflash_jax.frontend import loading
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models import packing
from dflash_jax.models.config import MoeSpec
from dflash_jax.models.families import dflash
from dflash_jax.models.layers import with_backend
from dflash_jax.models.moe import Moe
from dflash_jax.models.packing import pack_weights, transpose_experts, unpack_weights
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.linear import project
from dflash_jax.ops.weights import (
    CODES,
    FEW_TOKENS,
    LANES,
    PackedWeight,
    QuantizedWeight,
    TransposedWeight,
    is_weight,
    quantize,
)
from dflash_jax.parallel.sharding import parameter_paths, parameter_specs
from tests import few_bits
from tests.helpers import random_decoder, random_drafter, randomise, tiny_config, tiny_draft_config

needs_kernels = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")
sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize(("kind", "runs"), [("fp8", 3), ("int8", 1), ("fp8", 1)])
def test_few_bits_for_few_tokens_and_for_many(tokens, kind, runs):
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, 384)).astype(np.float32)
    weight = quantize(jnp.asarray(rng.standard_normal((20, 384)), jnp.float32), kind, runs)
    values, scale = np.asarray(weight.values, np.float32), np.asarray(weight.scale)
    expected = x @ (values.reshape(20, runs, -1) * scale[..., None]).reshape(20, 384).T
    np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), expected, atol=5e-5)
    # No product of each run lies in memory beside many tokens.
    shapes = jax.make_jaxpr(weight.matmul)(jnp.asarray(x))
    assert (f"[{runs},{tokens},20]" in str(shapes) or runs == 1) == (tokens <= FEW_TOKENS or runs == 1)


@pytest.mark.parametrize("few", ["gate_up", "down"])
def test_experts_of_which_one_weight_is_in_few_bits_stay_in_their_order_on_a_tpu(few):
    spec = MoeSpec(num_experts=4, experts_per_token=2, intermediate_size=16)
    moe = randomise(Moe(spec, 12, None, jnp.float32, backend=Backend.xla("tpu")), 1)
    x, valid = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 12)), jnp.float32), jnp.ones((2, 5), bool)
    getattr(moe, few).set_value(quantize(getattr(moe, few)[...], "int8"))
    transposed = transpose_experts(moe)
    assert not any(isinstance(w, TransposedWeight) for w in jax.tree.leaves(transposed, is_leaf=is_weight))
    found, right = jax.jit(Moe.__call__)(transposed, x, valid), jax.jit(Moe.__call__)(with_backend(moe, XLA), x, valid)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize(
    ("tpu", "runs", "uneven", "is_transposed"),
    [
        ("TPU7x", 2, False, True),
        ("TPU7x", 2, True, False),
        # As where devices divide a block.
        ("TPU7x", 8, False, True),
        ("TPU v6 lite", 2, False, False),
        ("", 2, False, False),
    ],
)
def test_experts_in_eight_bits_are_transposed_where_a_tpu_multiplies_with_them(tpu, runs, uneven, is_transposed):
    spec = MoeSpec(num_experts=2, experts_per_token=1, intermediate_size=128)
    moe = randomise(Moe(spec, 256, None, jnp.float32, backend=Backend.for_tpu("xla", tpu)), 1)
    for name in ("gate_up", "down"):
        weight = quantize(getattr(moe, name)[...], "fp8")
        count = runs if name == "gate_up" else 1
        scale = jnp.broadcast_to(jnp.linspace(0.001, 0.002, count), (*weight.shape[:-1], count))
        scale = scale.at[0, ..., 5, 0].mul(2) if uneven else scale
        getattr(moe, name).set_value(QuantizedWeight(weight.values, scale))
    before = jax.tree.map(np.asarray, nnx.state(moe))
    x, valid = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 256)), jnp.float32), jnp.ones((2, 9), bool)
    expected = jax.jit(Moe.__call__)(with_backend(moe, XLA), x, valid)
    transposed = transpose_experts(moe)
    found = [isinstance(w, TransposedWeight) for w in jax.tree.leaves(transposed, is_leaf=is_weight)]
    assert found.count(True) == 2 * is_transposed
    result = jax.jit(Moe.__call__)(transposed, x, valid)
    np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())
    jax.tree.map(np.testing.assert_array_equal, nnx.state(unpack_weights(transposed)), before)


def test_experts_are_transposed_by_one_program_and_each_mixture_by_itself():
    spec = MoeSpec(num_experts=2, experts_per_token=1, intermediate_size=128)
    tpu = Backend.for_tpu("xla", "TPU7x")

    def mixtures(count):
        return nnx.List([randomise(Moe(spec, 256, None, jnp.float32, backend=tpu), i) for i in range(count)])

    two = mixtures(2)
    weight = quantize(two[1].gate_up[...], "fp8", 2)
    two[1].gate_up.set_value(weight)
    two[1].down.set_value(quantize(two[1].down[...], "fp8"))
    transposed = transpose_experts(two)
    kinds = [type(w.get_value()) for moe in transposed for w in (moe.gate_up, moe.down)]
    assert kinds == [TransposedWeight] * 2 + [QuantizedWeight] * 2
    before = packing._by_device.cache_info().misses
    transpose_experts(mixtures(3))
    assert packing._by_device.cache_info().misses == before


def panel_paths(module) -> set[str]:
    return {path.removesuffix(".panels") for path in parameter_paths(module) if path.endswith(".panels")}


@needs_kernels
@settings(max_examples=40, derandomize=True)
@given(
    out=sizes,
    inner=sizes,
    rows=st.integers(1, 30),
    wide=st.integers(1, 40),
    short=st.booleans(),
    seed=st.integers(0, 99),
)
def test_panels_stand_for_their_weight(out, inner, rows, wide, short, seed):
    rng, n, out, inner = np.random.default_rng(seed), len(inner), [*out, wide], [*inner]
    weight = rng.standard_normal((*out, *inner)).astype(jnp.bfloat16 if short else np.float32).astype(np.float32)
    x = rng.standard_normal((rows, *inner)).astype(np.float32)
    panels = jax.device_put(PackedWeight.of(weight, n))
    assert (panels.shape, panels.ndim, panels.dtype) == (weight.shape, weight.ndim, weight.dtype)
    # Half the bytes where no bit is lost.
    inputs = -(-math.prod(inner) // 2) * 2
    assert panels.panels.nbytes == -(-math.prod(out) // LANES) * LANES * inputs * (2 if short else 4)
    matrix = weight.reshape(math.prod(out), -1)
    some = rng.integers(0, len(matrix), (2, 3))

    @jax.jit
    def run(panels, x):
        return panels.dense(), panels.reshape(*matrix.shape)[some], project(XLA, x, panels, n)

    whole, rows_of_some, product = run(panels, x)
    np.testing.assert_array_equal(whole, weight)
    np.testing.assert_array_equal(rows_of_some, matrix[some])
    expected = np.tensordot(x, weight, (range(1, n + 1), range(len(out), weight.ndim)))
    np.testing.assert_allclose(product, expected, atol=1e-5)


@needs_kernels
@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    out=sizes,
    pairs=st.integers(1, 50),
    runs=st.sampled_from([1, 2, 3, 8]),
    heads=st.sampled_from([None, 1, 3]),
    form=st.sampled_from(few_bits.NUMBERS),
    has_zero=st.booleans(),
    has_factor=st.booleans(),
    scale=st.sampled_from(["float32", "bfloat16", "float16", "float8_e4m3fn", None]),
    rows=st.sampled_from([1, 4, 5, 12, 13, 40]),
    seed=st.integers(0, 99),
)
def test_panels_stand_for_a_weight_in_few_bits(
    out, pairs, runs, heads, form, has_zero, has_factor, scale, rows, seed
):  # fmt: skip
    rng, run, lead = np.random.default_rng(seed), 2 * pairs, tuple(out) if heads is None else (*out, heads)
    scale = None if scale is None else jnp.dtype(scale)
    weight = few_bits.weight(rng, lead, runs * run, run, form, has_zero, has_factor, scale)
    n = 1 if heads is None else 2
    inputs = math.prod(weight.shape[-n:])
    panels = jax.device_put(PackedWeight.of(weight, n))
    assert (panels.shape, panels.ndim) == (weight.shape, weight.ndim)
    assert panels.panels.shape == PackedWeight.abstract(jax.eval_shape(lambda w: w, weight), n).panels.shape
    matrix = few_bits.of(weight).reshape(-1, inputs)
    some, x = rng.integers(0, len(matrix), (2, 3)), rng.standard_normal((rows, inputs)).astype(np.float32)

    @jax.jit
    def run_all(panels, x):
        rows = panels.reshape(*matrix.shape)[some]
        return panels.unpacked(), panels.dense(), rows, project(XLA, x, panels.reshape(*matrix.shape))

    unpacked, whole, rows_of_some, product = run_all(panels, x)
    assert unpacked.code == weight.code
    for found, right in zip(jax.tree.leaves(unpacked), jax.tree.leaves(weight), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_array_equal(found, right)
    np.testing.assert_allclose(np.asarray(whole).reshape(matrix.shape), matrix, rtol=1e-6)
    np.testing.assert_array_equal(few_bits.of(rows_of_some), matrix[some])
    # Roundings of sums of float32, a zero point's numbers included.
    size = np.abs(x) @ np.abs(matrix).T
    assert (np.abs(product - x @ matrix.T) <= 1e-6 * size + 1e-30).all()
    alone = np.concatenate([cpu.linear(x[i : i + 1], [panels.reshape(*matrix.shape)])[0] for i in (0, rows - 1)])
    np.testing.assert_array_equal(alone, np.asarray(product)[[0, -1]])


@needs_kernels
@pytest.mark.parametrize("form", few_bits.NUMBERS)
@pytest.mark.parametrize("rows", [1, 8])
def test_every_number_in_few_bits_and_every_scale_is_exact(form, rows):
    """Also those without a leading 1. A scale that is no number gives none."""
    every, code = np.arange(256, dtype=np.uint8), form if form in CODES else None
    if form == "fp8":
        every[every & 127 == 127] = 0
    values = every if code else every.view(jnp.int8 if form == "int8" else jnp.float8_e4m3fn)
    numbers = few_bits.of(QuantizedWeight(values[None], np.ones((1, 1), np.float32), code=code))[0]
    at = range(0, len(numbers), 37)
    rows_of_x = np.eye(len(numbers), dtype=np.float32)[[*at, *at][: max(len(at), rows)]]
    for bits, dtype in ((np.uint8, "float8_e4m3fn"), (np.uint16, "float16")):
        scale = np.arange(0, np.iinfo(bits).max + 1, 13).astype(bits).view(jnp.dtype(dtype))
        weight = QuantizedWeight(np.broadcast_to(values, (len(scale), 256)), scale[:, None], code=code)
        panels = jax.device_put(PackedWeight.of(weight, 1))
        right = scale.astype(np.float32)
        right[~np.isfinite(right)] = np.nan
        for i in range(0, len(at), rows):
            found = cpu.linear(rows_of_x[i : i + rows], [panels])[0]
            some = [numbers[k] for k in at[i : i + rows]]
            np.testing.assert_array_equal(found[: len(some)], np.float32(some)[:, None] * right)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 8])
def test_a_number_in_fp8_that_is_none_makes_its_output_none(rows):
    values = np.zeros((16, 64), jnp.float8_e4m3fn)
    values[3, 40] = np.nan
    panels = PackedWeight.of(QuantizedWeight(values, np.ones((16, 2), np.float32)), 1)
    found = np.asarray(cpu.linear(np.ones((rows, 64), np.float32), [panels])[0])
    assert np.isnan(found[:, 3]).all()
    assert not np.delete(found, 3, 1).any()


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_pair_in_panels_computes_what_it_did(is_tied):
    target = random_decoder(tiny_config("da", tied_embeddings=is_tied))
    drafter = random_drafter(tiny_draft_config(target.config))
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])

    def run(target, drafter):
        hidden, features = target(tokens, drafter.taps)
        return target.logits(hidden), drafter.context(features)

    expected = jax.jit(run)(target, drafter)
    weights = jax.tree.map(np.array, (target, drafter))
    specs = [parameter_specs(m) for m in (target, drafter)]
    pair = pack_weights(target), pack_weights(drafter)
    assert [parameter_specs(m) for m in pair] == specs
    # Everything that `project` takes, by what the parts are: no table, no small vector.
    names = {path.rsplit(".", 1)[-1] for path in panel_paths(pair[0])}
    head = "embed" if is_tied else "head"
    assert names == {"qkvz", "beta_alpha", "out", "q", "k", "v", "o", "gate_up", "down", "router", "shared_gate", head}
    assert {"fc", "layers.0.mixer.q"} < panel_paths(pair[1])
    # Experts only where they are whole panels, which these are not.
    assert not any("ffn.gate_up" in path or "ffn.down" in path for path in panel_paths(pair[0]))
    for got, want in zip(jax.tree.leaves(jax.jit(run)(*pair)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, tuple(map(unpack_weights, pair)), weights)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "choice", "expected"), [("float32", "auto", True), ("float32", "xla", False), ("bfloat16", "auto", False)]
)
def test_an_llm_on_one_cpu_keeps_its_weights_in_panels(dtype, choice, expected):
    llm = LLM(dtype=dtype, kernels=choice)
    for module in (llm.target, llm.drafter):
        assert bool(panel_paths(module)) == expected
    assert any("ffn.gate_up" in path for path in panel_paths(llm.target)) == expected


@needs_kernels
def test_a_drafter_from_memory_is_arranged_too():
    llm = LLM()
    other = llm.with_drafter(load_drafter(TINY / "draft"))
    assert jax.tree.structure(other.drafter) == jax.tree.structure(llm.drafter)
    # From panels, too; and one that bfloat16 does not hold is another to the compiler.
    moved = jax.tree.map(lambda x: jnp.asarray(np.asarray(x) * np.float32(1.001)), load_drafter(TINY / "draft"))
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    tokens = llm.generate(["def f("], params)[0].token_ids
    for each in (other, llm.with_drafter(other.drafter), llm.with_drafter(moved)):
        assert each.generate(["def f("], params)[0].token_ids == tokens


def in_few_bits(module, form: str):
    """``module`` with its large matrices and its head in few bits."""

    def quantized(path: str, x):
        if path.rsplit(".", 1)[-1] not in FEW_BITS:
            return x
        if form in ("int8", "fp8"):
            return quantize(x, form)
        run = 16 if x.shape[-1] % 16 == 0 else x.shape[-1]
        runs = np.asarray(x).reshape(*x.shape[:-1], -1, run)
        scale = np.abs(runs).max(-1) / (7 if form == "int4" else 6)
        numbers = few_bits.of_e2m1(np.arange(16)) if form == "e2m1" else np.arange(16) - 8
        codes = np.abs((runs / scale[..., None])[..., None] - numbers).argmin(-1).astype(np.uint8).reshape(x.shape)
        return QuantizedWeight(jnp.asarray(codes[..., ::2] | codes[..., 1::2] << 4), jnp.asarray(scale), code=form)

    leaves, structure = jax.tree.flatten(module)
    return jax.tree.unflatten(structure, map(quantized, parameter_paths(module), leaves))


def test_new_weights_have_the_panels_of_the_old_ones_or_all_float_panels():
    def dtypes(module):
        leaves = jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, PackedWeight))
        return {x.panels.dtype.name for x in leaves if isinstance(x, PackedWeight)}

    exact = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), random_decoder(tiny_config()))
    copies = [jax.tree.map(jnp.copy, exact) for _ in range(4)]
    old = pack_weights(copies[0])
    assert dtypes(old) == {"uint32"} == dtypes(pack_weights(copies[1], old))
    # One weight of many.
    copies[2].head = nnx.Param(1.001 * copies[2].head[...])
    new = pack_weights(copies[2], old)
    assert dtypes(new) == {"float32"} == dtypes(pack_weights(copies[3], new))
    # Weights of old ones that stay are widened with the others.
    assert dtypes(pack_weights(jax.tree.map(lambda x: x, old), new)) == {"float32"}


@needs_kernels
@pytest.mark.parametrize("form", few_bits.NUMBERS)
def test_weights_in_few_bits_are_packed_and_drafts_change_no_token(form, monkeypatch):
    read, before = loading.load_target, []

    def load(*args):
        target = in_few_bits(read(*args), form)
        before.append(jax.tree.map(np.array, target))
        return target

    monkeypatch.setattr(loading, "load_target", load)
    llm = LLM()
    # All of them: the experts' are whole panels.
    assert not any(isinstance(x, QuantizedWeight) for x in jax.tree.leaves(llm.target, is_leaf=is_weight))
    assert {"layers.0.mixer.qkvz", "layers.0.ffn.gate_up", "head"} < panel_paths(llm.target)
    jax.tree.map(np.testing.assert_array_equal, unpack_weights(llm.target), before[0])
    # What a plan counts is what is there.
    in_memory = sum(x.nbytes for x in jax.tree.leaves(llm.target))
    assert weigh(llm.target, llm.target.layout).total == in_memory
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    prompts = ["def f(", "import os\n", "class A:"]
    plainly = [out.token_ids for out in llm.generate(prompts, params, block_size=1)]
    for block in (4, 16):
        assert [out.token_ids for out in llm.generate(prompts, params, block_size=block)] == plainly
    assert llm.generate(prompts[:1], params, block_size=4)[0].token_ids == plainly[0]


@needs_kernels
def test_what_was_in_panels_is_saved_as_it_was(tmp_path):
    llm, raw = LLM(), json.loads((TINY / "draft" / "config.json").read_text())
    save_module(llm.drafter, dflash.weight_names(llm.drafter.config), raw, tmp_path)
    saved, shipped = (load_drafter(d) for d in (tmp_path, TINY / "draft"))
    jax.tree.map(np.testing.assert_array_equal, saved, shipped)
