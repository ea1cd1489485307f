"""Weights in panels: the same products, and back again. Eight-bit ones: tests/parity/test_fp8.py."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.load import load_drafter, save_module
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.families import dflash
from dflash_jax.models.packing import pack_weights, unpack_weights
from dflash_jax.ops.backend import XLA
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.linear import project
from dflash_jax.ops.weights import FEW_TOKENS, LANES, PackedWeight, quantize
from dflash_jax.parallel.sharding import parameter_paths, parameter_specs
from tests.helpers import random_decoder, random_drafter, tiny_config, tiny_draft_config

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


@needs_kernels
def test_quantised_weights_stay_as_they_are():
    llm = LLM(quantize="int8")
    paths = parameter_paths(llm.target)
    assert {"layers.0.mixer.qkvz.values", "layers.0.mixer.qkvz.scale"} < set(paths)
    assert {"head", "layers.0.mixer.beta_alpha"} < panel_paths(llm.target)
    assert len(llm.generate(["def f("], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@needs_kernels
def test_what_was_in_panels_is_saved_as_it_was(tmp_path):
    llm, raw = LLM(), json.loads((TINY / "draft" / "config.json").read_text())
    save_module(llm.drafter, dflash.weight_names(llm.drafter.config), raw, tmp_path)
    saved, shipped = (load_drafter(d) for d in (tmp_path, TINY / "draft"))
    jax.tree.map(np.testing.assert_array_equal, saved, shipped)
