"""The processes of one model as threads of this one: who is let in, what goes over the connections, who is missed."""

import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from dflash_jax.errors import EngineError
from dflash_jax.parallel import group
from dflash_jax.parallel.group import Group, Listener, connect

SECRET = b"s" * 32


class Ended(BaseException):
    """In place of the end of the process, on the main thread."""


class Ends:
    """Lines of the ends of a process."""

    def __init__(self):
        self.lines, self._ended = [], threading.Event()

    def __call__(self, line):
        self.lines.append(line)
        self._ended.set()
        if threading.current_thread() is threading.main_thread():
            raise Ended

    def wait(self) -> str:
        assert self._ended.wait(60), "the process did not end"
        return self.lines[0]


@contextmanager
def pair(count=2):
    """(groups, ends) of connected processes, the leader first."""
    ends = [Ends() for _ in range(count)]
    pairs = {i: socket.socketpair() for i in range(1, count)}
    leader = Group(0, count, {i: near for i, (near, _) in pairs.items()}, end=ends[0])
    followers = [Group(i, count, {0: far}, end=ends[i]) for i, (_, far) in pairs.items()]
    yield [leader, *followers], ends
    for one in (leader, *followers):
        one.close()
        for link in one._links:
            link.thread.join(60)


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    """A loss that a test arranges is known before the failure."""
    monkeypatch.setattr(group, "GRACE_S", 0.0)


class Opening:
    """A leader that accepts followers on a thread.

    Attributes:
        port: Its port.
        opened: Connections that are closed at the end.
    """

    def __init__(self, count: int, opened: list):
        listener = Listener("127.0.0.1", SECRET, count)
        self.port, self.opened, self._followers = listener.port, opened, None

        def run():
            self._followers = listener.accept()
            opened.extend(connection for connection, _ in self._followers.values())

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def follow(self, index: int, free: int = 7) -> socket.socket:
        self.opened.append(connect([("127.0.0.1", self.port)], SECRET, index, free))
        return self.opened[-1]

    def followers(self) -> dict:
        self._thread.join(60)
        return self._followers


@pytest.fixture
def opening():
    """Opens leaders, and closes what was opened."""
    opened = []
    yield lambda count=2: Opening(count, opened)
    for connection in opened:
        connection.close()


def test_followers_are_let_in_and_calls_arrive_in_order(opening):
    leader = opening(3)
    connections = {i: leader.follow(i, 100 + i) for i in (2, 1)}
    followers = leader.followers()
    assert {i: free for i, (_, free) in followers.items()} == {1: 101, 2: 102}
    with suppress(OSError), socket.create_connection(("127.0.0.1", leader.port), 5) as late:
        # The port is closed.
        assert late.recv(1) == b""
    first = Group(0, 3, {i: connection for i, (connection, _) in followers.items()}, end=Ends())
    others = [Group(i, 3, {0: connection}, end=Ends()) for i, connection in connections.items()]
    calls = [os.urandom(n) for n in (0, 1, 10, 100_000)] * 5
    for call in calls:
        first.send(call)
    for other in others:
        assert [other.next() for _ in calls] == calls
    for one in (*others, first):
        one.close()


def hello(index, secret=SECRET, magic=group.MAGIC, nonce=b"n" * 32, on=b""):
    data = group._HELLO.pack(magic, index, 5, nonce)
    return data + group._proof(secret, b"follower", on, data)


def stranger(port: int, say=lambda nonce: b"") -> socket.socket:
    """A connection that has read the leader's first words and answered."""
    connection = socket.create_connection(("127.0.0.1", port), 60)
    nonce = group._exactly(connection, len(group.MAGIC) + group.NONCE)[len(group.MAGIC) :]
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
    "its own proof": lambda nonce: group._HELLO.pack(group.MAGIC, 1, 5, nonce) + nonce,
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
    monkeypatch.setattr(group, "GREETING_S", 600.0)
    leader = opening()
    strangers = [socket.create_connection(("127.0.0.1", leader.port), 60) for _ in range(3 * group.GREETINGS)]
    leader.opened.extend(strangers)
    # The oldest is closed for the newest.
    while strangers[0].recv(100):
        pass
    leader.follow(1)
    assert set(leader.followers()) == {1}


def test_a_stranger_is_closed_behind_its_time(monkeypatch, opening):
    monkeypatch.setattr(group, "GREETING_S", 0.0)
    leader = opening()
    with stranger(leader.port) as connection:
        assert connection.recv(1) == b""
    monkeypatch.setattr(group, "GREETING_S", 60.0)
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


