"""Hostile values at every key of a GGUF file's metadata: an InputError of one line that names the file, or a model."""

import resource
import struct

import pytest

from dflash_jax.checkpoint.files import write_json
from dflash_jax.checkpoint.gguf_config import llama3_scaling, read_config
from dflash_jax.checkpoint.gguf_file import MOST_ITEMS, GgufFile
from dflash_jax.checkpoint.gguf_tensors import hf_tensors
from dflash_jax.checkpoint.gguf_tokenizer import save_tokenizer
from dflash_jax.checkpoint.load import read_target_config
from dflash_jax.errors import InputError
from tests.checkpoint.test_gguf import make
from tests.gguf_files import MODELS

# What a file can hold: numbers of 64 bits, floats, switches, texts and flat lists.
VALUES = (
    *(True, False, -1, 0, 1, 2, 3, 5, 7, 0.5, -0.5, 1e300, 1e-320, float("nan"), float("inf"), -float("inf")),
    *(2**12, 2**17, 2**20, 2**22, 2**30, 2**31, 2**63, 2**64 - 1, "", "x", "8", "x" * 100_000),
    *([], [0], [2, 2, 2], [1, 2, 3], ["x"], [float("nan")] * 3, [True, True]),
)
MORE = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.original_context_length": 64,
    "attention.sliding_window": 512,
    "rope.scale_linear": 1.0,
}
TOKENS = {
    "tokenizer.ggml.eot_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "general.alignment": 32,
    "split.count": 1,
}


def opened(file: GgufFile, directory) -> None:
    """As `convert` reads it, without its tensors."""
    config = read_config(file)
    hf_tensors(file, config)
    write_json(directory / "config.json", config)
    read_target_config(directory)
    save_tokenizer(file.metadata, directory, config["max_position_embeddings"], str(file.path))


@pytest.mark.parametrize("architecture", MODELS)
def test_hostile_metadata_gives_an_input_error_or_a_model(architecture, tmp_path):
    file = GgufFile(make(tmp_path / "model.gguf", architecture))
    metadata = file.metadata | {f"{architecture}.{key}": value for key, value in MORE.items()} | TOKENS
    file.metadata = metadata
    opened(file, tmp_path)
    models = refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Of a tokenizer's lists, values of another kind only: each is read in a second.
    for key in metadata:
        for value in VALUES:
            file.metadata = metadata | {key: value}
            try:
                opened(file, tmp_path)
                models += 1
            except InputError as e:
                message = str(e.args[0])
                assert str(tmp_path) in message, message
                assert len(message) < 1000, key
                assert "\n" not in message
                refused += 1
            except BaseException as e:
                raise AssertionError(f"{key} = {str(value)[:60]}: {type(e).__name__}: {e}") from e
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18, (key, str(value)[:60])
    assert models > 50 < refused


def header(*parts: bytes, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"".join([b"GGUF", struct.pack("<IQQ", 3, tensors, pairs), *parts])


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (header(pairs=2**63), "truncated"),
        (header(tensors=2**63), "truncated"),
        (header(text("x"), struct.pack("<IIQ", 9, 0, MOST_ITEMS + 1), pairs=1), "items"),
        (header(text("x"), struct.pack("<IIQ", 9, 8, 2**63), pairs=1), "items"),
        (header(text("x"), struct.pack("<IIQ", 9, 8, 2**20), pairs=1), "truncated"),
        (header(text("x"), struct.pack("<I", 2**31), tensors=1), "dimensions"),
        (header(text("x"), struct.pack("<IQQIQ", 2, 0, 2**62, 0, 0), tensors=1), "empty"),
        (header(text("x"), struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), tensors=1), "truncated"),
        (header(text("x"), struct.pack("<IIQ", 0, 0, 0), tensors=1), "blocks"),
        (header(text("general.alignment"), struct.pack("<IQ", 10, 2**63), pairs=1), "general.alignment"),
        (header(text("general.alignment"), struct.pack("<I?", 7, True), pairs=1), "general.alignment"),
    ],
)
def test_hostile_header_is_refused(content, part, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        GgufFile(path)
    assert part in str(error.value.args[0])
    assert str(path) in str(error.value.args[0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e30, 0.5])
def test_invalid_rope_frequency_divisors_are_refused(value):
    import numpy as np

    for divisors in (np.full(16, value, np.float32), np.r_[np.ones(8), np.full(8, value)].astype(np.float32)):
        with pytest.raises(InputError, match="Llama 3"):
            llama3_scaling(divisors, 10000.0, 32)
