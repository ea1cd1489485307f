"""Tool calls in text: the right result of each form, good and broken, however the text is divided."""

import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.frontend.reasoning import ReasoningSplitter
from dflash_jax.server.answer_splitter import AnswerSplitter, call_at_end
from dflash_jax.server.conversation import Conversation
from dflash_jax.server.errors import dumped
from dflash_jax.server.grammar_source import Notation, sources
from dflash_jax.server.messages import _object
from dflash_jax.server.tool_values import MOST_VALUES, Kinds, kinds_of, parameters_of, structure, value_of
from dflash_jax.server.tools import (
    FUNCTION_END,
    LONGEST_HEAD,
    ToolParser,
    joined,
)
from tests.server.conftest import strict

STRING, NULL, INTEGER, OBJECT = ({"type": name} for name in ("string", "null", "integer", "object"))
SCHEMAS = {
    "f": {"properties": {"x": INTEGER, "s": STRING, "l": {"type": "array"}, "o": {"anyOf": [STRING, NULL]}}},
    "g": {"properties": {}},
    "h": {},
}


def pieces(text: str, cuts) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def parsed(text: str, cuts=(), schemas=SCHEMAS, is_cut: bool = False, **options) -> tuple[str, list[tuple[str, str]]]:
    """(content, (name, arguments) of each call)."""
    parser, content, calls = ToolParser(schemas, **options), "", []
    for part in [*(parser.push(piece) for piece in pieces(text, cuts)), parser.finish(is_cut)]:
        content += part.content
        calls += part.calls
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in joined(calls)]
    # The first piece of each call, and no other, has its id and name.
    assert [call.index for call in calls if call.id is not None] == list(range(len(found)))
    return content, found


