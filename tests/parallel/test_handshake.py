"""How the processes of one model connect: who is let in, who is refused, and where they look for each other."""

import os
import socket
import struct
import threading
from contextlib import suppress

import pytest

from dflash_jax.errors import EngineError
from dflash_jax.parallel import handshake
from dflash_jax.parallel.handshake import Listener, connect
from tests.parallel.conftest import SECRET


def hello(index, secret=SECRET, magic=handshake.MAGIC, nonce=b"n" * 32, on=b""):
    data = handshake._HELLO.pack(magic, index, 5, nonce)
    return data + handshake.proof_of(secret, b"follower", on, data)


def stranger(port: int, say=lambda nonce: b"") -> socket.socket:
    """A connection that has read the leader's first words and answered."""
    connection = socket.create_connection(("127.0.0.1", port), 60)
    nonce = handshake._exactly(connection, len(handshake.MAGIC) + handshake.NONCE)[len(handshake.MAGIC) :]
    with suppress(OSError):
        connection.sendall(say(nonce))
    return connection


STRANGERS = {
    "garbage": lambda nonce: os.urandom(500),
    "http": lambda nonce: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "a frame of 4 GB": lambda nonce: b"\xff" * 2000,
    "wrong secret": lambda nonce: hello(1, b"t" * 32, on=nonce),
    "another's nonce": lambda nonce: hello(1, on=b"m" * 32),
    "other version": lambda nonce: hello(1, magic=b"dflash\x00\x09", on=nonce),
    "the leader's index": lambda nonce: hello(0, on=nonce),
    "an index too large": lambda nonce: hello(2, on=nonce),
    "its own proof": lambda nonce: handshake._HELLO.pack(handshake.MAGIC, 1, 5, nonce) + nonce,
}


@pytest.mark.parametrize("say", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_refused_and_change_nothing(say, opening):
    leader = opening()
    with stranger(leader.port, say) as connection, suppress(ConnectionResetError):
        # Not one byte of an answer.
        assert connection.recv(100) == b""
    leader.follow(1)
    assert set(leader.followers()) == {1}


def test_silent_half_open_and_slow_strangers_do_not_delay_a_follower(opening):
    leader = opening()
    silent = [stranger(leader.port) for _ in range(20)]
    slow = [stranger(leader.port, lambda nonce: hello(1, on=nonce)[:-1]) for _ in range(20)]
    gone = stranger(leader.port)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()
    leader.follow(1)
    assert set(leader.followers()) == {1}
    for connection in (*silent, *slow):
        with connection, suppress(ConnectionResetError):
            assert connection.recv(100) == b""


def test_more_strangers_than_greetings_do_not_keep_a_follower_out(opening, monkeypatch):
    monkeypatch.setattr(handshake, "GREETING_S", 600.0)
    leader = opening()
    strangers = [socket.create_connection(("127.0.0.1", leader.port), 60) for _ in range(3 * handshake.GREETINGS)]
    leader.opened.extend(strangers)
    # The oldest is closed for the newest.
    while strangers[0].recv(100):
        pass
    leader.follow(1)
    assert set(leader.followers()) == {1}


def test_a_stranger_is_closed_behind_its_time(monkeypatch, opening):
    monkeypatch.setattr(handshake, "GREETING_S", 0.0)
    leader = opening()
    with stranger(leader.port) as connection:
        assert connection.recv(1) == b""
    monkeypatch.setattr(handshake, "GREETING_S", 60.0)
    leader.follow(1)
    assert set(leader.followers()) == {1}


def test_a_second_follower_of_an_index_is_refused(opening):
    leader = opening(3)
    first = leader.follow(1)
    with stranger(leader.port, lambda nonce: hello(1, on=nonce)) as second:
        # It gets the leader's proof at most, but no place.
        while second.recv(100):
            pass
    leader.follow(2)
    assert leader.followers()[1][0].getpeername() == first.getsockname()


def test_missing_followers_are_named():
    with pytest.raises(EngineError, match=r"processes \[1, 2\] of 3 have not connected"):
        Listener("127.0.0.1", SECRET, 3).accept(0.0)


@pytest.mark.parametrize(
    "answer", [b"", b"x" * 200, handshake.MAGIC + b"n" * 32 + b"p" * 32], ids=["none", "bad", "lie"]
)
def test_a_follower_trusts_only_its_leader(answer):
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = server.accept()
        with connection, suppress(OSError):
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):
                pass

    threading.Thread(target=serve, daemon=True).start()
    connecting = socket.create_connection(server.getsockname(), 60)
    with server, connecting as connection, pytest.raises((EngineError, OSError)):
        handshake._greet(connection, SECRET, 1, 0)


def test_a_follower_without_a_leader_says_where_it_looked():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EngineError, match=rf"process 3 cannot reach the leader \(127.0.0.1:{port}: "):
        connect([("127.0.0.1", port)], SECRET, 3, 0, 0.01)


def test_a_host_that_does_not_answer_is_noticed_on_both_ends(opening):
    leader = opening()
    near = leader.follow(1)
    for connection in (near, leader.followers()[1][0]):

        def option(name, level=socket.IPPROTO_TCP, connection=connection):
            return connection.getsockopt(level, getattr(socket, name))

        assert option("SO_KEEPALIVE", socket.SOL_SOCKET)
        first = option("TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE")
        assert 0 < first + option("TCP_KEEPCNT") * option("TCP_KEEPINTVL") <= 30
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert 0 < option("TCP_USER_TIMEOUT") <= 30_000


COORDINATORS = {
    "127.0.0.1:80": ("127.0.0.1", ["127.0.0.1"]),
    "[::1]:80": ("::1", ["::1"]),
    "10.0.0.1:80": ("", ["10.0.0.1", "192.0.2.7", "me"]),
    "": ("", ["192.0.2.7", "me"]),
}


@pytest.mark.parametrize(("coordinator", "expected"), COORDINATORS.items())
def test_only_a_given_address_makes_a_leader_listen_on_this_host_alone(coordinator, expected, monkeypatch):
    """Without a route, a host whose own name is at 127.0.1.1 has no other address."""

    def resolved(*_, **__):
        return [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("127.0.1.1", "192.0.2.7", "::1")]

    def no_socket(*_):
        raise OSError("no route")

    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", coordinator)
    monkeypatch.setattr(handshake.socket, "gethostname", lambda: "me")
    monkeypatch.setattr(handshake.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(handshake.socket, "socket", no_socket)
    assert handshake.own_addresses() == expected


@pytest.mark.parametrize(("given", "first"), [("10.0.0.1:80", "10.0.0.1"), ("[::1]:80", "::1"), ("host.x:1", "host.x")])
def test_followers_try_the_coordinators_host_first(monkeypatch, given, first):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", given)
    assert handshake.own_addresses()[1][0] == first


def test_addresses_are_there_without_a_coordinator(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    _, hosts = handshake.own_addresses()
    assert hosts
    assert len(set(hosts)) == len(hosts)
