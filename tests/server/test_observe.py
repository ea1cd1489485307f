"""The log of requests, their spans, and events at an interval."""

import contextlib
import dataclasses
import gzip
import http.server
import json
import logging
import re
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dflash_jax.errors import InputError
from dflash_jax.frontend.sequence import Piece
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.observe import RequestLog
from dflash_jax.server.serving import Serving
from dflash_jax.server.tracing import Tracer
from tests.server.conftest import NAME, Running

PROMPT = "def private(value):"


@contextlib.contextmanager
def observed(server, begin=(), end=()):
    """The same model behind another address, with observers."""
    serving = Serving(server.serving.llm, in_process(server.host), server.serving.names)
    serving.on_begin, serving.on_end = begin, end
    running = Running(serving, server.host)
    try:
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("with_prompts", [False, True])
def test_the_log_has_ids_and_parameters_and_prompts_only_where_asked(quiet, caplog, with_prompts):
    requests = RequestLog(quiet.serving.llm.tokenizer.decode if with_prompts else None, 12)
    with caplog.at_level(logging.INFO), observed(quiet, [requests.begin], [requests.end]) as running:
        body = {"prompt": [PROMPT] * 2, "max_tokens": 4, "temperature": 0.7, "n": 10, "stop": ["a\nb"]}
        body["block_size"] = 4
        answer = running.http.post("/v1/completions", json=body, headers={"X-Request-Id": "id7"})
        assert answer.status_code == 200
        assert running.http.post("/v1/completions", json={"prompt": PROMPT, "n": -1}).status_code == 400
    lines = [r.message for r in caplog.records if r.name == "dflash_jax.requests"]
    begun = [line for line in lines if "params" in line]
    # 20 sequences: the first 16 one by one.
    assert len(begun) == 16
    assert len(lines) == 17
    assert all('"temperature": 0.7' in line and '"max_tokens": 4' in line for line in begun)
    assert begun[0].startswith("request cmpl-id7-0: ")
    # Stop strings are the client's text, too.
    assert ('"stop": "1 given"' in begun[0]) == (not with_prompts)
    assert re.search(r"status 200, 20 sequences, \d+ new tokens, length", lines[-1])
    drafters = answer.json()["usage"]["drafters"]["bundled"]
    accepted, drafted = (sum(drafters[f"{side}_per_pos"].values()) for side in ("accepted", "drafted"))
    assert lines[-1].endswith(f" s, {accepted} of {drafted} drafts of bundled accepted")
    assert ("def private" in caplog.text) == with_prompts
    assert "private(value" not in caplog.text
    assert all("\n" not in line for line in lines)


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        self.server.bodies.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def collector():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.bodies = []
        threading.Thread(target=server.serve_forever).start()
        yield server
        server.shutdown()


