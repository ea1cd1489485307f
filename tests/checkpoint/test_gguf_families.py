"""GGUF files of Qwen's hybrids with their MTP heads and of DFlash drafters: converted back, they are what they were."""

import re
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from dflash_jax.checkpoint import gguf as conversion
from dflash_jax.checkpoint import gguf_packed, gguf_tensors
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.checkpoint.gguf import convert
from dflash_jax.checkpoint.gguf_config import read_config
from dflash_jax.checkpoint.gguf_file import GgufFile
from dflash_jax.checkpoint.load import load_drafter, load_target
from dflash_jax.checkpoint.parameters import FEW_BITS
from dflash_jax.errors import InputError
from dflash_jax.models.mtp import Mtp
from dflash_jax.ops.weights import QuantizedWeight, is_weight
from dflash_jax.parallel.sharding import parameter_paths
from tests import llama_cpp
from tests.checkpoint.test_gguf import says
from tests.float64 import assert_near, in_both
from tools.equality import forward

FORKS = {
    "fc.weight": "dflash_fc.weight",
    "enc.output_norm.weight": "dflash_hidden_norm.weight",
    **{f"blk.{i}.ffn_norm.weight": f"blk.{i}.post_attention_norm.weight" for i in range(2)},
}
NESTED = {
    **{f"blk.{i}.{x}_conv_{y}": f"blk.{i}.{x}_conv.{y}" for i in range(2) for x in ("attn", "ffn") for y in ("base",)},
    **{f"blk.{i}.{x}_conv_proj.weight": f"blk.{i}.{x}_conv.proj.weight" for i in range(2) for x in ("attn", "ffn")},
    "selector_hidden.weight": "selector.hidden_proj.weight",
    "selector_predecessor.weight": "selector.pred_codebook",
    "selector_successor.weight": "selector.succ_codebook",
}


def compare(directory: Path, tensors: dict[str, np.ndarray], is_hybrid: bool = True) -> None:
    """The tensors of a directory are those of the original, but for what rounding to float32 left in the file.

    Of norms with 1 added that is half a last place of 1, and the sum is the same.
    """
    written = load_file(directory / "model.safetensors")
    assert set(written) == set(tensors)
    for name, array in tensors.items():
        actual, expected = written[name], array
        if name.endswith("A_log"):
            assert np.abs(actual - expected).max() < 2e-7, name
            actual, expected = (x.astype(ml_dtypes.bfloat16) for x in (actual, expected))
        if "norm" in name and not name.endswith("linear_attn.norm.weight") and is_hybrid:
            assert np.abs(actual - expected).max() <= 2.0**-24, name
            actual, expected = actual + np.float32(1), expected + np.float32(1)
        np.testing.assert_array_equal(actual, expected, name, strict=True)


@pytest.mark.parametrize("architecture", llama_cpp.TARGETS)
def test_a_hybrid_converted_back_is_what_it_was(architecture, tmp_path, monkeypatch):
    # Some rows of each tensor at a time.
    monkeypatch.setattr(gguf_tensors, "CHUNK", 1000)
    raw, tensors = llama_cpp.target(architecture)
    config = convert(llama_cpp.write_target(tmp_path / "model.gguf", architecture), tmp_path / "hf")
    for key, value in raw.items():
        assert config[key] == value, key
    compare(tmp_path / "hf", tensors)
    load_target(tmp_path / "hf")
    if "mtp_num_hidden_layers" in raw:
        assert isinstance(load_drafter(tmp_path / "hf"), Mtp)


