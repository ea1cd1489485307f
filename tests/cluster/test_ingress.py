"""The ingress before replicas that play a part: which requests they get, and what clients see."""

import asyncio
import contextlib
import json
import socket
import threading

import httpx
import pytest
import uvicorn

from dflash_jax.cluster import ingress as ingress_module
from dflash_jax.cluster import relay
from dflash_jax.cluster.ingress import Ingress
from dflash_jax.cluster.member import RUN_HEADER, SECRET_HEADER, RunHeader
from dflash_jax.server.resume import END, LOST, RECORD, REPLAYED
from tests.server.conftest import wait_until

EVENTS = [b'data: {"n": %d}' % i + END for i in range(4)]
LINES = [b"[0,[%d],[1],0,0,null,null]" % i for i in range(4)]
STREAM = [(b"content-type", b"text/event-stream"), (b"x-of", b"the replica")]


class Replica:
    """Answers as its ``script`` says: for each POST, a function of (line count, send); then like `whole`.

    Attributes:
        requests: (headers, body) of each POST.
        is_cut: Whether each of its answers ends early.
        cuts: Paths of the requests with such an answer.
    """

    def __init__(self):
        self.script, self.requests, self.is_ready, self.is_cut, self.cuts = [], [], True, False, []
        self.url = None

    async def __call__(self, scope, receive, send):
        headers = dict(scope["headers"])
        assert len(headers) == len(scope["headers"]), "a header is there twice"
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self.is_cut:
            self.cuts.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            return
        if scope["path"] == "/ready":
            await answer(send, 200 if self.is_ready else 503)
            return
        if scope["path"] == "/metrics":
            await answer(send, 200, b"# HELP a Text.\n# TYPE a gauge\na 1.0\n")
            return
        self.requests.append((scope["path"], headers, body))
        recorded = RunHeader.decode(headers[RUN_HEADER]).recorded
        play = self.script.pop(0) if self.script else whole
        with contextlib.suppress(ConnectionAbortedError):
            await play(body[:recorded].splitlines(), send)


async def answer(send, status, body=b"{}"):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


def status(code):
    return lambda lines, send: answer(send, code, b'{"status": %d}' % code)


async def stream(lines, send, count=4, until=None):
    """A stream of all events, behind the replay of ``lines``; with ``until`` it is cut behind so many writes."""
    parts = [EVENTS[i] for i in range(len(lines))] + ([REPLAYED] if lines else [])
    for i in range(len(lines), count):
        parts += [EVENTS[i], RECORD + LINES[i] + END]
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    for part in parts[:until]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    if until is not None:
        raise ConnectionAbortedError
    await send({"type": "http.response.body", "body": b"data: [DONE]" + END})


def whole(lines, send):
    return stream(lines, send)


def cut(until):
    return lambda lines, send: stream(lines, send, until=until)


async def lose(lines, send):
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    for part in (EVENTS[0], RECORD + LINES[0] + END, EVENTS[1], LOST, b'data: {"error": 1}' + END):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def serving(app, start=None, stop=None):
    """The URL of an application on a thread of its own, and its event loop."""
    listening = socket.create_server(("127.0.0.1", 0))
    server, loops = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="critical")), []

    async def run():
        loops.append(asyncio.get_running_loop())
        if start is not None:
            await start()
        await server.serve(sockets=[listening])
        if stop is not None:
            await stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert wait_until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", loops[0]
    finally:
        server.should_exit = True
        thread.join()


