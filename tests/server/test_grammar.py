"""Masks against the grammar walked one token at a time, with and without drafts."""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from dflash_jax.errors import InputError
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
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


def allowed(mask: bytes, vocab: int = VOCAB) -> set[int]:
    return {i for i in range(vocab) if mask[i // 8] >> i % 8 & 1}


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode_plain(text))


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
        calls = {"syntax": syntax, "tools": tools, "most": 2}
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


MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(70)}, "required": ["p3", "p69"]}


@pytest.mark.parametrize("count", [1, 3, 64, 70])
def test_parameters_come_in_any_order_but_those_of_many(tokens, count):
    """All required ones, and none twice."""
    tokenizer, rng = Tokenizer(TINY / "target"), random.Random(count)
    names = [*MANY["properties"]][:count]
    required = [name for name in ("p0", "p2", "p69") if name in names]
    schema = MANY | {"properties": {name: {"type": "integer"} for name in names}, "required": required}
    value = {"tools": [{"name": "f", "parameters": schema}], "most": 1, "syntax": "xml"}

    def takes(given: list[str]) -> bool:
        inside = "".join(f"<parameter={name}>\n7\n</parameter>\n" for name in given)
        ids = tokenizer.encode_plain(f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>")
        matcher = tokens.matcher("calls", value, "f")[0]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for _ in range(8):
        given = [name for name in names if name in required or rng.random() < 0.3]
        assert takes(given)
        shuffled = rng.sample(given, len(given))
        assert takes(shuffled) == (count <= 64 or shuffled == given)
        assert not takes([*given, rng.choice(given)])
        assert not takes([name for name in given if name != required[0]])


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
    literal = tokens._vocabulary.literal
    assert literal("e\u0301<think>\u0301x") == [json.dumps("e\u0301"), "<[3]>", json.dumps("\u0301x")]
    # A token that ends the text or is not shown cannot be in it.
    assert literal("a<|im_end|>b<|mask|>") == [json.dumps("a<|im_end|>b<|mask|>")]


ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>", "<|mask|>", "<th", "ink>")
AROUND = ("", " ", "a", "\n", "<", ">", "<|", '"', "\\", "é", "/", "think", ".*", "#")


def spelt_otherwise(directory: Path) -> dict[str, Tokenizer]:
    """Tokenizers of the same vocabulary with added tokens as Qwen, Llama and models of sentence pieces have them."""
    source, made = json.loads((TINY / "target" / "tokenizer.json").read_text(encoding="utf-8")), {}
    apart = json.loads(json.dumps(source))
    vocab, count = apart["model"]["vocab"], len(source["model"]["vocab"])
    # As in Qwen, added tokens follow the vocabulary.
    names = [token["content"] for token in apart["added_tokens"]]
    kept = {name: i for i, name in enumerate(name for name in vocab if name not in names)}
    apart["model"]["vocab"] = kept
    for i, token in enumerate(apart["added_tokens"]):
        token["id"] = len(kept) + i
    assert len(kept) + len(names) == count
    blanks = json.loads(json.dumps(source))
    for token in blanks["added_tokens"]:
        token |= {"lstrip": True, "rstrip": True, "normalized": True}
    blanks["added_tokens"].append(blanks["added_tokens"][3] | {"id": count, "content": "hink", "special": False})
    pieces = ["<unk>", "<think>", "</think>", "<tool_call>", "<|im_end|>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "a", "think", "<th", "▁a", "</"]
    fallback = {
        "added_tokens": [source["added_tokens"][3] | {"id": i, "content": pieces[i]} for i in range(5)],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[piece, -float(i)] for i, piece in enumerate(pieces)],
            "byte_fallback": True,
        },
    }
    for name, content in {"apart": apart, "blanks": blanks, "fallback": source | fallback}.items():
        (directory / name).mkdir()
        (directory / name / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
        made[name] = Tokenizer(directory / name)
    return made


def with_text(kind: str, text: str) -> tuple[Form, str]:
    """A form that lets in one text, or one value of JSON, with ``text`` in it; and that text or value."""
    escaped, quoted = re.sub(r"([.*+?|()\[\]{}^$\\])", r"\\\1", text), json.dumps(text)
    parameters = {"properties": {"x": {"enum": [text + "x"]}}, "required": ["x"]}
    forms = {
        "regex": ("regex", escaped, text),
        "choice": ("choice", [text], text),
        "lark": ("grammar", f"start: a b\na: {json.dumps(text[:3])}\nb: {json.dumps(text[3:])} // {quoted}", text),
        "gbnf": ("grammar", f"root ::= {quoted}", text),
        "const": ("schema", {"const": text}, quoted),
        "enum": ("schema", {"enum": [[text], [text]]}, json.dumps([text])),
        "key": ("schema", {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}, {text: 1}),
        "pattern": ("schema", {"type": "string", "pattern": f"^{escaped}$"}, quoted),
        "tag": ("structural_tag", {"format": {"type": "const_string", "value": text}}, text),
        "inside": ("structural_tag", {"format": {"type": "json_schema", "json_schema": {"const": text}}}, quoted),
        "call": ("calls", {"tools": [{"name": "f", "parameters": parameters}]}, text),
    }
    kind, value, right = forms[kind]
    value = value | {"most": 1, "syntax": "json"} if kind == "calls" else value
    return Form.of(kind, value, "f"), right if isinstance(right, str) else json.dumps(right)


KINDS = ("regex", "choice", "lark", "gbnf", "const", "enum", "key", "pattern", "tag", "inside", "call")


def test_texts_with_added_tokens_are_what_the_grammar_demands(tokens, tmp_path):
    """Added tokens in random places of forms: masks and matcher agree, with drafts and without, after a thought too."""
    rng, checked = random.Random(7), Counter()
    tokenizers = {"bundled": Tokenizer(TINY / "target"), **spelt_otherwise(tmp_path)}
    for name, tokenizer in tokenizers.items():
        known = tokens if name == "bundled" else grammar_tokens(tokenizer, VOCAB + 8, (ids_of(tokenizer, "<|im_end|>")))
        for kind in KINDS * 6:
            text = "".join(rng.choice(ADDED if i % 2 else AROUND) for i in range(rng.randrange(2, 7))) + rng.choice(
                " b>"
            )
            form, right = with_text(kind, text)
            thought = rng.choice(("none", "open", "possible"))
            slow, fast = (walk(known, form, thought) for _ in range(2))
            begun = known.close_ids if thought == "open" else ()
            out, drafts = [], []
            for at in range(400):
                mask = slow.masks([])[0]
                able = allowed(mask, known.vocab)
                # A thought that may begin does not, unless the grammar demands its tag.
                able -= set() if at or len(able) == 1 else set(known.open_ids)
                token = begun[at] if at < len(begun) else rng.choice(sorted(able))
                if at >= len(begun):
                    out.append(token)
                drafts.append(token)
                slow.take([token])
                if token in known.stop_ids:
                    break
            at = 0
            while at < len(drafts):
                part = drafts[at : at + rng.randrange(1, 9)]
                masks = fast.masks(part)
                assert len(masks) == len(part) + 1
                fast.take(part)
                at += len(part)
            shown = Detokenizer(tokenizer)
            for token in out[:-1]:
                shown.push(token)
            shown.finish()
            assert out[-1] in known.stop_ids, (name, kind, text)
            spelt = shown.text.lstrip("\n") if begun else shown.text
            if kind == "call":
                assert (text + "x") in json.loads(spelt.removeprefix(START).removesuffix(END))["arguments"].values()
            elif kind in ("key", "enum", "const", "pattern", "inside"):
                assert json.loads(spelt) == json.loads(right)
            else:
                assert spelt == (right.lstrip("\n") if begun else right), (name, kind)
            checked[name, kind] += 1
    assert len(checked) == len(tokenizers) * len(KINDS)
