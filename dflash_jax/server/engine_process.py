"""The engine's process of a server: ``python -m dflash_jax.server.engine_process FD``, which the supervisor starts."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from dflash_jax.server import supervised
from dflash_jax.server.launch import follows, host_of, load


class EngineProcess(supervised.Child):
    """Loads the model, compiles its programs, and answers fronts until the supervisor asks for the end."""

    def __init__(self):
        super().__init__()
        self._stopped, self._code = asyncio.Event(), 0

    def receive(self, record: Any) -> None:
        """Takes a record of the supervisor."""
        assert isinstance(record, supervised.Stop), record
        self._stopped.set()

    async def work(self) -> int:
        """See `Child`."""
        args = self.args
        if args.distributed:
            is_follower = await asyncio.to_thread(follows, args)
            # JAX has handlers of its own.
            supervised.ignore_signals()
            self.send(supervised.Leads(not is_follower))
            if is_follower:
                return await asyncio.to_thread(self._follow)
        llm = await asyncio.to_thread(load, args, self.system)
        with llm.leading():
            return await self._answer(await asyncio.to_thread(host_of, args, llm))

    def _follow(self) -> int:
        with load(self.args, self.system).leading():
            return 0

    async def _answer(self, host) -> int:
        loop = asyncio.get_running_loop()

        def on_loop(function: Callable, *args: Any) -> Callable[[], Any]:
            return partial(loop.call_soon_threadsafe, function, *args)

        if self.args.exit_on_failure:
            host.engine.on_failure = on_loop(self.send, supervised.Broken())
        server = await loop.create_unix_server(host.new_channel, self.start.engine)
        self.send(supervised.Loaded())
        host.start(self.args.warm_up == "full", on_loop(self._tell_ready, host), on_loop(self._fail))
        await self._stopped.wait()
        server.close()
        await asyncio.to_thread(host.stop)
        await host.close_channels()
        return self._code

    def _tell_ready(self, host) -> None:
        self.send(supervised.Ready(host.summary))

    def _fail(self) -> None:
        """Ends the process after a warm-up that failed, as the log says."""
        self._code = 1
        self.send(supervised.Failed("", self._code))
        self._stopped.set()


if __name__ == "__main__":
    supervised.run_child(EngineProcess)
