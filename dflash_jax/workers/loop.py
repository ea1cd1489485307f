"""Parts that worker processes share: frames over a socket, forks on request, limits of time and memory.

A new process is requested by a byte with the descriptor of its socket. It first sends a frame with its process id, then
frames go in and out.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

# Niceness of workers, so that the server itself has precedence.
NICENESS = 10
_LENGTH = struct.Struct("!I")


def framed(payload: bytes) -> bytes:
    """A payload after its length."""
    return _LENGTH.pack(len(payload)) + payload


def unframed(data: bytes | bytearray) -> bytes | None:
    """The payload of the frame at the beginning of ``data``; None where it is incomplete."""
    if len(data) < _LENGTH.size or len(data) - _LENGTH.size < (length := _LENGTH.unpack_from(data)[0]):
        return None
    return bytes(data[_LENGTH.size : _LENGTH.size + length])


class Frames:
    """Frames over a socket.

    Attributes:
        socket: The socket.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection

    def send(self, payload: bytes) -> None:
        """Sends a frame."""
        self.socket.sendall(framed(payload))

    def read(self) -> dict:
        """Waits for a frame of JSON.

        Raises:
            EOFError: The other end is closed.
        """
        return json.loads(self._exactly(_LENGTH.unpack(self._exactly(_LENGTH.size))[0]))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self.socket.recv(min(size, 2**16))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def run_nursery(prepare: Callable[[dict], Callable[[Frames], None]], stack_bytes: int | None = None) -> None:
    """Runs this process, ``python -m MODULE FD``, as a nursery that may crash without harm.

    Args:
        prepare: Called with the first message: what each fork does with its frames.
        stack_bytes: Stack of the process and its forks; None: the system's default.
    """
    if stack_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        stack = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
        if resource.getrlimit(resource.RLIMIT_STACK)[0] != stack:
            # A new stack limit applies only to a newly started program.
            resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Without free memory, the system ends workers before the server.
        file.write("1000")
    # Ctrl-C on a terminal is for the server, which drains. The system reaps ended children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    frames = Frames(socket.socket(fileno=int(sys.argv[1])))
    work = prepare(frames.read())
    frames.send(str(os.getpid()).encode())
    fork_for_each(frames.socket, work)


def fork_for_each(control: socket.socket, work: Callable[[Frames], None]) -> None:
    """Forks a process for each descriptor that arrives, until the other end is closed.

    Args:
        control: The socket to the parent.
        work: Called with the `Frames` of each new process, in that process.
    """
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        for descriptor in descriptors:
            if not os.fork():
                control.close()
                with suppress(EOFError, OSError):
                    frames = Frames(socket.socket(fileno=descriptor))
                    frames.send(str(os.getpid()).encode())
                    work(frames)
                os._exit(0)
            os.close(descriptor)


def limit_memory(more: int) -> None:
    """Limits the address space to ``more`` bytes beyond what is in use."""
    with suppress(OSError):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_seconds(seconds: int | None) -> None:
    """Limits processor time, of all threads, to ``seconds`` from now on; None: no limit.

    The process ends at the limit. A limit of the clock would refuse honest work on a busy machine.
    """
    hard, times = resource.getrlimit(resource.RLIMIT_CPU)[1], os.times()
    limit = hard if seconds is None else round(times.user + times.system) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
