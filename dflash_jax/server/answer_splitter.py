"""Where the thought of an answer ends that has calls, and where a text with one call ends."""

import json
import re
from collections.abc import Collection

from dflash_jax.frontend.reasoning import ReasoningSplitter, partial_marker
from dflash_jax.server.tool_values import unquoted
from dflash_jax.server.tools import FUNCTION, FUNCTION_END, HEAD, LONGEST_HEAD, PARAMETER, START, Parsed, ToolParser

_FUNCTION, _OPEN_NAME = re.compile(r"<function=([^<>\n]{1,256})>"), re.compile(r"<function=[^<>\n]{0,256}")
# What may become the head of a call's JSON.
_OPEN_HEAD = re.compile(
    r'\{\s*("?\w{0,4}|"name"\s*(:\s*("([^"\\]|\\.)*("\s*(,\s*("?\w{0,10}"?\s*:?\s*)?)?)?)?)?)', re.S
)
# Characters of a thought's end that are parsed in one turn.
LONGEST_END = 20_000


class AnswerSplitter(ReasoningSplitter):
    """Splits an answer with calls: a call of a tool between tags ends a thought, too, and begins the content.

    Args:
        started: As of `ReasoningSplitter`.
        tools: The names of the tools.
    """

    def __init__(self, started: bool, tools: Collection[str]):
        super().__init__(started)
        self._tools = tools

    def _end_of_thought(self, text: str) -> tuple[int, int | None]:
        closed, after = super()._end_of_thought(text)
        at = text.find(START)
        while 0 <= at < closed:
            begins = self._begins_call(text[at + len(START) : at + len(START) + LONGEST_HEAD].lstrip())
            if begins:
                return at, at
            if begins is None and after is None:
                return at, None
            at = text.find(START, at + 1)
        return (min(closed, len(text) - partial_marker(text, START)), None) if after is None else (closed, after)

    def _begins_call(self, body: str) -> bool | None:
        """Whether a text begins with a call of a tool, after its tag; None where it may."""
        if match := HEAD.match(body):
            return unquoted(match[1]) in self._tools
        if match := _FUNCTION.match(body):
            if match[1].strip() not in self._tools:
                return False
            rest = body[match.end() :].lstrip()
            if rest.startswith((PARAMETER, FUNCTION_END)):
                return True
            return None if any(tag.startswith(rest) for tag in (PARAMETER, FUNCTION_END)) else False
        return None if _OPEN_HEAD.fullmatch(body) or FUNCTION.startswith(body) or _OPEN_NAME.fullmatch(body) else False


def call_at_end(thought: str, schemas: dict[str, dict]) -> Parsed:
    """The calls without tags of their own with which a thought ends that no tag has closed; none for other thoughts."""
    at = thought.find(FUNCTION)
    parser = ToolParser(schemas)
    if at < 0 or len(thought) - at > LONGEST_END:
        return Parsed()
    parsed, last = parser.push(thought[at:]), parser.finish()
    return Parsed(calls=[] if (parsed.content + last.content).strip() else parsed.calls + last.calls)


class FirstCall:
    """Ends a text after its first call, as ``ends`` of a `TextSequence`.

    The text ends after a later call where min_tokens prevents it. The arguments are the fields of `protocol.CallEnd`.
    """

    def __init__(self, is_thinking: bool, is_bare: bool, tools: str, is_forced: bool, only_at_start: bool = False):
        schemas = json.loads(tools)
        self._splitter = AnswerSplitter(is_thinking, schemas)
        self._tools = ToolParser(schemas, is_forced, is_bare, only_at_start)

    def __call__(self, text: str) -> bool:
        """Whether the sequence ends after ``text``, the next part of it."""
        self._tools.push(self._splitter.push(text)[1])
        return self._tools.is_after_call
