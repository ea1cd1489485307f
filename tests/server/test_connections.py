"""Limits of connections, on an application that answers every request with the length of its body."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
import uvicorn

from dflash_jax.server.connections import ConnectionLimits, ConnectionTable, LimitedProtocol, protocol
from tests.server.conftest import wait_until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
WHOLE = GET + b"\r\n"
ENDLESS = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"
# The end of an answer to /endless.
has_ended = threading.Event()


async def application(scope, receive, send) -> None:
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
            # Sending to a client that is gone does not wait, and `gone` would never be done.
            await asyncio.sleep(0)
        has_ended.set()
        return
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3000")]})
        for i in range(30):
            await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": bytes(100), "more_body": i < 29})
        return
    body = bytes(60_000) if scope["path"] == "/long" else str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    if scope["path"] == "/last":
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def arriving(connect) -> int:
    """Requests whose bodies still arrive."""
    cycles = [getattr(c, "cycle", None) for c in list(connect.open)]
    return sum(c is not None and c.more_body and not c.response_complete for c in cycles)


def answered_without_end(connect, receive_bytes: int | None = None) -> socket.socket:
    connection = connect(receive_bytes)
    connection.sendall(ENDLESS)
    assert connection.recv(2**10).startswith(b"HTTP/1.1 200")
    return connection


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(tls=None, has_small_buffers=True, **limits):
            listening = socket.create_server(("127.0.0.1", 0), backlog=256)
            if has_small_buffers:
                # What the system holds of an answer is little, and the rest waits in the server.
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            http = protocol(ConnectionLimits(**limits), tls)
            server = uvicorn.Server(
                uvicorn.Config(application, http=http, ws="none", lifespan="off", log_level="critical")
            )
            loops = []

            async def run() -> None:
                loops.append(asyncio.get_running_loop())
                await server.serve(sockets=[listening])

            thread = threading.Thread(target=lambda: asyncio.run(run()))
            thread.start()

            def abort() -> None:
                for each in list(server.server_state.connections):
                    each.transport.abort()
                server.should_exit = server.force_exit = True

            def stop() -> None:
                # The event loop ends without waiting for connections: none may be open then.
                loops[0].call_soon_threadsafe(abort)
                thread.join()

            stack.callback(stop)
            while not server.started:
                time.sleep(0.01)

            def connect(receive_bytes: int | None = None) -> socket.socket:
                connection = stack.enter_context(socket.socket())
                connection.settimeout(30)
                if receive_bytes is not None:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
                connection.connect(listening.getsockname())
                return connection

            connect.open = server.server_state.connections
            return connect

        yield start


def send(connection: socket.socket, head: bytes, part: bytes, times: int) -> None:
    """Until the server has had enough."""
    with contextlib.suppress(OSError):
        connection.sendall(head)
        for _ in range(times):
            connection.sendall(part)


def read(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of the next answer; 0 where the server closes without one."""
    data = b""
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < length(data):
        try:
            part = connection.recv(2**16)
        except ConnectionError:
            part = b""
        if not part:
            assert not data
            return 0, b""
        data += part
    return int(data.split()[1]), data.partition(b"\r\n\r\n")[2]


def length(data: bytes) -> int:
    return int(data.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


def at_once(check, *cases) -> None:
    """Checks each of ``cases``, which wait, in a thread of its own."""
    with ThreadPoolExecutor(len(cases)) as pool:
        list(pool.map(check, cases))


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while connection.recv(2**16):
            pass
    return True


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (GET, b"a: b\r\n" * 1000),
        (GET + b"a: ", b"b" * 10_000),
        (GET, b"a" * 10_000),
        (b"GET /", b"b" * 10_000),
        (b"", b"G" * 10_000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\na: ", b"b" * 10_000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"a: b\r\n" * 1000),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;a=", b"b" * 10_000),
    ],
)
def test_a_head_without_end(serve, head, part):
    connection = serve()()
    send(connection, head, part, 100)
    status, body = read(connection)
    assert status in ((400,) if not head else (431,))
    assert json.loads(body)["error"]["code"] == status
    assert is_closed(connection)