def tagged(*parameters: tuple[str, object], name: str = "f") -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def as_json(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


X = ("x", 1)
ONE = ("f", '{"x": 1}')
# Texts, their content and their calls.
CASES = {
    # XML.
    tagged(X, ("s", "1\n2")): ("", [("f", '{"x": 1, "s": "1\\n2"}')]),
    "So:\n" + tagged(name="g"): ("So:", [("g", "{}")]),
    tagged(("l", "[1, {}]")) + "\n" + tagged(name="g"): ("", [("f", '{"l": [1, {}]}'), ("g", "{}")]),
    tagged(X).replace("\n", "\r\n"): ("", [ONE]),
    tagged(("s", "  a ")): ("", [("f", '{"s": "  a "}')]),
    tagged(("s", "")): ("", [("f", '{"s": ""}')]),
    tagged(("s", "\na\n")): ("", [("f", '{"s": "\\na\\n"}')]),
    # Without a tag of its own, for a tool.
    "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>": ("", [ONE]),
    "<function=g>\n</function> Done.": (" Done.", [("g", "{}")]),
    "<function=g>": ("", [("g", "{}")]),
    "<function=k>\n<parameter=x>\n1\n</parameter>": ("<function=k>\n<parameter=x>\n1\n</parameter>", []),
    "Use <function=name> please, or <function=f> instead.": (
        "Use <function=name> please, or <function=f> instead.",
        [],
    ),
    # Tags are missing.
    "<tool_call>\n<function=f>\n<parameter=x>\n1": ("", [ONE]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</para": ("", [ONE]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n": ("", [ONE]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>": ("", [ONE]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>": ("", [ONE]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>": (
        "",
        [("f", '{"x": 1, "s": "a"}')],
    ),
    tagged(X).replace("</tool_call>", "") + "\nDone.": ("Done.", [ONE]),
    tagged(("s", "a")).replace("</function>\n</tool_call>", "") + tagged(name="g"): (
        "",
        [("f", '{"s": "a"}'), ("g", "{}")],
    ),
    tagged(("s", "a")).replace("</parameter>", "").replace("\n</tool_call>", "") + tagged(name="g"): (
        "",
        [("f", '{"s": "a\\n"}'), ("g", "{}")],
    ),
    # Several calls, and text around them.
    "<tool_call>\n<function=g>\n</function>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>": (
        "",
        [("g", "{}"), ONE],
    ),
    "A.\n\n" + tagged(X) + "\n\nB.\n" + tagged(name="g") + "\n": ("A.B.", [ONE, ("g", "{}")]),
    # Tags that no one needs, or that are misspelt.
    "<tool_call></tool_call>": ("", []),
    "<tool_call>\n\n</tool_call>\nDone.": ("\nDone.", []),
    "<tool_call>\n<parameter=x>\n1\n</parameter>\n</tool_call>": ("", [ONE]),
    "<tool_call>\n<parameter=zz>\n1\n</parameter>\n</tool_call>": (
        "<tool_call>\n<parameter=zz>\n1\n</parameter>\n</tool_call>",
        [],
    ),
    tagged(X).replace("</function>", "</function>\n</function>\n</function_invocation>"): ("", [ONE]),
    tagged(X, ("s", "a")).replace("</parameter>", "</parameter>\n</parameter>"): ("", [("f", '{"x": 1, "s": "a"}')]),
    tagged(("s", "a")).replace("</parameter>", "</parameter1>"): ("", [("f", '{"s": "a"}')]),
    tagged(("s", "a")).replace("</parameter>", "</parameter/>"): ("", [("f", '{"s": "a"}')]),
    tagged(("s", "a </parameter1> b")): ("", [("f", '{"s": "a </parameter1> b"}')]),
    tagged(("s", "<parameter>a</parameter>")): ("", [("f", '{"s": "<parameter>a</parameter>"}')]),
    tagged(("s", "a")).replace("\n</parameter>", "</parameter>"): ("", [("f", '{"s": "a"}')]),
    # Names that are known, and more.
    tagged(X, name='f x="1"'): ("", [ONE]),
    tagged(X, name='"f"'): ("", [ONE]),
    tagged(X, name="k x"): ("", [("k x", '{"x": "1"}')]),
    tagged(("x=1", "2")): ("", [("f", '{"x": 2}')]),
    '<tool_call>\n<function=f>\n{"x": 1}\n</function>\n</tool_call>': ("", [ONE]),
    "<tool_call>\n<function=f>\n{'x': 1}\n": ("", [ONE]),
    "<tool_call>\n<function=f>\n{x}\n</function>\n</tool_call>": ("", [("f", '{"_raw": "{x}"}')]),
    # Nothing is a text, and no number.
    tagged(("x", ""), ("s", "a")): ("", [("f", '{"s": "a"}')]),
    tagged(("x", " \n")): ("", [("f", "{}")]),
    # A text is as it was written.
    tagged(("s", '{"a": "\\(&amp;"}')): ("", [("f", '{"s": "{\\"a\\": \\"\\\\(&amp;\\"}"}')]),
    # Tags inside a value.
    tagged(("s", "End </parameter> of")): ("", [("f", '{"s": "End </parameter> of"}')]),
    tagged(("s", "End </function> of")): ("", [("f", '{"s": "End </function> of"}')]),
    tagged(("s", "a </tool_call> b <tool_call> c")): ("", [("f", '{"s": "a </tool_call> b <tool_call> c"}')]),
    tagged(("s", "a\n<parameter=other>\nb")): ("", [("f", '{"s": "a\\n<parameter=other>\\nb"}')]),
    # Tags in prose.
    "The tag <tool_call> is used.": ("The tag <tool_call> is used.", []),
    "<tool_call>\nwhat</tool_call>": ("<tool_call>\nwhat</tool_call>", []),
    "Twice: <tool_call><tool_call>" + tagged(name="g"): ("Twice: <tool_call><tool_call>", [("g", "{}")]),
    # A thought that a call has ended is not closed again.
    tagged(name="g") + "\n</think>\n\nDone.": ("Done.", [("g", "{}")]),
    # The last of several values counts.
    tagged(X, ("x", 2)): ("", [("f", '{"x": 1}')]),
    # JSON.
    as_json('{"x": 1, "s": "a</tool_call>}{"}'): ("", [("f", '{"x": 1, "s": "a</tool_call>}{"}')]),
    "Well.\n" + as_json("{}") + "\n" + as_json('{"y": [1]}').replace('"f"', '"g"'): (
        "Well.",
        [("f", "{}"), ("g", '{"y": [1]}')],
    ),
    '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>': ("", [ONE]),
    '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}</tool_call>': ("", [ONE]),
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}, "id": 7}\n{"name": "g", "arguments": {}}\n</tool_call>': (
        "",
        [ONE, ("g", "{}")],
    ),
    "<tool_call>\nno json\n</tool_call> after": ("<tool_call>\nno json\n</tool_call> after", []),
    '<tool_call>\n{"x": 1}\n</tool_call>': ('<tool_call>\n{"x": 1}\n</tool_call>', []),
    '<tool_call>\n{"name": "a\\x", "arguments": {}}\n</tool_call>': (
        '<tool_call>\n{"name": "a\\x", "arguments": {}}\n</tool_call>',
        [],
    ),
    '<tool_call>\n{"name"': ('<tool_call>\n{"name"', []),
    as_json('{"x": [1, }'): ("", [("f", '{"x": "[1, }"}')]),
    as_json('{"x": 1').replace("}\n", "\n"): ("", [ONE]),
    as_json("{'x': True, 's': None}"): ("", [("f", '{"x": true, "s": null}')]),
    as_json('{"s": "a\tb\\q"}'): ("", [("f", '{"s": "a\\tb\\\\q"}')]),
    as_json('{"s": {what}}'): ("", [("f", '{"s": "{what}"}')]),
    as_json("null"): ("", [("f", "{}")]),
    as_json('"{\\"x\\": 1}"') + "\n": ("", [ONE]),
    as_json('"<x>1</x>"'): ("", [("f", '{"_raw": "<x>1</x>"}')]),
    as_json("1").replace("}\n", "}\n</parameter>\n</function>\n"): ("", [("f", '{"_raw": 1}')]),
    '<tool_call>\n{"name": "f", "arguments": {"x": "cut of': ("", [("f", '{"x": "cut of"}')]),
    "a < b <tool b": ("a < b <tool b", []),
    "ends\n\n": ("ends\n\n", []),
}
# Of texts without tags.
BARE = {
    '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}': ("", [ONE, ("g", "{}")]),
    '<|python_tag|>{"name": "f", "parameters": {"x": 1}}': ("", [ONE]),
    'No {"name": "f", "parameters": {}}': ('No {"name": "f", "parameters": {}}', []),
    '{"a": 1} is an object.\n': ('{"a": 1} is an object.\n', []),
}
CUTS = st.lists(st.integers(0, 200), max_size=12)


