"""Data files tokenised once: in parts, in processes, interrupted, damaged, as if read line by line."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_jax import InputError
from dflash_jax.errors import EngineError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training import token_cache
from dflash_jax.training.data import Document, Documents, PackedRows, as_document, read_documents
from dflash_jax.training.tokenising import Skipped, read_lines
from tests.training.talks import TALKS

VOCAB = 512
LINES = [
    *(json.dumps({"messages": talk}) for talk in TALKS),
    "",
    json.dumps({"text": "def f(x):\r    return '\u2028é漢字'\n" * 3}, ensure_ascii=False),
    json.dumps({"prompt_ids": [1, 2], "response_ids": [3, 4, 511]}),
    '{"text":\r "def g():"}',
]
BROKEN = ["{", '{"response_ids": [1, 512]}', '{"text": ""}', '{"messages": []}']


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY / "target")


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(LINES))
    return path


@pytest.fixture
def in_processes(monkeypatch):
    """Parts of a few lines, in three processes."""
    monkeypatch.setattr(token_cache, "PART_BYTES", 300)
    monkeypatch.setattr(token_cache.os, "sched_getaffinity", lambda _: range(3), raising=False)


def as_before(path: Path, tokenizer) -> list[Document]:
    """Line by line."""
    return [as_document(record, where, tokenizer) for where, record in read_lines([path], Skipped())]


def assert_same(found: Documents, expected: list[Document]) -> None:
    assert len(found) == len(expected)
    assert found.lengths.tolist() == [len(d.tokens) for d in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.mask, b.mask)
        assert (a.tokens.dtype, a.mask.dtype) == (b.tokens.dtype, b.mask.dtype)


@pytest.fixture
def tokenised(monkeypatch):
    """Bytes of the parts that this process tokenises."""
    sizes, inner = [], token_cache.tokenise_part

    def counted(path, start, size, *rest):
        sizes.append(size)
        return inner(path, start, size, *rest)

    monkeypatch.setattr(token_cache, "tokenise_part", counted)
    return sizes


@pytest.mark.parametrize("part", [1, 2**22])
def test_parts_give_what_lines_give_and_are_read_again_from_the_cache(
    data, tokenizer, tmp_path, monkeypatch, tokenised, part
):
    monkeypatch.setattr(token_cache, "PART_BYTES", part)
    monkeypatch.setattr(token_cache.os, "fsync", lambda _: None)
    monkeypatch.setattr(token_cache.os, "sched_getaffinity", lambda _: range(1), raising=False)
    expected = as_before(data, tokenizer)
    for _ in range(2):
        assert_same(read_documents([data], tokenizer, VOCAB, cache=tmp_path / "cache"), expected)
    assert sum(tokenised) == data.stat().st_size
    # The same content under another name; other files are tokenised.
    other = tmp_path / "other.jsonl"
    other.write_bytes(data.read_bytes())
    both = read_documents([data, other], tokenizer, VOCAB, cache=tmp_path / "cache")
    assert_same(both, expected * 2)
    assert sum(tokenised) == data.stat().st_size
    assert PackedRows(both, 64).digest() == PackedRows(expected * 2, 64).digest()
    other.write_text(LINES[0])
    read_documents([other], tokenizer, VOCAB, cache=tmp_path / "cache")
    read_documents([data], tokenizer, 600, cache=tmp_path / "cache")
    read_documents([data], Tokenizer(TINY / "target", template_options={"x": 1}), VOCAB, cache=tmp_path / "cache")
    assert sum(tokenised) == 3 * data.stat().st_size + len(LINES[0])


def test_processes_give_the_same_in_the_same_order(data, tokenizer, tmp_path, in_processes, tokenised):
    assert_same(read_documents([data], tokenizer, VOCAB, cache=tmp_path), as_before(data, tokenizer))
    assert not tokenised


def test_broken_lines_have_their_numbers_in_any_part(data, tokenizer, tmp_path, monkeypatch):
    lines = [*LINES, BROKEN[0], *LINES[:3], *BROKEN[1:]]
    data.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(token_cache, "PART_BYTES", 100)
    monkeypatch.setattr(token_cache.os, "sched_getaffinity", lambda _: range(1), raising=False)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{data}:{len(LINES) + 1}: not JSON"):
            read_documents([data], tokenizer, VOCAB, cache=tmp_path)
        skipped = Skipped()
        found = read_documents([data], tokenizer, VOCAB, skipped, cache=tmp_path)
        assert (len(found), skipped.count) == (len(LINES) + 2, len(BROKEN))
        assert skipped.first.startswith(f"{data}:{len(LINES) + 1}: not JSON")


def interrupt(monkeypatch, after: int) -> None:
    """Ends the writer behind a number of parts, in the middle of the next one's files."""
    inner, left = token_cache.write_json, iter(range(after))

    def write_json(path, value):
        if next(left, None) is None:
            raise KeyboardInterrupt
        inner(path, value)

    monkeypatch.setattr(token_cache, "write_json", write_json)


