"""Log-probabilities of drawn and of chosen tokens, with drafts and without."""

from functools import partial

import pytest

from tests.server.both_ways import BOTH, PROMPT, complete


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
    sampling["logprobs_mode"] = "raw_logprobs"
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
