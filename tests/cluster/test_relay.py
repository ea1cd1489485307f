"""Streams that go on from another replica equal unbroken ones, on every endpoint."""

import asyncio
import json
import math
from collections import defaultdict
from unittest.mock import Mock

import aiohttp
import pytest

from dflash_jax.cluster import relay
from dflash_jax.cluster.routing import Replicas
from dflash_jax.server.resume import END, RECORD
from tests.server.conftest import MESSAGES, OFF, SCHEMA, TOOL, wait_until

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.6, "presence_penalty": 0.4}
CHAT = {"messages": MESSAGES, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
PROMPT = "def clamp(value, low, high):\n    "
CALLED = {"tools": [TOOL], "tool_choice": "required", "chat_template_kwargs": OFF}
ANTHROPIC_TOOL = {"name": "read_file", "input_schema": TOOL["function"]["parameters"]}
REQUESTS = {
    "chat": ("/v1/chat/completions", {**CHAT, **SAMPLED, "return_token_ids": True, "logprobs": True, "n": 2}),
    "chat without a seed": ("/v1/chat/completions", {**CHAT, "temperature": 1.0, "ignore_eos": True}),
    "chat with penalties": ("/v1/chat/completions", {**CHAT, **SAMPLED, **PENALTIES, "chat_template_kwargs": OFF}),
    "chat with tools": ("/v1/chat/completions", {**CHAT, **SAMPLED, **CALLED}),
    "chat with a schema": (
        "/v1/chat/completions",
        {
            **CHAT,
            **SAMPLED,
            "chat_template_kwargs": OFF,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "completions": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "max_tokens": 40,
            "stream": True,
            "echo": True,
            "logprobs": 2,
            "ignore_eos": True,
            **SAMPLED,
        },
    ),
    "completions with a stop string": (
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 60, "stream": True, "stop": ["return", "lue"], "min_tokens": 3},
    ),
    "completions with a regular expression": (
        "/v1/completions",
        {"prompt": [PROMPT, "x = "], "max_tokens": 30, "stream": True, "regex": "[a-z]{5,40}", **SAMPLED},
    ),
    "generate": (
        "/generate",
        {
            "text": PROMPT,
            "sampling_params": {"max_new_tokens": 40, "temperature": 0.8, "ignore_eos": True, **PENALTIES},
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        },
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60, "stream": True, "temperature": 0.9}),
    "messages with tools": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            "stream": True,
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any"},
        },
    ),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 50, "stream": True, "temperature": 0.9}),
}
# What depends on time, on the grouping of tokens into events, or on which drafts were accepted.
VARYING = {"e2e_latency", "timings", "spec_verify_ct", "spec_accept_length", "spec_accept_token_num"}
VARYING |= {"spec_draft_token_num", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"}
VARYING |= {"draft_rounds", "sequence_number", "input_tokens", "cache_read_input_tokens"}


def settled(value):
    """``value`` without `VARYING`."""
    if isinstance(value, dict):
        return {name: settled(each) for name, each in value.items() if name not in VARYING}
    if isinstance(value, list):
        return [settled(each) for each in value]
    return value


def is_same(a, b) -> bool:
    """Whether two values are equal, up to the last bits of log-probabilities."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return math.isclose(a, b, abs_tol=1e-3) if isinstance(a, float) and isinstance(b, float) else a == b


def events_of(text: str) -> list[dict]:
    assert ": record" not in text
    assert text.endswith("\n\n")
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def joined(events: list[dict]) -> dict:
    """What the events of a stream add up to, however tokens are grouped."""
    sums, others = defaultdict(list), []
    for event in events:
        for choice in event.pop("choices", []):
            place = choice["index"]
            for name in ("text", "token_ids"):
                sums[place, name].append(choice.pop(name, None))
            for name, value in (choice.pop("delta", None) or {}).items():
                if name != "tool_calls":
                    sums[place, name].append(value)
                for call in value if name == "tool_calls" else ():
                    sums[place, call["index"], "call"].append(call.get("id"))
                    sums[place, call["index"], "arguments"].append(call["function"]["arguments"])
            for name, value in (choice.pop("logprobs", None) or {}).items():
                # Both they and the delta have "content".
                sums[place, f"logprobs of {name}"].append(value)
            if choice["finish_reason"]:
                sums[place, "end"].append([settled(choice)])
        if event.get("type", "").endswith(("delta", ".delta")) and "usage" not in event:
            inner = event["delta"]
            for name, value in inner.items() if isinstance(inner, dict) else [("delta", inner)]:
                sums[event["type"], event.get("index", event.get("output_index")), name].append(value)
            sums[event["type"], "logprobs"].append(event.get("logprobs"))
        elif "meta_info" in event:
            others = [settled(event)]
        elif settled(event) not in others:
            others.append(settled(event))
    totals = {}
    for name, values in sums.items():
        values = [value for value in values if value is not None]
        if any(isinstance(value, list) for value in values):
            totals[name] = settled([each for value in values for each in value])
        else:
            totals[name] = "".join(dict.fromkeys(values) if name[-1] == "type" else values)
    return {"sums": totals, "others": others}


def stream(cluster, path: str, body: dict) -> str:
    answer = cluster.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return answer.text


@pytest.fixture
def keyed(monkeypatch):
    """Every request of the test has one key: ids and seeds are the same."""
    monkeypatch.setattr(relay.uuid, "uuid4", lambda: type("Key", (), {"hex": "key"}))
    monkeypatch.setattr(relay.time, "time", lambda: 1000.5)


@pytest.mark.parametrize("name", REQUESTS)
def test_cut_stream_equals_the_unbroken_one(cluster, keyed, name):
    path, body = REQUESTS[name]
    whole = joined(events_of(stream(cluster, path, body)))
    before, cuts = cluster.counts.resumed, cluster.cut.cuts
    for places in ([2], [5, 4], [9], [14, 6]):
        cluster.cut.places[:] = places
        events = events_of(stream(cluster, path, body))
        if path == "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert is_same(joined(events), whole), places
        cluster.cut.places.clear()
    assert cluster.cut.cuts - cuts >= 2
    assert cluster.counts.resumed - before >= 2
    assert wait_until(lambda: all(replica.serving.in_flight == 0 for replica in cluster.replicas.values()))


def test_stream_cut_at_every_place_equals_the_unbroken_one(cluster, keyed):
    path, body = REQUESTS["completions with a stop string"]
    whole, place = joined(events_of(stream(cluster, path, body))), 0
    while True:
        cluster.cut.places[:], before = [place], cluster.cut.cuts
        assert joined(events_of(stream(cluster, path, body))) == whole, place
        if cluster.cut.cuts == before:
            break
        place += 1
    cluster.cut.places.clear()
    assert place > 6


class Canned:
    """A replica's answer: parts of a stream; after the last one it waits, where ``waits``."""

    status, content_type, raw_headers = 200, "text/event-stream", ()

    def __init__(self, *parts: bytes, waits: bool = False):
        self.parts, self.waits, self.content = parts, waits, self

    async def iter_any(self):
        for part in self.parts:
            yield part
        if self.waits:
            await asyncio.Event().wait()

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


def test_a_piece_that_a_slow_client_waits_for_when_its_replica_ends_is_sent_once():
    piece, rest = b"data: 1" + END + RECORD + b"a" + END, b"data: 2" + END + RECORD + b"b" + END + b"data: [DONE]" + END
    got: list[bytes] = []

    async def main():
        replicas = Replicas(None)
        replicas.join("a", "http://a")
        answers, is_waiting = [Canned(piece, waits=True), Canned(piece, rest)], asyncio.Event()
        link = relay.Link(None, "s", replicas)
        link.request = lambda *_: answers.pop(0)

        async def send(message):
            # As uvicorn's, which waits for the client before it writes.
            if message.get("body") and not is_waiting.is_set():
                is_waiting.set()
                await asyncio.Event().wait()
            got.append(message.get("body", b""))

        scope = {"method": "POST", "path": "/v1/completions", "headers": []}
        answering = asyncio.create_task(relay.Relay(link, scope, b"", send).run(asyncio.Event().wait))
        await is_waiting.wait()
        replicas.join("b", "http://b")
        replicas.lose(replicas.all[0], "the test")
        await answering

    asyncio.run(main())
    assert b"".join(got) == b"data: 1" + END + b"data: 2" + END + b"data: [DONE]" + END


@pytest.mark.parametrize("sign", relay.IDLE)
def test_signs_that_a_stream_goes_on_pass_at_once_and_are_no_events(sign):
    """Before its first piece, and of a replica that dies then: the next one begins anew."""
    rest = b"data: 1" + END + sign + RECORD + b"a" + END + b"data: [DONE]" + END
    got: list[bytes] = []

    async def main():
        replicas = Replicas(None)
        replicas.join("a", "http://a")
        answers, has_come = [Canned(sign, waits=True), Canned(sign, rest)], asyncio.Event()
        link = relay.Link(None, "s", replicas)
        link.request = lambda *_: answers.pop(0)

        async def send(message):
            got.append(message.get("body", b""))
            if message.get("body"):
                has_come.set()

        scope = {"method": "POST", "path": "/v1/completions", "headers": []}
        answering = relay.Relay(link, scope, b"", send)
        task = asyncio.create_task(answering.run(asyncio.Event().wait))
        await has_come.wait()
        replicas.join("b", "http://b")
        replicas.lose(replicas.all[0], "the test")
        await task
        assert answering._events == 1

    asyncio.run(main())
    assert got == [b"", sign, sign, sign, b"data: 1" + END, b"data: [DONE]" + END]


def test_a_replica_that_refuses_an_abort_has_lost_the_stream():
    """It has the request, unlike one that refuses the request itself."""

    class RefusedError(aiohttp.ClientConnectorError):
        def __init__(self):
            super().__init__(Mock(ssl=True), ConnectionRefusedError("refused"))

    async def main():
        stream = relay.Relay(Mock(request=Mock(side_effect=RefusedError)), {"path": "/generate"}, b"{}", Mock())
        with pytest.raises(relay.NotThereError):
            await stream._attempt_at(Mock(attempts=set()), asyncio.get_running_loop().create_future())
        stream.add_abort({"path": "/abort_request"}, b"{}")
        stream._attempt = stream._send_aborts
        with pytest.raises(relay.LostError) as error:
            await stream._attempt_at(Mock(attempts=set()), asyncio.get_running_loop().create_future())
        assert not isinstance(error.value, relay.NotThereError)

    asyncio.run(main())
