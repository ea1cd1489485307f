"""Servers that scripts start as users do: each is a process on a free port of this machine."""

import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

# Seconds that a server may take to start, and to end.
START_S, END_S = 900.0, 120.0


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def is_ready(url: str) -> bool:
    """Whether ``/ready`` of a server is 200."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
            return answer.status == 200
    except OSError:
        return False


def machine() -> str:
    """This machine, its load and the date, for a report."""
    name = platform.machine()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%B %-d, %Y')}"


class ServerProcess:
    """A process that listens on a port, as ``with ServerProcess(…) as server``.

    Args:
        command: The words of its command.
        port: The port on which it listens.
        environment: Its environment; None: that of this process.
        log: Gets what it writes; None: where this process writes.

    Attributes:
        url: Its address.
        process: The process.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        environment: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ):
        self.command, self.url = list(command), f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(self.command, env=environment, stdout=log, stderr=log)

    @classmethod
    def of(cls, name: str, words: Sequence[str]) -> "ServerProcess":
        """Starts ``dflash NAME`` with further words on a free port."""
        port = free_port()
        return cls([sys.executable, "-m", f"dflash_jax.{name}", "--port", str(port), *words], port)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Returns as soon as ``holds()``.

        Raises:
            RuntimeError: The process has ended, or START_S have passed.
        """
        until = time.monotonic() + START_S
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError(f"{' '.join(self.command)} has ended with code {self.process.returncode}")
            if time.monotonic() > until:
                raise RuntimeError(f"{' '.join(self.command)}: not ready after {START_S:.0f} s")
            time.sleep(0.2)

    def stop(self) -> int:
        """Ends the process by SIGTERM, or after END_S by SIGKILL, and returns its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.stop()
