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

from dflash_jax.errors import InputError
from dflash_jax.serve import main
from dflash_jax.server.arguments import ALIASES, parse

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


VLLM = [
    "some/model",
    "--speculative-config",
    '{"method": "dflash", "model": "some/draft", "num_speculative_tokens": 15}',
    "--attention-backend",
    "flash_attn",
    "--max-num-batched-tokens",
    "32768",
]
SGLANG = [
    *("--model-path", "some/model", "--speculative-algorithm", "DFLASH", "--tp-size", "1"),
    *("--speculative-draft-model-path", "some/draft", "--speculative-num-draft-tokens", "16"),
    *("--attention-backend", "fa3", "--mem-fraction-static", "0.75", "--mamba-scheduler-strategy", "extra_buffer"),
    *("--trust-remote-code", "--speculative-dflash-draft-window-size", "4096"),
]


def test_commands_of_other_servers_mean_the_same(caplog, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    vllm, _ = parse(VLLM)
    assert (vllm.target, vllm.draft, vllm.max_block_size, vllm.max_num_batched_tokens) == (
        "some/model",
        "some/draft",
        16,
        32768,
    )
    assert "--attention-backend needs nothing here" in caplog.text
    caplog.clear()
    sglang, _ = parse(SGLANG)
    assert (sglang.target, sglang.draft, sglang.max_block_size) == (vllm.target, vllm.draft, vllm.max_block_size)
    assert (sglang.mem_fraction, sglang.mesh, sglang.draft_window_size) == (0.75, "tensor=1", 4096)
    for said in ("--trust-remote-code", "--mamba-scheduler-strategy", "SGLANG_ENABLE_SPEC_V2"):
        assert caplog.text.count(f"{said} needs nothing here") == 1


def test_every_alias_leads_somewhere():
    known = vars(parse([])[0])
    for alias in ALIASES:
        special = {"speculative_config", "speculative_algorithm", "no_prefixes", "tensor", "data"}
        assert alias.reason or alias.ours in special or alias.ours in known, alias
    assert parse(["--tp", "4", "-dp", "2"])[0].mesh == "data=2,tensor=4"
    assert parse(["--disable-radix-cache"])[0].prefix_bytes == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculative-config", "{"], "is not JSON"),
        (["--speculative-config", '{"method": "eagle"}'], "its method must be dflash"),
        (["--speculative-algorithm", "EAGLE"], "it must be DFLASH"),
        (["--tp", "2", "--mesh", "tensor=2"], "give one of them"),
        (["a", "--target", "b"], "give one of them"),
        (["--max-num-seqs", "x"], "must be a number"),
        (["--port", "70000"], "must be 0 to 65535"),
        (["--response-store", "-1"], "it must be 0 or more"),
        (["--sparkle"], "unrecognized arguments: --sparkle"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(InputError, match=message):
        parse(options)


def test_a_port_that_is_taken_is_one_line(capsys, own_logging):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as s:
        assert main(["--port", str(s.getsockname()[1])]) == 2
    assert re.fullmatch(r"error: 127.0.0.1:\d+: .*in use\n", capsys.readouterr().err)