@pytest.mark.parametrize("answer", [b"", b"x" * 200, group.MAGIC + b"n" * 32 + b"p" * 32], ids=["none", "bad", "lie"])
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
        group._greet(connection, SECRET, 1, 0)


def test_a_follower_without_a_leader_says_where_it_looked():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(EngineError, match=rf"process 3 cannot reach the leader \(127.0.0.1:{port}: "):
        connect([("127.0.0.1", port)], SECRET, 3, 0, 0.01)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])
def test_a_lost_connection_ends_the_other_side(who):
    with pair() as (groups, ends):
        groups[who]._links[0]._socket.shutdown(socket.SHUT_RDWR)
        line = ends[1 - who].wait()
    name = "process 1 of 2" if who else "the leader (process 0 of 2)"
    assert line == f"{name} is lost (its connection was closed): this process ends, too"


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


def test_a_follower_waits_for_any_time_until_the_leader_has_all(opening):
    leader = opening(3)
    ends, first = Ends(), leader.follow(1)
    early = Group(1, 3, {0: first}, end=ends)
    # Reading has no limit.
    assert first.gettimeout() is None
    assert not any(first.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
    leader.follow(2)
    leading = Group(0, 3, {i: connection for i, (connection, _) in leader.followers().items()}, end=Ends())
    leading.send(b"call")
    assert early.next() == b"call"
    assert ends.lines == []
    for one in (early, leading):
        one.close()


def test_who_takes_nothing_is_lost():
    near, far = socket.socketpair()
    ends = Ends()
    one = Group(0, 2, {1: near}, end=ends)
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == struct.pack("ll", group.SILENCE_S, 0)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000))
    one.send(bytes(10_000_000))
    assert ends.wait() == f"process 1 of 2 is lost (it took nothing for {group.SILENCE_S} s): this process ends, too"
    one.close()
    far.close()


def test_an_interrupted_send_ends_the_connection():
    """Else the rest of the turn would begin in the middle of a frame."""

    class Interrupted:
        def __init__(self, connection):
            self._connection = connection

        def __getattr__(self, name):
            return getattr(self._connection, name)

        def sendall(self, data):
            self._connection.sendall(data[:3])
            raise KeyboardInterrupt

    with pair() as (groups, ends):
        link = groups[0]._links[0]
        link._socket = Interrupted(link._socket)
        with pytest.raises(KeyboardInterrupt):
            groups[0].send(b"call")
        lost = "is lost ({}): this process ends, too"
        assert ends[0].wait() == "process 1 of 2 " + lost.format("KeyboardInterrupt while a message was sent to it")
        assert ends[1].wait() == "the leader (process 0 of 2) " + lost.format("its connection was closed")


def test_a_failure_ends_everyone_with_its_reason():
    with pair(3) as (groups, ends):
        with pytest.raises(Ended):
            groups[2].fail("out of\nmemory" + "x" * 10_000)
        assert ends[2].wait().startswith("process 2 of 3 failed: out of memoryx")
        line = ends[0].wait()
        assert line.startswith("process 2 of 3 failed: out of memoryx")
        assert len(line) < 1000
    with pair(3) as (groups, ends):
        with pytest.raises(Ended):
            groups[0].fail("broken")
        assert ends[1].wait() == ends[2].wait() == "the leader (process 0 of 3) failed: broken: so does this process"


def test_a_lost_process_is_named_before_the_failure_that_it_causes(monkeypatch):
    monkeypatch.setattr(group, "GRACE_S", 600.0)
    with pair() as (groups, ends):
        # The device's error first, as the loss is noticed by another thread.
        failing = threading.Thread(target=groups[0].fail, args=("Gloo: connection closed by peer",))
        failing.start()
        groups[1]._links[0]._socket.shutdown(socket.SHUT_RDWR)
        failing.join(60)
        assert ends[0].lines[0] == "process 1 of 2 is lost (its connection was closed): this process ends, too"


def test_only_the_first_reason_ends_the_process():
    near, far = socket.socketpair()
    lines, is_ending, goes_on = [], threading.Event(), threading.Event()

    def end(line):
        lines.append(line)
        is_ending.set()
        assert goes_on.wait(60)

    one = Group(0, 2, {1: near}, end=end)
    far.close()
    assert is_ending.wait(60)
    second = threading.Thread(target=one.fail, args=("second",))
    second.start()
    # It waits for the first, which ends the process.
    assert one._ending.locked()
    assert len(lines) == 1
    goes_on.set()
    second.join(60)
    assert "is lost" in lines[0]
    one.close()


