"""What clients do wrong, and what they do at the wrong moment."""

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from dflash_jax import SamplingParams, protocol
from dflash_jax.errors import EngineError
from dflash_jax.server.engine_client import Inbox, RemoteSequence
from dflash_jax.server.engine_host import EngineHost, in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import Running, hosted, started, wait_until

JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
BAD = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "unknown field": ({"messages": HI, "best_guess": 1}, "best_guess"),
    "unknown field inside": ({"messages": HI, "stream_options": {"mood": 1}}, "stream_options.mood"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    "wrong type": ({"messages": HI, "temperature": "hot"}, "temperature"),
    "out of range": ({"messages": HI, "top_p": 1.5}, "top_p"),
    "a number that is none": ({"messages": HI, "temperature": float("nan")}, "temperature"),
    "bool for a number": ({"messages": HI, "max_tokens": True}, "max_tokens"),
    "too many choices": ({"messages": HI, "n": 17}, "n"),
    "too many logprobs": ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    "too many stops": ({"messages": HI, "stop": ["a"] * 17}, "stop"),
    "an empty stop": ({"messages": HI, "stop": [""]}, "stop"),
    "bias of no token": ({"messages": HI, "logit_bias": {"x": 1}}, "logit_bias"),
    "bias outside": ({"messages": HI, "logit_bias": {"99999": 1}}, None),
    "too long": ({"messages": [{"role": "user", "content": "x " * 1500}]}, "messages"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    "half a character": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    "a schema that is none": ({"messages": HI, "guided_json": {"type": "nothing"}}, "guided_json"),
    "a broken expression": ({"messages": HI, "regex": "(("}, "regex"),
    "a costly expression": ({"messages": HI, "regex": ".*" * 500 + "x"}, "regex"),
    "a long grammar": ({"messages": HI, "grammar": "x" * 70_000}, "grammar"),
    "two forms": ({"messages": HI, "regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    "no such tool": ({"messages": HI, "tools": [], "tool_choice": "required"}, "tool_choice"),
    "stop ids and the grammar's own": (
        {"messages": HI, "regex": "a", "ignore_eos": True, "stop_token_ids": list(range(5, 21))},
        "stop_token_ids",
    ),
    "a long stop": ({"messages": HI, "stop": "x" * 300}, "stop"),
    "a grammar that ends in the middle": ({"messages": HI, "grammar": 'root ::= "a\\'}, "grammar"),
    "parameters of no object": (
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    "properties of no object": (
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}]},
        "tools[0].function.parameters",
    ),
    "many wrong items": ({"messages": [1] * 10**5}, "messages[0]"),
    "a million wrong items": ({"messages": [1] * 10**6}, None),
    "many unknown fields": ({"messages": HI} | {f"x{i}": 1 for i in range(60_000)}, "x0"),
    "a million unknown fields": ({"messages": HI} | {f"x{i}": 1 for i in range(500_000)}, None),
    "an option that is none of the template's": (
        {"messages": HI, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize",
    ),
    "a block too wide": ({"messages": HI, "block_size": 17}, None),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named(quiet, name):
    body, param = BAD[name]
    found = quiet.http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    code = "context_length_exceeded" if name == "too long" else 400
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", code)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            "/v1/chat/completions",
            {"messages": HI, "temprature": 1},
            "temprature is not supported: did you mean temperature?",
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "stream_options": {"include_usag": True}},
            "stream_options.include_usag is not supported: did you mean include_usage?",
        ),
        ("/v1/completions", {"promt": "a"}, "promt is not supported: did you mean prompt?"),
        ("/v1/responses", {"inputs": "a"}, "inputs is not supported: did you mean input?"),
        ("/v1/completions", {"prompt": "a", "x" * 10**6: 1}, f"{'x' * 64} is not supported"),
    ],
)
def test_a_wrong_field_gets_the_near_one(quiet, path, body, message):
    found = quiet.http.post(path, json=body)
    assert (found.status_code, found.json()["error"]["message"]) == (400, message)


