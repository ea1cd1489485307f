"""The processes of one model as threads of this one: what goes over the connections, who is missed."""

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
from dflash_jax.parallel.group import Group


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


def test_processes_that_differ_end_with_what_differs():
    with pair() as ((leader, follower), ends):
        leader.agree({"mesh": "tensor=4", "jax": "1", "kernels": "auto"})
        with pytest.raises(Ended):
            follower.agree({"mesh": "tensor=2", "jax": "1", "libtpu": "3"})
        said = "its mesh is tensor=2, the leader's is tensor=4; its kernels is not set, the leader's is auto; "
        said += "its libtpu is 3, the leader's is not set (all processes need the same command and versions)"
        assert ends[1].lines == [f"process 1 of 2 failed: {said}"]
        assert ends[0].wait() == f"process 1 of 2 failed: {said}: so does this process"


def test_processes_that_agree_go_on():
    with pair(3) as ((leader, *followers), ends):
        leader.agree({"mesh": "tensor=4"})
        leader.send(b"a call")
        for follower in followers:
            follower.agree({"mesh": "tensor=4"})
            assert follower.next() == b"a call"
        assert not any(each.lines for each in ends)


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "follower"])
def test_a_lost_connection_ends_the_other_side(who):
    with pair() as (groups, ends):
        groups[who]._links[0]._socket.shutdown(socket.SHUT_RDWR)
        line = ends[1 - who].wait()
    name = "process 1 of 2" if who else "the leader (process 0 of 2)"
    assert line == f"{name} is lost (its connection was closed): this process ends, too"


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
        "import os, fcntl; from dflash_jax import process; process.LINE_S = 0.1\n"
        "fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096); os.write(2, bytes(4096)); process.end_process('x')"
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
