"""Masks against the grammar walked one token at a time, with and without drafts."""

import json
import random
import sys

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
from dflash_jax.server.chat import tag_in_lark
from dflash_jax.server.grammar import grammar_tokens
from dflash_jax.server.grammar_walk import MOST_BLANKS, GrammarWalk
from dflash_jax.server.tools import END, START, ToolParser, joined

VOCAB = 512
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CASES = [Form.of("schema", SCHEMA, "f"), Form.of("regex", "[ab]{2,40}c", "f"), Form.of("json", {}, "f")]


@pytest.fixture(scope="module")
def tokens():
    return grammar_tokens(Tokenizer(TINY / "target"), VOCAB, (2, 0))


def walk(tokens, form, thought: str = "none") -> GrammarWalk:
    return GrammarWalk(tokens, tokens.matcher(form.kind, json.loads(form.value), form.field)[0], thought)


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}


def draw(tokens, form, seed: int, thought: str = "none", most: int = 60) -> list[int]:
    """A random text that the masks allow, one token after the other."""
    rng, mask, text = random.Random(seed), walk(tokens, form, thought), []
    while len(text) < most:
        token = rng.choice(sorted(allowed(mask.masks([])[0])))
        mask.take([token])
        text.append(token)
        if token in tokens.stop_ids:
            break
    return text


@pytest.mark.parametrize("form", CASES, ids=lambda c: c.kind)
def test_masks_along_drafts_are_those_of_one_token_after_the_other(tokens, form):
    for seed in range(12):
        text, rng = draw(tokens, form, seed), random.Random(seed)
        slow, fast = (walk(tokens, form) for _ in range(2))
        at = 0
        while at < len(text):
            right = text[at : at + rng.randrange(8)]
            # A wrong draft, and more behind it.
            drafts = [*right, rng.randrange(VOCAB), *right]
            found = fast.masks(drafts)
            assert all(len(mask) == tokens.mask_bytes for mask in found)
            for i, token in enumerate([*right, None]):
                assert found[i] == slow.masks([])[0]
                if token is not None:
                    slow.take([token])
            fast.take(right)
            at += len(right)
            if not right:
                fast.take([text[at]])
                slow.take([text[at]])
                at += 1


def test_what_the_masks_allow_is_json(tokens):
    found = 0
    for seed in range(20):
        text = draw(tokens, CASES[0], seed, most=200)
        if text[-1] in tokens.stop_ids:
            value = json.loads(Tokenizer(TINY / "target").decode(text[:-1]))
            assert set(value) == {"a", "b"}
            found += 1
    assert found > 5


def test_the_grammar_begins_when_the_thought_ends_also_inside_a_block(tokens):
    tokenizer, close = Tokenizer(TINY / "target"), tokens.close_ids[0]
    mask = walk(tokens, Form.of("regex", "ab", "f"), "open")
    newline, a, b = (tokenizer.encode_plain(c)[0] for c in ("\n", "a", "b"))
    drafts = [300, 301, close, newline, a, b, 2, 300]
    found = mask.masks(drafts)
    assert all(len(allowed(m)) == VOCAB for m in found[:3])
    assert allowed(found[3]) >= {newline, a}
    assert b not in allowed(found[3])
    assert b in allowed(found[5])
    assert allowed(found[6]) == {0, 2}
    # Whatever was looked at, nothing was taken.
    assert mask.masks(drafts) == found
    mask.take(drafts[:5])
    assert mask.masks([])[0] == found[5]


def test_blank_lines_behind_a_thought_end(tokens):
    """Small models repeat them. A draft of them is cut where they end."""
    mask, newline = walk(tokens, Form.of("regex", "\n?ab", "f"), "open"), tokens.blank_ids[0]
    mask.take(tokens.close_ids)
    # Where the grammar begins with one, that is it.
    right = [newline in allowed(m) for m in mask.masks([newline] * 9)]
    assert right == [True, False]
    plain = walk(tokens, Form.of("regex", "ab", "f"), "open")
    plain.take(tokens.close_ids)
    assert [newline in allowed(m) for m in plain.masks([newline] * 9)] == [True] * MOST_BLANKS + [False]
    plain.take([newline] * MOST_BLANKS)
    assert not allowed(plain.masks([])[0]) & set(tokens.blank_ids)
    with pytest.raises(InputError):
        plain.take([newline])


