"""python -m dflash_jax.serve as a process, and its options."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from dflash_jax.serve import main

SMALL = ["--port", "0", "--slots", "1", "--max-len", "512", "--prefix-bytes", "0", "--draft", "none"]


@pytest.fixture
def own_logging():
    """The command sets up the root logger; tests behind this one get it back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextlib.contextmanager
def serving(*options: str, environment: dict | None = None):
    """A server process that is ready, and its URL."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    command = [sys.executable, "-m", "dflash_jax.serve", *SMALL, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"listening on (http://[\d.:]+)", line)))
            while httpx.get(f"{url}/ready").status_code != 200:
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
    while '"running":1' not in httpx.get(f"{url}/server_info").text:
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
        (thread,) = complete(url, [], max_tokens=500, n=16)
        process.send_signal(signal.SIGINT)
        log = ""
        while "finishing" not in log:
            log = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.wait(120)
        thread.join()
        assert "stopped with" in process.stderr.read()


def test_a_port_that_is_taken_is_one_line(capsys, own_logging):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        assert main(["--port", str(s.getsockname()[1])]) == 2
    assert re.fullmatch(r"error: 127.0.0.1:\d+: .*in use\n", capsys.readouterr().err)
