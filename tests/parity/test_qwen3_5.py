"""Float32 parity of Qwen3.5 / Qwen3.6 targets with transformers, from checkpoints in every layout on disk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from dflash_jax.checkpoint.load import load_target, read_target_config
from dflash_jax.models.cache import init_cache
from dflash_jax.models.config import GatedDeltaSpec
from tests.float64 import assert_near
from tests.helpers import extend, logits
from tests.parity.oracle import LENGTHS, PIECES, SLOTS, assert_same_parameters, oracle, pad, randomise, run

COMMON = {
    "vocab_size": 101,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "max_position_embeddings": 512,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000.0,
        "partial_rotary_factor": 0.6,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
}
MOE = {
    **COMMON,
    "layer_types": [
        "linear_attention",
        "linear_attention",
        "full_attention",
        "linear_attention",
        "full_attention",
    ],
    "num_hidden_layers": 5,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 11,
    "shared_expert_intermediate_size": 13,
}
DENSE = {
    **COMMON,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "intermediate_size": 29,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 36,
    "num_position_embeddings": 16,
}


@pytest.fixture(scope="session")
def moe():
    return randomise(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**MOE)), 1)


@pytest.fixture(scope="session")
def dense():
    return randomise(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DENSE)), 2)


@pytest.fixture(scope="session")
def moe_dir(moe, tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    moe.save_pretrained(path, save_original_format=False)
    return path


@pytest.fixture(scope="session")
def moe_target(moe_dir):
    return load_target(moe_dir)


@pytest.fixture(scope="session")
def dense_target(dense, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    dense.save_pretrained(path)
    return load_target(path)


@pytest.fixture(scope="session")
def rows():
    rng = np.random.default_rng(3)
    return [rng.integers(0, COMMON["vocab_size"], n) for n in LENGTHS]


@pytest.fixture(scope="session")
def moe_oracle(moe, rows):
    return [oracle(moe, row) for row in rows]


@pytest.fixture(scope="session")
def dense_oracle(dense, rows):
    return [oracle(dense, row) for row in rows]


@pytest.mark.parametrize(("name", "pieces"), [("moe", "one"), ("moe", "several"), ("dense", "several")])
def test_logits_and_features_equal_transformers(name, pieces, rows, request):
    """Right-padded rows of unequal lengths, in one piece and in uneven ones, against each row alone in transformers."""
    target = request.getfixturevalue(f"{name}_target")
    reference = request.getfixturevalue(f"{name}_oracle")
    depth = len(target.config.layers)
    # Not in order: features come in the order that is asked for.
    taps = (depth - 2, 0)
    if pieces == "one":
        got = run(target, rows, [LENGTHS], max(LENGTHS), taps)
    else:
        got = run(target, rows, PIECES, SLOTS, taps)
    for row, ((scores, features), (want, states)) in enumerate(zip(got, reference, strict=True)):
        for j, tap in enumerate(taps):
            assert_near(features[:, j], states[tap + 1], f"row {row}, output of layer {tap}")
        assert_near(scores, want, f"row {row}, logits")
    spread = np.concatenate([w.value.ravel() for w, _ in reference])
    assert 0.3 < spread.std() < 10, "the random model says too little or too much"


def test_forward_without_caches_equals_extend(dense, dense_target, dense_oracle, rows):
    """`__call__` is the same computation as `extend`; the last layer is tapped before the norm."""
    n = min(LENGTHS)
    hidden, features = jax.jit(lambda t, x: t(x, taps=(2, 1)))(dense_target, pad([r[:n] for r in rows], n))
    for row, (want, states) in enumerate(dense_oracle):
        assert_near(np.asarray(logits(dense_target, hidden[row])), want[:n], f"row {row}, logits")
        for j, tap in enumerate((2, 1)):
            assert_near(np.asarray(features[row, :, j]), states[tap + 1][:n], f"row {row}, output of layer {tap}")


def test_logits_with_unequal_mrope_positions_equal_transformers(dense, dense_target, rows):
    """mRoPE through the whole model: time, height and width positions of their own."""
    n = 20
    positions = np.random.default_rng(5).integers(0, 60, (3, 1, n))
    want, _ = oracle(dense, rows[2][:n], position_ids=torch.as_tensor(positions))
    cache = init_cache(dense_target.config, 1, n, jnp.float32)
    hidden, _, _ = extend(
        dense_target,
        pad([rows[2][:n]], n),
        cache,
        jnp.zeros(1, jnp.int32),
        jnp.full(1, n, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
    )
    assert_near(np.asarray(logits(dense_target, hidden[0])), want, "logits")
    plain, _ = oracle(dense, rows[2][:n])
    assert np.abs(want.value - plain.value).max() > 0.05, "the positions make no difference: this test tests nothing"


@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "sharded"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "per_expert"])
def test_every_layout_gives_the_same_weights(fused, sharded, moe, moe_target, tmp_path):
    moe.save_pretrained(tmp_path, save_original_format=not fused, max_shard_size="40KB" if sharded else "1GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded == (len(files) > 1)
    names = {name for f in files for name in load_file(f)}
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) == fused
    assert ("model.layers.0.mlp.experts.6.up_proj.weight" in names) == (not fused)
    assert_same_parameters(load_target(tmp_path), moe_target)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "per_expert"])
def test_multimodal_checkpoint_loads_its_text_weights(fused, rows, tmp_path):
    """Text weights under ``model.language_model.``; the vision tower and an MTP head are left alone."""
    text = {**MOE, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
    model = randomise(Qwen3_5MoeForConditionalGeneration(config), 6)
    model.save_pretrained(tmp_path, save_original_format=not fused)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(n.startswith("model.visual.") for n in tensors)
    assert "model.language_model.norm.weight" in tensors
    tensors["mtp.fc.weight"] = np.ones((36, 72), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = load_target(tmp_path)
    got = run(target, [rows[2]], [(90,)], SLOTS)
    assert_near(got[0][0], oracle(model, rows[2])[0], "logits")


def test_text_model_of_multimodal_checkpoint_equals_transformers(rows, tmp_path):
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    text = {**DENSE, **layers, "tie_word_embeddings": False}
    model = randomise(Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=VISION)), 7)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    target = load_target(tmp_path)
    assert not target.config.tied_embeddings
    got = run(target, [rows[2]], [(90,)], SLOTS)
    assert_near(got[0][0], oracle(model, rows[2])[0], "logits")


def test_bfloat16_checkpoint_loads_without_a_second_rounding(dense, dense_target, tmp_path):
    """bfloat16 on disk is read into either dtype without a second rounding."""
    Qwen3_5ForCausalLM.from_pretrained(None, config=dense.config, state_dict=dense.state_dict()).to(
        torch.bfloat16
    ).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    for mine, want in zip(jax.tree.leaves(target), jax.tree.leaves(dense_target), strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_array_equal(mine, want.astype(jnp.bfloat16).astype(jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(load_target(tmp_path, jnp.bfloat16))} == {jnp.dtype(jnp.bfloat16)}


def test_layer_types_of_a_config_win_over_the_interval(moe_dir, tmp_path):
    """``layer_types`` wins over the interval; without it every fourth layer attends, or as the interval says."""
    raw = json.loads((moe_dir / "config.json").read_text())

    def attends(**changes):
        changed = {k: v for k, v in {**raw, **changes}.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return [not isinstance(s.mixer, GatedDeltaSpec) for s in read_target_config(tmp_path).layers]

    assert attends(full_attention_interval=2) == [False, False, True, False, True]
    assert attends(layer_types=None) == [False, False, False, True, False]
    assert attends(layer_types=None, full_attention_interval=2) == [False, True, False, True, False]
