"""The engine's side of the processes that walk grammars (`grammar_worker`).

A process walks some sequences of one client with one grammar. The engine's thread sends it one message a round, with
the tokens and drafts of all its sequences. Masks come back in memory that both share, and the numbers of what is
answered through a socket that all processes share: a round costs the engine's thread few system calls, however many
sequences it has.

With a process for each sequence, messages and switches would cost more than masks do. In one process for all, a grammar
could stop the sequences of other clients: its native code may take seconds or gigabytes, or crash. Where a process
ends, each of its sequences goes on in a process of its own, which walks its tokens again; where that ends, the sequence
has failed.
"""

import itertools
import json
import logging
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_worker import ANSWER
from dflash_jax.server.request_context import current
from dflash_jax.workers.loop import framed
from dflash_jax.workers.memory import WorkerMemory
from dflash_jax.workers.process import STUCK_S, WorkerProcess

log = logging.getLogger("dflash_jax.server")

# Least number of masks of a sequence that a process has memory for.
LEAST_MASKS = 32
# Seconds between two checks of the processes' memory.
WATCH_S = 0.25
# Seconds between two looks for answers where the caller does not wait, and between two looks for ended processes.
LOOK_S, ENDED_S = 0.0002, 0.01


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


def shared_file() -> int:
    """The descriptor of a file for memory that processes share."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Walker:
    """A process that walks sequences.

    Attributes:
        process: The process.
        client: Whose sequences they are.
        places: Numbers of further sequences that it may have.
        masks: uint32 [sequences, masks, words], written by the process.
        has_ended: Whether the process has ended, as far as was looked.
        steps: What the next message asks for.
    """

    def __init__(
        self, process: WorkerProcess, client: Hashable, shape: tuple[int, int, int], start: dict, answers: int
    ):
        self.process, self.client, self.places, self.has_ended = process, client, list(range(shape[0])), False
        self.steps: list[list] = []
        size = 4 * int(np.prod(shape))
        file = shared_file()
        try:
            os.ftruncate(file, size)
            self.masks = np.frombuffer(mmap.mmap(file, size), np.uint32).reshape(shape)
            socket.send_fds(process.socket, [b"\0"], [file, answers])
        finally:
            os.close(file)
        self._unsent = bytearray(framed(json.dumps(start | {"sequences": shape[0], "bytes": size}).encode()))

    def send(self) -> bool:
        """Sends what the process has room for.

        Returns:
            Whether that is everything.
        """
        if self.steps:
            self._unsent += framed(json.dumps(self.steps).encode())
            self.steps = []
        try:
            del self._unsent[: self.process.socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
            return True
        return not self._unsent


class MaskExchange:
    """What is asked of the processes, and what they answer."""

    def __init__(self):
        self._poll = select.poll()
        self._numbers = itertools.count()
        self._asked: dict[int, GrammarMask] = {}
        self._unsent: set[Walker] = set()
        self._is_new, self._looked, self._looked_for_ended = False, 0.0, 0.0

    @cached_property
    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        """What is read here, and what the processes write numbers of answers to."""
        answers, written = socket.socketpair()
        self._poll.register(answers, select.POLLIN)
        return answers, written

    @property
    def descriptor(self) -> int:
        """What the processes write numbers of answers to."""
        return self._sockets[1].fileno()

    def close(self) -> None:
        """Closes the sockets."""
        if "_sockets" in vars(self):
            for each in self._sockets:
                each.close()

    def ask(self, mask: "GrammarMask", walker: Walker, step: Iterable) -> int:
        """Adds a step of ``walker`` to its next message: its number."""
        number = next(self._numbers) % 2**32
        walker.steps.append([number, *step])
        self._asked[number] = mask
        self._unsent.add(walker)
        self._is_new = True
        return number

    def forget(self, number: int) -> None:
        """Ignores an answer."""
        self._asked.pop(number, None)

    def look(self, timeout_s: float) -> None:
        """Sends what was asked, waits up to ``timeout_s`` for an answer, and takes all that are ready."""
        now = time.monotonic()
        if timeout_s <= 0 and not self._is_new and now - self._looked < LOOK_S:
            return
        self._is_new, self._unsent = False, {walker for walker in list(self._unsent) if not walker.send()}
        if now - self._looked_for_ended > ENDED_S:
            self._looked_for_ended = now
            for walker in {walker for mask in list(self._asked.values()) if (walker := mask.walker) is not None}:
                walker.has_ended = walker.has_ended or walker.process.has_ended()
        if timeout_s > 0:
            self._poll.poll(1e3 * timeout_s)
        try:
            answers = self._sockets[0].recv(2**16, socket.MSG_DONTWAIT)
        except OSError:
            answers = b""
        for number, count in struct.iter_unpack(ANSWER, answers):
            if (mask := self._asked.pop(number, None)) is not None:
                mask.count, walker = count, mask.walker
                if walker is not None and walker.process.pid is None:
                    # Its first frame is its process id.
                    walker.has_ended = walker.process.has_ended()
        self._looked = time.monotonic()


class Grammar:
    """A compiled grammar: a process that forks those which walk it.

    Attributes:
        pool: What all processes belong to.
        exchange: What is asked of them.
        process: The process.
        notes: Parts of its schema that the grammar does not enforce.
        client: Who asked for it last.
        requested_at: When a request last asked for it, on the monotonic clock.
        users: Masks that use it.
    """

    def __init__(self, pool: GrammarPool, exchange: MaskExchange, process: WorkerProcess, words: int, notes: list[str]):
        self.pool, self.exchange, self.process, self._words, self.notes = pool, exchange, process, words, notes
        self.client, self.requested_at, self.users = current().client, time.monotonic(), 0
        self._walkers: list[Walker] = []
        self._is_kept = True

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return not self.process.has_ended()

    def use(self, masks: int) -> None:
        """More masks use the grammar; below zero, fewer."""
        with self.pool.lock:
            self.users += masks
            if not self.users and not self._is_kept:
                self.pool.end(self.process)

    def drop(self) -> None:
        """Ends the process as soon as no masks use it."""
        self._is_kept = False
        self.use(0)

    def mask(self, thought: str = "none") -> "GrammarMask":
        """The masks of one sequence of the current client; ``thought`` as in `GrammarWalk`."""
        return GrammarMask(self, thought)

    def seat(self, client: Hashable, masks: int, alone: bool) -> tuple[Walker, int]:
        """A process for a sequence, and its number there.

        Args:
            client: The sequence's client.
            masks: Masks of a round.
            alone: Whether the process has no other sequences.

        Raises:
            OSError: The grammar's process has ended.
        """
        limits = self.pool.limits
        for walker in self._walkers if not alone else ():
            if walker.client == client and walker.places and walker.masks.shape[1] >= masks and not walker.has_ended:
                return walker, walker.places.pop()
        process = self.pool.add(WorkerProcess(self.process.socket), client)
        start = {"memory_bytes": limits.memory_bytes, "step_s": limits.step_s if alone else limits.shared_s}
        shape = 1 if alone else limits.sequences, max(LEAST_MASKS, 1 << (masks - 1).bit_length()), self._words
        try:
            self._walkers.append(Walker(process, client, shape, start, self.exchange.descriptor))
        except OSError:
            self.pool.end(process)
            raise
        return self._walkers[-1], self._walkers[-1].places.pop()

    def leave(self, walker: Walker, place: int) -> None:
        """Frees a sequence's place; a process without sequences ends."""
        walker.places.append(place)
        if len(walker.places) == len(walker.masks):
            self._walkers.remove(walker)
            self.pool.end(walker.process)


