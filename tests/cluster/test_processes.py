"""An ingress with its real fronts, for engines that listen on TCP: one of them dies in the middle of streams."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from contextlib import contextmanager

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.cluster import ingress as ingress_module
from dflash_jax.cluster.ingress import IngressServer
from dflash_jax.cluster.link import Listener
from dflash_jax.cluster.options import parse
from dflash_jax.errors import InputError
from dflash_jax.server import transport
from tests.cluster.replica_process import SECRET
from tests.docs.pages import ROOT
from tests.server.conftest import NAME, hosted, wait_until

BODY = {"prompt": "def clamp(value, low, high):\n    ", "max_tokens": 300, "ignore_eos": True, "stream": True}
BODY |= {"temperature": 0.8, "seed": 3, "return_token_ids": True}
TEXT = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}


class EngineThread:
    """An engine that listens for fronts on a thread of its own.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, host):
        self.host = host
        self._listening = transport.listen("127.0.0.1", 0)
        self.address = self._listening.getsockname()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        self._thread.start()

    async def _serve(self):
        self._ending = asyncio.Event()
        serving = asyncio.ensure_future(Listener(self._listening, SECRET, self.host.new_channel).serve())
        await self._ending.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        for front in list(self.host.fronts):
            front.channel.abort()
        await asyncio.sleep(0.05)

    def has_requests(self) -> bool:
        return any(front.live for front in self.host.fronts)

    def kill(self):
        """Ends all connections at once, and listens no more."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
            self._loop.close()


@contextmanager
def ingress_of(*words):
    ingress = IngressServer(parse(["--bundled", "--port", "0", "--wait-s", "600", *words])[0], SECRET)
    ingress.start()
    try:
        yield ingress
    finally:
        ingress.stop()


@pytest.fixture(scope="module", autouse=True)
def forgets_late():
    """Engines are announced once here, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ingress_module, "FORGET_S", 3600.0)
        yield


@pytest.fixture(scope="module")
def cluster(hosts, forgets_late):
    """An ingress with two fronts, and its two engines by name."""
    info = {"model_path": "bundled"}
    engines = {name: EngineThread(hosted(host.llm, host.engine, NAME, info=info)) for name, host in hosts.items()}
    with ingress_of("--api-server-count", "2") as ingress:
        for name, engine in engines.items():
            ingress.join(name, *engine.address)
        assert wait_until(lambda: is_ready(ingress.url), 300)
        yield ingress, engines
    for engine in engines.values():
        engine.kill()
        engine.host.stop_workers()


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=600).status_code == 200


def tokens_of(url, at_first=lambda: None):
    """The tokens of `BODY`; ``at_first`` is called at the first event."""
    tokens = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=600) as answer:
        assert answer.status_code == 200
        for line in filter(None, answer.iter_lines()):
            if line == "data: [DONE]":
                return tokens
            at_first()
            at_first = lambda: None  # noqa: E731
            tokens += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    raise AssertionError("the stream has no end")


def test_a_stream_outlives_its_engine_and_everything_else_is_answered_for_all_engines(cluster, hosts):
    ingress, engines = cluster
    url = ingress.url
    whole = tokens_of(url)
    assert len(whole) == BODY["max_tokens"]
    metrics = httpx.get(f"{url}/metrics", timeout=600)
    assert metrics.headers["content-type"] == TEXT["content-type"]
    assert "\ndflash:replicas 2\n" in metrics.text
    assert {name for name in engines if f'engine="{name}"' in metrics.text} == set(engines)
    info = httpx.get(f"{url}/server_info", timeout=600).json()
    assert len(info["internal_states"]) == 2
    assert info["max_running_requests"] == 8
    for path in ("/flush_cache", "/reset_prefix_cache", "/abort_request"):
        answer = httpx.post(f"{url}{path}", json={"rid": "none"} if path == "/abort_request" else None, timeout=600)
        assert answer.status_code == 200, answer.text
    assert httpx.get(f"{url}/health_generate", timeout=600).status_code == 200

    def kill_the_one_that_has_it():
        name = next(name for name, engine in engines.items() if engine.has_requests())
        engines[name].kill()
        killed.append(name)

    killed = []
    assert tokens_of(url, kill_the_one_that_has_it) == whole
    assert wait_until(lambda: "\ndflash:replicas 1\n" in httpx.get(f"{url}/metrics", timeout=600).text)
    # It comes back at another address.
    (name,) = killed
    engines[name] = EngineThread(engines[name].host)
    ingress.join(name, *engines[name].address)
    assert wait_until(lambda: "\ndflash:replicas 2\n" in httpx.get(f"{url}/metrics", timeout=600).text)
    assert tokens_of(url) == whole


