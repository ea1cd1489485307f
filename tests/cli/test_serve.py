"""python -m dflash_jax.serve as a process, and its options."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time

import httpx
import pytest
import trustme

from dflash_jax.cli.serve import main
from dflash_jax.server.response_store import ResponseStore

SMALL = ["--bundled", "--port", "0", "--slots", "1", "--max-len", "512", "--prefix-bytes", "0", "--draft", "none"]
# Prompts in one size of chunks: each is a program more for every server.
SMALL += ["--max-num-batched-tokens", "16"]


@contextlib.contextmanager
def serving(*options: str, environment: dict | None = None, transport: httpx.HTTPTransport | None = None):
    """A server process that is ready, and its URL. ``transport``: how it is reached, where that is not plain HTTP."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    command = [sys.executable, "-m", "dflash_jax.serve", *SMALL, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"listening on (\S+), warming", line)))
            with httpx.Client(transport=transport, timeout=None) as client:
                ready = "http://localhost/ready" if "unix" in url else f"{url}/ready"
                while client.get(ready).status_code != 200:
                    time.sleep(0.1)
            yield process, url
        finally:
            process.kill()


def complete(url: str, answers: list, count: int = 1, **body) -> list[threading.Thread]:
    """Asks on ``count`` threads, and returns when the engine is at it."""

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            body.setdefault("prompt", "def f(")
            answers.append(httpx.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}, timeout=300))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    while '"running":1' not in httpx.get(f"{url}/server_info", timeout=None).text:
        time.sleep(0.005)
    return threads


def test_sigterm_finishes_what_is_under_way():
    """Of more requests than there are slots none that was let in is lost; one that comes later is refused."""
    answers = []
    with serving("--served-model-name", "mine", "--drain-s", "600") as (process, url):
        threads = complete(url, answers, 12, max_tokens=450)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert process.wait(300) == 0
        log = process.stderr.read()
    whole = [a.json() for a in answers if a.status_code == 200]
    assert all(a.status_code in (200, 503) for a in answers)
    assert len(whole) >= int(re.search(r"SIGTERM: finishing (\d+) requests", log)[1]) > 0
    assert {a["usage"]["completion_tokens"] for a in whole} == {450}
    assert whole[0]["model"] == "mine"
    assert "POST /v1/completions 200" in log
    assert "def f(" not in log


def test_a_second_signal_stops():
    with serving("--drain-s", "600") as (process, url):
        answers = []
        (thread,) = complete(url, answers, max_tokens=500, n=16)
        process.send_signal(signal.SIGINT)
        log = ""
        while "finishing" not in log:
            log = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.wait(120)
        thread.join()
        assert "stopped with" in process.stderr.read()
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        503,
        "no requests are taken: the engine was stopped: try again in 1s",
    )


def test_a_port_that_is_taken_is_one_line(capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        assert main(["--port", str(s.getsockname()[1])]) == 2
    assert re.fullmatch(r"error: 127.0.0.1:\d+: .*in use\n", capsys.readouterr().err)


def test_tls_under_the_path_of_a_proxy(tmp_path):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    pem, key, ca = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem"))
    certificate.cert_chain_pems[0].write_to_path(pem)
    certificate.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    context = ssl.create_default_context(cafile=ca)
    options = ("--ssl-certfile", pem, "--ssl-keyfile", key, "--root-path", "/api", "--api-key", "secret")
    options += ("--enable-log-requests", "--stream-interval", "8")
    with serving(*options, transport=httpx.HTTPTransport(verify=context)) as (process, url):
        assert url.startswith("https://")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health")
        key = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
        with httpx.Client(base_url=url, verify=context, timeout=120) as client:
            for path in ("/v1/models", "/api/v1/models"):
                assert client.get(path, headers=key).status_code == 200
                assert client.get(path).status_code == 401
            assert client.get("/api/api/v1/models").status_code in (401, 404)
            body = {"prompt": "def private(", "max_tokens": 5, "temperature": 0.5, "seed": 7}
            # A client does not choose the address that it is known by.
            headers = key | {"X-Forwarded-For": "192.0.2.1"}
            assert client.post("/api/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        log = process.stderr.read()
    assert re.search(r'request cmpl-mine-0: \d+ prompt tokens, params \{.*"temperature": 0.5, .*"seed": 7', log)
    assert re.search(r"request cmpl-mine: status 200, 1 sequences, 5 new tokens, length, ", log)
    assert "private" not in log
    assert "127.0.0.1 POST /api/v1/completions 200" in log
    assert "192.0.2.1" not in log


def test_server_listens_on_a_unix_socket_and_removes_it(tmp_path):
    """Of its files, that of stored responses alone is kept."""
    path, store = str(tmp_path / "server.sock"), tmp_path / "responses.sqlite"
    transport = httpx.HTTPTransport(uds=path)
    with serving("--uds", path, "--response-store-path", str(store), transport=transport) as (process, url):
        assert url == f"http+unix://{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=120) as client:
            answer = client.post("http://localhost/v1/completions", json={"prompt": "def f(", "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
            answer = client.post("http://localhost/v1/responses", json={"input": "hi", "max_output_tokens": 3})
            assert answer.json()["store"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert list(tmp_path.iterdir()) == [store]
    kept = ResponseStore(path=store)
    owner = hashlib.sha256(b"").digest()
    assert json.loads(asyncio.run(kept.get(owner, answer.json()["id"])).response) == answer.json()
    kept.close()
