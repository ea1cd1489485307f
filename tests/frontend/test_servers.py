"""Requests shared among servers that are scripted here: what is sent again, where, and when it is given up."""

import asyncio
import contextlib

import pytest

from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend import servers
from dflash_jax.frontend.servers import ATTEMPTS, RequestLostError, Servers, base_urls
from tests.streams import StreamServer

# Of a connection: by the client, or by the end of a test.
ENDS = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)


class Scripted:
    """A server on this event loop. ``answer(number)`` is the status of a POST, or None: the connection is cut.

    Attributes:
        posts: POST requests so far.
        most: Of them at a time.
        health: The status of /health; None: no answer.
        ready: The status of /ready.
        ready_looks: Looks at it so far.
    """

    def __init__(self, answer):
        self.answer, self.posts, self.most, self._now, self.health = answer, 0, 0, 0, 200
        self.ready, self.ready_looks = 404, 0
        self.release = asyncio.Event()
        self.release.set()

    async def __aenter__(self):
        self._server = await StreamServer(self._serve).__aenter__()
        self.url = f"http://127.0.0.1:{self._server.port}"
        return self

    async def __aexit__(self, *reason):
        await self._server.__aexit__(*reason)

    async def _serve(self, reader, writer):
        with contextlib.closing(writer), contextlib.suppress(*ENDS):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                status = self.health
                if head.startswith("post"):
                    await reader.readexactly(int(head.split("content-length: ")[1].split("\r")[0]))
                    self.posts, self._now = self.posts + 1, self._now + 1
                    self.most, number = max(self.most, self._now), self.posts
                    await self.release.wait()
                    self._now -= 1
                    status = self.answer(number)
                elif head.startswith("get /ready"):
                    self.ready_looks += 1
                    status = self.ready
                elif status is None:
                    await asyncio.Event().wait()
                if status is None:
                    break
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: 2\r\n\r\n{}" % status)


def run(*answers, work, concurrency=2):
    """``work(servers, scripted)`` with a server for each of ``answers``."""

    async def running():
        async with contextlib.AsyncExitStack() as stack:
            scripted = [await stack.enter_async_context(Scripted(answer)) for answer in answers]
            shared = await stack.enter_async_context(Servers([each.url for each in scripted], concurrency))
            return await work(shared, scripted)

    return asyncio.run(asyncio.wait_for(running(), 300))


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(servers, "LOOK_S", 0.01)


async def all_posted(shared, count):
    answers = await asyncio.gather(*(shared.post("/v1/completions", b"{}") for _ in range(count)))
    return [answer.status_code for answer in answers]


def test_each_server_has_as_many_requests_at_a_time_as_it_may():
    async def work(shared, scripted):
        for server in scripted:
            server.release.clear()
        answers = asyncio.ensure_future(all_posted(shared, 40))
        while sum(server.posts for server in scripted) < 4:
            await asyncio.sleep(0.001)
        for server in scripted:
            server.release.set()
        assert await answers == [200] * 40
        return scripted

    first, second = run(lambda _: 200, lambda _: 200, work=work)
    assert first.posts + second.posts == 40
    assert first.most == second.most == 2


@pytest.mark.parametrize("failure", [None, 503, 502, 500], ids=str)
def test_what_a_server_does_not_answer_another_one_does(failure):
    """Also a server that takes no more requests for good, and says that it is healthy."""

    async def work(shared, scripted):
        assert await all_posted(shared, 12) == [200] * 12
        return scripted

    first, second = run(lambda number: 200 if number < 3 else failure, lambda _: 200, work=work)
    assert second.posts >= 10
    assert first.posts > 2


def test_a_server_that_comes_back_gets_requests_again():
    async def work(shared, scripted):
        # The only server: what it cuts off waits for its next good look.
        assert await all_posted(shared, 6) == [200] * 6
        return scripted

    (server,) = run(lambda number: None if number == 1 else 200, work=work)
    assert server.posts >= 7


def test_a_refused_request_is_the_answer_and_is_not_repeated():
    async def work(shared, scripted):
        assert await all_posted(shared, 3) == [400] * 3
        return scripted

    (server,) = run(lambda _: 400, work=work)
    assert server.posts == 3


@pytest.mark.parametrize("status", [None, 502, 504], ids=str)
def test_a_request_that_always_fails_is_given_up(status):
    """Without an answer, so that a run that goes on sends it again."""

    async def work(shared, scripted):
        with pytest.raises(RequestLostError, match=f"it failed {ATTEMPTS} times"):
            await shared.post("/v1/completions", b"{}")
        return scripted

    assert sum(server.posts for server in run(lambda _: status, lambda _: status, work=work)) == ATTEMPTS


@pytest.mark.parametrize("status", [503, 307], ids=str)
def test_a_request_that_healthy_servers_turn_away_is_given_up(status):
    """Each server's first refusal is its own matter; later ones, with a good /health in between, are counted."""

    async def work(shared, scripted):
        with pytest.raises(RequestLostError, match=f"it failed {ATTEMPTS} times, last at http.*: status {status}"):
            await shared.post("/v1/completions", b"{}")
        return scripted

    def answer(number):
        return status if number < 2 * ATTEMPTS else 200

    assert sum(server.posts for server in run(answer, answer, work=work)) == ATTEMPTS + 2


