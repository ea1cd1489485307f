"""``return_proposals``: what each round of a stream drafted, and how much of it was accepted."""

import json
import threading

import pytest

from dflash_jax.engine.config import NO_DRAFTER, Speculation
from tests.server.conftest import MESSAGES, OFF, SCHEMA, wait_until

CHAT = {"messages": MESSAGES, "max_tokens": 48, "block_size": 16, "chat_template_kwargs": OFF}
COMPLETION = {"prompt": "def clamp(value, low, high):", "max_tokens": 48, "block_size": 16}
SAMPLED = {"temperature": 0.9, "seed": 11}


def streamed(server, path: str, **body) -> list[dict]:
    """The choices of all chunks of a stream."""
    choices = []
    with server.http.stream("POST", path, json=body | {"stream": True, "return_token_ids": True}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line[6:])["choices"]
    return choices


def tokens_of(choices: list[dict], index: int = 0) -> list[int]:
    return [t for choice in choices if choice["index"] == index for t in choice.get("token_ids") or []]


def rounds_of(choices: list[dict], index: int = 0) -> list[dict]:
    return [r for choice in choices if choice["index"] == index for r in choice.get("proposals", [])]


def spelled(server, tokens: list[int]) -> list[str]:
    return [server.serving.llm.tokenizer.token_bytes(t).decode(errors="replace") for t in tokens]


def confirmed(rounds: list[dict]) -> list[str]:
    """The tokens that the rounds together yielded."""
    return [text for r in rounds for text in (*r["proposed"][: r["accepted"]], r["token"])]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_recorded_rounds_spell_the_same_tokens(quiet, path, body, sampling):
    plain = streamed(quiet, path, **body, **sampling)
    recorded = streamed(quiet, path, **body, **sampling, return_proposals=True)
    assert tokens_of(recorded) == tokens_of(plain)
    assert rounds_of(plain) == []
    rounds = rounds_of(recorded)
    assert confirmed(rounds) == spelled(quiet, tokens_of(recorded))
    assert all(len(r["proposed"]) == 15 for r in rounds)
    assert sum(r["accepted"] for r in rounds) > 3
    for r in rounds[:-1]:
        # The round before the end of the text goes on until a draft differs from the target's token.
        assert r["accepted"] == 15 or r["proposed"][r["accepted"]] != r["token"]


def test_without_new_tokens_there_is_no_round(quiet):
    body = COMPLETION | {"max_tokens": 0, "echo": True}
    assert rounds_of(streamed(quiet, "/v1/completions", **body, return_proposals=True)) == []


def test_a_round_has_no_more_drafts_than_the_block_size_allows(quiet):
    rounds = rounds_of(streamed(quiet, "/v1/completions", **COMPLETION | {"block_size": 4}, return_proposals=True))
    assert {len(r["proposed"]) for r in rounds} == {3}
    rounds = rounds_of(streamed(quiet, "/v1/completions", **COMPLETION | {"block_size": 1}, return_proposals=True))
    assert {(len(r["proposed"]), r["accepted"]) for r in rounds} == {(0, 0)}


def test_choices_are_recorded_one_by_one(quiet):
    both = streamed(quiet, "/v1/completions", **COMPLETION, **SAMPLED, n=2, return_proposals=True)
    for i in range(2):
        assert confirmed(rounds_of(both, i)) == spelled(quiet, tokens_of(both, i))


def test_a_grammar_rules_and_stops_are_kept(quiet):
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    for more in (form, {"min_tokens": 20}, {"stop": [")"]}, {"ignore_eos": True}, {"logprobs": True}):
        plain = streamed(quiet, "/v1/chat/completions", **CHAT, **more)
        recorded = streamed(quiet, "/v1/chat/completions", **CHAT, **more, return_proposals=True)
        assert tokens_of(recorded) == tokens_of(plain), more
        upto = len(tokens_of(recorded))
        assert confirmed(rounds_of(recorded))[:upto] == spelled(quiet, tokens_of(recorded)), more


def test_many_at_once_beside_requests_that_are_not_recorded(quiet):
    results: dict = {}

    def run(i: int) -> None:
        more = {"return_proposals": True} if i % 2 else {}
        results[i] = streamed(quiet, "/v1/completions", **COMPLETION, temperature=0.8, seed=i // 2, **more)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(0, 12, 2):
        assert tokens_of(results[i]) == tokens_of(results[i + 1])
        assert not rounds_of(results[i])
        assert confirmed(rounds_of(results[i + 1])) == spelled(quiet, tokens_of(results[i + 1]))


def test_a_client_that_leaves_frees_its_slot(quiet):
    body = COMPLETION | {"max_tokens": 900, "ignore_eos": True, "stream": True, "return_proposals": True}
    with quiet.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    assert wait_until(lambda: quiet.serving.in_flight == 0)


@pytest.mark.parametrize("value", ["yes", 1, [], {}, "true"])
def test_a_wrong_type_is_refused(quiet, value):
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        answer = quiet.post(path, **body, stream=True, return_proposals=value)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_proposals"


def test_where_rounds_cannot_be_recorded_the_request_is_refused(quiet, monkeypatch):
    def refusal(**more) -> str:
        answer = quiet.post("/v1/chat/completions", **CHAT | {"return_proposals": True} | more)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_proposals"
        return answer.json()["error"]["message"]

    assert refusal() == "return_proposals needs stream: true"
    monkeypatch.setattr(quiet.serving.hello, "largest_block", 1)
    assert "needs a drafter" in refusal(stream=True)
    monkeypatch.setattr(quiet.serving.hello, "largest_block", 16)
    monkeypatch.setattr(quiet.serving.hello, "has_masks", False)
    assert "structured output" in refusal(stream=True)


def test_streams_say_how_their_rate_compares_with_plain_decoding(quiet, monkeypatch):
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True, "include_timings": True}}

    def last_timings() -> dict:
        with quiet.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        return lines[-1]["timings"]

    policy = quiet.host.engine.engine.policy
    plain = min(policy.seconds[1, b] for b in (NO_DRAFTER, Speculation(1)) if (1, b) in policy.seconds)
    timings = last_timings()
    assert timings["speedup"] == pytest.approx(timings["tokens_per_s"] * plain, rel=0.5)
    # A prediction is no measurement.
    monkeypatch.setattr(policy, "seconds", {(1, Speculation(16)): 1.0})
    monkeypatch.setattr(policy, "observe_seconds", lambda *_: None)
    assert last_timings()["speedup"] is None