class Setting:
    """Attributes: ingress, a and b (replicas), http (a client)."""

    def __init__(self, ingress, replicas, url, loop):
        self.ingress, (self.a, self.b), self.loop = ingress, replicas, loop
        self.http = httpx.Client(base_url=url, timeout=60)

    def join(self, *replicas):
        for replica in replicas or (self.a, self.b):
            self.loop.call_soon_threadsafe(self.ingress.replicas.join, "a" if replica is self.a else "b", replica.url)
        assert wait_until(lambda: self.http.get("/ready").status_code == 200)

    def post(self, path="/v1/completions", content=b"{}", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(path, content=content, headers={"content-type": "application/json", **named})

    def script(self, *plays):
        """What the next requests meet, whichever replica gets them."""
        plays = list(plays)
        self.a.script = self.b.script = plays

    @property
    def requests(self):
        return self.a.requests + self.b.requests

    @property
    def counts(self):
        return self.ingress.link.counts


@contextlib.contextmanager
def setting(**options):
    replicas = [Replica(), Replica()]
    ingress = Ingress("secret", **options)
    with contextlib.ExitStack() as stack:
        for replica in replicas:
            replica.url, _ = stack.enter_context(serving(replica))
        url, loop = stack.enter_context(serving(ingress, ingress.start, ingress.stop))
        cluster = Setting(ingress, replicas, url, loop)
        stack.callback(cluster.http.close)
        yield cluster


@pytest.fixture
def cluster():
    with setting() as cluster:
        cluster.join()
        yield cluster


@pytest.mark.parametrize("plays", [[cut(0)], [cut(1)], [cut(2)], [cut(5), cut(4)], [lose], [lose, cut(3)], [cut(8)]])
def test_client_sees_each_event_once_whatever_dies(cluster, plays):
    cluster.script(*plays)
    found = cluster.post(content=b'{"prompt": "x"}')
    assert found.content == b"".join(EVENTS) + b"data: [DONE]" + END
    assert found.headers["x-of"] == "the replica"
    assert len(cluster.requests) == len(plays) + 1
    assert cluster.counts.resumed == len(plays)


COMMENT = b": keep-alive" + END


async def comment(lines, send):
    await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
    raise ConnectionAbortedError


def test_comment_reaches_the_client_before_anything_else(cluster):
    was_read = threading.Event()

    async def wait(lines, send):
        with contextlib.suppress(ConnectionAbortedError):
            await comment(lines, send)
        await asyncio.to_thread(was_read.wait, 60)
        for part in (EVENTS[0], RECORD + LINES[0] + END, COMMENT, EVENTS[1], RECORD + LINES[1] + END):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    cluster.script(wait)
    with cluster.http.stream("POST", "/generate", content=b"{}", headers={"content-type": "application/json"}) as found:
        parts = found.iter_raw()
        assert next(parts) == COMMENT
        was_read.set()
        assert b"".join(parts) == EVENTS[0] + COMMENT + EVENTS[1]


def test_comment_is_no_progress_of_a_stream_and_forbids_no_other_replica(cluster):
    cluster.script(*[comment] * (relay.ATTEMPTS - 1))
    assert cluster.post().content == COMMENT * (relay.ATTEMPTS - 1) + b"".join(EVENTS) + b"data: [DONE]" + END
    cluster.script(*[comment] * relay.ATTEMPTS)
    content = cluster.post().content
    assert content.startswith(COMMENT * relay.ATTEMPTS)
    assert b"no other can go on" in content


def test_next_replica_gets_the_same_request_with_the_recorded_pieces(cluster):
    cluster.script(cut(4))
    body = b'{"prompt": "' + b"x" * 3_000_000 + b'"}'
    cluster.post(content=body, x_session_id="s", authorization="Bearer schlüssel".encode())
    (first, second) = cluster.requests
    runs = [RunHeader.decode(headers[RUN_HEADER]) for _, headers, _ in (first, second)]
    assert (runs[0].key, runs[0].created) == (runs[1].key, runs[1].created)
    assert {first[2], second[2]} == {body, b"".join(line + b"\n" for line in LINES[:2]) + body}
    for _, headers, _ in (first, second):
        assert (headers[b"authorization"], headers[b"x-session-id"]) == ("Bearer schlüssel".encode(), b"s")
        assert headers[SECRET_HEADER] == b"secret"
    assert cluster.a.requests
    assert cluster.b.requests


def test_requests_have_keys_of_their_own_and_clients_cannot_set_them(cluster):
    for _ in range(2):
        cluster.post(x_dflash_cluster="mine", x_dflash_run=json.dumps({"key": "k", "created": 1, "client": None}))
    runs = [RunHeader.decode(headers[RUN_HEADER]) for _, headers, _ in cluster.requests]
    assert len({run.key for run in runs} | {"k"}) == 3
    assert all(headers[SECRET_HEADER] == b"secret" for _, headers, _ in cluster.requests)


@pytest.mark.parametrize("code", [500, 503])
def test_request_without_a_stream_is_repeated(cluster, code):
    """503 is that of a replica that drains: its /ready says so."""

    def fail(lines, send):
        replica = cluster.a if cluster.a.requests else cluster.b
        replica.is_ready = code == 500
        return answer(send, code)

    cluster.script(fail, status(200))
    found = cluster.post("/v1/embeddings")
    assert (found.status_code, found.json()) == (200, {"status": 200})
    assert cluster.counts.repeated == 1
    assert {len(replica.requests) for replica in (cluster.a, cluster.b)} == {1}


def test_full_replica_stays_open_and_another_one_answers(cluster):
    cluster.script(status(503), status(200))
    assert cluster.post().json() == {"status": 200}
    assert {len(replica.requests) for replica in (cluster.a, cluster.b)} == {1}
    assert len(cluster.ingress.replicas.open) == 2
    assert cluster.counts == relay.Counts()


def test_refusal_of_all_replicas_for_their_load_is_the_answer(cluster):
    cluster.script(status(503), status(503))
    assert cluster.post().json() == {"status": 503}
    assert len(cluster.requests) == 2
    assert len(cluster.ingress.replicas.open) == 2
    assert cluster.counts == relay.Counts()


@pytest.mark.parametrize("code", [429, 503])
def test_stream_that_goes_on_waits_for_a_place(cluster, monkeypatch, code):
    monkeypatch.setattr(relay, "LOOK_S", 0.01)
    cluster.script(cut(2), *[status(code)] * (2 * relay.ATTEMPTS + 1))
    assert cluster.post().content == b"".join(EVENTS) + b"data: [DONE]" + END
    assert cluster.counts == relay.Counts(resumed=1)


def test_stream_that_finds_no_place_ends_with_an_error_event(cluster, monkeypatch):
    monkeypatch.setattr(cluster.ingress.link, "wait_s", 0)
    cluster.script(cut(2), *[status(429)] * 2)
    assert b"no other can go on" in cluster.post().content
    assert cluster.counts == relay.Counts(resumed=1, failed=1)


def test_replica_that_is_gone_and_joins_again_is_no_failed_attempt(cluster, monkeypatch):
    monkeypatch.setattr(relay, "ATTEMPTS", 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster.a.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    cluster.join(cluster.a)
    for _ in range(2):
        cluster.join(cluster.a)
        assert cluster.post(x_session_id="s").content == b"".join(EVENTS) + b"data: [DONE]" + END
    assert len(cluster.b.requests) == 2
    assert cluster.counts == relay.Counts()


def test_replica_that_dies_slowly_gets_no_attempts_until_it_answers_again():
    with setting() as cluster:
        cluster.join(cluster.a)

        async def die(lines, send):
            cluster.a.is_cut = True
            await stream(lines, send, until=2)

        cluster.script(die)
        texts = []
        client = threading.Thread(target=lambda: texts.append(cluster.post().content))
        client.start()
        assert wait_until(lambda: cluster.a.cuts and not cluster.ingress.replicas.open and cluster.ingress.link.waiting)
        cluster.a.is_cut = False
        client.join()
        assert texts == [b"".join(EVENTS) + b"data: [DONE]" + END]
        assert set(cluster.a.cuts) == {"/ready"}
        assert cluster.counts == relay.Counts(resumed=1)


@pytest.mark.parametrize("code", [400, 404, 429])
def test_refusal_of_a_replica_is_the_answer(cluster, code):
    cluster.script(status(code))
    assert cluster.post().status_code == code
    assert len(cluster.requests) == 1


def test_request_that_every_replica_fails_gets_the_last_answer(cluster):
    cluster.script(*[status(500)] * relay.ATTEMPTS)
    assert cluster.post().json() == {"status": 500}
    assert len(cluster.requests) == relay.ATTEMPTS
    assert cluster.counts.failed == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", ["error"]),
        ("/generate", ["error"]),
        ("/v1/messages", ["type", "error", "request_id"]),
        ("/v1/responses", ["type", "code", "message", "param", "sequence_number"]),
    ],
)
def test_stream_that_cannot_go_on_ends_with_an_error_event(cluster, path, last):
    cluster.script(cut(2), *[cut(1)] * relay.ATTEMPTS)
    text = cluster.post(path).text
    events = [event for event in text.split("\n\n") if event]
    assert events[0] == EVENTS[0].decode().strip()
    is_openai = last == ["error"]
    assert (events[-1] == "data: [DONE]") == is_openai
    name, _, data = events[-2 if is_openai else -1].rpartition("data: ")
    assert name == ("" if is_openai else "event: error\n")
    assert list(json.loads(data)) == last
    assert "no other can go on" in data
    if path == "/v1/responses":
        assert json.loads(data)["sequence_number"] == 1


