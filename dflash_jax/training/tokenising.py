"""Lines of data → token ids with marks of what is learned, without JAX: worker processes import this module."""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.media.parts import MediaPart
from dflash_jax.training.conversations import DIRECTORY, conversation_of, directory_of, split_conversation, text_of

# Masks of a stored token: the bit that marks it as learned, and the bits of its id.
LEARNED, ID = np.uint32(2**31), np.uint32(2**31 - 1)
# Stands for "file:line" in faults of a `Part`, which does not know its place in the file.
LINE = "line"
_HEADER = struct.Struct("!I")


@dataclass
class Skipped:
    """Counts lines that were left out.

    Attributes:
        count: Number of lines.
        first: Why the first line was left out.
    """

    count: int = 0
    first: str = ""


def fault(message: str, skipped: Skipped | None) -> None:
    """Raises InputError, or counts the line in ``skipped``."""
    if skipped is None:
        raise InputError(message)
    skipped.count += 1
    skipped.first = skipped.first or message


def record_of(line: bytes, where: str) -> dict:
    """The object of a line. Raises InputError for another line."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as e:
        raise InputError(f"{where}: not UTF-8: {e.reason} at byte {e.start} of the line") from None
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: not JSON: {e}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: a line must be an object")
    return record


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
                    record = record_of(line, f"{path}:{number}")
                except InputError as e:
                    fault(str(e), skipped)
                    continue
                yield f"{path}:{number}", record


def tokenised(record: dict, where: str, tokenizer: Tokenizer | None) -> tuple[list[int], list[bool], list[MediaPart]]:
    """Tokenises a line.

    Args:
        record: With ``prompt_ids`` and ``response_ids`` (the response is learned), a conversation (the assistant's
            turns are learned) or ``text`` (all of it is learned). ``prompt_ids`` that `regenerate` wrote after images
            or videos have one pad for each of those of the line's ``messages``.
        where: "file:line" for errors.
        tokenizer: The target's, None for a target without one.

    Returns:
        Token ids, with one pad for each image or video; which of them are learned; the images and videos.

    Raises:
        InputError: The line is invalid.
    """
    parts: list[MediaPart] = []
    if "response_ids" in record:
        prompt, response = record.get("prompt_ids", []), record["response_ids"]
        for name, ids in (("prompt_ids", prompt), ("response_ids", response)):
            if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < 2**31 for i in ids):
                raise InputError(f"{where}: {name} must be a list of token ids")
        if DIRECTORY in record and (conversation := conversation_of(record, where)) is not None:
            _, parts = split_conversation(conversation.messages, where, directory_of(record, where))
        return [*prompt, *response], [False] * len(prompt) + [True] * len(response), parts
    if tokenizer is None:
        raise InputError(f"{where}: the target has no tokenizer: lines must have prompt_ids and response_ids")
    if (conversation := conversation_of(record, where)) is not None:
        if not any(m["role"] == "assistant" for m in conversation.messages):
            raise InputError(f"{where}: the conversation has no assistant turn to learn from")
        rendered, parts = split_conversation(conversation.messages, where, directory_of(record, where))
        return *tokenizer.mark_answers(rendered, where, conversation.tools), parts
    if isinstance(record.get("text"), str):
        tokens = tokenizer.encode(text_of(record["text"], where))
        return tokens, [True] * len(tokens), parts
    raise InputError(f"{where}: a line must have messages, conversations, text, or prompt_ids and response_ids")


def check_tokens(tokens: Sequence[int] | np.ndarray, vocab_size: int, where: str) -> None:
    """Raises InputError for fewer than two tokens, and for ids outside of the vocabulary."""
    if len(tokens) < 2:
        raise InputError(f"{where}: the document has {len(tokens)} tokens: it must have two or more")
    if (largest := max(tokens)) >= vocab_size:
        raise InputError(f"{where}: token id {largest}: ids are 0 to {vocab_size - 1}")


def _has_media(record: dict) -> bool:
    if "response_ids" in record and DIRECTORY not in record:
        return False
    conversation = conversation_of(record, LINE)
    return conversation is not None and conversation.has_media


@dataclass
class Part:
    """Tokenised lines of a file.

    Attributes:
        lines: Lines, blank ones included.
        tokens: Token ids with `LEARNED`, of all documents, uint32 [N].
        lengths: Tokens of each document, int64 [D]; 0 for one with images or videos, which is not tokenised here.
        media: Of each document with images or videos: its index, its line and its first byte, int64 [M, 3].
        faults: Lines that are invalid.
        first_fault: The line of the first one, and why; None without one.
    """

    lines: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    media: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    faults: int = 0
    first_fault: tuple[int, str] | None = None

    def to_bytes(self) -> bytes:
        """The part as a message."""
        arrays = [self.tokens, self.lengths, self.media]
        header = {"lines": self.lines, "faults": self.faults, "first_fault": self.first_fault}
        head = json.dumps(header | {"sizes": [array.size for array in arrays]}).encode()
        return b"".join([_HEADER.pack(len(head)), head, *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, message: bytes) -> "Part":
        """The part of a message."""
        at = _HEADER.size + _HEADER.unpack_from(message)[0]
        header, arrays = json.loads(message[_HEADER.size : at]), []
        for size, dtype in zip(header["sizes"], (np.uint32, np.int64, np.int64), strict=True):
            arrays.append(np.frombuffer(message, dtype, size, at))
            at += arrays[-1].nbytes
        first = header["first_fault"] and tuple(header["first_fault"])
        return cls(header["lines"], arrays[0], arrays[1], arrays[2].reshape(-1, 3), header["faults"], first)


def tokenise_part(path: Path, start: int, size: int, tokenizer: Tokenizer | None, vocab_size: int) -> Part:
    """Tokenises the lines in ``size`` bytes of a file from byte ``start`` on; both are ends of lines.

    Args:
        path: The file.
        start: The first byte.
        size: The number of bytes.
        tokenizer: The target's, None for a target without one.
        vocab_size: Token ids must be below it.
    """
    with path.open("rb") as file:
        file.seek(start)
        lines = file.read(size).split(b"\n")
    part, tokens, lengths, media = (
        Part(len(lines) - (not lines[-1])),
        list[np.ndarray](),
        list[int](),
        list[list[int]](),
    )
    at = start
    for number, line in enumerate(lines, 1):
        begin, at = at, at + len(line) + 1
        if not line.strip():
            continue
        try:
            record = record_of(line, LINE)
            if _has_media(record):
                media.append([len(lengths), number, begin])
                lengths.append(0)
                continue
            ids, mask, _ = tokenised(record, LINE, tokenizer)
            check_tokens(ids, vocab_size, LINE)
        except InputError as e:
            part.faults += 1
            part.first_fault = part.first_fault or (number, str(e).removeprefix(LINE))
            continue
        tokens.append(np.array(ids, np.uint32) | np.where(mask, LEARNED, np.uint32(0)))
        lengths.append(len(ids))
    part.tokens = np.concatenate([part.tokens, *tokens])
    part.lengths = np.array(lengths, np.int64)
    part.media = np.array(media, np.int64).reshape(-1, 3)
    return part
