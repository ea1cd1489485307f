"""The engine of one replica, on a thread of its own."""

import asyncio
import logging
import threading
import time
from argparse import Namespace

from dflash_jax.cluster.link import Listener, tls_of
from dflash_jax.errors import EngineError
from dflash_jax.server import transport
from dflash_jax.server.engine_process import FrontChannels
from dflash_jax.server.launch import WarmUpThread, end_engine, host_of, load, model_names, set_logging

log = logging.getLogger("dflash_jax.cluster")

# Seconds between two looks at whether the engine is ready, and at whether its requests have ended.
POLL_S = 0.05


class ReplicaServer:
    """An engine that answers the fronts of a cluster.

    Args:
        args: The arguments of `serve`.
        system: The `System` of its config, or None.
        secret: What fronts and engines prove to each other.
        host: Where it listens, on a free port.

    Attributes:
        address: Host and port where it listens.
        host: What fronts ask of the engine.
    """

    def __init__(self, args: Namespace, system, secret: bytes, host: str):
        set_logging(args)
        tls, listening = tls_of(args), transport.listen(host, 0)
        self.address: tuple[str, int] = listening.getsockname()[:2]
        llm = load(args, system)
        # Until `stop`: followers on other hosts make its calls.
        self._leading = llm.leading()
        self._leading.__enter__()
        self.host, self._name = host_of(args, llm), model_names(args)[0]
        self._channels, self._drain_s = FrontChannels(self.host), args.drain_s
        self._listener = Listener(listening, secret, self._channels.new, tls)
        self._warm_up = WarmUpThread(
            self.host, self.host.start_workers, args.warm_up == "full", self._tell_ready, self._end
        )
        self._is_ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fronts", daemon=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        log.info("listening to fronts on %s:%d, warming up", *self.address)
        self._warm_up.start()
        serving = asyncio.ensure_future(self._listener.serve())
        await self._is_ending.wait()
        until = self._loop.time() + self._drain_s
        while self.ongoing and self._loop.time() < until:
            await asyncio.sleep(POLL_S)
        if self.ongoing:
            log.warning("%d requests go on elsewhere: they did not end within %g s", self.ongoing, self._drain_s)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await asyncio.to_thread(end_engine, self.host)
        await self._channels.close()

    def _tell_ready(self) -> None:
        warm = self.host.warm_up
        log.info("ready: %d of %d programs compiled; as %s", warm.compiled, warm.total, self._name)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._is_ending.set)

    def start(self) -> None:
        """Starts the engine, and returns when it is ready.

        Raises:
            EngineError: The warm-up failed.
        """
        self._thread.start()
        while not self.host.is_ready:
            if not self._thread.is_alive():
                raise EngineError("the warm-up of a replica failed; its log says why")
            time.sleep(POLL_S)

    @property
    def ongoing(self) -> int:
        """Requests that have not ended."""
        return self.host.engine.open_requests

    @property
    def failure(self) -> str | None:
        """Why the engine does not work; None while it does."""
        return self.host.state().failure or (None if self._thread.is_alive() else "its thread has ended")

    def stop(self) -> None:
        """Returns when the requests under way have ended, or after the time of a drain."""
        if self._thread.is_alive():
            self._end()
            self._thread.join()
        self._leading.__exit__(None, None, None)
