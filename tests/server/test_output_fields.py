"""Fields that shape what comes back: where tokens begin, echo, stops, special tokens, which tokens may come.

Whatever changes a text is tried with drafts (block size 8) and without (1), greedy and sampled: equal tokens.
"""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from dflash_jax import SamplingParams
from dflash_jax.server import chat
from dflash_jax.server.reasoning import open_thought
from tests.server.conftest import MESSAGES

PARAMS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}]
BOTH = pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
PROMPT = "def f(x):\n    # 日本 🎉"


def complete(server, **body) -> dict:
    """The one choice of a completion."""
    found = server.post("/v1/completions", **body)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]


def stream(server, path: str, **body) -> list[dict]:
    """The events of a stream."""
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]


def joined(events: list[dict]) -> dict:
    """The choice that the events of a completion's stream are the pieces of."""
    whole = {"text": "", "token_ids": [], "logprobs": None}
    for choice in (event["choices"][0] for event in events if event["choices"]):
        whole["text"] += choice["text"]
        whole["token_ids"] += choice.get("token_ids") or []
        whole["finish_reason"] = choice["finish_reason"]
        if (more := choice["logprobs"]) is not None:
            whole["logprobs"] = whole["logprobs"] or {key: [] for key in more if more[key] is not None}
            for key, values in whole["logprobs"].items():
                values += more[key]
        whole |= {key: choice[key] for key in ("prompt_logprobs", "prompt_token_ids") if key in choice}
    return whole


def same_with_drafts(server, **body) -> dict:
    """A completion, which is the same with drafts and without, streamed and not."""
    body = {"max_tokens": 48, "return_token_ids": True} | body
    alone, drafted = (complete(server, **body, block_size=width) for width in (1, 8))
    assert alone == drafted
    for width in (1, 8):
        whole = joined(stream(server, "/v1/completions", **body, block_size=width))
        assert (whole["text"], whole["token_ids"]) == (alone["text"], alone["token_ids"])
        assert whole["finish_reason"] == alone["finish_reason"]
    return alone


# Where tokens begin.


@BOTH
@pytest.mark.parametrize("echo", [False, True])
def test_text_offsets_are_places_in_the_text(quiet, llm, echo, params):
    body = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 2, "echo": echo, "return_token_ids": True} | params
    # Byte tokens, so that characters span tokens.
    body["logit_bias"] = {str(i): 4.0 for i in llm.encode("é日🎉")}
    found = complete(quiet, **body)
    offsets, text = found["logprobs"]["text_offset"], found["text"]
    assert len(offsets) == len(found["logprobs"]["tokens"]) == len(found["token_ids"]) + echo * len(llm.encode(PROMPT))
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert "".join(text[a:b] for a, b in pairwise([*offsets, len(text)])) == text
    whole = joined(stream(quiet, "/v1/completions", **body))
    assert whole["text"] == text
    assert whole["logprobs"]["text_offset"] == offsets
    assert whole["logprobs"]["tokens"] == found["logprobs"]["tokens"]
    if echo:
        assert text.startswith(PROMPT)


def test_echoed_text_keeps_special_tokens(quiet, llm):
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    ids = llm.encode(prompt)
    for given in (prompt, ids):
        found = complete(quiet, prompt=given, max_tokens=4, echo=True, logprobs=0)
        assert found["text"].startswith(prompt)
        offsets = found["logprobs"]["text_offset"]
        assert [prompt[a:b] for a, b in pairwise([*offsets[: len(ids)], len(prompt)])] == [
            llm.tokenizer.decode([i], False) for i in ids
        ]


