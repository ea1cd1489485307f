"""A server whose device is a clock: all of it but the device is what `dflash serve` runs.

``python -m tools.mock_engine --bundled --port N …`` is the supervisor; the engine's process is this module, too. The
environment's DFLASH_MOCK_DEVICE describes the device, as JSON of a `MockDevice`.
"""

import asyncio
import json
import os
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_jax import LLM
from dflash_jax.engine.config import EngineConfig, prefill_config, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.options.serve import parse
from dflash_jax.server import supervised
from dflash_jax.server.engine_host import EngineHost
from dflash_jax.server.engine_process import EngineProcess
from dflash_jax.server.launch import load
from dflash_jax.server.supervisor import Supervisor
from tools.mock_runner import MockRunner

VARIABLE = "DFLASH_MOCK_DEVICE"
# The block size of the drafter that the device has.
BLOCK = 8
# Seconds between two samples of the figures.
SAMPLE_S = 0.02


@dataclass(frozen=True)
class MockDevice:
    """A device and its engine.

    Attributes:
        slots: Slots.
        positions: Positions of each.
        round_s: Seconds of a round.
        tokens: Tokens that a round yields of each sequence.
        figures: The file of `Figures`; "" for none.
        prefill_s: Seconds of a token of a prefill chunk.
    """

    slots: int
    positions: int
    round_s: float
    tokens: int
    figures: str = ""
    prefill_s: float = 5e-6

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a server with this device."""
        return os.environ | {VARIABLE: json.dumps(asdict(self))}

    def engine(self, llm: LLM) -> Engine:
        """An engine of the model's vocabulary on this device."""
        runner = MockRunner(
            self.slots,
            self.positions,
            round_s=self.round_s,
            tokens=self.tokens,
            prefill_s=self.prefill_s,
            vocabulary=_printable(llm),
            vocab_size=llm.config.vocab_size,
        )
        options = {"max_queue": 1024, "prefix_bytes": runner.pages[0] * runner.page_bytes[0] // 2, "masks": True}
        return Engine(runner, EngineConfig(speculations_of((BLOCK,)), **prefill_config("gpu", True), **options))


def _printable(llm: LLM) -> list[int]:
    """Tokens of printable ASCII, without tags such as ``<think>``."""
    assert llm.tokenizer is not None
    texts = {token: llm.tokenizer.token_bytes(token) for token in range(llm.config.vocab_size)}
    return [token for token, text in texts.items() if re.fullmatch(rb"[ -;=-~]+", text)]


class Figures(threading.Thread):
    """Samples what an engine's thread and its device do.

    Attributes:
        samples: (``time.perf_counter()``, processor seconds of the engine's thread, host seconds, dispatches, gaps) of
            each moment, totals but for the first.
    """

    def __init__(self, engine: Engine):
        super().__init__(name="figures", daemon=True)
        assert isinstance(engine.runner, MockRunner)
        self._engine, self._gaps, self._has_ended = engine, engine.runner.gaps, threading.Event()
        self.samples: list[tuple[float, float, float, int, int]] = []

    def run(self) -> None:
        """The thread."""
        statistics = self._engine.statistics
        while not self._has_ended.wait(SAMPLE_S):
            thread = next((thread for thread in threading.enumerate() if thread.name == "engine"), None)
            if thread is None or thread.ident is None:
                continue
            clock = time.pthread_getcpuclockid(thread.ident)
            dispatches, gaps = sum(statistics.dispatches.values()), len(self._gaps)
            self.samples.append((time.perf_counter(), time.clock_gettime(clock), statistics.host_s, dispatches, gaps))

    def stop(self) -> dict[str, Any]:
        """Ends the thread: the samples, and all gaps of the device in seconds."""
        self._has_ended.set()
        self.join()
        return {"samples": self.samples, "gaps": self._gaps}


class MockEngineProcess(EngineProcess):
    """An `EngineProcess` whose device is the environment's."""

    async def work(self) -> int:
        """See `Child`."""
        device = MockDevice(**json.loads(os.environ[VARIABLE]))
        llm = await asyncio.to_thread(load, self.args, self.system)
        engine = device.engine(llm)
        host = EngineHost(llm, AsyncEngine(engine), "mock", {"model_path": "bundled"})

        # There is nothing to compile.
        nothing: Any = SimpleNamespace(first=lambda prepare: prepare(), compiled=0, total=0, stop=lambda: None)
        host.warm_up = nothing
        figures = Figures(engine)
        figures.start()
        code = await self._answer(host)
        found = figures.stop()
        if device.figures:
            Path(device.figures).write_text(json.dumps(found))
        return code


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        supervised.run_child(MockEngineProcess)
    args, _ = parse(sys.argv[1:])
    sys.exit(Supervisor(args, sys.argv[1:], engine="tools.mock_engine").run())
