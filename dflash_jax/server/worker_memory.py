"""What many worker processes take for themselves, without measuring all of them at each look.

The system counts a process's own pages by walking over all of its pages (``smaps_rollup``), most of which a fork shares
with its parent. What it may have taken since costs next to nothing (``stat``): every page that it takes for the first
time, or writes to while it is shared, is a page fault.
"""

from collections.abc import Collection

from dflash_jax.server.worker_process import WorkerProcess


class WorkerMemory:
    """Sizes of processes, exact where that matters for whether all of them have more than ``most_bytes``."""

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        # Own, faulted and resident bytes when a process was last measured.
        self._measured: dict[WorkerProcess, tuple[int, int, int]] = {}

    def sizes(self, processes: Collection[WorkerProcess]) -> dict[WorkerProcess, int]:
        """Bytes of each process, at most: where their sum is above the limit, what each has had for itself."""
        seen = {process: process.faulted_and_resident() for process in processes}
        self._measured = {process: known for process, known in self._measured.items() if process in seen}
        sizes, growth = {}, {}
        for process, (faulted, resident) in seen.items():
            own, faulted_before, resident_before = self._measured.get(process, (0, 0, 0))
            # A fault may bring more than one page where pages are huge.
            growth[process] = max(0, faulted - faulted_before, resident - resident_before)
            sizes[process] = own + growth[process]
        total = sum(sizes.values())
        for process in sorted(seen, key=growth.get, reverse=True):
            if total <= self._most or not growth[process]:
                break
            total -= sizes[process]
            sizes[process] = own = process.memory()
            self._measured[process] = own, *seen[process]
            total += own
        return sizes
