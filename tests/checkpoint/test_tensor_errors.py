"""Bad tensors and damaged files of weights: each gives one InputError that names the value."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint.files import INDEX, TensorFiles
from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.errors import InputError
from tests.checkpoint.conftest import change_config, change_tensors, says
from tests.helpers import HIDDEN, VOCAB


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


def test_dtype_of_no_floating_point_names_tensor_and_dtype(target_dir):
    change_tensors(target_dir, lambda t: t.update({"model.norm.weight": np.zeros(HIDDEN, np.int8)}))
    with pytest.raises(InputError) as error:
        load_target(target_dir)
    says(error, "model.norm.weight", "I8", "floating-point")


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


def test_tensor_files_is_a_mapping(good_target):
    files = TensorFiles(good_target)
    tensors = load_file(good_target / "model.safetensors")
    assert dict(files) == {n: t.shape for n, t in tensors.items()}
    assert len(files) == len(tensors)
    np.testing.assert_array_equal(files.read("model.norm.weight"), tensors["model.norm.weight"])
