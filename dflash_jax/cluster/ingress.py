"""The ingress: the address of a cluster. It relays requests to replicas, and continues the streams of dead ones."""

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace

import aiohttp

from dflash_jax.cluster.member import RunHeader
from dflash_jax.cluster.metrics import merged
from dflash_jax.cluster.relay import HOP_HEADERS, Answer, Link, Relay, as_json
from dflash_jax.cluster.routing import ANSWER_S, Replica, Replicas
from dflash_jax.server.access import OPEN_PATHS, Access
from dflash_jax.server.body import Bodies, Body, check_type, has_body
from dflash_jax.server.errors import ApiError, ClientGoneError, error_response
from dflash_jax.server.limits import DEFAULT_LIMITS, Limits
from dflash_jax.server.media import MEDIA_PATHS
from dflash_jax.server.page_files import PAGE_PATHS

log = logging.getLogger("dflash_jax.cluster")

# Requests that every replica gets.
ABORT = "/abort_request"
BROADCAST = (ABORT, "/flush_cache", "/reset_prefix_cache")
# Seconds that a replica has for its answer to them.
CONTROL_S = 10.0
# Positions of a slot, for the number of values of a body: replicas check it again.
CAPACITY = 2**20


class Ingress:
    """The ASGI application of a cluster's address.

    Args:
        secret: What replicas demand of requests.
        api_keys: Keys that clients may send; empty: none is needed.
        hosts: Names that the Host header may have; None for any.
        limits: Limits of a request.
        wait_s: As `Link.wait_s`.
        origins: As `Access.origins`.

    Attributes:
        is_draining: Whether no further requests are taken.
        in_flight: Requests without a complete answer.
        link: What all requests share, once `start` has run.
    """

    def __init__(
        self,
        secret: str,
        api_keys: Sequence[str] = (),
        hosts: Collection[str] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        wait_s: float = Link.wait_s,
        origins: Collection[str] = (),
    ):
        self._secret, self.limits, self._wait_s = secret, limits, wait_s
        self._access = Access(api_keys, hosts, (*OPEN_PATHS, *PAGE_PATHS), origins)
        self.is_draining, self.in_flight = False, 0
        self._bodies = Bodies()
        self.link: Link | None = None

    @property
    def replicas(self) -> Replicas:
        """The replicas."""
        assert self.link is not None, "the ingress is not started"
        return self.link.replicas

    async def start(self) -> None:
        """Begins to watch replicas, on the running event loop."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False, read_bufsize=2**18
        )
        self.link = Link(http, self._secret, Replicas(self._look), self._wait_s)
        self._watching = asyncio.create_task(self.replicas.watch())

    async def stop(self) -> None:
        """Ends the watch, and all connections to replicas."""
        if self.link is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            await self.link.http.close()

    async def _look(self, replica: Replica) -> bool:
        assert self.link is not None
        try:
            async with self.link.request(replica, _get("/ready"), b"", RunHeader("", 0, None)) as answer:
                await answer.read()
                return answer.status == 200
        except aiohttp.ClientConnectorError as e:
            raise e.os_error from None
        except aiohttp.ClientError as e:
            raise OSError(str(e) or type(e).__name__) from None

    async def __call__(self, scope, receive, send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            return
        body = None
        self.in_flight += 1
        try:
            headers = dict(scope["headers"])
            if not scope["path"].startswith("/"):
                raise ApiError(400, f"the path {scope['path'][:64]!r} must begin with /")
            owner = self._access.check(scope)
            if self.is_draining and scope["method"] == "POST":
                raise ApiError(503, "the server is shutting down")
            content = b""
            if has_body(headers) and not self._access.is_open(scope):
                check_type(headers)
                client = owner if self._access.keys else None, (scope.get("client") or (None,))[0]
                body = Body(self._bodies, self.limits, client, self._most_bytes(scope["path"]), CAPACITY)
                content = await body.read(receive)
            await self._answer(scope, content, receive, send)
        except ApiError as e:
            await error_response(e, scope)(scope, receive, send)
        except ClientGoneError:
            pass
        finally:
            self.in_flight -= 1
            if body is not None:
                body.close()

    def _most_bytes(self, path: str) -> int:
        return self.limits.media_body_bytes if path in MEDIA_PATHS else self.limits.body_bytes

    async def _answer(self, scope, content: bytes, receive, send) -> None:
        path = scope["path"]
        if path in ("/health", "/ping"):
            await as_json({"status": "ok"}).send(send)
        elif path == "/ready":
            status = "draining" if self.is_draining else "ok" if self.replicas.open else "no replica is ready"
            answer = as_json({"status": status})
            await replace(answer, status=200 if status == "ok" else 503).send(send)
        elif path == "/metrics":
            await (await self._metrics()).send(send)
        elif path in BROADCAST:
            await (await self._broadcast(scope, content)).send(send)
        else:
            assert self.link is not None
            await Relay(self.link, scope, content, send).run(receive)

    async def _metrics(self) -> Answer:
        """The metrics of all replicas that answer."""
        assert self.link is not None
        replicas = [replica for replica in self.replicas.all if not replica.missed]
        answers = await asyncio.gather(*(self._ask(replica, _get("/metrics"), b"", ANSWER_S) for replica in replicas))
        pairs = zip(replicas, answers, strict=True)
        texts = {replica.name: answer.body for replica, answer in pairs if answer is not None}
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        return Answer(200, [(b"content-type", kind)], await asyncio.to_thread(merged, texts, self.link.counts))

    async def _broadcast(self, scope, content: bytes) -> Answer:
        """Sends a request to all replicas.

        Returns:
            The first answer that is no success, or else any.

        Raises:
            ApiError: There is no replica, or one that lives does not answer.
        """
        assert self.link is not None
        if scope["path"] == ABORT:
            for relay in self.link.waiting:
                relay.add_abort(scope, content)
        replicas = self.replicas.all
        answers = await asyncio.gather(*(self._ask(replica, scope, content, CONTROL_S) for replica in replicas))
        # One that died meanwhile has nothing any more that the request is of.
        alive = self.replicas.all
        missing = [
            replica.name
            for replica, answer in zip(replicas, answers, strict=True)
            if answer is None and replica in alive
        ]
        got = [answer for answer in answers if answer is not None]
        if missing:
            message = f"{len(got)} of {len(got) + len(missing)} replicas have answered, and not {', '.join(missing)}"
            raise ApiError(503, f"{message}: send the request again")
        if not got:
            raise ApiError(503, "no replica is ready")
        return next((answer for answer in got if answer.status != 200), got[0])

    async def _ask(self, replica: Replica, scope, content: bytes, seconds: float) -> Answer | None:
        """A replica's answer; None where it is lost, or takes more than ``seconds``."""
        assert self.link is not None
        run = RunHeader(uuid.uuid4().hex, int(time.time()), scope.get("client"))
        try:
            async with asyncio.timeout(seconds), self.link.request(replica, scope, content, run) as answer:
                headers = [(name, value) for name, value in answer.raw_headers if name.lower() not in HOP_HEADERS]
                return Answer(answer.status, headers, await answer.read())
        except (aiohttp.ClientError, OSError) as e:
            self.link.lose_unless_listening(replica, e)
        return None


def _get(path: str) -> dict:
    """The scope of the ingress's own GET request."""
    return {"method": "GET", "path": path, "headers": [(b"host", b"localhost")]}