def test_another_model_is_not_found(quiet):
    found = quiet.post("/v1/chat/completions", messages=HI, model="gpt-5")
    assert found.status_code == 404
    assert "tiny" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[1]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', 413),
    ],
)
def test_malformed_body_gets_its_status_and_a_message(quiet, content, status):
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        found = quiet.http.post(path, content=content, headers=JSON)
        assert found.status_code == status, found.text[:300]
        assert found.json()["error"]["message"]


def test_a_body_without_a_length_is_limited_too(quiet):
    found = quiet.http.post("/v1/completions", content=(b"x" * 2**20 for _ in range(50)), headers=JSON)
    assert found.status_code == 413


def test_our_own_document_is_true(quiet):
    """Whatever is posted: no 5xx, and no answer outside of the document's schemas."""
    schema = schemathesis.openapi.from_url(f"{quiet.url}/openapi.json")
    checks = [schemathesis.checks.not_a_server_error, schemathesis.specs.openapi.checks.response_schema_conformance]
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy())
        def check(case):
            nonlocal count
            count += 1
            case.call_and_validate(checks=checks, timeout=60)

        check()
    assert count > 100


def test_server_with_a_key_refuses_requests_without_it(llm, quiet):
    serving = Serving(llm, in_process(quiet.host), ["tiny"])
    running = Running(serving, quiet.host, "secret")
    try:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            found = running.http.get("/v1/models", headers=headers)
            assert found.status_code == 401
            assert "secret" not in found.text
        assert running.http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert running.http.get("/health").status_code == running.http.get("/").status_code == 200
        assert running.http.post("/generate", json={"text": "x"}).status_code == 401
    finally:
        running.stop()


def posting(server, stack: contextlib.ExitStack, **body) -> socket.socket:
    """A connection that has sent a request, and reads nothing yet."""
    text = json.dumps(body)
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    s = stack.enter_context(socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))))
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{text}".encode())
    return s


