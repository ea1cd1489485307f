"""What answers hold without being asked: the command line's flags for all requests."""

import json
import re
import time
from types import SimpleNamespace

import pytest

from dflash_jax import SamplingParams
from dflash_jax.server.answers import request_metrics
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.limits import Additions
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, NAME, OFF, Running

CHAT = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "chat_template_kwargs": OFF, "ignore_eos": True}
TEXT = {"prompt": "def f(", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@pytest.fixture
def adding(server):
    """Starts a server on the same engine, with additions."""
    running = []

    def start(**additions) -> Running:
        serving = Serving(server.serving.llm, in_process(server.host), [NAME], additions=Additions(**additions))
        running.append(Running(serving, server.host))
        return running[-1]

    yield start
    for each in running:
        each.stop()


def streamed(server, path, **body) -> list[dict]:
    found = server.post(path, **BODIES[path] | {"stream": True} | body)
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", BODIES)
def test_usage_in_every_chunk(adding, path):
    chunks = streamed(adding(stream_usage="always"), path)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_usage_at_the_end(adding, path, options):
    chunks = streamed(adding(stream_usage="at the end"), path, stream_options=options)
    assert [bool(chunk["usage"]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


TIMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}


@pytest.mark.parametrize("path", BODIES)
def test_metrics_of_a_request(adding, path):
    server = adding(metrics=True)
    began = time.monotonic()
    metrics = server.post(path, **BODIES[path]).json()["metrics"]
    elapsed_ms = 1e3 * (time.monotonic() - began)
    assert set(metrics) == TIMES
    times = [metrics[f"{name}_ms"] for name in ("queue_time", "time_to_first_token", "generation_time")]
    assert min(times) >= 0
    assert 0 < sum(times) <= elapsed_ms
    # Of a single token there is nothing between tokens.
    assert TIMES - set(server.post(path, **BODIES[path] | {"max_tokens": 1}).json()["metrics"]) == {"mean_itl_ms"}
    # Several sequences have no times in common.
    assert "metrics" not in server.post(path, **BODIES[path], n=2).json()
    chunks = streamed(server, path, stream_options={"include_usage": True})
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_metrics_of_a_response(adding):
    found = adding(metrics=True).post("/v1/responses", input="hi", max_output_tokens=6).json()
    assert {"queue_time_ms", "tokens_per_second"} <= set(found["metrics"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("level", ["summary", "detailed"])
def test_counts_of_a_requests_drafts(adding, path, level):
    server, body = adding(drafts=level), BODIES[path] | {"max_tokens": 60, "block_size": 8}
    answer = server.post(path, **body).json()
    chunks = streamed(server, path, **body, stream_options={"include_usage": True})
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    found = answer["metrics"]["speculative_decoding"]
    assert chunks[-1]["metrics"]["speculative_decoding"] == found
    details = answer["usage"]["completion_tokens_details"]
    accepted, rounds = details["accepted_prediction_tokens"], details["draft_rounds"]
    histogram = found["acceptance_histogram"]
    assert (len(histogram), sum(histogram)) == (16, rounds)
    assert sum(i * count for i, count in enumerate(histogram)) == accepted
    assert found | {"acceptance_histogram": 0, "per_step_accepted": 0, "per_step_drafted": 0} == {
        "mean_acceptance_length": pytest.approx(1 + accepted / rounds),
        "draft_acceptance_rate": accepted / (7 * rounds),
        "acceptance_histogram": 0,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": 7 * rounds,
        "num_spec_tokens": 15,
        "per_step_accepted": 0,
        "per_step_drafted": 0,
    }
    assert ("per_step_accepted" in found) == (level == "detailed")
    if level == "detailed":
        steps = found["per_step_accepted"]
        assert [steps.count(n) for n in range(16)] == histogram
        assert found["per_step_drafted"] == [7] * rounds
    # Several sequences have no rounds in common, and plain rounds are no steps.
    assert "metrics" not in server.post(path, **body, n=2).json()
    plain = server.post(path, **body | {"block_size": 1}).json()["metrics"]["speculative_decoding"]
    assert (plain["num_spec_steps"], plain["acceptance_histogram"]) == (0, [0] * 16)
    assert (plain["mean_acceptance_length"], plain["draft_acceptance_rate"]) == (1.0, 0.0)


@pytest.mark.parametrize("path", BODIES)
def test_sglangs_counts_of_drafts_where_a_request_asks_for_them(server, path):
    body = BODIES[path] | {"max_tokens": 60, "block_size": 8, "return_spec_tokens_details": True, "n": 2}
    answer = server.post(path, **body).json()
    found, usage = answer["sglext"]["spec_tokens_details"], answer["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert (found["spec_num_correct_drafts"], found["spec_verify_ct"]) == (accepted, 120 - accepted)
    assert sum(found["spec_correct_drafts_histogram"]) == found["spec_verify_ct"]
    chunks = streamed(server, path, **body)
    assert chunks[-1] | {"choices": [], "sglext": answer["sglext"]} == chunks[-1]
    assert not any("sglext" in chunk for chunk in [*chunks[:-1], *streamed(server, path)])
    assert "usage" not in chunks[-1]


@pytest.mark.parametrize("given", [None, True, False])
def test_tokens_as_ids_unless_the_request_says_otherwise(adding, given):
    server, more = adding(tokens_as_ids=True), {"return_tokens_as_token_ids": given}
    text = server.post("/v1/completions", **TEXT, logprobs=2, **more).json()["choices"][0]["logprobs"]
    chat = server.post("/v1/chat/completions", **CHAT, logprobs=True, **more).json()["choices"][0]["logprobs"]
    for token in [*text["tokens"], *(entry["token"] for entry in chat["content"])]:
        assert token.startswith("token_id:") == (given is not False)


@pytest.mark.parametrize("path", BODIES)
def test_request_ids_of_requests_without_one(adding, path):
    server = adding(request_ids=True)
    told = server.http.get("/health").headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", told)
    answers = [server.post(path, **BODIES[path]) for _ in range(2)]
    assert len({told, *(answer.headers["x-request-id"] for answer in answers)}) == 3
    assert all(answer.json()["id"].endswith(f"-{answer.headers['x-request-id']}") for answer in answers)
    assert server.http.get("/health", headers={"X-Request-Id": "h.2"}).headers["x-request-id"] == "h.2"
    assert server.post(path, **BODIES[path], request_id="a-1").headers["x-request-id"] == "a-1"
    assert server.http.post(path, json={}).headers["x-request-id"]


def test_anthropics_request_id_is_the_other_one(adding):
    found = adding(request_ids=True).http.post("/v1/messages", json={})
    assert found.headers["request-id"] == found.json()["request_id"] == f"req_{found.headers['x-request-id']}"


def test_nothing_is_added_by_default(server):
    for path, body in BODIES.items():
        assert "metrics" not in server.post(path, **body).json()
        assert not any(chunk.get("usage") for chunk in streamed(server, path))


def test_metrics_of_a_sequence_that_is_not_submitted_and_of_several_are_empty(llm):
    serving = SimpleNamespace(additions=Additions(metrics=True))
    sequence = llm.new_sequence([5], SamplingParams(max_tokens=1))
    assert request_metrics(serving, [sequence]) == {}
    assert request_metrics(serving, [sequence, sequence]) == {}