@pytest.mark.parametrize("most", [0, 12])
def test_echo_and_prompt_logprobs_are_streamed(quiet, most):
    body = {"prompt": PROMPT, "max_tokens": most, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    found = complete(quiet, **body, return_token_ids=True)
    events = stream(quiet, "/v1/completions", **body, return_token_ids=True, stream_options={"include_usage": True})
    whole = joined(events)
    assert whole == {key: found[key] for key in whole} | {"logprobs": whole["logprobs"]}
    right, close = found["logprobs"], partial(pytest.approx, abs=1e-4)
    assert whole["logprobs"]["token_logprobs"] == close(right["token_logprobs"])
    for mine, top in zip(whole["logprobs"]["top_logprobs"] or [], right["top_logprobs"] or [], strict=True):
        assert mine == (None if top is None else close(top))
    assert all(whole["logprobs"][key] == right[key] for key in ("tokens", "text_offset"))
    assert events[-1]["usage"]["completion_tokens"] == most
    if most == 0:
        assert found["text"] == PROMPT


# Log-probabilities.


def test_the_drawn_token_is_among_the_likeliest(quiet):
    """vLLM: of completions N + 1 where it is outside, of chats N."""
    body = {"max_tokens": 24, "temperature": 2.0, "seed": 3, "return_tokens_as_token_ids": True}
    found = complete(quiet, prompt="def f(", **body, logprobs=1, return_token_ids=True)["logprobs"]
    assert {len(top) for top in found["top_logprobs"]} == {1, 2}
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert top[token] == value
        assert next(iter(top)) == token
    chat = quiet.chat(**body, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in chat} == {2}
    for entry in chat:
        assert entry["token"] in [each["token"] for each in entry["top_logprobs"]]
    none = quiet.chat(**body, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in none)


@pytest.mark.parametrize("echo", [False, True])
def test_logprobs_of_the_drawn_token_alone(quiet, echo):
    found = complete(quiet, prompt=PROMPT, max_tokens=6, logprobs=0, echo=echo, return_tokens_as_token_ids=True)
    found = found["logprobs"]
    expected = [{token: value} for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)]
    assert found["top_logprobs"] == [None] * echo + expected[echo:]


