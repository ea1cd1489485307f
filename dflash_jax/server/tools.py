"""Parses tool calls in text that is still arriving.

JSON between tags (Qwen3, Hermes)::

    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>

XML between tags (Qwen3-Coder, Qwen3.5, Qwen3.6, Qwen3.8)::

    <tool_call>
    <function=f>
    <parameter=x>
    1
    </parameter>
    </function>
    </tool_call>

Both are read between tags, whichever the model's template teaches. XML is read without ``<tool_call>``, too, where it
has the name of a tool. JSON without tags (Llama 3) is read where a text begins with it.

Text that is no call is content. Arguments are always JSON: texts of parameters are passed on piece by piece, other
values when they are complete. Where a text ends inside a call, the arguments so far are closed. Every decision depends
on the text alone, never on how it was divided.
"""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_jax.frontend.messages import RAW
from dflash_jax.frontend.reasoning import partial_marker
from dflash_jax.json_text import loaded
from dflash_jax.sampling_params import CLOSE
from dflash_jax.server.tool_values import Kinds, kinds_of, parameters_of, structure, unquoted, value_of

START, END = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER, VALUE_END, FUNCTION_END = "<function=", "<parameter=", "</parameter>", "</function>"
# The parameter of a custom tool.
INPUT = "input"
# Begins tags of parameters in values, too.
OPENING = "<parameter"
# Begins JSON of Llama 3, and divides its calls.
PYTHON_TAG, NEXT = "<|python_tag|>", ";"
# Characters of a name. What is longer is none.
LONGEST_NAME = 256
# Characters that decide whether a call begins.
LONGEST_OPENING = 2 * LONGEST_NAME
_NAME = re.compile(r"([^<>\n]{1,256})>")
# JSON of a call up to its arguments.
HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)', re.S)
# A call whose name is not known after this many characters is parsed at its end only.
LONGEST_HEAD = 4096
# What may end a value, alone or with the tag that follows it. Models misspell the first one.
_VALUE_MARKS = (VALUE_END, FUNCTION_END, END, "\n" + PARAMETER)
_MISSPELT, _OPEN_MISSPELT = r"</parameter[\w/]{1,16}>", re.compile(r"</parameter[\w/]{0,16}\Z")
_VALUE_MARK = re.compile("|".join([*map(re.escape, _VALUE_MARKS), _MISSPELT]))
# Closing tags after a function that has ended.
_STRAY, _OPEN_STRAY = (
    re.compile(r"</(?:parameter|function)\w{0,16}>"),
    re.compile(r"</(?:parameter|function)\w{0,16}\Z"),
)
_OPENING, _BLANK = re.compile("|".join((START, FUNCTION))), re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')


def syntax_of(chat_template: str) -> str:
    """How a chat template teaches to write calls: "xml" or "json"."""
    return "xml" if FUNCTION in chat_template else "json"


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


def dumped(value: Any) -> str:
    """A value as JSON of arguments."""
    return json.dumps(value, ensure_ascii=False)


class _Span:
    """Finds the end of a JSON value, good or broken, in text that arrives in pieces."""

    def __init__(self):
        self._depth, self._is_string, self._is_escaped, self._read = 0, False, False, 0
        self._end: int | None = None

    def end(self, text: str) -> int | None:
        """The index after the value, or of what ends it early; None where it may go on.

        Args:
            text: The text from the value's beginning, which only grows.
        """
        if self._end is None:
            self._end = self._find(text)
        return self._end

    def _find(self, text: str) -> int | None:
        for i in range(self._read, len(text)):
            c = text[i]
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif c == "\\":
                    self._is_escaped = True
                elif c == '"':
                    self._is_string = False
                    if not self._depth:
                        return i + 1
            elif c == '"':
                self._is_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return i + 1
            elif c in ",}]" and not self._depth:
                return i
            elif c == "<" and (text.startswith(END, i) or END.startswith(text[i:])):
                # Broken: the call ends before its value does.
                self._read = i
                return i if text.startswith(END, i) else None
        self._read = len(text)
        return None


