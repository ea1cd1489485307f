"""The server's start: it answers with its first programs, and what needs another program waits for that one only."""

import threading

import pytest

from dflash_jax.engine.service import AsyncEngine
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.serving import Serving
from tests.helpers import in_a_thread
from tests.server.conftest import SCHEMA, Running, hosted, wait_until

FORM = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}


@pytest.fixture
def warming(llm, server):
    """A server with only its first programs. ``server`` has compiled all of the same shapes."""
    engine = llm.new_engine(llm.programs, 4, 1024, max_queue=64, prefill_sizes=(16, 64), masks=True)
    running = AsyncEngine(engine)
    host = hosted(llm, running)
    serving = Serving(llm, in_process(host), ["tiny"])
    host.warm_up.first()
    running.start()
    http = Running(serving, host)
    yield http
    http.stop()
    running.stop()


def test_structured_output_waits_for_its_program_and_delays_no_other_request(warming, server):
    host, answers = warming.host, []

    def ask():
        answers.append(warming.chat(response_format=FORM, max_tokens=60))

    state = warming.http.get("/server_info").json()["warm_up"]
    assert state == {"compiled": 4, "failed": 0, "total": host.warm_up.total}
    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: host.engine.engine.running == 1)
    plain = {"max_tokens": 30, "temperature": 0}
    expected = server.chat(**plain)["choices"][0]["message"]
    assert all(warming.chat(**plain)["choices"][0]["message"] == expected for _ in range(5))
    assert not answers
    in_a_thread(host.warm_up.others)
    asking.join()
    assert answers[0]["choices"][0]["finish_reason"] in ("stop", "length")
    assert warming.http.get("/server_info").json()["warm_up"]["compiled"] == host.warm_up.total


def test_scores_of_a_prompt_wait_for_their_program(warming):
    found = []

    def ask():
        found.append(warming.post("/v1/completions", prompt="def f(x):", max_tokens=1, echo=True, logprobs=1))

    asking = threading.Thread(target=ask)
    asking.start()
    assert wait_until(lambda: warming.host.engine.engine.running == 1)
    assert warming.post("/v1/completions", prompt="def f(", max_tokens=5).status_code == 200
    assert not found
    in_a_thread(warming.host.warm_up.others)
    asking.join()
    assert found[0].status_code == 200
