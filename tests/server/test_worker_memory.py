"""The memory of many processes is known without measuring all of them again and again."""

from dataclasses import dataclass

from dflash_jax.server.worker_memory import REFRESHED, WorkerMemory

SHARED, MOST = 150, 2000


@dataclass(eq=False)
class Process:
    """``own`` units of memory beside the shared ones, of which it has ``written`` some."""

    own: int = 1
    written: int = 0
    measured: int = 0

    def resident(self) -> int:
        return SHARED + self.own

    def memory(self) -> int:
        self.measured += 1
        return self.own + self.written


def test_processes_that_share_much_are_measured_once_and_then_seldom():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(300)]
    assert sum(watch.sizes(processes).values()) <= MOST
    assert max(p.measured for p in processes) == 1
    before = sum(p.measured for p in processes)
    for _ in range(10):
        assert sum(watch.sizes(processes).values()) <= MOST
    assert sum(p.measured for p in processes) - before <= 10 * REFRESHED


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


def test_shared_memory_that_is_written_to_is_seen_in_time():
    watch, processes = WorkerMemory(MOST), [Process() for _ in range(300)]
    watch.sizes(processes)
    for p in processes:
        p.written = 10
    looks = next(n for n in range(1, 1000) if sum(watch.sizes(processes).values()) > MOST)
    assert looks <= 300 / REFRESHED
