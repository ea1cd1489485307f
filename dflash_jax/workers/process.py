"""The parent's end of workers: the nursery that forks them, and each worker, which can be killed at any moment."""

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
from pathlib import Path

from dflash_jax.errors import InputError, UnavailableError
from dflash_jax.workers.loop import framed, unframed

# Seconds in which a nursery must be ready.
START_S = 120.0
# Seconds in which a worker must answer on a machine of any load. Its work is limited by processor time
# (`limit_seconds`): this limit is for a worker that waits forever.
STUCK_S = 600.0
STOPPED = "the server has been stopped"


class Nursery:
    """A process that forks others."""

    def __init__(self, module: str, first: dict, failure: str):
        """Describes the process; `start` starts it.

        Args:
            module: Its module.
            first: The message that it reads first. It answers when it is ready.
            failure: The error for clients where it does not start.
        """
        self._module, self._first, self._failure = module, first, failure
        self._socket: socket.socket | None = None
        # The first lock serialises starts, which take long; the second is held only briefly.
        self._starting, self._lock, self._has_stopped = threading.Lock(), threading.Lock(), False
        self._starter = ThreadPoolExecutor(1, f"{module.rpartition('.')[2]}-start")

    def start(self) -> None:
        """Starts the process unless it runs.

        Raises:
            InputError: It does not get ready.
            UnavailableError: It was stopped meanwhile.
        """
        with self._starting:
            if self._socket is not None:
                return
            connection, remote = socket.socketpair()
            command = [sys.executable, "-m", self._module, str(remote.fileno())]
            environment = os.environ | {
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            }
            with remote:
                process = subprocess.Popen(
                    command,
                    pass_fds=[remote.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            threading.Thread(target=process.wait, name="nursery", daemon=True).start()
            connection.settimeout(START_S)
            try:
                connection.sendall(framed(json.dumps(self._first).encode()))
                if not connection.recv(2**10):
                    raise OSError
            except OSError:
                connection.close()
                process.kill()
                raise InputError(self._failure) from None
            connection.settimeout(None)
            with self._lock:
                if not self._has_stopped:
                    self._socket = connection
                    return
            connection.close()
            raise UnavailableError(STOPPED)

    def lose(self, connection: socket.socket | None) -> None:
        """Ends the process with this ``connection``, unless another one was started since.

        The process ends when its socket closes.
        """
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

    def fork(self) -> "WorkerProcess":
        """A new worker of the process, which has started.

        Raises:
            OSError: It has ended.
        """
        if self._socket is None:
            raise OSError("the nursery has ended")
        return WorkerProcess(self._socket)

    async def forked(self) -> "WorkerProcess":
        """A new worker; starts the nursery unless it runs.

        Raises:
            InputError: The nursery does not start.
            UnavailableError: It was stopped.
            OSError: It ended twice.
        """
        for _ in range(2):
            if self._has_stopped:
                raise UnavailableError(STOPPED)
            if self._socket is None:
                await asyncio.get_running_loop().run_in_executor(self._starter, self.start)
            if (connection := self._socket) is None:
                continue
            with contextlib.suppress(OSError):
                process = WorkerProcess(connection)
                process.socket.setblocking(False)
                return process
            self.lose(connection)
        raise OSError("the nursery has ended")


def _stat(of: int | str | None) -> list[str]:
    """The fields of ``/proc/OF/stat`` from the third one, the state; zeros where there is none."""
    try:
        with open(f"/proc/{of}/stat") as file:
            # The fields follow the name, which may have blanks.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 22


def processor_s(pid: int, thread: int | None = None) -> float | None:
    """Seconds of processor time of a process, or of one of its threads; None where the system does not say."""
    if not Path("/proc/self/stat").exists():
        return None
    user, system = _stat(pid if thread is None else f"{pid}/task/{thread}")[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """A process that another one forked.

    Attributes:
        socket: The socket to it.
        parent: The socket to the process that forks it.
        pid: Its process id, once it has sent it.
        reason: Why the server ended it.
        is_abandoned: Whether it is to be ended as soon as its id is known.
        began: When it was requested, on the monotonic clock.
    """

    def __init__(self, parent: socket.socket):
        """Has ``parent`` fork.

        Raises:
            OSError: The parent is gone.
        """
        self.socket, remote = socket.socketpair()
        descriptors = struct.pack("i", remote.fileno())
        with remote:
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
        """Sends a frame of JSON."""
        self.socket.sendall(framed(json.dumps(value).encode()))

    async def ask(self, request: bytes) -> bytes:
        """Sends a frame and waits for the next one.

        Raises:
            EOFError: The process has ended, or was ended because it did not answer for `STUCK_S`.
        """
        try:
            async with asyncio.timeout(STUCK_S):
                await asyncio.get_running_loop().sock_sendall(self.socket, framed(request))
                return await self.next()
        except TimeoutError:
            self.kill(f"it did not answer for {STUCK_S:g} s")
            raise EOFError from None
        except OSError:
            raise EOFError from None

    def poll(self) -> bytes | None:
        """The next frame; None where there is none yet.

        Raises:
            EOFError: The process has ended.
        """
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
            # The first frame is its process id.
            self.pid = int(payload)
        return self.poll()

    def has_ended(self) -> bool:
        """Whether the process has ended; frames that have arrived are discarded."""
        try:
            while self.poll() is not None:
                pass
        except EOFError:
            return True
        return False

    def kill(self, reason: str | None = None) -> bool:
        """Ends the process.

        Returns:
            Whether it has ended; False where its id is not known yet.
        """
        self.reason = self.reason or reason
        if not self.has_ended():
            if self.pid is None:
                return False
            # The open socket shows that no other process has this id.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return True

    def end(self) -> None:
        """Ends the process. One without a known id ends when it reads from its closed socket, or at a limit of time."""
        self.kill()
        self.socket.close()

    def faulted_and_resident(self) -> tuple[int, int]:
        """Bytes of the pages that it used or wrote first since its fork, and of all its pages in memory.

        Pages in memory include shared ones.
        """
        fields = _stat(self.pid)
        return int(fields[7]) * resource.getpagesize(), int(fields[21]) * resource.getpagesize()

    def processor_s(self) -> float:
        """Seconds of processor time since its fork, or since the system was asked for it where it does not say."""
        if self.pid is None:
            return 0.0
        used = processor_s(self.pid)
        return time.monotonic() - self.began if used is None else used

    def memory(self) -> int:
        """Bytes that it shares with no other process."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup") as file:
                lines = [line.split() for line in file if line.startswith("Private_")]
        except OSError:
            return 0
        return sum(int(line[1]) for line in lines) * 1024

    async def next(self) -> bytes:
        """Waits for the next frame.

        Raises:
            EOFError: The process has ended.
        """
        loop = asyncio.get_running_loop()
        while (payload := self.poll()) is None:
            await _readable(loop, self.socket)
        return payload

    def wait(self, timeout_s: float) -> bytes | None:
        """Waits up to ``timeout_s`` for the next frame; None where there is none.

        Raises:
            EOFError: The process has ended.
        """
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
