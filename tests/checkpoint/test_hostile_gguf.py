"""Hostile values at every key of a GGUF file's metadata: an InputError of one line that names the file, or a model."""

import re
import resource
import shutil
import struct
from functools import partial

import numpy as np
import pytest

from dflash_jax.checkpoint import gguf
from dflash_jax.checkpoint.gguf_config import llama3_scaling
from dflash_jax.checkpoint.gguf_file import (
    BF16,
    F32,
    I64,
    MOST_BYTES,
    MOST_ENTRIES,
    MOST_ITEMS,
    Q4_0,
    GgufFile,
    GgufTensor,
)
from dflash_jax.errors import InputError
from tests import llama_cpp
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


FILES = {
    **{architecture: (architecture, partial(make, architecture=architecture)) for architecture in MODELS},
    # The others of llama_cpp.TARGETS have nothing more.
    **{name: (name, partial(llama_cpp.write_target, architecture=name)) for name in ("qwen35moe", "qwen3next")},
    "dflash": ("dflash", partial(llama_cpp.write_drafter, kind="dflash2")),
}


class OpenedError(Exception):
    """All was read but the numbers."""


def opened(file: GgufFile, directory, monkeypatch) -> None:
    """As `convert` reads it, without the numbers of its tensors."""

    def tensors(*_):
        raise OpenedError

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "stream_tensors", tensors)
        with pytest.raises(OpenedError):
            gguf.write(file, directory)


@pytest.mark.parametrize("name", FILES)
def test_hostile_metadata_gives_an_input_error_or_a_model(name, tmp_path, monkeypatch):
    architecture, build = FILES[name]
    file = GgufFile(build(tmp_path / "model.gguf"))
    more = {f"{architecture}.{key}": value for key, value in MORE.items()} | TOKENS
    metadata = file.metadata | (more if name in MODELS else TOKENS)
    file.metadata = metadata
    opened(file, tmp_path, monkeypatch)
    models = refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Of a tokenizer's lists, values of another kind only: each is read in a second.
    for key in metadata:
        for value in VALUES:
            file.metadata = metadata | {key: value}
            try:
                opened(file, tmp_path, monkeypatch)
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


SHAPES = ((1,), (5,), (64,), (32, 64), (64, 32), (2, 2, 2), (5, 32, 64), (5, 64, 32), (1, 1, 1, 64), (7, 1))


@pytest.mark.parametrize(("name", "kind"), [("llama", "F32"), ("qwen35moe", "Q4_0"), ("dflash", "Q8_0")])
def test_tensors_of_hostile_shapes_give_an_input_error_or_a_model(name, kind, tmp_path):
    option = "stored_as" if name == "dflash" else "kind"
    file = GgufFile(FILES[name][1](tmp_path / "model.gguf", **{option: kind}))
    tensors, refused = file.tensors, 0
    kinds = {re.sub(r"\d+", "", tensor): tensor for tensor in tensors}
    for tensor in kinds.values():
        others = [GgufTensor(shape, F32, np.ones((*shape[:-1], shape[-1] * 4), np.uint8)) for shape in SHAPES]
        # Whole numbers, and one number of four bits, whose rows are no vectors.
        odd = [GgufTensor((64,), I64, np.ones(512, np.uint8)), GgufTensor((32,), Q4_0, np.ones(18, np.uint8))]
        # Signalling NaNs.
        nans = np.tile(
            np.array([129, 127], np.uint8), (*file.tensors[tensor].shape[:-1], file.tensors[tensor].shape[-1])
        )
        odd.append(GgufTensor(file.tensors[tensor].shape, BF16, nans))
        for other in (None, *others, *odd):
            file.tensors = {n: t for n, t in (tensors | {tensor: other}).items() if t is not None}
            (tmp_path / "hf").mkdir()
            try:
                gguf.write(file, tmp_path / "hf")
            except InputError as e:
                message = str(e.args[0])
                assert str(tmp_path) in message, message
                assert len(message) < 1500
                assert "\n" not in message
                refused += 1
            except BaseException as e:
                raise AssertionError(f"{tensor}: {other and other.shape}: {type(e).__name__}: {e}") from e
            shutil.rmtree(tmp_path / "hf")
    assert refused > 10 * len(kinds)


