"""A front of a server, without JAX: ``python -m dflash_jax.server.front_process FD``, which the supervisor starts."""

import asyncio
import contextlib
import logging
import math
import resource
import socket
from collections.abc import Coroutine
from typing import Any, cast

from dflash_jax import protocol
from dflash_jax.process import leave_out_of_collections
from dflash_jax.server import cors, supervised, transport, wire
from dflash_jax.server.launch import response_store, serving_of

log = logging.getLogger("dflash_jax.server")

# The error of requests whose engine's process has ended.
LOST = "the engine's process has ended"
# Seconds between two attempts to connect to the engine.
AGAIN_S = 0.05
# Seconds for the errors of requests that a stop ends.
ERRORS_S = 5.0
# Open files beside connections: checkpoints, caches, worker processes.
OTHER_FILES = 512


class FrontProcess(supervised.Child):
    """Answers HTTP on the supervisor's listening socket, for the engine that it names."""

    def __init__(self):
        super().__init__()
        self._channel_to_engine: wire.Channel | None = None
        self._client: Any = None
        self._serving, self._server = None, None
        self._tasks: set[asyncio.Task] = set()

    def receive(self, record: Any) -> None:
        """Takes a record of the supervisor."""
        match record:
            case supervised.Drain():
                self._begin(self._end(math.inf))
                self.send(supervised.InFlight(self._in_flight))
            case supervised.Stop() if self._server is not None:
                self._begin(self._end(ERRORS_S))

    def _begin(self, work: Coroutine) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _in_flight(self) -> int:
        return 0 if self._serving is None else self._serving.in_flight

    async def _end(self, seconds: float) -> None:
        """Takes no further requests, and ends when those under way have ended, or after ``seconds``."""
        assert self._serving is not None
        assert self._server is not None
        self._serving.is_draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._in_flight and loop.time() < until:
            await asyncio.sleep(0.02)
        if self._in_flight:
            # uvicorn would report what it cancels as errors of the application.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self._server.force_exit = True
        self._server.should_exit = True

    # The engine.
    def new_client(self) -> Any:
        """What the server has in place of an engine: an `EngineClient`."""
        from dflash_jax.server.engine_client import EngineClient

        self._begin(self._connect())
        return EngineClient(self._to_engine)

    def facts_of(self, hello: protocol.Hello) -> dict[str, Any]:
        """The `ModelFacts` of the engine's model."""
        return hello.model

    def take_model(self, model: Any) -> None:
        """Called with the `FrontModel`, before there are requests."""

    async def _connect(self) -> None:
        """Keeps a connection to the engine, or to the one after it."""
        loop = asyncio.get_running_loop()
        while True:
            ended = asyncio.Event()
            self._channel_to_engine = channel = wire.Channel(protocol.FromEngine, self._client.receive, ended.set)
            # It may not listen yet.
            with contextlib.suppress(OSError):
                await loop.create_unix_connection(lambda channel=channel: channel, self.start.engine)
                await ended.wait()
            self._channel_to_engine = None
            self._client.lost(LOST)
            await asyncio.sleep(AGAIN_S)

    def _to_engine(self, record: protocol.Record) -> None:
        if self._channel_to_engine is None:
            self._client.lost(LOST)
        else:
            self._channel_to_engine.send(record)

    # HTTP.
    async def work(self) -> int:
        """See `Child`."""
        args, start = self.args, self.start
        import uvicorn

        from dflash_jax.frontend.front_model import FrontModel, ModelFacts
        from dflash_jax.frontend.tokenizer import auto_tokenizer
        from dflash_jax.server.connections import ConnectionLimits
        from dflash_jax.server.tracing import Tracer

        listening = socket.socket(fileno=start.listening)
        listening.set_inheritable(False)
        tls, origins = transport.tls_context(args), cors.of_arguments(args)
        tracer = Tracer(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
        store = response_store(args, start.store)
        self._client = self.new_client()
        # Templates need it; the engine loads meanwhile.
        await asyncio.to_thread(auto_tokenizer)
        await self._client.has_hello.wait()
        hello = self._client.hello
        # The engine has chosen a model where the arguments name none.
        args.target = None if hello.info["model_path"] == "bundled" else hello.info["model_path"]
        model = await asyncio.to_thread(lambda: FrontModel(ModelFacts(**self.facts_of(hello))))
        self.take_model(model)
        self._serving = serving = serving_of(args, model, self._client, store, start.fronts)
        await asyncio.to_thread(serving.prepare)
        limits = ConnectionLimits(connections=allow_connections(-(-args.max_connections // start.fronts)))
        self._server = uvicorn.Server(http_config(application(serving, args, origins, tracer), limits, tls))
        # Signals are the supervisor's.
        self._server.capture_signals = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]
        leave_out_of_collections()
        self.send(supervised.Ready())
        await self._server.serve(sockets=[listening])
        store.close()
        serving.stop_workers()
        if tracer is not None:
            tracer.flush()
        return 0


def application(serving, args, origins, tracer):
    """The application that the arguments describe: with keys, the log of requests, their spans, a proxy's path."""
    from dflash_jax.server.access import default_hosts
    from dflash_jax.server.app import build
    from dflash_jax.server.observe import RequestLog

    if args.enable_log_requests:
        tokenizer = serving.llm.tokenizer
        requests = RequestLog(tokenizer.decode if args.log_prompts and tokenizer else None, args.max_log_len)
        serving.on_begin.append(requests.begin)
        serving.on_end.append(requests.end)
    if tracer is not None:
        serving.on_end.append(tracer.end)
    # No page in a browser reaches a Unix socket.
    hosts = default_hosts(args.host) if args.uds is None else None
    if args.allowed_hosts is not None:
        hosts = args.allowed_hosts.split(",")
    app = build(serving, args.api_keys, hosts, origins, args.admin_api_keys)
    return transport.UnderPath(app, args.root_path) if args.root_path else app


def allow_connections(wanted: int) -> int:
    """How many connections there may be: ``wanted``, or as many as the system's limit of open files allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    possible = wanted if most == resource.RLIM_INFINITY else max(most - OTHER_FILES, 1)
    if possible < wanted:
        log.warning("at most %d connections: the limit of open files is %d", possible, most)
    return min(wanted, possible)


def http_config(app, limits, tls=None):
    """Uvicorn's configuration of an application.

    Args:
        app: The application.
        limits: `ConnectionLimits`.
        tls: The TLS context; None for plain HTTP.
    """
    import uvicorn

    from dflash_jax.server.connections import protocol

    return uvicorn.Config(
        app,
        # uvicorn calls it, and a class is not needed for that.
        http=cast("type[asyncio.Protocol]", protocol(limits, tls)),
        ws="none",
        # Its own would close all handlers of the process.
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=int(limits.idle_s),
        # A local client could choose its address by a header.
        proxy_headers=False,
    )


if __name__ == "__main__":
    supervised.run_child(FrontProcess)