def test_a_thought_is_possible_but_not_needed(tokens):
    mask = walk(tokens, Form.of("regex", "ab", "f"), "possible")
    first = allowed(mask.masks([])[0])
    assert tokens.open_ids[0] in first
    assert 300 not in first
    mask.take(tokens.open_ids)
    assert len(allowed(mask.masks([])[0])) == VOCAB


@pytest.mark.parametrize("syntax", ["json", "xml", "bare"])
def test_a_demanded_call_can_be_read_again(tokens, syntax):
    tools = [
        {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
        {"name": "g", "parameters": {"type": "object", "properties": {"k": {"enum": ["p", "q"]}}}},
    ]
    for tool in tools:
        tool["parameters"]["additionalProperties"] = False
    tokenizer = Tokenizer(TINY / "target")
    schemas, whole = {t["name"]: t["parameters"] for t in tools}, 0
    for seed in range(12):
        start, end = (tag_in_lark(tokenizer, tag) for tag in (START, END))
        calls = {"syntax": syntax, "tools": tools, "most": 2, "start": start, "end": end}
        source = Form.of("calls", calls, "tools")
        text = draw(tokens, source, seed, most=300)
        if text[-1] not in tokens.stop_ids:
            continue
        parser = ToolParser(schemas, is_bare=syntax == "bare")
        parsed = [parser.push(tokenizer.decode(text)), parser.finish()]
        assert "".join(p.content for p in parsed).strip() == ""
        for call in joined([c for p in parsed for c in p.calls]):
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "f":
                assert isinstance(arguments["n"], int)
            else:
                assert arguments in ({}, {"k": "p"}, {"k": "q"})
            whole += 1
    assert whole > 3


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "((", "f: "),
        ("schema", {"type": "nothing"}, "f: "),
        ("grammar", "start: missing", "f: "),
        ("grammar", "root ::= (", "f: "),
    ],
)
def test_what_cannot_be_understood_is_named(tokens, kind, value, message):
    with pytest.raises(InputError, match=message):
        tokens.matcher(kind, value, "f")


def test_schemas_nested_up_to_pythons_limit(quiet):
    """None is an error of the server."""
    limit, statuses = sys.getrecursionlimit(), set()
    for depth in (limit // 3, limit // 2, limit - 100, limit - 50, limit - 20, 2 * limit):
        nested = b"[" * depth + b"]" * depth
        body = b'{"prompt": "x", "max_tokens": 1, "guided_json": {"a": ' + nested + b"}}"
        found = quiet.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        statuses.add(found.status_code)
    assert statuses <= {200, 400}


CHOICES = ["\ufffd" * 5 + "漢字", "\ufffd" * 30, "e\u0301cole", "\u00e9cole", " 🎉\ufffd🎉", "\u1112\u1161\u11ab"]


@pytest.mark.parametrize("kind", ["choice", "structural_tag"])
def test_the_text_of_a_choice_is_the_choice(tokens, kind):
    """Grammars spell tokens as bytes, which the text is made of."""
    tokenizer = Tokenizer(TINY / "target")
    for choice in CHOICES:
        value = [choice] if kind == "choice" else {"format": {"type": "const_string", "value": choice}}
        for seed in range(4):
            text = Detokenizer(tokenizer)
            for token in draw(tokens, Form.of(kind, value, "f"), seed, most=200):
                text.push(token)
            text.finish()
            assert text.text == choice


def test_a_literal_keeps_its_characters_beside_special_tokens(tokens):
    assert tokens.literal("e\u0301<|im_end|>\u0301x") == [json.dumps("e\u0301"), "<[2]>", json.dumps("\u0301x")]
