"""Conversations in the lines of training data: their form, and the images and videos that they name."""

import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from dflash_jax.argument_checks import shown
from dflash_jax.errors import InputError
from dflash_jax.media.parts import MediaPart, is_medium, split_media

# A line's key for the directory that its paths begin at, relative to the line's file; its default is the file's own.
DIRECTORY = "media_directory"


def messages_of(record: dict, where: str) -> list[dict]:
    """The conversation of a line.

    Raises:
        InputError: ``messages`` is not a list of messages with roles, whose contents are text or lists of parts.
    """
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages must be a list, and not empty")
    for i, m in enumerate(messages):
        content = m.get("content") if isinstance(m, dict) else None
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(content, str | list):
            raise InputError(f"{where}: messages[{i}] must have a role and a content: text, or a list of parts")
        if isinstance(content, str):
            text_of(content, f"{where}: messages[{i}]")
            continue
        for j, part in enumerate(content):
            _check_part(part, f"{where}: messages[{i}].content[{j}]")
    return messages


def _check_part(part: object, where: str) -> None:
    """Raises InputError for a part of a content that is neither text nor an image or a video."""
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InputError(f'{where} is {shown(part)}: a part is like {{"type": "text", "text": "…"}}')
    if part["type"] == "text" and isinstance(part.get("text"), str):
        text_of(part["text"], where)
    elif not is_medium(part):
        raise InputError(f"{where} is {shown(part)}: it must be a text, an image or a video")


def text_of(text: str, where: str) -> str:
    """Returns ``text``.

    Raises:
        InputError: It has half of a surrogate pair, which JSON can hold and UTF-8 cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise InputError(f"{where}: {text[e.start]!r} at character {e.start} is no text that UTF-8 can hold") from None
    return text


def at_line(error: InputError, where: str) -> InputError:
    """The error with its "file:line", which errors of images and videos have already."""
    return error if str(error).startswith(f"{where}: ") else InputError(f"{where}: {error}")


def directory_of(record: dict, where: str) -> Path:
    """The directory at which relative paths of a line's images and videos begin.

    Args:
        record: The line.
        where: Its "file:line".

    Raises:
        InputError: The line has one that is no text.
    """
    given = record.get(DIRECTORY, "")
    if not isinstance(given, str):
        raise InputError(f"{where}: {DIRECTORY} is {shown(given)}: it must be a path")
    # Absolute: a name such as ~ is a file's, and the process may change its directory.
    return Path(where.rpartition(":")[0]).parent.absolute() / given


def split_conversation(messages: Sequence[dict], where: str, directory: Path) -> tuple[list[dict], list[MediaPart]]:
    """Takes images and videos out of a conversation of a data file.

    Args:
        messages: The conversation, of `messages_of`.
        where: "file:line" for errors.
        directory: Where relative paths begin.

    Returns:
        The messages as templates read them, and what was taken out, in order.

    Raises:
        InputError: A part is wrong, or a file is missing.
    """
    try:
        rendered, parts = split_media(messages)
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
    for message in rendered:
        # Templates of text models print a list as Python writes it.
        if isinstance(content := message["content"], list) and all(part["type"] == "text" for part in content):
            message["content"] = "".join(part["text"] for part in content)
    return rendered, [_located(replace(part, where=f"{where}: {part.where}"), directory) for part in parts]


def _located(part: MediaPart, directory: Path) -> MediaPart:
    """The part with its path as a `Path`; a data: URL stays."""
    source = part.source
    scheme = source.partition(":")[0].lower() if isinstance(source, str) else None
    if scheme == "data":
        return part
    if scheme is None or scheme in ("http", "https", "file"):
        raise InputError(f"{part.where}: the {part.kind} is {shown(source)}: it must be a path or a data: URL")
    path = directory / source
    # A pipe or a device has no end. `Path.is_file` raises where a name is too long.
    if not os.path.isfile(path):
        raise InputError(f"{part.where}: {shown(str(path))} is no file")
    return replace(part, source=path)


def digest_of_files(parts: Sequence[MediaPart]) -> str:
    """Hex digest of the contents of files.

    Raises:
        InputError: One cannot be read.
    """
    digest = blake2b(digest_size=16)
    for part in parts:
        if isinstance(part.source, Path):
            try:
                digest.update(blake2b(part.source.read_bytes(), digest_size=16).digest())
            except OSError as e:
                raise InputError(f"{part.where}: {part.source} cannot be read: {e.strerror}") from None
    return digest.hexdigest()
