"""Bad checkpoints: each gives one InputError that names the value; and what is written is read back exactly."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint.files import INDEX, TensorFiles
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import load_drafter, load_target, save_module
from dflash_jax.errors import InputError
from dflash_jax.models.families import dflash, qwen3_5
from dflash_jax.ops.backend import XLA
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


# Before any tensor is read.


def test_good_ones_load(good_target, good_drafter, target):
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
def test_unknown_model_type(value, target_dir):
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
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ("gptq", "gptq"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "[128, 0]"),
    ],
)
def test_quantized_in_ways_that_are_not_read(load, quantization, named, target_dir, drafter_dir):
    path = target_dir if load is load_target else drafter_dir
    change_config(path, quantization_config=quantization)
    with pytest.raises(InputError) as error:
        load(path)
    says(error, named, path)


def test_drafter_as_target(good_drafter):
    with pytest.raises(InputError) as error:
        load_target(good_drafter)
    says(error, "DFlash drafter")


def test_target_as_drafter(good_target):
    with pytest.raises(InputError) as error:
        load_drafter(good_target)
    says(error, good_target, "not a DFlash drafter")


# Tensors.


def no_weights(path):
    (path / "model.safetensors").unlink()


def truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def truncated_header(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def corrupt(path):
    (path / "model.safetensors").write_bytes(b"not a safetensors file, but long enough to have a header " * 9)


def empty(path):
    (path / "model.safetensors").write_bytes(b"")


def pickled(path):
    no_weights(path)
    (path / "pytorch_model.bin").write_bytes(b"x")


@pytest.mark.parametrize("damage", [no_weights, truncated, truncated_header, corrupt, empty, pickled])
def test_load_of_damaged_weights_names_the_file(damage, target_dir, drafter_dir):
    for load, path in ((load_target, target_dir), (load_drafter, drafter_dir)):
        damage(path)
        with pytest.raises(InputError) as error:
            load(path)
        says(error, path, "safetensors")


def test_index_names_a_missing_file(target_dir):
    names = list(load_file(target_dir / "model.safetensors"))
    weights = dict.fromkeys(names, "model.safetensors") | {names[0]: "model-00002-of-00002.safetensors"}
    (target_dir / INDEX).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, target_dir / INDEX, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_index_is_no_index(content, target_dir):
    (target_dir / INDEX).write_text(content)
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, target_dir / INDEX)


def test_load_of_an_unknown_dtype_names_tensor_and_dtypes(target_dir):
    change_tensors(target_dir, lambda t: t.update({"model.norm.weight": np.zeros(HIDDEN, np.int8)}))
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, "model.norm.weight", "I8", "BF16")


def test_bad_tensors_are_all_listed(target_dir):
    """Missing, extra and wrongly shaped ones together: the first few in the message, all in the second argument."""
    gone = [f"model.layers.{i}.input_layernorm.weight" for i in range(3)] + ["lm_head.weight"]

    def change(tensors):
        for name in gone:
            del tensors[name]
        tensors["model.norm.weight"] = np.zeros(HIDDEN + 1, np.float32)
        tensors["model.embed_tokens.weight"] = np.ascontiguousarray(tensors["model.embed_tokens.weight"].T)
        tensors["model.layers.3.stray.weight"] = np.zeros((2, 5), np.float32)
        # Not wrong: parts that a text model does not run.
        tensors["mtp.fc.weight"] = np.zeros(3, np.float32)
        tensors["model.visual.pos_embed.weight"] = np.zeros(3, np.float32)

    change_tensors(target_dir, change)
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    _, problems = error.value.args
    assert len(problems) == 7
    for name in gone:
        assert any("missing" in p and name in p for p in problems)
    assert any("model.norm.weight" in p and str([HIDDEN + 1]) in p and str([HIDDEN]) in p for p in problems)
    assert any("embed_tokens" in p and str([HIDDEN, VOCAB]) in p and str([VOCAB, HIDDEN]) in p for p in problems)
    assert any("unexpected" in p and "stray" in p and "[2, 5]" in p for p in problems)
    says(error, target_dir, "7 tensors", *problems[:3], "more")


def test_a_reshape_is_refused(target_dir):
    """As many numbers in another shape are not reshaped."""
    name = "model.layers.0.linear_attn.conv1d.weight"
    change_tensors(target_dir, lambda t: t.update({name: t[name][:, 0].copy()}))
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, name)


def test_drafter_with_missing_and_unexpected_tensors_names_them(drafter_dir):
    def change(tensors):
        del tensors["fc.weight"]
        tensors["layers.0.self_attn.q_proj.bias"] = np.zeros(60, np.float32)
        # Copies of what is borrowed from the target are allowed.
        tensors["embed_tokens.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)
        tensors["lm_head.weight"] = np.zeros((VOCAB, HIDDEN), np.float32)

    change_tensors(drafter_dir, change)
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir)
    assert len(error.value.args[1]) == 2
    says(error, "fc.weight", "q_proj.bias")


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
        ({"own": {"selector_rank": 8}}, ("DFlash2",)),
    ],
)
def test_a_drafter_that_makes_no_sense(change, parts, drafter_dir, target):
    change_config(drafter_dir, **change)
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir, target=target.config)
    says(error, *parts)


def test_a_tensor_in_two_files(target_dir):
    tensors = load_file(target_dir / "model.safetensors")
    (target_dir / "model.safetensors").rename(target_dir / "a.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"] + 7}, target_dir / "b.safetensors")
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, "model.norm.weight", "a.safetensors", "b.safetensors")


def test_other_files_beside_the_whole_one(target_dir, target):
    """Adapters, old shards: without an index, model.safetensors is the checkpoint."""
    save_file({"model.norm.weight": np.zeros(HIDDEN, np.float32)}, target_dir / "other.safetensors")
    np.testing.assert_array_equal(load_target(target_dir).norm.weight[...], target.norm.weight[...])


def test_experts_of_the_mtp_head_may_be_packed_otherwise(target_dir):
    tensors = load_file(target_dir / "model.safetensors")
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
    tensors["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = np.zeros((4, HIDDEN), np.float32)
    save_file(tensors, target_dir / "model.safetensors")
    load_target(target_dir)


def test_wrong_number_of_taps(drafter_dir, target):
    """The fc weight is for three."""
    change_config(drafter_dir, own={"target_layer_ids": [0, 1]})
    with pytest.raises(InputError) as error:
        load_drafter(drafter_dir, target=target.config)
    says(error, "fc.weight", [HIDDEN, 3 * HIDDEN], [HIDDEN, 2 * HIDDEN])


# Writing.


def test_bfloat16_round_trip_is_exact(target, drafter, tmp_path):
    for module, table, raw, load in (
        (target, qwen3_5, TARGET_JSON, load_target),
        (drafter, dflash, DRAFT_JSON, load_drafter),
    ):
        path = tmp_path / table.__name__
        rounded = [np.asarray(x).astype(jnp.bfloat16) for x in jax.tree.leaves(module)]
        save_module(module, table.weight_names(module.config), raw, path)
        assert json.loads((path / "config.json").read_text()) == raw
        back = load(path, jnp.bfloat16, backend=XLA)
        assert jax.tree.structure(back) == jax.tree.structure(module)
        for a, b in zip(jax.tree.leaves(back), rounded, strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(a).view(np.uint16), b.view(np.uint16))


TABLES = {
    "fused": qwen3_5.weight_names(tiny_config("da")),
    "per_expert": qwen3_5.weight_names(tiny_config("da"), ["model.layers.0.mlp.experts.0.up_proj.weight"]),
    "multimodal": qwen3_5.weight_names(tiny_config("da"), ["model.language_model.layers.0.input_layernorm.weight"]),
    "dense": qwen3_5.weight_names(tiny_config("da", moe=False)),
    "tied": qwen3_5.weight_names(tiny_config("da", tied_embeddings=True)),
    "drafter": dflash.weight_names(tiny_draft_config(tiny_config("da"))),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_is_reversible(name):
    rng = np.random.default_rng(0)
    tensors = set()
    for entry in TABLES[name]:
        x = rng.standard_normal(entry.shape).astype(np.float32)
        written = entry.write(x)
        assert [w.shape for w in written] == [t.shape for t in entry.tensors], entry.path
        np.testing.assert_array_equal(entry.read(written), x, err_msg=entry.path)
        # And the other way, so that write does not merely undo read.
        disk = [rng.standard_normal(t.shape).astype(np.float32) for t in entry.tensors]
        for a, b in zip(entry.write(entry.read(disk)), disk, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=entry.path)
        names = {t.name for t in entry.tensors}
        assert not names & tensors, entry.path
        tensors |= names
    assert ("lm_head.weight" in tensors) == (name not in ("tied", "drafter"))
    assert any(n.startswith("model.language_model.") for n in tensors) == (name == "multimodal")


def test_tensor_files_is_a_mapping(good_target):
    files = TensorFiles(good_target)
    tensors = load_file(good_target / "model.safetensors")
    assert dict(files) == {n: t.shape for n, t in tensors.items()}
    assert len(files) == len(tensors)
    np.testing.assert_array_equal(files.read("model.norm.weight"), tensors["model.norm.weight"])
