"""Structural tags: which texts their grammars take, and that drafts change nothing."""

import json

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.grammar import grammar_tokens
from tests.server.conftest import OFF

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
F, G = ({"begin": f"<f={n}>", "content": JSON, "end": "</f>"} for n in "fg")
CALL = {"begin": "<tool_call>\n", "content": JSON, "end": "\n</tool_call>"}
BOLD = {"begin": "<b>", "content": {"type": "any_text"}, "end": ["</b>", "\n"]}


def triggered(*tags, triggers=("<f=",), **options) -> dict:
    return {"format": {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags)} | options}


CASES = {
    "older": (
        {"structures": [{"begin": "<f=f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]},
        ["", "hi", 'x<f=f>{"a":1}</f>y', '<f=f>{"a":1}</f><f=f>{"a":2}</f>', "a < b"],
        ["<f=g>", '<f=f>{"b":1}</f>', '<f=f>{"a":1,"b":2}</f>', '<f=f>{"a":1}'],
    ),
    "triggered": (triggered(F, G), ["", "x", 'x<f=g>{"a":1}</f>', '<f=f>{"a":1}</f> <f=g>{"a":1}</f>'], ["<f=h>"]),
    "at least one": (triggered(F, at_least_one=True), ['<f=f>{"a":1}</f> and'], ["", "x", 'x<f=f>{"a":1}</f>']),
    "stop after first": (
        triggered(F, stop_after_first=True),
        ["", "x", 'x<f=f>{"a":1}</f>'],
        ['<f=f>{"a":1}</f>x', '<f=f>{"a":1}</f><f=f>{"a":1}</f>'],
    ),
    "one at once": (
        triggered(F, at_least_one=True, stop_after_first=True),
        ['<f=f>{"a":1}</f>'],
        ["", "x", '<f=f>{"a":1}</f>x'],
    ),
    "special tokens": (
        triggered(CALL, triggers=["<tool_call>"]),
        ["", "x", 'x<tool_call>\n{"a":1}\n</tool_call>y'],
        ["<tool_call>", '<tool_call>\n{"b":1}\n</tool_call>'],
    ),
    "separated": (
        {"format": {"type": "tags_with_separator", "tags": [F, G], "separator": ", "}},
        ["", '<f=f>{"a":1}</f>', '<f=f>{"a":1}</f>, <f=g>{"a":1}</f>'],
        ["x", '<f=f>{"a":1}</f>,<f=f>{"a":1}</f>', '<f=f>{"a":1}</f>, '],
    ),
    "separated, one": (
        {
            "format": {
                "type": "tags_with_separator",
                "tags": [F],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            }
        },
        ['<f=f>{"a":1}</f>'],
        ["", '<f=f>{"a":1}</f>,<f=f>{"a":1}</f>'],
    ),
    "sequence": (
        {
            "format": {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "Well: "},
                    {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]{2}/"}, {"type": "tag", **BOLD}]},
                    {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "!" | "?"'}},
                    {"type": "any_text"},
                ],
            }
        },
        ["Well: 12/", "Well: 12/? so", "Well: <b>x < y</b>!", "Well: <b>x\nrest"],
        ["Well: 1", "12/", "Well: <b>x"],
    ),
    "a tag with a special end": (
        {"format": {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}},
        ["<think>a < b\n</think>"],
        ["<think>a", "<think>a</think>b", "a"],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return grammar_tokens(tokenizer, 512, (2, 0))


@pytest.mark.parametrize("name", CASES)
def test_grammar_of_a_structural_tag_takes_good_texts_only(tokenizer, tokens, name):
    value, good, bad = CASES[name]

    def takes(text: str) -> bool:
        matcher, _ = tokens.matcher("structural_tag", value, "f")
        ids = tokenizer.encode_plain(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert [text for text in good if not takes(text)] == []
    assert [text for text in bad if takes(text)] == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "f: it must have format, or structures and triggers"),
        ({"format": {"type": "magic"}}, "f: format.type is 'magic'"),
        ({"format": []}, "f: format must be an object"),
        (triggered(F, triggers=["<x"]), r"f: format.tags\[0\].begin is '<f=f>'"),
        (triggered(F, excludes=["y"]), "f: format.excludes"),
        (triggered(F | {"content": JSON | {"style": "glm_xml"}}), r"f: format.tags\[0\].content.style is 'glm_xml'"),
        (triggered(F | {"content": {"type": "regex"}}), r"f: format.tags\[0\].content.pattern is missing"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}},
            r"f: format.elements\[0\]: free text",
        ),
        ({"structures": [{"begin": "x"}], "triggers": ["x"]}, r"f: structures\[0\] must have"),
    ],
)
def test_what_is_unknown_is_named(tokens, value, message):
    with pytest.raises(InputError, match=message):
        tokens.matcher("structural_tag", value, "f")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_structural_tag_output_does_not_depend_on_block_size(quiet, params):
    wanted = {"type": "structural_tag", **triggered(F, G, at_least_one=True)}
    body = {"max_tokens": 60, "return_token_ids": True, "chat_template_kwargs": OFF, **params}
    asked = [
        {"response_format": wanted},
        {"structured_outputs": {"structural_tag": json.dumps(wanted)}},
    ]
    found = [quiet.chat(**body, **each, block_size=n)["choices"][0] for each in asked for n in (1, 8)]
    assert len({tuple(choice["token_ids"]) for choice in found}) == 1
    assert found[0]["message"]["content"].startswith("<f=")
    sampling = {"max_new_tokens": 40, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    sampling["structural_tag"] = json.dumps(wanted)
    texts = {quiet.post("/generate", text="x", sampling_params=sampling, block_size=n).json()["text"] for n in (1, 8)}
    assert len(texts) == 1
    assert texts.pop().startswith("<f=")


@pytest.mark.parametrize("field", ["ebnf", "grammar", "guided_grammar"])
def test_grammars_by_all_names(quiet, field):
    found = quiet.chat(**{field: 'root ::= "yes" | "no"'}, max_tokens=8, chat_template_kwargs=OFF)
    assert found["choices"][0]["message"]["content"] in ("yes", "no")


def test_an_unknown_form_is_refused(quiet):
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "structural_tag"}}
    for more in ({}, {"format": {"type": "magic"}}, {"structures": [], "triggers": []}):
        body["response_format"] = {"type": "structural_tag", **more}
        found = quiet.post("/v1/chat/completions", **body)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == "response_format"
