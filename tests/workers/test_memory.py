"""The memory of many processes is known without measuring all of them again and again."""

import mmap
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass

from dflash_jax.workers.memory import WorkerMemory
from dflash_jax.workers.process import WorkerProcess

SHARED, MOST = 150, 2000


@dataclass(eq=False)
class Process:
    """``own`` units of memory beside the shared ones, of which it has ``written`` some."""

    own: int = 1
    written: int = 0
    measured: int = 0

    def faulted_and_resident(self) -> tuple[int, int]:
        return self.own + self.written, SHARED + self.own

    def memory(self) -> int:
        self.measured += 1
        return self.own + self.written


def test_processes_that_share_much_are_measured_once():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(300)]
    for _ in range(10):
        assert sum(watch.sizes(processes).values()) <= MOST
    assert max(p.measured for p in processes) == 1


def test_few_processes_are_not_measured():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(10)]
    assert all(size >= p.own for p, size in watch.sizes(processes).items())
    assert not any(p.measured for p in processes)


def test_what_grows_is_seen_at_the_next_look():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(300)]
    watch.sizes(processes)
    processes[7].own, processes[9].own = MOST, 30
    sizes = watch.sizes(processes)
    assert sum(sizes.values()) > MOST
    assert max(sizes, key=sizes.get) is processes[7]
    assert sizes[processes[7]] == MOST
    # Ended ones are forgotten.
    assert sum(watch.sizes(processes[:7]).values()) <= MOST


def test_shared_memory_that_is_written_to_is_seen_at_the_next_look():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(300)]
    watch.sizes(processes)
    for p in processes:
        p.written = 10
    assert sum(watch.sizes(processes).values()) > MOST


def test_writing_to_shared_memory_shows_at_once():
    """Of a process as it is: it has no more in memory than before."""
    size, begin, end = 2**24, os.pipe(), os.pipe()
    shared = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared.write(b"x" * size)
    process = WorkerProcess.__new__(WorkerProcess)
    with warnings.catch_warnings(action="ignore"):
        # JAX, if a test before this one has loaded it, warns of its threads, which the child does without.
        process.pid = os.fork()
    if not process.pid:
        # Only what needs no thread and no lock of the parent's.
        os.read(begin[0], 1)
        shared[:] = b"y" * size
        os.write(end[1], b"x")
        os.read(begin[0], 1)
        os._exit(0)
    try:
        before, _ = process.faulted_and_resident()
        watch = WorkerMemory(0)
        own = watch.sizes([process])[process]
        os.write(begin[1], b"x")
        os.read(end[0], 1)
        after, _ = process.faulted_and_resident()
        assert after - before >= size
        assert watch.sizes([process])[process] >= own + size // 2
    finally:
        os.write(begin[1], b"x")
        os.waitpid(process.pid, 0)


def test_the_system_itself_limits_each_process():
    """Between two looks, none can take more than its own limit."""
    code = "from dflash_jax.workers.loop import limit_memory; limit_memory(2**24); bytearray(2**26)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in ended.stderr
