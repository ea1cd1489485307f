"""Requests with drafts and without, greedy and sampled, streamed and not, which have to give equal tokens."""

import json

import pytest

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
