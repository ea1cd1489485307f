"""Custom tools whose input follows a grammar: in a free text, in demanded calls, and in both interfaces."""

import asyncio
import json
import random
import re

import numpy as np
import openai
import pytest

from dflash_jax import protocol
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.server.grammar import grammar_tokens
from dflash_jax.server.grammar_source import openings
from dflash_jax.server.grammar_trigger import TriggeredWalk, Triggers
from dflash_jax.server.tools import ToolParser, joined
from tests.server.conftest import MESSAGES, NAME, OFF, hosted

VOCAB = 512
# As of Codex.
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCHES = [
    "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n+</parameter>\n*** End Patch",
    "*** Begin Patch\n*** Update File: a.py\n*** Move to: b.py\n@@ def f():\n-  x\n*** End of File\n*** End Patch\n",
    "*** Begin Patch\n*** Delete File: <function=f>\n*** Delete File: 日本.py\n*** End Patch",
]
BROKEN = [
    "*** Begin Patch\n*** End Patch",
    "*** Begin Patch\n*** Add File: a\n*** End Patch",
    "*** Begin Patch\nx\n*** End Patch",
    "",
]
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
LARK = {"name": "apply_patch", "parameters": TEXT, "grammar": {"syntax": "lark", "definition": PATCH}}
REGEX = {"name": "pick", "parameters": TEXT, "grammar": {"syntax": "regex", "definition": "[ab]+|c{3}"}}
TOOLS = {"xml": [LARK, REGEX], "json": [REGEX], "bare": [REGEX]}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


@pytest.fixture(scope="module")
def tokens(tokenizer):
    return grammar_tokens(tokenizer, VOCAB, (2, 0))


