"""Float32 parity with transformers of the families beside Qwen3.5, in both layouts on disk."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dflash_jax.checkpoint.load import load_target
from dflash_jax.errors import InputError
from dflash_jax.models.families import read_target
from tests.families import examples_registered
from tests.float64 import assert_near
from tests.parity.oracle import PIECES, SLOTS, assert_same_parameters, oracle, randomise, run

CLASSIC = {
    "vocab_size": 101,
    "hidden_size": 36,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 29,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 11}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# name: (model class, config, offset of its norm weights)
FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**CLASSIC, tie_word_embeddings=True), 0.0),
    "qwen3_yarn": (Qwen3ForCausalLM, Qwen3Config(**CLASSIC, rope_parameters=YARN), 0.0),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**CLASSIC, **EXPERTS, norm_topk_prob=True), 0.0),
    "qwen3_moe_mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**CLASSIC, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1]),
        0.0,
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**{**CLASSIC, "head_dim": None}, tie_word_embeddings=True), 0.0),
    "llama3": (LlamaForCausalLM, LlamaConfig(**{**CLASSIC, "num_key_value_heads": 6}, rope_parameters=LLAMA3), 0.0),
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **{**CLASSIC, "num_hidden_layers": 5},
            **EXPERTS,
            shared_expert_intermediate_size=13,
            layer_types=[
                "linear_attention",
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ],
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=10,
            linear_value_head_dim=7,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.6},
        ),
        1.0,
    ),
    # Those of examples/families/.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**CLASSIC, tie_word_embeddings=True), 0.0),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(
            **CLASSIC,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.7},
            pad_token_id=None,
        ),
        0.0,
    ),
}
# Those above, and classes with their defaults.
CONFIGS = {name: config for name, (_, config, _) in FAMILIES.items()}
CONFIGS |= {
    "qwen3_5": Qwen3_5Config(vision_config={"out_hidden_size": 4096}),
    "qwen3_5_moe": Qwen3_5MoeConfig(vision_config={"out_hidden_size": 2048}),
}


@pytest.fixture(scope="module", autouse=True)
def outside():
    with examples_registered():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    kind, config, offset = FAMILIES[request.param]
    return randomise(kind(config), 1, offset)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path, save_original_format=False)
    return load_target(path)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    return [rng.integers(0, CLASSIC["vocab_size"], n) for n in (300, 171, 90)]


def test_logits_and_features_equal_transformers(model, target, rows):
    depth = len(target.config.layers)
    taps = (depth - 2, 0)
    reference = [oracle(model, row) for row in rows]
    for row, ((scores, features), (want, states)) in enumerate(
        zip(run(target, rows, PIECES, SLOTS, taps), reference, strict=True)
    ):
        for j, tap in enumerate(taps):
            assert_near(features[:, j], states[tap + 1], f"row {row}, output of layer {tap}")
        assert_near(scores, want, f"row {row}, logits")
    spread = np.concatenate([w.value.ravel() for w, _ in reference])
    assert 0.3 < spread.std() < 10, "the random model says too little or too much"


def test_every_layout_gives_the_same_weights(model, target, tmp_path):
    """Per-expert tensors in several files against fused ones in one."""
    model.save_pretrained(tmp_path, save_original_format=True, max_shard_size="40KB")
    names = {name for f in tmp_path.glob("*.safetensors") for name in load_file(f)}
    if target.config.model_type in ("qwen3_moe", "qwen3_next"):
        assert "model.layers.0.mlp.experts.6.up_proj.weight" in names
    assert_same_parameters(load_target(tmp_path), target)


def test_a_tied_head_on_disk_is_left_alone(tmp_path):
    kind, config, _ = FAMILIES["llama"]
    kind(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_target(tmp_path).config.tied_embeddings


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("qwen3_next", {"linear_num_key_heads": None}, "linear_num_key_heads"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
        ("qwen2", {"qkv_bias": False}, "qkv_bias is False: .*only True"),
        ("phi3", {"sliding_window": 511}, "sliding_window is 511"),
        ("phi3", {"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope_type 'su'"),
        ("phi3", {"attention_bias": True}, "attention_bias"),
    ],
)
def test_config_asks_for_what_is_not_known(name, changes, named, tmp_path):
    _, config, _ = FAMILIES[name]
    raw = {**config.to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    with pytest.raises(InputError, match=named):
        load_target(tmp_path)


def test_a_window_of_the_whole_context_is_none():
    raw = FAMILIES["phi3"][1].to_dict()
    assert read_target(raw | {"sliding_window": 512}) == read_target(raw)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_that_transformers_writes_is_known(name):
    """All keys with their defaults, and those alone that differ from them, as save_pretrained writes."""
    config = CONFIGS[name]
    given = read_target(config.to_diff_dict())
    assert read_target(config.to_dict()) == given
    assert given.hidden_size == config.get_text_config().hidden_size