def test_a_server_that_warms_up_is_waited_for():
    async def work(shared, scripted):
        (server,) = scripted
        server.ready = 503
        posted = asyncio.ensure_future(all_posted(shared, 1))
        while server.ready_looks < 2 * ATTEMPTS and not posted.done():
            await asyncio.sleep(0.001)
        server.ready = 200
        assert await posted == [200]
        return scripted

    (server,) = run(lambda number: 503 if number == 1 else 200, work=work)
    assert server.posts == 2
    assert server.ready_looks > ATTEMPTS


def test_an_error_that_stays_is_the_answer():
    async def work(shared, scripted):
        assert await all_posted(shared, 1) == [500]
        return scripted

    assert sum(server.posts for server in run(lambda _: 500, lambda _: 500, work=work)) == ATTEMPTS


def test_too_many_requests_for_long_is_the_answer(monkeypatch):
    monkeypatch.setattr(servers, "WAIT_S", 0.0)

    async def work(shared, scripted):
        assert await all_posted(shared, 1) == [429]

    run(lambda number: 429 if number == 1 else 200, work=work)


@pytest.mark.parametrize("health", [307, 404, 503], ids=str)
def test_only_a_good_look_opens_a_server(health, monkeypatch):
    async def work(shared, scripted):
        monkeypatch.setattr(servers, "WAIT_S", 0.1)
        scripted[0].health = health
        with pytest.raises(EngineError, match=f"/health is {health}"):
            await shared.post("/v1/completions", b"{}")
        return scripted

    (server,) = run(lambda _: 503, work=work)
    assert server.posts == 1


def test_a_server_is_silent_since_it_was_closed_last():
    async def work(shared, scripted):
        (server,) = shared._servers
        for watch in shared._watches:
            watch.cancel()
        shared._close(server, "a")
        first = server.silent_since
        shared._close(server, "b")
        assert server.silent_since == first
        assert await shared._look(server)
        assert server.silent_since is None

    run(lambda _: 200, work=work)


def test_a_server_that_hangs_gives_its_requests_to_the_others(monkeypatch):
    monkeypatch.setattr(servers, "ANSWER_S", 1.0)

    async def work(shared, scripted):
        hangs, works = scripted
        hangs.release.clear()
        answers = asyncio.gather(*(shared.post("/v1/completions", b"{}") for _ in range(8)))
        while hangs.posts < 2:
            await asyncio.sleep(0.001)
        hangs.health = None
        assert {answer.status_code for answer in await answers} == {200}
        assert (hangs.posts, works.posts) == (2, 8)
        hangs.release.set()

    run(lambda _: 200, lambda _: 200, work=work)


def test_without_any_server_a_run_ends_and_says_why(monkeypatch):
    async def work(shared, scripted):
        monkeypatch.setattr(servers, "WAIT_S", 0.0)
        with pytest.raises(EngineError, match=r"no server has answered for 0 s: http://127.*status 503"):
            await shared.post("/v1/completions", b"{}")

    run(lambda _: 503, work=work)


def test_a_wrong_key_ends_a_run():
    async def work(shared, scripted):
        with pytest.raises(InputError, match="wants another API key"):
            await shared.post("/v1/completions", b"{}")

    run(lambda _: 401, work=work)


def test_no_server_at_the_start_is_an_error_at_once():
    async def work(shared, scripted):
        port = scripted[0].url.rpartition(":")[2]
        await scripted[0].__aexit__()
        with pytest.raises(InputError, match=rf"no server answers: http://127.0.0.1:{port}: ConnectError"):
            await Servers([f"http://127.0.0.1:{port}"], 1).__aenter__()

    run(lambda _: 200, work=work)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:30000",
        "ftp://a",
        "http://",
        "http://a:99999",
        "http://[::1",
        "http://a b",
        "http://ä",
        "http://a\n",
    ],
)
def test_an_invalid_address_is_named(url):
    with pytest.raises(InputError, match="it must be like"):
        base_urls([url])


def test_addresses_are_those_of_clients_and_given_once():
    assert base_urls(["http://a:1/v1", "https://b/", "http://[::1]:8"]) == ["http://a:1", "https://b", "http://[::1]:8"]
    with pytest.raises(InputError, match="given twice"):
        base_urls(["http://a:1/v1", "http://a:1/"])


@pytest.mark.parametrize(
    "url", ["http://u:secret@a", "u:secret@a", "http://a/?k=secret", "http://a#secret", "http://a?"]
)
def test_secrets_in_an_address_are_refused_and_not_shown(url):
    with pytest.raises(InputError, match="url 2 of 2 has a user, a query or a fragment") as error:
        base_urls(["http://b", url])
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("key", ["secret\n", "secret ", "sécret", ""])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key):
    with pytest.raises(InputError, match="the API key must be printable ASCII") as error:
        Servers(["http://a"], 1, key)
    assert "cret" not in str(error.value)
