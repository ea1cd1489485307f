"""Text that arrives in any pieces is read as if it came whole."""

import json
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax import InputError, SamplingParams
from dflash_jax.frontend.reasoning import ReasoningSplitter, is_open
from dflash_jax.json_text import reworded
from dflash_jax.server.errors import JsonResponse, dumped
from dflash_jax.server.messages import _object
from dflash_jax.server.stream import frame, json_parts
from dflash_jax.server.tools import LONGEST_HEAD, ToolParser, joined
from tests.server.conftest import MESSAGES, OFF

THOUGHTS = {
    "Let me see.\nYes.\n</think>\n\nIt is 4.": (True, "Let me see.\nYes.", "It is 4."),
    "<think>\nHm.\n</think>\n\nIt is 4.": (False, "Hm.", "It is 4."),
    "It is < 4 > 3.": (False, "", "It is < 4 > 3."),
    "\n  It is 4.": (False, "", "\n  It is 4."),
    "never ends </thin": (True, "never ends </thin", ""),
    "a </think> b </think> c": (True, "a", "b </think> c"),
    "</think>\n\nAt once.": (True, "", "At once."),
    "<thin": (False, "", "<thin"),
    "": (True, "", ""),
}
JSON_CALLS = {
    '<tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "a</tool_call>}{"}}\n</tool_call>': (
        "",
        [("f", '{"x": 1, "s": "a</tool_call>}{"}')],
    ),
    'Well.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "g", '
    '"arguments": {"y": [1]}}\n</tool_call>': ("Well.", [("f", "{}"), ("g", '{"y": [1]}')]),
    '<tool_call>\n{"arguments": {"x": 1}, "name": "f"}\n</tool_call>': ("", [("f", '{"x": 1}')]),
    "<tool_call>\nno json\n</tool_call> after": ("<tool_call>\nno json\n</tool_call> after", []),
    '<tool_call>\n{"name": "f", "arguments": {"x": [1, }}\n</tool_call>': ("", [("f", '{"x": [1, }}')]),
    '<tool_call>\n{"name": "f", "arguments": {"x": "cut of': ("", [("f", '{"x": "cut of')]),
    '<tool_call>\n{"name"': ('<tool_call>\n{"name"', []),
    '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>': ("", [("f", "null")]),
    '<tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>\n': ("", [("f", '"{\\"x\\": 1}"')]),
    '<tool_call>\n{"name": "a\\x", "arguments": {}}\n</tool_call>': (
        '<tool_call>\n{"name": "a\\x", "arguments": {}}\n</tool_call>',
        [],
    ),
    "a < b <tool b": ("a < b <tool b", []),
    "ends\n\n": ("ends\n\n", []),
}
XML_CALLS = {
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n1\n2\n</parameter>\n"
    "</function>\n</tool_call>": (
        "",
        [("f", '{"x": 1, "s": "1\\n2"}')],
    ),
    "So:\n<tool_call>\n<function=g>\n</function>\n</tool_call>": ("So:", [("g", "{}")]),
    "<tool_call>\n<function=f>\n<parameter=l>\n[1, {}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=g>\n</function>\n</tool_call>": ("", [("f", '{"l": [1, {}]}'), ("g", "{}")]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>": ("", [("f", '{"x": 1}')]),
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n": ("", [("f", '{"x": 1')]),
    "<tool_call>\nwhat</tool_call>": ("<tool_call>\nwhat</tool_call>", []),
}
SCHEMAS = {"f": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}}}
# AxisSharding texts: what is shown of them where calls may be, and where there must be calls.
CUT = {
    '<tool_call>\n{"na': ("", ""),
    "<tool_": ("<tool_", ""),
    "Well. <tool_call>": ("Well. ", "Well. "),
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_': ("", ""),
}
CUTS = st.lists(st.integers(0, 200), max_size=12)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts})
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=40, derandomize=True)
@given(st.sampled_from(sorted(THOUGHTS)), CUTS)
def test_splitter_separates_reasoning_from_content_at_any_cut(text, cuts):
    started, reasoning, content = THOUGHTS[text]
    splitter = ReasoningSplitter(started)
    found = [splitter.push(piece) for piece in pieces(text, cuts)]
    found.append(splitter.finish())
    assert "".join(r for r, _ in found) == reasoning
    assert "".join(c for _, c in found) == content


