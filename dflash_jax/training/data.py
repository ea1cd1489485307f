"""Conversations → token ids with loss masks → rows of packed documents, in an order given by the step number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import jax
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.training.media import NO_TOWER, DocumentMedia, Placer
from dflash_jax.training.token_cache import TokenFile, token_file
from dflash_jax.training.tokenising import ID, LEARNED, Skipped, check_tokens, fault, record_of, tokenised


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


class Documents(Sequence[Document]):
    """Documents of data files, whose tokens are on disk but for those with images or videos.

    Attributes:
        lengths: Tokens of each, int64 [D].
        in_memory: Documents by index.
    """

    def __init__(self, files: Sequence[TokenFile], in_memory: dict[int, Document], left_out: Sequence[int] = ()):
        """Joins files.

        Args:
            files: The files.
            in_memory: Those that the files have no tokens of, by index.
            left_out: Indices of documents that do not count.
        """
        lengths = [np.diff(file.ends, prepend=0) for file in files]
        all_lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        for index, document in in_memory.items():
            all_lengths[index] = len(document.tokens)
        kept = np.delete(np.arange(len(all_lengths)), np.array(left_out, np.int64))
        self.lengths = all_lengths[kept]
        self.in_memory = {int(np.searchsorted(kept, i)): document for i, document in in_memory.items()}
        self._files, self._kept = files, kept
        self._firsts = np.cumsum([0, *map(len, lengths)])

    @classmethod
    def of(cls, documents: "Sequence[Document]") -> "Documents":
        """Documents in memory, as they are."""
        if isinstance(documents, Documents):
            return documents
        found = cls([], {})
        found.lengths = np.array([len(d.tokens) for d in documents], np.int64)
        found.in_memory = dict(enumerate(documents))
        return found

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if (document := self.in_memory.get(index)) is not None:
            return document
        place = int(self._kept[index])
        number = int(np.searchsorted(self._firsts, place, "right")) - 1
        file, place = self._files[number], place - int(self._firsts[number])
        stored = np.asarray(file.tokens[int(file.ends[place - 1]) if place else 0 : int(file.ends[place])])
        return Document((stored & ID).astype(np.int32), stored >= LEARNED)

    @property
    def media(self) -> Iterator[DocumentMedia]:
        """Images and videos of each document that has some."""
        return (d.media for d in self.in_memory.values() if d.media is not None)


def as_document(record: dict, where: str, tokenizer: Tokenizer | None, place: Placer | None = None) -> Document:
    """Tokenises a line, and reads its images and videos.

    Args:
        record: As for `tokenised`.
        where: "file:line" for errors.
        tokenizer: The target's, None for a target without one.
        place: Places images and videos among the tokens; None for a target that takes none.

    Raises:
        InputError: The line is invalid.
    """
    tokens, mask, parts = tokenised(record, where, tokenizer)
    media = None
    if parts:
        if place is None:
            raise InputError(f"{where}: {NO_TOWER}")
        tokens, mask, media = place(tokens, mask, parts, where)
    return Document(np.array(tokens, np.int32), np.array(mask, bool), media)


def read_documents(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer | None,
    vocab_size: int,
    skipped: Skipped | None = None,
    place: Placer | None = None,
    cache: Path | None = None,
) -> Documents:
    """Reads and tokenises files; see `token_file`.

    Args:
        paths: Files of JSON lines.
        tokenizer: The target's, None for a target without one.
        vocab_size: Token ids must be below it.
        skipped: Counts invalid lines instead of raising.
        place: As for `as_document`.
        cache: Where token ids are kept; None: nowhere.

    Raises:
        InputError: A line is invalid, or no document can be learned from.
    """
    files, in_memory, left_out = list[TokenFile](), dict[int, Document](), list[int]()
    first = 0
    for path in map(Path, paths):
        with token_file(path, tokenizer, vocab_size, cache) as (file, source):
            if file.first_fault is not None:
                number, text = file.first_fault
                fault(f"{path}:{number}{text}", skipped)
                assert skipped is not None
                skipped.count += file.faults - 1
            with source.open("rb") as lines:
                for index, number, at in file.media.tolist():
                    lines.seek(at)
                    where = f"{path}:{number}"
                    try:
                        document = as_document(record_of(lines.readline(), where), where, tokenizer, place)
                        check_tokens(document.tokens, vocab_size, where)
                    except InputError as e:
                        fault(str(e), skipped)
                        left_out.append(first + index)
                        continue
                    in_memory[first + index] = document
        files.append(file)
        first += len(file.ends)
    documents = Documents(files, in_memory, left_out)
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
    # Bit r is set where a row has room r.
    rooms = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        n = min(lengths[i], size)
        if enough := rooms >> n:
            # The lowest bit.
            room = n + (enough & -enough).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            rows.append([])
            row, room = len(rows) - 1, size
        rows[row].append(i)
        if room > n:
            rows_by_room[room - n].append(row)
            rooms |= 1 << (room - n)
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
        self.documents, self.length = Documents.of(documents), length
        self.rows = pack(self.documents.lengths.tolist(), length)

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
        """Yields the documents of a row, each with its first place and the one after its last."""
        start = 0
        for i in self.rows[index]:
            end = min(start + len(self.documents[i].tokens), self.length)
            yield self.documents[i], start, end
            start = end

    @property
    def has_media(self) -> bool:
        """Whether a document has images or videos."""
        return any(True for _ in self.documents.media)

    def media_keys(self, index) -> bytes:
        """What identifies the images and videos of a row; empty without any."""
        return b"".join(key for d, _, _ in self.places(index) if d.media is not None for key in d.media.keys)

    @property
    def cut_off(self) -> tuple[int, int]:
        """(Documents longer than a row, their tokens beyond the row)."""
        left = np.maximum(self.documents.lengths - self.length, 0)
        return int(np.count_nonzero(left)), int(left.sum())

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
        return float(np.minimum(self.documents.lengths, self.length).sum()) / (len(self) * self.length)


# Documents whose tokens are counted together.
DOCUMENTS_AT_A_TIME = 4096
# More epochs than any run has. Without a number grain overflows where a batch is one row.
NO_END = 10**9


def learned_counts(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the tokens that are learned, ascending, and how often each occurs."""
    counts = np.zeros(0, np.int64)
    for start in range(0, len(rows.documents), DOCUMENTS_AT_A_TIME):
        documents = (rows.documents[i] for i in range(start, min(start + DOCUMENTS_AT_A_TIME, len(rows.documents))))
        found = np.bincount(np.concatenate([d.tokens[d.mask] for d in documents]), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    ids = np.flatnonzero(counts)
    return ids, counts[ids]


def frequent_tokens(rows: PackedRows, count: int) -> np.ndarray:
    """The ``count`` most frequent learned tokens, int32, ascending."""
    ids, counts = learned_counts(rows)
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
