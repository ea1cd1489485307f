"""TLS handshakes count as connections, and end in time."""

import os
import ssl
from contextlib import ExitStack, suppress

import pytest
import trustme

from tests.server.conftest import wait_until
from tests.server.test_connections import (
    CLOSE,
    ENDLESS,
    POST,
    WHOLE,
    answered_without_end,
    arriving,
    at_once,
    check_progress,
    is_closed,
    read,
    read_slowly,
    serve,  # noqa: F401
)


@pytest.fixture(scope="module")
def contexts():
    """(the server's, a client's)."""
    authority, client = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(ours)
    authority.configure_trust(client)
    return ours, client


@pytest.fixture
def shaken(contexts):
    """Connections behind their handshakes."""
    with ExitStack() as stack:
        yield lambda each: stack.enter_context(contexts[1].wrap_socket(each, server_hostname="localhost"))


def test_requests_behind_a_handshake(serve, shaken, contexts):  # noqa: F811
    connection = shaken(serve(contexts[0])())
    connection.sendall(POST + b"Content-Length: 1000000\r\n\r\n" + bytes(1_000_000))
    assert read(connection) == (200, b"1000000")
    connection.sendall(WHOLE)
    assert read(connection) == (200, b"0")


def test_a_request_that_comes_with_the_end_of_the_handshake(serve, contexts):  # noqa: F811
    connection, incoming, outgoing = serve(contexts[0])(), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = contexts[1].wrap_bio(incoming, outgoing, server_hostname="localhost")

    def step(function):
        """What the function returns when it has read enough."""
        while True:
            with suppress(ssl.SSLWantReadError):
                return function()
            connection.sendall(outgoing.read())
            incoming.write(connection.recv(2**16))

    step(tls.do_handshake)
    tls.write(WHOLE)
    connection.sendall(outgoing.read())
    assert step(lambda: tls.read(2**16)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [b"", b"\x16\x03\x01", WHOLE, os.urandom(2**16)], ids=["nothing", "part", "http", "noise"]
)
def test_what_is_no_handshake(serve, shaken, contexts, sent):  # noqa: F811
    connect = serve(contexts[0], head_s=0.2)
    connection = connect()
    with suppress(OSError):
        connection.sendall(sent)
    assert is_closed(connection)
    other = shaken(connect())
    other.sendall(WHOLE)
    assert read(other) == (200, b"0")


def test_handshakes_count_as_connections(serve, shaken, contexts):  # noqa: F811
    connect = serve(contexts[0], connections=3)
    silent = [connect() for _ in range(3)]
    # The oldest gives way.
    other = shaken(connect())
    assert is_closed(silent[0])
    other.sendall(POST + b"Content-Length: 3\r\n\r\n")
    busy = [shaken(connect()) for _ in range(2)]
    for each in busy:
        each.sendall(POST + b"Content-Length: 3\r\n\r\n")
    assert is_closed(silent[1])
    assert is_closed(silent[2])
    assert wait_until(lambda: arriving(connect) == 3)
    # The oldest body gives way to a handshake.
    last = shaken(connect())
    assert is_closed(other)
    for each in busy:
        each.sendall(b"abc")
        assert read(each) == (200, b"3")
    for each in (*busy, last):
        each.sendall(ENDLESS)
        assert each.recv(2**10)
    assert read(shaken(connect()))[0] == 503
    assert len(connect.open) <= 4


def test_an_answer_behind_a_handshake_that_takes_long_to_read(serve, shaken, contexts):  # noqa: F811
    """What the connection below TLS buffers is unread as well."""

    def check(more: bytes) -> None:
        connect = serve(contexts[0], idle_s=0.2, unread_s=2.0)
        connection = shaken(connect(receive_bytes=4096))
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        assert wait_until(lambda: any(c.is_unread for c in list(connect.open)))
        assert read_slowly(connection, 2048, 0.15) == bytes(60_000)

    at_once(check, b"", CLOSE)


def test_a_slow_client_behind_a_handshake_is_seen_to_read(serve, shaken, contexts):  # noqa: F811
    connect = serve(contexts[0], has_small_buffers=False)
    check_progress(connect, answered_without_end(lambda size: shaken(connect(size)), 4096))


def test_an_answer_behind_a_handshake_that_is_not_read(serve, shaken, contexts):  # noqa: F811
    def check(more: bytes) -> None:
        connect = serve(contexts[0], head_s=3.0, unread_s=0.5)
        connection = shaken(connect(receive_bytes=4096))
        connection.sendall(b"GET /long HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
        assert wait_until(lambda: any(c.is_unread for c in list(connect.open)))
        assert wait_until(lambda: not connect.open, 30)

    at_once(check, b"", CLOSE)


def test_a_client_that_does_not_close(serve, shaken, contexts):  # noqa: F811
    """Of a connection that the server closes, it has read everything."""
    connect = serve(contexts[0], head_s=3.0, unread_s=0.5)
    connection = shaken(connect())
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n")
    assert read(connection) == (200, b"0")
    assert wait_until(lambda: not connect.open, 30)
