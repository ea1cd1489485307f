"""The families of examples/, installed beside the package: generation, drafting, plans, conversions, eight bits."""

import json
import math
import re
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_target, save_module
from dflash_jax.cli import plan
from dflash_jax.frontend.compare import divergence
from dflash_jax.models import families
from dflash_jax.models.families import dflash
from dflash_jax.ops.weights import QuantizedWeight
from tests.checkpoint.test_orbax import convert
from tests.families import EXAMPLES, OUTSIDE, save_example
from tests.helpers import random_drafter
from tests.models.test_register_family import install
from tests.parity.oracle import assert_same_parameters

DRAFT = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 102,
    "hidden_size": 36,
    "intermediate_size": 31,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "num_target_layers": 3,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 101, "target_layer_ids": [0, 2]},
}


@pytest.fixture(scope="module", params=OUTSIDE)
def target(request, tmp_path_factory):
    """The directory of a random checkpoint, and the examples as an installed package."""
    path = tmp_path_factory.mktemp("target")
    save_example(request.param, path)
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLES, site / "example_families")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "registered", {})
        install(site, patch, "\n".join(f"{name} = example_families.{name}" for name in OUTSIDE))
        yield path


def test_the_drafter_changes_no_token(target, tmp_path):
    config = dflash.read_config(DRAFT)
    save_module(random_drafter(config), dflash.weight_names(config), DRAFT, tmp_path, jnp.float32)
    llm = LLM(target, tmp_path, block_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain, drafted = (llm.generate([[5, 9, 2, 77]], params, block_size=size)[0] for size in (1, 8))
    assert len(set(plain.token_ids)) > 5
    parting = divergence(llm, plain.prompt_ids, plain.token_ids, drafted.token_ids, params)
    assert parting is None or parting.is_tie


def test_a_plan_knows_the_size(target, capsys):
    assert plan.main([str(target), "--device", "h100", "--max-len", "512", "--json"]) == 0
    count = json.loads(capsys.readouterr().out)["parameters"]["target"]
    assert count == sum(math.prod(shape) for shape in TensorFiles(target).values())


@pytest.mark.parametrize("is_fp8", [False, True])
def test_conversion_to_orbax_and_back_gives_every_tensor(target, tmp_path, is_fp8):
    if is_fp8:
        target = in_fp8(target, tmp_path / "fp8")
    convert(target, tmp_path / "orbax")
    to_hf(tmp_path / "orbax", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(target), TensorFiles(tmp_path / "hf")
    assert dict(before) == dict(after)
    for name in before:
        np.testing.assert_array_equal(before.read(name).view(np.uint8), after.read(name).view(np.uint8), err_msg=name)
    assert_same_parameters(load_target(tmp_path / "orbax"), load_target(target))


def in_fp8(target, directory):
    """A copy with the projections of the attention in FP8, in blocks that no part of a tensor is a multiple of."""
    files, rng = TensorFiles(target), np.random.default_rng(0)
    tensors = {name: files.read(name) for name in files}
    for name in [name for name in tensors if re.search(r"self_attn\.\w+\.weight$", name)]:
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        blocks = [-(-n // 16) for n in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, blocks).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((target / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_scales_of_a_tensor_that_is_several_parameters(target, tmp_path):
    directory = in_fp8(target, tmp_path / "fp8")
    files, mixer = TensorFiles(directory), load_target(directory).layers[1].mixer
    rows = [np.asarray(getattr(mixer, name)[...].dense(jnp.float32)).reshape(-1, 36) for name in "qkv"]
    names = [name for name in files if re.search(r"layers\.1\.self_attn\.[qkv]+_proj\.weight$", name)]
    expected = []
    for name in sorted(names, key=lambda name: "qkv".find(name.split(".")[-2][0])):
        scale = np.repeat(np.repeat(files.read(f"{name}_scale_inv"), 16, 0), 16, 1)
        weight = files.read(name).astype(np.float32)
        expected.append(weight * scale[: weight.shape[0], : weight.shape[1]])
    np.testing.assert_allclose(np.concatenate(rows), np.concatenate(expected), rtol=1e-6)


def test_eight_bits_are_those_of_the_matrices(target):
    dense, quantized = load_target(target), load_target(target, quantize="int8")
    for exact, found in zip(dense.layers, quantized.layers, strict=True):
        for name in "qkvo":
            weight, expected = getattr(found.mixer, name)[...], getattr(exact.mixer, name)[...]
            assert isinstance(weight, QuantizedWeight)
            np.testing.assert_allclose(weight.dense(jnp.float32), expected, atol=float(jnp.abs(expected).max()) / 250)
        if exact.mixer.spec.qkv_bias:
            np.testing.assert_array_equal(found.mixer.k_bias[...], exact.mixer.k_bias[...])
