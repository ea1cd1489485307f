"""A front of a server, without JAX: ``python -m dflash_jax.server.front_process FD``, which the supervisor starts."""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine
from typing import Any

from dflash_jax import protocol
from dflash_jax.server import cors, supervised, transport, wire
from dflash_jax.server.launch import (
    HttpServer,
    allow_connections,
    allowed_hosts,
    around,
    http_config,
    leave_out_of_collections,
    response_store,
    serving_of,
)

# The error of requests whose engine's process has ended.
LOST = "the engine's process has ended"
# Seconds before an engine is asked again whose connection has ended.
AGAIN_S = 0.2


class FrontProcess(supervised.Child):
    """Answers HTTP on the supervisor's listening socket, for the engine that it names."""

    def __init__(self):
        super().__init__()
        self._channel_to_engine: wire.Channel | None = None
        self._client: Any = None
        self._path, self._connecting, self._imported = "", asyncio.Lock(), asyncio.Event()
        self._has_hello = asyncio.Event()
        self._serving, self._http = None, None
        self._tasks: set[asyncio.Task] = set()

    def receive(self, record: Any) -> None:
        """Takes a record of the supervisor."""
        match record:
            case supervised.Connect(path):
                self._path = path
                self._begin(self._connect())
            case supervised.Ping():
                self.send(supervised.Pong())
            case supervised.Count():
                self.send(supervised.InFlight(self._in_flight))
            case supervised.Drain():
                assert self._http is not None
                self._begin(self._http.drain())
                self.send(supervised.InFlight(self._in_flight))
            case supervised.Stop() if self._http is not None:
                self._begin(self._http.stop())

    def _begin(self, work: Coroutine) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def _in_flight(self) -> int:
        return 0 if self._serving is None else self._serving.in_flight

    # The engine.
    def new_client(self) -> Any:
        """What the server has in place of an engine: an `EngineClient`."""
        from dflash_jax.server.engine_client import EngineClient

        return EngineClient(self._to_engine)

    def facts_of(self, hello: protocol.Hello) -> dict[str, Any]:
        """The `ModelFacts` of the engine's model."""
        return hello.model

    def take_model(self, model: Any) -> None:
        """Called with the `FrontModel`, before there are requests."""

    async def _connect(self, after_s: float = 0.0) -> None:
        """Connects to the engine that was named last."""
        await self._imported.wait()
        await asyncio.sleep(after_s)
        async with self._connecting:
            if self._channel_to_engine is None:
                channel = wire.Channel(protocol.FromEngine, self._from_engine, self._lose)
                # Where it has died meanwhile, the supervisor names the next one.
                with contextlib.suppress(OSError):
                    self._channel_to_engine = await wire.connect(self._path, channel)

    def _to_engine(self, record: protocol.Record) -> None:
        if self._channel_to_engine is None:
            self._client.lost(LOST)
        else:
            self._channel_to_engine.send(record)

    def _from_engine(self, record: Any) -> None:
        self._client.receive(record)
        if self._client.hello is not None:
            self._has_hello.set()

    def _lose(self) -> None:
        self._channel_to_engine = None
        self._client.lost(LOST)
        # It may live: a record that one side cannot read ends a connection, too.
        self._begin(self._connect(AGAIN_S))

    # HTTP.
    async def work(self) -> int:
        """See `Child`."""
        args, start = self.args, self.start
        from dflash_jax.frontend.front_model import FrontModel, ModelFacts
        from dflash_jax.frontend.tokenizer import auto_tokenizer
        from dflash_jax.server.app import build
        from dflash_jax.server.connections import ConnectionLimits
        from dflash_jax.server.tracing import Tracer

        listening = socket.socket(fileno=start.listening)
        listening.set_inheritable(False)
        tls, origins = transport.tls_context(args), cors.of_arguments(args)
        tracer = Tracer(args.otlp_traces_endpoint) if args.otlp_traces_endpoint else None
        store = response_store(args, start.path)
        self._client = self.new_client()
        self._imported.set()
        # Templates need it; the engine loads meanwhile.
        await asyncio.to_thread(auto_tokenizer)
        await self._has_hello.wait()
        hello = self._client.hello
        assert hello is not None
        # The engine has chosen a model where the arguments name none.
        args.target = None if hello.info["model_path"] == "bundled" else hello.info["model_path"]
        model = await asyncio.to_thread(lambda: FrontModel(ModelFacts(**self.facts_of(hello))))
        self.take_model(model)
        self._serving = serving = serving_of(args, model, self._client, store, start.fronts)
        await asyncio.to_thread(serving.prepare)
        app = around(build(serving, args.api_keys, allowed_hosts(args), origins), serving, args, tracer)
        limits = ConnectionLimits(connections=allow_connections(-(-args.max_connections // start.fronts)))
        self._http = HttpServer(http_config(app, limits, tls), serving)
        leave_out_of_collections()
        self.send(supervised.Accepting())
        await self._http.serve(listening)
        store.close()
        serving.stop_workers()
        if tracer is not None:
            tracer.flush()
        return 0


if __name__ == "__main__":
    supervised.run_child(FrontProcess)
