"""Conversations in the lines of training data: their form, and the images and videos that they name."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeGuard

from dflash_jax.argument_checks import shown
from dflash_jax.errors import InputError
from dflash_jax.media.parts import MediaPart, is_medium, split_media

# A line's key for the directory that its paths begin at, relative to the line's file; its default is the file's own.
DIRECTORY = "media_directory"
# Roles of the senders of ShareGPT's form; function_call is the assistant's, too.
SENDERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Conversation:
    """The conversation of a line, in OpenAI's form.

    Attributes:
        messages: With roles, and contents that are text, lists of parts or, beside calls, None.
        tools: Tools that the model may call, as JSON schemas; None for none.
    """

    messages: list[dict]
    tools: list[dict] | None = None

    @property
    def has_media(self) -> bool:
        """Whether there are images or videos among the contents."""
        contents = (m.get("content") for m in self.messages)
        return any(isinstance(content, list) and any(map(is_medium, content)) for content in contents)


def conversation_of(record: dict, where: str) -> Conversation | None:
    """The conversation of a line: OpenAI's ``messages`` or ShareGPT's ``conversations``, with ``tools``.

    Returns:
        None for a line that has neither.

    Raises:
        InputError: A message or a tool is wrong.
    """
    if "messages" in record:
        name, messages = "messages", record["messages"]
    elif "conversations" in record:
        name, messages = "conversations", record["conversations"]
    else:
        return None
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: {name} must be a list, and not empty")
    if name == "conversations":
        messages = [_from_sharegpt(m, f"{where}: conversations[{i}]") for i, m in enumerate(messages)]
        if (system := record.get("system")) and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
    for i, m in enumerate(messages):
        at = f"{where}: {name}[{i}]"
        content = m.get("content") if isinstance(m, dict) else None
        calls = m.get("tool_calls") if isinstance(m, dict) else None
        if calls:
            _check_calls(calls, at)
        is_valid = isinstance(content, str | list) or (content is None and calls)
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not is_valid:
            raise InputError(f"{at} must have a role and a content: text, or a list of parts")
        if isinstance(content, str):
            text_of(content, at)
        for j, part in enumerate(content if isinstance(content, list) else ()):
            _check_part(part, f"{at}.content[{j}]")
    return Conversation(messages, _tools_of(record.get("tools"), where))


def _check_calls(calls: object, where: str) -> None:
    """Raises InputError for calls that are not in OpenAI's form."""
    for j, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not _is_function(function) or not isinstance(function.get("arguments"), str | dict | None):
            form = '{"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            raise InputError(f"{where}.tool_calls[{j}] is {shown(call)}: a call is like {form}")


def _is_function(value: object) -> TypeGuard[dict]:
    """Whether a value is an object with a name."""
    return isinstance(value, dict) and isinstance(value.get("name"), str)


def _tools_of(given: object, where: str) -> list[dict] | None:
    """The tools of a line: a list, or the JSON text of one, of OpenAI's tools or their functions alone."""
    tools = given
    if isinstance(given, str):
        try:
            tools = json.loads(given or "[]")
        except (ValueError, RecursionError) as e:
            raise InputError(f"{where}: tools is text that is not JSON: {e}") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise InputError(f"{where}: tools is {shown(tools)}: it must be a list of tools")
    found = []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not _is_function(function):
            form = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'
            raise InputError(f"{where}: tools[{i}] is {shown(tool)}: a tool is like {form}")
        found.append(tool if function is not tool else {"type": "function", "function": tool})
    return found


def _from_sharegpt(turn: object, where: str) -> dict:
    """A turn of ShareGPT's form as a message; a message stays.

    Raises:
        InputError: The turn's sender is unknown, or its calls are not JSON.
    """
    if isinstance(turn, dict) and "role" in turn:
        return turn
    sender, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
    if sender == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _calls_of(value, where)}
    if not isinstance(sender, str) or sender not in SENDERS or not isinstance(value, str):
        known = ", ".join([*SENDERS, "function_call"])
        raise InputError(f"{where} is {shown(turn)}: it must have a value, a text, and a from: {known}")
    return {"role": SENDERS[sender], "content": value}


def _calls_of(value: object, where: str) -> list[dict]:
    """The calls of a ``function_call`` of ShareGPT's form: the JSON of one, or of a list."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    functions = [{"name": c["name"], "arguments": c.get("arguments")} for c in calls if _is_function(c)]
    if not calls or len(functions) < len(calls):
        raise InputError(f'{where} is {shown(value)}: a call is JSON such as {{"name": "…", "arguments": {{…}}}}')
    return [{"type": "function", "function": function} for function in functions]


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
        messages: Those of `conversation_of`.
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
        if isinstance(content := message.get("content"), list) and all(part["type"] == "text" for part in content):
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
