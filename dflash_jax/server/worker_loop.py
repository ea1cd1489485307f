"""What the worker processes have in common: frames over a socket, forks on request, limits of time and memory.

A new process is asked for by a byte that carries the descriptor of its socket. It begins with a frame of its process
id; then frames go in and out.
"""

import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress

# Below everything else that the server does.
NICENESS = 10
_LENGTH = struct.Struct("!I")


def framed(payload: bytes) -> bytes:
    """A payload behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def unframed(data: bytes | bytearray) -> bytes | None:
    """The payload of the frame that ``data`` begins with; None where that is not whole."""
    if len(data) < _LENGTH.size or len(data) - _LENGTH.size < (length := _LENGTH.unpack_from(data)[0]):
        return None
    return bytes(data[_LENGTH.size : _LENGTH.size + length])


class Frames:
    """Frames over a socket; EOFError when the other end is gone."""

    def __init__(self, connection: socket.socket):
        self.socket = connection

    def send(self, payload: bytes) -> None:
        self.socket.sendall(framed(payload))

    def read(self) -> dict:
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


def prepared_nursery(stack_bytes: int | None = None) -> socket.socket:
    """Makes this process, ``python -m MODULE FD``, one that may be lost, and returns its socket.

    ``stack_bytes``: the stack that it and its forks need, where that is more than the system's default.
    """
    if stack_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        stack = stack_bytes if hard == resource.RLIM_INFINITY else min(stack_bytes, hard)
        if resource.getrlimit(resource.RLIMIT_STACK)[0] != stack:
            # The limit of the stack counts from a program's start.
            resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Where the machine's memory runs out, the system ends this before the server.
        file.write("1000")
    # Ctrl-C on a terminal is the server's, which drains. Ended children need no parent that waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[1]))


def fork_for_each(control: socket.socket, work) -> None:
    """Forks a process for each descriptor that arrives, until the other end is gone."""
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
    """``more`` bytes of address space at most, beyond what is in use."""
    with suppress(OSError):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def limit_seconds(seconds: int | None) -> None:
    """So much of the processor's time from now on; None for no limit."""
    hard, times = resource.getrlimit(resource.RLIMIT_CPU)[1], os.times()
    limit = hard if seconds is None else int(times.user + times.system) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
