"""The engine behind `LLM`: made for what is asked, kept for what comes next."""

from collections.abc import Sequence
from typing import Protocol

from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.model_runner import ROW_SIZES
from dflash_jax.engine.request import Request
from dflash_jax.errors import EngineError
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.ops.cache import CONTEXT_CHUNK


class Maker(Protocol):
    """Who makes engines: `LLM`. ``slots``: the most that one may have; compile_s: seconds of compilation so far."""

    slots: int
    compile_s: float

    def new_engine(self, programs: Executables, slots: int, capacity: int) -> Engine: ...


class SyncEngine:
    """One engine at a time, and the rows that are in it."""

    def __init__(self, maker: Maker):
        self.maker = maker
        self.engine: Engine | None = None
        self.live: dict[Request, TextSequence] = {}

    def submit(self, rows: Sequence[TextSequence], programs: Executables) -> None:
        engine = self._ready(rows, programs)
        for row in rows:
            row.compile_s = self.maker.compile_s
            self.live[row.request] = row
            engine.submit(row.request)

    def _ready(self, rows: Sequence[TextSequence], programs: Executables) -> Engine:
        """One with enough positions and, up to the limit, slots; what runs in a smaller one is finished first."""
        need, capacity = max((row.request.need for row in rows), default=1), CONTEXT_CHUNK
        while capacity < need:
            capacity *= 2
        slots = programs.data * next(n for n in ROW_SIZES if n * programs.data >= min(len(rows), self.maker.slots))
        if (engine := self.engine) is not None and engine.failure is None:
            held = engine.device
            if held.programs is programs and held.capacity >= capacity and held.slots >= slots:
                return engine
            while engine.has_work:
                self.step()
            if held.programs is programs:
                capacity, slots = max(capacity, held.capacity), max(slots, held.slots)
        # Its memory is needed for the next one.
        self.engine = engine = None
        self.engine = self.maker.new_engine(programs, slots, capacity)
        return self.engine

    def step(self) -> None:
        try:
            events = self.engine.step()
        except BaseException:
            # Interrupted somewhere: what the state is then, nobody knows.
            self.engine = None
            for row in self.live.values():
                row.request.finish_reason, row.error = "error", EngineError("the engine was interrupted")
            self.live.clear()
            raise
        for event in events:
            if (row := self.live.get(event.request)) is not None:
                row.take(event)
                if event.finish_reason:
                    row.compile_s = self.maker.compile_s - row.compile_s
                    del self.live[event.request]

    def leave(self, rows: Sequence[TextSequence]) -> None:
        """Nobody waits for these rows any more."""
        for row in rows:
            if self.live.pop(row.request, None) is not None and self.engine is not None:
                self.engine.abort(row.request)
