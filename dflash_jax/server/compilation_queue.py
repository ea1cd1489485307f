"""Admission of grammars to compilation: how many compile at a time, and which one is dropped for another."""

import asyncio
from collections.abc import Hashable

from dflash_jax.server.capacity import FairCapacity, Share
from dflash_jax.server.grammar_pool import GrammarLimits
from dflash_jax.workers.process import WorkerProcess

# Seconds between two looks at the processor time of compilations.
LOOK_S = 0.05


class CompilationQueue(FairCapacity):
    """Places for compilations, of which there are ``limits.compilations``, by turns of clients.

    While a client waits, a compilation may be dropped: one of its own where it has its half of the places, else one of
    the client that has most places. A compilation has `sure_s` of processor time before it is dropped for one of its
    own client; all of a client together have that much before one is dropped for another client.

    Attributes:
        compiling: The processes that compile now, and their clients.
    """

    def __init__(self, limits: GrammarLimits):
        super().__init__(limits.compilations, "the compilation of texts' forms", limits.waiting)
        self._sure_s = limits.sure_s
        self._watch: asyncio.Task | None = None
        self.compiling: dict[WorkerProcess, Hashable] = {}

    async def place(self) -> Share:
        """Waits for a place.

        Raises:
            ApiError: 503, too many requests wait.
        """
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._drop_while_one_waits())
        return await self.take(1)

    async def _drop_while_one_waits(self) -> None:
        await asyncio.sleep(0)
        while self.waiting:
            self._drop()
            await asyncio.sleep(LOOK_S)

    def _drop(self) -> None:
        """Drops the compilation with most processor time, of the client that must make room for one that waits."""
        if any(process.reason for process in self.compiling):
            # Its place is about to be free.
            return
        used = {process: process.processor_s() for process in self.compiling}
        by_client: dict[Hashable, float] = dict.fromkeys(self.used_by, 0.0)
        for process, seconds in used.items():
            by_client[self.compiling[process]] += seconds
        richest = max(by_client, key=lambda client: (self.used_by[client], by_client[client]))
        for client in self.waiting:
            owner = client if self.used_by[client] >= self.half else richest
            longest = max((p for p in used if self.compiling[p] == owner), key=lambda p: used[p], default=None)
            if longest and (used[longest] if owner == client else by_client[owner]) > self._sure_s:
                longest.kill("the server compiles the forms of other texts: try again later")
                return
