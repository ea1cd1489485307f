"""Admission of grammars to compilation: how many compile at a time, and which one is dropped for another."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from dflash_jax.server.errors import ApiError
from dflash_jax.workers.process import WorkerProcess


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of grammars.

    Attributes:
        compile_s: Seconds of CPU time that a compilation may take.
        wait_s: Seconds of wall time that it may take.
        step_s: Seconds of wall time that the masks of one round may take.
        memory_bytes: Memory of one process.
        total_bytes: Memory of all processes together.
        compilations: Compilations at a time.
        sure_s: Seconds that a compilation has before it may be dropped for a waiting one.
        waiting: Requests that may wait for a compilation to begin.
        cached: Compiled grammars that are kept while no request uses them.
        grace_s: Seconds that a grammar is kept for its request's first mask.
    """

    compile_s: int = 10
    wait_s: float = 30.0
    step_s: float = 10.0
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
        """Waits for a place. The oldest compilation is dropped when all have had their time.

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
                oldest = min(self.compiling, key=lambda p: p.began, default=None)
                left = self._limits.sure_s if oldest is None else oldest.began + self._limits.sure_s - time.monotonic()
                if oldest is not None and left <= 0:
                    oldest.kill("the server compiles the forms of other texts: try again later")
                    await asyncio.sleep(0.01)
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(freed.wait(), left)
            self._running += 1
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._running -= 1
            freed.set()