class GrammarMask:
    """Masks of one sequence; the engine's `MaskProvider`.

    Attributes:
        walker: What computes them.
        count: Masks of the last answer; of an error, its bytes below zero; None where there is no answer yet.
    """

    is_over = False

    def __init__(self, grammar: Grammar, thought: str):
        self._grammar, self._thought, self._client = grammar, thought, current().client
        self.walker: Walker | None = None
        self.count: int | None = None
        self._place = self._number = self._sent = 0
        self._tokens: list[int] = []
        self._drafts: list[int] = []
        self._requested_at, self._is_closed = 0.0, False
        grammar.use(1)

    def __del__(self):
        self.close()

    def take(self, tokens: Sequence[int]) -> None:
        """See `MaskProvider`."""
        self._tokens += tokens

    def ask(self, drafts: Sequence[int]) -> None:
        """See `MaskProvider`. The next `answer` of any mask sends what is asked of all.

        Raises:
            InputError: The grammar's process has ended.
        """
        self._drafts, self._requested_at = list(drafts), time.monotonic()
        needs = self.walker is None or len(drafts) >= self.walker.masks.shape[1]
        self._ask(moves=needs)

    def _ask(self, moves: bool, alone: bool = False) -> None:
        """Asks for the masks, of another process if it ``moves``: of one that has other sequences unless ``alone``."""
        grammar, self.count = self._grammar, None
        with grammar.pool.lock:
            if moves:
                self._leave()
                try:
                    self.walker, self._place = grammar.seat(self._client, len(self._drafts) + 1, alone)
                except OSError:
                    raise InputError(self._end_reason(None)) from None
                self._sent = 0
            assert self.walker is not None, "a mask without a process"
            step = self._place, self._thought if moves else None, self._tokens[self._sent :], self._drafts
            self._number, self._sent = grammar.exchange.ask(self, self.walker, step), len(self._tokens)

    def answer(self, timeout_s: float) -> np.ndarray | None:
        """See `MaskProvider`.

        Returns:
            uint32 [drafts + 1, words], bit i of word w for token 32 w + i, until the next `ask`; None where there is
            no answer yet.

        Raises:
            InputError: The process has ended or is stuck, or refuses a token.
        """
        walker = self.walker
        assert walker is not None, "answer without ask"
        if self.count is None:
            self._grammar.exchange.look(timeout_s)
        if self.count is None:
            if walker.has_ended:
                if len(walker.masks) == 1 or walker.process.reason:
                    raise InputError(self._end_reason(walker.process))
                self._ask(moves=True, alone=True)
            if time.monotonic() - self._requested_at > STUCK_S:
                raise InputError(f"the text's form cannot be kept: a step did not answer for {STUCK_S:g} s")
            return None
        masks = walker.masks[self._place]
        if self.count < 0:
            raise InputError(masks.tobytes()[: -self.count].decode(errors="replace"))
        return masks[: len(self._drafts) + 1]

    def _end_reason(self, process: WorkerProcess | None) -> str:
        limits, reason = self._grammar.pool.limits, "its grammar's process has ended"
        if process is not None:
            most = f"{limits.step_s} s of processor time or {limits.memory_bytes >> 20} MiB"
            reason = process.reason or f"a step needed more than {most}"
        return f"the text's form cannot be kept: {reason}"

    def _leave(self) -> None:
        walker, self.walker = self.walker, None
        if walker is not None:
            self._grammar.exchange.forget(self._number)
            self._grammar.leave(walker, self._place)

    def close(self) -> None:
        """Leaves the process, and ends the use of the grammar."""
        with self._grammar.pool.lock:
            if not self._is_closed:
                self._is_closed = True
                self._leave()
                self._grammar.use(-1)
