"""A vision tower beside its target: loaded where its tensors are there, converted and saved without a change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_target, load_tower, open_target, open_tower, read_target_config, save_module
from dflash_jax.errors import InputError
from dflash_jax.models.config import MediaTokens
from dflash_jax.models.families import qwen3_5
from dflash_jax.models.families.vision import vision_entries
from dflash_jax.ops.backend import XLA
from tests import few_bits
from tests.checkpoint.conftest import TARGET_JSON, change_config, change_tensors, says
from tests.checkpoint.test_orbax import assert_same_module, convert
from tests.checkpoint.test_quantized import change
from tests.helpers import HIDDEN, VISION, VOCAB, random_tower

VISION_JSON = {
    "model_type": "qwen3_5_moe_vision",
    "depth": 2,
    "hidden_size": 48,
    "num_heads": 4,
    "intermediate_size": 76,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "out_hidden_size": HIDDEN,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
MULTIMODAL_JSON = {
    "model_type": "qwen3_5_moe",
    "text_config": TARGET_JSON,
    "vision_config": VISION_JSON,
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}


@pytest.fixture(scope="module")
def tower():
    return random_tower(seed=5)


@pytest.fixture
def saved(target, tower, tmp_path):
    """Target and tower on disk in bfloat16."""
    path = tmp_path / "multimodal"
    save_module(target, qwen3_5.weight_names(target.config), MULTIMODAL_JSON, path, tower=tower)
    return path


def test_saved_tower_loads_to_the_same_bits(saved, target, tower):
    back = load_tower(saved, jnp.bfloat16, backend=XLA)
    assert back.config == VISION == read_target_config(saved).vision
    assert_same_module(back, jax.tree.map(lambda x: x.astype(jnp.bfloat16), tower))
    assert read_target_config(saved).media_tokens == MediaTokens(image=90, video=91, vision_start=92, vision_end=93)
    rounded = [np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)) for x in jax.tree.leaves(target)]
    for x, y in zip(jax.tree.leaves(load_target(saved)), rounded, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("forms", [("fp8 channel", None), ("fp8 channel", "nvfp4 compressed")])
def test_blocks_of_a_tower_may_be_in_several_forms(forms, saved, tmp_path):
    """Which are one parameter here; a conversion has their tensors as they are."""
    expected, rng = jax.tree.map(np.asarray, load_tower(saved, backend=XLA)), np.random.default_rng(0)
    right, groups = np.array(expected.blocks.qkv.weight[...]), {}
    for i, form in enumerate(forms):
        if form is not None:
            name = f"model.visual.blocks.{i}.attn.qkv"
            tensors, values = few_bits.stored(form, f"{name}.weight", right[i].reshape(144, 48), rng)
            change(saved, {f"{name}.weight": None} | tensors)
            right[i] = values.reshape(right[i].shape)
            groups[form] = few_bits.config(form)["config_groups"]["group_0"] | {"targets": [name]}
    change_config(saved, quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})
    convert(saved, tmp_path / "orbax")
    for path in (saved, tmp_path / "orbax"):
        found = load_tower(path, backend=XLA)
        np.testing.assert_array_equal(found.blocks.qkv.weight[...], right)
        np.testing.assert_array_equal(found.blocks.fc1.weight[...], expected.blocks.fc1.weight[...])


def test_every_entry_of_a_tower_is_reversible():
    rng, entries = np.random.default_rng(0), vision_entries(VISION)
    for entry in entries:
        disk = [rng.standard_normal(t.shape).astype(np.float32) for t in entry.tensors]
        for a, b in zip(entry.write(entry.read(disk)), disk, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=entry.path)
    names = [t.name for entry in entries for t in entry.tensors]
    assert len(set(names)) == len(names) == 9 + 12 * VISION.depth


def test_target_does_not_contain_the_tower(saved):
    source = open_target(saved)
    names = {t.name for entry in source.entries for t in entry.tensors}
    assert not any("visual" in name for name in names)
    assert {t.name for e in vision_entries(VISION) for t in e.tensors} <= set(source.skipped)


def test_tower_without_the_prefix_of_the_model_loads(saved, tower):
    def shorten(tensors):
        for name in [n for n in tensors if n.startswith("model.visual.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    before = load_tower(saved)
    change_tensors(saved, shorten)
    assert_same_module(load_tower(saved), before)


def test_checkpoint_whose_tower_was_left_out_is_a_text_model(saved):
    def leave_out(tensors):
        for name in [n for n in tensors if n.startswith("model.visual.")]:
            del tensors[name]

    before = load_target(saved)
    change_tensors(saved, leave_out)
    assert load_tower(saved) is None
    assert_same_module(load_target(saved), before)


@pytest.mark.parametrize("drop", [("vision_config",), ("vision_config", "image_token_id")])
def test_checkpoint_without_vision_config_is_a_text_model(drop, saved):
    change_config(saved, drop=drop)
    config = read_target_config(saved)
    assert (config.vision, config.media_tokens, load_tower(saved)) == (None, None, None)
    assert load_target(saved).config == config


def remove(name):
    return lambda tensors: tensors.pop(name)


def cut(name):
    return lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name][:-1])})


def add(name):
    return lambda tensors: tensors.update({name: np.zeros(3, np.float32)})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (remove("model.visual.blocks.1.attn.proj.bias"), ["missing", "'model.visual.blocks.1.attn.proj.bias' [48]"]),
        (remove("model.visual.pos_embed.weight"), ["missing", "'model.visual.pos_embed.weight' [36, 48]"]),
        (cut("model.visual.merger.linear_fc2.weight"), ["model.visual.merger.linear_fc2.weight", "[35, 192]"]),
        (add("model.visual.deepstack_merger_list.0.norm.bias"), ["unexpected", "deepstack_merger_list.0.norm.bias"]),
    ],
    ids=["missing_bias", "missing_table", "shape", "unexpected"],
)
def test_tower_with_wrong_tensors_is_named_and_the_text_still_loads(change, parts, saved):
    change_tensors(saved, change)
    with pytest.raises(InputError) as error:
        load_tower(saved)
    says(error, saved, "1 tensors are wrong", *parts)
    load_target(saved)


def test_media_token_out_of_vocabulary_is_named(saved):
    change_config(saved, video_token_id=VOCAB)
    with pytest.raises(InputError) as error:
        open_tower(saved)
    says(error, saved, f"video_token_id is {VOCAB}, out of vocabulary: ids are 0 to {VOCAB - 1}")
    load_target(saved)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deepstack_visual_indexes": [8, 16]}, "deepstack_visual_indexes is [8, 16]"),
        ({"model_type": "qwen3_vl"}, "model_type is 'qwen3_vl'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"num_heads": 5}, "num_heads 5"),
        ({"num_heads": 8}, "multiple of four dimensions"),
        ({"num_position_embeddings": 35}, "num_position_embeddings is 35"),
        ({"out_hidden_size": HIDDEN + 1}, f"out_hidden_size of the vision tower is {HIDDEN + 1}"),
        ({"patch_size": [4, 4]}, "patch_size is [4, 4]"),
        ({"depth": None}, "depth is missing"),
    ],
)
def test_tower_of_another_kind_is_refused_by_name(changes, named, saved):
    change_config(saved, vision_config=VISION_JSON | changes)
    with pytest.raises(InputError) as error:
        read_target_config(saved)
    says(error, saved / "config.json", named)


def test_old_name_of_the_towers_model_type_is_read(saved):
    before = read_target_config(saved)
    change_config(saved, vision_config=VISION_JSON | {"model_type": "qwen3_5"})
    assert read_target_config(saved) == before


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_tower_through_orbax_is_the_same_bits_and_back(dtype, saved, tmp_path):
    convert(saved, tmp_path / "orbax", dtype=dtype)
    assert_same_module(load_tower(tmp_path / "orbax"), load_tower(saved))
    assert_same_module(load_tower(tmp_path / "orbax", jnp.bfloat16), load_tower(saved, jnp.bfloat16))
    to_hf(tmp_path / "orbax", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(saved), TensorFiles(tmp_path / "hf")
    assert set(before) == set(after)
    for name in (n for n in before if dtype is None or "visual" in n):
        assert before.dtype(name) == after.dtype(name), name
        np.testing.assert_array_equal(before.read(name).view(np.uint8), after.read(name).view(np.uint8), err_msg=name)


def test_conversion_of_a_part_of_a_tower_names_what_is_missing(saved, tmp_path):
    change_tensors(saved, remove("model.visual.merger.norm.weight"))
    convert(saved, tmp_path / "orbax")
    with pytest.raises(InputError) as error:
        load_tower(tmp_path / "orbax")
    says(error, "missing 'model.visual.merger.norm.weight' [48]")