@pytest.mark.parametrize("text", CASES)
def test_a_text_has_its_calls(text):
    assert parsed(text) == parsed(text, range(len(text))) == CASES[text]


@pytest.mark.parametrize("text", BARE)
def test_calls_without_tags(text):
    assert parsed(text, is_bare=True) == parsed(text, range(len(text)), is_bare=True) == BARE[text]


@settings(max_examples=200, derandomize=True)
@given(st.sampled_from(sorted(CASES)), CUTS)
def test_where_a_good_text_is_cut_does_not_matter(text, cuts):
    assert parsed(text, cuts) == CASES[text]


PARTS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "\r\n",
        "<",
        "{",
        "}",
        ":",
        ",",
        ">",
        '"',
        "\\",
        "\\u12",
        "</",
        "</par",
    ),
    *('"name": "f"', ', "arguments": ', '{"name": "f", "arguments": {', '"x": ', '"s": "a\\n', '"s"', '12 "x"'),
    *("text", '{"a": 1}', "[1, 2]", "null", "nul", "True", "'a'", "None", "NaN", "1e999", "</think>", "tool"),
    *("<function=f>", "<function=g>", "<function=zz>", "<function=", "</function>", "</parameter>", "<parameter="),
    *("<parameter=x>", "<parameter=s>", "<parameter=o>", "<parameter=l>", "\n<parameter=x>\n"),
)


def single(members: list[tuple[str, object]]) -> dict:
    names = [name for name, _ in members]
    assert len(names) == len(set(names)), names
    return dict(members)


