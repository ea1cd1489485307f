"""Budgets of thoughts: `thinking_token_budget` and its other names, with drafts and without."""

import re
from dataclasses import replace

import pytest

from dflash_jax.frontend.reasoning import open_thought
from dflash_jax.server import chat, prepare
from tests.server.both_ways import BOTH, same_with_drafts


def thought_of(llm, ids: list[int], is_open: bool) -> int | None:
    """Tokens of the thought that a text has; None where it has none or does not end it."""
    start, end = (llm.tokenizer.encode_plain(tag) for tag in ("<think>", "</think>"))
    if not is_open and ids[: len(start)] != start:
        return None
    ids = ids if is_open else ids[len(start) :]
    return next((i for i in range(len(ids)) if ids[i : i + len(end)] == end), None)


@BOTH
@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_ends_when_its_budget_is_used_up(quiet, llm, params, budget, name):
    body = {"max_tokens": 60, "return_token_ids": True, **params}
    free = quiet.chat(**body, block_size=8)["choices"][0]
    full = thought_of(llm, free["token_ids"], True)
    assert full is None or full > 5
    assert quiet.chat(**body, thinking_token_budget=-1)["choices"][0]["token_ids"] == free["token_ids"]
    found = [quiet.chat(**body, **{name: budget}, block_size=n)["choices"][0] for n in (1, 8)]
    assert found[0] == found[1]
    ids = found[0]["token_ids"]
    # The prompt has the first, a line break.
    new = max(0, budget - 1)
    assert thought_of(llm, ids, True) == new
    assert ids[:new] == free["token_ids"][:new]
    # Beside a grammar: the thought ends, and then the grammar begins.
    formed = [quiet.chat(**body, **{name: budget}, regex="[ab]{4}", block_size=n)["choices"][0] for n in (1, 8)]
    assert formed[0] == formed[1]
    assert thought_of(llm, formed[0]["token_ids"], True) == new
    assert re.fullmatch("[ab]{4}", formed[0]["message"]["content"])


@BOTH
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_thought_that_may_begin_has_a_budget_too(quiet, llm, params, budget, monkeypatch):
    """The template opens the thought; the argument says that it does not."""
    real = chat.converse

    async def possible(*args, **options):
        talk = await real(*args, **options)
        return replace(talk, prompt=talk.prompt[: -len(opening)], thought="possible")

    monkeypatch.setattr(chat, "converse", possible)
    rendered = llm.encode_chat([{"role": "user", "content": "hi"}])
    opening = llm.tokenizer.encode_plain("<think>\n")
    assert rendered[-len(opening) :] == opening
    body = {"max_tokens": 40, "return_token_ids": True, "thinking_token_budget": budget, **params}
    start = llm.tokenizer.encode_plain("<think>")
    for bias in (9.0, -100.0):
        wanted = {"logit_bias": {str(start[0]): bias}}
        found = [quiet.chat(**body, **wanted, block_size=n)["choices"][0] for n in (1, 8)]
        assert found[0] == found[1]
        ids = found[0]["token_ids"]
        if bias > 0:
            assert ids[0] == start[0]
            assert thought_of(llm, ids, False) == budget
        else:
            assert found[0]["message"]["reasoning_content"] is None
            assert len(ids) > 6


