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

MODULE = "tests.server.stand_in"


def say(line: str) -> None:
    """Writes a line at once, which others' lines do not divide."""
    os.write(2, f"{line}\n".encode())


class StandIn(supervised.Child):
    """Both kinds, told apart by the first record."""

    def __init__(self):
        super().__init__()
        self.path, self.stopped, self.drained = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.count = 0

    def receive(self, record) -> None:
        match record:
            case supervised.Connect(path):
                assert os.path.exists(path)
                self.path.set()
            case supervised.Ping():
                self.send(supervised.Pong())
            case supervised.Count():
                self.send(supervised.InFlight(self.count))
            case supervised.Drain():
                self.send(supervised.InFlight(self.count))
                self.drained.set()
            case supervised.Stop():
                self.stopped.set()

    async def work(self) -> int:
        return await (self.engine() if self.start.listening < 0 else self.front())

    async def engine(self) -> int:
        say(f"engine {os.getpid()}")
        if "engine-fails" in os.environ.get("STAND_IN", ""):
            raise supervised.InputError("the model\nis missing")
        if "engine-dies" in os.environ.get("STAND_IN", ""):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.args.distributed:
            is_first = "leads" in os.environ["STAND_IN"]
            self.send(supervised.Leads(is_first))
            if not is_first:
                # The first process ends.
                await asyncio.sleep(float(os.environ["ENDS_S"]))
                return 0
        await wire.listen(self.start.path, lambda: wire.Channel(supervised.ToChild, print))
        self.send(supervised.Loaded())
        if "never-ready" in os.environ.get("STAND_IN", ""):
            await asyncio.Event().wait()
        self.send(supervised.Ready(1, 2, "model"))
        if "breaks" in os.environ.get("STAND_IN", ""):
            await asyncio.sleep(0.5)
            self.send(supervised.Broken())
        await self.stopped.wait()
        say("engine stops")
        return 0

    async def front(self) -> int:
        say(f"front {os.getpid()}")
        if "front-fails" in os.environ.get("STAND_IN", ""):
            raise supervised.InputError("the store is missing")
        await self.path.wait()
        listening = socket.socket(fileno=os.dup(self.start.listening))
        listening.setblocking(False)
        await asyncio.start_server(self.answer, sock=listening)
        self.send(supervised.Accepting())
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
                    case "spin":
                        while True:
                            pass
                    case "sleep":
                        time.sleep(10000)
                    case "ignore":
                        self.drained = self.stopped = asyncio.Event()
                        self.receive = lambda record: (
                            isinstance(record, supervised.Ping) and StandIn.receive(self, record)
                        )
                        writer.write(b"ignored\n")
                await writer.drain()
        self.count -= 1
        writer.close()


def main() -> int:
    """A server of stand-ins, whose watch is quick."""
    supervisor.PING_S, supervisor.STUCK_S, supervisor.SILENT_S, supervisor.ERRORS_S = 0.1, 1.0, 3.0, 0.5
    supervisor.COUNT_S = float(os.environ.get("COUNT_S", supervisor.COUNT_S))
    args, _ = parse(sys.argv[1:])
    supervisor.set_logging(args)
    return supervisor.Supervisor(args, sys.argv[1:], MODULE, MODULE).run()


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        supervised.run_child(StandIn)
    sys.exit(exit_code(main))
