"""How the processes of one model connect: the leader listens until every follower is there, and then no more.

Each end proves that it knows a secret, which only the processes of one `distributed.start` have. Strangers may connect
meanwhile, and change nothing. A host that dies closes no connection: each system probes the other one, and breaks a
connection without answers for `SILENCE_S` seconds. Python's threads take no part in that, so a process is not lost
because a call keeps the interpreter busy.
"""

import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256

from dflash_jax.errors import EngineError

# Seconds until a host that does not answer counts as lost.
SILENCE_S = 20
# Seconds in which all followers must connect: after `distributed.start`, they need none.
CONNECT_S = 120.0
# A stranger's connection is closed after `GREETING_S` seconds, or when `GREETINGS` others are open.
GREETING_S, GREETINGS = 5.0, 64

# Begins what each end says first. The last byte is the version.
MAGIC = b"dflash\x00\x01"
NONCE, PROOF = 32, sha256().digest_size
_HELLO = struct.Struct(f"!{len(MAGIC)}sIQ{NONCE}s")


def proof_of(secret: bytes, *parts: bytes) -> bytes:
    """Shows who knows the parts and the secret that they know the secret."""
    return hmac.digest(secret, b"".join(parts), "sha256")


def tune(connection: socket.socket) -> None:
    """Sends small frames at once, and has the system probe the other host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # A quarter of the time until the first probe, and then three probes. macOS has another name for the first, and
    # not the last, which bounds the time without an answer to what was sent.
    options = {"TCP_KEEPIDLE": SILENCE_S // 4, "TCP_KEEPALIVE": SILENCE_S // 4, "TCP_KEEPINTVL": SILENCE_S // 4}
    options |= {"TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": SILENCE_S * 1000}
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False)
class _Greeting:
    """A connection whose other end has not shown that it is a follower.

    Attributes:
        socket: The connection.
        until: When it is closed.
        nonce: What the other end proves its knowledge on.
        data: What it has sent.
    """

    socket: socket.socket
    until: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    data: bytes = b""


class Listener:
    """Accepts the followers of a leader. Strangers may connect meanwhile, and change nothing.

    Args:
        host: The address to listen on; "" for all.
        secret: What followers know.
        count: Processes of the group.

    Attributes:
        port: The port.
    """

    def __init__(self, host: str, secret: bytes, count: int):
        self._secret, self._count = secret, count
        family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128, dualstack_ipv6=not host)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def accept(self, seconds: float = CONNECT_S) -> dict[int, tuple[socket.socket, int]]:
        """Waits for all followers, and stops listening.

        Returns:
            By the follower's index: its connection, and the bytes of its host's memory that are free.

        Raises:
            EngineError: Some have not connected within ``seconds``.
        """
        followers: dict[int, tuple[socket.socket, int]] = {}
        greetings: dict[socket.socket, _Greeting] = {}
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector, self._socket:
            selector.register(self._socket, selectors.EVENT_READ)

            def close(greeting: _Greeting) -> None:
                del greetings[greeting.socket]
                selector.unregister(greeting.socket)
                greeting.socket.close()

            while len(followers) < self._count - 1:
                if (now := time.monotonic()) >= deadline:
                    missing = sorted(set(range(1, self._count)) - set(followers))
                    raise EngineError(f"processes {missing} of {self._count} have not connected in {seconds:g} s")
                for greeting in [g for g in greetings.values() if g.until <= now]:
                    close(greeting)
                for key, _ in selector.select(min(0.5, deadline - now)):
                    if key.fileobj is self._socket:
                        if len(greetings) == GREETINGS:
                            # A follower has its turn within a round trip: the oldest is a stranger's.
                            close(next(iter(greetings.values())))
                        self._open(greetings, selector)
                        continue
                    greeting = greetings.get(key.fileobj)  # type: ignore[arg-type]
                    if greeting is None:
                        # Closed a moment ago.
                        continue
                    hello = self._read(greeting)
                    if hello is None:
                        close(greeting)
                    elif hello:
                        index, free = self._checked(greeting, hello) or (0, 0)
                        if not index or index in followers:
                            close(greeting)
                            continue
                        del greetings[greeting.socket]
                        selector.unregister(greeting.socket)
                        tune(greeting.socket)
                        followers[index] = greeting.socket, free
            for greeting in [*greetings.values()]:
                close(greeting)
        return followers

    def _open(self, greetings: dict, selector: selectors.BaseSelector) -> None:
        """Accepts a connection, and sends what its other end is to prove its knowledge on."""
        with suppress(OSError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            greeting = _Greeting(connection, time.monotonic() + GREETING_S)
            with suppress(OSError):
                # A new connection has room for it.
                connection.send(MAGIC + greeting.nonce)
            greetings[connection] = greeting
            selector.register(connection, selectors.EVENT_READ)

    def _read(self, greeting: _Greeting) -> bytes | None:
        """What a connection has sent once it is all there, else b""; None where it is over."""
        size = _HELLO.size + PROOF
        try:
            data = greeting.socket.recv(size - len(greeting.data))
        except BlockingIOError:
            return b""
        except OSError:
            return None
        if not data:
            return None
        greeting.data += data
        return greeting.data if len(greeting.data) == size else b""

    def _checked(self, greeting: _Greeting, data: bytes) -> tuple[int, int] | None:
        """A follower's index and its free memory; None for a stranger."""
        hello, proof = data[: _HELLO.size], data[_HELLO.size :]
        magic, index, free, nonce = _HELLO.unpack(hello)
        expected = proof_of(self._secret, b"follower", greeting.nonce, hello)
        if magic != MAGIC or not hmac.compare_digest(proof, expected) or not 1 <= index < self._count:
            return None
        try:
            greeting.socket.send(proof_of(self._secret, b"leader", nonce, hello))
        except OSError:
            return None
        return index, free


