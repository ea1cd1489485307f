"""SGLang's router between two of our servers."""

import contextlib
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.server.conftest import MESSAGES, NAME, OFF, Running, alone, hosted, started

pytest.importorskip("sglang_router")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


@contextlib.contextmanager
def second_server(llm):
    engine = started(llm)
    host = hosted(llm, engine, info={"model_path": "bundled"})
    serving = Serving(llm, in_process(host), [NAME, "tiny"])
    running = Running(serving, host)
    try:
        yield running
    finally:
        running.stop()
        engine.stop()


@contextlib.contextmanager
def routed(*urls: str):
    """The address of a router in front of the servers, which it knows all of."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--disable-retries"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                assert process.poll() is None, process.stdout.read().decode()
                with contextlib.suppress(httpx.HTTPError):
                    workers = httpx.get(f"{url}/workers").json()["workers"]
                    if len(workers) == len(urls) and all(w["is_healthy"] for w in workers):
                        break
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def test_chats_and_streams_through_a_router(quiet, llm):
    expected = alone(llm, thinking=False, max_tokens=12).text
    options = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "extra_body": {"chat_template_kwargs": OFF}}
    with second_server(llm) as other:
        # FastAPI builds routes at the first request, and silences its warnings for all threads meanwhile.
        assert [s.http.get("/app.js").status_code for s in (quiet, other)] == [200, 200]
        through_a_router(quiet, other, options, expected)


def through_a_router(quiet, other, options, expected):
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(routed(quiet.url, other.url))
        client = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0))
        before = [s.host.engine.engine.statistics.requests.total() for s in (quiet, other)]
        for i in range(20):
            found = client.chat.completions.create(**options, temperature=0, stream=i % 2 == 1)
            if i % 2:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in found)
            else:
                text = found.choices[0].message.content
            assert text == expected
        after = [s.host.engine.engine.statistics.requests.total() for s in (quiet, other)]
        assert [b - a for a, b in zip(before, after, strict=True)] == [10, 10]
        native = {"text": "def f(", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        found = [httpx.post(f"{url}/generate", json=native, timeout=60).json()["text"] for _ in range(4)]
        assert set(found) == {quiet.post("/generate", **native).json()["text"]}