def test_heads_up_to_the_limits(serve):
    connect = serve()
    for lines in (b"".join(b"a%d: b\r\n" % i for i in range(99)), b"a: " + b"b" * 65_000 + b"\r\n"):
        connection = connect()
        connection.sendall(GET + lines + b"\r\n")
        assert read(connection) == (200, b"0")
    connection.sendall(GET + b"".join(b"a%d: b\r\n" % i for i in range(100)) + b"\r\n")
    assert read(connection)[0] == 431


@pytest.mark.parametrize("begun", [GET, POST + b"Content-Length: 10\r\n\r\nabc"])
def test_what_does_not_arrive_in_time(serve, begun):
    connection = serve(head_s=0.2, stall_s=0.2)()
    connection.sendall(begun)
    assert read(connection)[0] == 408
    assert is_closed(connection)


def test_chunks_that_are_too_small(serve):
    connection = serve(framing_bytes=10_000)()
    send(connection, POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 100, 10_000)
    status, body = read(connection)
    assert status == 400
    assert "chunks" in json.loads(body)["error"]["message"]


def test_a_body_that_drips(serve):
    connection = serve(head_s=0.2, stall_s=60, body_s=0.3, discard_s=0.2)()
    connection.sendall(POST + b"Content-Length: 100000000\r\n\r\n")
    send(connection, b"", b"x", 10**6)
    assert read(connection)[0] == 408


def test_a_body_has_longer_the_more_of_it_has_come(serve):
    connection = serve(head_s=0.2, stall_s=600, body_s=0.1, body_rate=1000)()
    connection.sendall(POST + b"Content-Length: 1000001\r\n\r\n" + bytes(1_000_000))
    time.sleep(0.5)
    connection.sendall(b"x")
    assert read(connection) == (200, b"1000001")


@pytest.mark.parametrize("begun", [b"", b"\r\n"])
def test_a_connection_without_a_request(serve, begun):
    connection = serve(head_s=0.2)()
    connection.sendall(begun)
    assert is_closed(connection)


def test_idle_connection_is_closed_after_idle_s(serve):
    connection = serve(head_s=0.2, idle_s=0.2)()
    connection.sendall(WHOLE)
    assert read(connection)[0] == 200
    assert is_closed(connection)


def test_connection_limit_closes_idle_then_oldest_arriving_body(serve):
    """What waits gives way, then the oldest body that still arrives; a request that is being answered never does."""
    connect = serve(connections=3)
    answered, first, second = answered_without_end(connect), connect(), connect()
    first.sendall(WHOLE)
    assert read(first) == (200, b"0")
    second.sendall(POST + b"Content-Length: 3\r\n\r\na")
    assert wait_until(lambda: arriving(connect) == 1)
    third = connect()
    assert is_closed(first)
    third.sendall(POST + b"Content-Length: 3\r\n\r\na")
    assert wait_until(lambda: arriving(connect) == 2)
    fourth = connect()
    assert is_closed(second)
    third.sendall(b"bc")
    assert read(third) == (200, b"3")
    for each in (third, fourth):
        each.sendall(ENDLESS)
        assert each.recv(2**10)
    assert read(connect())[0] == 503
    for each in (answered, third, fourth):
        assert each.recv(2**10)
        each.close()


@pytest.mark.parametrize(
    "begun",
    [
        b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 10_000,
    ],
    ids=["early", "refused"],
)
def test_an_answer_before_its_body_gives_way_at_once(serve, begun):
    """Although the rest of the body is still read for a while, and before a body that has no answer."""
    connect = serve(connections=2, framing_bytes=10_000, stall_s=600.0, body_s=600.0, discard_s=600.0)
    arrives, answered = connect(), connect()
    arrives.sendall(POST + b"Content-Length: 3\r\n\r\na")
    assert wait_until(lambda: arriving(connect) == 1)
    answered.sendall(begun)
    assert read(answered)[0] in (200, 400)
    other = connect()
    other.sendall(WHOLE)
    assert read(other) == (200, b"0")
    assert is_closed(answered)
    arrives.sendall(b"bc")
    assert read(arrives) == (200, b"3")