def test_request_that_brings_tokens_again_and_again_is_not_given_up(cluster):
    cluster.script(cut(2), cut(4), cut(5), cut(6))
    assert cluster.post().content == b"".join(EVENTS) + b"data: [DONE]" + END


def test_stream_waits_for_a_new_replica_and_an_abort_reaches_it_there(cluster, monkeypatch):
    gone = threading.Event()

    async def end_all(lines, send):
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": EVENTS[0] + RECORD + LINES[0] + END, "more_body": True})
        for replica in cluster.ingress.replicas.all:
            cluster.loop.call_soon_threadsafe(cluster.ingress.replicas.lose, replica, "the test")
        gone.set()
        raise ConnectionAbortedError

    cluster.script(end_all)
    texts = []
    client = threading.Thread(target=lambda: texts.append(cluster.post().content))
    client.start()
    assert gone.wait(60)
    assert wait_until(lambda: cluster.ingress.link.waiting and not cluster.ingress.replicas.all)
    # No replica gets it now.
    assert cluster.post("/abort_request", b'{"rid": "r"}').status_code == 503
    cluster.script(whole, status(200))
    cluster.join(cluster.a)
    client.join()
    assert texts == [b"".join(EVENTS) + b"data: [DONE]" + END]
    assert [(path, body) for path, _, body in cluster.a.requests if path == "/abort_request"] == [
        ("/abort_request", b'{"rid": "r"}')
    ]