def test_what_was_interrupted_goes_on_behind_the_last_part(data, tokenizer, tmp_path, monkeypatch, tokenised):
    monkeypatch.setattr(token_cache, "PART_BYTES", 300)
    monkeypatch.setattr(token_cache.os, "sched_getaffinity", lambda _: range(1), raising=False)
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            read_documents([data], tokenizer, VOCAB, cache=tmp_path)
    before = sum(tokenised)
    assert_same(read_documents([data], tokenizer, VOCAB, cache=tmp_path), as_before(data, tokenizer))
    assert sum(tokenised) - before == data.stat().st_size - sum(tokenised[:3])


@pytest.mark.parametrize(("name", "size"), [("tokens.bin", 8), ("ends.bin", 8), ("record.json", 0), ("record.json", 9)])
def test_a_damaged_cache_is_made_anew(data, tokenizer, tmp_path, name, size):
    read_documents([data], tokenizer, VOCAB, cache=tmp_path)
    (file,) = tmp_path.glob(f"*/{name}")
    os.truncate(file, size)
    assert_same(read_documents([data], tokenizer, VOCAB, cache=tmp_path), as_before(data, tokenizer))


class Lost:
    """A process that ended while it tokenised."""

    socket = SimpleNamespace(close=lambda: None)

    def send(self, value):
        pass

    def wait(self, timeout_s):
        raise EOFError

    def kill(self):
        pass


def test_a_lost_process_is_told_and_the_next_call_goes_on(data, tokenizer, tmp_path, in_processes, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(token_cache.Nursery, "start", lambda _: None)
        patch.setattr(token_cache.Nursery, "fork", lambda _: Lost())
        with pytest.raises(EngineError, match="a process that tokenises was ended"):
            read_documents([data], tokenizer, VOCAB, cache=tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenise")]
    monkeypatch.undo()
    assert_same(read_documents([data], tokenizer, VOCAB, cache=tmp_path), as_before(data, tokenizer))


def test_a_pipe_is_read(data, tokenizer, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(data.read_bytes()))
    writer.start()
    found = read_documents([pipe], tokenizer, VOCAB, cache=tmp_path / "cache")
    writer.join()
    assert_same(found, as_before(data, tokenizer))


def test_a_full_disk_is_named_by_the_file_of_the_cache(data, tokenizer, tmp_path):
    read_documents([data], tokenizer, VOCAB, cache=tmp_path)
    (directory,) = (path.parent for path in tmp_path.glob("*/record.json"))
    (directory / "record.json").unlink()
    (directory / "tokens.bin").unlink()
    (directory / "tokens.bin").symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"^{directory}/tokens.bin cannot be written: "):
        read_documents([data], tokenizer, VOCAB, cache=tmp_path)


def test_a_file_that_changes_meanwhile_is_told(data, tokenizer, tmp_path, monkeypatch):
    inner = token_cache.tokenise_part

    def changing(path, *rest):
        data.write_text(LINES[0])
        return inner(path, *rest)

    monkeypatch.setattr(token_cache, "tokenise_part", changing)
    with pytest.raises(InputError, match="has changed while it was read"):
        read_documents([data], tokenizer, VOCAB, cache=tmp_path)
    assert not list(tmp_path.glob("*/record.json"))


def test_a_file_that_is_not_there_is_named(tokenizer, tmp_path):
    for path, reason in ((tmp_path / "no.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=f"^data {path} cannot be read: {reason}"):
            read_documents([path], tokenizer, VOCAB)
