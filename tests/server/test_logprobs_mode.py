"""What log-probabilities are of: by the request, the server's option, and the endpoint's own rule."""

from dataclasses import replace

import pytest

from dflash_jax import SamplingParams
from dflash_jax.sampling_params import LOGPROBS_MODES as MODES
from tests.server.conftest import MESSAGES

SAMPLING = {"temperature": 0.7, "top_k": 5, "frequency_penalty": 0.5, "ignore_eos": True}
PROMPT = "def f("


@pytest.fixture(scope="module")
def expected(llm):
    """By mode, log-probabilities of the same tokens, and the log-probabilities of the prompt."""
    options = {"seed": 4, "max_tokens": 8, "logprobs": 0, "prompt_logprobs": 0, **SAMPLING}
    params = [SamplingParams(logprobs_mode=mode, **options) for mode in MODES]
    found = dict(zip(MODES, llm.generate([PROMPT] * len(MODES), params), strict=True))
    values = {mode: [entry["logprob"] for entry in c.logprobs] for mode, c in found.items()}
    assert len({c.text for c in found.values()}) == 1
    assert len({tuple(each) for each in values.values()}) == len(MODES)
    prompts = {m: [next(iter(entry.values())).logprob for entry in c.prompt_logprobs[1:]] for m, c in found.items()}
    return {mode: (pytest.approx(values[mode], abs=1e-4), pytest.approx(prompts[mode], abs=1e-4)) for mode in MODES}


def answers(server, **fields) -> dict[str, list[float]]:
    """The log-probabilities of each endpoint."""
    body = {"seed": 4, "max_tokens": 8, **SAMPLING, **fields}
    text = server.post("/v1/completions", prompt=PROMPT, logprobs=0, **body)
    assert text.status_code == 200, text.text
    native = {**SAMPLING, "sampling_seed": 4, "max_new_tokens": 8, **fields}
    meta = server.post("/generate", text=PROMPT, return_logprob=True, logprob_start_len=0, sampling_params=native)
    assert meta.status_code == 200, meta.text
    meta = meta.json()["meta_info"]
    return {
        "completions": text.json()["choices"][0]["logprobs"]["token_logprobs"],
        "generate": [value for value, _, _ in meta["output_token_logprobs"]],
        "prompt": [value for value, _, _ in meta["input_token_logprobs"]][1:],
    }


def test_completions_are_raw_and_generate_is_scaled_by_the_temperature(quiet, expected):
    """SGLang's rule: penalties, bias and temperature count, cuts do not. Log-probabilities of the prompt are raw."""
    found = answers(quiet)
    assert found["completions"] == expected["raw_logprobs"][0]
    assert found["generate"] == expected["scaled_logprobs"][0]
    assert found["prompt"] == expected["raw_logprobs"][1]


def test_generate_is_raw_where_it_is_greedy(quiet, llm):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0)
    (right,) = llm.generate([PROMPT], params)
    sampling = {"temperature": 0, "max_new_tokens": 6}
    meta = quiet.post("/generate", text=PROMPT, return_logprob=True, sampling_params=sampling).json()["meta_info"]
    values = [value for value, _, _ in meta["output_token_logprobs"]]
    assert values == pytest.approx([entry["logprob"] for entry in right.logprobs], abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_says_what_its_log_probabilities_are(quiet, expected, mode):
    found = answers(quiet, logprobs_mode=mode)
    assert found["completions"] == expected[mode][0]
    assert found["generate"] == expected[mode][0]
    assert found["prompt"] == expected[mode][1]


def test_chats_and_responses_take_the_mode(quiet):
    more = {"temperature": 0.7, "seed": 4, "chat_template_kwargs": {"enable_thinking": False}}
    found = {}
    for mode in (None, "raw_logprobs", "scaled_logprobs"):
        chat = quiet.chat(**more, max_tokens=6, logprobs=True, logprobs_mode=mode)["choices"][0]["logprobs"]["content"]
        body = {"input": MESSAGES, "max_output_tokens": 6, "include": ["message.output_text.logprobs"], **more}
        answer = quiet.post("/v1/responses", **body, logprobs_mode=mode)
        assert answer.status_code == 200, answer.text
        parts = [part for item in answer.json()["output"] for part in item.get("content", ())]
        found[mode] = [e["logprob"] for e in chat], [e["logprob"] for part in parts for e in part["logprobs"]]
    for mine, raw, scaled in zip(found[None], found["raw_logprobs"], found["scaled_logprobs"], strict=True):
        assert len(mine) > 1
        assert mine == pytest.approx(raw, abs=1e-4)
        assert scaled != pytest.approx(raw, abs=1e-2)


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_the_mode_of_the_llm_is_that_of_all_endpoints(quiet, expected, mode, monkeypatch):
    llm = quiet.serving.llm
    monkeypatch.setattr(llm, "defaults", replace(llm.defaults, logprobs_mode=mode))
    found = answers(quiet)
    assert found["completions"] == expected[mode][0]
    assert found["generate"] == expected[mode][0]
    assert answers(quiet, logprobs_mode="raw_logits")["completions"] == expected["raw_logits"][0]


def test_an_unknown_mode_is_refused_by_its_name(quiet):
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 0, "logprobs_mode": "cooked"}),
        ("/v1/completions", {"prompt": PROMPT, "logprobs": 0, "logprobs_mode": 3}),
        ("/generate", {"text": PROMPT, "sampling_params": {"logprobs_mode": "raw_probs"}}),
    ):
        found = quiet.post(path, **body)
        assert found.status_code == 400
        assert "logprobs_mode" in found.json()["error"]["message"]
