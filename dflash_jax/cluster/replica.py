"""The server of one replica, on a thread of its own."""

import asyncio
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable

from dflash_jax.cluster.member import Member, SharedResponses
from dflash_jax.errors import EngineError
from dflash_jax.server import cors, transport
from dflash_jax.server.app import build
from dflash_jax.server.connections import ConnectionLimits
from dflash_jax.server.launch import (
    HttpServer,
    WarmUpThread,
    allow_connections,
    around,
    assemble,
    end_engine,
    http_config,
    load,
    set_logging,
)
from dflash_jax.server.tracing import Tracer

log = logging.getLogger("dflash_jax.cluster")
access_log = logging.getLogger("dflash_jax.access")
# Seconds between two looks at whether the server is ready.
POLL_S = 0.05


class ReplicaServer:
    """A server that answers an ingress.

    Args:
        args: The arguments of `serve`.
        system: The `System` of its config, or None.
        secret: What it shares with the ingress.
        host: Where it listens, on a free port.
        call: What calls the ingress's store of responses, as `SharedResponses` takes it.

    Attributes:
        url: Where it listens.
        serving: The model and its engine.
    """

    def __init__(self, args: Namespace, system, secret: str, host: str, call: Callable[..., Awaitable]):
        set_logging(args)
        # The ingress looks every second.
        access_log.addFilter(lambda record: " /ready 200" not in record.getMessage())
        # The ingress is below the proxy's path, and has TLS.
        args = Namespace(**vars(args) | {"root_path": ""})
        self._listening = transport.listen(host, 0)
        self.url = transport.url(self._listening, False)
        llm = load(args, system)
        # Until `stop`: followers on other hosts make its calls.
        self._leading = llm.leading()
        self._leading.__enter__()
        self._host, self.serving = assemble(args, llm, SharedResponses(args.response_store, call))
        self._tracer = Tracer(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
        # The ingress checks the Host header.
        app = build(self.serving, args.api_keys, None, cors.of_arguments(args))
        app = around(app, self.serving, args, self._tracer)
        limits = ConnectionLimits(connections=allow_connections(args.max_connections))
        config = http_config(Member(app, secret), limits)
        self._http, self._drain_s = HttpServer(config, self.serving), args.drain_s
        self._warm_up = WarmUpThread(self._host, self._prepare, args.warm_up == "full", self._tell_ready, self._fail)
        self._loop, self._is_ending, self._has_failed = asyncio.new_event_loop(), asyncio.Event(), False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        log.info("listening on %s, warming up", self.url)
        self._warm_up.start()
        http = asyncio.ensure_future(self._http.serve(self._listening))
        await self._is_ending.wait()
        if not await self._http.drain(self._drain_s):
            log.warning("%d requests did not end within %g s", self.serving.in_flight, self._drain_s)
            ending = asyncio.ensure_future(asyncio.to_thread(self._host.engine.stop))
            await self._http.stop()
            await ending
        await http
        await asyncio.to_thread(end_engine, self._host)

    def _prepare(self) -> None:
        self.serving.prepare()
        self._host.start_workers()

    def _tell_ready(self) -> None:
        warm = self._host.warm_up
        log.info("ready: %d of %d programs compiled; as %s", warm.compiled, warm.total, self.serving.name)

    def _fail(self) -> None:
        self._has_failed = True
        self._loop.call_soon_threadsafe(self._is_ending.set)

    def start(self) -> None:
        """Starts the server, and returns when it is ready.

        Raises:
            EngineError: The warm-up failed.
        """
        self._thread.start()
        while not self.serving.is_ready:
            if self._has_failed or not self._thread.is_alive():
                raise EngineError("the warm-up of a replica failed; its log says why")
            time.sleep(POLL_S)

    @property
    def ongoing(self) -> int:
        """Requests without a complete answer."""
        return self.serving.in_flight

    @property
    def failure(self) -> str | None:
        """Why the server does not work; None while it does."""
        return self.serving.failure or (None if self._thread.is_alive() else "its HTTP server has ended")

    def stop(self) -> None:
        """Takes no further requests, and returns when those under way have ended, or after the time of a drain."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_ending.set)
            self._thread.join()
        self.serving.stop_workers()
        self._leading.__exit__(None, None, None)
        if self._tracer is not None:
            self._tracer.flush()
