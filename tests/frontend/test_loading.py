"""What is read before the weights."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dflash_jax import LLM
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY, LLMConfig
from dflash_jax.frontend.loading import Checkpoint, _check_fp4, _named, prepare_backend
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.weights import quantize
from dflash_jax.parallel.sharding import Layout


def test_names_of_drafters_differ_and_have_no_paths(tmp_path, monkeypatch):
    """Of the machine: clients read them."""
    one, other, odd = (tmp_path / part for part in ("a/draft", "b/draft", os.fsdecode(b"c/\xff")))
    for path in (one, other, odd):
        path.mkdir(parents=True)
    drafts = [one, str(other), odd, "mtp", "z-lab/Qwen3-8B-DFlash-b16"]
    named = _named(drafts)
    assert list(named.values()) == drafts
    assert list(named) == ["draft", "draft-2", "?", "mtp", "z-lab/Qwen3-8B-DFlash-b16"]
    assert list(_named([Path(os.curdir)])) == [Path.cwd().name]
    (tmp_path / "link").symlink_to(one)
    assert list(_named([tmp_path / "link"])) == ["link"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(_named(["~/a/draft"])) == ["draft"]


def test_a_path_that_cannot_be_read_is_an_input_error():
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        Checkpoint.read(LLMConfig(draft="x" * 300))


def test_drafters_that_nobody_names_have_names():
    assert Checkpoint.read(LLMConfig()).draft_names == ("bundled",)
    assert Checkpoint.read(LLMConfig(TINY / "target", TINY / "draft")).draft_names == ("draft",)
    assert Checkpoint.read(LLMConfig(draft=None)).draft_names == ()


def test_runs_of_inputs_that_devices_share_are_told_from_runs_that_are_short_or_of_another_form():
    def target(*weights):
        module = nnx.Module()
        module.layout = Layout.parse("tensor=8")
        for name, weight in zip("qk", weights, strict=True):
            setattr(module, name, nnx.Param(weight))
        return module

    whole, others = (quantize(np.ones((4, size), np.float32), "nvfp4") for size in (64, 24))
    mxfp4 = replace(whole, scale=np.ones((4, 2), jnp.bfloat16), factor=None).spread(8)
    for other in (others, mxfp4):
        assert other.run == 8
        _check_fp4(target(whole, other))
    with pytest.raises(InputError, match="devices of mesh data=1,expert=1,tensor=8 share runs of inputs of k: "):
        _check_fp4(target(whole, whole.spread(8)))


@pytest.mark.parametrize(("kernels", "is_said"), [("auto", True), ("all", True), ("xla", False)])
def test_missing_kernels_of_a_gpu_are_said_where_they_are_wanted(kernels, is_said, monkeypatch, caplog):
    backend = Backend("cuda", HOPPER, kernels, "the platform is cuda", "Triton is not installed")
    monkeypatch.setattr(Backend, "detect", lambda _: backend)
    assert prepare_backend(kernels) == backend
    assert ("without Triton kernels" in caplog.text) == is_said


def test_a_dummy_needs_no_tensors_and_takes_new_weights(tmp_path):
    for path in (TINY / "target").iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, tmp_path / path.name)
    options = {"draft": [str(TINY / "draft"), "mtp"], "kernels": "xla", "kv_cache_dtype": "fp8"}
    with pytest.raises(InputError, match=r"no \.safetensors file"):
        LLM(tmp_path, **options)
    llm, whole = LLM(tmp_path, load_format="dummy", **options), LLM(TINY / "target", **options)
    assert jax.tree.structure((llm.target, llm.drafters)) == jax.tree.structure((whole.target, whole.drafters))
    assert float(jnp.abs(llm.target.embed[...]).max()) <= 1e-3
    llm.update_weights(TINY / "target")
    for one, other in zip(*(jax.tree.leaves((each.target, each.drafters)) for each in (llm, whole)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_dummy_in_few_bits_is_refused(tmp_path):
    raw = json.loads((TINY / "target" / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"load_format is 'dummy'.* is in few bits"):
        LLM(tmp_path, load_format="dummy")
