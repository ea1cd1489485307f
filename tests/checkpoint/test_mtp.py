"""The MTP head in a target's checkpoint: FP8, conversions, and checkpoints whose config has no such head."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoint import orbax
from dflash_jax.checkpoint.export import to_hf
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import check_drafter, load_drafter, open_any, read_draft_config
from dflash_jax.errors import InputError
from dflash_jax.models.families import mtp
from dflash_jax.ops.weights import QuantizedWeight
from dflash_jax.parallel.sharding import ONE_DEVICE, parameter_paths
from tests.checkpoint.conftest import change_config, change_tensors, says
from tests.helpers import random_head

BLOCK = 16
# As in the official FP8 checkpoints: what stays in bfloat16 beside the norms.
KEPT = ("mtp.fc.weight", "mlp.gate.weight", "shared_expert_gate.weight")


@pytest.fixture(scope="module")
def with_head(target, good_target, tmp_path_factory):
    """The target's directory with a head whose experts are stacked."""
    path = shutil.copytree(good_target, tmp_path_factory.mktemp("head") / "target")
    head = random_head(target.config, seed=3)
    leaves = dict(zip(parameter_paths(head), jax.tree.leaves(head), strict=True))
    entries = [e for e in mtp.weight_names(head.config) if e.path != "final_norm.weight"]
    more = {
        t.name: array for e in entries for t, array in zip(e.tensors, e.write(np.asarray(leaves[e.path])), strict=True)
    }
    assert len(more) == 19
    # Of a tower, which the head leaves alone, too.
    more["model.visual.norm.weight"] = np.zeros(3, np.float32)
    change_tensors(path, lambda tensors: tensors.update(more))
    return path


