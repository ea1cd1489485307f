"""The processes that run one model: one leads, the others follow, and all end when one is lost.

They connect by `handshake`. From then on frames go over each connection: their length, their kind, and bytes of that
length. A process whose connection breaks ends with one line on stderr and exit code 1, since a device that waits for a
lost one never returns. A process that dies closes its connections at once.
"""

import atexit
import json
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from dflash_jax.errors import EngineError
from dflash_jax.parallel import distributed
from dflash_jax.parallel.handshake import NONCE, SILENCE_S, Listener, connect, own_addresses
from dflash_jax.process import end_process

# Seconds in which a process that fails, or that another one leaves, may learn the cause or end by itself.
GRACE_S = 2.0
# Bytes of a frame: calls have images; followers answer by a line at most.
MAX_CALL, MAX_ANSWER = 2**30, 2**12

_HEADER = struct.Struct("!IB")

CALL, END, LEAVE, FAIL = range(4)


class _Link:
    """A connection to another process of the group.

    Args:
        connection: The connection.
        name: The other process, for messages.
        most: Bytes of a frame that it may send.
        receive: Called on the link's thread with each frame: its kind and its bytes.
        lose: Called on the link's thread with the reason why the connection is over.

    Attributes:
        name: The other process.
        has_left: Whether the other process has left in order.
        thread: Receives the frames, and closes the connection when it is over.
    """

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        most: int,
        receive: Callable[["_Link", int, bytes], None],
        lose: Callable[["_Link", str], None],
    ):
        self.name, self.has_left = name, False
        self._socket, self._most, self._receive, self._lose = connection, most, receive, lose
        self._sending = threading.Lock()
        # Why this process has broken the connection.
        self._broken = ""
        connection.setblocking(True)
        # Reading waits for any time, sending does not.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SILENCE_S, 0))
        self.thread = threading.Thread(target=self._run, name=f"link to {name}", daemon=True)
        self.thread.start()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Sends a frame. What cannot be sent is noticed by the thread that reads."""
        with suppress(OSError), self._sending:
            try:
                self._socket.sendall(_HEADER.pack(len(payload), kind) + payload)
            except BaseException as e:
                # A part of it may be sent: nothing can follow.
                if isinstance(e, BlockingIOError):
                    self._broken = f"it took nothing for {SILENCE_S} s"
                elif not isinstance(e, OSError):
                    self._broken = f"{type(e).__name__} while a message was sent to it"
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise

    def close(self) -> None:
        """Tells the other end that this process leaves in order, and closes the connection."""
        self.send(LEAVE)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _run(self) -> None:
        with self._socket, self._socket.makefile("rb") as reader:
            reason = self._read(reader)
            self._lose(self, self._broken or reason)

    def _read(self, reader: BinaryIO) -> str:
        """Receives frames until the connection is over: the reason."""
        try:
            while header := reader.read(_HEADER.size):
                if len(header) < _HEADER.size:
                    break
                size, kind = _HEADER.unpack(header)
                if size > self._most:
                    return f"it sent a frame of {size} bytes"
                payload = reader.read(size)
                if len(payload) < size:
                    break
                if kind == LEAVE:
                    self.has_left = True
                self._receive(self, kind, payload)
        except TimeoutError:
            return f"its host was silent for {SILENCE_S} s"
        except OSError as e:
            return e.strerror or str(e)
        return "its connection was closed"


class Group:
    """The processes that run one model, seen from one of them.

    A process that leaves in order, because it ends, is missed until this one is `loaded`, and during a `turn`.

    Args:
        index: This process's index; 0 leads.
        count: Processes of the group.
        connections: By index: of the leader, one to each follower; of a follower, one to the leader.
        end: Ends the process, with a line that says why. Does not return.

    Attributes:
        index: This process's index.
        count: Processes of the group.
        free_memory: Of the host that has least, the bytes that were free; the leader's.
    """

    def __init__(
        self,
        index: int,
        count: int,
        connections: dict[int, socket.socket],
        free_memory: int = 0,
        end: Callable[[str], NoReturn] = end_process,
    ):
        self.index, self.count, self.free_memory, self._end = index, count, free_memory, end
        self._calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Turns that this process has entered, and that are over: of a follower, by the leader's word.
        self._entered, self._over = 0, 0
        self._is_loaded = False
        self._is_closed, self._is_ending, self._ending = threading.Event(), threading.Event(), threading.Lock()
        most = MAX_CALL if index else MAX_ANSWER
        self._links = [
            _Link(connection, self._name(i), most, self._receive, self._lose)
            for i, connection in sorted(connections.items())
        ]
        atexit.register(self.close)

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.index == 0

    def _name(self, index: int) -> str:
        return f"process {index} of {self.count}" if index else f"the leader (process 0 of {self.count})"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The time in which the leader sends calls, and the followers get them.

        Meanwhile the processes depend on each other: one that leaves counts as lost. The leader's turn ends with the
        block, a follower's when it gets the leader's end, which may be before it enters the block.

        Raises:
            EngineError: The leader is in a turn already.
        """
        if self.leads and self._entered > self._over:
            raise EngineError("a turn inside another one: the other processes can follow one leader at a time")
        self._entered += 1
        for link in self._links:
            if link.has_left and self._needs_others:
                self._end_by(f"{link.name} has ended: so does this process")
        try:
            yield
        finally:
            if self.leads:
                self._over += 1
                for link in self._links:
                    link.send(END)

    @property
    def _needs_others(self) -> bool:
        """Whether this process cannot go on without the others: while it loads the model, and in a turn."""
        return self._over < (self._entered if self._is_loaded else max(self._entered, 1))

    def agree(self, about: Mapping[str, str]) -> None:
        """Compares what must be the same in all processes. Where it differs, all end, and say in what.

        Args:
            about: Names of things, and what this process has.
        """
        if self.leads:
            self.send(json.dumps(dict(about)).encode())
            return
        call = self.next()
        assert call is not None, "the leader's turn is over before it began"
        leaders = json.loads(call)
        differing = [
            f"its {name} is {about.get(name, 'not set')}, the leader's is {leaders.get(name, 'not set')}"
            for name in {**leaders, **about}
            if about.get(name) != leaders.get(name)
        ]
        if differing:
            self.fail(f"{'; '.join(differing)} (all processes need the same command and versions)")

    def loaded(self) -> None:
        """Tells that this process has loaded the model, which it does together with the others."""
        self._is_loaded = True

    def send(self, payload: bytes) -> None:
        """Sends a call to every follower."""
        for link in self._links:
            link.send(CALL, payload)

    def next(self) -> bytes | None:
        """Waits for the leader's next call; None after the last one of its turn."""
        return self._calls.get()

    def fail(self, reason: str) -> NoReturn:
        """Ends every process of the group, since this one cannot go on.

        A device fails because another process is lost, too. So its connection has `GRACE_S` to tell that cause first.
        """
        reason = " ".join(reason.split())[: MAX_ANSWER // 8]
        try:
            self._is_ending.wait(GRACE_S)
            for link in self._links:
                link.send(FAIL, reason.encode())
        finally:
            self._end_by(f"{self._name(self.index)} failed: {reason}")

    def _end_by(self, line: str) -> NoReturn:
        """Ends this process with the line of the first thread that gets here: it never leaves the lock."""
        self._is_ending.set()
        with self._ending:
            self._end(line)

    def close(self) -> None:
        """Leaves the group in order."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            atexit.unregister(self.close)
            for link in self._links:
                link.close()

    def _receive(self, link: _Link, kind: int, payload: bytes) -> None:
        if kind == CALL and self.index:
            self._calls.put(payload)
        elif kind == END and self.index:
            # Now, since the leader may leave before the last calls are made.
            self._over += 1
            self._calls.put(None)
        elif kind == FAIL:
            self._end_by(f"{link.name} failed: {payload.decode(errors='replace')}: so does this process")
        elif kind == LEAVE and self._needs_others and not self._is_closed.wait(GRACE_S):
            # Not where the same error ends this process, whose own line says more.
            self._end_by(f"{link.name} has ended: so does this process")

    def _lose(self, link: _Link, reason: str) -> None:
        if not (self._is_closed.is_set() or (link.has_left and not self._needs_others)):
            self._end_by(f"{link.name} is lost ({reason}): this process ends, too")


def _join(index: int, count: int, free: int) -> Group:
    """Connects this process to the others."""
    if index:
        word = json.loads(distributed.broadcast(b""))
        addresses = [(host, word["port"]) for host in word["hosts"]]
        connection = connect(addresses, bytes.fromhex(word["secret"]), index, free)
        return Group(index, count, {0: connection})
    secret, (host, hosts) = secrets.token_bytes(NONCE), own_addresses()
    listener = Listener(host, secret, count)
    word = {"port": listener.port, "hosts": hosts, "secret": secret.hex()}
    # JAX's own connections, over which the secret goes, are trusted with the model's numbers, too.
    distributed.broadcast(json.dumps(word).encode())
    followers = listener.accept()
    least = min([free, *(free for _, free in followers.values())])
    return Group(index, count, {i: connection for i, (connection, _) in followers.items()}, least)


_joined: list[Group] = []


def joined(free_memory: int, about: Mapping[str, str] = MappingProxyType({})) -> Group | None:
    """The group of this process, connected at the first call; None where it is the only process.

    Every process must call it before it waits for another one.

    Args:
        free_memory: Bytes of this host's memory that are free.
        about: As of `Group.agree`, beside versions and compilers' flags.

    Raises:
        InputError: This process is not started with the others of its TPU slice.
        EngineError: The processes do not reach each other.
    """
    import jax

    distributed.check_whole()
    if jax.process_count() == 1:
        return None
    if not _joined:
        group = _join(jax.process_index(), jax.process_count(), free_memory)
        group.agree({**distributed.build(), **about})
        _joined.append(group)
    return _joined[0]
