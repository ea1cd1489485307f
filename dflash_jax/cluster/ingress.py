"""An address of a cluster: a supervisor of fronts, which answer for all engines that are announced to it."""

import asyncio
import logging
import threading
import time
from argparse import Namespace
from typing import Any

from dflash_jax.cluster.front_process import Engines, words_of
from dflash_jax.cluster.link import tls_of
from dflash_jax.parallel.group import end_process
from dflash_jax.server.launch import check_extra, set_logging
from dflash_jax.server.supervisor import Supervisor

log = logging.getLogger("dflash_jax.cluster")

FRONT = "dflash_jax.cluster.front_process"
# Seconds without an announcement after which an engine gets no further requests, and between two looks at that.
FORGET_S, LOOK_S = 30.0, 1.0


class Fronts(Supervisor):
    """The fronts of an ingress. Its thread is not the process's first one, and hears no signals.

    Args:
        args: The arguments of `dflash cluster`.
        secret: What fronts and engines prove to each other.
        front: The fronts' module.

    Attributes:
        has_begun: Set when fronts are started.
        engines: Host, port and the time of the last announcement of each engine, by name.
    """

    def __init__(self, args: Namespace, secret: bytes, front: str = FRONT):
        super().__init__(args, words_of(args), front=front)
        self._secret, self.has_begun = secret, threading.Event()
        self.engines: dict[str, tuple[str, int, float]] = {}
        self._told: Engines | None = None

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._url

    def _hear_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._begin(self._forget())

    def _start_engine(self) -> None:
        """Engines announce themselves."""
        self.has_begun.set()

    def _start_front(self, number: int) -> None:
        super()._start_front(number)
        self._fronts[number].send(self._announced())

    def _announced(self) -> Engines:
        engines = [(name, host, port) for name, (host, port, _) in sorted(self.engines.items())]
        return Engines(self._secret, engines)

    def _tell(self) -> None:
        record = self._announced()
        if record != self._told:
            self._told = record
            for front in self._fronts.values():
                front.send(record)

    def join(self, name: str, host: str, port: int) -> None:
        """An engine takes requests, or still does."""
        if name not in self.engines:
            log.info("engine %s joins at %s:%d", name, host, port)
        self.engines[name] = host, port, time.monotonic()
        self._tell()

    def leave(self, name: str) -> None:
        """An engine takes no further requests."""
        if self.engines.pop(name, None) is not None:
            log.info("engine %s leaves", name)
            self._tell()

    async def _forget(self) -> None:
        """Leaves engines that announce themselves no more."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for name, (_, _, last) in list(self.engines.items()):
                if now - last > FORGET_S:
                    log.warning("engine %s has not announced itself for %g s", name, FORGET_S)
                    self.leave(name)

    async def end(self, seconds: float) -> None:
        """Takes no further requests, and ends the fronts when those under way have ended, or after ``seconds``."""
        if self._phase in ("starting", "serving"):
            self._phase, self.args.drain_s = "draining", seconds
            await self._drain("the end of the cluster")


class IngressServer:
    """The fronts of an ingress on a thread of their supervisor's.

    Args:
        args: The arguments of `dflash cluster`.
        secret: What fronts and engines prove to each other.
        front: The fronts' module.
    """

    def __init__(self, args: Namespace, secret: bytes, front: str = FRONT):
        set_logging(args)
        check_extra()
        tls_of(args)
        self._fronts, self._error = Fronts(args, secret, front), None
        self._thread = threading.Thread(target=self._run, name="fronts", daemon=True)

    def _run(self) -> None:
        try:
            self._fronts.run()
        except Exception as e:
            self._error = e
            if self._fronts.has_begun.is_set():
                # Another process takes its place.
                end_process(f"the fronts of an ingress have ended: {e}")
        finally:
            self._fronts.has_begun.set()

    def start(self) -> None:
        """Starts the fronts.

        Raises:
            InputError: The address cannot be used, or the arguments are wrong.
        """
        self._thread.start()
        self._fronts.has_begun.wait()
        if self._error is not None:
            raise self._error
        log.info("listening on %s, waiting for engines", self.url)

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._fronts.url

    @property
    def has_engines(self) -> bool:
        """Whether any engine is known."""
        return bool(self._fronts.engines)

    def join(self, name: str, host: str, port: int) -> None:
        """An engine takes requests, or still does."""
        self._soon(self._fronts.join, name, host, port)

    def leave(self, name: str) -> None:
        """An engine takes no further requests."""
        self._soon(self._fronts.leave, name)

    def _soon(self, function: Any, *arguments: Any) -> None:
        if not self._fronts.loop.is_closed():
            self._fronts.loop.call_soon_threadsafe(function, *arguments)

    def stop(self, seconds: float = 0.0) -> None:
        """Takes no further requests, and returns when the fronts have ended, after ``seconds`` at most."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._fronts.end(seconds), self._fronts.loop)
            self._thread.join()