def connect(
    addresses: Sequence[tuple[str, int]], secret: bytes, index: int, free: int, seconds: float = CONNECT_S
) -> socket.socket:
    """Connects a follower to its leader.

    Args:
        addresses: Where the leader may listen, the likeliest first.
        secret: What both know.
        index: The follower's index, 1 or more.
        free: Bytes of this host's memory that are free.
        seconds: How long it is tried.

    Raises:
        EngineError: No leader is there within ``seconds``.
    """
    deadline, reason = time.monotonic() + seconds, "no address"
    while time.monotonic() < deadline:
        for address in addresses:
            try:
                connection = socket.create_connection(address, GREETING_S)
            except OSError as e:
                reason = f"{address[0]}:{address[1]}: {e.strerror or e}"
                continue
            try:
                _greet(connection, secret, index, free)
                tune(connection)
                return connection
            except (OSError, EngineError) as e:
                connection.close()
                reason = f"{address[0]}:{address[1]}: {e}"
        time.sleep(0.2)
    raise EngineError(f"process {index} cannot reach the leader ({reason})")


def _greet(connection: socket.socket, secret: bytes, index: int, free: int) -> None:
    """Proves to the other end that this is a follower, and has it prove that it is the leader."""
    first = _exactly(connection, len(MAGIC) + NONCE)
    nonce = secrets.token_bytes(NONCE)
    hello = _HELLO.pack(MAGIC, index, free, nonce)
    if first[: len(MAGIC)] != MAGIC:
        raise EngineError("the process there does not lead a group of this version")
    connection.sendall(hello + proof_of(secret, b"follower", first[len(MAGIC) :], hello))
    if not hmac.compare_digest(_exactly(connection, PROOF), proof_of(secret, b"leader", nonce, hello)):
        raise EngineError("the process there does not know the secret of this group")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EngineError("the connection was closed")
        data += part
    return data


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def own_addresses() -> tuple[str, list[str]]:
    """Where a leader on this host listens.

    Returns:
        The address, "" for all, and the names and addresses by which followers reach it, the likeliest first.
    """
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[0].strip("[]")
    if _is_loopback(coordinator):
        return coordinator, [coordinator]
    guesses: list[str] = []
    name = socket.gethostname()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system only chooses the interface.
        probe.connect(("192.0.2.1", 9))
        guesses.append(probe.getsockname()[0])
    with suppress(OSError):
        guesses += [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    # Many systems have the host's own name at 127.0.1.1: to the other hosts, that is themselves.
    guesses = [host for host in guesses if not _is_loopback(host)]
    hosts = [coordinator, *guesses, name] if coordinator else [*guesses, name]
    return "", list(dict.fromkeys(hosts))[:8]
