"""The server's end of workers: the nursery that forks them, and each worker, which can be killed at any moment."""

import asyncio
import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dflash_jax.errors import InputError
from dflash_jax.server.worker_loop import framed, unframed

# Seconds that a nursery has to get ready.
START_S = 120.0


class Nursery:
    """A process that forks others: the module ``module``, which says something once it has read ``first``.

    ``failure``: the message for clients where it does not.
    """

    def __init__(self, module: str, first: dict, failure: str):
        self._module, self._first, self._failure = module, first, failure
        self._socket: socket.socket | None = None
        # One start at a time, which may take long; the other lock is never held for long.
        self._starting, self._lock, self._has_stopped = threading.Lock(), threading.Lock(), False
        self._starter = ThreadPoolExecutor(1, f"{module.rpartition('.')[2]}-start")

    def start(self) -> None:
        """Starts the process, where it does not run. Raises InputError where it does not get ready."""
        with self._starting:
            if self._socket is not None:
                return
            ours, other = socket.socketpair()
            command = [sys.executable, "-m", self._module, str(other.fileno())]
            environment = os.environ | {
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with other:
                process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment, **quiet)
            threading.Thread(target=process.wait, name="nursery", daemon=True).start()
            ours.settimeout(START_S)
            try:
                ours.sendall(framed(json.dumps(self._first).encode()))
                if not ours.recv(2**10):
                    raise OSError
            except OSError:
                ours.close()
                process.kill()
                raise InputError(self._failure) from None
            ours.settimeout(None)
            with self._lock:
                if not self._has_stopped:
                    self._socket = ours
                    return
            ours.close()
            raise InputError("the server has been stopped")

    def lose(self, connection: socket.socket | None) -> None:
        """Ends the process that ``connection`` belongs to, unless another one has been started since: its socket is
        all that it waits for."""
        with self._lock:
            if connection is None or connection is not self._socket:
                return
            self._socket = None
        connection.close()

    def stop(self) -> None:
        """Ends the process, for good."""
        with self._lock:
            self._has_stopped, connection = True, self._socket
        self.lose(connection)
        self._starter.shutdown(wait=False)

    async def forked(self) -> "WorkerProcess":
        """A new worker; starts the nursery where it does not run. Raises InputError or OSError where that fails."""
        for _ in range(2):
            if self._has_stopped:
                raise InputError("the server has been stopped")
            if self._socket is None:
                await asyncio.get_running_loop().run_in_executor(self._starter, self.start)
            connection = self._socket
            with contextlib.suppress(OSError, AttributeError):
                process = WorkerProcess(connection)
                process.socket.setblocking(False)
                return process
            self.lose(connection)
        raise OSError("the nursery has ended")


class WorkerProcess:
    """A process that ``parent``, a socket to another one, was asked for.

    Attributes:
        parent: The socket to the process that forks it.
        pid: Its process id, once it has said it.
        reason: Why the server ended it.
        is_abandoned: Whether it is to be ended as soon as that is possible.
        began: When it was asked for, on the monotonic clock.
    """

    def __init__(self, parent: socket.socket):
        """Has ``parent`` fork. Raises OSError where that is gone."""
        self.socket, other = socket.socketpair()
        descriptors = struct.pack("i", other.fileno())
        with other:
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            try:
                parent.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)], flags)
            except OSError:
                self.socket.close()
                raise
        self.parent = parent
        self.pid: int | None = None
        self.reason: str | None = None
        self.is_abandoned = False
        self.began = time.monotonic()
        self._data, self._lock = bytearray(), threading.Lock()

    def send(self, value: dict) -> None:
        self.socket.sendall(framed(json.dumps(value).encode()))

    def poll(self) -> bytes | None:
        """The next frame, if it is here. Raises EOFError when the process has ended."""
        with self._lock:
            while (payload := unframed(self._data)) is None:
                try:
                    part = self.socket.recv(2**20, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except OSError:
                    part = b""
                if not part:
                    raise EOFError
                self._data += part
            del self._data[: len(framed(b"")) + len(payload)]
            if self.pid is not None:
                return payload
            # It begins by saying who it is.
            self.pid = int(payload)
        return self.poll()

    def has_ended(self) -> bool:
        """Whether it has; frames that are here now are lost."""
        try:
            while self.poll() is not None:
                pass
        except EOFError:
            return True
        return False

    def kill(self, reason: str | None = None) -> bool:
        """Ends it, and says whether that was possible: not before the process has said who it is."""
        self.reason = self.reason or reason
        if not self.has_ended():
            if self.pid is None:
                return False
            # Its socket is open, so no other process has its id.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return True

    def faulted_and_resident(self) -> tuple[int, int]:
        """Bytes of the pages that it has taken or first written to since its fork, and bytes that it has in memory,
        shared ones too."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                # Behind the name, which may have blanks.
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0, 0
        return int(fields[7]) * resource.getpagesize(), int(fields[21]) * resource.getpagesize()

    def memory(self) -> int:
        """Bytes that it shares with no other process."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup") as file:
                lines = [line.split() for line in file if line.startswith("Private_")]
        except OSError:
            return 0
        return sum(int(line[1]) for line in lines) * 1024

    async def next(self) -> bytes:
        """The next frame. Raises EOFError when the process has ended."""
        loop = asyncio.get_running_loop()
        while (payload := self.poll()) is None:
            await _readable(loop, self.socket)
        return payload

    def wait(self, timeout_s: float) -> bytes | None:
        """The next frame, if it is here within ``timeout_s``. Raises EOFError when the process has ended."""
        payload = self.poll()
        if payload is None and timeout_s > 0:
            waiting = select.poll()
            waiting.register(self.socket, select.POLLIN)
            waiting.poll(1e3 * timeout_s)
            payload = self.poll()
        return payload


async def _readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_reader(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection)
