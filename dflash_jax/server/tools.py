"""Tool calls in text that is still arriving: Qwen's two formats.

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

What is no call after all is passed on as text. Arguments are passed on as they come, whole or broken.
"""

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_jax.server.reasoning import held_back

START, END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.S)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=</function>))", re.S)
_FUNCTION_END = re.compile(r"\s*</function>", re.S)
# A call whose name is not known after so many characters is read at its end only.
LONGEST_HEAD = 4096
_XML_END = re.compile(r"</(?:parameter|function|tool_call)>")


def is_xml(chat_template: str | None) -> bool:
    """Which of the two formats a chat template teaches."""
    return "<function=" in (chat_template or "")


@dataclass
class CallDelta:
    """A piece of a call: at its beginning with an id and a name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class Parsed:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class _JsonValue:
    """Finds the end of a JSON value that is followed by the end of its object."""

    def __init__(self):
        self._depth, self._in_string, self._escaped = 0, False, False

    def read(self, text: str) -> tuple[str, int | None]:
        """Of ``text``, which follows what was read before, what belongs to the value, without whitespace around it; and
        where the value is over, None where it goes on. Where text is cut does not matter."""
        kept: list[str] = []
        end = self._end(text, kept)
        return "".join(kept), end

    def _end(self, text: str, kept: list[str]) -> int | None:
        for i, c in enumerate(text):
            if not self._in_string and self._depth == 0 and (c.isspace() or c in ",}"):
                if c.isspace():
                    continue
                return i
            if c == "<" and not self._in_string and text.startswith(END, i):
                # Broken: the call ends before its value does.
                return i
            kept.append(c)
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
    """Text → content and calls.

    Args:
        xml: Which of the two formats.
        schemas: JSON schema of each tool's parameters, for XML's values.
        is_forced: The text consists of calls only, so the rest of an incomplete call is not content.
    """

    def __init__(self, xml: bool, schemas: dict[str, dict], is_forced: bool = False):
        self.xml, self.schemas, self._is_forced = xml, schemas, is_forced
        self.count = 0
        self._state, self._held, self._raw = "content", "", ""
        self._value: _JsonValue | None = None
        self._name, self._parameters, self._is_behind_call = "", 0, False
        # How much of the held text has no end of a call or of an XML parameter in it.
        self._searched = 0
        # Whether there was content but for whitespace.
        self._has_content = False

    @property
    def is_behind_call(self) -> bool:
        """Whether a call has ended, and no other has begun."""
        return self.count > 0 and self._state == "content"

    def push(self, text: str) -> Parsed:
        self._held += text
        out = Parsed()
        while self._step(out):
            pass
        return out

    def finish(self, is_cut: bool = False) -> Parsed:
        """No more text comes. ``is_cut``: its author had more to say."""
        out = self.push("")
        if self._state in ("content", "head"):
            if not (self._is_forced or (is_cut and self._state == "head")):
                out.content += self._raw + self._held
        elif self._state == "arguments" and not self.xml:
            self._say(out, self._held)
        self._held = self._raw = ""
        return out

    def _step(self, out: Parsed) -> bool:
        """Takes what can be understood of the text held; whether there may be more."""
        return getattr(self, f"_in_{self._state}")(out)

    def _in_content(self, out: Parsed) -> bool:
        if self._is_behind_call:
            # Neither is the one behind it.
            self._held = self._held.lstrip("\n")
            self._is_behind_call = not self._held
        before, found, rest = self._held.partition(START)
        if found:
            # The blank line before a call is not content.
            out.content += before.rstrip("\n") if self.count or self._has_content or before.strip() else ""
            self._has_content |= bool(before.strip())
            self._held, self._raw, self._state = rest, START, "head"
            return True
        keep = len(before) - held_back(before, START)
        stripped = len(before[:keep].rstrip("\n"))
        self._has_content |= bool(before[:stripped].strip())
        if not (self.count or self._has_content):
            # Whitespace before a first call is not content.
            return False
        out.content += before[:stripped]
        self._held = before[stripped:]
        return False

    def _in_head(self, out: Parsed) -> bool:
        found = None
        if self._searched < LONGEST_HEAD:
            found = (_FUNCTION if self.xml else _HEAD).match(self._held[:LONGEST_HEAD])
        name = found and (found[1].strip() if self.xml else _string(found[1]))
        if name:
            self._begin(out, name)
            self._held, self._state, self._raw = self._held[found.end() :], "arguments", ""
            self._value, self._parameters, self._searched = _JsonValue(), 0, 0
            return True
        end = self._held.find(END, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(END))
            return False
        body, self._held, self._searched = self._held[:end], self._held[end + len(END) :], 0
        if not self._whole(out, body):
            out.content += self._raw + body + END
        self._raw, self._state = "", "content"
        return True

    def _whole(self, out: Parsed, body: str) -> bool:
        """A call whose parts come in another order."""
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return False
        if not isinstance(name, str):
            return False
        self._begin(out, name)
        self._say(out, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        return True

    def _in_arguments(self, out: Parsed) -> bool:
        return self._xml_arguments(out) if self.xml else self._json_arguments(out)

    def _json_arguments(self, out: Parsed) -> bool:
        keep = held_back(self._held, END)
        text = self._held[: len(self._held) - keep]
        value, end = self._value.read(text)
        self._say(out, value)
        if end is None:
            self._held = self._held[len(text) :]
            return False
        self._held, self._state = self._held[end:], "tail"
        return True

    def _xml_arguments(self, out: Parsed) -> bool:
        if not _XML_END.search(self._held, self._searched):
            self._searched = max(0, len(self._held) - len("</parameter>"))
            return False
        self._searched = 0
        if found := _FUNCTION_END.match(self._held):
            self._say(out, "}" if self._parameters else "{}")
            self._held, self._state = self._held[found.end() :], "tail"
            return True
        if found := _PARAMETER.match(self._held):
            key, value = found[1].strip(), self._typed(found[1].strip(), found[2])
            lead = ", " if self._parameters else "{"
            self._say(out, f"{lead}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")
            self._parameters += 1
            self._held = self._held[found.end() :]
            return True
        if END in self._held:
            # Broken: the call ends before its function does.
            self._say(out, self._held.partition(END)[0].strip())
            self._state = "tail"
            return True
        return False

    def _in_tail(self, out: Parsed) -> bool:
        _, found, rest = self._held.partition(END)
        if not found:
            return False
        self._held, self._state, self._is_behind_call = rest, "content", True
        return True

    def _begin(self, out: Parsed, name: str) -> None:
        out.calls.append(CallDelta(self.count, "", f"call_{uuid.uuid4().hex[:24]}", name))
        self._name = name
        self.count += 1

    def _say(self, out: Parsed, arguments: str) -> None:
        if arguments:
            out.calls.append(CallDelta(self.count - 1, arguments))

    def _typed(self, key: str, text: str):
        """XML has strings only: the schema says what else a parameter is."""
        schema = self.schemas.get(self._name, {}).get("properties", {}).get(key, {})
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
            return next((c for c in schema["enum"] if as_xml(c) == text), text)
        if is_text(schema):
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return {"true": True, "false": False, "none": None, "null": None}.get(text.strip().lower(), text)


def _string(literal: str) -> str | None:
    try:
        return json.loads(literal, strict=False)
    except ValueError:
        return None


def is_text(schema) -> bool:
    """Whether XML writes a parameter of this schema as it is; others are JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def as_xml(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def joined(deltas: Sequence[CallDelta]) -> list[dict]:
    """Whole calls, as a message has them."""
    calls: dict[int, dict] = {}
    for d in deltas:
        call = calls.setdefault(
            d.index, {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": ""}}
        )
        call["function"]["arguments"] += d.arguments
    return list(calls.values())
