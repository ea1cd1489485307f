"""The supervisor of a server: one process that starts the engine's and the fronts', watches them and ends them.

It owns the listening socket, which fronts inherit, and does nothing else, so that a signal is always heard.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from dflash_jax.errors import EngineError, InputError
from dflash_jax.server import cors, supervised, transport, wire
from dflash_jax.server.launch import warn_of_open_access
from dflash_jax.workers.process import processor_s

log = logging.getLogger("dflash_jax.server")

# The modules of both kinds of processes.
ENGINE, FRONT = "dflash_jax.server.engine_process", "dflash_jax.server.front_process"
# Seconds between two questions to a process's event loop.
PING_S = 1.0
# Seconds of its first thread's processor time that one turn of an event loop may take: of one that works, and of one
# that starts, which imports and builds in such turns.
STUCK_S, START_S = 5.0, 60.0
# Seconds that an event loop may wait in one turn, and the share of them that is less than any work takes.
SILENT_S, WAITS = 30.0, 0.01
# Processes of one kind that are started again within so many seconds, at most.
RESTARTS, RESTARTS_S = 5, 60.0
# Seconds in which fronts say how many requests they have.
COUNT_S = 5.0
# Seconds for the errors of requests that a stop ends.
ERRORS_S = 6.0
# Seconds in which an engine without requests must end.
ENGINE_S = 60.0


def front_count(args: Namespace) -> int:
    """The number of fronts: what the arguments say, else one for four cores, at most four."""
    if args.api_server_count is not None:
        return args.api_server_count
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // 4))


class _Process:
    """A process below this one.

    Args:
        name: Names it in the log.
        module: Its module.
        first: The first record.
        descriptors: What it inherits beside the socket to this process.
        on_record: Called with the process and each record of it.

    Attributes:
        name: Names it in the log.
        pid: Its process id.
        is_up: Whether it does its work: a front accepts connections, an engine answers requests.
        is_stopping: Whether its end was asked for.
        ended: Done when the process has ended and was handled.
        count: The question that waits for a front's number of requests.
        asked: When the unanswered ping was sent, and the processor time of its first thread then.
    """

    def __init__(
        self, name: str, module: str, first: supervised.Start, descriptors: Sequence[int], on_record: Callable
    ):
        self.name, self.is_up, self.is_stopping = name, False, False
        self.count: asyncio.Future[int] | None = None
        self.asked: tuple[float, float | None] | None = None
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._code: asyncio.Future[int] = loop.create_future()
        connection, remote = socket.socketpair()
        with remote:
            command, inherited = [sys.executable, "-m", module, str(remote.fileno())], [remote.fileno(), *descriptors]
            # A signal to all processes waits until the child ignores it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid
        threading.Thread(target=self._wait, args=(loop,), name=name, daemon=True).start()
        self._has_said_all = asyncio.Event()
        self._channel = wire.Channel(
            supervised.FromChild, lambda record: on_record(self, record), self._has_said_all.set
        )
        self._connecting = loop.create_task(wire.over(connection, self._channel))
        self.send(first)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._process.wait()
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._code.set_result, code)

    def send(self, record: supervised.Record) -> None:
        """Sends a record."""
        self._channel.send(record)

    def stop(self) -> None:
        """Asks for its end."""
        self.is_stopping = True
        self.send(supervised.Stop())

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()

    async def end(self) -> int:
        """Waits for its end and its last record: the exit code, negative for a signal."""
        code = await self._code
        await self._has_said_all.wait()
        return code

    def take_count(self, count: int) -> None:
        """Takes the answer to the question for its number of requests."""
        if self.count is not None and not self.count.done():
            self.count.set_result(count)


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


class Supervisor:
    """A server of one engine and several fronts.

    A first SIGTERM or SIGINT drains; a second one ends the requests with an error, a third ends the server at once.
    Before the server is ready, the first one does.

    Args:
        args: The arguments of `serve`.
        words: The words of the command line, which each process reads again.
        engine: The engine's module.
        front: The fronts' module.
    """

    def __init__(self, args: Namespace, words: Sequence[str], engine: str = ENGINE, front: str = FRONT):
        self.args, self._words, self._modules = args, list(words), (engine, front)
        self._front_count = front_count(args)
        self._engine: _Process | None = None
        # A front's number, and its process.
        self._fronts: dict[int, _Process] = {}
        self._listening: socket.socket | None = None
        self._phase = "starting"
        self._is_follower, self._has_warned = False, False
        self._code = 0
        # What the engine said when it was ready, until that is logged.
        self._summary = ""
        # When processes of a kind were started again, on the monotonic clock.
        self._restarts: dict[str, deque[float]] = {kind: deque(maxlen=RESTARTS + 1) for kind in ("engine", "front")}
        self._tasks: set[asyncio.Task] = set()

    def run(self) -> int:
        """Serves until a signal: the exit code.

        Raises:
            InputError: The arguments are wrong, as far as only a process below can know.
            EngineError: A process cannot start.
        """
        # Before anything starts: what is wrong is one line.
        transport.tls_context(self.args)
        cors.of_arguments(self.args)
        self._check_store()
        try:
            if not self.args.distributed:
                self._listen()
            with wire.folder() as self._folder:
                return asyncio.run(self._main())
        finally:
            if self._listening is not None:
                transport.close(self._listening, self.args.uds)

    def _check_store(self) -> None:
        path = self.args.response_store_path
        if path is not None:
            from dflash_jax.server.response_store import ResponseStore

            ResponseStore(self.args.response_store, path=path).close()

    def _listen(self) -> None:
        args = self.args
        self._listening = transport.listen(args.host, args.port, args.uds)
        self._url = transport.url(self._listening, args.ssl_certfile is not None)
        warn_of_open_access(args)

    async def _main(self) -> int:
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = loop.create_future()
        self._second_signal = asyncio.Event()
        self._hear_signals(loop)
        try:
            self._start_engine()
            if self._listening is not None:
                self._start_fronts()
            self._begin(self._watch())
            return await self._end
        finally:
            await self._kill_all()

    def _hear_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _begin(self, work: Coroutine) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._after)

    def _after(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    async def _kill_all(self) -> None:
        """Ends all processes, and waits for their ends."""
        self._phase = "ended"
        for process in self._processes():
            process.kill()
        for process in self._processes():
            await process.ended
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Processes start and end.
    def _start_engine(self) -> None:
        first = supervised.Start(self._words, str(self._folder))
        self._engine = _Process("the engine", self._modules[0], first, (), self._take)
        self._begin(self._until_engine_ends(self._engine))

    def _start_fronts(self) -> None:
        for number in range(1, self._front_count + 1):
            self._start_front(number)

    def _start_front(self, number: int) -> None:
        assert self._listening is not None
        store, descriptor = self.args.response_store_path or self._folder / "responses.sqlite", self._listening.fileno()
        first = supervised.Start(self._words, str(self._folder), descriptor, str(store), self._front_count)
        front = _Process(f"front {number}", self._modules[1], first, [descriptor], self._take)
        self._fronts[number] = front
        self._begin(self._until_front_ends(number, front))

    async def _until_engine_ends(self, engine: _Process) -> None:
        code = await engine.end()
        engine.is_up = False
        engine.ended.set_result(None)
        if self._phase == "ended":
            return
        if self._is_follower:
            self._finish(code if code >= 0 else 128 - code)
        elif self._phase == "starting":
            self._fail_of(engine, code)
        elif not engine.is_stopping:
            log.error("the engine's process has ended %s", _how(code))
            if self._phase == "serving" and self.args.restart_on_failure and self._may_restart("engine"):
                log.warning("restarting the engine")
                self._start_engine()
            else:
                self._break()

    async def _until_front_ends(self, number: int, front: _Process) -> None:
        code = await front.end()
        front.take_count(0)
        front.is_up = False
        front.ended.set_result(None)
        if self._phase == "starting":
            self._fail_of(front, code)
        elif self._phase == "serving":
            log.error("%s has ended %s: restarting it", front.name, _how(code))
            if self._may_restart("front"):
                self._start_front(number)
            else:
                self._fail(EngineError(f"fronts have ended {RESTARTS + 1} times within {RESTARTS_S:g} s"))

    def _may_restart(self, kind: str) -> bool:
        """Whether one more process of a kind may be started again now; it counts."""
        times = self._restarts[kind]
        times.append(time.monotonic())
        return len(times) <= RESTARTS or times[-1] - times[0] > RESTARTS_S

    def _fail_of(self, process: _Process, code: int) -> None:
        """Ends the server after a process that ended while the server started."""
        self._fail(EngineError(f"{process.name} has ended {_how(code)} while the server started"))

    def _break(self) -> None:
        """Ends the server after a failure of the engine."""
        if self._phase == "starting":
            self._fail(EngineError("the engine has failed while the server started"))
            return
        log.error("exiting: the engine has failed")
        self._code = 1
        if self._phase == "serving":
            self._phase = "draining"
            self._begin(self._drain(None))

    # Records of processes.
    def _take(self, process: _Process, record: Any) -> None:
        if self._end.done():
            return
        match record:
            case supervised.Leads(is_first):
                self._is_follower = not is_first
                if is_first:
                    self._lead()
                else:
                    log.info("this process follows the first one")
            case supervised.Loaded():
                log.info("listening on %s, warming up", self._url)
            case supervised.Ready(summary):
                process.is_up, self._summary = True, summary or self._summary
                self._look_whether_ready()
            case supervised.Broken():
                self._break()
            case supervised.Pong():
                process.asked = None
            case supervised.InFlight(count):
                process.take_count(count)
            case supervised.Failed():
                self._take_failure(record)

    def _lead(self) -> None:
        try:
            self._listen()
        except InputError as e:
            self._fail(e)
        else:
            self._start_fronts()

    def _take_failure(self, failed: supervised.Failed) -> None:
        if self._phase != "starting" and not self._is_follower:
            # What follows from the end of a process follows from this one's, too.
            if failed.message:
                log.error("%s", failed.message)
        elif failed.message:
            self._fail((InputError if failed.code == 2 else EngineError)(failed.message))
        else:
            self._finish(failed.code)

    def _look_whether_ready(self) -> None:
        if not all(process.is_up for process in self._processes()):
            return
        if self._summary:
            log.info("ready: %s", self._summary)
            self._summary = ""
        if self._phase == "starting":
            self._phase = "serving"

    # Signals and the end.
    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._is_follower and not self._has_warned:
            # A signal to all processes has the first one drain, which needs the others until then.
            self._has_warned = True
            log.warning("%s: this process ends with the first one", name)
        elif self._phase == "serving":
            self._phase = "draining"
            self._begin(self._drain(name))
        elif self._phase == "draining":
            self._phase = "stopping"
            self._second_signal.set()
        else:
            log.warning("%s: ended at once", name)
            self._finish(128 + number)

    async def _drain_fronts(self) -> int:
        """Has all fronts take no further requests, and returns the number of those under way."""
        loop, waiting = asyncio.get_running_loop(), []
        for front in self._fronts.values():
            if front.is_up:
                front.count = loop.create_future()
                front.send(supervised.Drain())
                waiting.append(front.count)
        if not waiting:
            return 0
        answered, _ = await asyncio.wait(waiting, timeout=COUNT_S)
        return sum(count.result() for count in answered)

    async def _drain(self, name: str | None) -> None:
        """Ends the server when its requests have ended, or after the time of a drain."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.args.drain_s
        for front in self._fronts.values():
            if not front.is_up:
                front.kill()
        count = await self._drain_fronts()
        if name is not None:
            log.info("%s: finishing %d requests", name, count)
        ends = asyncio.ensure_future(asyncio.wait([front.ended for front in self._fronts.values()]))
        second = asyncio.ensure_future(self._second_signal.wait())
        await asyncio.wait({ends, second}, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
        if not ends.done():
            await self._stop()
            await asyncio.wait({ends}, timeout=ERRORS_S)
            for front in self._fronts.values():
                front.kill()
            await ends
        if self._engine is not None:
            engine = self._engine
            engine.stop()
            if engine.is_up:
                ends = {engine.ended} if second.done() else {engine.ended, second}
                await asyncio.wait(ends, timeout=ENGINE_S, return_when=asyncio.FIRST_COMPLETED)
                if not engine.ended.done() and not second.done():
                    # A device that hangs never ends.
                    log.warning("the engine has not ended within %g s: ending it", ENGINE_S)
            engine.kill()
            await engine.ended
        second.cancel()
        self._finish(self._code)

    async def _stop(self) -> None:
        """Ends all requests with an error."""
        left = await self._drain_fronts()
        if self._phase == "stopping":
            log.warning("stopped with %d requests in flight", left)
        elif left:
            log.warning("%d requests did not end within %g s", left, self.args.drain_s)
            self._code = 1
        self._phase = "stopping"
        for process in self._processes():
            process.stop()

    def _processes(self) -> list[_Process]:
        return [*self._fronts.values(), *([] if self._engine is None else [self._engine])]

    # Processes whose event loop does not answer.
    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(PING_S)
            now = time.monotonic()
            # This process was stopped itself, and so were perhaps the others.
            was_stopped, last = now - last > 2 * PING_S + 1, now
            for process in self._processes():
                if not (process.is_stopping or process.ended.done()):
                    self._look_at(process, now, was_stopped)

    def _look_at(self, process: _Process, now: float, was_stopped: bool) -> None:
        # The event loop is in the first thread. The other ones may compile, or hold a device.
        used = processor_s(process.pid, process.pid)
        if process.asked is None:
            process.send(supervised.Ping())
        if process.asked is None or was_stopped:
            process.asked = now, used
            return
        since, used_before = process.asked
        turn = None if used is None or used_before is None else used - used_before
        if self._hangs(process, now - since, turn):
            log.error("%s has not answered for %.0f s: ending it", process.name, now - since)
            process.kill()

    def _hangs(self, process: _Process, waited: float, turn: float | None) -> bool:
        """Whether the turn of an event loop that has lasted for ``waited`` seconds never ends.

        A busy machine gives a turn that ends little processor time, which therefore decides.

        Args:
            process: The process.
            waited: Seconds of the clock.
            turn: Seconds of processor time; None: unknown.
        """
        if turn is not None and turn >= WAITS * waited:
            return turn >= (STUCK_S if process.is_up else START_S)
        # An engine's loop may wait for minutes while another thread reads weights.
        may_wait = not process.is_up and (turn is None or process is self._engine)
        return waited >= SILENT_S and not may_wait
