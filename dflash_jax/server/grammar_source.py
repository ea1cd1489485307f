"""The forms of texts in llguidance's notation.

It runs in the grammar's own process (`grammar_worker`), since a form from outside may be arbitrarily deep, long
and ambiguous.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from dflash_jax.server.structural_tag import structural_tag_grammar
from dflash_jax.server.tool_values import as_text, kinds_of, parameters_of
from dflash_jax.server.tools import END, INPUT, START

# Whitespace between two tokens of JSON. It is bounded because small models tend to write endless line breaks.
WHITESPACE = r"[ \t\n\r]{0,64}"
# Parameters of a call that may come in any order.
MOST_BITS = 64
OPEN_OBJECTS = "further properties of objects are let in"
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.S)
# Keywords whose schemas describe the same value.
_COMBINING = ("allOf", "anyOf", "oneOf")
# Keywords with schemas of other values: one schema, a list, an object of schemas.
_ONE = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties", "contains", "propertyNames")
_LISTS = ("items", "prefixItems")
_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class Notation:
    """How parts of forms are written for llguidance.

    Attributes:
        literal: Writes a text in Lark: strings, and added tokens that it has as "<[id]>".
        named: Writes the names of tokens in Lark as llguidance knows them.
        blanks: As of a `Form`.
    """

    literal: Callable[[str], list[str]]
    named: Callable[[str], str]
    blanks: str | None = None

    def lark(self, grammar: str) -> str:
        """A grammar of either notation in Lark."""
        if "::=" not in grammar:
            return self.named(grammar)
        # The converter drops the zeros of escapes.
        return gbnf_to_lark(_ESCAPE.sub(_character, grammar))

    def json(self, schema: Any) -> str:
        """The schema as JSON for llguidance, which warns of what it cannot enforce. Blanks are bounded."""
        if schema is True:
            schema = {}
        if isinstance(schema, dict):
            given = schema.get("x-guidance")
            options = given if isinstance(given, dict) else {}
            pattern = WHITESPACE if self.blanks is None else self.blanks
            blanks = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
            schema = schema | {"x-guidance": blanks | options | {"lenient": True}}
        return json.dumps(schema)


def _character(escape: re.Match) -> str:
    """An escaped character outside of ASCII as itself; other escapes stay."""
    code = int(escape[1], 16) if escape[1] else 0
    return chr(code) if code > 0x7F and not 0xD800 <= code < 0xE000 else escape[0]


def sources(kind: str, value: Any, notation: Notation) -> Iterator[tuple[str, list[str]]]:
    """Yields (grammar, what it does not enforce), in the order in which to try them.

    Args:
        kind: Of a `Form`.
        value: Of a `Form`, parsed.
        notation: How its parts are written.
    """
    build = {"schema": _schema, "calls": _calls, "inputs": _inputs, "structural_tag": _tags}.get(kind)
    if build is not None:
        for close, notes in ((closed, []), (_unchanged, [OPEN_OBJECTS])):
            yield build(notation, value, close), notes
    elif kind == "json":
        yield _schema(notation, {"type": "object"}, _unchanged), []
    elif kind == "regex":
        yield LLMatcher.grammar_from_regex(value), []
    elif kind == "choice":
        yield LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in value)), []
    else:
        yield LLMatcher.grammar_from_lark(notation.lark(value)), []


def _unchanged(schema: Any) -> Any:
    return schema


def _schema(notation: Notation, value: Any, close) -> str:
    return LLMatcher.grammar_from_json_schema(notation.json(close(value)))


def _tags(notation: Notation, value: dict, close) -> str:
    def schema(value: Any) -> str:
        return f"%json {notation.json(close(value))}"

    return structural_tag_grammar(value, schema, notation.lark, notation.literal)


def _calls(notation: Notation, value: dict, close) -> str:
    """The grammar of tool calls, with whitespace as Qwen writes it.

    Args:
        notation: As of `sources`.
        value: ``tools`` (OpenAI's function objects), ``most`` (most calls), ``syntax`` (as `Serving.call_syntax`),
            ``optional`` (whether text around calls, and no call, are allowed), ``answer`` (the kind and value of the
            form, "schema" or "json", that a text without calls has; None for calls in any case). A custom tool has its
            input's ``grammar``: its syntax, "lark" or "regex", and definition.
        close: Transforms each tool's schema.
    """
    rules, grammars, syntax = [], [], value["syntax"]
    for i, tool in enumerate(value["tools"]):
        schema, grammar = close({"type": "object"} | (tool.get("parameters") or {})), tool.get("grammar")
        if syntax == "xml":
            rules += _xml_call(notation, f"call_{i}", tool["name"], schema, f"@input_{i}" if grammar else None)
            if grammar:
                grammars.append(_input(notation, grammar) | {"name": f"input_{i}"})
        else:
            if grammar:
                schema |= {"properties": {INPUT: {"type": "string", "pattern": f"^(?:{grammar['definition']})$"}}}
            rules += [f'call_{i}: {json.dumps(_head(tool["name"], syntax))} call_{i}_json "}}"']
            rules += [f"call_{i}_json: %json {notation.json(schema)}"]
    start = _around(notation, value, " | ".join(f"call_{i}" for i in range(len(value["tools"]))))
    if answer := value.get("answer"):
        schema = {"type": "object"} if answer["kind"] == "json" else close(answer["value"])
        start[0] += " | answer"
        rules.append(f"answer: %json {notation.json(schema)}")
    main = {"name": "calls", "lark_grammar": "\n".join([*start, *rules])}
    return json.dumps({"grammars": [main, *grammars]})


def _around(notation: Notation, value: dict, call: str) -> list[str]:
    """The rules of what is around calls; ``call`` is any one."""
    is_bare, most = value["syntax"] == "bare", value["most"]
    if value.get("in_text"):
        # The matcher begins where a call does, and ends with the input.
        return [f"start: ({call}) REST", "REST: /(?s:.*)/"]
    start, end = (" ".join(notation.literal(tag)) for tag in (f"{START}\n", f"\n{END}"))
    one = f"one: {call}" if is_bare else f"one: {start} ({call}) {end}"
    between = json.dumps("; " if is_bare else "\n")
    calls = f"one ({between} one){{0,{most - 1}}}" if most > 1 else "one"
    if value.get("optional") and is_bare:
        return [f"start: TEXT | {calls}", one, r"TEXT: /(?s:[^{].*)/"]
    if value.get("optional"):
        text = f"TEXT: /(?s:.+)/ & ~/(?s:.*){START}(?s:.*)/"
        return [f"start: TEXT? (one TEXT?){{0,{most}}}", one, text]
    return [f"start: {calls}", one]


def _inputs(notation: Notation, value: dict, close) -> str:
    """The grammar of a call of any of the tools, wherever it is in a text."""
    return _calls(notation, value | {"most": 1, "in_text": True}, close)


def input_source(notation: Notation, grammar: dict) -> str:
    """The grammar of a custom tool's input alone."""
    return json.dumps({"grammars": [_input(notation, grammar)]})


def openings(kind: str, value: Any) -> list[str]:
    """What the calls begin with that have the grammars of a form of the kind "inputs"; none for other kinds."""
    return [_head(tool["name"], value["syntax"]) for tool in value["tools"]] if kind == "inputs" else []


def _head(name: str, syntax: str) -> str:
    """What a call of a tool begins with."""
    key = "parameters" if syntax == "bare" else "arguments"
    return f"<function={name}>\n" if syntax == "xml" else f'{{"name": {json.dumps(name)}, "{key}": '


def _input(notation: Notation, grammar: dict) -> dict:
    """The grammar of a custom tool's input."""
    if grammar["syntax"] == "regex":
        return json.loads(LLMatcher.grammar_from_regex(grammar["definition"]))["grammars"][0]
    return {"lark_grammar": notation.lark(grammar["definition"])}


def _xml_call(notation: Notation, rule: str, name: str, schema: dict, grammar: str | None = None) -> list[str]:
    """The rules of one call. Parameters are in any order, the required ones all there; of many, in the schema's order.

    ``grammar``: names the grammar of the one parameter of a custom tool.
    """
    (properties, required), parts, rules, end = parameters_of(schema), [], [], "\n</parameter>\n"
    for j, (key, parameter) in enumerate(properties.items()):
        kinds, value = kinds_of(parameter, schema), f"{rule}_{j}"
        begin, closing = json.dumps(f"<parameter={key}>\n"), json.dumps(end)
        if grammar is not None:
            rules.append(f"{value}: {grammar}")
        elif kinds.has_text:
            # Free text reaches to the end of the parameter.
            rules.append(f"{value}[suffix={closing}]: /(?s:.*)/")
            closing = ""
        else:
            choices = [json.dumps(as_text(choice)) for choice in kinds.values]
            if kinds.types or not choices:
                shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                rules.append(f"{value}_json: %json {notation.json(shared | parameter)}")
                choices.append(f"{value}_json")
            rules.append(f"{value}: {' | '.join(choices)}")
        parts.append((key in required, f"{begin} {value} {closing}"))
    opening, ending = json.dumps(_head(name, "xml")), json.dumps("</function>")
    if not parts:
        return [f"{rule}: {opening} {ending}"]
    if len(parts) > MOST_BITS:
        inside = " ".join(part if is_required else f"({part})?" for is_required, part in parts)
        return [f"{rule}: {opening} {inside} {ending}", *rules]
    # A bit for each parameter that a call has so far, the required ones first.
    parts.sort(key=lambda part: not part[0])
    count = sum(is_required for is_required, _ in parts)
    choices = ['""' + (f" %if is_ones([0:{count}])" if count else "")]
    choices += [f"{part} {rule}_rest::set_bit({k}) %if bit_clear({k})" for k, (_, part) in enumerate(parts)]
    return [f"{rule}: {opening} {rule}_rest::0 {ending}", f"{rule}_rest::_: {' | '.join(choices)}", *rules]


def closed(schema: Any) -> Any:
    """``schema`` with ``additionalProperties: false`` wherever properties are listed and nothing opens the object.

    JSON Schema itself allows further properties. For structured output vLLM, SGLang and OpenAI do not, because a model
    would invent properties.

    An object with several schemas (``allOf``, ``anyOf``, ``oneOf``, a ``$ref`` beside properties) may have the
    properties that any of them names: each schema is closed over all of these names.
    """
    return _Closer(schema).close(schema)


def _is_open(schema: dict) -> bool:
    """Whether a schema allows properties that it does not list."""
    opened = (schema.get("additionalProperties"), schema.get("unevaluatedProperties"))
    return any(each not in (None, False) for each in opened) or bool(schema.get("patternProperties"))


class _Closer:
    def __init__(self, root: Any):
        self._root = root

    def close(self, schema: Any, names: frozenset[str] = frozenset(), refs: frozenset[str] = frozenset()) -> Any:
        """Closes a schema.

        Args:
            schema: The schema.
            names: Properties that other schemas of the same object name.
            refs: References that were replaced by their targets on the way here.
        """
        if not isinstance(schema, dict):
            return schema
        result = self._nested(schema, refs)
        described = list(self._descriptions(schema, frozenset()))
        if any(map(_is_open, described)):
            return result
        properties = [each["properties"] for each in described if isinstance(each.get("properties"), dict)]
        named = frozenset().union(*properties)
        target, inside = self._target(schema, refs)
        if target is not None and (names - named or "properties" in schema):
            # The reference's target is closed over its own names only: the copy is closed over all names.
            del result["$ref"]
            result["allOf"] = [target, *schema.get("allOf", [])]
            refs = inside
        names |= named
        for key in _COMBINING:
            if isinstance(result.get(key), list):
                result[key] = [self.close(each, names, refs) for each in result[key]]
        if isinstance(schema.get("properties"), dict):
            result["properties"] |= {name: True for name in sorted(names) if name not in schema["properties"]}
            result["additionalProperties"] = False
        return result

    def _nested(self, schema: dict, refs: frozenset[str]) -> dict:
        """A copy whose schemas of other values are closed."""
        result = dict(schema)
        for key in _ONE:
            if isinstance(schema.get(key), dict):
                result[key] = self.close(schema[key], refs=refs)
        for key in _LISTS:
            if isinstance(schema.get(key), list):
                result[key] = [self.close(each, refs=refs) for each in schema[key]]
        for key in _OBJECTS:
            if isinstance(schema.get(key), dict):
                result[key] = {name: self.close(each, refs=refs) for name, each in schema[key].items()}
        return result

    def _descriptions(self, schema: Any, refs: frozenset[str]) -> Iterator[dict]:
        """Yields all schemas of the value that ``schema`` describes."""
        if not isinstance(schema, dict):
            return
        yield schema
        target, refs = self._target(schema, refs)
        yield from self._descriptions(target, refs)
        for key in _COMBINING:
            for each in schema[key] if isinstance(schema.get(key), list) else ():
                yield from self._descriptions(each, refs)

    def _target(self, schema: dict, refs: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """Resolves a local reference.

        Returns:
            The target, None where there is no such reference or it was followed before; and the references followed.
        """
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#/") or ref in refs:
            return None, refs
        target = self._root
        for part in ref[2:].split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        return target, refs | {ref}