def test_a_full_pipe_does_not_keep_a_process():
    """Nothing reads its stderr."""
    code = (
        "import os, fcntl; from dflash_jax.parallel import group; group.GRACE_S = 0.1\n"
        "fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096); os.write(2, bytes(4096)); group.end_process('x')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(600) == 1


def left(link) -> None:
    """Waits until the other end has left."""
    while not link.has_left:
        time.sleep(0.001)


def test_who_leaves_in_order_is_missed_only_where_it_is_needed():
    with pair() as (groups, ends):
        with groups[0].turn():
            pass
        groups[1].close()
        left(groups[0]._links[0])
        assert ends[0].lines == []
        with pytest.raises(Ended), groups[0].turn():
            pass
        assert ends[0].wait() == "process 1 of 2 has ended: so does this process"
    with pair() as (groups, ends), groups[1].turn():
        groups[0].close()
        assert ends[1].wait() == "the leader (process 0 of 2) has ended: so does this process"


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])
def test_who_leaves_while_another_one_loads_is_missed(who):
    """A host without the checkpoint: the others would wait for its devices."""
    with pair() as (groups, ends):
        groups[1 - who].loaded()
        groups[who].close()
        left(groups[1 - who]._links[0])
        groups[1 - who]._links[0].thread.join(60)
        assert ends[1 - who].lines == []
    with pair() as (groups, ends):
        groups[who].close()
        assert ends[1 - who].wait().endswith(" has ended: so does this process")


def test_who_ends_by_itself_does_not_end_because_another_one_does(monkeypatch):
    """The same error on all hosts: each tells it."""
    monkeypatch.setattr(group, "GRACE_S", 600.0)
    with pair() as (groups, ends):
        for one in groups:
            one.close()
        for one in groups:
            one._links[0].thread.join(60)
        assert ends[0].lines == ends[1].lines == []


def test_a_turn_inside_another_one_is_refused():
    with pair() as (groups, ends):
        with groups[0].turn(), pytest.raises(EngineError, match="a turn inside another one"), groups[0].turn():
            pass
        with groups[0].turn():
            pass
        for _ in range(2):
            with groups[1].turn():
                assert groups[1].next() is None
        assert ends[1].lines == []


def test_a_turn_ends_in_order_though_the_leader_leaves_before_its_last_calls_are_made():
    with pair() as (groups, ends):
        with groups[1].turn():
            with groups[0].turn():
                groups[0].send(b"last")
            groups[0].close()
            groups[1]._links[0].thread.join(60)
            assert [groups[1].next(), groups[1].next()] == [b"last", None]
        assert ends[1].lines == []


def test_a_follower_enters_a_turn_that_the_leader_has_ended_and_left():
    with pair() as (groups, ends):
        with groups[0].turn():
            groups[0].send(b"call")
        groups[0].close()
        groups[1]._links[0].thread.join(60)
        with groups[1].turn():
            assert [groups[1].next(), groups[1].next()] == [b"call", None]
        assert ends[1].lines == []
        with pytest.raises(Ended), groups[1].turn():
            pass


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])
def test_an_oversized_frame_ends_the_reader(who):
    near, far = socket.socketpair()
    ends = Ends()
    one = Group(who, 2, {1 - who: near}, end=ends)
    far.sendall(struct.pack("!IB", 2**31, group.CALL))
    assert "it sent a frame of 2147483648 bytes" in ends.wait()
    one.close()
    far.close()


def test_random_frames_of_a_peer_end_a_process_or_change_nothing():
    for seed in range(30):
        rng, (near, far), ends = random.Random(seed), socket.socketpair(), Ends()
        one = Group(seed % 2, 2, {1 - seed % 2: near}, end=ends)
        with suppress(OSError):
            for _ in range(20):
                # Of any kind but those that end it in order, and now and then of a size that is not allowed.
                kind, size = rng.choice([group.CALL, group.END, *range(4, 256)]), rng.randrange(100)
                far.sendall(struct.pack("!IB", size, kind) + rng.randbytes(size))
            far.sendall(rng.randbytes(rng.randrange(10)))
        far.close()
        assert " is lost (" in ends.wait()
        one.close()


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
    monkeypatch.setattr(group.socket, "gethostname", lambda: "me")
    monkeypatch.setattr(group.socket, "getaddrinfo", resolved)
    monkeypatch.setattr(group.socket, "socket", no_socket)
    assert group._addresses() == expected
