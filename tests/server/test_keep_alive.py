"""Streams of requests that wait: headers at once, and signs of life until the first token."""

import asyncio
import json
import threading

import anthropic
import openai
import pytest

from dflash_jax.benchmarking.clients import Asking, HttpClient
from dflash_jax.server.messages import PING
from dflash_jax.server.stream import KEEP_ALIVE
from tests.server.conftest import MESSAGES, NAME, wait_until

COMMENT, TOKENS = KEEP_ALIVE.decode().strip(), {"temperature": 0, "max_tokens": 8}
REQUESTS = {
    "/v1/completions": {"prompt": "def f(", **TOKENS},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2, **TOKENS},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/generate": {"text": "def f(", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
}


@pytest.fixture
def held(quiet, monkeypatch):
    """The server with a device whose results wait for ``go``."""
    device, go = quiet.host.engine.engine.runner, threading.Event()

    def read(*args, original=device.read):
        assert go.wait(120)
        return original(*args)

    monkeypatch.setattr(device, "read", read)
    quiet.go = go
    yield quiet
    go.set()
    assert quiet.idle()


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_shows_that_it_goes_on_before_its_first_token(held, monkeypatch, path):
    monkeypatch.setattr(held.serving, "keep_alive_s", 0.01)
    sign = PING.decode().strip() if path == "/v1/messages" else COMMENT
    with held.http.stream("POST", path, json=REQUESTS[path] | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        text = ""
        for part in response.iter_text():
            text += part
            if text.count(sign) >= 3:
                held.go.set()
    first, *events = [event for event in text.split("\n\n") if event != sign]
    assert text.startswith(sign)
    assert first
    assert events
    data = [line.removeprefix("data: ") for event in (first, *events) for line in event.split("\n") if "data: " in line]
    assert all(each == "[DONE]" or json.loads(each) for each in data)


@pytest.mark.parametrize("path", REQUESTS)
def test_headers_come_at_once_and_no_comments_where_they_are_off(held, monkeypatch, path):
    monkeypatch.setattr(held.serving, "keep_alive_s", 0)
    with held.http.stream("POST", path, json=REQUESTS[path] | {"stream": True}) as response:
        assert response.status_code == 200
        held.go.set()
        assert COMMENT not in response.read().decode()


@pytest.mark.parametrize("path", REQUESTS)
def test_what_is_wrong_has_its_status_in_a_stream(held, path):
    wrong = {"sampling_params": {"temperature": -1}} if path == "/generate" else {"temperature": -1}
    assert held.post(path, **REQUESTS[path] | wrong, stream=True).status_code == 400
    long = {"prompt": [5] * 2000} if "prompt" in REQUESTS[path] else {"input_ids": [5] * 2000, "text": None}
    if path in ("/v1/completions", "/generate"):
        assert held.post(path, **REQUESTS[path] | long, stream=True).status_code == 400


@pytest.mark.parametrize("path", REQUESTS)
def test_a_failure_before_the_first_token_is_an_event_of_the_interface(held, monkeypatch, path):
    """The status is sent, as the request was taken."""

    def read(*_):
        assert held.go.wait(120)
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(held.host.engine.engine.runner, "read", read)
    held.host.engine.restarts = 1
    with held.http.stream("POST", path, json=REQUESTS[path] | {"stream": True}) as response:
        assert response.status_code == 200
        held.go.set()
        *_, last = [line for line in response.read().decode().split("\n") if line.startswith("data: {")]
    error = json.loads(last[6:])
    if path == "/v1/messages":
        assert error["type"] == "error"
    if path == "/v1/responses":
        # The only one that Codex reads.
        assert error["type"] == "response.failed"
        error = error["response"]
    assert "the device is on fire" in (error.get("error") or error)["message"]
    assert wait_until(lambda: held.host.engine.engine.failure is None)


def test_clients_read_past_the_signs(held, monkeypatch):
    """OpenAI's, Anthropic's and the benchmark's."""
    monkeypatch.setattr(held.serving, "keep_alive_s", 0.001)
    sent = []
    monkeypatch.setattr("dflash_jax.server.stream.EventStream._keep_alive", counted(sent))
    signs = threading.Thread(target=lambda: wait_until(lambda: len(sent) >= 9) and held.go.set())
    signs.start()
    asked = {"messages": MESSAGES, "max_tokens": 8}
    results = {}

    def ask_openai():
        with openai.OpenAI(base_url=f"{held.url}/v1", api_key="EMPTY", max_retries=0) as client:
            chunks = list(client.chat.completions.create(model=NAME, stream=True, temperature=0, **asked))
            results["openai"] = len(chunks)

    def ask_anthropic():
        client = anthropic.Anthropic(base_url=held.url, api_key="EMPTY", max_retries=0)
        with client, client.messages.stream(model=NAME, **asked) as stream:
            results["anthropic"] = stream.get_final_message().usage.output_tokens

    async def ask_ours():
        async with HttpClient(held.url, NAME) as client:
            results["ours"] = (await client.answer(MESSAGES, Asking(max_new_tokens=8))).tokens

    threads = [threading.Thread(target=each) for each in (ask_openai, ask_anthropic, lambda: asyncio.run(ask_ours()))]
    for thread in threads:
        thread.start()
    for thread in (*threads, signs):
        thread.join()
    assert results.keys() == {"openai", "anthropic", "ours"}
    assert results["openai"] > 1
    assert results["anthropic"] == results["ours"] == 8


def counted(sent: list):
    """`EventStream._keep_alive`, with what it sends in ``sent``."""
    from dflash_jax.server.stream import EventStream

    real = EventStream._keep_alive

    async def keep_alive(self, send, seconds):
        async def send_and_count(message):
            sent.append(message)
            await send(message)

        await real(self, send_and_count, seconds)

    return keep_alive
