"""The processes of structured output, their clients, and the limits of both."""

import logging
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from dflash_jax.workers.memory import WorkerMemory
from dflash_jax.workers.process import WorkerProcess

log = logging.getLogger("dflash_jax.server")

# Seconds between two checks of the processes' memory.
WATCH_S = 0.25


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
        sequences: Sequences of one client and grammar whose masks one process computes.
        shared_s: Seconds of processor time that the masks of a round may take there. Sequences of a process that needs
            more go on in processes of their own.
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
    sequences: int = 8
    shared_s: int = 1
    cached: int = 64
    grace_s: float = 30.0


def richest(amounts: Counter[Hashable]) -> Hashable:
    """The client that has most."""
    return max(amounts, key=lambda client: amounts[client])


class GrammarPool:
    """The processes that run.

    Attributes:
        limits: The limits.
        lock: Guards what the event loop, the engine's thread and the memory watch share.
    """

    def __init__(self, limits: GrammarLimits):
        self.limits, self.lock = limits, threading.RLock()
        self._live: dict[WorkerProcess, Hashable] = {}
        self._watch: threading.Thread | None = None
        self._has_stopped = threading.Event()

    def add(self, process: WorkerProcess, client: Hashable) -> WorkerProcess:
        """Adds a process of a client."""
        with self.lock:
            self._live[process] = client
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_memory, name="grammar-watch", daemon=True)
                self._watch.start()
        return process

    def end(self, process: WorkerProcess) -> None:
        """Ends a process that is not needed any more. Where its id is not known yet, the memory watch ends it later."""
        process.is_abandoned = not process.kill()
        if not process.is_abandoned:
            process.socket.close()
            with self.lock:
                self._live.pop(process, None)

    def stop(self) -> None:
        """Ends all processes."""
        self._has_stopped.set()
        with self.lock:
            processes = list(self._live)
        for process in processes:
            self.end(process)
            # A process without a known id ends when it reads from its closed socket.
            process.socket.close()

    def _watch_memory(self) -> None:
        """Ends abandoned processes, and while all take too much memory, the largest of the client that has most."""
        memory, most = WorkerMemory(self.limits.total_bytes), self.limits.total_bytes
        while not self._has_stopped.wait(WATCH_S):
            with self.lock:
                clients = dict(self._live)
            for process in clients:
                if process.is_abandoned:
                    self.end(process)
            sizes = memory.sizes([process for process in clients if process.pid is not None])
            if sum(sizes.values()) > most:
                by_client: Counter[Hashable] = Counter()
                for process, size in sizes.items():
                    by_client[clients[process]] += size
                has_most = richest(by_client)
                largest = max((p for p in sizes if clients[p] == has_most), key=lambda p: sizes[p])
                log.warning(
                    "structured output takes %d MiB: ending a client's largest process", sum(sizes.values()) >> 20
                )
                largest.kill(f"all structured output together needs more than {most >> 20} MiB")