def check_divisions(count: int, seed: int) -> None:
    """The sum of a stream is the whole answer, and arguments are JSON, for random texts of tags and values."""
    rng, calls = random.Random(seed), 0
    for _ in range(count):
        text = "".join(rng.choice(PARTS) for _ in range(rng.randint(1, 16)))
        around = rng.choice(["{}", "{}", tagged(("s", "{}")), as_json("{{{}}}"), "<tool_call>\n<function=f>\n{}"])
        text = around.replace("{{", "{").replace("}}", "}").replace("{}", text) if "{}" in around else text
        options = {name: rng.random() < 0.2 for name in ("is_cut", "is_bare", "is_forced", "only_at_start")}
        whole = parsed(text, **options)
        cuts = range(len(text)) if rng.random() < 0.3 else [rng.randint(0, len(text)) for _ in range(rng.randint(1, 8))]
        assert parsed(text, cuts, **options) == whole, (text, list(cuts), options)
        for _, arguments in whole[1]:
            strict(arguments)
            json.loads(arguments, object_pairs_hook=single)
        calls += len(whole[1])
    assert calls > count / 4


TWICE = [
    (tagged(("x", 1), ("s", "a"), ("x", 2), ("s", "b"), ("x", 3)), '{"x": 1, "s": "a"}'),
    (tagged(("s", "a"), ("s", "b <parameter=x>")), '{"s": "a"}'),
    (as_json('{"x": 1, "s": "a", "x": 2, "o": {}, "s": "b"'), '{"x": 1, "s": "a", "o": {}}'),
    ("<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=s>\nb", '{"s": "a"}'),
]


@pytest.mark.parametrize(("text", "right"), TWICE)
def test_an_argument_that_comes_twice_is_the_first(text, right):
    """A stream has passed it on."""
    assert parsed(text) == parsed(text, range(len(text))) == ("", [("f", right)])


ROOTS = [
    {"$ref": "#/$defs/Root", "$defs": {"Root": {"type": "object", "properties": {"n": {"type": "integer"}}}}},
    {"allOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"k": {"type": "boolean"}}}]},
    {"anyOf": [{"properties": {"n": {"type": "integer"}}}, {"properties": {"n": {"type": "null"}}}]},
    {"allOf": [{"$ref": "#"}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"properties": {"n": {"type": "integer"}}}}},
]


@pytest.mark.parametrize("schema", ROOTS)
def test_parameters_have_the_types_of_their_roots_reference_and_parts(schema):
    assert parsed(tagged(("n", 7)), schemas={"f": schema}) == ("", [("f", '{"n": 7}')])
    notation = Notation(lambda text: [json.dumps(text)], str)
    tool = {"name": "f", "parameters": schema}
    (grammar, _), *_ = sources("calls", {"tools": [tool], "most": 1, "syntax": "xml"}, notation)
    assert "<parameter=n>" in json.loads(grammar)["grammars"][0]["lark_grammar"]


def test_required_parameters_are_those_of_what_is_sure():
    union = {"anyOf": [{"properties": {"a": {}}, "required": ["a"]}]}
    both = {"allOf": [{"properties": {"b": {}}, "required": ["b"]}, union], "required": ["c"]}
    assert parameters_of(both) == ({"b": {}, "a": {}}, ["c", "b"])
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(30)}
    assert parameters_of({"$ref": "#/$defs/d0", "$defs": doubling}) == ({}, [])


BLANKS = ["<tool_call>", "<tool_call>\n<function=f>", "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>", ""]
BLANKS += [tagged(("x", 1)), '<tool_call>\n{"name": "f", "arguments": {', "a", "<function=f>"]


@pytest.mark.parametrize("opening", BLANKS)
def test_blanks_cost_as_much_as_they_are_long(opening):
    """A stream of a hundred thousand pieces, before the thought, in it and in what follows it."""
    for make in (lambda: ToolParser(SCHEMAS), lambda: AnswerSplitter(True, SCHEMAS), lambda: ReasoningSplitter(False)):
        parser, began = make(), time.process_time()
        parser.push(opening)
        for _ in range(100_000):
            parser.push("\n")
        parser.push("x")
        parser.finish()
        assert time.process_time() - began < 2


def test_a_stream_adds_up_to_the_whole_answer():
    check_divisions(3000, seed=0)


@pytest.mark.long
def test_a_hundred_thousand_streams_add_up_to_the_whole_answers():
    check_divisions(100_000, seed=1)


