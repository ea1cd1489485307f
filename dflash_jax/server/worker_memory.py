"""What many worker processes take for themselves, without measuring all of them at each look.

The system counts a process's own pages by walking over all of its pages (``smaps_rollup``), most of which a fork shares
with its parent. How many it has in memory costs next to nothing (``statm``), and is never less than what is its own.
"""

from collections.abc import Collection

from dflash_jax.server.worker_process import WorkerProcess

# Processes that are measured again at each look, those measured longest ago first: writing to a shared page makes it
# the process's own, which `resident` does not show.
REFRESHED = 2


class WorkerMemory:
    """Sizes of processes, exact where that matters for whether all of them have more than ``most_bytes``."""

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        # Own and resident bytes when a process was last measured, longest ago first.
        self._measured: dict[WorkerProcess, tuple[int, int]] = {}

    def sizes(self, processes: Collection[WorkerProcess]) -> dict[WorkerProcess, int]:
        """Bytes of each process, at most: where their sum is above the limit, what each has had for itself."""
        resident = {process: process.resident() for process in processes}
        self._measured = {process: known for process, known in self._measured.items() if process in resident}
        for process in list(self._measured)[:REFRESHED]:
            self._measure(process, resident[process])
        sizes, growth = {}, {}
        for process, now in resident.items():
            own, before = self._measured.get(process, (0, 0))
            growth[process] = max(0, now - before)
            sizes[process] = own + growth[process]
        total = sum(sizes.values())
        for process in sorted(resident, key=growth.get, reverse=True):
            if total <= self._most or not growth[process]:
                break
            total -= sizes[process]
            sizes[process] = self._measure(process, resident[process])
            total += sizes[process]
        return sizes

    def _measure(self, process: WorkerProcess, resident: int) -> int:
        self._measured.pop(process, None)
        self._measured[process] = own, _ = process.memory(), resident
        return own
