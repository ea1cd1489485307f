"""Structured output: compiled grammars, and masks for the engine.

Grammars are compiled and walked in separate processes, which `grammar_worker` describes. This module is the server's
side: it starts and limits the processes, and caches compiled grammars. What is scarce is shared by turns of clients:
places for compilations, places in the cache, and memory. `grammar_masks` asks for masks.
"""

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import asdict

from dflash_jax.errors import InputError
from dflash_jax.protocol import Form
from dflash_jax.server.compilation_queue import CompilationQueue
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar_masks import Grammar, MaskExchange
from dflash_jax.server.grammar_pool import GrammarLimits, GrammarPool, richest
from dflash_jax.server.grammar_walk import GrammarTokens
from dflash_jax.server.request_context import current
from dflash_jax.workers.process import Nursery, WorkerProcess


class GrammarProcesses:
    """All processes of one server. Compiled grammars are cached by their content.

    Attributes:
        tokens: The checkpoint's tokens.
    """

    def __init__(self, tokens: GrammarTokens, limits: GrammarLimits | None = None):
        self.tokens, self._limits = tokens, limits or GrammarLimits()
        self._pool, self._exchange = GrammarPool(self._limits), MaskExchange()
        failure = f"{tokens.file}: llguidance cannot read it, so there is no structured output"
        self._nursery = Nursery("dflash_jax.server.grammar_worker", asdict(tokens), failure)
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        # Compilations and the number of requests that wait for them, by client and content: no client waits for the
        # turn of another.
        self._tasks: dict[tuple[Hashable, str], asyncio.Task] = {}
        self._waiters: dict[tuple[Hashable, str], int] = {}
        self._queue = CompilationQueue(self._limits)

    def start(self) -> None:
        """Starts the nursery unless it runs. It reads the tokenizer, which takes seconds."""
        self._nursery.start()

    def stop(self) -> None:
        """Ends all processes; they cannot be started again."""
        self._pool.stop()
        self._nursery.stop()
        self._exchange.close()

    async def grammar(self, form: Form) -> Grammar:
        """Compiles ``form``, or waits for a running compilation of the same one.

        Raises:
            InputError: It is invalid, or exceeds a limit.
            ApiError: 503, the server is busy.
        """
        content = hashlib.sha256(f"{form.kind} {form.value}".encode()).hexdigest()
        if (grammar := self._cached(content)) is not None:
            return grammar
        key = current().client, content
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._compiled(content, form))
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
        grammar = self._cache.get(key)
        if grammar is None:
            return None
        if not grammar.is_alive:
            self._forget(key)
            return None
        self._cache.move_to_end(key)
        grammar.client, grammar.requested_at = current().client, time.monotonic()
        return grammar

    def _forget(self, key: str) -> None:
        self._cache.pop(key).drop()

    async def _compiled(self, key: str, form: Form) -> Grammar:
        with await self._queue.place():
            # Another client may have compiled the same one.
            if (cached := self._cached(key)) is not None:
                return cached
            grammar = await self._attempt(form) or await self._attempt(form, is_last=True)
        assert grammar is not None, "the last attempt raises"
        self._keep(key, grammar)
        return grammar

    async def _attempt(self, form: Form, is_last: bool = False) -> Grammar | None:
        """Compiles once; None where the nursery has died, unless this ``is_last``."""
        process, client = await self._forked(), current().client
        # Further compilations of a client have less of the processors.
        niceness = list(self._queue.compiling.values()).count(client)
        self._queue.compiling[process] = client
        try:
            notes = await self._compile(process, form, niceness)
            return Grammar(self._pool, self._exchange, process, self.tokens.mask_bytes // 4, notes)
        except BaseException as e:
            self._pool.end(process)
            if not isinstance(e, EOFError):
                raise
            if process.reason is not None:
                raise ApiError(503, process.reason) from None
            if process.pid is not None or is_last:
                raise InputError(self._too_much(form)) from None
            self._nursery.lose(process.parent)
            return None
        finally:
            del self._queue.compiling[process]

    def _too_much(self, form: Form) -> str:
        limits = self._limits
        return (
            f"{form.field} cannot be compiled: it needs more than {limits.compile_s} s of processor time or "
            f"{limits.memory_bytes >> 20} MiB, or is nested too deeply"
        )

    def _keep(self, key: str, grammar: Grammar) -> None:
        self._cache[key] = grammar
        for dead in [k for k, each in self._cache.items() if not each.is_alive]:
            self._forget(dead)
        recent = time.monotonic() - self._limits.grace_s
        idle = [k for k, each in self._cache.items() if not each.users and each.requested_at < recent]
        for _ in range(min(len(idle), len(self._cache) - self._limits.cached)):
            # The oldest of the client that has most of them.
            has_most = richest(Counter(self._cache[k].client for k in idle))
            oldest = next(k for k in idle if self._cache[k].client == has_most)
            idle.remove(oldest)
            self._forget(oldest)

    async def _forked(self) -> WorkerProcess:
        """A fork of the nursery, which is started unless it runs."""
        try:
            return self._pool.add(await self._nursery.forked(), current().client)
        except OSError:
            raise ApiError(503, "structured output is being restarted") from None

    async def _compile(self, process: WorkerProcess, form: Form, niceness: int) -> list[str]:
        """Has ``process`` compile, with so much more niceness.

        Returns:
            What the grammar does not enforce.

        Raises:
            EOFError: The process died.
        """
        limits = self._limits
        request = {"kind": form.kind, "value": form.value, "field": form.field, "niceness": niceness}
        request |= {"memory_bytes": limits.memory_bytes, "compile_s": limits.compile_s}
        answer = json.loads(await process.ask(json.dumps(request).encode()))
        if "error" in answer:
            raise InputError(answer["error"])
        return answer["notes"]