@settings(max_examples=100, derandomize=True)
@given(st.text(alphabet='<>tol_cal/{}"\\:,n ame=functiprs\n', max_size=80), CUTS)
def test_any_text_is_survived(text, cuts):
    assert parsed("<tool_call>" + text, cuts) == parsed("<tool_call>" + text)


@pytest.mark.parametrize(
    ("opening", "told"),
    [
        ('<tool_call>\n{"name": "write", "arguments": {"text": "', ["one ", "two ", "three"]),
        ("<tool_call>\n<function=f>\n<parameter=s>\n", ["one", " two", " three"]),
        ("<tool_call>\n<function=f>\n<parameter=o>\n", ["one", " two", " three"]),
        ("<tool_call>\n<function=h>\n<parameter=any>\n", ["one", " two", " three"]),
    ],
)
def test_texts_are_streamed_as_they_come(opening, told):
    parser = ToolParser(SCHEMAS)
    parser.push(opening)
    found = ["".join(call.arguments for call in parser.push(word).calls) for word in ("one ", "two ", "three")]
    assert "".join(found).replace(" ", "").endswith("onetwothree")
    assert all(word.strip() in piece for word, piece in zip(told, found, strict=True))


@pytest.mark.parametrize("opening", ["<function=", '{"name": "'])
def test_a_name_without_end_is_no_name(opening):
    """However long the text grows; where it is cut does not matter."""
    text = f"<tool_call>{opening}{'f' * (LONGEST_HEAD + 10)}</tool_call> and more"
    assert parsed(text) == parsed(text, range(len(text))) == (text, [])


# Texts that end early: what is shown of them where calls may be, and where there must be calls.
CUT = {
    '<tool_call>\n{"na': ("", ""),
    "<tool_": ("<tool_", ""),
    "Well. <tool_call>": ("Well. ", "Well. "),
    "Well. <tool_call>\n<functi": ("Well. ", "Well. "),
    as_json("{}")[:-4]: ("", ""),
}


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("is_forced", [False, True])
def test_the_opening_of_a_call_that_was_cut_is_no_content(text, is_forced):
    assert parsed(text, is_cut=True, is_forced=is_forced)[0] == CUT[text][is_forced]


# Values.

