"""Conversations → token ids with loss masks → rows of packed documents, in an order given by the step number."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import jax
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.media.parts import MediaPart
from dflash_jax.training.conversations import DIRECTORY, conversation_of, directory_of, split_conversation, text_of
from dflash_jax.training.media import NO_TOWER, DocumentMedia, Placer


@dataclass(frozen=True)
class Document:
    """A tokenised document.

    Attributes:
        tokens: Token ids, int32 [N].
        mask: Tokens that may be learned from, bool [N].
        media: Its images and videos; None for a text.
    """

    tokens: np.ndarray
    mask: np.ndarray
    media: DocumentMedia | None = None


@dataclass
class Skipped:
    """Counts lines that were left out.

    Attributes:
        count: Number of lines.
        first: Why the first line was left out.
    """

    count: int = 0
    first: str = ""


def read_lines(paths: Sequence[str | Path], skipped: Skipped | None = None) -> Iterator[tuple[str, dict]]:
    """Reads JSON lines; blank lines are ignored.

    Args:
        paths: Files.
        skipped: Counts broken lines instead of raising.

    Yields:
        ("file:line", object).

    Raises:
        InputError: A file is unreadable or, without ``skipped``, a line is not a JSON object.
    """
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
                    record = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as e:
                    fault(f"{path}:{number}: not UTF-8: {e.reason} at byte {e.start} of the line", skipped)
                    continue
                except (ValueError, RecursionError) as e:
                    fault(f"{path}:{number}: not JSON: {e}", skipped)
                    continue
                if not isinstance(record, dict):
                    fault(f"{path}:{number}: a line must be an object", skipped)
                    continue
                yield f"{path}:{number}", record


def fault(message: str, skipped: Skipped | None) -> None:
    """Raises InputError, or counts the line in ``skipped``."""
    if skipped is None:
        raise InputError(message)
    skipped.count += 1
    skipped.first = skipped.first or message


def as_document(record: dict, where: str, tokenizer: Tokenizer | None, place: Placer | None = None) -> Document:
    """Tokenises a line.

    Args:
        record: With ``prompt_ids`` and ``response_ids`` (the response is learned), a conversation (the assistant's
            turns are learned) or ``text`` (all of it is learned). ``prompt_ids`` that `regenerate` wrote behind images
            or videos have one pad for each of those of the line's ``messages``.
        where: "file:line" for errors.
        tokenizer: The target's, None for a target without one.
        place: Places images and videos among the tokens; None for a target that takes none.

    Raises:
        InputError: The line is invalid, or has fewer than two tokens.
    """
    parts: list[MediaPart] = []
    if "response_ids" in record:
        prompt, response = record.get("prompt_ids", []), record["response_ids"]
        for name, ids in (("prompt_ids", prompt), ("response_ids", response)):
            if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
                raise InputError(f"{where}: {name} must be a list of token ids")
        tokens, mask = [*prompt, *response], [False] * len(prompt) + [True] * len(response)
        if DIRECTORY in record and (conversation := conversation_of(record, where)) is not None:
            _, parts = split_conversation(conversation.messages, where, directory_of(record, where))
    elif tokenizer is None:
        raise InputError(f"{where}: the target has no tokenizer: lines must have prompt_ids and response_ids")
    elif (conversation := conversation_of(record, where)) is not None:
        if not any(m["role"] == "assistant" for m in conversation.messages):
            raise InputError(f"{where}: the conversation has no assistant turn to learn from")
        rendered, parts = split_conversation(conversation.messages, where, directory_of(record, where))
        tokens, mask = tokenizer.mark_answers(rendered, where, conversation.tools)
    elif isinstance(record.get("text"), str):
        tokens = tokenizer.encode(text_of(record["text"], where))
        mask = [True] * len(tokens)
    else:
        raise InputError(f"{where}: a line must have messages, conversations, text, or prompt_ids and response_ids")
    media = None
    if parts:
        if place is None:
            raise InputError(f"{where}: {NO_TOWER}")
        tokens, mask, media = place(tokens, mask, parts, where)
    if len(tokens) < 2:
        raise InputError(f"{where}: the document has {len(tokens)} tokens: it must have two or more")
    return Document(np.array(tokens, np.int32), np.array(mask, bool), media)


def read_documents(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    skipped: Skipped | None = None,
    place: Placer | None = None,
) -> list[Document]:
    """Reads and tokenises files.

    Args:
        paths: Files of JSON lines.
        tokenizer: The target's, None for a target without one.
        vocab_size: Token ids must be below it.
        skipped: Counts invalid lines instead of raising.
        place: As for `as_document`.

    Raises:
        InputError: A line is invalid, or no document can be learned from.
    """
    documents = []
    for where, record in read_lines(paths, skipped):
        try:
            document = as_document(record, where, tokenizer, place)
            if document.tokens.max() >= vocab_size:
                raise InputError(f"{where}: token id {document.tokens.max()}: ids are 0 to {vocab_size - 1}")
        except InputError as e:
            fault(str(e), skipped)
            continue
        documents.append(document)
    check_learnable(documents, None, paths)
    return documents


def check_learnable(documents: Sequence[Document], length: int | None, paths: Sequence[str | Path]) -> None:
    """Checks that there is something to learn.

    Args:
        documents: All documents.
        length: Tokens of a document that fit in a row; None: all.
        paths: Files, for the error.

    Raises:
        InputError: No document has two neighbouring tokens to learn from.
    """
    if not any((d.mask[1:length] & d.mask[: len(d.mask[:length]) - 1]).any() for d in documents):
        names = ", ".join(map(str, paths)) or "no file is given"
        within = "" if length is None else f" within the {length} of a row (sequence_length)"
        raise InputError(f"the data has no two tokens in a row to learn from{within} ({names})")


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs documents into rows, longest first, each into the row with the least sufficient room (best fit).

    Args:
        lengths: Tokens of each document. Longer ones count as ``size``.
        size: Tokens of a row.

    Returns:
        Indices of documents, row by row.
    """
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(size + 1)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = min(lengths[i], size)
        room_left = next((r for r in range(n, size) if rows_by_room[r]), None)
        if room_left is None:
            rows.append([])
            row, room_left = len(rows) - 1, size
        else:
            row = rows_by_room[room_left].pop()
        rows[row].append(i)
        rows_by_room[room_left - n].append(row)
    return rows