def accepted_by_place(url: str) -> Counter:
    """Accepted drafts by position, of all engines."""
    counts = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=600).text):
        if family.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert {sample.labels["drafter"] for sample in family.samples} == {"bundled"}
            for sample in family.samples:
                counts[sample.labels["position"]] += sample.value
    return counts


def test_drafts_of_answers_sum_up_to_those_of_all_engines(cluster):
    url, before, found = cluster[0].url, accepted_by_place(cluster[0].url), Counter()
    for seed in range(4):
        body = BODY | {"stream": False, "max_tokens": 40, "seed": seed, "n": 2, "block_size": 8}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()
        counts = answer["usage"]["drafters"]["bundled"]
        found.update(counts["accepted_per_pos"])
        assert sum(counts["drafted_per_pos"].values()) == 7 * counts["rounds"]
    assert accepted_by_place(url) - before == +found
    assert found.total() > 0


def test_stored_responses_are_those_of_all_fronts(cluster):
    ingress, _ = cluster
    with openai.OpenAI(base_url=f"{ingress.url}/v1", api_key="EMPTY", max_retries=0) as client:
        first = client.responses.create(model="default", input="hi", max_output_tokens=5)
    # A connection of its own each time: it gets to both fronts.
    for _ in range(12):
        with openai.OpenAI(base_url=f"{ingress.url}/v1", api_key="EMPTY", max_retries=0) as client:
            assert client.responses.retrieve(first.id).id == first.id


def test_an_engine_that_leaves_finishes_its_requests_and_gets_no_others(cluster):
    ingress, engines = cluster
    url, expected = ingress.url, tokens_of(ingress.url)

    def leave_the_one_that_has_it():
        name = next(name for name, engine in engines.items() if engine.has_requests())
        ingress.leave(name)
        left.append(name)

    left = []
    assert tokens_of(url, leave_the_one_that_has_it) == expected
    (name,) = left
    for _ in range(3):
        assert tokens_of(url, lambda: asserted(not engines[name].has_requests())) == expected
    ingress.join(name, *engines[name].address)


def asserted(holds: bool) -> None:
    assert holds


def test_an_engine_that_announces_itself_no_more_is_forgotten(monkeypatch):
    monkeypatch.setattr(ingress_module, "FORGET_S", 0.01)
    told = []
    with ingress_of("--api-server-count", "1") as ingress:
        monkeypatch.setattr(ingress, "_tell", lambda: told.append(dict(ingress.engines)))
        ingress.join("gone", "127.0.0.1", 9)
        assert wait_until(lambda: told == [{"gone": ("127.0.0.1", 9)}, {}])


# Few programs.
SMALL = ["--bundled", "--slots", "1", "--max-block-size", "4", "--max-len", "512", "--prefix-bytes", "0"]
SMALL += ["--platform", "cpu", "--drain-s", "600"]


@contextmanager
def replica_process():
    """An engine's process, and where it listens."""
    command = [sys.executable, "-m", "tests.cluster.replica_process", *SMALL]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        host, port = process.stdout.readline().split()
        yield process, (host, int(port))
    finally:
        process.kill()
        process.communicate()


def test_a_stream_outlives_a_killed_process_and_one_that_ends_finishes_its_own():
    with replica_process() as (first, address), ingress_of("--api-server-count", "1", *SMALL) as ingress:
        url = ingress.url
        ingress.join("first", *address)
        assert wait_until(lambda: is_ready(url), 300)
        whole = tokens_of(url)
        with replica_process() as (second, address):

            def kill():
                ingress.join("second", *address)
                first.kill()

            assert tokens_of(url, kill) == whole

            def end():
                ingress.leave("second")
                second.stdin.write("\n")
                second.stdin.flush()
                assert second.stdout.readline() == "1\n"

            assert tokens_of(url, end) == whole
            assert second.wait(600) == 0
            assert wait_until(lambda: httpx.get(f"{url}/ready", timeout=600).status_code == 503)
            assert httpx.get(f"{url}/health", timeout=600).status_code == 200


def fronts() -> set[psutil.Process]:
    return {child for child in psutil.Process().children() if "front_process" in " ".join(child.cmdline())}


def test_an_ingress_whose_address_is_taken_does_not_start_and_leaves_no_process():
    before = fronts()
    with transport.listen("127.0.0.1", 0) as taken, pytest.raises(InputError, match="in use"):
        IngressServer(parse(["--bundled", "--port", str(taken.getsockname()[1])])[0], SECRET).start()
    assert fronts() == before