ROOT = {"$defs": {"text": STRING, "object": OBJECT, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]}}}
VALUES = [
    (STRING, "123", "123"),
    (STRING, "null", "null"),
    ({"type": ["string", "null"]}, "123", "123"),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "None", "None"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["string", "integer"]}, "5", "5"),
    ({"anyOf": [STRING, OBJECT]}, '{"k":1}', {"k": 1}),
    ({"oneOf": [INTEGER, OBJECT]}, '{"k":1}', {"k": 1}),
    ({"$ref": "#/$defs/text"}, "123", "123"),
    ({"$ref": "#/$defs/object"}, '{"k":1}', {"k": 1}),
    ({"$ref": "#/$defs/loop"}, "[1", "[1"),
    ({"$ref": "#/$defs/missing"}, "12", "12"),
    ({"allOf": [STRING, {"minLength": 1}]}, "123", "123"),
    ({"allOf": [{"type": ["string", "integer"]}, INTEGER]}, "5", 5),
    ({}, "12", "12"),
    ({}, '{"k":1}', {"k": 1}),
    (True, "12", "12"),
    ({"enum": ["1"]}, "1", "1"),
    ({"enum": [1, "1"]}, "1", "1"),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["", "a"]}, "", ""),
    ({"anyOf": [{"enum": ["auto"]}, INTEGER]}, "5", 5),
    ({"anyOf": [{"const": "auto"}, INTEGER]}, "auto", "auto"),
    ({"anyOf": [STRING, {"const": 5}]}, "5", "5"),
    ({"type": "integer", "enum": [1, 2]}, "1", 1),
    ({"type": ["string", "null"], "enum": ["a", None]}, "null", None),
    ({"type": "boolean", "enum": [True]}, "True", True),
    ({"anyOf": [{"type": "string", "enum": ["a"]}, {"const": "b"}]}, '"b"', "b"),
    (STRING, '"b"', '"b"'),
    ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", True),
    ({"type": "boolean"}, "yes", "yes"),
    (INTEGER, "3.0", 3),
    (INTEGER, "2026-01-15", "2026-01-15"),
    ({"type": "number"}, "1.5", 1.5),
    ({"type": "number"}, "3", 3),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e400", "1e400"),
    (INTEGER, "9" * 400, "9" * 400),
    ({"type": "array"}, "['a']", ["a"]),
    (OBJECT, "{'a': True}", {"a": True}),
    ({"type": "array"}, '[{"a": "b\nc"}]', [{"a": "b\nc"}]),
    (OBJECT, "{1, 2}", "{1, 2}"),
    (OBJECT, "{'a': open('x')}", "{'a': open('x')}"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_text_is_the_value_of_its_schema(schema, text, value):
    found = value_of(text, kinds_of(schema, ROOT))
    assert (found, type(found)) == (value, type(value))
    schemas = {"f": ROOT | {"properties": {"p": schema}}}
    for cuts in ((), range(200)):
        ((_, arguments),) = parsed(tagged(("p", text)), cuts, schemas)[1]
        assert strict(arguments) == {"p": value}


def test_references_are_resolved_in_a_time_that_their_number_bounds():
    branches = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(400)}
    assert kinds_of({"$ref": "#/$defs/d0"}, {"$defs": branches}).has_text
    wide: dict = {"d0": {"enum": list(range(60))}} | {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 30} for i in range(1, 9)
    }
    assert len(kinds_of({"$ref": "#/$defs/d8"}, {"$defs": wide}).values) == 60
    many = {f"d{i}": {"anyOf": [{"enum": [f"{i}-{j}" for j in range(900)]}] * 9} for i in range(9)}
    kinds = kinds_of({"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(9)]}, {"$defs": many})
    assert kinds.has_text
    assert len(kinds.values) <= MOST_VALUES
    nested: dict = STRING
    for _ in range(5000):
        nested = {"allOf": [nested]}
    assert kinds_of(nested).has_text


@pytest.mark.parametrize(
    "text", ["[" + "-" * 99_990 + "1]", "[" * 50_000, "[" + "1+" * 30_000 + "1]", "{" + "1:" * 9000]
)
def test_literals_that_are_none_are_text(text):
    assert structure(text) is None
    assert value_of(text, Kinds(frozenset({"array", "object"}))) == text


@pytest.mark.parametrize("schema", [schema for schema, *_ in VALUES if schema is not True])
def test_the_grammar_of_calls_reads_a_schema_as_the_parser_does(schema):
    """Where any text is a value, the grammar lets any text in; where some values are, only these."""
    tool = {"name": "f", "parameters": ROOT | {"type": "object", "properties": {"p": schema}, "required": ["p"]}}
    notation = Notation(lambda text: [json.dumps(text)], str)
    (grammar, _), *_ = sources("calls", {"tools": [tool], "most": 1, "syntax": "xml"}, notation)
    main = json.loads(grammar)["grammars"][0]["lark_grammar"]
    (rule,) = re.findall(r"^call_0_0(?:\[.*\])?: (.*)$", main, re.M)
    kinds = kinds_of(schema, ROOT)
    assert ("(?s:.*)" in rule) == kinds.has_text
    assert ("call_0_0_json" in rule) == (not kinds.has_text and bool(kinds.types))


# Numbers that JSON or a double has not.

FORMS = {
    "json": '{"name": "f", "arguments": {"x": %s}}',
    "parameters": '{"name": "f", "parameters": {"x": %s}}',
    "reordered": '{"arguments": {"x": %s}, "name": "f"}',
    "xml": "<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>",
}
WORDS = [
    *((w, w) for w in ("NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "9" * 400)),
    ("-2.5e3", -2500),
    ("1", 1),
]


def values(words) -> st.SearchStrategy[tuple[str, object]]:
    """Texts of values with these words in place of numbers, and the values."""

    def objects(inner):
        return st.dictionaries(st.sampled_from(["a", "NaN", "1e999, "]), inner, max_size=2).map(
            lambda x: (
                "{" + ", ".join(f"{json.dumps(key)}: {text}" for key, (text, _) in x.items()) + "}",
                {key: value for key, (_, value) in x.items()},
            )
        )

    def lists(inner):
        return st.lists(inner, max_size=3).map(
            lambda x: (f"[{','.join(text for text, _ in x)}]", [value for _, value in x])
        )

    return st.recursive(st.sampled_from(words), lambda inner: lists(inner) | objects(inner), max_leaves=6)


@settings(max_examples=300, derandomize=True)
@given(st.sampled_from(sorted(FORMS)), values(WORDS), st.integers(1, 9))
def test_arguments_are_json_whatever_numbers_the_model_writes(form, value, step):
    schemas = {"f": {"properties": {"x": {"type": ["number", "array", "object"]}}}}
    text = f"<tool_call>\n{FORMS[form] % value[0]}\n</tool_call>"
    ((_, arguments),) = parsed(text, range(0, len(text), step), schemas)[1]
    assert strict(arguments) == {"x": value[1]}
    # Anthropic's form.
    assert strict(dumped(_object(arguments))) == {"x": value[1]}


# Calls in thoughts.


def answered(text: str, cuts=()) -> tuple[str, str]:
    splitter = AnswerSplitter(True, SCHEMAS)
    found = [*(splitter.push(piece) for piece in pieces(text, cuts)), splitter.finish()]
    return "".join(r for r, _ in found), "".join(c for _, c in found)


THOUGHTS = {
    "Hm.\n" + tagged(X): ("Hm.", tagged(X)),
    "Hm.\n" + as_json("{}"): ("Hm.", as_json("{}")),
    "I use <tool_call> here.\n</think>\n\n" + tagged(X): ("I use <tool_call> here.", tagged(X)),
    "I use <tool_call>\n<function=> here.\n</think>\n\nYes.": ("I use <tool_call>\n<function=> here.", "Yes."),
    "Hm. <tool_call": ("Hm. <tool_call", ""),
    "Hm.</think>" + tagged(X): ("Hm.", tagged(X)),
    "a <tool_call> b <tool_call>\n<function=g>\n</function>": (
        "a <tool_call> b",
        "<tool_call>\n<function=g>\n</function>",
    ),
    # No tool, no call.
    "I write <tool_call><function=name> first.\n</think>\n\nYes.": (
        "I write <tool_call><function=name> first.",
        "Yes.",
    ),
    "<tool_call>\n<function=f> it is.\n</think>\n\nYes.": ("<tool_call>\n<function=f> it is.", "Yes."),
    "As <tool_call>{...} here.</think>Yes.": ("As <tool_call>{...} here.", "Yes."),
    'As <tool_call>{"name": "k", "arguments": {}}</tool_call>.</think>Yes.': (
        'As <tool_call>{"name": "k", "arguments": {}}</tool_call>.',
        "Yes.",
    ),
}


@pytest.mark.parametrize("text", THOUGHTS)
def test_a_call_ends_a_thought(text):
    assert answered(text) == answered(text, range(len(text))) == THOUGHTS[text]


def test_a_call_without_tags_that_a_thought_ends_with():
    call = tagged(X).replace("<tool_call>\n", "")
    later = {"Hm. " + call + "\nNo, I do not.": [], "Hm. <function=k>\n</function>": [], "Hm.": []}
    for text, names in ({"Hm. " + call: ["f"]} | later).items():
        found = joined(call_at_end(text, SCHEMAS).calls)
        assert [each["function"]["name"] for each in found] == names
    assert FUNCTION_END in call


@pytest.mark.parametrize(
    ("options", "text", "right"),
    [
        ({"call_syntax": "bare"}, '{"name": "f", "parameters": {"x": 1}}', ("", [ONE])),
        ({"call_syntax": "xml"}, as_json('{"x": 1}'), ("", [ONE])),
        ({}, '{"name": "f", "parameters": {"x": 1}}', ('{"name": "f", "parameters": {"x": 1}}', [])),
    ],
)
def test_a_conversation_reads_calls_as_the_server_says(options, text, right):
    talk = Conversation([1], "none", SCHEMAS, options.get("call_syntax", "json"))
    parser = talk.parser()
    assert parser._tools is not None
    part, last = parser._tools.push(text), parser._tools.finish()
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in joined(part.calls + last.calls)]
    assert (part.content + last.content, found) == right