def test_a_span_of_each_request(quiet, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracer = Tracer(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    with observed(quiet, end=[tracer.end]) as running:
        trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Request-Id": "mine"}
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.5, "n": 2, "ignore_eos": True, "block_size": 4}
        usage = running.http.post("/v1/completions", json=body, headers=trace).json()["usage"]
        running.http.get("/v1/models")
        assert running.http.post("/v1/completions", json=body, headers={"traceparent": "00-broken"}).status_code == 200
    tracer.flush()
    resources = [r for body in collector.bodies for r in body.resource_spans]
    spans = [s for r in resources for scope in r.scope_spans for s in scope.spans]
    assert [s.name for s in spans] == ["llm_request"] * 2
    span = spans[0]
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert not spans[1].parent_span_id
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    assert values["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 8
    assert (values["gen_ai.request.id"], values["gen_ai.request.n"]) == ("cmpl-mine", 2)
    assert (values["gen_ai.request.temperature"], values["gen_ai.request.max_tokens"]) == (0.5, 4)
    assert values["gen_ai.latency.e2e"] >= values["gen_ai.latency.time_to_first_token"] > 0
    assert 0 <= values["gen_ai.latency.time_in_queue"] <= values["gen_ai.latency.e2e"]
    assert values["gen_ai.response.model"] == NAME
    for side in ("drafted", "accepted"):
        counts = [each.int_value for each in values[f"dflash.{side}_per_pos.bundled"].values]
        assert counts == list(usage["drafters"]["bundled"][f"{side}_per_pos"].values())[:3]
    assert span.end_time_unix_nano > span.start_time_unix_nano


def test_a_broken_collector_harms_no_request(quiet, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracer = Tracer("http://127.0.0.1:9/v1/traces")

    def broken(observed) -> None:
        monkeypatch.setattr(tracer, "_end", lambda observed: 1 / 0)
        tracer.end(observed)

    with observed(quiet, end=[tracer.end, broken]) as running:
        for _ in range(3):
            answer = running.post("/v1/completions", prompt=PROMPT, max_tokens=3)
            assert answer.status_code == 200


def test_what_tracing_lacks_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "json")
    with pytest.raises(InputError, match="'json': it must be grpc or http/protobuf"):
        Tracer("http://127.0.0.1:9")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(InputError, match=r'needs opentelemetry\S*: pip install "dflash-jax\[otlp\]"'):
        Tracer("http://127.0.0.1:9")


def test_joined_pieces_have_the_text_and_tokens_of_both():
    first = Piece("ab", [1, 2], [2], [1, 2], [5, 6], [{"a": 1}, {"a": 2}])
    last = Piece("cd", [3], [1], [2], [8], [{"a": 3}], "stop")
    entries = [{"a": 1}, {"a": 2}, {"a": 3}]
    assert first.joined(last) == Piece("abcd", [1, 2, 3], [2, 1], [1, 2, 4], [5, 6, 8], entries, "stop")


@pytest.mark.parametrize("block_size", [1, 8])
def test_events_at_an_interval_bring_the_same_text(quiet, monkeypatch, block_size):
    body = {"prompt": PROMPT, "max_tokens": 41, "temperature": 0.8, "seed": 5, "logprobs": 2}
    body |= {"block_size": block_size, "ignore_eos": True, "return_token_ids": True}
    whole = quiet.post("/v1/completions", **body).json()["choices"][0]

    def choices() -> list[dict]:
        text = quiet.post("/v1/completions", **body, stream=True).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return [event["choices"][0] for event in events]

    monkeypatch.setattr(quiet.serving, "stream_interval", 10)
    found = choices()
    assert "".join(c["text"] for c in found) == whole["text"]
    assert [i for c in found for i in c["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for c in found for x in c["logprobs"][name]] == whole["logprobs"][name]
    assert [c["finish_reason"] for c in found] == [None] * (len(found) - 1) + ["length"]
    assert all(len(c["token_ids"]) >= 10 for c in found[1:-1])
    assert len(found) <= 6


def test_logprobs_beyond_the_limit_are_refused(quiet, monkeypatch):
    monkeypatch.setattr(quiet.serving, "limits", dataclasses.replace(quiet.serving.limits, logprobs=2))
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True}
    native = {"text": "a", "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    for path, body in (
        ("/v1/chat/completions", ask | {"top_logprobs": 2, "logprob_token_ids": [5, 6]}),
        ("/generate", native | {"top_logprobs_num": 2, "token_ids_logprob": [[5, 6]]}),
    ):
        answer = quiet.post(path, **body)
        assert answer.status_code == 200, answer.text
    for path, body in (
        ("/v1/chat/completions", ask | {"top_logprobs": 3}),
        ("/v1/completions", {"prompt": "a", "logprobs": 3}),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 3}),
        ("/generate", native | {"top_logprobs_num": 3}),
    ):
        answer = quiet.post(path, **body)
        assert answer.status_code == 400
        assert "is 3: at most 2 are possible" in answer.text
    # Those of named tokens are bounded as well, beside the likeliest.
    for path, body, name in (
        ("/v1/chat/completions", ask | {"logprob_token_ids": [5, 6, 7]}, "logprob_token_ids"),
        ("/v1/completions", {"prompt": "a", "logprob_token_ids": [5, 6, 7]}, "logprob_token_ids"),
        ("/generate", native | {"token_ids_logprob": [5, 6, 7]}, "token_ids_logprob"),
        ("/generate", native | {"text": ["a", "b"], "token_ids_logprob": [[5], [5, 6, 7]]}, "token_ids_logprob"),
    ):
        answer = quiet.post(path, **body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["message"], error["param"]) == (f"{name} has 3 ids: at most 2 are possible", name)