@pytest.mark.parametrize("xml", [False, True], ids=["json", "xml"])
def test_tool_parser_reads_calls_in_any_pieces(xml):
    cases = XML_CALLS if xml else JSON_CALLS

    @settings(max_examples=60, derandomize=True)
    @given(st.sampled_from(sorted(cases)), CUTS)
    def check(text, cuts):
        parser, content, calls = ToolParser(xml, SCHEMAS), "", []
        for parsed in [*(parser.push(p) for p in pieces(text, cuts)), parser.finish()]:
            content += parsed.content
            calls += parsed.calls
        found = [(c["function"]["name"], c["function"]["arguments"]) for c in joined(calls)]
        assert (content, found) == cases[text]
        # The first piece of each call, and no other, has its id and name.
        assert [c.index for c in calls if c.id is not None] == list(range(len(found)))

    check()


def test_arguments_are_streamed_as_they_come():
    parser = ToolParser(False, {})
    parser.push('<tool_call>\n{"name": "write", "arguments": {"text": "')
    told = [parser.push(word).calls[0].arguments for word in ("one ", "two ", "three")]
    assert told == ["one ", "two ", "three"]


PIECES = [
    *("<tool_call>", "</tool_call>", "\n", " ", "<", "{", "}", '"name": "f"', ', "arguments": ', "null"),
    *('12 "x', '"s"', "text", '{"a": 1}', "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
    *('{"name": "f", "arguments": ', "[1, 2]", ","),
]


def parsed(text: str, cuts: list[int], xml: bool) -> tuple[str, list]:
    parser, content, calls = ToolParser(xml, {"f": {"properties": {}}}), "", []
    for part in [*(parser.push(p) for p in pieces(text, cuts)), parser.finish()]:
        content += part.content
        calls += part.calls
    return content, [call["function"] for call in joined(calls)]


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=14), CUTS, st.booleans(), st.booleans())
def test_where_a_text_is_cut_does_not_matter(parts, cuts, xml, in_call):
    """Pieces are larger where drafts are accepted: content and calls are the same, of broken calls too."""
    text = "".join(parts)
    if in_call:
        text = '\n <tool_call>\n{"name": "f", "arguments": ' + text + "\n}\n</tool_call>"
    whole = parsed(text, [], xml)
    assert parsed(text, cuts, xml) == whole
    assert parsed(text, list(range(len(text))), xml) == whole


@pytest.mark.parametrize("xml", [False, True])
def test_a_name_without_end_is_no_name(xml):
    """It is looked for in the first characters only, however long the text grows; where it is cut does not matter."""
    opening = "<function=" if xml else '{"name": "'
    text = f"<tool_call>{opening}{'f' * (LONGEST_HEAD + 10)}</tool_call> and more"
    assert parsed(text, [], xml) == parsed(text, list(range(len(text))), xml)
    assert parsed(text, [], xml) == (text, [])


@settings(max_examples=100, derandomize=True)
@given(st.text(alphabet='<>tol_cal/{}"\\:,n ame=functiprs\n', max_size=80), CUTS, st.booleans())
def test_any_text_is_survived(text, cuts, xml):
    parser = ToolParser(xml, {})
    for piece in pieces("<tool_call>" + text, cuts):
        parser.push(piece)
    parser.finish()


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("a <think> b </think> <think>", True),
        ("What is <think>?\nassistant\n", False),
    ],
)
def test_a_prompt_may_open_the_thought(prompt, found):
    assert is_open(prompt) is found


