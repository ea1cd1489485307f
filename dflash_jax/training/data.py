"""Conversations → token ids with loss masks → rows of packed documents, in an order that a step number gives."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import grain
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """Token ids, and which of them may be learned from."""

    tokens: np.ndarray
    mask: np.ndarray


@dataclass
class Skipped:
    """Lines that were left out, and why the first was."""

    count: int = 0
    first: str = ""


def read_lines(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[tuple[str, dict]]:
    """("file:line", object) of every line that is not blank. Raises InputError for a broken one, or counts it in
    ``skipped``."""
    for path in map(Path, paths):
        try:
            file = path.open("rb")
        except OSError as e:
            raise InputError(f"data {path} cannot be read: {e.strerror}") from None
        with file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as e:
                    fault(f"{path}:{number}: not UTF-8: {e.reason} at byte {e.start} of the line", skipped)
                    continue
                except (ValueError, RecursionError) as e:
                    fault(f"{path}:{number}: not JSON: {e}", skipped)
                    continue
                if not isinstance(found, dict):
                    fault(f"{path}:{number}: a line must be an object", skipped)
                    continue
                yield f"{path}:{number}", found


def fault(message: str, skipped: Skipped | None) -> None:
    if skipped is None:
        raise InputError(message)
    skipped.count += 1
    skipped.first = skipped.first or message


def messages_of(record: dict, where: str) -> list[dict]:
    """The conversation of a line. Raises InputError where it is none."""
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages must be a list, and not empty")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise InputError(f"{where}: messages[{i}] must have a role and a content, both text")
        text_of(m["content"], f"{where}: messages[{i}]")
    return messages


def text_of(text: str, where: str) -> str:
    """``text``; raises InputError for half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(f"{where}: {text[e.start]!r} at character {e.start} is no text that UTF-8 can hold") from None
    return text


def as_document(record: dict, where: str, tokenizer: Tokenizer | None) -> Document:
    """A line as tokens. ``prompt_ids`` and ``response_ids``: the response is learned. ``messages``: the assistant's
    turns are. ``text``: all of it is. Raises InputError naming ``where``."""
    if "response_ids" in record:
        prompt, response = record.get("prompt_ids", []), record["response_ids"]
        for name, ids in (("prompt_ids", prompt), ("response_ids", response)):
            if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
                raise InputError(f"{where}: {name} must be a list of token ids")
        tokens, mask = [*prompt, *response], [False] * len(prompt) + [True] * len(response)
    elif tokenizer is None:
        raise InputError(f"{where}: the target has no tokenizer: lines must have prompt_ids and response_ids")
    elif "messages" in record:
        messages = messages_of(record, where)
        if not any(m["role"] == "assistant" for m in messages):
            raise InputError(f"{where}: the conversation has no assistant turn to learn from")
        tokens, mask = tokenizer.mark_answers(messages, where)
    elif isinstance(record.get("text"), str):
        tokens = tokenizer.encode(text_of(record["text"], where))
        mask = [True] * len(tokens)
    else:
        raise InputError(f"{where}: a line must have messages, text, or prompt_ids and response_ids")
    if len(tokens) < 2:
        raise InputError(f"{where}: the document has {len(tokens)} tokens: it must have two or more")
    return Document(np.array(tokens, np.int32), np.array(mask, bool))


def read_documents(
    paths: Sequence[str | Path], tokenizer: Tokenizer | None, vocab_size: int, skipped: Skipped | None = None
) -> list[Document]:
    """Documents with something to learn from. Raises InputError where there is none at all."""
    found = []
    for where, record in read_lines(paths, skipped):
        try:
            document = as_document(record, where, tokenizer)
            if document.tokens.max() >= vocab_size:
                raise InputError(f"{where}: token id {document.tokens.max()}: ids are 0 to {vocab_size - 1}")
        except InputError as e:
            fault(str(e), skipped)
            continue
        found.append(document)
    check_learnable(found, None, paths)
    return found


def check_learnable(documents: Sequence[Document], length: int | None, paths: Sequence[str | Path]) -> None:
    """Raises InputError where none of ``documents`` has something to learn within its first ``length`` tokens."""
    if not any((d.mask[1:length] & d.mask[: len(d.mask[:length]) - 1]).any() for d in documents):
        names = ", ".join(map(str, paths)) or "no file is given"
        within = "" if length is None else f" within the {length} of a row (sequence_length)"
        raise InputError(f"the data has no two tokens in a row to learn from{within} ({names})")


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of documents, row by row, each row at most ``size`` long: the longest first, each where it leaves least
    room."""
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(size + 1)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = min(lengths[i], size)
        left = next((r for r in range(n, size) if room[r]), None)
        if left is None:
            rows.append([])
            row, left = len(rows) - 1, size
        else:
            row = room[left].pop()
        rows[row].append(i)
        room[left - n].append(row)
    return rows


class PackedRows:
    """Rows of ``length`` tokens: a sequence of {tokens, loss_mask, starts}, arrays [T]. Documents that are longer are
    cut off; padding is of documents of one token each, which nobody learns from."""

    def __init__(self, documents: Sequence[Document], length: int):
        self.documents, self.length = documents, length
        self.rows = pack([len(d.tokens) for d in documents], length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        tokens, mask = np.zeros(self.length, np.int32), np.zeros(self.length, bool)
        starts, at = np.arange(self.length, dtype=np.int32), 0
        for i in self.rows[index]:
            document = self.documents[i]
            end = min(at + len(document.tokens), self.length)
            tokens[at:end], mask[at:end] = document.tokens[: end - at], document.mask[: end - at]
            starts[at:end] = at
            at = end
        return {"tokens": tokens, "loss_mask": mask, "starts": starts}

    @property
    def cut_off(self) -> tuple[int, int]:
        """(documents that are longer than a row, their tokens that nobody sees)."""
        left = [len(d.tokens) - self.length for d in self.documents]
        return sum(n > 0 for n in left), sum(max(n, 0) for n in left)

    def digest(self) -> str:
        """Of the tokens, of what is learned and of where documents begin, row by row."""
        found = blake2b(digest_size=16)
        for i in range(len(self)):
            for array in self[i].values():
                found.update(array.tobytes())
        return found.hexdigest()

    @property
    def used(self) -> float:
        """Share of the rows' tokens that is not padding."""
        return sum(min(len(d.tokens), self.length) for d in self.documents) / (len(self) * self.length)


# Epochs past any run's. Without a number grain overflows where a batch is one row.
NO_END = 10**9


def frequent_tokens(rows: PackedRows, count: int) -> np.ndarray:
    """The ``count`` tokens that are to be predicted most often, in ascending order."""
    seen = np.concatenate([d.tokens[d.mask] for d in rows.documents])
    found, times = np.unique(seen, return_counts=True)
    return np.sort(found[np.argsort(-times, kind="stable")[:count]]).astype(np.int32)


def batches(rows, count: int, parts: int, seed: int, first: int) -> Iterator[dict[str, np.ndarray]]:
    """For step ``first``, ``first`` + 1, …: ``count`` rows in another order each epoch, as arrays [parts, rows of a
    part, …]."""
    shape = (parts, count // parts)

    def joined(picked) -> dict[str, np.ndarray]:
        each = [rows[int(i)] for i in picked]
        return {k: np.stack([r[k] for r in each]).reshape(*shape, *each[0][k].shape) for k in each[0]}

    order = grain.MapDataset.source(list(range(len(rows)))).seed(seed).shuffle().repeat(NO_END).batch(count).map(joined)
    found = iter(order.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)))
    found.set_state({"next_index": first})
    return found
