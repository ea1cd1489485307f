"""Two replicas over one engine behind an ingress, all in this process, and a cut that takes a replica's streams."""

import asyncio
import contextlib
import socket
import threading

import httpx
import pytest
import uvicorn

from dflash_jax.cluster import routing
from dflash_jax.cluster.ingress import Ingress
from dflash_jax.cluster.member import Member, SharedResponses
from dflash_jax.server.response_store import ResponseStore
from dflash_jax.server.serving import Serving
from tests.server.conftest import NAME, Running, llm, started, wait_until

__all__ = ["llm"]
SECRET = "between replicas"


class Cut:
    """Ends connections of replicas at places that a test chooses, without an end of the answer.

    Attributes:
        places: For each of the next POST requests to a replica: the number of ASGI messages behind which it is cut.
        cuts: Cuts so far.
    """

    def __init__(self):
        self.places, self.cuts = [], 0

    def around(self, app):
        async def cut(scope, receive, send):
            left = self.places.pop(0) if scope["method"] == "POST" and self.places else None

            async def send_until_cut(message):
                nonlocal left
                if left == 0:
                    self.cuts += 1
                    raise ConnectionAbortedError("cut by the test")
                left = None if left is None else left - 1
                await send(message)

            with contextlib.suppress(ConnectionAbortedError):
                await app(scope, receive, send_until_cut)

        return cut


class Cluster:
    """Attributes: ingress, replicas, cut, and http, a client."""

    def __init__(self, llm, engine, api_keys=()):
        self.ingress = Ingress(SECRET, api_keys)
        store = ResponseStore()

        async def call(name, *arguments):
            return await getattr(store, name)(*arguments)

        self.cut, self.replicas = Cut(), []
        for _ in range(2):
            serving = Serving(llm, engine, [NAME, "tiny"], response_store=SharedResponses(store.size, call))
            serving.is_ready = True
            self.replicas.append(Running(serving, around=lambda app: Member(self.cut.around(app), SECRET)))
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self.ingress, ws="none", lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)

        async def serve():
            await self.ingress.start()
            for i, replica in enumerate(self.replicas):
                self.ingress.replicas.join(f"replica-{i}", replica.url)
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[listening])
            await self.ingress.stop()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        assert wait_until(lambda: self._server.started)
        self.http = httpx.Client(base_url=self.url, timeout=120)

    @property
    def counts(self):
        return self.ingress.link.counts

    def stop(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join()
        for replica in self.replicas:
            replica.stop()


@pytest.fixture(scope="session")
def cluster(llm):
    engine = started(llm)
    with pytest.MonkeyPatch.context() as patch:
        # A replica whose thread gets no time is not lost: nothing would let it join again.
        patch.setattr(routing, "ANSWER_S", 600)
        cluster = Cluster(llm, engine)
        yield cluster
        cluster.stop()
    engine.stop()