def header(*parts: bytes, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"".join([b"GGUF", struct.pack("<IQQ", 3, tensors, pairs), *parts])


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (header(pairs=MOST_ENTRIES), "truncated"),
        (header(pairs=2**63), f"has {2**63} keys"),
        (header(tensors=2**63), f"has {2**63} tensors"),
        (header(text("x"), struct.pack("<IIQ", 9, 0, MOST_ITEMS + 1), pairs=1), "items up to 'x'"),
        # Two arrays, each of which may be there alone.
        (
            header(
                *(text("x"), struct.pack("<IIQ", 9, 0, MOST_ITEMS // 2), bytes(MOST_ITEMS // 2)),
                *(text("y"), struct.pack("<IIQ", 9, 0, MOST_ITEMS // 2 + 1), bytes(MOST_ITEMS // 2 + 1)),
                pairs=2,
            ),
            "items up to 'y'",
        ),
        (header(*[text("x"), struct.pack("<IB", 0, 1)] * 2, pairs=2), "the key 'x' twice"),
        (header(text("x"), struct.pack("<IB", 99, 1), pairs=1), "'x' is a value of the unknown kind 99"),
        (header(text("x"), struct.pack("<IIQ", 9, 8, 2**63), pairs=1), "items"),
        (header(text("x"), struct.pack("<IIQ", 9, 8, 2**20), pairs=1), "truncated"),
        (header(text("x"), struct.pack("<I", 2**31), tensors=1), "dimensions"),
        (header(text("x"), struct.pack("<IQQIQ", 2, 0, 2**62, 0, 0), tensors=1), "empty"),
        (header(text("x"), struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), tensors=1), "truncated"),
        (header(text("x"), struct.pack("<IIQ", 0, 0, 0), tensors=1), "blocks"),
        (header(text("general.alignment"), struct.pack("<IQ", 10, 2**63), pairs=1), "general.alignment"),
        (header(text("general.alignment"), struct.pack("<I?", 7, True), pairs=1), "general.alignment"),
        (header(*[text("x"), struct.pack("<IQIQ", 1, 1, 0, 0)] * 2, bytes(64), tensors=2), "two tensors 'x'"),
        (header(text("x" * 1000), struct.pack("<IQIQ", 1, 1, 0, 0), bytes(64), tensors=1), "name of a tensor"),
        (
            header(
                *(text("x"), struct.pack("<IQIQ", 1, 9, 0, 0), text("y"), struct.pack("<IQIQ", 1, 1, 0, 32)),
                bytes(128),
                tensors=2,
            ),
            "'x' and 'y' overlap",
        ),
        (header(text("split.count"), struct.pack("<IH", 2, 65535), pairs=1), "one of 65535 parts"),
        (header(text("split.count"), struct.pack("<I?", 7, True), pairs=1), "split.count is True"),
        # An array of arrays, which could nest without end.
        (header(text("x"), struct.pack("<IIQIQ", 9, 9, 1, 9, 1), pairs=1), "'x' is an array of the unknown kind 9"),
    ],
)
def test_hostile_header_is_refused(content, part, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        GgufFile(path)
    assert part in str(error.value.args[0])
    assert str(path) in str(error.value.args[0])


def test_a_header_that_does_not_end_is_refused(tmp_path):
    """Of a large file, whatever is in it: here one text, in a file with a hole."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header(text("x"), struct.pack("<IQ", 8, 2 * MOST_BYTES), pairs=1))
        file.truncate(4 * MOST_BYTES)
    with pytest.raises(InputError, match=f"model.gguf is corrupt: its header has more than {MOST_BYTES} bytes"):
        GgufFile(path)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e30, 0.5])
def test_invalid_rope_frequency_divisors_are_refused(value):
    for divisors in (np.full(16, value, np.float32), np.r_[np.ones(8), np.full(8, value)].astype(np.float32)):
        with pytest.raises(InputError, match="Llama 3"):
            llama3_scaling(divisors, 10000.0, 32)
