"""Pauses and sleep of a running server, and who may ask for them."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import jax
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from dflash_jax.server.app import ADMIN_PATHS
from tests.server.conftest import wait_until
from tests.server.test_new_weights import PROMPT, tokens_of


def post(running, path: str, **query) -> dict:
    found = running.http.post(path, params=query)
    assert found.status_code == 200, found.text
    return found.json()


def state(running) -> tuple:
    paths = ("/is_paused", "/is_sleeping", "/health", "/ready")
    answers = [running.http.get(path) for path in paths]
    flags = answers[0].json()["is_paused"], answers[1].json()["is_sleeping"]
    return (*flags, answers[2].status_code, answers[2].json()["status"], answers[3].status_code)


AWAKE = False, False, 200, "ok", 200


def test_without_an_administrator_the_paths_name_the_option(quiet):
    assert len(ADMIN_PATHS) > 20
    for path in ADMIN_PATHS:
        for method in ("GET", "POST"):
            found = quiet.http.request(method, path)
            assert found.status_code == 403, path
            assert "--admin-api-key-file" in found.json()["error"]["message"]
    assert not ADMIN_PATHS & quiet.http.get("/openapi.json").json()["paths"].keys()


def test_the_paths_need_the_administrator_s_key_and_no_other(managed):
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer key"}, {"Authorization": "", "x-api-key": "key"}):
        for path in ADMIN_PATHS:
            found = managed.http.post(path, headers=headers)
            assert found.status_code == 401, path
            assert "root" not in found.text
    with httpx.Client(base_url=managed.url, headers={"x-api-key": "root"}) as client:
        assert client.get("/is_paused").json() == {"is_paused": False}
        # Who may give new weights may ask for text, too.
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "key"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401
        assert client.get("/openapi.json").json()["paths"].keys() >= ADMIN_PATHS
    # A path in another spelling is not the path.
    assert managed.http.post("/pause/", headers={"Authorization": "Bearer key"}).status_code in (307, 404)


def test_a_pause_that_keeps_requests_takes_new_ones_and_goes_on(managed):
    with ThreadPoolExecutor(2) as pool:
        assert post(managed, "/pause", mode="keep") == {"status": "paused"}
        assert state(managed) == (True, False, 200, "paused", 200)
        found = managed.http.get("/health_generate")
        assert (found.status_code, found.json()["status"]) == (503, "paused")
        # Twice is no error.
        assert post(managed, "/pause", mode="keep") == {"status": "paused"}
        waiting = [pool.submit(tokens_of, managed, count=30), pool.submit(managed.post, "/tokenize", prompt="def")]
        assert wait_until(lambda: managed.host.engine.open_requests == 1)
        assert waiting[1].result().status_code == 200
        assert not waiting[0].done()
        # As SGLang's, while requests run it is 400.
        assert managed.http.post("/flush_cache").status_code == 200
        found = managed.http.post("/pause?mode=wait")
        assert (found.status_code, "1 requests wait" in found.text) == (400, True)
        assert post(managed, "/resume") == {"status": "resumed"}
        assert len(waiting[0].result()["token_ids"]) == 30
    assert state(managed) == AWAKE
    assert managed.http.get("/health_generate").status_code == 200


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_that_ends_requests_refuses_new_ones(managed, mode, monkeypatch):
    engine, go = managed.host.engine.engine, threading.Event()

    def read(*args, original=engine.runner.read):
        go.wait(120)
        return original(*args)

    monkeypatch.setattr(engine.runner, "read", read)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(tokens_of, managed, count=20)
        assert wait_until(lambda: engine.running == 1)
        paused = pool.submit(post, managed, "/pause", mode=mode)
        assert wait_until(lambda: managed.host.management.refuses)
        found = managed.post("/inference/v1/generate", token_ids=PROMPT, sampling_params={})
        assert (found.status_code, found.headers["Retry-After"]) == (503, "1")
        assert not (mode == "wait" and paused.done())
        go.set()
        assert paused.result() == {"status": "paused"}
        choice = running.result()
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
    assert state(managed) == (True, False, 200, "paused", 503)
    assert post(managed, "/resume") == {"status": "resumed"}
    assert len(tokens_of(managed)["token_ids"]) == 12
    assert state(managed) == AWAKE


def connection(running, stack: ExitStack, head: str, body: str = "") -> socket.socket:
    """A connection that has sent a request, and reads nothing."""
    s = stack.enter_context(socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))))
    fields = f"Host: x\r\nAuthorization: Bearer root\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    s.sendall(f"{head} HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode())
    return s


def test_an_administrator_who_leaves_takes_its_pause_back(managed, monkeypatch):
    engine, go = managed.host.engine.engine, threading.Event()

    def read(*args, original=engine.runner.read):
        go.wait(120)
        return original(*args)

    monkeypatch.setattr(engine.runner, "read", read)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        running = pool.submit(tokens_of, managed, count=20)
        assert wait_until(lambda: engine.running == 1)
        management = managed.host.management
        leaving = [connection(managed, stack, "POST /pause?mode=wait") for _ in range(2)]
        assert wait_until(lambda: management._waiting == 2)
        leaving[0].close()
        assert wait_until(lambda: management._waiting == 1)
        assert management.refuses
        leaving[1].close()
        assert wait_until(lambda: not management.refuses)
        go.set()
        assert running.result()["finish_reason"] == "length"
    assert state(managed) == AWAKE


def test_a_client_that_leaves_in_a_pause_leaves(managed):
    asked = json.dumps({"token_ids": PROMPT, "sampling_params": {}, "stream": True})
    with ExitStack() as stack:
        for pauses in (("/pause", {"mode": "keep"}), ("/sleep", {"mode": "keep"})):
            post(managed, pauses[0], **pauses[1])
            s = connection(managed, stack, "POST /inference/v1/generate", asked)
            assert wait_until(lambda: managed.host.engine.engine.unfinished == 1)
            s.close()
            assert wait_until(lambda: managed.host.engine.engine.unfinished == 0)
            post(managed, "/wake_up")
    assert state(managed) == AWAKE


def test_aborts_by_an_administrator_end_requests_of_any_key(managed):
    post(managed, "/pause", mode="keep")
    headers = {"Authorization": "Bearer key"}

    def ask(name: str) -> str:
        asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}, "request_id": name}
        return managed.http.post("/inference/v1/generate", json=asked, headers=headers).json()

    with ThreadPoolExecutor(3) as pool:
        answers = {name: pool.submit(ask, name) for name in ("a", "b", "c")}
        assert wait_until(lambda: managed.host.engine.open_requests == 3)
        # A list of none is not the absence of a list.
        assert managed.post("/abort_requests", request_ids=[]).json()["aborted"] == 0
        many = [f"x{i}" for i in range(100_000)]
        found = managed.post("/abort_requests", request_ids=["a", *many])
        assert found.json() == {"status": "aborted", "aborted": 1}
        found = answers["a"].result()
        assert (found["request_id"], found["choices"][0]["finish_reason"]) == ("a", "abort")
        assert managed.post("/abort_requests").json() == {"status": "aborted", "aborted": 2}
        assert {answers[name].result()["choices"][0]["finish_reason"] for name in "bc"} == {"abort"}
    post(managed, "/resume")


def grammar(running) -> str:
    found = running.post("/v1/completions", prompt="a", regex="[ab]{60}", max_tokens=100, temperature=0)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


def test_a_request_with_a_form_survives_a_sleep(managed, monkeypatch):
    engine, reached = managed.host.engine.engine, threading.Event()
    alone = grammar(managed)

    def step(original=engine.step):
        events = original()
        if not reached.is_set() and any(len(event.request.tokens) >= 5 for event in events):
            managed.host.llm.pause("keep")
            reached.set()
        return events

    monkeypatch.setattr(engine, "step", step)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(grammar, managed)
        assert reached.wait(120)
        assert post(managed, "/sleep", level=1, mode="keep") == {"status": "sleeping", "level": 1}
        assert state(managed) == (True, True, 200, "sleeping", 503)
        assert not waiting.done()
        assert post(managed, "/wake_up") == {"status": "awake", "tags": None}
        assert waiting.result() == alone


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_memory_and_ends(managed, level):
    before, llm = tokens_of(managed), managed.host.llm
    held = sum(array.nbytes for array in jax.live_arrays())
    assert post(managed, "/sleep", level=level) == {"status": "sleeping", "level": level}
    assert held - sum(array.nbytes for array in jax.live_arrays()) > llm.loaded_bytes
    # What a sleeping server is asked for meanwhile.
    for path in ("/metrics", "/server_info", "/v1/loads", "/model_info", "/health", "/v1/models", "/weight_info"):
        assert managed.http.get(path).status_code == 200, path
    assert managed.http.get("/health_generate").json() == {"status": "sleeping"}
    assert managed.http.post("/flush_cache").status_code == 200
    assert managed.http.post("/reset_prefix_cache").status_code == 200
    assert managed.post("/inference/v1/generate", token_ids=PROMPT, sampling_params={}).status_code == 503
    found = managed.http.post("/resume")
    assert (found.status_code, state(managed)[:2]) == (400, (True, True))
    # Asleep already.
    assert post(managed, "/sleep", level=level)["status"] == "sleeping"
    if level == 2:
        found = managed.http.post("/wake_up")
        assert (found.status_code, "were dropped" in found.text) == (400, True)
        assert managed.post("/weight_checker", action="checksum").status_code == 400
        assert managed.post("/get_weights_by_name", name="lm_head.weight").status_code == 400
        assert post(managed, "/wake_up", tags="weights")["status"] == "sleeping"
        assert managed.post("/update_weights_from_disk", model_path=str(llm.directory)).status_code == 200
        assert post(managed, "/wake_up", tags="kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
    else:
        assert post(managed, "/wake_up") == {"status": "awake", "tags": None}
    assert state(managed) == AWAKE
    assert tokens_of(managed)["token_ids"] == before["token_ids"]


def test_sglang_s_occupation_and_pauses(managed):
    before = tokens_of(managed)
    assert managed.http.post("/pause_generation").json()["status"] == "ok"
    assert state(managed)[:2] == (True, False)
    for tags in (["kv_cache"], ["weights", "cuda_graph"]):
        assert managed.post("/release_memory_occupation", tags=tags).json()["success"]
    assert state(managed)[:2] == (True, True)
    for tags in (["weights"], ["kv_cache", "cuda_graph"]):
        assert managed.post("/resume_memory_occupation", tags=tags).json()["success"]
    assert managed.post("/continue_generation", torch_empty_cache=True).json()["status"] == "ok"
    for mode in ("retract", "in_place"):
        assert managed.post("/pause_generation", mode=mode).json()["status"] == "ok"
        assert managed.host.management.mode == "keep"
    assert managed.http.post("/continue_generation").status_code == 200
    assert managed.http.post("/release_memory_occupation").json()["success"]
    assert managed.http.post("/resume_memory_occupation").json()["success"]
    assert tokens_of(managed) == before
    assert state(managed) == AWAKE
    for tags in ([], ["cuda_graph"]):
        assert managed.post("/release_memory_occupation", tags=tags).json()["success"]
        assert state(managed) == AWAKE
    found = managed.post("/release_memory_occupation", tags=["a" * 10**5])
    assert (found.status_code, found.json()["success"]) == (400, False)
    assert len(found.text) < 500


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/pause?mode=x", "mode"),
        ("/pause?mode=", "mode"),
        ("/pause?clear_cache=7", "clear_cache"),
        ("/sleep?level=7", "level"),
        ("/sleep?level=-1", "level"),
        ("/sleep?level=x", "level"),
        ("/sleep?mode=x", "mode"),
        ("/wake_up?tags=x", "tags"),
        ("/wake_up?tags=weights&tags=x", "tags"),
    ],
)
def test_wrong_queries_are_named_and_change_nothing(managed, path, name):
    found = managed.http.post(path)
    assert found.status_code == 400, found.text
    assert name in found.json()["error"]["message"]
    assert state(managed) == AWAKE


def test_what_is_not_begun_can_be_ended(managed):
    for path in ("/resume", "/wake_up", "/continue_generation", "/resume_memory_occupation"):
        assert managed.http.post(path).status_code == 200, path
    assert state(managed) == AWAKE
    assert len(tokens_of(managed)["token_ids"]) == 12


def test_the_document_of_an_administrator_is_true(managed):
    """Whatever is posted: no 5xx, and no answer outside of the document's schemas."""
    schema = schemathesis.openapi.from_url(f"{managed.url}/openapi.json")
    # Paths that name a repository would ask the hub.
    left_out = {"/update_weights_from_disk", "/update_weights"}
    checks = [schemathesis.checks.not_a_server_error, schemathesis.specs.openapi.checks.response_schema_conformance]
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in ADMIN_PATHS - left_out:
            continue

        @settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
        @given(operation.as_strategy())
        def check(case):
            nonlocal count
            count += 1
            headers = {"Authorization": "Bearer root"}
            case.call_and_validate(checks=checks, timeout=60, headers=headers)

        check()
    assert count > 50
