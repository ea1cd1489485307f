"""Structured output: compiled grammars, and masks for the engine.

Grammars are compiled and walked in separate processes, which `grammar_worker` describes. This module is the server's
side: it starts and limits the processes, caches compiled grammars, and asks for masks.
"""

import asyncio
import hashlib
import json
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.protocol import Form
from dflash_jax.server.compilation_queue import CompilationQueue, GrammarLimits
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar_walk import GrammarTokens
from dflash_jax.server.grammar_worker import REFUSAL
from dflash_jax.workers.memory import WorkerMemory
from dflash_jax.workers.process import STUCK_S, Nursery, WorkerProcess

log = logging.getLogger("dflash_jax.server")

# Seconds between two checks of the processes' memory.
WATCH_S = 0.25


class Grammar:
    """A compiled grammar: a process that forks one for each sequence.

    Attributes:
        notes: Parts of its schema that the grammar does not enforce.
        users: Masks that use it.
        requested_at: When a request last asked for it, on the monotonic clock.
    """

    def __init__(self, processes: "GrammarProcesses", process: WorkerProcess, notes: list[str]):
        self._processes, self._process, self.notes, self.users = processes, process, notes, 0
        self.requested_at = time.monotonic()

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return not self._process.has_ended()

    def mask(self, thought: str = "none") -> "GrammarMask":
        """The masks of one sequence; ``thought`` as in `GrammarWalk`."""
        return GrammarMask(self._processes, self, thought)

    def fork(self) -> WorkerProcess:
        """Starts the process of one sequence."""
        return self._processes.fork(self._process.socket)

    def end(self) -> None:
        """Ends the process."""
        self._processes.end(self._process)


