"""`dflash convert quantize`: the package of compressed-tensors, and loading, read the numbers that --quantize has."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file

from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.load import load_target, open_target
from dflash_jax.cli.convert import main
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.parallel.sharding import parameter_paths


@pytest.fixture(scope="module", params=["int4", "nvfp4"])
def converted(request, tmp_path_factory):
    """(A form, the directory in it)."""
    path = tmp_path_factory.mktemp("quantized") / request.param
    assert main(["quantize", str(TINY / "target"), str(path), "--to", request.param, "--max-shard-size", "0.0005"]) == 0
    return request.param, path


def test_a_converted_target_is_the_one_that_loading_quantizes(converted):
    kind, path = converted
    found, right = load_target(path), load_target(TINY / "target", quantize=kind)
    assert jax.tree.structure(found) == jax.tree.structure(right)
    for name, a, b in zip(parameter_paths(found), jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_the_package_of_compressed_tensors_reads_it(converted):
    kind, path = converted
    config = QuantizationConfig.model_validate(json.loads((path / "config.json").read_text())["quantization_config"])
    tensors = {n: x for file in path.glob("*.safetensors") for n, x in load_file(file).items()}
    target, schemes = load_target(TINY / "target", quantize=kind), list(config.config_groups.values())
    leaves = zip(parameter_paths(target, is_weight), jax.tree.leaves(target, is_leaf=is_weight), strict=True)
    weights, count = dict(leaves), 0
    for entry in open_target(path).entries:
        if not isinstance(weights[entry.path], QuantizedWeight):
            continue
        parts = entry.write(np.asarray(weights[entry.path].dense(np.float32)))
        for tensor, part in zip(entry.tensors, parts, strict=True):
            module = tensor.name.removesuffix(".weight")
            assert module not in config.ignore
            named = [s for s in schemes if module in s.targets] or [s for s in schemes if s.targets == ["Linear"]]
            found = decompressed(module, tensors, named[0])
            np.testing.assert_array_equal(found, part.astype(ml_dtypes.bfloat16).astype(np.float32), err_msg=module)
            count += 1
    assert count == sum(name.endswith("_packed") for name in tensors)


def decompressed(module: str, tensors: dict, scheme: QuantizationScheme) -> np.ndarray:
    """The float32 weight of a module by the package."""
    own = {n.rpartition(".")[2]: x for n, x in tensors.items() if n.rpartition(".")[0] == module}
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(own, scheme)["weight"].to(torch.float32).numpy()


def test_what_stays_is_copied_to_the_byte(converted):
    _, path = converted
    before, after = TensorFiles(TINY / "target"), TensorFiles(path)
    kept = set(before) & set(after)
    assert {"lm_head.weight", "model.embed_tokens.weight", "mtp.fc.weight"} <= kept
    assert all(before.read(name).tobytes() == after.read(name).tobytes() for name in kept)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (path / file).read_bytes() == (TINY / "target" / file).read_bytes()


@pytest.mark.parametrize(
    ("source", "named"),
    [("draft", "draft"), ("quantized", "is in few bits already"), ("nowhere", "nowhere")],
)
def test_other_sources_are_refused_by_name(source, named, tmp_path, capsys):
    path = TINY / source
    if source == "quantized":
        assert main(["quantize", str(TINY / "target"), str(path := tmp_path / "once")]) == 0
    elif source == "nowhere":
        path = tmp_path / source
    assert main(["quantize", str(path), str(tmp_path / "new")]) != 0
    assert named in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_full_directory_is_not_written_to(tmp_path, capsys):
    (tmp_path / "mine").write_text("kept")
    assert main(["quantize", str(TINY / "target"), str(tmp_path)]) != 0
    assert str(tmp_path) in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