def test_a_burst_of_connections_keeps_to_the_limit(serve):
    """Of connections that are accepted in one turn of the event loop, each takes another one's place."""
    connect, has_come = serve(connections=3, head_s=600.0), threading.Event()
    connect()
    assert wait_until(lambda: connect.open)
    next(iter(connect.open)).loop.call_soon_threadsafe(has_come.wait)
    for _ in range(40):
        connect()
    has_come.set()
    last = connect()
    last.sendall(WHOLE)
    assert read(last) == (200, b"0")
    assert wait_until(lambda: len(connect.open) <= 3)


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_an_answer_before_the_body_is_read_by_a_client_that_sends_the_whole_body_first(serve, more, is_chunked):
    """The rest of the request is discarded, and the connection ends: what follows is no request."""
    connection = serve()()
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 50000000"
    connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\n" + more + framing + b"\r\n\r\n")
    part = bytes(1_000_000)
    for _ in range(50):
        connection.sendall(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
    connection.sendall(WHOLE)
    head, _, rest = b"".join(iter(lambda: connection.recv(2**16), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"\r\nconnection: close" in head
    assert rest == b"0"


def test_a_refused_connection_ends_when_the_server_stops(serve):
    """Although its client could send on for a while."""
    connect = serve(discard_s=600.0, body_s=600.0)
    connection = connect()
    connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
    assert read(connection)[0] == 400
    (refused,) = connect.open
    refused.loop.call_soon_threadsafe(refused.shutdown)
    assert wait_until(lambda: not connect.open)


def test_a_refusal_of_a_pipelined_request_is_not_written_into_the_answer_before_it(serve):
    connection = serve()()
    connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    data = connection.recv(2**16)
    connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n")
    with contextlib.suppress(ConnectionError):
        data += b"".join(iter(lambda: connection.recv(2**16), b""))
    assert data.startswith(b"HTTP/1.1 200")
    assert data.count(b"HTTP/1.1") == 1


def test_an_answer_before_a_body_without_end(serve):
    connection = serve(discard_bytes=2**20)()
    connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
    assert read(connection) == (200, b"0")
    send(connection, b"", b"x" * 10_000, 10_000)
    assert is_closed(connection)


def test_an_answer_before_a_body_that_drips(serve):
    connection = serve(body_s=0.3)()
    connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
    send(connection, b"", b"x", 10**6)
    assert is_closed(connection)


def test_a_last_answer_is_not_lost_to_a_request_that_has_begun(serve):
    connection = serve()()
    connection.sendall(b"GET /last HTTP/1.1\r\nHost: x\r\n\r\n" + POST + b"Content-Length: 3\r\n\r\n")
    assert read(connection) == (200, b"0")
    connection.sendall(b"abc" + WHOLE)
    assert connection.recv(2**10) == b""


UPGRADES = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"connection: upgrade\r\nupgrade: WebSocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Upgrade: TLS/1.0, h2c\r\nUpgrade: other\r\nConnection: keep-alive, Upgrade\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: Upgrade\r\n",
)
# Of a request that is its connection's last.
LAST_UPGRADES = (
    b" HTTP/1.1\r\nConnection: close, Upgrade\r\nUpgrade: h2c\r\n",
    b" HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n",
)
BODIES = (
    (b"", b""),
    (b"Content-Length: 5\r\n", b"GET /"),
    (b"Transfer-Encoding: chunked\r\n", b"3\r\nGET\r\n2\r\n /\r\n0\r\nTrailer: x\r\n\r\n"),
)


def has_begun(connect, connection: socket.socket) -> bool:
    """Whether a request of this connection has begun to arrive."""
    return any(c.client == connection.getsockname() and c.scope for c in list(connect.open))


@pytest.mark.parametrize("upgrade", UPGRADES)
@pytest.mark.parametrize(("framing", "body"), BODIES, ids=["none", "length", "chunked"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_upgrade_is_ignored(serve, upgrade, framing, body, times):
    """One answer for each request, however the bytes of its body and of further requests arrive."""
    connect, head = serve(), POST + upgrade + framing + b"\r\n"
    for cuts in ((), (len(head) - 1,), (len(head),), (len(head) + 2,), range(1, len(head) + len(body))):
        connection, data = connect(), (head + body) * times + GET + b"Connection: close\r\n\r\n"
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in pairwise((0, *cuts, len(data))):
            connection.sendall(data[begin:end])
            if begin == 0 and len(cuts) == 1:
                # The server reads the first part alone.
                assert wait_until(partial(has_begun, connect, connection))
        answers = b"".join(iter(lambda: connection.recv(2**16), b""))  # noqa: B023
        sizes = [answer.partition(b"\r\n\r\n")[2] for answer in answers.split(b"HTTP/1.1 200 OK")[1:]]
        assert sizes == [b"5" if body else b"0"] * times + [b"0"]


@pytest.mark.parametrize("upgrade", LAST_UPGRADES)
@pytest.mark.parametrize(("framing", "body"), BODIES, ids=["none", "length", "chunked"])
def test_an_upgrade_of_the_last_request_is_ignored(serve, upgrade, framing, body):
    connection = serve()()
    connection.sendall(b"POST /" + upgrade + b"Host: x\r\n" + framing + b"\r\n" + body + WHOLE)
    answers = b"".join(iter(lambda: connection.recv(2**16), b""))
    assert answers.count(b"HTTP/1.1 ") == answers.count(b"\r\nconnection: close\r\n") == 1
    assert answers.endswith(b"\r\n\r\n5" if body else b"\r\n\r\n0")


def test_connect_is_refused(serve):
    """The bytes that follow it are no request."""
    connection = serve()()
    connection.sendall(b"CONNECT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + WHOLE)
    assert read(connection)[0] == 405
    assert connection.recv(2**10) == b""


def test_an_answer_before_a_body_that_does_not_come(serve):
    connection = serve(discard_s=0.2)()
    connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    assert read(connection) == (200, b"0")
    assert is_closed(connection)


def test_an_answer_that_is_not_read(serve):
    connection = serve(head_s=0.2, unread_s=0.2)()
    connection.sendall(ENDLESS)
    assert has_ended.wait(60)


def read_slowly(connection: socket.socket, size: int, pause_s: float) -> bytes:
    """An answer of /long, ``size`` bytes at a time."""
    data = b""
    while len(data.partition(b"\r\n\r\n")[2]) < 60_000 and (part := connection.recv(size)):
        data += part
        time.sleep(pause_s)
    return data.partition(b"\r\n\r\n")[2]


def test_an_answer_that_is_read_too_slowly(serve):
    """A little now and then is not enough."""
    connect = serve(head_s=0.2, unread_s=1.0, unread_rate=2**20)
    connection = connect(receive_bytes=4096)
    connection.sendall(ENDLESS)
    assert wait_until(lambda: connect.open)

    def is_cut() -> bool:
        with contextlib.suppress(ConnectionError):
            connection.recv(256)
        return not connect.open

    assert wait_until(is_cut, 30)


def check_progress(connect, connection: socket.socket) -> None:
    """An answer without end has filled the system's buffer: the server sees what its client reads of it."""
    assert wait_until(lambda: [c for c in list(connect.open) if c.flow.write_paused])
    (server_side,) = connect.open
    for _ in range(5):
        before = server_side._unread_bytes()
        for _ in range(8):
            connection.recv(2**12)
        assert wait_until(lambda: server_side._unread_bytes() < before)  # noqa: B023


def test_a_slow_client_is_seen_to_read(serve):
    """Far less than what the system's buffer must have free before it takes more from the server."""
    connect = serve(has_small_buffers=False)
    check_progress(connect, answered_without_end(connect, 4096))


def test_an_answer_that_takes_long_to_read(serve):
    """No client that reads fast enough is cut, however long the whole answer takes."""

    def check(more: bytes) -> None:
        connection = serve(head_s=0.5, unread_s=2.0)(receive_bytes=4096)
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        assert read_slowly(connection, 2048, 0.15) == bytes(60_000)

    at_once(check, b"", b"Connection: close\r\n")


def test_an_answer_that_takes_long_to_make(serve):
    connection = serve(head_s=0.2, stall_s=0.2, idle_s=0.2, unread_s=0.2, unread_rate=2**20)()
    connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read(connection) == (200, bytes(3000))


CLOSE = b"Connection: close\r\n"


def test_a_whole_answer_that_is_read_late(serve):
    """It does not count as idle while some of it waits in the server."""

    def check(more: bytes) -> None:
        connection = serve(head_s=0.1, idle_s=0.1)(receive_bytes=4096)
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        time.sleep(1)
        assert read(connection) == (200, bytes(60_000))
        assert is_closed(connection)

    at_once(check, b"", CLOSE)


def test_a_whole_answer_that_is_not_read(serve):
    def check(more: bytes) -> None:
        connect = serve(head_s=0.2, unread_s=0.2)
        connection = connect(receive_bytes=4096)
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        assert wait_until(lambda: connect.open)
        assert wait_until(lambda: not connect.open, 30)

    at_once(check, b"", CLOSE)


def test_what_waits_without_an_answer_gives_way_first(serve):
    connect = serve(connections=2)
    reading = connect(receive_bytes=4096)
    reading.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
    assert wait_until(lambda: any(c.is_unread for c in list(connect.open)))
    idle = connect()
    connect()
    assert is_closed(idle)
    assert read(reading) == (200, bytes(60_000))


def test_a_connection_that_has_been_read_gives_way_before_an_older_one_that_has_not():
    table = ConnectionTable(3)
    slow, quick, other, new = (Mock(is_unread=True) for _ in range(4))
    for each in (slow, quick, other):
        assert table.enter(each)
        table.set_waiting(each)
    quick.is_unread = False
    assert table.enter(new)
    assert [each.transport.abort.called for each in (slow, quick, other)] == [False, True, False]


def test_a_closed_connection_counts_until_its_answer_is_read(serve):
    connect = serve(connections=1)
    connect(receive_bytes=4096).sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
    assert wait_until(lambda: any(c.is_unread for c in list(connect.open)))
    other = connect()
    other.sendall(WHOLE)
    assert read(other) == (200, b"0")
    assert len(connect.open) == 1


def test_a_new_connection_costs_the_same_however_many_there_are(serve, monkeypatch):
    seen, is_waiting = [], LimitedProtocol.is_waiting
    monkeypatch.setattr(LimitedProtocol, "is_waiting", property(lambda c: seen.append(c) or is_waiting.fget(c)))
    connect = serve(connections=40, head_s=600.0)
    first = [connect() for _ in range(40)]
    assert wait_until(lambda: len(connect.open) == 40)
    before = len(seen)
    for _ in range(30):
        connect()
    assert all(is_closed(each) for each in first[:30])
    assert len(seen) - before < 30 * 10


def test_many_requests_at_once(serve):
    connection = serve()()
    connection.sendall(WHOLE * 8)
    data = b""
    while data.count(b"HTTP/1.1 200") < 8:
        data += connection.recv(2**16)
    send(connection, b"", WHOLE * 1000, 100)
    assert is_closed(connection)
