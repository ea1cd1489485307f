"""The engine's process of a server: ``python -m dflash_jax.server.engine_process FD``, which the supervisor starts."""

import asyncio
from functools import partial
from typing import Any

from dflash_jax import protocol
from dflash_jax.server import supervised, wire
from dflash_jax.server.launch import WarmUpThread, end_engine, follows, host_of, load, model_names

# Seconds for the last events of requests that the end of the engine ends.
LAST_S = 2.0


class FrontChannel(wire.Channel):
    """The connection of a front.

    Args:
        host: The engine's side.

    Attributes:
        front: Its requests and calls.
    """

    def __init__(self, host):
        super().__init__(protocol.FromFront, self._receive, self._close)
        self.front = host.connect(self.send)

    def _receive(self, record: Any) -> None:
        self.front.receive(record)

    def _close(self) -> None:
        self.front.close()


class FrontChannels:
    """The connections of all fronts of an engine.

    Args:
        host: The engine's side.
    """

    def __init__(self, host):
        self._host, self._channels = host, []

    def new(self) -> FrontChannel:
        """The channel of a front that connects."""
        self._channels = [channel for channel in self._channels if not channel.has_ended]
        self._channels.append(channel := FrontChannel(self._host))
        return channel

    async def close(self) -> None:
        """Closes all connections when fronts have what ended their requests, or after some seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + LAST_S
        while any(channel.front.live for channel in self._channels) and loop.time() < until:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        for channel in self._channels:
            channel.close()
        while not all(channel.has_ended for channel in self._channels) and loop.time() < until:
            await asyncio.sleep(0.01)


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
        args, loop = self.args, asyncio.get_running_loop()
        if args.exit_on_failure:
            host.engine.on_failure = partial(loop.call_soon_threadsafe, self.send, supervised.Broken())
        channels = FrontChannels(host)
        server = await wire.listen(self.start.path, channels.new)
        self.send(supervised.Loaded())

        def tell_ready() -> None:
            ready = supervised.Ready(host.warm_up.compiled, host.warm_up.total, model_names(args)[0])
            loop.call_soon_threadsafe(self.send, ready)

        WarmUpThread(
            host, host.start_workers, args.warm_up == "full", tell_ready, partial(loop.call_soon_threadsafe, self._fail)
        ).start()
        await self._stopped.wait()
        server.close()
        await asyncio.to_thread(end_engine, host)
        await channels.close()
        return self._code

    def _fail(self) -> None:
        """Ends the process after a warm-up that failed, as the log says."""
        self._code = 1
        self.send(supervised.Failed("", self._code))
        self._stopped.set()


if __name__ == "__main__":
    supervised.run_child(EngineProcess)
