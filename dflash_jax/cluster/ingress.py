"""An address of a cluster: a supervisor of fronts, which answer for all engines that are announced to it."""

import asyncio
import logging
import threading
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress

from dflash_jax.cluster.front_process import Engines, words_of
from dflash_jax.cluster.link import tls_of
from dflash_jax.process import end_process
from dflash_jax.server.launch import check_extra, set_logging
from dflash_jax.server.supervisor import Supervisor

log = logging.getLogger("dflash_jax.cluster")

FRONT = "dflash_jax.cluster.front_process"
# Seconds without an announcement after which an engine gets no further requests.
FORGET_S = 30.0


class IngressServer(Supervisor):
    """The fronts of an ingress, on a thread of their supervisor's, which hears no signals. Any thread may call it.

    Args:
        args: The arguments of `dflash cluster`.
        secret: What fronts and engines prove to each other.

    Attributes:
        engines: Host and port of each engine, by name.
    """

    def __init__(self, args: Namespace, secret: bytes):
        set_logging(args)
        check_extra()
        tls_of(args)
        super().__init__(args, words_of(args), front=FRONT)
        self._secret, self._has_begun, self._error = secret, threading.Event(), None
        self.engines: dict[str, tuple[str, int]] = {}
        # When each engine is forgotten.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._thread = threading.Thread(target=self._serve, name="fronts", daemon=True)

    def start(self) -> None:
        """Starts the fronts.

        Raises:
            InputError: The address cannot be used, or the arguments are wrong.
        """
        self._thread.start()
        self._has_begun.wait()
        if self._error is not None:
            raise self._error
        log.info("listening on %s, waiting for engines", self.url)

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self._url

    def join(self, name: str, host: str, port: int) -> None:
        """An engine takes requests, or still does."""
        self._soon(self._join, name, (host, port))

    def leave(self, name: str) -> None:
        """An engine takes no further requests."""
        self._soon(self._leave, name)

    def stop(self, seconds: float = 0.0) -> None:
        """Takes no further requests, and returns when the fronts have ended, after ``seconds`` at most."""
        self._soon(self._end_after, seconds)
        self._thread.join()

    def _serve(self) -> None:
        try:
            self.run()
        except Exception as e:
            self._error = e
            if self._has_begun.is_set():
                # Another process takes its place.
                end_process(f"the fronts of an ingress have ended: {e}")
        finally:
            self._has_begun.set()

    def _soon(self, function: Callable, *arguments: object) -> None:
        # A closed loop has no fronts any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    # Its event loop.
    def _hear_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def _start_engine(self) -> None:
        # Engines announce themselves.
        self._has_begun.set()

    def _start_front(self, number: int) -> None:
        super()._start_front(number)
        self._fronts[number].send(self._announced())

    def _announced(self) -> Engines:
        return Engines(self._secret, [(name, *address) for name, address in sorted(self.engines.items())])

    def _tell(self) -> None:
        for front in self._fronts.values():
            front.send(self._announced())

    def _join(self, name: str, address: tuple[str, int]) -> None:
        if (timer := self._timers.get(name)) is not None:
            timer.cancel()
        self._timers[name] = self._loop.call_later(FORGET_S, self._forget, name)
        if self.engines.get(name) != address:
            log.info("engine %s joins at %s:%d", name, *address)
            self.engines[name] = address
            self._tell()

    def _forget(self, name: str) -> None:
        log.warning("engine %s has not announced itself for %g s", name, FORGET_S)
        self._leave(name)

    def _leave(self, name: str) -> None:
        if name in self.engines:
            log.info("engine %s leaves", name)
            del self.engines[name]
            self._timers.pop(name).cancel()
            self._tell()

    def _end_after(self, seconds: float) -> None:
        if self._phase in ("starting", "serving"):
            self._phase, self.args.drain_s = "draining", seconds
            self._begin(self._drain("the end of the cluster"))