@pytest.fixture(scope="module")
def triggers(tokens):
    """By syntax."""
    made = {}
    for syntax, tools in TOOLS.items():
        value = {"tools": tools, "syntax": syntax}
        made[syntax] = Triggers(tokens, tokens.matcher("inputs", value, "tools")[0], openings("inputs", value))
    return made


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(VOCAB) if mask[i // 8] >> i % 8 & 1}


def takes(tokenizer, triggers, text: str, pieces=()) -> bool:
    """Whether the masks let a text in, token by token."""
    walk = TriggeredWalk(triggers)
    for token in pieces or tokenizer.encode_plain(text):
        if token not in allowed(walk.masks([])[0]):
            return False
        walk.take([token])
    return 2 in allowed(walk.masks([])[0])


def as_xml(name: str, value: str) -> str:
    return f"<tool_call>\n<function={name}>\n<parameter=input>\n{value}\n</parameter>\n</function>\n</tool_call>"


FREE = [
    "I call <function=apply_patch> now.\n",
    "a < b, <tool_call> and </think> <function=f>\n<parameter=input>\nx\n</parameter>\n</function>",
    '<tool_call>\n{"name": "pick", "arguments": {"input": "z"}}\n</tool_call>',
    "<function=apply_patch",
    "<function=<function=apply_patc>\n",
]


def test_a_text_is_free_but_for_the_inputs_of_custom_tools(tokenizer, triggers):
    for text in FREE:
        assert takes(tokenizer, triggers["xml"], text), text
    for around in ("", "Now.\n", as_xml("pick", "abba") + "\n", as_xml("f", PATCHES[0]) + "<"):
        for patch in PATCHES:
            assert takes(tokenizer, triggers["xml"], around + as_xml("apply_patch", patch) + around), patch
        for patch in BROKEN:
            assert not takes(tokenizer, triggers["xml"], around + as_xml("apply_patch", patch)), patch
    assert takes(tokenizer, triggers["xml"], as_xml("pick", "ccc"))
    assert not takes(tokenizer, triggers["xml"], as_xml("pick", "cc"))


@pytest.mark.parametrize(("syntax", "key"), [("json", "arguments"), ("bare", "parameters")])
def test_a_regular_expression_is_kept_in_json(tokenizer, triggers, syntax, key):
    def call(value: str) -> str:
        return json.dumps({"name": "pick", key: {"input": value}})

    assert takes(tokenizer, triggers[syntax], "x" + call("ab") + "\ny" + call("ccc"))
    assert not takes(tokenizer, triggers[syntax], call("abz"))
    assert not takes(tokenizer, triggers[syntax], call("cccc"))
    assert takes(tokenizer, triggers[syntax], call("z").replace("pick", "pack"))


def random_text(rng: random.Random, tokenizer) -> list[int]:
    """Tokens of calls, parts of them and other text, spelt in any way."""
    parts = [*FREE, *(as_xml("apply_patch", each) for each in PATCHES + BROKEN), as_xml("pick", "ab"), "<", ">\n", "x"]
    ids = []
    for _ in range(rng.randrange(1, 5)):
        part = rng.choice(parts)
        cut = rng.randrange(len(part) + 1) if rng.random() < 0.5 else len(part)
        at = 0
        while at < cut:
            end = at + rng.randrange(1, 40)
            ids += tokenizer.encode_plain(part[at : min(end, cut)])
            at = end
    return ids


def test_masks_along_drafts_are_those_of_one_token_after_the_other(tokenizer, triggers):
    """The masks do not depend on how a text was drafted, in calls and around them."""
    rng, refused, calls = random.Random(3), 0, 0
    for _ in range(60):
        text, at = random_text(rng, tokenizer), 0
        slow, fast = (TriggeredWalk(triggers["xml"]) for _ in range(2))
        while at < len(text):
            drafts = text[at : at + rng.randrange(9)]
            masks, right = fast.masks(drafts), 0
            for i, token in enumerate([*drafts, None]):
                single = slow.masks([])[0]
                assert masks[i] == single
                calls += single != triggers["xml"].tokens.anything
                if token is None or token not in allowed(single):
                    break
                slow.take([token])
                right += 1
            assert len(masks) == right + 1
            fast.take(drafts[:right])
            if right < len(drafts):
                refused += 1
                break
            at += right
    assert refused > 10
    assert calls > 100


def test_a_token_that_completes_the_beginning_of_a_call_spells_the_grammar(tokenizer, tokens, triggers):
    """All others may come, and do where something else follows."""
    walk = TriggeredWalk(triggers["xml"])
    walk.take(tokenizer.encode_plain("<function=apply_patch>"))
    lines = {i for i, spelling in enumerate(tokens.spellings) if spelling.startswith(b"\n")}
    (one,) = tokenizer.encode_plain("\n")
    assert len(lines) > 1
    assert set(range(VOCAB)) - allowed(walk.masks([])[0]) == lines - {one}
    walk.take(tokenizer.encode_plain(" is a tag\n\n"))
    assert len(allowed(walk.masks([])[0])) == VOCAB


def test_what_the_masks_let_a_call_be_is_a_patch(tokenizer, tokens, triggers):
    """A random input, whatever tokens spell what begins the call."""
    rng, whole = random.Random(5), 0
    for _ in range(12):
        walk, ids = TriggeredWalk(triggers["xml"]), list(map(ord, ""))
        begin = "<tool_call>\n<function=apply_patch>\n"
        cut = rng.randrange(len(begin))
        ids = tokenizer.encode_plain(begin[:cut]) + tokenizer.encode_plain(begin[cut:])
        walk.take(ids)
        end = "\n</parameter>\n</function>"
        for _ in range(400):
            mask = allowed(walk.masks([])[0])
            if len(mask) == VOCAB:
                break
            # Lines end soon.
            short = [i for i in mask if b"\n" in tokens.spellings[i] or tokens.spellings[i][:1] in b"+-*@ <"]
            token = rng.choice(short if short and rng.random() < 0.7 else sorted(mask))
            ids.append(token)
            walk.take([token])
        text = tokenizer.decode(ids)
        if end not in text:
            continue
        whole += 1
        parser = ToolParser({"apply_patch": TEXT})
        (call,) = joined(parser.push(text + "\n</tool_call>").calls + parser.finish().calls)
        assert is_patch(json.loads(call["function"]["arguments"])["input"])
    assert whole > 3


def is_patch(text: str) -> bool:
    """A direct reading of the grammar."""
    line = r"(?:[^\n]*)\n"
    change = rf"(?:(?:@@(?: [^\n]+)?\n|[-+ ]{line})+(?:\*\*\* End of File\n)?)?"
    name = r"[^\n]+\n"
    hunk = rf"\*\*\* Add File: {name}(?:\+{line})+|\*\*\* Delete File: {name}"
    hunk += rf"|\*\*\* Update File: {name}(?:\*\*\* Move to: {name})?{change}"
    return re.fullmatch(rf"\*\*\* Begin Patch\n(?:{hunk})+\*\*\* End Patch\n?", text) is not None


def test_a_budget_ends_a_thought_without_a_call(tokenizer, triggers):
    """In a thought that a budget may end, no grammar is kept."""
    walk = TriggeredWalk(triggers["xml"], "open")
    walk.take(tokenizer.encode_plain("<function=apply_patch>\n"))
    assert len(allowed(walk.masks([])[0])) == VOCAB
    walk.take(tokenizer.encode_plain("</think><function=apply_patch>\n"))
    assert len(allowed(walk.masks([])[0])) < VOCAB


def test_an_invalid_grammar_names_its_tool(tokens):
    bad = {"name": "other", "parameters": TEXT, "grammar": {"syntax": "lark", "definition": "start: nothing"}}
    for kind, more in (("inputs", {}), ("calls", {"most": 1})):
        with pytest.raises(InputError, match="tools: the grammar of the tool 'other': "):
            tokens.matcher(kind, {"tools": [LARK, bad], "syntax": "xml", **more}, "tools")


def custom(name: str, **form) -> dict:
    return {"type": "custom", "name": name, "description": "Edits.", **({"format": form} if form else {})}


APPLY = custom("apply_patch", type="grammar", syntax="lark", definition=PATCH)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"])
def test_a_demanded_call_of_codex_is_a_patch(quiet, monkeypatch, params):
    """Line breaks are likelier than they were, so that lines end."""
    monkeypatch.setattr(quiet.serving, "call_syntax", "xml")
    bias = {str(i): 8 for i in quiet.serving.llm.encode("\n")}
    answers = []
    for choice in ("required", {"type": "custom", "name": "apply_patch"}):
        body = {"input": "Fix it.", "tools": [APPLY], "tool_choice": choice, "logit_bias": bias, **params}
        body |= {"max_output_tokens": 300, "chat_template_kwargs": OFF, "parallel_tool_calls": False}
        for width in (1, 8):
            answer = quiet.post("/v1/responses", **body, block_size=width)
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert [item["type"] for item in found["output"]] == ["custom_tool_call"], found["output"]
            answers.append(found["output"][0]["input"])
            assert found["status"] == "incomplete" or is_patch(answers[-1]), answers[-1]
            assert answers[-1].startswith("*** Begin Patch\n*** ")
    assert len(set(answers)) == 1


@pytest.mark.parametrize("form", [{"grammar": REGEX["grammar"]}, REGEX["grammar"]], ids=["chat's", "responses'"])
@pytest.mark.parametrize("syntax", ["xml", "json"])
def test_a_custom_tool_of_a_chat_is_answered_as_one(quiet, monkeypatch, syntax, form):
    """OpenAI's form of it, whole and streamed, and in the turn after it."""
    monkeypatch.setattr(quiet.serving, "call_syntax", syntax)
    custom = {"name": "pick", "description": "Picks.", "format": {"type": "grammar", **form}}
    body = {"tools": [{"type": "custom", "custom": custom}], "max_tokens": 100, "chat_template_kwargs": OFF}
    body |= {"tool_choice": {"type": "custom", "custom": {"name": "pick"}}, "temperature": 0.9, "seed": 2}
    choice = quiet.post("/v1/chat/completions", messages=MESSAGES, **body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"], set(call)) == ("custom", "pick", {"id", "type", "custom"})
    assert choice["finish_reason"] == "length" or re.fullmatch("[ab]+|c{3}", call["custom"]["input"])
    with openai.OpenAI(base_url=f"{quiet.url}/v1", api_key="EMPTY", max_retries=0) as client:
        chunks = [*client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, extra_body=body)]
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert [(each.index, each.type, each.custom) for each in deltas] == [(0, "custom", call["custom"])]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    later = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    found = quiet.post("/v1/chat/completions", messages=later, tools=body["tools"], max_tokens=4)
    assert found.status_code == 200, found.text


@pytest.mark.parametrize("custom", [None, {}, {"name": "x", "format": {"type": "grammar"}}, {"name": "a b"}])
def test_a_wrong_custom_tool_of_a_chat_is_named(quiet, custom):
    body = {"messages": MESSAGES, "tools": [{"type": "custom", "custom": custom}]}
    found = quiet.post("/v1/chat/completions", **body)
    assert found.status_code == 400, found.text
    assert "custom" in found.json()["error"]["message"]


@pytest.mark.parametrize("syntax", ["xml", "json"])
def test_a_free_text_is_the_same_with_the_grammar_of_a_tool(quiet, monkeypatch, syntax):
    """In a thought and after it, with drafts and without; its note says what JSON cannot keep."""
    monkeypatch.setattr(quiet.serving, "call_syntax", syntax)
    plain = {"input": "Fix it.", "max_output_tokens": 80, "temperature": 0.8, "seed": 1}
    untyped = custom("apply_patch", type="text") | {
        "description": f"Edits.\n\nThe input has this form (lark):\n{PATCH}"
    }
    right = quiet.post("/v1/responses", **plain, tools=[untyped])
    for width in (1, 8):
        answer = quiet.post("/v1/responses", **plain, tools=[APPLY], tool_choice="auto", block_size=width)
        texts = [[part["text"] for item in a.json()["output"] for part in item["content"]] for a in (answer, right)]
        assert texts[0] == texts[1]
        note = answer.headers.get("x-dflash-note", "")
        assert ("the grammar of apply_patch is not enforced" in note) == (syntax == "json")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar", "syntax": "lark", "definition": "start: ("}, "tools"),
        ({"type": "grammar", "syntax": "regex", "definition": "(("}, "tools"),
        ({"type": "grammar", "syntax": "peg", "definition": "x"}, "tools[0].format.grammar.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "tools[0].format.grammar.definition"),
        ({"type": "json"}, "tools[0].format.type"),
    ],
)
def test_a_wrong_format_is_named_with_its_tool(quiet, monkeypatch, form, param):
    monkeypatch.setattr(quiet.serving, "call_syntax", "xml")
    found = quiet.post("/v1/responses", input="x", tools=[custom("edit", **form)])
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert (error["param"], "'edit'" in error["message"]) == (param, True)
    unnamed = quiet.post("/v1/responses", input="x", tools=[custom("a b")])
    assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "tools[0].name")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_the_engine_keeps_the_grammar_of_a_call_that_a_text_begins(server, llm, tokenizer, params):
    """Of a request that goes on after a lost engine, in the middle of a call, with drafts and without."""
    value = {"tools": [LARK], "syntax": "xml"}
    begun = tokenizer.encode_plain("Now.\n<tool_call>\n<function=apply_patch>\n<parameter=in")
    breaks = {ids[0]: 9.0 for ids in map(tokenizer.encode_plain, ("\n", "+")) if len(ids) == 1}

    async def text(block_size: int) -> list[int]:
        host, ended, new = hosted(llm, server.host.engine), asyncio.Event(), []
        host.grammar = server.host.grammar

        def send(record) -> None:
            for event in record.events if isinstance(record, protocol.Events) else ():
                assert event.failure is None, event.failure
                new.extend(event.tokens)
                if event.finish_reason:
                    ended.set()

        front, form = host.connect(send), protocol.Form.of("inputs", value, "tools")
        choices = [protocol.Choice(1, "mine", 0, [*begun])]
        options = {"max_tokens": len(begun) + 120, "ignore_eos": True, "logit_bias": breaks, **params}
        prompt = protocol.Prompt(np.array([5, 6], np.int32), options, block_size, form=form, choices=choices)
        front.receive(protocol.Submit(0, None, b"owner", [prompt]))
        await ended.wait()
        front.close()
        return new

    alone, drafted = (asyncio.run(text(block_size)) for block_size in (1, 8))
    assert alone == drafted
    written = tokenizer.decode([*begun, *alone]).partition("<parameter=input>\n")[2]
    assert written.startswith("*** Begin Patch\n*** ")
    value, _, rest = written.partition("\n</parameter>\n</function>")
    assert is_patch(value) or not rest
