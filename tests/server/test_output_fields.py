"""Fields that shape what comes back: where tokens begin, echo, stops, special tokens, which tokens may come.

Whatever changes a text is tried with drafts (block size 8) and without (1), greedy and sampled: equal tokens.
"""

from functools import partial
from itertools import pairwise
from math import isfinite

import pytest

from dflash_jax import SamplingParams
from tests.server.both_ways import BOTH, PROMPT, complete, joined, same_with_drafts, stream
from tests.server.conftest import MESSAGES

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


@pytest.mark.parametrize("temperature", [1e-46, 2e-38, 1e-37, 1e-20])
@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 1e-38}, {"repetition_penalty": 1e-30}])
def test_the_smallest_temperatures_are_greedy(quiet, temperature, options):
    body = {"prompt": PROMPT, "max_tokens": 8, "seed": 3} | options
    best = complete(quiet, **body, temperature=0)
    assert same_with_drafts(quiet, **body, temperature=temperature)["text"] == best["text"]
    found = complete(quiet, **body, temperature=temperature, logprobs=2)
    assert found["text"] == best["text"]
    assert all(isfinite(value) and value <= 0 for value in found["logprobs"]["token_logprobs"])
