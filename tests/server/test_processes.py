"""The real processes of a server: one of them is killed, and the others go on."""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading

import httpx
import numpy as np
import psutil
from safetensors.numpy import save

from tests.cli.test_serve import serving
from tests.server.conftest import wait_until

BODY = {"prompt": "def f(", "ignore_eos": True, "stream": True}


def processes(server: subprocess.Popen, kind: str) -> list[psutil.Process]:
    """Of a kind, below the supervisor."""

    def is_meant(child: psutil.Process) -> bool:
        # One that has just ended has no words.
        with contextlib.suppress(psutil.Error):
            return f"dflash_jax.server.{kind}_process" in child.cmdline()
        return False

    return list(filter(is_meant, psutil.Process(server.pid).children()))


class Stream(threading.Thread):
    """A stream of a completion: its events, and whether it came to its end."""

    def __init__(self, url: str, tokens: int):
        super().__init__()
        self.body, self.url = BODY | {"max_tokens": tokens}, f"{url}/v1/completions"
        self.events, self.port, self.has_ended = [], None, False
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=None) as response:
                self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                for line in filter(None, response.iter_lines()):
                    self.has_ended = line == "data: [DONE]"
                    if not self.has_ended:
                        self.events.append(json.loads(line[6:]))
        except httpx.HTTPError:
            pass

    def is_at(self, front: psutil.Process) -> bool:
        """Whether the front has the stream's connection."""
        return self.port in {each.raddr.port for each in front.net_connections() if each.raddr}


def streams_of_both(server: subprocess.Popen, url: str, tokens: int) -> tuple[list[Stream], list[psutil.Process]]:
    """A stream at each of two fronts, in its middle: the engine is stopped."""
    fronts, (engine,) = processes(server, "front"), processes(server, "engine")
    while True:
        streams = [Stream(url, tokens) for _ in range(4)]
        for stream in streams:
            assert wait_until(lambda stream=stream: stream.events)
        engine.suspend()
        live = [stream for stream in streams if not stream.has_ended]
        of_each = [[stream for stream in live if stream.is_at(front)] for front in fronts]
        if all(of_each):
            return [first for first, *_ in of_each], fronts
        engine.resume()
        for stream in streams:
            stream.join()


def complete(url: str) -> dict:
    body = {"prompt": "def f(", "max_tokens": 5, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=None).json()


def read(server: subprocess.Popen, pattern: str) -> str:
    said = ""
    for line in server.stderr:
        said += line
        if re.search(pattern, line):
            return said
    raise AssertionError(f"no {pattern} in:\n{said}")


def test_a_killed_front_breaks_its_streams_and_a_killed_engine_all_and_both_are_replaced():
    options = ("--api-server-count", "2", "--restart-on-failure", "--slots", "4", "--drain-s", "600")
    with serving(*options) as (server, url):
        read(server, "ready:")
        expected = complete(url)["choices"]
        streams, fronts = streams_of_both(server, url, 400)
        fronts[0].kill()
        streams[0].join()
        processes(server, "engine")[0].resume()
        streams[1].join()
        assert [stream.has_ended for stream in streams] == [False, True]
        assert streams[1].events[-1]["choices"][0]["finish_reason"] == "length"
        read(server, r"front 1 has ended by SIGKILL: restarting it")
        assert wait_until(lambda: len(processes(server, "front")) == 2)
        assert complete(url)["choices"] == expected

        stream = Stream(url, 500)
        assert wait_until(lambda: stream.events)
        (engine,) = processes(server, "engine")
        engine.kill()
        stream.join()
        assert stream.has_ended
        assert "the engine's process has ended" in stream.events[-1]["error"]["message"]
        assert httpx.get(f"{url}/health", timeout=None).status_code in (200, 503)
        read(server, "restarting the engine")
        read(server, "ready:")
        assert wait_until(lambda: httpx.get(f"{url}/ready", timeout=None).status_code == 200)
        assert complete(url)["choices"] == expected

        stream = Stream(url, 300)
        assert wait_until(lambda: stream.events)
        server.send_signal(signal.SIGTERM)
        stream.join()
        assert stream.has_ended
        assert server.wait() == 0
        assert "SIGTERM: finishing 1 requests" in server.stderr.read()


def test_an_administrator_reaches_all_fronts_and_a_drain_waits_for_it():
    """New weights go to the engine's process, whose state every front has."""
    options = ("--api-server-count", "2", "--admin-api-key", "root", "--slots", "4", "--drain-s", "600")
    with serving(*options) as (server, url):
        read(server, "ready:")
        # A connection for each call, so that both fronts get some.
        headers = {"Authorization": "Bearer root"}

        def post(path: str, **fields) -> dict:
            found = httpx.post(f"{url}{path}", headers=headers | fields.pop("headers", {}), timeout=None, **fields)
            assert found.status_code == 200, found.text
            return found.json()

        def rests() -> bool:
            return httpx.get(f"{url}/is_paused", headers=headers).json()["is_paused"]

        assert httpx.post(f"{url}/pause").status_code == 401
        before = complete(url)["choices"]
        stream = Stream(url, 400)
        assert wait_until(lambda: stream.events)
        post("/pause", params={"mode": "keep"})
        assert all(wait_until(rests) for _ in range(8))
        tensors = {"lm_head.weight": np.zeros((512, 192), np.float32), "x": np.zeros(2**22, np.float32)}
        raw = {"Content-Type": "application/octet-stream"}
        found = httpx.post(f"{url}/update_weights", content=save(tensors), headers=headers | raw, timeout=None)
        assert (found.status_code, "'x'" in found.text) == (400, True)
        tensors = {name: tensors[name] for name in tensors if name != "x"}
        post("/update_weights", content=save(tensors), headers=raw)
        post("/resume")
        stream.join()
        assert stream.has_ended
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
        assert complete(url)["choices"] != before

        stream = Stream(url, 400)
        assert wait_until(lambda: stream.events)
        post("/pause", params={"mode": "keep"})
        server.send_signal(signal.SIGTERM)
        read(server, "finishing 1 requests")

        def resumed() -> bool:
            # A front without requests has ended, perhaps after it had the connection.
            with contextlib.suppress(httpx.HTTPError):
                return httpx.post(f"{url}/resume", headers=headers, timeout=None).status_code == 200
            return False

        assert wait_until(resumed)
        stream.join()
        assert stream.has_ended
        assert stream.events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0


def test_a_killed_engine_ends_the_server_with_code_1_and_a_killed_supervisor_everything():
    with serving() as (server, url):
        stream = Stream(url, 500)
        assert wait_until(lambda: stream.events)
        processes(server, "engine")[0].kill()
        stream.join()
        assert server.wait() == 1
        assert "exiting: the engine has failed" in server.stderr.read()
    with serving() as (server, _):
        below = psutil.Process(server.pid).children(recursive=True)
        os.kill(server.pid, signal.SIGKILL)
        # All end by themselves, those of templates and grammars too.
        assert not psutil.wait_procs(below, timeout=None)[1]
