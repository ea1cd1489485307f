"""The engine behind `LLM`: made for the requests at hand, reused for the next ones."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from dflash_jax.engine.config import BATCH_SIZES
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.router import EventRouter, Message
from dflash_jax.errors import EngineError
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.ops.cache import PAGE_SIZE

PAUSED = "the LLM is paused: resume() lets it go on, and wake() after sleep()"


class _Maker(Protocol):
    """What is used of an `LLM`."""

    slots: int
    max_len: int

    @property
    def compile_s(self) -> float: ...
    def new_engine(
        self, programs: Executables, slots: int, capacity: int, policy: DraftLengthPolicy | None = None
    ) -> Engine: ...


class SyncEngine:
    """Runs sequences on one engine at a time, in the caller's thread.

    Args:
        maker: Makes engines; an `LLM`.

    Attributes:
        engine: The engine in use; None before the first request.
    """

    def __init__(self, maker: _Maker):
        self._maker = maker
        self.engine: Engine | None = None
        # What engines measured serves those that replace them.
        self._policies: dict[Executables, DraftLengthPolicy] = {}
        self._router = EventRouter()

    def submit(self, sequences: Sequence[TextSequence], programs: Executables) -> None:
        """Submits sequences to an engine that runs ``programs``."""
        engine = self._engine_for(sequences, programs)
        for sequence in sequences:
            sequence.compile_s = self._maker.compile_s
            self._router.add(sequence.request, partial(self._receive, sequence))
            engine.submit(sequence.request)

    def _receive(self, sequence: TextSequence, message: Message) -> None:
        if isinstance(message, Exception):
            sequence.fail(message)
            return
        sequence.take(message)
        if message.finish_reason:
            sequence.compile_s = self._maker.compile_s - sequence.compile_s

    def _engine_for(self, sequences: Sequence[TextSequence], programs: Executables) -> Engine:
        """An engine with enough positions and, up to the limit, slots. Requests of a smaller one are finished first."""
        need, capacity = max((sequence.request.need for sequence in sequences), default=1), PAGE_SIZE
        while capacity < need:
            capacity *= 2
        # Pages for positions that no request can have would be of no use.
        capacity = min(capacity, max(self._maker.max_len, PAGE_SIZE))
        wanted = min(len(sequences), self._maker.slots)
        slots = programs.data * next(n for n in BATCH_SIZES if n * programs.data >= wanted)
        if (engine := self.engine) is not None and engine.failure is None:
            runner = engine.runner
            if runner.programs is programs and runner.capacity >= capacity and runner.slots >= slots:
                return engine
            self.finish()
            if runner.programs is programs:
                capacity, slots = max(capacity, runner.capacity), max(slots, runner.slots)
        if engine is not None:
            engine.close()
        # The next engine needs the memory of this one.
        self.engine = engine = runner = None
        self.engine = self._maker.new_engine(programs, slots, capacity, self._policies.get(programs))
        self._policies[programs] = self.engine.policy
        return self.engine

    def policy(self, programs: Executables) -> DraftLengthPolicy | None:
        """The policy of the engines that ran ``programs``; None before the first."""
        return self._policies.get(programs)

    def step(self) -> None:
        """Runs one step of the engine and delivers its events.

        Raises:
            EngineError: There is no engine: no sequence was submitted, or the engine was interrupted; or it is paused,
                and has nothing to deliver.
        """
        if self.engine is None:
            raise EngineError("no engine: submit first")
        if self.engine.is_paused and not self.engine.has_work:
            raise EngineError(PAUSED)
        try:
            events = self.engine.step()
        except BaseException:
            # The state of an interrupted engine is unknown.
            self.engine.close()
            self.engine = None
            self._router.send_all(EngineError("the engine was interrupted"))
            raise
        self._router.send((event.request, event) for event in events)

    def finish(self) -> None:
        """Runs all requests to their ends. Raises EngineError where the engine is paused before."""
        if self.engine is not None and self.engine.is_paused and self.engine.unfinished:
            raise EngineError(PAUSED)
        while self.engine is not None and self.engine.has_work:
            self.step()

    def leave(self, sequences: Sequence[TextSequence]) -> None:
        """Ends delivery to sequences, and aborts those that have not ended. Keeps what the engine has measured."""
        for sequence in sequences:
            if self._router.remove(sequence.request) and self.engine is not None:
                self.engine.abort(sequence.request)
        if self.engine is not None:
            self.engine.policy.keep()
