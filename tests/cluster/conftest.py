"""Replicas over one engine behind an ingress, all in this process, and a cut that takes a replica's streams."""

import asyncio
import contextlib
import itertools
import socket
import threading

import httpx
import pytest
import uvicorn

from dflash_jax.cluster import routing
from dflash_jax.cluster.ingress import Ingress
from dflash_jax.cluster.member import Member, SharedResponses
from dflash_jax.server.engine_host import in_process
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.serving import Serving
from tests.server.conftest import NAME, Running, hosted, llm, started, wait_until

__all__ = ["llm"]
SECRET = "between replicas"


class Cut:
    """Ends connections of replicas at places that a test chooses, without an end of the answer.

    Attributes:
        places: For each of the next POST requests to a replica: the number of ASGI messages behind which it is cut.
        cuts: Cuts so far.
        sent: ASGI messages of each request under way: by the replica's name, and by request.
    """

    def __init__(self):
        self.places, self.cuts, self.sent = [], 0, {}

    def around(self, app, name: str):
        async def cut(scope, receive, send):
            request = name, object()
            self.sent[request] = 0
            left = self.places.pop(0) if scope["method"] == "POST" and self.places else None

            async def send_until_cut(message):
                nonlocal left
                if left == 0:
                    self.cuts += 1
                    raise ConnectionAbortedError("cut by the test")
                left = None if left is None else left - 1
                await send(message)
                self.sent[request] += 1

            try:
                with contextlib.suppress(ConnectionAbortedError):
                    await app(scope, receive, send_until_cut)
            finally:
                del self.sent[request]

        return cut


class Cluster:
    """An ingress, and replicas that are started, ended and killed.

    Attributes:
        ingress: The ingress.
        replicas: What runs, by the name that the ingress knows.
        cut: Of all replicas.
        url: The address of the ingress.
        http: A client of it.
    """

    def __init__(self, llm, engine, count: int, api_keys=()):
        self.ingress, self.cut, self.replicas = Ingress(SECRET, api_keys), Cut(), {}
        self._llm, self._engine, self._store, self._numbers = llm, engine, ResponseStore(), itertools.count()
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self.ingress, ws="none", lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)

        async def serve():
            await self.ingress.start()
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[listening])
            await self.ingress.stop()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        assert wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=120)
        for _ in range(count):
            self.start_replica()

    def start_replica(self) -> str:
        """Starts a replica, and returns its name when it takes requests."""

        async def call(name, *arguments):
            return await getattr(self._store, name)(*arguments)

        shared = SharedResponses(self._store.size, call)
        host, name = hosted(self._llm, self._engine, NAME), f"replica-{next(self._numbers)}"
        serving = Serving(self._llm, in_process(host), [NAME, "tiny"], response_store=shared)
        replica = Running(serving, host, around=lambda app: Member(self.cut.around(app, name), SECRET))
        self.replicas[name] = replica
        self._on_loop(lambda: self.ingress.replicas.join(name, replica.url))
        return name

    def end_replica(self, name: str) -> None:
        """Ends a replica as its cluster does: it takes no further requests, and finishes those that it has."""
        replica = self.replicas.pop(name)
        self._on_loop(lambda: self.ingress.replicas.leave(name))
        replica.serving.is_draining = True
        assert wait_until(lambda: replica.serving.in_flight == 0)
        replica.stop()

    def _on_loop(self, call) -> None:
        async def work():
            call()

        asyncio.run_coroutine_threadsafe(work(), self.loop).result()

    @property
    def counts(self):
        return self.ingress.link.counts

    def stop(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        for replica in self.replicas.values():
            replica.stop()


@pytest.fixture(scope="session")
def engine(llm):
    engine = started(llm)
    with pytest.MonkeyPatch.context() as patch:
        # A replica whose thread gets no time is not lost: nothing would let it join again.
        patch.setattr(routing, "ANSWER_S", 600)
        yield engine
    engine.stop()


@pytest.fixture(scope="session")
def cluster(llm, engine):
    cluster = Cluster(llm, engine, 2)
    yield cluster
    cluster.stop()