class GrammarMask:
    """Masks of one sequence; the engine's `MaskProvider`."""

    is_over = False

    def __init__(self, processes: "GrammarProcesses", grammar: Grammar, thought: str):
        self._processes, self._grammar, self._thought = processes, grammar, thought
        self._process: WorkerProcess | None = None
        self._tokens: list[int] = []
        self._mask_requested_at, self._drafts, self._is_closed = 0.0, 0, False
        with processes.lock:
            grammar.users += 1

    def __del__(self):
        self.close()

    def take(self, tokens: Sequence[int]) -> None:
        """See `MaskProvider`."""
        self._tokens += tokens

    def ask(self, drafts: Sequence[int]) -> None:
        """See `MaskProvider`.

        Raises:
            InputError: The process has ended.
        """
        try:
            if self._process is None:
                self._process = self._grammar.fork()
                limits = self._processes.limits
                start = {"thought": self._thought, "memory_bytes": limits.memory_bytes, "step_s": limits.step_s}
                self._process.send(start)
            self._process.send({"tokens": self._tokens, "drafts": list(drafts)})
        except OSError:
            raise InputError(self._end_reason()) from None
        self._tokens, self._drafts, self._mask_requested_at = [], len(drafts), time.monotonic()

    def answer(self, timeout_s: float) -> np.ndarray | None:
        """See `MaskProvider`.

        Returns:
            uint32 [drafts + 1, words], bit i of word w for token 32 w + i; None where there is no answer yet.

        Raises:
            InputError: The process has ended or is stuck, or refuses a token.
        """
        tokens, process = self._processes.tokens, self._process
        assert process is not None, "answer without ask"
        try:
            payload = process.wait(timeout_s)
        except EOFError:
            raise InputError(self._end_reason()) from None
        if payload is None:
            if time.monotonic() - self._mask_requested_at > STUCK_S:
                raise InputError(f"the text's form cannot be kept: a step did not answer for {STUCK_S:g} s")
            return None
        if payload[:1] == REFUSAL:
            raise InputError(payload[1:].decode())
        masks = np.frombuffer(payload, np.uint32, offset=1).reshape(-1, tokens.mask_bytes // 4)
        rest = np.frombuffer(tokens.anything, np.uint32)
        return np.concatenate([masks, np.broadcast_to(rest, (self._drafts + 1 - len(masks), len(rest)))])

    def _end_reason(self) -> str:
        process, limits = self._process, self._processes.limits
        reason = "its grammar's process has ended"
        if process is not None:
            most = f"{limits.step_s} s of processor time or {limits.memory_bytes >> 20} MiB"
            reason = process.reason or f"a step needed more than {most}"
        return f"the text's form cannot be kept: {reason}"

    def close(self) -> None:
        """Ends the process, and the use of the grammar."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._process is not None:
            self._processes.end(self._process)
        self._processes.release(self._grammar)


class GrammarProcesses:
    """All processes of one server. Compiled grammars are cached by their content.

    Attributes:
        tokens: The checkpoint's tokens.
        limits: The limits.
        lock: Guards what the event loop, the engine's thread and the memory watch share.
    """

    def __init__(self, tokens: GrammarTokens, limits: GrammarLimits | None = None):
        self.tokens, self.limits = tokens, limits or GrammarLimits()
        self.lock = threading.RLock()
        failure = f"{tokens.file}: llguidance cannot read it, so there is no structured output"
        self._nursery = Nursery("dflash_jax.server.grammar_worker", asdict(tokens), failure)
        self._live: set[WorkerProcess] = set()
        self._watch: threading.Thread | None = None
        self._has_stopped = threading.Event()
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._tasks: dict[str, asyncio.Task] = {}
        self._waiters: dict[str, int] = {}
        self._queue = CompilationQueue(self.limits)

    def start(self) -> None:
        """Starts the nursery unless it runs. It reads the tokenizer, which takes seconds."""
        self._nursery.start()

    def stop(self) -> None:
        """Ends all processes; they cannot be started again."""
        with self.lock:
            self._has_stopped.set()
            processes, self._cache = list(self._live), OrderedDict()
        for process in processes:
            self.end(process)
            # A process without a known id ends when it reads from its closed socket.
            process.socket.close()
        self._nursery.stop()

    def fork(self, parent: socket.socket) -> WorkerProcess:
        """Has a process fork a new one."""
        return self._alive(WorkerProcess(parent))

    def _alive(self, process: WorkerProcess) -> WorkerProcess:
        with self.lock:
            self._live.add(process)
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
                self._live.discard(process)

    async def grammar(self, form: Form) -> Grammar:
        """Compiles ``form``, or waits for a running compilation of the same one.

        Raises:
            InputError: It is invalid, or exceeds a limit.
            ApiError: 503, the server is busy.
        """
        key = hashlib.sha256(f"{form.kind} {form.value}".encode()).hexdigest()
        if (grammar := self._cached(key)) is not None:
            return grammar
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._compiled(key, form))
            self._waiters[key] = 0
        task = self._tasks[key]
        self._waiters[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if self._tasks.get(key) is task:
                self._waiters[key] -= 1
                if task.done() or not self._waiters[key]:
                    # The last waiting request is gone: the compilation is cancelled.
                    del self._tasks[key], self._waiters[key]
                    task.cancel()

    def _cached(self, key: str) -> Grammar | None:
        with self.lock:
            grammar = self._cache.get(key)
            if grammar is None:
                return None
            if not grammar.is_alive:
                self._cache.pop(key).end()
                return None
            self._cache.move_to_end(key)
            grammar.requested_at = time.monotonic()
            return grammar

    def release(self, grammar: Grammar) -> None:
        """Ends a mask's use of ``grammar``."""
        with self.lock:
            grammar.users -= 1
            if not grammar.users and grammar not in self._cache.values():
                grammar.end()

    async def _compiled(self, key: str, form: Form) -> Grammar:
        async with self._queue.place():
            grammar = await self._attempt(form) or await self._attempt(form, is_last=True)
        assert grammar is not None, "the last attempt raises"
        self._keep(key, grammar)
        return grammar

    async def _attempt(self, form: Form, is_last: bool = False) -> Grammar | None:
        """Compiles once; None where the nursery has died, unless this ``is_last``."""
        process = await self._forked()
        self._queue.compiling.append(process)
        try:
            return Grammar(self, process, await self._compile(process, form))
        except BaseException as e:
            self.end(process)
            if not isinstance(e, EOFError):
                raise
            if process.reason is not None:
                raise ApiError(503, process.reason) from None
            if process.pid is not None or is_last:
                raise InputError(self._too_much(form)) from None
            self._nursery.lose(process.parent)
            return None
        finally:
            self._queue.compiling.remove(process)

    def _too_much(self, form: Form) -> str:
        limits = self.limits
        return (
            f"{form.field} cannot be compiled: it needs more than {limits.compile_s} s of processor time or "
            f"{limits.memory_bytes >> 20} MiB, or is nested too deeply"
        )

    def _keep(self, key: str, grammar: Grammar) -> None:
        with self.lock:
            self._cache[key] = grammar
            recent = time.monotonic() - self.limits.grace_s
            idle = [k for k, each in self._cache.items() if not each.users and each.requested_at < recent]
            for k in idle[: max(0, len(self._cache) - self.limits.cached)]:
                self._cache.pop(k).end()

    async def _forked(self) -> WorkerProcess:
        """A fork of the nursery, which is started unless it runs."""
        try:
            return self._alive(await self._nursery.forked())
        except OSError:
            raise ApiError(503, "structured output is being restarted") from None

    async def _compile(self, process: WorkerProcess, form: Form) -> list[str]:
        """Has ``process`` compile.

        Returns:
            What the grammar does not enforce.

        Raises:
            EOFError: The process died.
        """
        limits = self.limits
        request = {"kind": form.kind, "value": form.value, "field": form.field}
        request |= {"memory_bytes": limits.memory_bytes, "compile_s": limits.compile_s}
        answer = json.loads(await process.ask(json.dumps(request).encode()))
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["notes"]

    def _watch_memory(self) -> None:
        """Ends abandoned processes, and the largest process while all together take too much memory."""
        memory = WorkerMemory(self.limits.total_bytes)
        while not self._has_stopped.wait(WATCH_S):
            with self.lock:
                processes = list(self._live)
                for key in [key for key, grammar in self._cache.items() if not grammar.is_alive]:
                    self._cache.pop(key).end()
            for process in processes:
                if process.is_abandoned:
                    self.end(process)
            sizes = memory.sizes([process for process in processes if process.pid is not None])
            if sum(sizes.values()) > self.limits.total_bytes:
                largest = max(sizes, key=lambda process: sizes[process])
                log.warning("structured output takes %d MiB: ending the largest process", sum(sizes.values()) >> 20)
                largest.kill(f"all structured output together needs more than {self.limits.total_bytes >> 20} MiB")
