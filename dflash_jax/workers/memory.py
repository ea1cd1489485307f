"""Memory of many worker processes, without measuring all of them each time.

The system counts a process's private pages by walking over all of its pages (``smaps_rollup``), most of which a fork
shares with its parent. An upper bound for what was added since is cheap (``stat``): every page that is used first, or
written while shared, is a page fault.
"""

from collections.abc import Collection

from dflash_jax.workers.process import WorkerProcess


class WorkerMemory:
    """Sizes of processes, exact where that decides whether their sum exceeds ``most_bytes``."""

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        # Private, faulted and resident bytes when a process was last measured.
        self._measured: dict[WorkerProcess, tuple[int, int, int]] = {}

    def sizes(self, processes: Collection[WorkerProcess]) -> dict[WorkerProcess, int]:
        """Upper bounds of the private bytes of each process; exact values where their sum would exceed the limit."""
        seen = {process: process.faulted_and_resident() for process in processes}
        self._measured = {process: known for process, known in self._measured.items() if process in seen}
        sizes, growth = {}, {}
        for process, (faulted, resident) in seen.items():
            private, faulted_before, resident_before = self._measured.get(process, (0, 0, 0))
            # With huge pages, a fault may add more than one page.
            growth[process] = max(0, faulted - faulted_before, resident - resident_before)
            sizes[process] = private + growth[process]
        total = sum(sizes.values())
        for process in sorted(seen, key=lambda process: growth[process], reverse=True):
            if total <= self._most or not growth[process]:
                break
            total -= sizes[process]
            sizes[process] = private = process.memory()
            self._measured[process] = private, *seen[process]
            total += private
        return sizes
