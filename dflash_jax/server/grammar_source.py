"""Constraints in llguidance's notation.

It runs in the grammar's own process (`grammar_worker`), since a constraint from outside may be arbitrarily deep, long
and ambiguous.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from dflash_jax.server.json_schema import closed
from dflash_jax.server.structural_tag import structural_tag_grammar
from dflash_jax.server.tool_values import as_text, kinds_of
from dflash_jax.server.tools import START

# Whitespace between two tokens of JSON. It is bounded because small models tend to write endless line breaks.
WHITESPACE = r"[ \t\n\r]{0,64}"
OPEN_OBJECTS = "further properties of objects are let in"


def sources(kind: str, value: Any, literal: Callable[[str], list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yields (grammar, what it does not enforce), in the order in which to try them.

    Args:
        kind: Of a `Constraint`.
        value: Of a `Constraint`.
        literal: Writes a text in Lark, as `structural_tag` needs it.
    """
    if kind in ("schema", "calls", "structural_tag"):
        build = {"schema": _schema, "calls": _calls}.get(kind) or partial(_tags, literal)
        for close, notes in ((closed, []), (_unchanged, [OPEN_OBJECTS])):
            yield build(value, close), notes
    elif kind == "json":
        yield _schema({"type": "object"}, _unchanged), []
    elif kind == "regex":
        yield LLMatcher.grammar_from_regex(value), []
    elif kind == "choice":
        yield LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in value)), []
    else:
        yield LLMatcher.grammar_from_lark(_lark(value)), []


def _lark(grammar: str) -> str:
    return gbnf_to_lark(grammar) if "::=" in grammar else grammar


def _unchanged(schema: Any) -> Any:
    return schema


def _lenient(schema: Any) -> Any:
    """The schema with bounded whitespace, and with a warning instead of an error for what llguidance cannot enforce."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE} | options | {"lenient": True}}


def _schema(value: Any, close) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_lenient(close(value))))


def _tags(literal, value: dict, close) -> str:
    def schema(value: Any) -> str:
        return f"%json {json.dumps(_lenient(close(value)))}"

    return structural_tag_grammar(value, schema, _lark, literal)


def _calls(value: dict, close) -> str:
    return LLMatcher.grammar_from_lark(call_grammar(value, close))


def call_grammar(value: dict, close=closed) -> str:
    """A Lark grammar of tool calls, with whitespace as Qwen writes it.

    Args:
        value: ``tools`` (OpenAI's function objects), ``most`` (most calls), ``xml`` (Qwen's XML format), ``start`` and
            ``end`` (the tags around a call, in Lark), ``optional`` (whether text around calls, and no call, are
            allowed).
        close: Transforms each tool's schema.
    """
    rules, names = [], []
    for i, tool in enumerate(value["tools"]):
        schema = close(tool.get("parameters") or {"type": "object"})
        names.append(f"call_{i}")
        if value["xml"]:
            rules += _xml_call(f"call_{i}", tool["name"], schema)
        else:
            head = json.dumps(f'{{"name": {json.dumps(tool["name"])}, "arguments": ')
            arguments = f"arguments_{i}: %json {json.dumps(_lenient(schema))}"
            rules.append(f'call_{i}: {head} arguments_{i} "}}"\n{arguments}')
    calls = f'one ("\\n" one){{0,{value["most"] - 1}}}' if value["most"] > 1 else "one"
    one = f'one: {value["start"]} "\\n" ({" | ".join(names)}) "\\n" {value["end"]}'
    if value.get("optional"):
        calls = f"TEXT? (one TEXT?){{0,{value['most']}}}"
        rules.append(f"TEXT: /(?s:.+)/ & ~/(?s:.*){START}(?s:.*)/")
    return "\n".join([f"start: {calls}", one, *rules])


def _xml_call(rule: str, name: str, schema: dict) -> list[str]:
    """The rules of one call. Parameters are in the schema's order; those that are not required are optional."""
    required, parts, rules, end = schema.get("required", []), [], [], "\n</parameter>\n"
    for j, (key, parameter) in enumerate((schema.get("properties") or {}).items()):
        kinds, value = kinds_of(parameter, schema), f"{rule}_{j}"
        begin, closing = json.dumps(f"<parameter={key}>\n"), json.dumps(end)
        if kinds.values:
            rules.append(f"{value}: " + " | ".join(json.dumps(as_text(c)) for c in kinds.values))
        elif kinds.has_text:
            # Free text reaches to the end of the parameter.
            rules.append(f"{value}[suffix={closing}]: /(?s:.*)/")
            closing = ""
        else:
            shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            rules.append(f"{value}: %json {json.dumps(_lenient(shared | parameter))}")
        part = f"{begin} {value} {closing}"
        parts.append(part if key in required else f"({part})?")
    opening, ending = json.dumps(f"<function={name}>\n"), json.dumps("</function>")
    return [f"{rule}: {opening} {' '.join(parts)} {ending}", *rules]
