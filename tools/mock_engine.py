"""A server whose device is a clock: all of it but the device is what `dflash serve` runs.

``python -m tools.mock_engine --bundled --port N …`` is the supervisor; the engine's process is this module, too. The
environment's DFLASH_MOCK_DEVICE describes the device, as JSON of a `MockDevice`.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_jax.engine.service import AsyncEngine
from dflash_jax.options.serve import parse
from dflash_jax.server import supervised
from dflash_jax.server.engine_host import EngineHost
from dflash_jax.server.engine_process import EngineProcess
from dflash_jax.server.launch import load
from dflash_jax.server.supervisor import Supervisor
from tools.mock_runner import VARIABLE, Figures, MockDevice


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
