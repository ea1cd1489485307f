"""Compilation of many programs side by side, before any of them runs."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from dflash_jax.decoding.state import DecodeState, Settings
from dflash_jax.engine.executables import Executables, put
from dflash_jax.engine.steps import REPLICATED, Programs, Step

# Niceness of threads that compile while requests are served.
NICENESS = 10


def yield_processors() -> None:
    """Gives other threads precedence over the calling one, where the system has priorities of threads (Linux)."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class AheadOfTime(Programs):
    """Compiles what calls need, and computes nothing.

    A context manager. A call traces its step, submits the compilation to a thread, and returns shapes
    (`jax.ShapeDtypeStruct`) in place of arrays; the state comes back as it was given, of arrays or of shapes. The
    executables get each program when it is compiled, and have all of them when the block ends. What they have already
    is not traced again: a second engine of the same shapes is warm at once.

    Args:
        executables: They get the programs.
        threads: Compilations at a time.
        background: Whether other threads have precedence for the processors. The seconds are then not counted as
            those of compilation, and errors are left to the futures, since nothing waits for the programs.

    Attributes:
        pending: Compilations by the program's key; each future's result is the seconds that it took.
    """

    def __init__(self, executables: Executables, threads: int, background: bool = False):
        super().__init__(*executables.pair)
        self.pending: dict[tuple, Future[float]] = {}
        self._executables, self._is_background = executables, background
        self._threads = ThreadPoolExecutor(threads, "compile", yield_processors if background else None)
        self._results: dict[tuple, Any] = {}

    def __enter__(self) -> "AheadOfTime":
        self._began = time.perf_counter()
        return self

    def __exit__(self, error_type, *_) -> None:
        self._threads.shutdown(cancel_futures=error_type is not None or self._is_background)
        if error_type is None and not self._is_background:
            for future in self.pending.values():
                future.result()
            self._executables.compile_s += time.perf_counter() - self._began

    def _compile(self, compiled: dict, key: tuple, lowered) -> float:
        """Compiles a program, of the executables' form when it was lowered: seconds."""
        compiled[key], seconds = self._executables.compile(lowered)
        return seconds

    def run(self, step: Step, state: DecodeState, *args: Any, **static: Any) -> Any:
        """See `Programs`; the result has shapes in place of arrays."""
        key, args = self._executables.prepared(step, state, args, static)
        # New weights may have other programs meanwhile.
        compiled = self._executables.compiled
        if key not in self._results:
            if (program := compiled.get(key)) is None:
                program = self._executables.lower(step, state, *args, **static)
                self.pending[key] = self._threads.submit(self._compile, compiled, key, program)
            specs = self.specs(step, state, static)[1]
            shapes, specs = program.out_info, (REPLICATED, specs) if step.changes else specs
            shardings = self._executables.shardings(jax.tree.broadcast(specs, shapes))
            self._results[key] = jax.tree.map(put, shapes, shardings)
        result = self._results[key]
        return (state, result[1]) if step.changes else result

    def empty(self, slots: int, capacity: int, settings: Settings, pages: tuple[int, int] | None = None) -> DecodeState:
        """The shapes of an empty state."""
        return self._executables.abstract_state(slots, capacity, settings, pages)

    def read(self, x) -> np.ndarray:
        """Zeros of the shape of ``x``."""
        return np.zeros(x.shape, x.dtype)