@BOTH
@pytest.mark.parametrize("budget", [-1, 0, 5])
def test_the_budget_of_a_prompt_without_messages(quiet, llm, params, budget):
    """The prompt of a chat gives the chat's tokens, in completions and in SGLang's interface."""
    prompt, form = llm.encode_chat([{"role": "user", "content": "hi"}]), {"regex": "[ab]{4}"} if budget >= 0 else {}
    for more in ({}, form):
        body = {"max_tokens": 40, "thinking_token_budget": budget, **more, **params}
        right = quiet.chat(**body, return_token_ids=True)["choices"][0]["token_ids"]
        assert same_with_drafts(quiet, prompt=prompt, **body)["token_ids"] == right
        sampling = {"max_new_tokens": 40, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
        native = {"input_ids": prompt, "sampling_params": sampling | more, "max_thinking_tokens": budget}
        for width in (1, 8):
            assert quiet.post("/generate", **native, block_size=width).json()["output_ids"] == right
    if budget >= 0:
        assert thought_of(llm, right, True) == max(0, budget - 1)


@BOTH
def test_the_budget_of_a_thought_that_a_completion_begins(quiet, llm, params):
    start, end = (llm.tokenizer.encode_plain(tag) for tag in ("<think>", "</think>"))
    bias = {"logit_bias": {str(start[0]): 99.0}}
    found = same_with_drafts(quiet, prompt="def f(", thinking_token_budget=3, **bias, **params)["token_ids"]
    assert found[: len(start)] == start
    assert thought_of(llm, found, False) == 3
    # No thought, no bound: a closed one in the prompt is none.
    prompt = llm.encode("<think>x</think>def f(")
    plain = same_with_drafts(quiet, prompt=prompt, **params)["token_ids"]
    assert same_with_drafts(quiet, prompt=prompt, thinking_token_budget=0, **params)["token_ids"] == plain
    opened = same_with_drafts(quiet, prompt=prompt + start, thinking_token_budget=0, **params)["token_ids"]
    assert opened[: len(end)] == end
    # What the prompt has of the thought counts.
    begun = prompt + start + llm.tokenizer.encode_plain("def")
    count = len(begun) - len(prompt + start)
    for budget, new in ((count - 1, 0), (count, 0), (count + 2, 2)):
        ids = same_with_drafts(quiet, prompt=begun, thinking_token_budget=budget, **params)["token_ids"]
        assert thought_of(llm, ids, True) == new


@pytest.mark.parametrize(
    ("ids", "count"),
    [([], None), ([1, 2], 0), ([1, 2, 9, 1], 2), ([1, 2, 3], None), ([1, 2, 3, 2], None), ([3, 1, 2], 0)],
)
def test_where_a_thought_is_open(ids, count):
    assert open_thought(ids, (1, 2), (3,)) == count


@BOTH
def test_the_budget_of_messages(quiet, llm, params):
    """Anthropic's budget is chat's."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, **params}
    right = quiet.post("/v1/chat/completions", **body, thinking_token_budget=5).json()["choices"][0]["message"]
    for width in (1, 8):
        thinking = {"type": "enabled", "budget_tokens": 5}
        found = quiet.post("/v1/messages", **body, thinking=thinking, block_size=width).json()["content"]
        assert [block.get("thinking") for block in found] == [right["reasoning_content"], None]
        assert found[1]["text"] == right["content"]


@BOTH
@pytest.mark.parametrize("budget", [None, 6])
@pytest.mark.parametrize("more", [{}, {"regex": "[ab]{3}"}, {"stop_token_ids": [9, 11]}, {"ignore_eos": True}])
def test_a_text_that_needs_an_answer_ends_neither_in_its_thought_nor_before_it(quiet, llm, params, budget, more):
    """The model would end at once, with drafts and without."""
    (close,), stops = llm.tokenizer.encode_plain("</think>"), more.get("stop_token_ids", [])
    stops = stops if more.get("ignore_eos") else [*llm.defaults.stop_ids, *stops]
    bias = {str(token): 100 for token in stops}
    body = {"max_tokens": 60, "return_token_ids": True, "logit_bias": bias, **params, **more}
    bare = quiet.chat(**body)["choices"][0]
    if stops:
        assert (bare["message"]["content"], len(bare["token_ids"])) == ("", 1)
    body |= {"require_answer": True, "thinking_token_budget": budget}
    found = [quiet.chat(**body, block_size=n)["choices"][0] for n in (1, 8)]
    assert found[0] == found[1]
    ids = found[0]["token_ids"]
    assert not set(ids[:-1]) & set(stops)
    if stops and budget is not None:
        assert found[0]["finish_reason"] == "stop"
        assert close in ids
        assert found[0]["message"]["content"].strip()
    elif not stops and budget is None:
        assert ids == bare["token_ids"]


@pytest.mark.parametrize("asked", ["field", "server"])
def test_every_interface_takes_the_need_of_an_answer(quiet, llm, asked, monkeypatch):
    """The model would end after a blank line, in its thought."""
    bias = {str(token): 100 for token in llm.defaults.stop_ids}
    fields = {"require_answer": True} if asked == "field" else {}
    monkeypatch.setattr(quiet.serving, "requires_answer", asked == "server")
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 3, "logit_bias": bias}
    chat = quiet.post("/v1/chat/completions", **body, **fields).json()["choices"][0]
    assert chat["message"]["content"]
    seen, original = [], prepare.sequences

    async def sequences(*args, **options):
        seen.append(options["requires_answer"])
        return await original(*args, **options)

    monkeypatch.setattr(prepare, "sequences", sequences)
    assert quiet.post("/v1/responses", input="hi", max_output_tokens=1, **fields).status_code == 200
    assert quiet.post("/v1/messages", messages=body["messages"], max_tokens=1, **fields).status_code == 200
    assert seen == [True, True]
    if asked == "server":
        unasked = quiet.post("/v1/chat/completions", **body, require_answer=False).json()["choices"][0]
        assert unasked["message"]["content"] == ""