class ToolParser:
    """Splits text into content and calls.

    Args:
        schemas: JSON schema of each tool's parameters.
        is_forced: Whether the text consists of calls only, so that the rest of an incomplete call is not content.
        is_bare: Whether calls are JSON without tags, as of Llama 3.
        only_at_start: Whether the text has calls only where it begins with one: other texts have a form of their own.

    Attributes:
        schemas: JSON schema of each tool's parameters.
        count: Calls so far.
    """

    def __init__(
        self, schemas: dict[str, dict], is_forced: bool = False, is_bare: bool = False, only_at_start: bool = False
    ):
        self.schemas, self._is_forced, self._is_bare = schemas, is_forced, is_bare
        self.count = 0
        self._state, self._buffer, self._has_ended = "start" if is_bare or only_at_start else "content", "", False
        # What is content if what follows it turns out to be no call.
        self._raw = ""
        # Whitespace that is content if text follows it, in pieces.
        self._spaces: list[str] = []
        self._has_content = self._is_after_call = False
        self._name, self._is_tagged = "", False
        # Names of the call's arguments so far, and whether the last one was there before.
        self._keys, self._is_repeated = set[str](), False
        self._span, self._kinds, self._key = _Span(), Kinds(frozenset()), ""
        # Blanks at the end of the text that are not parsed yet, in pieces.
        self._blanks: list[str] = []
        self._known_kinds: dict[tuple[str, str], Kinds] = {}
        self._parameters: dict[str, dict] = {}
        # Of a parameter: whether its text is passed on, and how much of the buffer has no end.
        self._is_passed_on, self._searched = False, 0
        # Tags of parameters that it opens and does not close, in so much of the buffer.
        self._open_tags = self._counted = 0

    @property
    def is_after_call(self) -> bool:
        """Whether a call has ended and no other has begun."""
        return self.count > 0 and self._state in ("content", "next", "text")

    def push(self, text: str) -> Parsed:
        """Parses the next text. Blanks, which decide nothing, wait for what follows them."""
        out = Parsed()
        if text.isspace():
            self._blanks.append(text)
        else:
            self._parse(out, "".join(self._blanks) + text)
            self._blanks = []
        return out

    def _parse(self, out: Parsed, text: str) -> None:
        self._buffer += text
        while getattr(self, f"_in_{self._state}")(out):
            pass

    def finish(self, is_cut: bool = False) -> Parsed:
        """Parses the end of the text; ``is_cut``: the text ended early."""
        out = self.push("")
        self._has_ended = True
        self._parse(out, "")
        if self._state == "head":
            if not (self._is_forced or is_cut):
                self._add_text(out, self._raw + self._buffer)
        elif self._state == "content" and not (self._is_forced or (is_cut and START in self._buffer)):
            self._add_text(out, self._buffer)
        if self._state in ("start", "content") and not self._is_forced:
            out.content += self._take_spaces()
        self._buffer = self._raw = ""
        return out

    # Content.

    def _add_text(self, out: Parsed, text: str) -> None:
        """Adds content. Blank lines around calls, and whitespace before the first one, are none."""
        if self._is_after_call:
            text = text.lstrip("\n")
            self._is_after_call = not text
        self._has_content |= bool(text.strip())
        kept = len(text.rstrip("\n")) if self.count or self._has_content else 0
        if kept:
            out.content += self._take_spaces() + text[:kept]
        if kept < len(text):
            self._spaces.append(text[kept:])

    def _take_spaces(self) -> str:
        spaces, self._spaces = "".join(self._spaces), []
        return spaces

    def _in_content(self, out: Parsed) -> bool:
        if self._is_after_call:
            # The thought that a call has ended is not closed again.
            text = self._buffer.lstrip()
            if text.startswith(CLOSE):
                self._buffer = text[len(CLOSE) :]
                return True
            if CLOSE.startswith(text) and not self._has_ended:
                return False
        text, at = self._buffer, 0
        while match := _OPENING.search(text, at):
            # A call that may come is decided upon later; what stands before it is content.
            begins = self._begins_call(match[0], match.start())
            if begins is not False:
                self._add_text(out, text[: match.start()])
                self._buffer = text[match.start() :]
                if begins is None:
                    # `finish` decides on an incomplete call.
                    return False
                rest = self._buffer[len(START) :].lstrip()
                return self._after_start(out, rest) if match[0] == START else self._begin_bare(out)
            at = match.end()
        kept = max(at, len(text) - partial_marker(text[at:], START, FUNCTION))
        self._add_text(out, text[:kept])
        self._buffer = text[kept:]
        return False

    def _begins_call(self, mark: str, start: int) -> bool | None:
        """Whether a call begins at a mark of the buffer; None where it may."""
        body = self._after(start + len(mark) if mark == START else start, LONGEST_OPENING)
        name = self._name_of(body, FUNCTION)
        if mark == FUNCTION:
            return (None if name is None and not self._has_ended else False) if not name else self._is_call(name, body)
        parameter = self._name_of(body, PARAMETER)
        if name or body.startswith(("{", END)) or (parameter and self._owner(parameter)):
            return True
        return None if None in (name, parameter) or END.startswith(body) else False

    def _owner(self, parameter: str) -> str:
        """The only tool that has a parameter; "" where there is none."""
        owners = [tool for tool in self.schemas if parameter in self._properties(tool)]
        return owners[0] if len(owners) == 1 else ""

    def _after_start(self, out: Parsed, body: str) -> bool:
        """Begins the call after <tool_call>."""
        if body.startswith("{"):
            self._raw, self._buffer, self._state = self._buffer[: -len(body)], body, "head"
            self._span = _Span()
        elif body.startswith(END):
            # An empty call is none.
            self._buffer = body[len(END) :]
        elif name := self._name_of(body, FUNCTION):
            self._begin_function(out, name, body, is_tagged=True)
        else:
            # The function's tag is missing.
            owner = self._owner(self._name_of(body, PARAMETER) or "")
            self._begin_function(out, owner, ">" + body, is_tagged=True)
        return True

    def _begin_bare(self, out: Parsed) -> bool:
        """Begins the call of XML without <tool_call>."""
        name = self._name_of(self._buffer[:LONGEST_OPENING], FUNCTION)
        assert name, "a call without a name"
        self._begin_function(out, name, self._buffer, is_tagged=False)
        return True

    def _name_of(self, text: str, tag: str) -> str | None:
        """The name in a tag at the beginning of a text: "" where it is none, None where it may come."""
        if not text.startswith(tag):
            return None if tag.startswith(text) else ""
        if match := _NAME.match(text, len(tag)):
            return match[1].strip()
        rest = text[len(tag) :]
        return None if len(rest) <= LONGEST_NAME and not re.search(r"[<>\n]", rest) else ""

    def _is_call(self, name: str, body: str) -> bool | None:
        """Whether XML without <tool_call> is a call: of a tool, with a parameter or an end. None: not known yet."""
        if name not in self.schemas:
            return False
        rest = body[body.index(">") + 1 :].lstrip()
        if any(rest.startswith(tag) for tag in (PARAMETER, FUNCTION_END)):
            return True
        if any(tag.startswith(rest) for tag in (PARAMETER, FUNCTION_END)):
            return self._has_ended or None
        return False

    # Calls.

    def _begin(self, out: Parsed, name: str) -> None:
        spaces = self._take_spaces()
        out.content += spaces.rstrip("\n") if self._has_content else ""
        out.calls.append(CallDelta(self.count, "", f"call_{secrets.token_hex(12)}", name))
        self._name, self._keys, self._is_repeated, self._is_after_call = name, set(), False, False
        self.count += 1

    def _add(self, out: Parsed, arguments: str) -> None:
        if arguments and not self._is_repeated:
            out.calls.append(CallDelta(self.count - 1, arguments))

    def _member(self, key: str) -> str:
        """JSON before the value of the next argument. Of an argument that is there already, nothing is added."""
        self._is_repeated = key in self._keys
        self._keys.add(key)
        return f"{'{' if len(self._keys) == 1 else ', '}{dumped(key)}: "

    def _close(self, out: Parsed) -> None:
        """Ends the arguments."""
        self._is_repeated = False
        self._add(out, "}" if self._keys else "{}")

    def _in_tail(self, out: Parsed) -> bool:
        """After a call: its closing tag, another call without one of its own, or content."""
        text = self._buffer.lstrip()
        if text.startswith(END):
            self._buffer, self._state, self._is_after_call = text[len(END) :], "content", True
            return True
        if match := _STRAY.match(text):
            self._buffer = text[match.end() :]
            return True
        name = self._name_of(text, FUNCTION)
        may_be_stray = _OPEN_STRAY.match(text) or any(tag.startswith(text) for tag in (VALUE_END, FUNCTION_END))
        if END.startswith(text) or ((name is None or may_be_stray) and not self._has_ended):
            self._buffer = "" if self._has_ended else self._buffer
            return False
        if name and (self._is_tagged or self._is_call(name, text)):
            self._begin_function(out, name, text, self._is_tagged)
        elif name and self._is_call(name, text) is None:
            return False
        elif text.startswith("{") and self._is_tagged:
            self._raw, self._buffer, self._state, self._span = self._buffer[: -len(text)], text, "head", _Span()
        else:
            self._state, self._is_after_call = "content", True
        return True

    # XML.

    def _begin_function(self, out: Parsed, name: str, body: str, is_tagged: bool) -> None:
        self._begin(out, _mended(name, self.schemas))
        self._buffer, self._state, self._is_tagged = body[body.index(">") + 1 :], "function", is_tagged
        self._span = _Span()

    def _in_function(self, out: Parsed) -> bool:
        """Between parameters."""
        text = self._buffer.lstrip()
        name = self._name_of(text, PARAMETER)
        if name:
            key = _mended(name, self._properties(self._name))
            self._begin_value(out, key, text[text.index(">") + 1 :])
            return True
        if text.startswith("{") and not self._keys:
            # All arguments as JSON.
            end = self._span.end(text)
            if end is None and not self._has_ended:
                return False
            arguments = structure(text[:end])
            for key, value in (arguments if isinstance(arguments, dict) else {RAW: text[:end]}).items():
                self._add(out, self._member(key) + dumped(value))
            self._buffer = "" if end is None else text[end:]
            return True
        if text.startswith(FUNCTION_END):
            self._close(out)
            self._buffer, self._state = text[len(FUNCTION_END) :], "tail"
            return True
        if text.startswith(VALUE_END):
            self._buffer = text[len(VALUE_END) :]
            return True
        is_open = name is None or any(tag.startswith(text) for tag in (FUNCTION_END, END, FUNCTION, START, VALUE_END))
        if self._has_ended:
            self._close(out)
            self._buffer, self._state = "", "tail"
            return False
        if is_open:
            return False
        # Broken: no parameter begins here. The function ends, or what stands before the next tag is left out.
        if text.startswith((END, FUNCTION, START)):
            self._close(out)
            self._buffer, self._state = text, "tail"
            return True
        before, mark, rest = _first(text[1:], (PARAMETER, FUNCTION_END, END))
        if not mark:
            self._buffer = text[:1] + before[len(before) - partial_marker(before, PARAMETER, FUNCTION_END, END) :]
            return False
        self._buffer = mark + rest
        return True

    def _properties(self, name: str) -> dict:
        """The parameters of a tool; none of an unknown one."""
        if name not in self.schemas:
            return {}
        if name not in self._parameters:
            self._parameters[name] = parameters_of(self.schemas[name])[0]
        return self._parameters[name]

    def _begin_value(self, out: Parsed, key: str, text: str) -> None:
        if (known := (self._name, key)) not in self._known_kinds:
            self._known_kinds[known] = kinds_of(self._properties(self._name).get(key), self.schemas.get(self._name))
        self._key, self._kinds = key, self._known_kinds[known]
        self._open_tags = self._counted = 0
        self._buffer, self._state, self._is_passed_on, self._searched = text, "value_start", False, 0

    def _in_value_start(self, out: Parsed) -> bool:
        """A line break before a value is not of it."""
        text = self._buffer
        if not self._has_ended and text in ("", "\r"):
            return False
        self._buffer, self._state = text[2:] if text.startswith("\r\n") else text.removeprefix("\n"), "value"
        return True

    def _in_value(self, out: Parsed) -> bool:
        end, after = self._value_end()
        if end is None:
            kept = after
            if not self._is_passed_on and self._kinds.is_only_text(self._buffer[:kept]):
                self._is_passed_on = True
                self._add(out, self._member(self._key) + '"')
            if self._is_passed_on:
                self._count_tags(kept)
                self._add(out, dumped(self._buffer[:kept])[1:-1])
                self._buffer, self._searched, self._counted = self._buffer[kept:], 0, self._counted - kept
            return False
        text = _without_break(self._buffer[:end])
        if self._is_passed_on:
            self._add(out, dumped(text)[1:-1] + '"')
        elif text.strip() or self._kinds.has_text or text in self._kinds.values:
            self._add(out, self._member(self._key) + dumped(value_of(text, self._kinds)))
        elif self._kinds.has_null:
            # Nothing is no value of these types.
            self._add(out, self._member(self._key) + "null")
        self._buffer, self._state = self._buffer[after:], "function"
        return True

    def _value_end(self) -> tuple[int | None, int]:
        """(end of the value, index after its closing tag), or (None, how much of the buffer is certainly in it)."""
        text, at = self._buffer, self._searched
        while match := _VALUE_MARK.search(text, at):
            is_end, after = self._ends_value(match[0], match.start(), match.end())
            if is_end:
                return match.start(), after
            if is_end is None:
                self._searched = match.start()
                return None, _before_break(text, match.start())
            at = match.start() + 1
        if self._has_ended:
            # The closing tag may have been begun.
            cut = partial_marker(text, VALUE_END, FUNCTION_END)
            if misspelt := _OPEN_MISSPELT.search(text, max(0, len(text) - 32)):
                cut = len(text) - misspelt.start()
            return len(text) - (cut if cut > 1 else 0), len(text)
        kept = len(text) - partial_marker(text, *_VALUE_MARKS, OPENING)
        if misspelt := _OPEN_MISSPELT.search(text, max(0, len(text) - 32)):
            kept = min(kept, misspelt.start())
        self._searched = max(at, kept)
        return None, _before_break(text, kept)

    def _ends_value(self, mark: str, start: int, end: int) -> tuple[bool | None, int]:
        """Whether a mark ends the value, None where that is not known yet; and from where the text is read on."""
        rest = self._after(end)
        if mark == VALUE_END:
            # Models close a value twice, too; a value may itself have tags of this name.
            self._count_tags(start)
            again = () if self._open_tags > 0 else (VALUE_END,)
            return self._follows(rest, (PARAMETER, FUNCTION_END, END, FUNCTION, START, *again)), end
        if mark.startswith(VALUE_END[:-1]):
            return self._follows(rest, (FUNCTION_END,)), end
        if mark == FUNCTION_END:
            return self._follows(rest, (END, FUNCTION, START)), start
        if mark == END:
            return self._follows(rest, (START,)), start
        # The closing tag is missing, if this is a parameter of the tool.
        name = self._name_of(self._buffer[start + 1 :], PARAMETER)
        if name is None:
            return (False if self._has_ended else None), start
        properties = self._properties(self._name)
        return bool(name) and (not properties or name in properties) and name != self._key, start

    def _after(self, start: int, length: int = len(VALUE_END)) -> str:
        """The text from an index on, without whitespace before it, as far as tags need it."""
        match = _BLANK.match(self._buffer, start)
        return self._buffer[match.end() : match.end() + length] if match else ""

    def _count_tags(self, end: int) -> None:
        text, self._counted = self._buffer[self._counted : end], max(end, self._counted)
        self._open_tags += text.count(OPENING) - text.count(VALUE_END)

    def _follows(self, rest: str, tags: Sequence[str]) -> bool | None:
        """Whether one of the tags, or the end of the text, follows; None where that is not known yet."""
        if rest.startswith(tuple(tags)):
            return True
        if not rest or any(tag.startswith(rest) for tag in tags):
            return True if self._has_ended else None
        return False

    # JSON.

    def _in_start(self, out: Parsed) -> bool:
        """The beginning of a text that has calls only where it begins with one."""
        text = self._buffer.lstrip()
        if not self._is_bare:
            if START.startswith(text) and text != START and not self._has_ended:
                return False
            self._state = "content" if text.startswith(START) else "text"
            return True
        if text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip()
        elif PYTHON_TAG.startswith(text) and not self._has_ended:
            return False
        if text.startswith("{"):
            self._raw, self._buffer, self._state, self._span = self._buffer[: -len(text)], text, "head", _Span()
            return True
        if text or self._has_ended:
            self._state = "text"
            return True
        return False

    def _in_text(self, out: Parsed) -> bool:
        """Text without calls."""
        out.content, self._buffer = out.content + self._take_spaces() + self._buffer, ""
        return False

    def _in_head(self, out: Parsed) -> bool:
        """A JSON object that is a call if it has a name."""
        text = self._buffer
        match = HEAD.match(text[:LONGEST_HEAD])
        if match and (name := unquoted(match[1])):
            self._begin(out, name)
            self._is_tagged, self._raw = not self._is_bare, ""
            self._buffer, self._state, self._span = text[match.end() :], "arguments", _Span()
            return True
        end = self._span.end(text)
        if end is None:
            return False
        self._buffer = text[end:]
        if call := _call_of(text[:end]):
            name, arguments = call
            self._begin(out, name)
            self._add(out, arguments)
            self._is_tagged, self._raw, self._state = not self._is_bare, "", self._after_json
            return True
        self._add_text(out, self._raw + text[:end])
        self._raw, self._state = "", "text" if self._is_bare else "content"
        return True

    @property
    def _after_json(self) -> str:
        return "next" if self._is_bare else "tail"

    def _in_arguments(self, out: Parsed) -> bool:
        """At the value of "arguments"."""
        if self._buffer.startswith("{"):
            self._buffer, self._state, self._span = self._buffer[1:], "members", _Span()
            return True
        end = self._span.end(self._buffer)
        if end is None and not self._has_ended:
            return False
        text = self._buffer[:end].strip()
        inner = unquoted(text) if text.startswith('"') else None
        value = structure(inner.strip()) if inner is not None else None
        if value is None:
            value = {} if text in ("null", '""') else {RAW: json.loads(_as_json(text))}
        self._add(out, dumped(value if isinstance(value, dict) else {RAW: value}))
        self._buffer, self._state, self._span = "" if end is None else self._buffer[end:], "rest", _Span()
        return True

    def _in_members(self, out: Parsed) -> bool:
        """Between the members of the arguments."""
        text = self._buffer.lstrip(" \t\r\n,")
        if not text and not self._has_ended:
            self._buffer = text
            return False
        if not text or text.startswith(("}", END)):
            self._close(out)
            self._buffer, self._state, self._span = text.removeprefix("}"), "rest", _Span()
            return bool(text)
        if END.startswith(text) and not self._has_ended:
            return False
        if text != self._buffer:
            self._buffer, self._span = text, _Span()
        key_end = self._span.end(text) if text.startswith('"') else None
        if key_end is None and text.startswith('"') and not self._has_ended:
            return False
        key = unquoted(text[:key_end]) if key_end is not None else None
        rest = "" if key_end is None else text[key_end:].lstrip()
        if key is not None and rest.startswith(":") and (value := rest[1:].lstrip()):
            self._add(out, self._member(key))
            is_text = value.startswith('"')
            self._buffer, self._state = value[1:] if is_text else value, "string" if is_text else "member"
            if is_text:
                self._add(out, '"')
            self._span = _Span()
            return True
        if key is not None and rest[:1] in ("", ":") and not rest[1:].strip() and not self._has_ended:
            return False
        self._state, self._span = "broken", _Span()
        self._span.end("{")
        self._buffer = "{" + text
        return True

    def _in_string(self, out: Parsed) -> bool:
        """Inside a text of the arguments."""
        text, parts, at = self._buffer, [], 0
        while at < len(text) and text[at] != '"':
            if match := _PLAIN.match(text, at) or _ESCAPE.match(text, at):
                parts.append(match[0])
                at = match.end()
            elif text[at] != "\\":
                parts.append(dumped(text[at])[1:-1])
                at += 1
            elif not self._has_ended and re.fullmatch(r"\\(u[0-9a-fA-F]{0,3})?", text[at:]):
                break
            else:
                parts.append("\\\\")
                at += 1
        is_over = text[at : at + 1] == '"' or self._has_ended
        self._add(out, "".join(parts) + ('"' if is_over else ""))
        self._buffer = text[at:]
        if is_over:
            self._buffer, self._state, self._span = text[at + 1 :], "members", _Span()
        return is_over

    def _in_member(self, out: Parsed) -> bool:
        """At a value of the arguments that is no text."""
        end = self._span.end(self._buffer)
        if end is None and not self._has_ended:
            return False
        self._add(out, _as_json(self._buffer[:end].strip()))
        self._buffer, self._state, self._span = "" if end is None else self._buffer[end:], "members", _Span()
        return True

    def _in_broken(self, out: Parsed) -> bool:
        """Members that are no JSON: a literal of Python, or text under a name of its own."""
        end = self._span.end(self._buffer)
        if end is None and not self._has_ended:
            return False
        text = self._buffer[:end]
        value = structure(text)
        members = value if isinstance(value, dict) else {RAW: text[1:].strip()}
        for key, member in members.items():
            self._add(out, self._member(key) + dumped(member))
        self._close(out)
        self._buffer, self._state, self._span = "" if end is None else self._buffer[end:], "rest", _Span()
        return True

    def _in_rest(self, out: Parsed) -> bool:
        """After the arguments: up to the end of the object."""
        text = self._buffer.lstrip(" \t\r\n,")
        if text.startswith("}"):
            self._buffer, self._state = text[1:], self._after_json
            return True
        if not text or (END.startswith(text) and not self._has_ended):
            return False
        if text.startswith(('"', ":")):
            # The name or the value of another member.
            rest = text.removeprefix(":").lstrip()
            if (end := self._span.end(rest)) is None:
                return False
            self._buffer, self._span = rest[end:], _Span()
            return True
        self._state = self._after_json
        return True

    def _in_next(self, out: Parsed) -> bool:
        """After a call without tags: another one, or text."""
        text = self._buffer.lstrip()
        if not text or (text.startswith(NEXT) and not text[1:].strip()):
            return False
        after = text[1:].lstrip() if text.startswith(NEXT) else ""
        if after.startswith("{"):
            self._raw, self._buffer, self._state, self._span = text[: -len(after)], after, "head", _Span()
        else:
            self._state = "text"
        return True


