"""GGUF files: read as transformers reads them, and refused in one line where they are not whole or not known."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer as Fast
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.gguf import convert
from dflash_jax.checkpoint.gguf_config import llama3_scaling, read_config
from dflash_jax.checkpoint.gguf_file import SIZES, GgufFile
from dflash_jax.checkpoint.gguf_tokenizer import SCHEMES, build_tokenizer
from dflash_jax.checkpoint.load import load_target
from dflash_jax.cli.convert import main
from dflash_jax.errors import InputError
from dflash_jax.models.config import Llama3Spec, RopeSpec
from dflash_jax.models.rope import rope_frequencies
from tests.float64 import assert_near, in_both
from tests.gguf_files import (
    EXPERTS,
    MODELS,
    SHAPE,
    TOKENIZER,
    metadata,
    random_model,
    read_by_transformers,
    stored,
    tokenizer_metadata,
    write_gguf,
)
from tools.equality import forward

CONVERT = Path(__file__).parents[2] / "convert"
TEXT = "def main(argv):\n    return 42  # naïve 你好 <|im_end|>\n\n\n  x = 1234.5\n"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def make(path: Path, architecture: str = "llama", kind: str = "F32", tensors=None, keys=None, tokenizer=None) -> Path:
    """A tiny file, with changes to its parts."""
    model = random_model(architecture)
    return write_gguf(
        path,
        architecture,
        stored(model) | (tensors or {}),
        {k: v for k, v in (metadata(model, architecture) | (keys or {})).items() if v is not None},
        {k: v for k, v in (tokenizer_metadata() | (tokenizer or {})).items() if v is not None},
        kind,
        TEMPLATE,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gguf") / "llama.gguf")


def says(error: pytest.ExceptionInfo, *parts) -> None:
    message = str(error.value.args[0])
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"
    assert "\n" not in message


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "F32"), ("llama", "Q8_0"), ("llama", "Q4_1"), ("llama", "BF16"), ("qwen3", "Q8_0"), ("qwen3moe", "F16")],
)
def test_logits_equal_those_of_transformers(architecture, kind, tmp_path):
    path = make(tmp_path / "model.gguf", architecture, kind)
    make_model, config = MODELS[architecture]
    reference = read_by_transformers(path, make_model(config))
    convert(path, tmp_path / "hf", "float32")
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 40))
    expected, _ = in_both(reference, tokens)
    target = load_target(tmp_path / "hf")
    scores, _ = forward(target, tokens)
    assert expected.value.std() > 0.3
    assert_near(np.asarray(scores), expected, "logits")
    # And the directory is one that transformers reads.
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for (name, a), (_, b) in zip(again.state_dict().items(), reference.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for key in (*SHAPE, *EXPERTS, "head_dim", "tie_word_embeddings"):
        assert getattr(again.config, key, None) == getattr(config, key, None), key


def test_float32_is_exact_and_bfloat16_is_its_rounding(llama, tmp_path):
    convert(llama, tmp_path / "exact")
    written = load_file(tmp_path / "exact" / "model.safetensors")
    model = random_model("llama").state_dict()
    assert set(written) == set(model) - {"lm_head.weight"}
    for name, array in written.items():
        np.testing.assert_array_equal(array, model[name].numpy(), name)
    convert(llama, tmp_path / "rounded", "bfloat16")
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"
    exact, rounded = (jax.tree.leaves(load_target(tmp_path / d, jax.numpy.bfloat16)) for d in ("exact", "rounded"))
    for a, b in zip(exact, rounded, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


def test_tokenizer_template_and_stops(llama, tmp_path):
    convert(llama, tmp_path / "hf")
    llm, own = LLM(tmp_path / "hf"), Fast.from_str(json.dumps(TOKENIZER))
    assert llm.encode(TEXT) == own.encode(TEXT).ids
    assert llm.tokenizer.decode(llm.encode(TEXT)) == TEXT.replace("<|im_end|>", "")
    messages = [{"role": "user", "content": "Hello!"}]
    assert llm.tokenizer.render_chat(messages) == "<|im_start|>user\nHello!<|im_end|>\n"
    assert llm.defaults.stop_ids == (2,)
    (out,) = llm.chat(messages, SamplingParams(max_tokens=3))
    assert out.prompt_ids == own.encode("<|im_start|>user\nHello!<|im_end|>\n").ids


def test_every_end_of_a_turn_stops(tmp_path):
    path = make(tmp_path / "model.gguf", tokenizer={"eot_token_id": 7, "eom_token_id": 2})
    convert(path, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


def built(**changes):
    """The tokenizer of the tiny files, with changes."""
    return build_tokenizer({f"tokenizer.ggml.{k}": v for k, v in (tokenizer_metadata() | changes).items()}, "a file")


@pytest.mark.parametrize(
    ("changes", "first"),
    [({"pre": "llama-bpe"}, 1), ({"pre": "llama-bpe", "add_bos_token": False}, None), ({"add_bos_token": True}, 1)],
)
def test_tokenizer_of_gguf_adds_bos_as_the_metadata_says(changes, first):
    found = built(**changes)
    bare = found.encode("ab", add_special_tokens=False).ids
    assert found.encode("ab").ids == ([first] if first is not None else []) + bare


def test_pre_tokenizer_splits_text_before_merges():
    """What stands before the merges decides where they may go."""

    def words(pre: str, text: str) -> list[str]:
        found = built(pre=pre).pre_tokenizer.pre_tokenize_str(text)
        return [word.replace("Ġ", "_").replace("Ċ", "|") for word, _ in found]

    assert words("gpt-2", "in 2024\n\n  x") == ["in", "_2024", "||_", "_x"]
    assert words("smollm", "in 2024\n\n  5") == ["in", "_", "2", "0", "2", "4", "||__", "5"]
    assert words("llama-bpe", "in 2024\n\n  x") == ["in", "_", "202", "4", "||", "_", "_x"]
    assert words("qwen2", "in 2024\n\n  x") == ["in", "_", "2", "0", "2", "4", "||", "_", "_x"]
    assert SCHEMES["qwen35"].split == PRETOKENIZE_REGEX
    # A mark ends a word of qwen2, and belongs to one of qwen35.
    assert len(words("qwen2", "हिन्दी 2024")) > len(words("qwen35", "हिन्दी 2024")) == 6


def test_schemes_and_kinds_of_tokens():
    assert built(pre="qwen2").encode("e\u0301").ids == built(pre="qwen2").encode("é").ids
    assert built(pre="gpt-2").encode("e\u0301").ids != built(pre="gpt-2").encode("é").ids
    # A word of the vocabulary to which no merges lead.
    tokens, types = (tokenizer_metadata()[k] for k in ("tokens", "token_type"))
    words = {"tokens": [*tokens, "qxqz", "<tool>"], "token_type": [*types, 1, 4], "add_bos_token": False}
    assert built(pre="llama-bpe", **words).encode("qxqz").ids == [len(tokens)]
    assert built(pre="qwen2", **words).encode("qxqz").ids != [len(tokens)]
    # One that the user defined is found whole, and is text.
    ids = built(**words).encode("a<tool>").ids
    assert ids[-1] == len(tokens) + 1
    assert built(**words).decode(ids) == "a<tool>"


@pytest.mark.parametrize(("factor", "high", "original", "theta"), [(8.0, 4.0, 8192, 5e5), (32.0, 4.0, 8192, 5e5)])
def test_scaled_frequencies_are_read_back(factor, high, original, theta, tmp_path):
    spec = Llama3Spec(factor, 1.0, high, original)
    plain, scaled = (np.asarray(rope_frequencies(RopeSpec(theta, 64, None, s))[0]) for s in (None, spec))
    found = llama3_scaling(plain / scaled, theta, 64)
    assert found == {
        "rope_type": "llama3",
        "factor": pytest.approx(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": pytest.approx(original, abs=2),
    }
    assert llama3_scaling(np.ones(32, np.float32), theta, 64) is None
    with pytest.raises(InputError, match="rope_freqs"):
        llama3_scaling(np.linspace(1, 7, 32, dtype=np.float32), theta, 64)


def test_scaled_frequencies_compute_the_same(tmp_path):
    """transformers leaves this tensor out when it reads GGUF: the reference is the model that the file was made of."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 100,
    }
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"rope_parameters": parameters}, tie_word_embeddings=True)).eval()
    model.load_state_dict(random_model("llama").state_dict())
    spec = Llama3Spec(8.0, 1.0, 4.0, 100)
    plain, scaled = (np.asarray(rope_frequencies(RopeSpec(500.0, 16, None, s))[0]) for s in (None, spec))
    changes = {"keys": {"llama.rope.freq_base": 500.0}, "tensors": {"rope_freqs.weight": plain / scaled}}
    convert(make(tmp_path / "model.gguf", **changes), tmp_path / "hf")
    tokens = np.random.default_rng(1).integers(0, SHAPE["vocab_size"], (2, 40))
    expected, _ = in_both(model, tokens)
    scores, _ = forward(load_target(tmp_path / "hf"), tokens)
    assert_near(np.asarray(scores), expected, "logits")


