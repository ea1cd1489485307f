"""A tiny target and its drafter on disk, to be damaged by tests."""

import json
import shutil

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint.load import save_module
from dflash_jax.models.families import dflash, qwen3_5
from tests.helpers import HIDDEN, VOCAB, random_decoder, random_drafter, tiny_config, tiny_draft_config

ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.6, "mrope_section": [3, 2, 1]}

TARGET_JSON = {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13,
    "max_position_embeddings": 2048,
    "rope_parameters": ROPE,
}

DRAFT_JSON = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 31,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "num_target_layers": 3,
    "block_size": 16,
    "dflash_config": {"mask_token_id": VOCAB - 2, "target_layer_ids": [0, 1, 2]},
}


@pytest.fixture(scope="module")
def target():
    return random_decoder(tiny_config("dad"), seed=1)


@pytest.fixture(scope="module")
def drafter(target):
    return random_drafter(tiny_draft_config(target.config), seed=2)


@pytest.fixture(scope="module")
def good_target(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    save_module(target, qwen3_5.weight_names(target.config), TARGET_JSON, path, jnp.float32)
    return path


@pytest.fixture(scope="module")
def good_drafter(drafter, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    save_module(drafter, dflash.weight_names(drafter.config), DRAFT_JSON, path, jnp.float32)
    return path


@pytest.fixture
def target_dir(good_target, tmp_path):
    return shutil.copytree(good_target, tmp_path / "target")


@pytest.fixture
def drafter_dir(good_drafter, tmp_path):
    return shutil.copytree(good_drafter, tmp_path / "drafter")


def change_config(path, drop=(), own=None, **changes):
    raw = json.loads((path / "config.json").read_text())
    raw = {k: v for k, v in {**raw, **changes}.items() if k not in drop}
    if own is not None:
        raw["dflash_config"] = {**raw["dflash_config"], **own}
    (path / "config.json").write_text(json.dumps(raw))


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def says(error: pytest.ExceptionInfo, *parts) -> None:
    """The message is one line and has every part."""
    message = str(error.value.args[0])
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"
    assert "\n" not in message
