"""vLLM's /inference/v1/generate: token ids in, token ids out."""

import json

import pytest

from dflash_jax import SamplingParams

PROMPT = [40, 41, 42, 43, 44]
PATH = "/inference/v1/generate"
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def ask(server, sampling, **fields):
    found = server.post(PATH, token_ids=PROMPT, sampling_params=sampling, **fields)
    assert found.status_code == 200, found.text
    return found.json()


def events(server, **body) -> list[dict]:
    with server.http.stream("POST", PATH, json={"token_ids": PROMPT, "stream": True, **body}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_tokens_are_the_library_s(quiet, llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    own = llm.generate([PROMPT], params, block_size=1)[0]
    found = ask(quiet, GREEDY | {"logprobs": 2, "prompt_logprobs": 1}, request_id="mine", model="tiny")
    assert (found["request_id"], found["model"], found["kv_transfer_params"]) == ("mine", "tiny", None)
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (5, 20)
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == 5
    (choice,) = found["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, own.token_ids, "length")
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]
    assert choice["stop_reason"] is choice["routed_experts"] is choice["sampling_mask"] is None
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == own.token_ids
    for entry, theirs in zip(content, own.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
        # A greedy token is the likeliest one.
        assert entry["rank"] == entry["top_logprobs"][0]["rank"] == 1
        assert [each["token_id"] for each in entry["top_logprobs"]] == list(theirs["top"])
        assert entry["token"] == f"token_id:{entry['token_id']}"


def test_a_stream_brings_the_tokens_and_the_log_probabilities_of_the_answer(quiet):
    sampling = {"temperature": 0.8, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "n": 2}
    whole = ask(quiet, sampling)["choices"]
    assert whole[0]["token_ids"] != whole[1]["token_ids"]
    options = {"include_usage": True}
    *chunks, last = events(quiet, sampling_params=sampling, stream_options=options, request_id="mine")
    assert {chunk["request_id"] for chunk in (*chunks, last)} == {"mine"}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 80)
    for choice in whole:
        of_choice = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token for part in of_choice for token in part["token_ids"]] == choice["token_ids"]
        content = [entry for part in of_choice for entry in part["logprobs"]["content"]]
        assert len(content) == len(choice["logprobs"]["content"])
        # Other requests beside it: programs of other batch sizes, which add in another order.
        for entry, other in zip(content, choice["logprobs"]["content"], strict=True):
            assert entry["token_id"] == other["token_id"]
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [part["finish_reason"] for part in of_choice][-1] == "length"
        assert of_choice[-1]["weight_versions"] == choice["weight_versions"]


def test_stops_and_forms(quiet, llm):
    found = ask(quiet, GREEDY | {"max_tokens": 60, "structured_outputs": {"regex": "[ab]{4}"}, "ignore_eos": False})
    assert llm.tokenizer.decode(found["choices"][0]["token_ids"]).rstrip("\0")[:4].strip("ab") == ""
    ids = ask(quiet, GREEDY)["choices"][0]["token_ids"]
    found = ask(quiet, GREEDY | {"stop_token_ids": [ids[7]]})["choices"][0]
    end = ids.index(ids[7]) + 1
    assert (found["token_ids"], found["finish_reason"], found["stop_reason"]) == (ids[:end], "stop", ids[7])
    biased = ask(quiet, GREEDY | {"logit_bias": {"17": 100}})["choices"][0]["token_ids"]
    assert set(biased) == {17}
    # As many as there is room for.
    found = ask(quiet, {"temperature": 0, "ignore_eos": True, "allowed_token_ids": [17]})
    assert len(found["choices"][0]["token_ids"]) == 1024 - len(PROMPT)


def test_a_rendered_request_is_one(quiet):
    rendered = quiet.post("/v1/completions/render", prompt="def f(", max_tokens=9, temperature=0).json()[0]
    found = quiet.post(PATH, **rendered)
    assert found.status_code == 200, found.text
    text = quiet.post("/v1/completions", prompt="def f(", max_tokens=9, temperature=0, return_token_ids=True).json()
    assert found.json()["choices"][0]["token_ids"] == text["choices"][0]["token_ids"]
    assert found.json()["request_id"] == rendered["request_id"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**6]}, "out of vocabulary"),
        ({"token_ids": "x"}, "token_ids"),
        ({"token_ids": [5] * 2000}, "maximum context length"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": 5000}}, "maximum context length"),
        ({"sampling_params": {"best_guess": 1}}, "best_guess"),
        ({"sampling_params": {"logprobs": 21}}, "logprobs"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args"),
        ({"sampling_params": {"n": 17}}, "n is 17"),
        ({"features": {"mm_hashes": {}}}, "features is not supported"),
        ({"return_routed_experts": True}, "return_routed_experts is not supported"),
        ({"return_sampling_mask": True}, "return_sampling_mask is not supported"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_what_is_not_possible_is_named(quiet, body, name):
    found = quiet.post(PATH, **{"token_ids": PROMPT, "sampling_params": {}} | body)
    assert found.status_code == 400, found.text
    assert name in found.json()["error"]["message"]


def test_another_model_is_not_found(quiet):
    assert quiet.post(PATH, token_ids=PROMPT, sampling_params={}, model="other").status_code == 404