def test_broadcast_reaches_all_replicas_and_answers_the_refusal(cluster):
    cluster.script(status(200), status(400))
    assert cluster.post("/flush_cache").status_code == 400
    assert [len(replica.requests) for replica in (cluster.a, cluster.b)] == [1, 1]
    cluster.script(status(200), status(200))
    assert cluster.post("/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize("path", ["/abort_request", "/flush_cache", "/reset_prefix_cache"])
def test_broadcast_says_whom_it_did_not_reach(cluster, path):
    cluster.a.is_cut = True
    found = cluster.post(path)
    assert found.status_code == 503
    assert "1 of 2 replicas have answered, and not a:" in found.json()["error"]["message"]
    assert [each for each, _, _ in cluster.b.requests] == [path]


def test_broadcast_does_not_miss_a_replica_that_has_died(cluster):
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster.a.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    cluster.join(cluster.a)
    assert cluster.post("/flush_cache").status_code == 200


def test_replica_without_an_answer_is_closed_and_left_out_of_metrics_until_it_answers(cluster):
    cluster.a.is_cut = True
    assert wait_until(lambda: len(cluster.ingress.replicas.open) == 1)
    text = cluster.http.get("/metrics").text
    assert "\ndflash:replicas 1.0\n" in text
    assert 'engine="a"' not in text
    assert set(cluster.a.cuts) == {"/ready"}
    assert {cluster.post().status_code for _ in range(8)} == {200}
    assert cluster.a.requests == []
    cluster.a.is_cut = False
    assert wait_until(lambda: len(cluster.ingress.replicas.open) == 2)
    assert "\ndflash:replicas 2.0\n" in cluster.http.get("/metrics").text


def test_metrics_are_merged_off_the_event_loop(cluster, monkeypatch):
    threads = []
    monkeypatch.setattr(ingress_module, "merged", lambda *_: threads.append(threading.current_thread()) or b"")
    assert cluster.http.get("/metrics").status_code == 200
    loops = []
    cluster.loop.call_soon_threadsafe(lambda: loops.append(threading.current_thread()))
    assert wait_until(lambda: loops)
    assert threads != loops


def test_metrics_count_the_replicas_that_answer(cluster):
    text = cluster.http.get("/metrics").text
    assert "\ndflash:replicas 2.0\n" in text
    assert 'a{engine="a"} 1.0' in text


def test_cluster_is_ready_with_its_first_replica():
    with setting() as cluster:
        assert cluster.http.get("/health").status_code == 200
        assert cluster.http.get("/ready").status_code == 503
        early = cluster.post()
        assert early.status_code == 503
        assert "warming up" in early.json()["error"]["message"]
        cluster.join(cluster.a)
        assert cluster.http.get("/ready").json() == {"status": "ok"}
        assert cluster.post().status_code == 200


def test_wrong_key_and_wrong_host_are_refused_before_any_replica():
    with setting(api_keys=["key"], hosts=["127.0.0.1"]) as cluster:
        cluster.join()
        assert cluster.post().status_code == 401
        assert cluster.post(authorization="Bearer key", host="example.com").status_code == 403
        assert cluster.requests == []
        assert cluster.post(authorization="Bearer key").status_code == 200


def test_draining_cluster_takes_no_requests(cluster):
    cluster.ingress.is_draining = True
    assert cluster.post().status_code == 503
    assert cluster.http.get("/ready").json() == {"status": "draining"}
    assert cluster.requests == []


def test_client_that_leaves_ends_its_request_at_the_replica(cluster):
    began, stop = threading.Event(), threading.Event()

    async def go_on(lines, send):
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        while not stop.is_set():
            await send({"type": "http.response.body", "body": EVENTS[0] + RECORD + LINES[0] + END, "more_body": True})
            began.set()
            await asyncio.sleep(0.01)

    cluster.script(go_on)
    with cluster.http.stream("POST", "/generate", content=b"{}", headers={"content-type": "application/json"}):
        assert began.wait(60)
    assert wait_until(lambda: cluster.ingress.in_flight == 0)
    assert not any(replica.attempts for replica in cluster.ingress.replicas.all)
    stop.set()
    assert len(cluster.requests) == 1