def test_yarn_scaling_of_gguf_becomes_rope_scaling(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    path = make(tmp_path / "model.gguf", keys={f"llama.rope.scaling.{k}": v for k, v in scaling.items()})
    assert read_config(GgufFile(path))["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


# What is refused.


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.2, 0.6, 0.999])
def test_truncated_file_is_refused(share, llama, tmp_path):
    whole = llama.read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError) as error:
        convert(path, tmp_path / "hf")
    says(error, path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"PK\x03\x04" + bytes(99), "not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(99), "version"),
        # Counts and lengths that no file could hold.
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 99, "corrupt: it has 18446744073709551615 tensors"),
        (
            b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + bytes(8) + b"\x09\0\0\0\x05\0\0\0" + b"\xff" * 8,
            "",
        ),
    ],
)
def test_file_that_is_not_gguf_is_refused(content, part, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError) as error:
        GgufFile(tmp_path / "x")
    says(error, tmp_path / "x", part)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architecture": "gemma3"}, ("'gemma3'", "llama", "qwen3moe")),
        ({"keys": {"llama.embedding_length": None}}, ("lacks llama.embedding_length",)),
        ({"keys": {"llama.attention.head_count": "six"}}, ("'six'", "attention.head_count")),
        ({"keys": {"llama.attention.head_count_kv": [2, 1, 2]}}, ("a value for each layer", "head_count_kv")),
        ({"keys": {"llama.attention.head_count": 0}}, ("head_count is 0",)),
        ({"keys": {"llama.attention.head_count": 100}}, ("llama.embedding_length is 96", "head_count, 100")),
        ({"keys": {"llama.embedding_length": 50}}, ("llama.embedding_length is 50", "llama.attention.head_count, 6")),
        ({"keys": {"llama.attention.head_count_kv": 0}}, ("llama.attention.head_count_kv is 0",)),
        ({"keys": {"llama.attention.head_count_kv": 4}}, ("gguf: llama.attention.head_count_kv is 4", "head_count, 6")),
        ({"keys": {"llama.attention.key_length": 0}}, ("llama.attention.key_length is 0",)),
        ({"keys": {"llama.rope.dimension_count": 8}}, ("llama.rope.dimension_count is 8", "16")),
        ({"keys": {"llama.rope.scale_linear": 0.5}}, ("scale_linear is 0.5",)),
        ({"keys": {"llama.rope.scaling.type": "linear"}}, ("linear",)),
        ({"keys": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}}, ("attn_factor",)),
        ({"keys": {"llama.attention.sliding_window": 64}}, ("llama.attention.sliding_window is 64",)),
        ({"keys": {"split.count": 3}}, ("one of 3 parts",)),
        ({"keys": {"llama.block_count": 4}}, ("missing 'model.layers.3.",)),
        ({"tensors": {"blk.0.attn_q.bias": np.zeros(96)}}, ("'blk.0.attn_q.bias'",)),
        ({"tensors": {"stray.weight": np.zeros((2, 3))}}, ("'stray.weight'",)),
        ({"tensors": {"blk.0.attn_q.weight": np.zeros((97, 96))}}, ("'blk.0.attn_q.weight'", "97 rows", "have 96")),
        ({"tensors": {"blk.1.ffn_up.weight": np.zeros((65, 96))}}, ("up_proj", "[65, 96]", "[64, 96]")),
        ({"tensors": {"output_norm.weight": np.full(96, np.nan)}}, ("'model.norm.weight'", "not finite")),
        ({"tensors": {"token_embd.weight": np.zeros((9, 96))}}, ("tokens", "9 rows")),
        ({"tokenizer": {"model": "llama"}}, ("kind 'llama'", "gpt2")),
        ({"tokenizer": {"pre": "tekken"}}, ("'tekken'", "smollm")),
        ({"tokenizer": {"merges": None}}, ("tokenizer.ggml.merges",)),
        ({"tokenizer": {"merges": ["no such"]}}, ("has the merge 'no such': it must be two tokens",)),
        ({"tokenizer": {"merges": [""]}}, ("has the merge '': it must be two tokens",)),
        ({"tokenizer": {"eos_token_id": 99999}}, ("99999", "ids are 0 to")),
    ],
)  # fmt: skip
def test_what_is_not_known(changes, parts, tmp_path):
    path = tmp_path / "model.gguf"
    if "architecture" in changes:
        write_gguf(path, changes["architecture"], {}, {}, {})
    else:
        make(path, **changes)
    with pytest.raises(InputError) as error:
        convert(path, tmp_path / "hf")
    says(error, *parts)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"merges": ["ab c"]}, "has the merge 'ab c': it must be two tokens that are one token together"),
        ({"token_type": [3, 1, 1], "tokens": ["x" * 2**21, "b", "c"]}, "has 2097152 characters of special tokens"),
    ],
)
def test_tokenizers_that_the_library_does_not_survive_are_refused(more, fault):
    """It panics at a merge that is longer than all tokens."""
    lists = {"model": "gpt2", "pre": "qwen35", "tokens": ["ab", "b", "c"], "merges": []}
    with pytest.raises(InputError, match=fault):
        build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in (lists | more).items()}, "x.gguf")


