"""Parses tool calls in text that is still arriving, in Qwen's two formats.

JSON (Qwen3)::

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

XML (Qwen3-Coder, Qwen3.5, Qwen3.6)::

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

Text that turns out to be no call is passed on as text. Arguments are passed on as they arrive, complete or broken, but
for what looks like a number and is none of JSON, such as NaN or 1e999: it becomes a string.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_jax.frontend.reasoning import ReasoningSplitter, partial_marker
from dflash_jax.json_text import loaded, reworded, word

START, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.S)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=</function>))", re.S)
_FUNCTION_END = re.compile(r"\s*</function>", re.S)
# A call whose name is not known after this many characters is parsed only at its end.
LONGEST_HEAD = 4096
# What ends a word of JSON; "<" may begin the tag that ends a broken call.
_PUNCTUATION = '{}[],:"<'
_XML_END = re.compile(r"</(?:parameter|function|tool_call)>")


def is_xml(chat_template: str | None) -> bool:
    """Whether a chat template teaches the XML format."""
    return "<function=" in (chat_template or "")


@dataclass
class CallDelta:
    """A piece of a call; the first piece has an id and a name.

    Attributes:
        index: The call's number in the text.
        arguments: New text of the arguments.
        id: The call's id.
        name: The function's name.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class Parsed:
    """The parts of a piece of text.

    Attributes:
        content: Text that is no call.
        calls: Pieces of calls.
    """

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _JsonValue:
    """Finds the end of a JSON value inside an object, in text that arrives in pieces."""

    def __init__(self):
        self._depth, self._in_string, self._escaped = 0, False, False
        # Characters of a number or a constant that may go on.
        self._word: list[str] = []

    def read(self, text: str) -> tuple[str, int | None]:
        """Reads the next text.

        Returns:
            The part of ``text`` that belongs to the value, without whitespace around it, and each number once it has
            ended, as `word` writes it; and the index after the value, None where it continues.
        """
        characters: list[str] = []
        end = self._end(text, characters)
        return "".join(characters), end

    def rest(self) -> str:
        """The word at the end of text that ends here."""
        text, self._word = word("".join(self._word)), []
        return text

    def _end(self, text: str, characters: list[str]) -> int | None:
        for i, c in enumerate(text):
            if not self._in_string and not (c.isspace() or c in _PUNCTUATION):
                self._word.append(c)
                continue
            if self._word:
                characters.append(self.rest())
            if not self._in_string and self._depth == 0 and (c.isspace() or c in ",}"):
                if c.isspace():
                    continue
                return i
            if c == "<" and not self._in_string and text.startswith(END, i):
                # Invalid: the call ends before its value does.
                return i
            characters.append(c)
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._in_string = False
                    if self._depth == 0:
                        return i + 1
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
        return None


