"""Structural tags in llguidance's notation: free text with stretches that have their own forms.

The notation is XGrammar's, as vLLM and SGLang accept it: a tree of formats in ``format``, or in the older form
``structures`` and ``triggers``. The module runs in the grammar's own process (`grammar_worker`).
"""

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher

from dflash_jax.errors import InputError

_TEXT = "/(?s:.*)/"
# The fields of each format and their types; "?" after those that may be left out.
_FORMATS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "const_string": {"value": str},
    "literal": {"text": str},
    "json_schema": {"json_schema": (dict, bool), "style?": str},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {"excludes?": list},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": (str, list)},
    "triggered_tags": {
        "triggers": list,
        "tags": list,
        "at_least_one?": bool,
        "stop_after_first?": bool,
        "excludes?": list,
    },
    "tags_with_separator": {"tags": list, "separator": str, "at_least_one?": bool, "stop_after_first?": bool},
}
# Lists that must not be empty.
_FILLED = ("elements", "triggers", "tags")


def structural_tag_grammar(
    value: dict, schema: Callable[[Any], str], lark: Callable[[str], str], literal: Callable[[str], list[str]]
) -> str:
    """A grammar that llguidance compiles.

    Args:
        value: The structural tag.
        schema: Writes a JSON schema in Lark.
        lark: Converts a grammar in any supported notation to Lark.
        literal: Writes a text in Lark: strings, and special tokens as "<[id]>".

    Raises:
        InputError: Something is unknown or cannot be expressed; the message names it.
    """
    if "format" in value:
        node, where = value["format"], "format"
    else:
        node, where = _modern(value), ""
    builder = _Builder(schema, lark, literal)
    start = builder.expression(node, where, (), True)
    main = "\n".join([f"start: {start}", *builder.rules])
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": main}, *builder.grammars]})


def _modern(value: dict) -> dict:
    """``structures`` and ``triggers`` in the newer notation."""
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise InputError("it must have format, or structures and triggers")
    tags = []
    for i, each in enumerate(structures):
        if not isinstance(each, dict) or {"begin", "schema", "end"} - set(each):
            raise InputError(f"structures[{i}] must have begin, schema and end")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _checked(node: Any, where: str, kind: str | None = None) -> dict:
    """A format whose fields are known and of the right types.

    ``kind`` is its type where it may be left out.
    """
    if not isinstance(node, dict):
        raise InputError(f"{where} must be an object")
    kind = node.get("type", kind)
    if kind not in _FORMATS:
        raise InputError(f"{where}.type is {kind!r}: it must be one of {', '.join(_FORMATS)}")
    types = {name.removesuffix("?"): type_ for name, type_ in _FORMATS[kind].items()}
    if missing := set(_FORMATS[kind]) & set(types) - set(node):
        raise InputError(f"{where}.{min(missing)} is missing")
    if unknown := set(node) - set(types) - {"type"}:
        raise InputError(f"{where}.{min(unknown)} is not supported")
    for name in set(node) - {"type"}:
        if not isinstance(node[name], types[name]) or (name in _FILLED and not node[name]):
            raise InputError(f"{where}.{name} has a wrong type or is empty")
    if node.get("excludes"):
        raise InputError(f"{where}.excludes is not supported")
    if node.get("style", "json") != "json":
        raise InputError(f"{where}.style is {node['style']!r}: only json is supported")
    return node | {"type": kind}


def _texts(given: Any, where: str) -> tuple[str, ...]:
    texts = tuple(given) if isinstance(given, list) else (given,)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where} must be a string or a list of strings")
    return texts