def test_values_of_xml_follow_the_schema():
    schema = {
        "f": {"properties": {"n": {"type": "number"}, "s": {"type": ["string", "null"]}, "b": {"type": "boolean"}}}
    }
    parser = ToolParser(True, schema)
    body = "".join(
        f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in {"n": "1.5", "s": "12", "b": "True", "?": "{}"}.items()
    )
    parsed = parser.push(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    (call,) = joined(parsed.calls)
    assert json.loads(call["function"]["arguments"]) == {"n": 1.5, "s": "12", "b": True, "?": {}}


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("is_forced", [False, True])
def test_the_opening_of_a_call_that_was_cut_is_no_content(text, is_forced):
    parser = ToolParser(False, SCHEMAS, is_forced)
    content = parser.push(text).content + parser.finish(is_cut=True).content
    assert content == CUT[text][is_forced]


# Numbers that JSON or a double has not.


def strict(text: str | bytes):
    """Parses JSON as the strictest parser does."""

    def refuse(word):
        raise ValueError(word)

    def number(word):
        return float(word) if isfinite(float(word)) else refuse(word)

    return json.loads(text, parse_constant=refuse, parse_float=number, parse_int=number)


FORMS = {
    "json": '{"name": "f", "arguments": %s}',
    "parameters": '{"name": "f", "parameters": %s}',
    "reordered": '{"arguments": %s, "name": "f"}',
    "xml": "<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>",
}
# What Python's parser reads, and what it does not: the latter is broken JSON, which only the streamed form repairs.
READ = [*((w, w) for w in ("NaN", "Infinity", "-Infinity", "1e999", "-1E+400", "9" * 400)), ("-2.5e3", -2500), ("1", 1)]
BROKEN = [(w, w) for w in ("nan", "+1", ".5", "01", "1_0", "-inf")]


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
@given(
    st.sampled_from(list(FORMS)).flatmap(
        lambda form: st.tuples(st.just(form), values(READ if form in ("reordered", "xml") else READ + BROKEN))
    ),
    st.sampled_from([{"type": "number"}, {"type": "integer"}, {}, {"type": "object"}, {"anyOf": [{"type": "number"}]}]),
    st.integers(1, 9),
)
def test_arguments_are_json_whatever_numbers_the_model_writes(call, schema, step):
    form, (value, expected) = call
    parser, calls = ToolParser(form == "xml", {"f": {"properties": {"x": schema}}}), []
    text = f"<tool_call>\n{FORMS[form] % value}\n</tool_call>"
    for at in range(0, len(text), step):
        calls += parser.push(text[at : at + step]).calls
    (found,) = joined(calls + parser.finish().calls)
    arguments = found["function"]["arguments"]
    expected = {"x": expected} if form == "xml" else expected
    assert strict(arguments) == expected
    if isinstance(expected, dict):
        # Anthropic's form.
        assert strict(dumped(_object(arguments))) == expected


def test_numbers_in_arguments_that_are_text_and_in_calls_that_are_cut():
    parser = ToolParser(False, SCHEMAS)
    calls = parser.push('<tool_call>\n{"arguments": "{\\"x\\": NaN}", "name": "f"}\n</tool_call>').calls
    assert strict(joined(calls)[0]["function"]["arguments"]) == {"x": "NaN"}
    parser = ToolParser(False, SCHEMAS)
    calls = parser.push('<tool_call>\n{"name": "f", "arguments": {"x": 12').calls + parser.finish().calls
    assert joined(calls)[0]["function"]["arguments"] == '{"x": 12'


def test_what_leaves_the_server_is_json():
    value = {"a": [float("nan"), -float("inf"), (1.5, float("inf"))], "\ud800": {"b": float("inf")}}
    expected = {"a": [None, None, [1.5, None]], "\ud800": {"b": None}}
    assert strict(dumped(value)) == strict(JsonResponse(value).body) == expected
    assert strict(b"".join(json_parts(value))) == expected
    assert frame(value).startswith(b"data: ")
    assert strict(frame(value)[6:]) == expected


@pytest.mark.parametrize(("thinking", "has_thought"), [(None, True), (False, False)])
def test_the_library_splits_answers_as_the_server_does(quiet, llm, thinking, has_thought):
    """Whole, as one of several, and as a stream."""
    options = {} if thinking is None else {"chat_template_kwargs": OFF}
    found = quiet.post("/v1/chat/completions", messages=MESSAGES, max_tokens=60, temperature=0, **options)
    message = found.json()["choices"][0]["message"]
    params = SamplingParams(max_tokens=60, temperature=0)
    (answer,) = llm.chat(MESSAGES, params, thinking)
    assert (answer.reasoning, answer.text) == (message["reasoning_content"], message["content"])
    assert (answer.reasoning is not None, "</think>" in answer.text) == (has_thought, False)
    assert (answer.outputs[0].reasoning, answer.outputs[0].text) == (answer.reasoning, answer.text)
    pieces = list(llm.stream_chat(MESSAGES, params, thinking))
    assert len(pieces) > 1
    assert ("".join(p.reasoning for p in pieces) or None, "".join(p.text for p in pieces)) == (
        answer.reasoning,
        answer.text,
    )
    cut = [*MESSAGES, {"role": "assistant", "content": "<think>\nSo"}]
    (rest,) = llm.chat(cut, params, continue_final_message=True)
    assert rest.reasoning is not None


def test_a_stream_is_of_one_conversation(llm):
    with pytest.raises(InputError, match="2 conversations: a stream is of one"):
        llm.stream_chat([MESSAGES, MESSAGES])


def test_numbers_in_a_string_that_is_cut_stay_text():
    assert reworded('{"a": "call 007 no') == '{"a": "call 007 no'
    assert reworded('{"a": 007, "b": "x\\" 01') == '{"a": "007", "b": "x\\" 01'
