"""The processes below the supervisor: what they and the supervisor say to each other, and how they begin and end."""

import asyncio
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from argparse import Namespace
from typing import Any, NoReturn

import msgspec

from dflash_jax import progress
from dflash_jax.errors import EngineError, InputError
from dflash_jax.options.serve import parse
from dflash_jax.process import leave, line_of
from dflash_jax.server import wire
from dflash_jax.server.launch import set_logging

log = logging.getLogger("dflash_jax.server")


class Record(msgspec.Struct, tag=True, array_like=True):
    """A message."""


# What the supervisor sends.


class Start(Record):
    """The first record.

    Attributes:
        words: The words of the command line.
        folder: The supervisor's directory, which is removed even where the supervisor is killed.
        listening: A front's descriptor of the listening socket.
        store: A front's file of stored responses.
        fronts: How many fronts there are, which share limits.
    """

    words: list[str]
    folder: str
    listening: int = -1
    store: str = ""
    fronts: int = 1

    @property
    def engine(self) -> str:
        """The Unix socket on which the engine, or the one after it, listens to fronts."""
        return f"{self.folder}/engine"


class Ping(Record):
    """`Pong` answers it, as soon as the event loop has a turn."""


class Drain(Record):
    """To a front: it ends after the requests that it has, whose number it answers as `InFlight`."""


class Stop(Record):
    """An engine ends, and all open requests with it; a front ends when these have their errors."""


ToChild = Start | Ping | Drain | Stop


# What it receives.


class Leads(Record):
    """From an engine of several hosts: whether it is the first process, which alone has fronts."""

    is_first: bool


class Loaded(Record):
    """From an engine: it listens to fronts."""


class Ready(Record):
    """The process does its work: an engine answers requests, a front accepts connections.

    Attributes:
        summary: What the log has of an engine.
    """

    summary: str = ""


class Broken(Record):
    """From an engine: the device has failed, and the server is to end."""


class Pong(Record):
    """The answer to `Ping`."""


class InFlight(Record):
    """From a front: its requests without a complete answer."""

    count: int


class Failed(Record):
    """The process ends with an error of one line.

    Attributes:
        message: The line; "" where the log says it.
        code: The exit code.
    """

    message: str
    code: int


FromChild = Leads | Loaded | Ready | Broken | Pong | InFlight | Failed


class Child(ABC):
    """A process below the supervisor. Subclasses have its work.

    Attributes:
        start: The first record; None before.
        args: The arguments of `serve`.
        system: The `System` of its config, or None.
    """

    # Reads the words of the first record, and the type of the supervisor's records.
    parse = staticmethod(parse)
    records: Any = ToChild
    args: Namespace
    system: Any

    def __init__(self):
        self.start: Any = None
        self._started, self._has_ended = asyncio.Event(), asyncio.Event()
        self._channel = wire.Channel(self.records, self._receive, self._has_ended.set)

    def send(self, record: Record) -> None:
        """Sends a record to the supervisor. Only the event loop's thread may call it."""
        self._channel.send(record)

    @abstractmethod
    def receive(self, record: Any) -> None:
        """Takes a record that comes after the first one."""

    @abstractmethod
    async def work(self) -> int:
        """Does the work of the process, and returns its exit code."""

    def _receive(self, record: Any) -> None:
        match record:
            case Start():
                self.start = record
                self._started.set()
            case Ping():
                self.send(Pong())
            case _:
                self.receive(record)

    async def run(self, connection: socket.socket) -> int:
        """Does the work that the supervisor at the other end asks for: the exit code."""
        await wire.over(connection, self._channel)
        await self._started.wait()
        code = await self._work()
        self._channel.close()
        await self._has_ended.wait()
        return code

    async def _work(self) -> int:
        try:
            # The supervisor has logged the notices about the words.
            logging.disable()
            self.args, self.system = self.parse(self.start.words)
            logging.disable(logging.NOTSET)
            set_logging(self.args)
            return await self.work()
        except (InputError, EngineError, OSError) as e:
            failed = Failed(*line_of(e))
        except Exception:
            log.exception("a process of the server has failed")
            failed = Failed("", 1)
        self.send(failed)
        return failed.code


def ignore_signals() -> None:
    """Leaves SIGINT and SIGTERM, which a terminal or a container may send to all processes, to the supervisor."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # The supervisor has blocked them until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _end_with(supervisor: int, child: Child) -> None:
    """Ends this process when the other end of its socket is closed, whatever its other threads do."""
    waiting = select.poll()
    # Only the end: the event loop reads what comes before.
    waiting.register(supervisor, 0)
    waiting.poll()
    if child.start is not None:
        shutil.rmtree(child.start.folder, ignore_errors=True)
    os._exit(1)


def run_child(kind: type[Child]) -> NoReturn:
    """Runs ``python -m MODULE FD``, and ends the process at once: threads may still compile."""
    ignore_signals()
    progress.enable()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    child = kind()
    arguments = os.dup(connection.fileno()), child
    threading.Thread(target=_end_with, args=arguments, name="supervisor", daemon=True).start()
    leave(asyncio.run(child.run(connection)))
