"""The server of a cluster's address: the `Ingress`, on a thread of its own."""

import asyncio
import logging
import threading
from argparse import Namespace
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import uvicorn

from dflash_jax.cluster.ingress import Ingress
from dflash_jax.server import cors, transport
from dflash_jax.server.connections import ConnectionLimits
from dflash_jax.server.launch import allow_connections, allowed_hosts, http_config, response_store, set_logging
from dflash_jax.server.limits import Limits

log = logging.getLogger("dflash_jax.cluster")


class AddressServer:
    """An HTTP server with an ingress, and the stored responses of its replicas.

    Args:
        args: The arguments of `serve`.
        secret: What the replicas demand of requests.

    Attributes:
        url: Where it listens.
        ingress: The application.
    """

    def __init__(self, args: Namespace, secret: str):
        set_logging(args)
        tls, self._store = transport.tls_context(args), response_store(args)
        self._uds, self._listening = args.uds, transport.listen(args.host, args.port, args.uds)
        self.url = transport.url(self._listening, tls is not None)
        limits = Limits(media_body_bytes=args.max_media_body)
        rules = cors.of_arguments(args)
        origins = () if rules is None else rules.origins
        self.ingress = Ingress(secret, args.api_keys, allowed_hosts(args), limits, args.wait_s, origins)
        app = transport.UnderPath(self.ingress, args.root_path) if args.root_path else self.ingress
        connections = ConnectionLimits(connections=allow_connections(args.max_connections))
        self._server = uvicorn.Server(http_config(app, connections, tls))
        self._loop = asyncio.new_event_loop()
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self.ingress.start()
        self._has_started.set()
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            await self.ingress.stop()
            transport.close(self._listening, self._uds)

    def start(self) -> None:
        """Starts the server."""
        self._thread.start()
        self._has_started.wait()
        log.info("listening on %s, waiting for replicas", self.url)

    def join(self, name: str, url: str) -> None:
        """Adds a replica, or does nothing for one that is known."""
        self._loop.call_soon_threadsafe(self.ingress.replicas.join, name, url)

    def leave(self, name: str) -> None:
        """Gives a replica no further requests."""
        self._loop.call_soon_threadsafe(self.ingress.replicas.leave, name)

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is known."""
        return bool(self.ingress.replicas.all)

    def call_store(self, name: str, *arguments) -> Future:
        """Calls a method of the `ResponseStore`."""
        return self._call(getattr(self._store, name)(*arguments))

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def drain(self, seconds: float) -> Future:
        """Takes no further requests. The result is the number of those that have not ended after ``seconds``."""
        return self._call(self._drain(seconds))

    async def _drain(self, seconds: float) -> int:
        self.ingress.is_draining = True
        until = self._loop.time() + seconds
        while self.ingress.in_flight and self._loop.time() < until:
            await asyncio.sleep(0.02)
        return self.ingress.in_flight

    def stop(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join()
        self._store.close()