def test_values_beyond_float16_are_refused_only_in_float16(tmp_path):
    path = make(tmp_path / "model.gguf", tensors={"output_norm.weight": np.full(96, 1e5)})
    convert(path, tmp_path / "wide", "bfloat16")
    with pytest.raises(InputError, match="not finite in float16"):
        convert(path, tmp_path / "narrow", "float16")


KINDS = [
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "MXFP4", "NVFP4"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tensors_is_unpacked_to_the_bits_of_the_package(kind, tmp_path, monkeypatch):
    """Some without the package."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 256, (5, 512 // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, number)
    if number in SIZES:
        monkeypatch.setitem(sys.modules, "gguf", None)
    file = GgufFile(tmp_path / "model.gguf")
    assert file.tensors["x"].shape == (5, 512)
    actual = file.read("x")
    # Random bits of scales are not all numbers, and a NaN has no bits of its own.
    assert np.isfinite(expected).mean() > 0.5
    np.testing.assert_array_equal(actual, expected, strict=True)
    same = np.isfinite(expected)
    np.testing.assert_array_equal(actual[same].view(np.uint32), expected[same].view(np.uint32))


def test_the_package_is_missing(tmp_path, monkeypatch):
    path = make(tmp_path / "model.gguf", kind="Q5_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"package gguf: pip install .dflash-jax\[gguf\]"):
        GgufFile(path)


# The command line.


def run(capsys, *argv):
    code = main(["gguf-to-hf", *map(str, argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_convert_command_writes_the_checkpoint_and_one_line(llama, tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    code, out, err = run(capsys, llama, tmp_path / "hf", "--dtype", "float16")
    assert (code, out, err) == (0, f"{tmp_path / 'hf'}: llama, 3 layers, float16\n", "")
    assert load_target(tmp_path / "hf").config.hidden_size == 96
    assert list(tmp_path.iterdir()) == [tmp_path / "hf"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["{here}/none.gguf", "{here}/hf"], "none.gguf cannot be read: No such file"),
        (["{here}", "{here}/hf"], "cannot be read: Is a directory"),
        (["{gguf}", "{here}/full"], "full exists and is not an empty directory"),
        (["{gguf}", "{here}/full/file"], "file exists and is not an empty directory"),
        (["{gguf}", "{here}/full/file/hf"], "cannot be written: Not a directory"),
        (["{gguf}", "{here}/hf", "--dtype", "int8"], "int8"),
        (["{gguf}"], "DST"),
    ],
)
def test_command_line_errors_are_one_line_and_write_nothing(argv, named, llama, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    code, out, err = run(capsys, *(a.format(gguf=llama, here=tmp_path) for a in argv))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert named in err
    assert err.count("\n") == 1
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "file"]


def test_convert_command_on_a_full_disk_ends_with_an_error(llama, tmp_path):
    """No file may grow beyond 100 blocks: what a full disk does, but to one process only."""
    done = subprocess.run(
        [
            "sh",
            "-c",
            'ulimit -f 100; exec "$@"',
            "sh",
            sys.executable,
            # Python would write what it compiles of modules, cut off, too.
            "-B",
            CONVERT / "gguf_to_hf.py",
            llama,
            tmp_path / "hf",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path / 'hf'} cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())