@pytest.mark.parametrize(("architecture", "kind"), [("qwen35", "F32"), ("qwen35moe", "F32"), ("qwen35moe", "Q8_0")])
def test_a_hybrid_is_what_transformers_reads(architecture, kind, tmp_path):
    """transformers undoes llama.cpp's transforms by code of its own."""
    path = llama_cpp.write_target(tmp_path / "model.gguf", architecture, kind)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    convert(path, tmp_path / "hf", "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for (name, a), (_, b) in zip(again.state_dict().items(), reference.state_dict().items(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=2e-7 if name.endswith("A_log") else 0), name
    for key in ("layer_types", "rope_parameters", "head_dim", "linear_num_value_heads", "linear_value_head_dim"):
        assert getattr(again.config, key) == getattr(reference.config, key), key
    tokens = np.random.default_rng(1).integers(0, llama_cpp.VOCAB, (2, 40))
    expected, _ = in_both(again, tokens)
    scores, _ = forward(load_target(tmp_path / "hf"), tokens)
    assert_near(np.asarray(scores), expected, "logits")


@pytest.mark.parametrize(
    ("kind", "architecture", "changes"),
    [
        ("dflash", "dflash", {}),
        ("dflash2", "dflash", {}),
        ("dspark", "dflash", {}),
        ("dflash", "dflash-draft", {"names": FORKS}),
        ("dflash2", "qwen35-dflash-draft", {"names": FORKS | NESTED}),
    ],
)
def test_a_drafter_converted_back_is_what_it_was(kind, architecture, changes, tmp_path):
    raw, tensors = llama_cpp.drafter(kind)
    if architecture != "dflash":
        own = raw["dflash_config"]
        more = {"target_layers": None, "dflash.target_layer_ids": own["target_layer_ids"], "block_size": None}
        more |= {"dflash.block_size": 8, "dflash.mask_token_id": own["mask_token_id"]}
        more |= dict.fromkeys(llama_cpp.CONVS)
        more |= {f"dflash.dflash2.{key}": own[key] for key in llama_cpp.CONVS if key in own}
        changes = changes | {"more": {f"{architecture}.{k}": v for k, v in more.items()}}
        changes["more"]["tokenizer.ggml.mask_token_id"] = None
    config = convert(llama_cpp.write_drafter(tmp_path / "model.gguf", kind, architecture, **changes), tmp_path / "hf")
    assert {key: config[key] for key in raw} == raw
    compare(tmp_path / "hf", tensors, is_hybrid=False)
    load_drafter(tmp_path / "hf")


def test_a_reduced_head_has_offsets_for_token_ids(tmp_path):
    ids = np.array([3, 4, 9, 20])
    head = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    path = llama_cpp.write_drafter(tmp_path / "model.gguf", "dflash", tensors={"d2t": ids, "output.weight": head})
    assert convert(path, tmp_path / "hf")["draft_vocab_size"] == 4
    written = load_file(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(written["d2t"], ids - np.arange(4), strict=True)
    assert load_drafter(tmp_path / "hf").config.draft_vocab_size == 4


def test_experts_of_gate_and_up_in_one_tensor(tmp_path):
    raw, tensors = llama_cpp.target("qwen35moe")
    stored = llama_cpp.stored(raw, tensors)
    pairs = {i: [f"blk.{i}.ffn_{x}_exps.weight" for x in ("gate", "up")] for i in range(4)}
    fused = {f"blk.{i}.ffn_gate_up_exps.weight": np.concatenate([stored[n] for n in pairs[i]], 1) for i in pairs}
    changes = fused | {name: None for pair in pairs.values() for name in pair}
    convert(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", tensors=changes), tmp_path / "hf")
    compare(tmp_path / "hf", tensors)


def test_queries_keys_and_values_in_one_tensor(tmp_path):
    raw, tensors = llama_cpp.target("qwen35")
    stored = llama_cpp.stored(raw, tensors)
    three = {i: [f"blk.{i}.attn_{x}.weight" for x in "qkv"] for i in (2, 3)}
    fused = {f"blk.{i}.attn_qkv.weight": np.concatenate([stored[n] for n in three[i]]) for i in three}
    changes = fused | {name: None for names in three.values() for name in names}
    convert(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35", tensors=changes), tmp_path / "hf")
    compare(tmp_path / "hf", tensors)


def test_projections_of_old_files_in_one_tensor(tmp_path):
    _, tensors = llama_cpp.target("qwen3next")
    old = {f"blk.{i}.ssm_in.weight": tensors[f"model.layers.{i}.linear_attn.in_proj_qkvz.weight"] for i in range(2)}
    changes = old | {f"blk.{i}.attn_{x}.weight": None for i in range(2) for x in ("qkv", "gate")}
    convert(llama_cpp.write_target(tmp_path / "model.gguf", "qwen3next", tensors=changes), tmp_path / "hf")
    compare(tmp_path / "hf", tensors)


def test_a_head_alone_has_no_copies_of_its_targets_tables(tmp_path):
    raw, tensors = llama_cpp.target("qwen35moe")
    trunk = {name: None for name in llama_cpp.stored(raw, tensors) if name.startswith(("blk.0.", "blk.1.", "blk.2."))}
    convert(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", tensors=trunk), tmp_path / "head")
    kept = ("mtp.", "model.norm.weight")
    compare(tmp_path / "head", {name: array for name, array in tensors.items() if name.startswith(kept)})
    assert isinstance(load_drafter(tmp_path / "head"), Mtp)


def test_a_target_without_its_head_or_output(tmp_path):
    raw, tensors = llama_cpp.target("qwen35")
    stored = llama_cpp.stored(raw, tensors)
    without = {name: None for name in stored if name.startswith("blk.3.")} | {"output.weight": None}
    more = {"qwen35.nextn_predict_layers": None, "qwen35.block_count": 3}
    path = llama_cpp.write_target(tmp_path / "model.gguf", "qwen35", tensors=without, more=more)
    config = convert(path, tmp_path / "hf")
    assert (config["tie_word_embeddings"], "mtp_num_hidden_layers" in config) == (True, False)
    gone = ("mtp.", "lm_head.")
    compare(tmp_path / "hf", {name: array for name, array in tensors.items() if not name.startswith(gone)})


def test_kinds_of_layers_one_by_one(tmp_path):
    more = {"qwen35.full_attention_interval": 7, "qwen35.attention.recurrent_layers": [True, True, False, False]}
    path = llama_cpp.write_target(tmp_path / "model.gguf", "qwen35", more=more)
    assert convert(path, tmp_path / "hf")["layer_types"] == llama_cpp.HYBRID["layer_types"]


def test_factors_beside_tensors_are_multiplied(tmp_path):
    _, tensors = llama_cpp.target("qwen35moe")
    each = np.arange(1, 6, dtype=np.float32)
    beside = {
        "blk.2.attn_q.scale": np.float32([0.5]),
        "blk.2.attn_q.input_scale": np.float32([7]),
        "blk.1.ffn_up_exps.scale": each,
        "blk.0.ssm_out.scale": np.float32([2]),
    }
    path = llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", tensors=beside)
    convert(path, tmp_path / "hf")
    factors = {"model.layers.2.self_attn.q_proj": 0.5, "model.layers.0.linear_attn.out_proj": 2}
    factors |= {f"model.layers.1.mlp.experts.{e}.up_proj": factor for e, factor in enumerate(each)}
    compare(tmp_path / "hf", tensors | {f"{n}.weight": tensors[f"{n}.weight"] * f for n, f in factors.items()})
    path = llama_cpp.write_target(tmp_path / "two.gguf", "qwen35moe", tensors={"blk.2.attn_q.scale": np.ones(2)})
    with pytest.raises(InputError, match=r"two.gguf: 'blk.2.attn_q.scale' has 2 numbers, it must have 1"):
        convert(path, tmp_path / "no")


@pytest.mark.parametrize("architecture", llama_cpp.TARGETS)
def test_few_rows_are_in_memory(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tensors, "CHUNK", 500)
    file = GgufFile(llama_cpp.write_target(tmp_path / "model.gguf", architecture, "Q8_0"))
    for name, output in gguf_tensors.hf_tensors(file, read_config(file)).items():
        sizes = [piece.size for piece in output.chunks()]
        assert max(sizes) <= 500, name
        assert sum(sizes) == np.prod(output.shape), name


def split(path: Path) -> list[Path]:
    """A file in three, as llama-gguf-split writes them: the first has all metadata, and here no tensor."""
    reader = gguf.GGUFReader(path)
    paths = [path.with_name(f"part-{i + 1:05d}-of-00003.gguf") for i in range(3)]
    for i, (part, some) in enumerate(zip(paths, ([], reader.tensors[:20], reader.tensors[20:]), strict=True)):
        writer = gguf.GGUFWriter(part, "qwen35moe")
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", 3)
        for field in reader.fields.values() if i == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
        for tensor in some:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_several_files_are_one_model(tmp_path):
    _, tensors = llama_cpp.target("qwen35moe")
    paths = split(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe"))
    for i, path in enumerate(paths):
        convert(path, tmp_path / f"hf{i}")
        compare(tmp_path / f"hf{i}", tensors)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(InputError) as error:
        convert(paths[0], tmp_path / "none")
    says(error, paths[1], "has split.no 2: by its name it must be 1")
    paths[1].unlink()
    with pytest.raises(InputError) as error:
        convert(paths[0], tmp_path / "none")
    says(error, paths[0], "one of 3 parts", "1 of them are not beside it, first part-00002-of-00003.gguf")
    (tmp_path / "renamed.gguf").write_bytes(paths[2].read_bytes())
    with pytest.raises(InputError, match=r"NAME-00001-of-00003\.gguf"):
        convert(tmp_path / "renamed.gguf", tmp_path / "none")


def unpacked(parts: dict[str, np.ndarray], name: str) -> np.ndarray:
    """float32 values of a matrix that compressed-tensors packs: words from the low bits, groups of 32."""
    rows, columns = parts[f"{name}_shape"].tolist()
    words, scale = parts[f"{name}_packed"], parts[f"{name}_scale"].astype(np.float32)
    bits = 32 * words.shape[1] // columns
    codes = (words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) % 2**bits
    return (codes.reshape(rows, columns).astype(np.float32) - 2 ** (bits - 1)) * scale.repeat(32, 1)


def written(file: GgufFile, tmp_path: Path, dtype: str | None = None) -> tuple[dict, dict[str, np.ndarray]]:
    """The config and the tensors of a conversion."""
    (tmp_path / "hf").mkdir(exist_ok=True)
    config, tensors = conversion.write(file, tmp_path / "hf", dtype), TensorFiles(tmp_path / "hf")
    return config, {name: tensors.read(name).copy() for name in tensors}


@pytest.mark.parametrize("architecture", llama_cpp.TARGETS)
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_matrices_stay_packed(architecture, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_packed, "CHUNK", 1000)
    file = GgufFile(llama_cpp.write_target(tmp_path / "model.gguf", architecture, kind))
    config, packed = written(file, tmp_path)
    _, dense = written(file, tmp_path, "float32")
    names = [name.removesuffix("_packed") for name in packed if name.endswith("_packed")]
    assert {n.split(".")[-2] for n in dense if n not in names} >= {"embed_tokens", "norm", "conv1d"}
    assert {n.split(".")[-2] for n in names} >= {"out_proj", "q_proj", "o_proj", "up_proj", "down_proj", "lm_head"}
    for name in names:
        np.testing.assert_array_equal(unpacked(packed, name), dense[name], name, strict=True)
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    own = {n.rpartition(".")[2]: torch.from_numpy(x) for n, x in packed.items() if n.startswith("lm_head.")}
    by_package = compressor.decompress(own, scheme)["weight"].to(torch.float32).numpy()
    np.testing.assert_array_equal(by_package, dense["lm_head.weight"].astype(np.float16).astype(np.float32))
    # The groups of the config are of these modules alone.
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["weights"]["num_bits"] == int(kind[1])
    patterns = [re.compile(target.removeprefix("re:")) for target in group["targets"]]
    matched = {n for n in dense if any(p.match(n.removesuffix(".weight")) for p in patterns)}
    assert matched == set(names)


def test_only_alike_matrices_of_a_parameter_stay_packed(tmp_path):
    file = GgufFile(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", "Q8_0"))
    others = GgufFile(llama_cpp.write_target(tmp_path / "other.gguf", "qwen35moe", "Q4_0"))
    changed = [
        "blk.1.ffn_up_exps.weight",
        "blk.2.ffn_down_exps.weight",
        "blk.0.attn_gate.weight",
        "blk.2.attn_q.weight",
    ]
    file.tensors |= {name: others.tensors[name] for name in changed}
    config, packed = written(file, tmp_path)
    _, dense = written(file, tmp_path, "float32")
    bits = {}
    for name in packed:
        if name.endswith("_packed"):
            name = name.removesuffix("_packed")
            bits[name] = 32 * packed[f"{name}_packed"].shape[1] // int(packed[f"{name}_shape"][1])
            np.testing.assert_array_equal(unpacked(packed, name), dense[name], name, strict=True)
    mlp, delta = "model.layers.{}.mlp.experts.4.{}_proj.weight", "model.layers.{}.linear_attn.in_proj_{}.weight"
    for name in (mlp.format(1, "gate"), mlp.format(1, "up"), delta.format(0, "qkv"), delta.format(0, "z")):
        assert name in packed
    assert bits[mlp.format(2, "down")] == bits["model.layers.2.self_attn.q_proj.weight"] == 4
    assert bits[mlp.format(0, "up")] == bits[mlp.format(1, "down")] == bits[delta.format(1, "z")] == 8
    assert config["quantization_config"]["format"] == "mixed-precision"
    for group in config["quantization_config"]["config_groups"].values():
        patterns = [re.compile(target.removeprefix("re:")) for target in group["targets"]]
        matched = {n for n in dense if any(p.match(n.removesuffix(".weight")) for p in patterns)}
        assert matched == {name for name, each in bits.items() if each == group["weights"]["num_bits"]}


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_packed_matrices_are_read_to_the_bit(kind, tmp_path):
    """Of a target and its MTP head: in memory they are in few bits, and their numbers those of the file."""
    path = llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", kind)
    convert(path, tmp_path / "packed")
    convert(path, tmp_path / "dense", "float32")
    for load in (load_target, load_drafter):
        packed, dense = (load(tmp_path / name) for name in ("packed", "dense"))
        leaves, names = jax.tree.leaves(packed, is_leaf=is_weight), parameter_paths(dense)
        few = {name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, QuantizedWeight)}
        assert few == {name for name in names if name.rsplit(".", 1)[-1] in FEW_BITS}
        for name, leaf, right in zip(names, leaves, jax.tree.leaves(dense), strict=True):
            if name in few:
                np.testing.assert_array_equal(leaf.dense(np.float32), right, name)


def test_torn_groups_are_unpacked(tmp_path, monkeypatch):
    """Value heads of 16 inputs cannot be reordered in groups of 32."""
    monkeypatch.setitem(llama_cpp.TARGETS, "qwen35", llama_cpp.TARGETS["qwen35"] | {"linear_value_head_dim": 16})
    file = GgufFile(llama_cpp.write_target(tmp_path / "model.gguf", "qwen35", "Q4_0"))
    _, packed = written(file, tmp_path)
    assert "model.layers.0.linear_attn.out_proj.weight" in packed
    assert "model.layers.0.linear_attn.in_proj_z.weight_packed" in packed


def test_what_is_not_quantised_keeps_its_numbers(tmp_path):
    """Also where the dtype is not named: float32 beside bfloat16 for what is unpacked."""
    for kind, dtype in (("F16", np.float16), ("BF16", ml_dtypes.bfloat16), ("Q5_0", ml_dtypes.bfloat16)):
        path = llama_cpp.write_target(tmp_path / f"{kind}.gguf", "qwen35", kind)
        config = convert(path, tmp_path / kind)
        tensors, file = TensorFiles(tmp_path / kind), GgufFile(path)
        assert config["dtype"] == np.dtype(dtype).name
        name = "model.layers.2.self_attn.k_proj.weight"
        assert tensors.read(name).dtype == dtype
        np.testing.assert_array_equal(tensors.read(name), file.read("blk.2.attn_k.weight").astype(dtype), strict=True)
        norm = tensors.read("model.norm.weight")
        np.testing.assert_array_equal(norm, file.read("output_norm.weight") - 1, strict=True)
        load_target(tmp_path / kind)


ONES = np.ones((64, 64), np.float32)


@pytest.mark.parametrize(
    ("more", "tensors", "parts"),
    [
        ({"ssm.group_count": 4}, {}, ("linear_num_value_heads is 6", "multiple of linear_num_key_heads, 4")),
        ({"ssm.group_count": 3}, {}, ("ssm_conv1d.weight' [256, 4] has 256 rows, it must have 288",)),
        ({"ssm.inner_size": 100}, {}, ("qwen35moe.ssm.inner_size is 100", "ssm.time_step_rank, 6")),
        ({"ssm.state_size": None}, {}, ("lacks qwen35moe.ssm.state_size",)),
        ({"rope.dimension_count": 17}, {}, ("rope.dimension_count is 17", "32 at most")),
        ({"rope.dimension_sections": [4, 3, 2, 0]}, {}, ("rope.dimension_sections is [4, 3, 2, 0]", "sum 8")),
        ({"rope.dimension_sections": [8, 0, 0, 1]}, {}, ("rope.dimension_sections is [8, 0, 0, 1]",)),
        ({"attention.recurrent_layers": [True]}, {}, ("recurrent_layers is [True]", "each of 4 layers")),
        ({"nextn_predict_layers": 2}, {}, ("nextn_predict_layers is 2", "MTP heads of one layer")),
        ({"expert_weights_scale": 2.5}, {}, ("expert_weights_scale is 2.5", "0 or 1")),
        ({"expert_weights_norm": False}, {}, ("expert_weights_norm is False",)),
        ({"expert_count": 6}, {}, ("[5, 32, 64] has 5 experts, expert_count says 6",)),
        ({"final_logit_softcapping": 30.0}, {}, ("final_logit_softcapping is 30.0",)),
        ({}, {"blk.3.nextn.embed_tokens.weight": ONES}, ("'blk.3.nextn.embed_tokens.weight' is not known",)),
        ({}, {"blk.0.attn_q.weight": ONES}, ("'blk.0.attn_q.weight' is not known",)),
        ({}, {"blk.0.ffn_norm.weight": np.ones(64)}, ("ffn_norm.weight' and 'blk.0.post_attention_norm.weight' are",)),
        ({}, {"blk.0.ssm_a": np.zeros(6)}, ("gguf: ssm_a has numbers that are not below 0",)),
        ({}, {"blk.3.nextn.eh_proj.weight": None}, ("missing 'mtp.fc.weight'",)),
        ({}, {"blk.0.attn_gate.weight": None}, ("missing 'model.layers.0.linear_attn.in_proj_z.weight'",)),
        ({}, {"blk.0.ssm_out.weight": ONES}, ("has 64 columns, it must have 192",)),
    ],
)  # fmt: skip
def test_what_is_not_known_of_a_hybrid(more, tensors, parts, tmp_path):
    more = {f"qwen35moe.{key}": value for key, value in more.items()}
    path = llama_cpp.write_target(tmp_path / "model.gguf", "qwen35moe", tensors=tensors, more=more)
    with pytest.raises(InputError) as error:
        convert(path, tmp_path / "hf")
    says(error, *parts)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("more", "tensors", "parts"),
    [
        ({"dflash.target_layers": None}, {}, ("lacks dflash.target_layers",)),
        ({"dflash.target_layers": [0, 2]}, {}, ("dflash.target_layers is 0",)),
        ({"dflash.target_layers": [1.5]}, {}, ("dflash.target_layers is [1.5]", "list of up to 1024 layers")),
        ({"dflash.target_layers": [1]}, {}, ("'fc.weight' has shape [64, 128], it must be [64, 64]",)),
        ({"tokenizer.ggml.mask_token_id": None}, {}, ("lacks tokenizer.ggml.mask_token_id",)),
        ({"dflash.attention.sliding_window_pattern": None}, {}, ("lacks dflash.attention.sliding_window_pattern",)),
        ({"dflash.attention.sliding_window_pattern": [1, 0]}, {}, ("sliding_window_pattern is [1, 0]",)),
        ({"dflash.target_hidden_size": 128}, {}, ("target_hidden_size is 128", "hidden_size, 64")),
        ({"dflash.rope.dimension_sections": [8, 8, 0, 0]}, {}, ("rope.dimension_sections is [8, 8, 0, 0]",)),
        ({"dflash.hyper_connection_count": 4}, {}, ("hyper_connection_count is 4",)),
        ({"dflash.selector_rank": None}, {}, ("selector_rank is missing", "selector_top_k")),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4)}, ("'blk.0.attn_sinks.weight' is not known",)),
        ({}, {"d2t": np.ones(llama_cpp.VOCAB)}, ("gguf: the tensor d2t has numbers that are not whole",)),
        # Offsets that are not those of all tokens.
        ({}, {"d2t": np.arange(llama_cpp.VOCAB)[::-1].copy()}, ("gguf does not fit", "unexpected 'd2t'")),
    ],
)  # fmt: skip
def test_what_is_not_known_of_a_drafter(more, tensors, parts, tmp_path):
    path = llama_cpp.write_drafter(tmp_path / "model.gguf", "dflash2", tensors=tensors, more=more)
    with pytest.raises(InputError) as error:
        convert(path, tmp_path / "hf")
    says(error, *parts)
    assert list(tmp_path.iterdir()) == [path]
