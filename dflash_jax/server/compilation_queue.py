"""Admission of grammars to compilation: how many compile at a time, and which one is dropped for another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from dflash_jax.server.errors import ApiError
from dflash_jax.workers.process import WorkerProcess

# Least seconds between two looks at the processor time of compilations.
LOOK_S = 0.05


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of grammars.

    Attributes:
        compile_s: Seconds of processor time that a compilation may take.
        step_s: Seconds of processor time that the masks of one round may take.
        memory_bytes: Memory of one process.
        total_bytes: Memory of all processes together.
        compilations: Compilations at a time.
        sure_s: Seconds of processor time that a compilation has before it may be dropped for a waiting one.
        waiting: Requests that may wait for a compilation to begin.
        cached: Compiled grammars that are kept while no request uses them.
        grace_s: Seconds that a grammar is kept for its request's first mask.
    """

    compile_s: int = 10
    step_s: int = 10
    memory_bytes: int = 2**29
    total_bytes: int = 2**31
    compilations: int = 16
    sure_s: float = 2.0
    waiting: int = 256
    cached: int = 64
    grace_s: float = 30.0


class CompilationQueue:
    """Places for compilations, of which there are ``limits.compilations``.

    Attributes:
        compiling: The processes that compile now.
    """

    def __init__(self, limits: GrammarLimits):
        self._limits = limits
        self.compiling: list[WorkerProcess] = []
        # Requests that wait for a place, and those that have one.
        self._queued = self._running = 0
        self._freed: asyncio.Event | None = None

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for a place. The compilation with most processor time is dropped once that is more than `sure_s`.

        Raises:
            ApiError: 503, too many requests wait.
        """
        if self._freed is None:
            self._freed = asyncio.Event()
        freed = self._freed
        self._queued += 1
        try:
            if self._queued > self._limits.waiting + self._limits.compilations:
                raise ApiError(503, f"{self._queued} texts' forms are being compiled: try again later")
            while self._running >= self._limits.compilations:
                freed.clear()
                used = {process: process.processor_s() for process in self.compiling}
                left = self._limits.sure_s - max(used.values(), default=0.0)
                if used and left <= 0 and not any(process.reason for process in used):
                    longest = max(used, key=lambda process: used[process])
                    longest.kill("the server compiles the forms of other texts: try again later")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(freed.wait(), max(LOOK_S, left))
            self._running += 1
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._running -= 1
            freed.set()