def test_a_client_that_goes_away_aborts(quiet, monkeypatch):
    """At any moment: at once, when it was let in, in prefill, between tokens, streaming or not. What the device brings
    is held back until the client has left."""
    serving, engine = quiet.serving, quiet.host.engine.engine
    statistics, told = engine.statistics, 0
    moments = (
        lambda: True,
        lambda: serving.in_flight > 0,
        lambda: engine.running > 0,
        lambda: statistics.new_tokens > told,
    )
    before, moment, left = statistics.requests["abort"], moments[0], threading.Event()

    def read(*args, original=engine.runner.read):
        # A read for the client before must not keep this one from its moment.
        if moment():
            left.wait(120)
        return original(*args)

    monkeypatch.setattr(engine.runner, "read", read)
    for i in range(24):
        moment, told, left = moments[i // 2 % 4], statistics.new_tokens, threading.Event()
        with contextlib.ExitStack() as stack:
            posting(quiet, stack, prompt="def f(" * 20, max_tokens=700, ignore_eos=True, stream=i % 2 == 0)
            assert wait_until(moment)
        assert wait_until(lambda: serving.in_flight == 0)
        left.set()
        assert quiet.idle()
    # Surely of those that had a slot.
    assert statistics.requests["abort"] >= before + 12


def test_a_slow_client_holds_up_nobody(quiet):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            posting(quiet, stack, prompt="def f(", max_tokens=900, ignore_eos=True, stream=True, logprobs=5)
        assert quiet.chat(max_tokens=8)["usage"]["completion_tokens"] == 8
    assert quiet.idle()


def test_server_answers_beside_a_thousand_idle_connections(quiet):
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", int(quiet.url.rpartition(":")[2]))))
        assert quiet.chat(max_tokens=4)["usage"]["completion_tokens"] == 4


def test_a_full_queue_says_try_again(quiet, monkeypatch):
    """The device is held until the queue is full."""
    statuses, lock, device = [], threading.Lock(), quiet.host.engine.engine.runner

    def read(*args, original=device.read):
        wait_until(lambda: any(status == 429 for status, _ in statuses))
        return original(*args)

    monkeypatch.setattr(device, "read", read)

    def ask() -> None:
        found = httpx.post(
            f"{quiet.url}/v1/completions", json={"prompt": "x", "max_tokens": 200, "ignore_eos": True}, timeout=120
        )
        with lock:
            statuses.append((found.status_code, found.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(90)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {s for s, _ in statuses} == {200, 429}
    assert all(after == "1" for status, after in statuses if status == 429)


def test_more_texts_than_there_are_places_are_refused_for_good(quiet):
    """The queue is empty: no later time is better. 4 slots and 64 places."""
    found = quiet.post("/v1/completions", prompt=["x"] * 5, n=16, max_tokens=1)
    assert found.status_code == 400
    assert "80 sequences at once" in found.json()["error"]["message"]
    assert quiet.post("/v1/completions", prompt=["x"] * 17, n=4, max_tokens=1).status_code == 200


def test_others_have_a_turn_between_two_pieces_that_are_there_already(quiet, monkeypatch):
    """A stream of pieces that nothing has to wait for."""
    turns = []

    @contextlib.asynccontextmanager
    async def submitted(sequences):
        inbox = Inbox()
        for i in range(200):
            inbox.put(i, protocol.Event(i, [5], [1], finish_reason="stop"))
        yield inbox

    async def other():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def read() -> None:
        params = SamplingParams(max_tokens=1)
        sequences = [quiet.serving.llm.sequence([5], params, kind=RemoteSequence) for _ in range(200)]
        beside = asyncio.create_task(other())
        counts = [len(turns) async for _ in quiet.serving.merged(sequences)]
        beside.cancel()
        assert len(set(counts)) == len(counts) == 200

    monkeypatch.setattr(quiet.serving.engine, "submitted", submitted)
    asyncio.run(read())


def test_a_request_may_take_all_places_at_once(quiet):
    engine = quiet.host.engine
    places = engine.engine.runner.slots + engine.engine.config.max_queue
    body = {"prompt": [[5]] * (places // 4), "n": 4, "max_tokens": 1}
    found = quiet.post("/v1/completions", **body)
    assert found.status_code == 200, found.text
    assert len(found.json()["choices"]) == places


def test_a_failed_engine_is_told_and_health_turns_red(llm):
    engine = started(llm, prepared=False)
    host = hosted(llm, engine)
    serving = Serving(llm, in_process(host), ["tiny"])
    running, codes = Running(serving, host), []
    try:
        assert running.http.get("/health").status_code == 200

        def fail(*_):
            wait_until(lambda: engine.open_requests == 3)
            raise RuntimeError("the device is on fire")

        def ask(**more) -> None:
            codes.append(running.post("/v1/completions", prompt="def f(", max_tokens=500, ignore_eos=True, **more))

        engine.engine.runner.read = fail
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        # 503 where the engine had failed before the request reached it.
        assert {500} <= {c.status_code for c in codes} <= {500, 503}
        assert all("on fire" in c.json()["error"]["message"] for c in codes)
        assert running.http.get("/health").status_code == 503
        refused = running.post("/v1/completions", prompt="x")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "on fire" in refused.json()["error"]["message"]
        with pytest.raises(EngineError):
            engine.check([llm.new_sequence("x", SamplingParams()).request])
    finally:
        running.stop()
        engine.stop()


def test_before_warm_up_requests_are_refused(llm, quiet):
    host = EngineHost(llm, quiet.host.engine, "tiny")
    running = Running(Serving(llm, in_process(host), ["tiny"]), host)
    try:
        assert running.http.get("/ready").status_code == 503
        assert running.http.get("/health").status_code == 200
        assert running.post("/v1/completions", prompt="x").status_code == 503
    finally:
        running.stop()
