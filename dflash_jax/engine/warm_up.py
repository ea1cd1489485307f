"""Compiles an engine's programs: all before the first request, or some before it and the others beside requests."""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import jax

from dflash_jax.engine.ahead_of_time import AheadOfTime, yield_processors
from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.draft_length import MEASURED_RUNS
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.scheduler import DISPATCH_S, UNKNOWN_ROUNDS, rounds_within
from dflash_jax.engine.warm_up_tasks import Task, Tasks

log = logging.getLogger("dflash_jax")

# Compiling a large model takes gigabytes of the host's memory.
MAX_THREADS = 8
# Seconds that a thread of Python may keep another one waiting, while programs are traced beside requests.
SWITCH_S = 0.0005


def warm_up(engine: Engine) -> dict[str, float]:
    """Compiles all programs that requests may need, side by side, runs each once, and measures the cost of rounds.

    The engine must be idle. Programs for masks are compiled only where `EngineConfig.masks` says so.

    Returns:
        Seconds of compilation by the program's name.
    """
    warm = WarmUp(engine)
    warm.all()
    return warm.seconds


class WarmUp:
    """Warms up an engine: `all` at once, or `first` and then, beside requests, `others`.

    Args:
        engine: The engine.

    Attributes:
        compiled: Programs that are compiled; those that are always used together count as one.
        failed: Programs that cannot be compiled.
        total: Programs in all.
        seconds: Seconds of compilation by the program's name.
    """

    def __init__(self, engine: Engine):
        self._engine, self._tasks, self._stopping = engine, Tasks(engine), threading.Event()
        if not engine.config.adaptive or jax.process_count() > 1:
            # Reproducible bits need the same chunks at all times, and several processes compile what they run.
            self._tasks.first, self._tasks.others = self._tasks.first + self._tasks.others, []
        self.compiled, self.failed, self.total = 0, 0, len(self._tasks.first) + len(self._tasks.others)
        self.seconds: dict[str, float] = {}

    def all(self) -> None:
        """Compiles and runs everything, and measures the costs of rounds."""
        self._run(self._tasks.first + self._tasks.others)
        self._measure(self._tasks.decode_programs)

    def first(self, before_measuring: Callable[[], object] = lambda: None) -> None:
        """Compiles and runs what any request can be answered with. From here on, only compiled programs may run.

        Args:
            before_measuring: Called before the cost of a round is measured: it ends what runs at the same time.
        """
        self._run(self._tasks.first)
        before_measuring()
        programs = self._tasks.decode_programs
        self._measure(programs[:1] if self._tasks.others else programs)
        self._engine.runner.allow(*(name for task in self._tasks.first for name in task.names))

    def _measure(self, programs: Sequence[tuple[int, Speculation]]) -> None:
        """Measures rounds of decode programs, each (batch size, speculation)."""
        for batch_size, speculation in programs if self._engine.config.adaptive else ():
            self._time_rounds(batch_size, speculation)

    def others(self) -> None:
        """Compiles the programs that `first` left, each of which the engine may use from then on.

        Requests have precedence for the processors, and the calling thread keeps its low priority. A program that
        cannot be compiled is left out; requests that need it end with an error.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_S))
        yield_processors()
        try:
            for task, futures in self._compile(self._tasks.others, background=True):
                try:
                    self._count(task, futures, logging.DEBUG)
                except Exception:
                    log.exception("%s cannot be compiled", task.label)
                    self.failed += 1
                    self._engine.runner.mark_failed(*task.names)
                else:
                    self._engine.runner.allow(*task.names)
        finally:
            sys.setswitchinterval(interval)

    def stop(self) -> None:
        """Ends `others` after the programs that are being compiled."""
        self._stopping.set()

    def _run(self, tasks: Sequence[Task]) -> None:
        """Compiles the programs of tasks, and runs each once."""
        runner = self._engine.runner
        if jax.process_count() > 1:
            # Processes compile a program together, when they run it.
            for task in tasks:
                began = runner.compile_s
                runner.wait(task.call(runner))
                if (seconds := runner.compile_s - began) > 0:
                    self.seconds[task.label] = seconds
                    log.info("%s: compiled in %.1f s", task.label, seconds)
                self.compiled += 1
            return
        for task, futures in self._compile(tasks):
            self._count(task, futures, logging.INFO)
        for task in tasks:
            runner.wait(task.call(runner))

    def _compile(self, tasks: Sequence[Task], background: bool = False) -> Iterator[tuple[Task, list[Future[float]]]]:
        """Compiles the programs of tasks; yields each task with its compilations, in order, soon after they end."""
        executables = self._engine.runner.programs
        assert isinstance(executables, Executables), "an engine that is ahead of time itself"
        pending: deque[tuple[Task, list[Future[float]]]] = deque()
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        threads = max(1, threads // 2) if background else threads
        with AheadOfTime(executables, threads, background) as ahead:
            runner, known = self._engine.runner.on(ahead), 0
            for task in tasks:
                if self._stopping.is_set():
                    return
                failed = []
                try:
                    task.call(runner)
                except Exception as e:
                    if not background:
                        raise
                    failed = [Future()]
                    failed[0].set_exception(e)
                pending.append((task, list(ahead.pending.values())[known:] + failed))
                known = len(ahead.pending)
                while pending and (len(pending) > 2 * threads or all(future.done() for future in pending[0][1])):
                    yield pending.popleft()
            yield from pending

    def _count(self, task: Task, futures: Sequence[Future[float]], level: int) -> None:
        """Waits for a task's compilations, and counts and logs them."""
        seconds = sum(future.result() for future in futures)
        if futures:
            self.seconds[task.label] = seconds
            log.log(level, "%s: compiled in %.1f s", task.label, seconds)
        self.compiled += 1

    def _time_rounds(self, batch_size: int, speculation: Speculation, times: int = 5) -> None:
        """Measures rounds of one program for the engine's `DraftLengthPolicy`: the shortest of some measurements.

        Dispatches are as long as those of requests: to start and to read one takes as long as a round of a small model,
        or longer.
        """
        runner, tasks = self._engine.runner, self._tasks
        rounds, measured = UNKNOWN_ROUNDS[speculation.block_size > 1], []
        for _ in range(times):
            dispatch = tasks.dispatch(batch_size, speculation, rounds)
            runner.wait(tasks.start(runner, dispatch.slots, speculation != NO_DRAFTER))
            began = runner.clock
            yielded = runner.read(runner.decode(dispatch), False).yielded
            run = max(1, *map(len, yielded))
            measured.append(((runner.clock - began) / run, run))
            rounds = rounds_within(DISPATCH_S, measured[-1][0])
        seconds, rounds = min(measured)
        for _ in range(MEASURED_RUNS):
            self._engine.policy.observe_seconds(batch_size, speculation, seconds, rounds)