class ToolParser:
    """Splits text into content and calls.

    Attributes:
        xml: Whether calls are in the XML format.
        schemas: JSON schema of each tool's parameters.
        count: Calls so far.
    """

    def __init__(self, xml: bool, schemas: dict[str, dict], is_forced: bool = False):
        """Prepares a parser.

        Args:
            xml: Whether calls are in the XML format.
            schemas: JSON schema of each tool's parameters, for XML's values.
            is_forced: Whether the text consists of calls only, so that the rest of an incomplete call is not content.
        """
        self.xml, self.schemas, self._is_forced = xml, schemas, is_forced
        self.count = 0
        self._state, self._buffer, self._raw = "content", "", ""
        self._value = _JsonValue()
        self._name, self._parameters, self._is_after_call = "", 0, False
        # Length of the buffer's beginning that has no end of a call or of an XML parameter.
        self._searched = 0
        # Whether there was content other than whitespace.
        self._has_content = False

    @property
    def is_after_call(self) -> bool:
        """Whether a call has ended and no other has begun."""
        return self.count > 0 and self._state == "content"

    def push(self, text: str) -> Parsed:
        """Parses the next text."""
        self._buffer += text
        out = Parsed()
        while self._step(out):
            pass
        return out

    def finish(self, is_cut: bool = False) -> Parsed:
        """Parses the end of the text; ``is_cut``: the text ended early."""
        out = self.push("")
        if self._state in ("content", "head"):
            if not (self._is_forced or (is_cut and self._state == "head")):
                out.content += self._raw + self._buffer
        elif self._state == "arguments" and not self.xml:
            self._add_arguments(out, self._value.rest() + self._buffer)
        self._buffer = self._raw = ""
        return out

    def _step(self, out: Parsed) -> bool:
        """Parses the beginning of the buffer; returns whether there may be more."""
        return getattr(self, f"_in_{self._state}")(out)

    def _in_content(self, out: Parsed) -> bool:
        if self._is_after_call:
            # Blank lines after a call are not content.
            self._buffer = self._buffer.lstrip("\n")
            self._is_after_call = not self._buffer
        before, start, rest = self._buffer.partition(START)
        if start:
            # Blank lines before a call are not content.
            out.content += before.rstrip("\n") if self.count or self._has_content or before.strip() else ""
            self._has_content |= bool(before.strip())
            self._buffer, self._raw, self._state = rest, START, "head"
            return True
        keep = len(before) - partial_marker(before, START)
        stripped = len(before[:keep].rstrip("\n"))
        self._has_content |= bool(before[:stripped].strip())
        if not (self.count or self._has_content):
            # Whitespace before a first call is not content.
            return False
        out.content += before[:stripped]
        self._buffer = before[stripped:]
        return False

    def _in_head(self, out: Parsed) -> bool:
        match = None
        if self._searched < LONGEST_HEAD:
            match = (_FUNCTION if self.xml else _HEAD).match(self._buffer[:LONGEST_HEAD])
        name = match and (match[1].strip() if self.xml else _string(match[1]))
        if match is not None and name:
            self._begin(out, name)
            self._buffer, self._state, self._raw = self._buffer[match.end() :], "arguments", ""
            self._value, self._parameters, self._searched = _JsonValue(), 0, 0
            return True
        end = self._buffer.find(END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._buffer) - len(END))
            return False
        body, self._buffer, self._searched = self._buffer[:end], self._buffer[end + len(END) :], 0
        if not self._reordered_call(out, body):
            out.content += self._raw + body + END
        self._raw, self._state = "", "content"
        return True

    def _reordered_call(self, out: Parsed, body: str) -> bool:
        """Parses a complete call whose keys are in another order."""
        try:
            call = loaded(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        if not isinstance(name, str):
            return False
        self._begin(out, name)
        is_text = isinstance(arguments, str)
        self._add_arguments(out, reworded(arguments) if is_text else json.dumps(arguments, ensure_ascii=False))
        return True

    def _in_arguments(self, out: Parsed) -> bool:
        return self._xml_arguments(out) if self.xml else self._json_arguments(out)

    def _json_arguments(self, out: Parsed) -> bool:
        keep = partial_marker(self._buffer, END)
        text = self._buffer[: len(self._buffer) - keep]
        value, end = self._value.read(text)
        self._add_arguments(out, value)
        if end is None:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer, self._state = self._buffer[end:], "tail"
        return True

    def _xml_arguments(self, out: Parsed) -> bool:
        if not _XML_END.search(self._buffer, self._searched):
            self._searched = max(0, len(self._buffer) - len("</parameter>"))
            return False
        self._searched = 0
        if match := _FUNCTION_END.match(self._buffer):
            self._add_arguments(out, "}" if self._parameters else "{}")
            self._buffer, self._state = self._buffer[match.end() :], "tail"
            return True
        if match := _PARAMETER.match(self._buffer):
            key, value = match[1].strip(), self._typed(match[1].strip(), match[2])
            lead = ", " if self._parameters else "{"
            self._add_arguments(
                out, f"{lead}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
            )
            self._parameters += 1
            self._buffer = self._buffer[match.end() :]
            return True
        if END in self._buffer:
            # Invalid: the call ends before its function does.
            self._add_arguments(out, self._buffer.partition(END)[0].strip())
            self._state = "tail"
            return True
        return False

    def _in_tail(self, out: Parsed) -> bool:
        _, end, rest = self._buffer.partition(END)
        if not end:
            return False
        self._buffer, self._state, self._is_after_call = rest, "content", True
        return True

    def _begin(self, out: Parsed, name: str) -> None:
        out.calls.append(CallDelta(self.count, "", f"call_{secrets.token_hex(12)}", name))
        self._name = name
        self.count += 1

    def _add_arguments(self, out: Parsed, arguments: str) -> None:
        if arguments:
            out.calls.append(CallDelta(self.count - 1, arguments))

    def _typed(self, key: str, text: str):
        """An XML parameter as a value of its schema's type; XML itself has strings only."""
        schema = self.schemas.get(self._name, {}).get("properties", {}).get(key, {})
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
            return next((c for c in schema["enum"] if as_xml(c) == text), text)
        if is_text(schema):
            return text
        try:
            return loaded(text)
        except (ValueError, RecursionError):
            return {"true": True, "false": False, "none": None, "null": None}.get(text.strip().lower(), text)


def _string(literal: str) -> str | None:
    try:
        return json.loads(literal, strict=False)
    except ValueError:
        return None


def is_text(schema) -> bool:
    """Whether XML writes a parameter of this schema verbatim; others are JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def as_xml(value) -> str:
    """A value as XML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def joined(deltas: Sequence[CallDelta]) -> list[dict]:
    """Complete calls, as a message has them."""
    calls: dict[int, dict] = {}
    for d in deltas:
        call = calls.setdefault(
            d.index, {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": ""}}
        )
        call["function"]["arguments"] += d.arguments
    return list(calls.values())


class FirstCall:
    """Ends a text after its first call, as ``ends`` of a `TextSequence`.

    The text ends after a later call where min_tokens prevents it. The arguments are the fields of `protocol.CallEnd`.
    """

    def __init__(self, is_thinking: bool, is_xml: bool, tools: str, is_forced: bool):
        self._splitter, self._tools = ReasoningSplitter(is_thinking), ToolParser(is_xml, json.loads(tools), is_forced)

    def __call__(self, text: str) -> bool:
        """Whether the sequence ends after ``text``, the next part of it."""
        self._tools.push(self._splitter.push(text)[1])
        return self._tools.is_after_call