class _Builder:
    """Converts formats to expressions. A part that needs a name becomes a rule or a grammar."""

    def __init__(self, schema, lark, literal):
        self._schema, self._lark, self._parts = schema, lark, literal
        self.rules: list[str] = []
        self.grammars: list[dict] = []

    def expression(self, node: Any, where: str, ends: tuple[str, ...], is_last: bool) -> str:
        """An expression for a format followed by one of the ``ends``; ``is_last``: nothing else follows."""
        node = _checked(node, where)
        match node["type"]:
            case "any_text":
                return self._free(where, ends, is_last)
            case "sequence":
                *before, last = node["elements"]
                parts = [self.expression(each, f"{where}.elements[{i}]", (), False) for i, each in enumerate(before)]
                parts.append(self.expression(last, f"{where}.elements[{len(before)}]", ends, is_last))
                return " ".join(parts)
            case "or":
                elements = enumerate(node["elements"])
                parts = [self.expression(each, f"{where}.elements[{i}]", ends, is_last) for i, each in elements]
                return f"({' | '.join(parts)})"
            case "tag":
                return self._tag(node, where, ends, is_last)
            case "triggered_tags":
                return self._triggered_tags(node, where, ends, is_last)
        return self._ended(self._closed(node, where), ends)

    def _closed(self, node: dict, where: str) -> str:
        """An expression for a format that says itself where it ends."""
        match node["type"]:
            case "const_string":
                return self._quoted(node["value"])
            case "literal":
                return self._quoted(node["text"])
            case "json_schema":
                return self._rule(self._schema(node["json_schema"]))
            case "regex":
                source = json.loads(LLMatcher.grammar_from_regex(node["pattern"]))["grammars"][0]["lark_grammar"]
                return self._other_grammar(source)
            case "grammar":
                return self._other_grammar(self._lark(node["grammar"]))
            case "optional":
                return f"({self.expression(node['content'], f'{where}.content', (), False)})?"
        # tags_with_separator
        one = self._rule(" | ".join(self._tag(tag, place, (), False) for tag, place in self._tags(node, where)))
        several = one if node.get("stop_after_first") else f"{one} ({self._quoted(node['separator'])} {one})*"
        return several if node.get("at_least_one") else f"({several})?"

    def _quoted(self, text: str) -> str:
        return " ".join(self._parts(text))

    def _ended(self, expression: str, ends: tuple[str, ...]) -> str:
        closing = [self._quoted(end) for end in ends if end]
        if not closing:
            return expression
        optional = "?" if "" in ends else ""
        return f"{expression} ({' | '.join(closing)}){optional}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _other_grammar(self, source: str) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": source})
        return f"@{name}"

    def _free(self, where: str, ends: tuple[str, ...], is_last: bool) -> str:
        """Any text up to one of the ``ends``, or to the end of the text."""
        if not ends or "" in ends:
            if not is_last or any(ends):
                raise InputError(f"{where}: free text needs a tag's end after it, or must be the last")
            return self._rule(_TEXT)
        return f"({' | '.join(self._up_to(end) for end in ends)})"

    def _up_to(self, text: str) -> str:
        """Free text up to and including the first ``text``."""
        parts = self._parts(text)
        if parts[0].startswith("<["):
            # Free text has no special tokens.
            return f"{self._rule(_TEXT)} {' '.join(parts)}"
        if len(parts) > 1:
            raise InputError(f"{text!r} has a special token after other text: this cannot end free text")
        return self._rule(_TEXT, f"[suffix={parts[0]}]")

    def _tag(self, node, where, ends, is_last) -> str:
        return f"{self._quoted(node['begin'])} {self._after_begin(node, where, ends, is_last)}"

    def _after_begin(self, node, where, ends, is_last) -> str:
        """A tag without its beginning."""
        tag_ends = _texts(node["end"], f"{where}.end")
        content = self.expression(node["content"], f"{where}.content", tag_ends, is_last and not ends)
        return self._ended(content, ends)

    def _tags(self, node, where) -> list[tuple[dict, str]]:
        """The tags of a format, with their paths for errors."""
        places = [f"{where}.tags[{i}]" if where else f"structures[{i}]" for i in range(len(node["tags"]))]
        return [(_checked(tag, place, "tag"), place) for tag, place in zip(node["tags"], places, strict=True)]

    def _triggered_tags(self, node, where, ends, is_last) -> str:
        triggers = _texts(node["triggers"], f"{where}.triggers")
        if "" in triggers:
            raise InputError(f"{where}.triggers has an empty one")
        stops = bool(node.get("stop_after_first"))
        rests: dict[str, list[str]] = {}
        at_once = []
        for tag, place in self._tags(node, where):
            matching = [t for t in triggers if tag["begin"].startswith(t)]
            if not matching:
                raise InputError(f"{place}.begin is {tag['begin']!r}: it must begin with one of the triggers")
            shortest = min(matching, key=len)
            # Only the last format may be free text without an end.
            last = is_last and stops and not ends
            content = self._after_begin(tag, place, (), last)
            rests.setdefault(shortest, []).append(f"{self._quoted(tag['begin'].removeprefix(shortest))} {content}")
            at_once.append(f"{self._quoted(tag['begin'])} {content}")
        alternatives = [f"{self._up_to(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items()]
        later, first = f"({' | '.join(alternatives)})", f"({' | '.join(at_once)})"
        if stops:
            one = self._ended(first if node.get("at_least_one") else later, ends)
            return one if node.get("at_least_one") else f"({one} | {self._free(where, ends, is_last)})"
        more = f"{later}* {self._free(where, ends, is_last)}"
        return f"{first} {more}" if node.get("at_least_one") else more