def test_fields_that_were_not_asked_for_are_null(quiet):
    """As in vLLM's whole answers; their clients read them."""
    choice = complete(quiet, prompt="def f(", max_tokens=2)
    assert [choice[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    chat = quiet.chat(max_tokens=2)
    assert [chat["choices"][0]["token_ids"], chat["prompt_token_ids"], chat["prompt_logprobs"]] == [None] * 3
    for path, asked in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        for event in stream(quiet, path, **asked, max_tokens=2):
            assert not {"prompt_token_ids", "prompt_logprobs"} & (set(event) | set(event["choices"][0]))


def test_tokens_as_token_ids(quiet):
    body = {"max_tokens": 6, "logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    found = complete(quiet, prompt="def f(", **body)
    assert found["logprobs"]["tokens"] == [f"token_id:{i}" for i in found["token_ids"]]
    assert all(key.startswith("token_id:") for top in found["logprobs"]["top_logprobs"] for key in top)


# Special tokens and stops.


@BOTH
def test_special_tokens_are_shown_on_demand(quiet, llm, params):
    body = {"prompt": "def f(", "logit_bias": {str(llm.encode("<|im_start|>")[0]): 8.0}, **params}
    plain = same_with_drafts(quiet, **body)
    found = same_with_drafts(quiet, **body, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert found["token_ids"] == plain["token_ids"]
    assert "<|im_start|>" in found["text"]
    assert "<|im_start|>" not in plain["text"]
    assert found["text"] == llm.tokenizer.decode(found["token_ids"], False)
    sampling = {"max_new_tokens": 48, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    native = quiet.post(
        "/generate",
        text="def f(",
        sampling_params=sampling | {"logit_bias": body["logit_bias"], "skip_special_tokens": False},
    ).json()
    assert native["text"] == found["text"]


@BOTH
@pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
def test_what_ends_a_text_is_part_of_it_on_demand(quiet, llm, name, params):
    plain = same_with_drafts(quiet, prompt="def f(", **params)
    stop = plain["text"][9:12]
    cut = same_with_drafts(quiet, prompt="def f(", stop=stop, **params)
    found = same_with_drafts(quiet, prompt="def f(", stop=stop, **{name: True}, **params)
    assert cut["text"] == plain["text"].partition(stop)[0]
    assert found["text"] == cut["text"] + stop
    token = plain["token_ids"][7]
    upto = plain["token_ids"].index(token) + 1
    found = same_with_drafts(quiet, prompt="def f(", stop_token_ids=[token], **{name: True}, **params)
    assert found["text"] == llm.tokenizer.decode(plain["token_ids"][:upto])


@BOTH
@pytest.mark.parametrize("include", [False, True])
def test_a_regular_expression_ends_a_text(quiet, params, include):
    plain = same_with_drafts(quiet, prompt="def f(", **params)
    found = same_with_drafts(
        quiet,
        prompt="def f(",
        stop_regex=["[^\\x00-\\x{ffff}]", "\\n\\s*\\S"],
        include_stop_str_in_output=include,
        **params,
    )
    before = plain["text"].partition("\n")[0]
    assert found["text"].startswith(before)
    assert found["finish_reason"] == "stop"
    assert len(found["token_ids"]) < len(plain["token_ids"])
    if not include:
        assert found["text"] == before
    sampling = {"max_new_tokens": 48, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    native = quiet.post(
        "/generate", text="def f(", sampling_params=sampling | {"stop_regex": "\\n\\s*\\S", "no_stop_trim": include}
    ).json()
    assert native["text"] == found["text"]
    assert native["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\\n\\s*\\S"}


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"stop_regex": "("}, "stop_regex"),
        ({"stop_regex": ["a"] * 5}, "stop_regex"),
        ({"stop_regex": "a" * 1025}, "stop_regex"),
        ({"stop_regex": ["(a?){200}a{200}"] * 2}, "stop_regex"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [512]}, None),
    ],
)
def test_what_cannot_be_is_refused_by_name(quiet, wanted, param):
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        found = quiet.post(path, max_tokens=8, **body, **wanted)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == param


# Which tokens may come.


@BOTH
def test_a_text_has_so_many_tokens_at_least(quiet, llm, params):
    """Also where a stop token or string would end it before."""
    plain = same_with_drafts(quiet, prompt="def f(", **params)
    token = plain["token_ids"][4]
    for most in (0, 5, 20):
        found = same_with_drafts(quiet, prompt="def f(", stop_token_ids=[token], min_tokens=most, **params)
        assert len(found["token_ids"]) >= most
        assert token not in found["token_ids"][: min(most, len(found["token_ids"]) - 1)]
        if most == 0:
            assert found["token_ids"] == plain["token_ids"][: plain["token_ids"].index(token) + 1]
    stop = plain["text"][:2]
    found = same_with_drafts(quiet, prompt="def f(", stop=stop, min_tokens=30, **params)
    assert len(found["token_ids"]) >= 30
    sampling = {"max_new_tokens": 48, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    sampling |= {"stop_token_ids": [token], "min_new_tokens": 20}
    texts = {
        quiet.post("/generate", text="def f(", sampling_params=sampling, block_size=n).json()["text"] for n in (1, 8)
    }
    assert len(texts) == 1
    library = llm.generate(
        ["def f("], SamplingParams(max_tokens=48, stop_token_ids=[token], min_tokens=20, **params), block_size=8
    )[0]
    assert texts.pop() == library.text


@BOTH
def test_min_tokens_beside_a_grammar(quiet, params):
    """A grammar that may end later goes on; one that must end before is an error, not another text."""
    body = {"prompt": "def f(", "min_tokens": 10, "ignore_eos": True, **params}
    found = same_with_drafts(quiet, **body, regex="[a-z ]{2,60}")
    assert len(found["token_ids"]) >= 10
    for width in (1, 8):
        failed = quiet.post("/v1/completions", **body, max_tokens=32, regex="ab?", block_size=width)
        assert failed.status_code == 400, failed.text
        assert "no token" in failed.json()["error"]["message"]


@BOTH
def test_bad_words_never_come(quiet, llm, params):
    plain = same_with_drafts(quiet, prompt="def f(", **params)["text"]
    words = [plain[3:9], plain[:3], "return"]
    assert max(len(llm.tokenizer.encode_plain(word.lstrip())) for word in words if word.strip()) > 1
    words = [word for word in words if word.strip()]
    found = same_with_drafts(quiet, prompt="def f(", bad_words=words, **params)
    ids = found["token_ids"]
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            bad = llm.tokenizer.encode_plain(text)
            if text == word.lstrip() or len(bad) == len(llm.tokenizer.encode_plain(word.lstrip())):
                assert not any(ids[i : i + len(bad)] == bad for i in range(len(ids)))
    assert found["text"] != plain
    library = llm.generate(["def f("], SamplingParams(max_tokens=48, bad_words=words, **params), block_size=8)[0]
    assert library.token_ids == ids


@BOTH
def test_only_allowed_tokens_come(quiet, llm, params):
    allowed = sorted(set(llm.encode("abcdef(): \n")))
    found = same_with_drafts(quiet, prompt="def f(", allowed_token_ids=allowed, **params)
    assert set(found["token_ids"]) <= set(allowed)
    assert len(found["token_ids"]) == 48
    chat = [
        quiet.chat(allowed_token_ids=allowed, max_tokens=24, return_token_ids=True, block_size=n, **params)["choices"][
            0
        ]
        for n in (1, 8)
    ]
    assert chat[0] == chat[1]
    assert set(chat[0]["token_ids"]) <= set(allowed)


# How long a thought may be.


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
    """The prompt of the template opens the thought: it is told here that it does not."""
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
@pytest.mark.parametrize("more", [{}, {"min_tokens": 20}, {"include_stop_str_in_output": True}], ids=str)
def test_least_tokens_and_stops_of_responses(quiet, params, more):
    """As in chat."""
    shared = {"chat_template_kwargs": {"enable_thinking": False}, **params}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, **shared}
    stop = quiet.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"][3:5]
    right = quiet.post("/v1/chat/completions", **body, stop=stop, **more).json()["choices"][0]["message"]["content"]
    for width in (1, 8):
        asked = {"input": "hi", "max_output_tokens": 40, "stop": stop, "block_size": width, **shared, **more}
        found = quiet.post("/v1/responses", **asked).json()
        assert found["output"][0]["content"][0]["text"] == right
        assert found["usage"]["output_tokens"] >= more.get("min_tokens", 0)
    if "include_stop_str_in_output" in more:
        assert right.endswith(stop)


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


# Log-probabilities of chosen tokens.


@BOTH
def test_log_probabilities_of_chosen_tokens(quiet, llm, params):
    """Against those of the likeliest, where they are the same tokens; alone and beside likeliest ones."""
    body, close = {"max_tokens": 12, "return_tokens_as_token_ids": True, **params}, partial(pytest.approx, abs=1e-4)
    likeliest = complete(quiet, **body, prompt="def f(", logprobs=20)["logprobs"]
    ids = [int(key.partition(":")[2]) for key in likeliest["top_logprobs"][0]][:7]
    names = [f"token_id:{i}" for i in ids]
    for width, most in ((1, None), (8, None), (1, 2), (8, 2)):
        asked = {"logprob_token_ids": ids, "block_size": width} | ({} if most is None else {"logprobs": most})
        found = complete(quiet, **body, prompt="def f(", **asked)["logprobs"]
        assert found["tokens"] == likeliest["tokens"]
        for token, mine, top in zip(found["tokens"], found["top_logprobs"], likeliest["top_logprobs"], strict=True):
            best = sorted(top, key=top.get, reverse=True)[: most or 0]
            assert set(mine) == {token, *names, *best}
            same = set(mine) & set(top)
            assert [mine[key] for key in same] == close([top[key] for key in same])
        chat = quiet.chat(**{**body, **asked, "logprobs": True, "top_logprobs": most or 0})
        for entry in chat["choices"][0]["logprobs"]["content"]:
            tokens = [each["token"] for each in entry["top_logprobs"]]
            assert len(set(tokens)) == len(tokens)
            assert tokens[most or 0 :] == [name for name in names if name not in tokens[: most or 0]]


@BOTH
@pytest.mark.parametrize("most", [0, 3])
def test_log_probabilities_of_chosen_tokens_in_a_prompt(quiet, llm, params, most):
    """In SGLang's shapes, and where a completion echoes its prompt; against those of the likeliest 20."""
    prompts, close = [llm.encode("def f(x):"), llm.encode("import os")], partial(pytest.approx, abs=1e-4)
    named = [[prompts[0][1], prompts[0][2], 7], [prompts[1][1]]]
    sampling = {"max_new_tokens": 4, "temperature": params["temperature"], "sampling_seed": params.get("seed")}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    right = quiet.post("/generate", **body, top_logprobs_num=20).json()
    for width in (1, 8):
        asked = {"token_ids_logprob": named, "top_logprobs_num": most, "block_size": width}
        for i, found in enumerate(quiet.post("/generate", **body, **asked).json()):
            meta, best = found["meta_info"], right[i]["meta_info"]
            for side, count in (("input", len(prompts[i])), ("output", 4)):
                rows, top = meta[f"{side}_token_ids_logprobs"], best[f"{side}_top_logprobs"]
                assert len(rows) == count
                if side == "input":
                    assert (rows[0], top[0]) == (None, None)
                    rows, top = rows[1:], top[1:]
                for mine, tops in zip(rows, top, strict=True):
                    assert [(token, text) for _, token, text in mine] == [(token, None) for token in named[i]]
                    values = {token: value for value, token, _ in tops}
                    assert all(value == close(values[token]) for value, token, _ in mine if token in values)
                shown = [each and [entry[1] for entry in each] for each in meta.get(f"{side}_top_logprobs", [])]
                assert shown == (
                    [each and [entry[1] for entry in each[:most]] for each in best[f"{side}_top_logprobs"]]
                    if most
                    else []
                )
            for j in range(1, len(prompts[i])):
                given = [value for value, token, _ in meta["input_token_ids_logprobs"][j] if token == prompts[i][j]]
                assert all(value == close(meta["input_token_logprobs"][j][0]) for value in given)
        echoed = complete(
            quiet,
            prompt=prompts[0],
            echo=True,
            logprob_token_ids=named[0],
            max_tokens=4,
            block_size=width,
            return_tokens_as_token_ids=True,
            **params,
        )["logprobs"]["top_logprobs"]
        first = quiet.post("/generate", **body | {"input_ids": prompts[0]}, token_ids_logprob=named[0]).json()[
            "meta_info"
        ]
        rows = first["input_token_ids_logprobs"] + first["output_token_ids_logprobs"]
        assert echoed[0] is None
        for mine, row in zip(echoed[1:], rows[1:], strict=True):
            assert {f"token_id:{token}": close(value) for value, token, _ in row}.items() <= mine.items()


def test_log_probabilities_of_new_tokens_alone(quiet):
    body = {"text": "def f(", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    meta = quiet.post("/generate", **body, token_ids_logprob=[5]).json()["meta_info"]
    assert (meta["input_token_logprobs"], meta["input_token_ids_logprobs"]) == ([], [])
    assert [[token for _, token, _ in each] for each in meta["output_token_ids_logprobs"]] == [[5]] * 3
    for wrong in ([[5], [6]], [[5] * 21], [512], [[1], 2], [True]):
        found = quiet.post("/generate", **body, token_ids_logprob=wrong)
        assert found.status_code == 400, found.text


def test_allowed_tokens_are_read_once_each(quiet, monkeypatch):
    """However often a request says them: each choice reads them again."""
    seen, real = [], quiet.serving.llm.new_sequence

    def new_sequence(prompt, params, *args, **options):
        seen.append(params.allowed_token_ids)
        return real(prompt, params, *args, **options)

    monkeypatch.setattr(quiet.serving.llm, "new_sequence", new_sequence)
    found = quiet.post("/v1/completions", prompt="x", max_tokens=4, n=2, allowed_token_ids=[9, 7, 9] * 20_000)
    assert found.status_code == 200, found.text
    assert seen == [(9, 7)] * 2