def _mended(name: str, known: Collection[str]) -> str:
    """The known name that a name in a tag begins with, in quotes or not; where there is none, the name."""
    beginning = re.match(r"[\"']?([\w.:-]+)", name)
    return beginning[1] if name not in known and beginning and beginning[1] in known else name


def _first(text: str, marks: Sequence[str]) -> tuple[str, str, str]:
    """The text before the first of the marks, the mark or "", and the text after it."""
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not places:
        return text, "", ""
    at, mark = min(places)
    return text[:at], mark, text[at + len(mark) :]


def _without_break(text: str) -> str:
    """A text without the line break at its end."""
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def _before_break(text: str, end: int) -> int:
    """The index before the line break that may be the last one before ``end``."""
    return len(_without_break(text[:end].removesuffix("\r"))) if text[:end].endswith(("\n", "\r")) else end


def _as_json(text: str) -> str:
    """A value of a model's JSON as JSON: itself, or what it is as a literal of Python, or its text."""
    try:
        return dumped(loaded(text))
    except (ValueError, RecursionError):
        pass
    words = {"True": True, "False": False, "None": None}
    value = structure(text)
    return dumped(words.get(text, text) if value is None else value)


def _call_of(text: str) -> tuple[str, str] | None:
    """(name, arguments) of an object that is a call whose keys are in any order; None for no call."""
    call = structure(text)
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        inner = structure(arguments.strip())
        arguments = inner if isinstance(inner, dict) else arguments
    if not isinstance(arguments, dict):
        arguments = {RAW: arguments} if arguments else {}
    return name, dumped(arguments)


def joined(deltas: Sequence[CallDelta]) -> list[dict]:
    """Complete calls, as a message has them."""
    calls: dict[int, dict] = {}
    for d in deltas:
        call = calls.setdefault(
            d.index, {"id": d.id, "type": "function", "function": {"name": d.name, "arguments": ""}}
        )
        call["function"]["arguments"] += d.arguments
    return list(calls.values())


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with."""
    value = json.loads(arguments or "{}")
    text = value.get(INPUT, value.get(RAW)) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