class PackedRows:
    """Rows of packed documents, a sequence of {tokens, loss_mask, starts}, arrays [T].

    Documents beyond ``length`` are cut off. Padding is documents of one token, which have nothing to learn.

    Attributes:
        documents: All documents.
        length: Tokens of a row, T.
        rows: Indices of documents, row by row.
    """

    def __init__(self, documents: Sequence[Document], length: int):
        self.documents, self.length = documents, length
        self.rows = pack([len(d.tokens) for d in documents], length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        tokens, mask = np.zeros(self.length, np.int32), np.zeros(self.length, bool)
        starts = np.arange(self.length, dtype=np.int32)
        for document, start, end in self.places(index):
            tokens[start:end], mask[start:end] = document.tokens[: end - start], document.mask[: end - start]
            starts[start:end] = start
        return {"tokens": tokens, "loss_mask": mask, "starts": starts}

    def places(self, index) -> Iterator[tuple[Document, int, int]]:
        """Yields the documents of a row, each with its first place and the one behind its last."""
        start = 0
        for i in self.rows[index]:
            end = min(start + len(self.documents[i].tokens), self.length)
            yield self.documents[i], start, end
            start = end

    @property
    def has_media(self) -> bool:
        """Whether a document has images or videos."""
        return any(d.media is not None for d in self.documents)

    def media_keys(self, index) -> bytes:
        """What identifies the images and videos of a row; empty without any."""
        return b"".join(key for d, _, _ in self.places(index) if d.media is not None for key in d.media.keys)

    @property
    def cut_off(self) -> tuple[int, int]:
        """(Documents longer than a row, their tokens beyond the row)."""
        left = [len(d.tokens) - self.length for d in self.documents]
        return sum(n > 0 for n in left), sum(max(n, 0) for n in left)

    def digest(self) -> str:
        """Hex digest of all rows: tokens, loss masks, document starts, images and videos."""
        digest = blake2b(digest_size=16)
        for i in range(len(self)):
            for array in self[i].values():
                digest.update(array.tobytes())
            digest.update(self.media_keys(i))
        return digest.hexdigest()

    @property
    def used(self) -> float:
        """Share of the rows' tokens that is not padding."""
        return sum(min(len(d.tokens), self.length) for d in self.documents) / (len(self) * self.length)


# More epochs than any run has. Without a number grain overflows where a batch is one row.
NO_END = 10**9


def frequent_tokens(rows: PackedRows, count: int) -> np.ndarray:
    """The ``count`` most frequent learned tokens, int32, ascending."""
    learned = np.concatenate([d.tokens[d.mask] for d in rows.documents])
    ids, counts = np.unique(learned, return_counts=True)
    return np.sort(ids[np.argsort(-counts, kind="stable")[:count]]).astype(np.int32)


def batches(rows, count: int, parts: int, seed: int, first: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batch of each step from ``first`` on, rows in another order each epoch.

    Args:
        rows: A sequence of dicts of arrays, or of trees of arrays.
        count: Rows of a batch.
        parts: Parts that a step is computed in.
        seed: Of the order.
        first: The first step.

    Yields:
        Arrays [parts, rows of a part, …] by name.
    """
    # Optional: without it, everything else in the package can be imported.
    import grain

    shape = (parts, count // parts)

    def joined(picked) -> dict[str, np.ndarray]:
        each = [rows[int(i)] for i in picked]
        return jax.tree.map(lambda *x: np.stack(x).reshape(*shape, *x[0].shape), *each)

    order = grain.MapDataset.source(list(range(len(rows)))).seed(seed).shuffle().repeat(NO_END).batch(count).map(joined)
    iterator = iter(order.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=4)))
    iterator.set_state({"next_index": first})
    return iterator
