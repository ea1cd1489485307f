"""Stand-ins of the processes below a supervisor, and a server of them: ``python -m tests.server.stand_in WORD ...``.

A front answers lines: "pid", and what a front may do wrong.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time

from dflash_jax.options.serve import parse
from dflash_jax.process import exit_code
from dflash_jax.server import supervised, supervisor, wire
from dflash_jax.server.launch import set_logging

MODULE = "tests.server.stand_in"
SILENT_S = 3.0


def say(line: str) -> None:
    """Writes a line at once, which others' lines do not divide."""
    os.write(2, f"{line}\n".encode())


def hang(how: str) -> None:
    """Never returns, and uses the processor or does not."""
    while True:
        if how == "sleep":
            time.sleep(10000)


class StandIn(supervised.Child):
    """Both kinds, told apart by the first record."""

    def __init__(self):
        super().__init__()
        self.stopped, self.drained = asyncio.Event(), asyncio.Event()
        self.count = 0

    def receive(self, record) -> None:
        match record:
            case supervised.Drain():
                self.send(supervised.InFlight(self.count))
                self.drained.set()
            case supervised.Stop():
                self.stopped.set()

    async def work(self) -> int:
        return await (self.engine() if self.start.listening < 0 else self.front())

    async def engine(self) -> int:
        # Signals make the event loop hang: busy, or asleep.
        signal.signal(signal.SIGUSR1, lambda *_: hang("spin"))
        signal.signal(signal.SIGUSR2, lambda *_: hang("sleep"))
        say(f"engine {os.getpid()}")
        if "engine-fails" in os.environ.get("STAND_IN", ""):
            raise supervised.InputError("the model\nis missing")
        if "engine-dies" in os.environ.get("STAND_IN", ""):
            os.kill(os.getpid(), signal.SIGKILL)
        if "engine-loads" in os.environ.get("STAND_IN", ""):
            # Another thread reads weights, say, and lets this one not go on.
            time.sleep(2 * SILENT_S)
        if self.args.distributed:
            is_first = "leads" in os.environ["STAND_IN"]
            self.send(supervised.Leads(is_first))
            if not is_first:
                # The first process ends.
                await asyncio.sleep(float(os.environ["ENDS_S"]))
                return 0
        await asyncio.get_running_loop().create_unix_server(
            lambda: wire.Channel(supervised.ToChild, print), self.start.engine
        )
        self.send(supervised.Loaded())
        if "never-ready" in os.environ.get("STAND_IN", ""):
            await asyncio.Event().wait()
        self.send(supervised.Ready("1 of 2 programs compiled; as model"))
        if "breaks" in os.environ.get("STAND_IN", ""):
            await asyncio.sleep(0.5)
            self.send(supervised.Broken())
        await self.stopped.wait()
        say("engine stops")
        if "engine-stays" in os.environ.get("STAND_IN", ""):
            await asyncio.Event().wait()
        return 0

    async def front(self) -> int:
        say(f"front {os.getpid()}")
        if "front-fails" in os.environ.get("STAND_IN", ""):
            raise supervised.InputError("the store is missing")
        if "front-spins" in os.environ.get("STAND_IN", ""):
            hang("spin")
        if "front-waits" in os.environ.get("STAND_IN", ""):
            hang("sleep")
        while not os.path.exists(self.start.engine):
            await asyncio.sleep(0.01)
        listening = socket.socket(fileno=os.dup(self.start.listening))
        listening.setblocking(False)
        await asyncio.start_server(self.answer, sock=listening)
        self.send(supervised.Ready())
        await self.drained.wait()
        while self.count and not self.stopped.is_set():
            await asyncio.sleep(0.01)
        return 0

    async def answer(self, reader, writer) -> None:
        self.count += 1
        with contextlib.suppress(ConnectionError):
            while line := (await reader.readline()).decode().strip():
                match line:
                    case "pid":
                        writer.write(f"{os.getpid()}\n".encode())
                    case "spin" | "sleep" as how:
                        hang(how)
                    case "ignore":
                        self.drained = self.stopped = asyncio.Event()
                        self.receive = lambda record: None
                        writer.write(b"ignored\n")
                await writer.drain()
        self.count -= 1
        writer.close()


def main() -> int:
    """A server of stand-ins, whose watch is quick."""
    supervisor.PING_S, supervisor.STUCK_S, supervisor.START_S, supervisor.SILENT_S = 0.1, 1.0, 4.0, SILENT_S
    supervisor.ERRORS_S = 0.5
    for name in ("COUNT_S", "ENGINE_S"):
        setattr(supervisor, name, float(os.environ.get(name, getattr(supervisor, name))))
    args, _ = parse(sys.argv[1:])
    set_logging(args)
    return supervisor.Supervisor(args, sys.argv[1:], MODULE, MODULE).run()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        supervised.run_child(StandIn)
    sys.exit(exit_code(main))
