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
from collections.abc import Hashable, Sequence
from dataclasses import asdict

from dflash_jax.errors import InputError
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.protocol import Form
from dflash_jax.sampling_params import CLOSE, OPEN
from dflash_jax.server.capacity import FairCapacity, Share
from dflash_jax.server.errors import ApiError
from dflash_jax.server.grammar_masks import Grammar, GrammarLimits, GrammarPool, MaskExchange, richest
from dflash_jax.server.grammar_walk import GrammarTokens
from dflash_jax.server.request_context import current
from dflash_jax.workers.process import Nursery, WorkerProcess

# Seconds between two looks at the processor time of compilations.
LOOK_S = 0.05


def grammar_tokens(tokenizer: Tokenizer, vocab: int, stop_ids: Sequence[int]) -> GrammarTokens:
    """A checkpoint's tokens as grammars need them. The tokenizer must have a file."""
    blanks = [i for n in (1, 2) for i in tokenizer.encode_plain("\n" * n)]
    open_ids, close_ids = (tuple(tokenizer.encode_plain(tag)) for tag in (OPEN, CLOSE))
    return GrammarTokens(str(tokenizer.file), vocab, tuple(stop_ids), open_ids, close_ids, tuple(blanks))


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
                longest.kill("the server compiles the forms of other texts")
                return


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
        content = hashlib.sha256(json.dumps([form.kind, form.value, form.blanks]).encode()).hexdigest()
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
        limits, client = self._limits, current().client
        try:
            process = self._pool.add(await self._nursery.forked(), client)
        except OSError:
            raise ApiError(503, "structured output is being restarted") from None
        request: dict = {"kind": form.kind, "value": form.value, "field": form.field, "blanks": form.blanks}
        request |= {"memory_bytes": limits.memory_bytes, "compile_s": limits.compile_s}
        # Further compilations of a client have less of the processors.
        request["niceness"] = list(self._queue.compiling.values()).count(client)
        self._queue.compiling[process] = client
        try:
            answer = json.loads(await process.ask(json.dumps(request).encode()))
            if "error" in answer:
                raise InputError(answer["error"])
            return Grammar(self._pool, self._exchange, process, self.tokens.mask_bytes // 4, answer["notes"])
        except BaseException as e:
            self._pool.end(process)
            if not isinstance(e, EOFError):
                raise
            if process.reason is not None:
                raise ApiError(503, process.reason) from None
            if process.pid is not None or is_last:
                most = f"{limits.compile_s} s of processor time or {limits.memory_bytes >> 20} MiB"
                message = f"{form.field} cannot be compiled: it needs more than {most}, or is nested too deeply"
                raise InputError(message) from None
            self._nursery.lose(process.parent)
            return None
        finally:
            del self._queue.compiling[process]

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