@pytest.fixture(scope="module")
def in_fp8(with_head, tmp_path_factory):
    """The same with the head in FP8 as the official checkpoints have it: per expert, in blocks."""
    path = shutil.copytree(with_head, tmp_path_factory.mktemp("fp8") / "target")
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(0)
    for name in [n for n in tensors if n.startswith("mtp.") and ".experts." in n]:
        stacked, prefix = tensors.pop(name), name.rsplit(".", 1)[0]
        half = stacked.shape[1] // 2
        parts = {"down": stacked}
        if name.endswith("gate_up_proj"):
            parts = {"gate": stacked[:, :half], "up": stacked[:, half:]}
        for part, matrices in parts.items():
            tensors |= {f"{prefix}.{i}.{part}_proj.weight": np.ascontiguousarray(x) for i, x in enumerate(matrices)}
    for name in [n for n in tensors if n.startswith("mtp.") and tensors[n].ndim == 2 and not n.endswith(KEPT)]:
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        grid = [-(-n // BLOCK) for n in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = rng.uniform(0.5, 2, grid).astype(ml_dtypes.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    change_config(path, quantization_config={"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]})
    return path


def multiplied(files: TensorFiles, name: str) -> np.ndarray:
    """An FP8 tensor times the factors of its blocks."""
    values, factors = files.read(name).astype(np.float32), files.read(f"{name}_scale_inv").astype(np.float32)
    rows, columns = values.shape
    return values * np.repeat(np.repeat(factors, BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]


def test_a_head_in_fp8_is_read_tensor_by_tensor(in_fp8):
    head, files = load_drafter(in_fp8), TensorFiles(in_fp8)
    is_eight = {
        path: isinstance(x, QuantizedWeight)
        for path, x in zip(
            parameter_paths(head, lambda x: isinstance(x, QuantizedWeight)),
            jax.tree.leaves(head, is_leaf=lambda x: isinstance(x, QuantizedWeight)),
            strict=True,
        )
    }
    assert {path.rsplit(".", 1)[-1] for path, yes in is_eight.items() if yes} == {"q", "k", "v", "o", "gate_up", "down"}
    dense = load_drafter(in_fp8, quantize="none")
    layer = "mtp.layers.0."
    np.testing.assert_array_equal(
        np.asarray(dense.layers[0].mixer.k[...]).reshape(40, 36), multiplied(files, f"{layer}self_attn.k_proj.weight")
    )
    for i in (0, 6):
        expert = f"{layer}mlp.experts.{i}."
        np.testing.assert_array_equal(dense.layers[0].ffn.down[...][i], multiplied(files, f"{expert}down_proj.weight"))
        np.testing.assert_array_equal(
            dense.layers[0].ffn.gate_up[...][i, 1], multiplied(files, f"{expert}up_proj.weight")
        )
    np.testing.assert_array_equal(np.asarray(head.fc[...]).reshape(36, 72), files.read("mtp.fc.weight"))


def test_a_scale_without_its_tensor_in_fp8_is_named(in_fp8, tmp_path):
    files, name = TensorFiles(in_fp8), "mtp.layers.0.self_attn.q_proj.weight_scale_inv"
    shutil.copy(in_fp8 / "config.json", tmp_path)
    save_file({n: files.read(n) for n in files if n != name}, tmp_path / "model.safetensors")
    with pytest.raises(InputError) as error:
        load_drafter(tmp_path)
    says(error, tmp_path, f"missing {name!r}")


@pytest.mark.parametrize("kind", ["with_head", "in_fp8"])
def test_a_head_goes_through_orbax_and_back(kind, request, tmp_path):
    source = request.getfixturevalue(kind)
    opened, module = open_any(source)
    options = {"dtype": None, "quantize": None}
    orbax.convert(opened, module, source, tmp_path / "orbax", ONE_DEVICE, options, lambda todo: todo)
    assert check_drafter(tmp_path / "orbax", opened.config) == read_draft_config(source)
    expected, found = load_drafter(source), load_drafter(tmp_path / "orbax", target=opened.config)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    to_hf(tmp_path / "orbax", tmp_path / "hf", 10**9, lambda tensors, _: tensors)
    before, after = TensorFiles(source), TensorFiles(tmp_path / "hf")
    assert set(before) == set(after)
    for name in (n for n in before if n.startswith("mtp.")):
        np.testing.assert_array_equal(before.read(name).view(np.uint8), after.read(name).view(np.uint8))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2: only MTP heads of one layer"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True"),
        ({"layer_types": ["linear_attention"] * 3}, "no attention layer"),
    ],
)
def test_a_head_of_another_form_is_refused(changes, named, with_head, tmp_path):
    shutil.copy(with_head / "config.json", tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(InputError) as error:
        read_draft_config(tmp_path)
    says(error, tmp_path, named)


def test_a_head_without_a_word_in_the_config_is_read(with_head, tmp_path):
    """The tensors tell."""
    assert "mtp_num_hidden_layers" not in json.loads((with_head / "config.json").read_text())
    path = shutil.copytree(with_head, tmp_path / "target")
    change_config(path, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    a, b = (load_drafter(directory, jnp.bfloat16) for directory in (with_head, path))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_head_of_another_target_is_refused(with_head, target):
    for changes, named in (
        ({"hidden_size": 40}, "hidden size"),
        ({"layers": target.config.layers[:2]}, "3 layers, this target has 2"),
    ):
        with pytest.raises(InputError, match=named):
            load_drafter(with_head, target=replace(target.config, **changes))


@pytest.mark.parametrize("has_index", [True, False])
def test_a_head_in_a_file_of_its_own_is_read(has_index, with_head, tmp_path):
    """It is read beside the index or model.safetensors, whose own tensors of the same names take precedence."""
    tensors = load_file(with_head / "model.safetensors")
    shutil.copy(with_head / "config.json", tmp_path)
    text = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    mtp = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
    save_file(text, tmp_path / ("part.safetensors" if has_index else "model.safetensors"))
    if has_index:
        index = {"weight_map": dict.fromkeys(text, "part.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="has no MTP head"):
        load_drafter(tmp_path)
    doubled = {"model.norm.weight": 2 * text["model.norm.weight"]}
    save_file(mtp | doubled, tmp_path / "model_mtp.safetensors")
    for a, b in zip(*(jax.tree.leaves(load_drafter(d)) for d in (tmp_path, with_head)), strict=True):
        np.testing.assert_array_equal(a, b)
    save_file(mtp, tmp_path / "mtp.safetensors")
    with pytest.raises(InputError, match=r"mtp.safetensors and .*mtp.safetensors both have tensor 'mtp\."):
        load_drafter(tmp_path)
