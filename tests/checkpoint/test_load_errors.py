"""Bad configurations of checkpoints: each gives one InputError that names the value."""

import pytest

from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.errors import InputError
from tests.checkpoint.conftest import ROPE, change_config, says
from tests.helpers import HIDDEN, VOCAB

# Before any tensor is read.


def test_unchanged_checkpoints_of_these_tests_load(good_target, good_drafter, target):
    assert load_target(good_target).config == target.config
    assert load_drafter(good_drafter, target=target.config).taps == (0, 1, 2)


@pytest.mark.parametrize("load", [load_target, load_drafter, resolve])
def test_load_from_a_missing_path_names_the_path(load, tmp_path):
    missing = tmp_path / "not_here"
    with pytest.raises(InputError) as error:
        load(missing)
    says(error, missing)


@pytest.mark.parametrize("load", [load_target, load_drafter, resolve])
def test_load_from_a_file_names_the_file(load, good_target):
    path = good_target / "model.safetensors"
    with pytest.raises(InputError) as error:
        load(path)
    says(error, path)


def test_resolve_gives_a_directory_back(good_target):
    assert resolve(str(good_target)) == good_target


@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_load_without_config_names_the_directory_and_config(load, target_dir):
    (target_dir / "config.json").unlink()
    with pytest.raises(InputError) as error:
        load(target_dir)
    says(error, target_dir, "config.json")


@pytest.mark.parametrize(
    ("content", "part"), [(b"{", "not JSON"), (b"", "not JSON"), (b"\xff\xfe\x00", "not JSON"), (b"[1]", "list")]
)
@pytest.mark.parametrize("load", [load_target, load_drafter])
def test_config_is_not_json(load, content, part, target_dir):
    (target_dir / "config.json").write_bytes(content)
    with pytest.raises(InputError) as error:
        load(target_dir)
    says(error, target_dir / "config.json", part)


@pytest.mark.parametrize("value", ["mamba2", None, ["qwen3_5"]])
def test_unknown_model_type_message_lists_supported_types(value, target_dir):
    change_config(target_dir, model_type=value)
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, repr(value), "qwen3_5", "qwen3_5_moe")


@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "num_experts_per_tok", "linear_num_key_heads"])
def test_config_lacks_a_key(key, target_dir):
    change_config(target_dir, drop=(key,))
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, key)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, ("2 entries", "3")),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, ("sliding_attention",)),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ("longrope",)),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"text_config": None}, ("text_config",)),
        ({"quantization_config": "fp8"}, ("fp8",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"num_experts_per_tok": 99}, ("99", "experts")),
        ({"num_hidden_layers": "8"}, ("num_hidden_layers", "'8'")),
        ({"max_position_embeddings": 0}, ("max_position_embeddings", "0")),
        ({"rms_norm_eps": None}, ("rms_norm_eps",)),
        ({"rope_parameters": 5}, ("config.json", "rope_parameters is 5", "object")),
        ({"num_key_value_heads": True}, ("config.json", "num_key_value_heads is True", "whole number")),
        ({"num_key_value_heads": {}}, ("num_key_value_heads is {}",)),
        ({"num_key_value_heads": 5}, ("num_key_value_heads is 5", "divide")),
        ({"num_hidden_layers": 2**31}, ("num_hidden_layers is 2147483648", "1 to 1024")),
        ({"linear_num_value_heads": 7}, ("linear_num_value_heads is 7", "multiple")),
        ({"num_experts": 2**17}, ("num_experts", "16384")),
        ({"rope_parameters": {"partial_rotary_factor": 0.35}}, ("7 dimensions", "even")),
        ({"full_attention_interval": 0, "layer_types": None}, ("full_attention_interval is 0",)),
        ({"rope_parameters": {"partial_rotary_factor": True}}, ("partial_rotary_factor is True", "a number")),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps is nan", "a number")),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings is 1", "true or false")),
        ({"layer_types": [1, 2, 3]}, ("layer_types is [1, 2, 3]", "strings")),
        ({"mlp_only_layers": [3]}, ("mlp_only_layers is 3", "0 to 2")),
        (
            {"num_experts": 2**14, "num_hidden_layers": 9, "layer_types": ["linear_attention"] * 9},
            ("num_experts is 16384 in 9 layers",),
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.0}}, ("0 dimensions",)),
        ({"rope_parameters": {**ROPE, "mrope_section": [3, 2, -1]}}, ("mrope_section is -1",)),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, ("mscale",)),
        ({"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 2.0, "truncate": False}}, ("truncate",)),
        (
            {
                "rope_parameters": {
                    **ROPE,
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            ("high_freq_factor is 4", "above"),
        ),
    ],
)
def test_config_asks_for_what_is_not_known(changes, parts, target_dir):
    change_config(target_dir, **changes)
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, *parts)


@pytest.mark.parametrize("load", [load_target, load_drafter])
@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4}, "group_size is None"),
        ("gptq", "gptq"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "[128, 0]"),
    ],
)
def test_quantized_in_ways_that_are_not_read(load, quantization, named, target_dir, drafter_dir):
    path = target_dir if load is load_target else drafter_dir
    change_config(path, quantization_config=quantization)
    with pytest.raises(InputError) as error:
        load(path)
    says(error, named, path)


def test_drafter_loaded_as_target_is_refused(good_drafter):
    with pytest.raises(InputError) as error:
        load_target(good_drafter)
    says(error, "DFlash drafter")


def test_target_loaded_as_drafter_is_refused(good_target):
    with pytest.raises(InputError) as error:
        load_drafter(good_target)
    says(error, good_target, "not a DFlash drafter")


# A drafter for another target.


@pytest.mark.parametrize(
    ("scaling", "part"), [({"factor": None}, "factor"), ({"mscale": 1.0}, "mscale"), ({"truncate": False}, "truncate")]
)
def test_yarn_that_is_not_known(scaling, part, drafter_dir):
    change_config(drafter_dir, rope_scaling={"rope_type": "yarn", "factor": 4.0, **scaling})
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir)
    says(error, part)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"hidden_size": 48}, ("hidden size", 48, HIDDEN)),
        ({"vocab_size": VOCAB + 1}, ("vocabulary", VOCAB + 1, VOCAB)),
        ({"num_target_layers": 40}, ("layers", 40, 3)),
        ({"own": {"target_layer_ids": [0, 1, 3]}}, ("[3]", "0 to 2")),
        ({"own": {"target_layer_ids": [-1, 1, 2]}}, ("[-1]",)),
        ({"own": {"mask_token_id": VOCAB}}, ("mask_token_id", VOCAB)),
        ({"own": {"mask_token_id": -1}}, ("mask_token_id", -1)),
    ],
)
def test_drafter_of_another_target(change, parts, drafter_dir, target):
    change_config(drafter_dir, **change)
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir, target=target.config)
    says(error, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"block_size": 0}, ("block_size", 0)),
        ({"block_size": -3}, ("block_size", -3)),
        ({"block_size": "16"}, ("block_size", "'16'")),
        ({"hidden_act": "gelu"}, ("gelu",)),
        ({"dflash_config": 5}, ("dflash_config", 5)),
        ({"sliding_window": -4}, ("sliding_window", -4)),
        ({"own": {"target_layer_ids": "abc"}}, ("target_layer_ids", "abc")),
        ({"own": {"selector_rank": 8}}, ("selector_top_k is missing", "selector_rank")),
    ],
)
def test_a_drafter_that_makes_no_sense(change, parts, drafter_dir, target):
    change_config(drafter_dir, **change)
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir, target=target.config)
    says(error, *parts)
