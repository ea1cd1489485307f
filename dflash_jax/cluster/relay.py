"""One request of a client: sent to a replica, and to further ones where that dies."""

import asyncio
import io
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
from yarl import URL

from dflash_jax.cluster.member import INTERNAL_HEADERS, RUN_HEADER, SECRET_HEADER, RunHeader
from dflash_jax.cluster.routing import LOOK_S, Beginning, Replica, Replicas, beginnings_of
from dflash_jax.server import messages, responses
from dflash_jax.server.errors import ApiError, ClientGoneError, error_response
from dflash_jax.server.request_context import until_gone
from dflash_jax.server.resume import END, LOST, RECORD, REPLAYED
from dflash_jax.server.stream import DONE, KEEP_ALIVE, error_frame

log = logging.getLogger("dflash_jax.cluster")

# Attempts that bring nothing new, after which a request is given up.
ATTEMPTS = 4
# Aborts that are kept for a stream between two replicas: the oldest ones.
ABORTS = 16
# Answers of a replica that cannot serve: another one may.
SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS = 503, 429
RETRIED = (500, SERVICE_UNAVAILABLE)
# What a replica's stream says while nothing comes.
IDLE = (KEEP_ALIVE, messages.PING)
# Headers of one connection, not of the request or the answer, and those that every server adds.
HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect")
) | {b"date", b"server"}
# aiohttp adds no headers of its own.
SKIPPED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class LostError(Exception):
    """An attempt failed, and another one may not."""


class NotThereError(LostError):
    """Nothing listens at a replica, which never had the request."""


class FullError(Exception):
    """A replica works and has no place for the request."""


@dataclass
class Answer:
    """A complete answer."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send(self, send: Callable) -> None:
        """Sends it to the client."""
        length = [(b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, *length]})
        await send({"type": "http.response.body", "body": self.body})


@dataclass
class Counts:
    """Totals of an ingress.

    Attributes:
        resumed: Streams that went on from another replica.
        repeated: Requests without a stream that were sent again.
        failed: Requests that ended with an error for want of a replica.
    """

    resumed: int = 0
    repeated: int = 0
    failed: int = 0


@dataclass
class Link:
    """What all requests of an ingress share.

    Attributes:
        http: The client of replicas.
        secret: The cluster's secret.
        replicas: The replicas.
        wait_s: Seconds that a request waits for a replica where all are lost, or full and one of them has lost it.
        counts: Totals.
        waiting: Relays whose request no replica has at the moment.
    """

    http: aiohttp.ClientSession
    secret: str
    replicas: Replicas
    wait_s: float = 120.0
    counts: Counts = field(default_factory=Counts)
    waiting: set["Relay"] = field(default_factory=set)

    def request(self, replica: Replica, scope, body: bytes, run: RunHeader, lines: Sequence[bytes] = ()):
        """Sends a request to a replica: aiohttp's context manager of its answer."""
        given = [(name, value) for name, value in scope["headers"] if name not in HOP_HEADERS | INTERNAL_HEADERS]
        # aiohttp sends text as UTF-8. Other bytes are in no header that a replica reads.
        headers = [(name.decode("latin-1"), value.decode("utf-8", "replace")) for name, value in given]
        headers += [(SECRET_HEADER.decode(), self.secret), (RUN_HEADER.decode(), run.encode().decode())]
        query = scope.get("query_string", b"").decode("latin-1")
        path = quote(scope["path"], safe="/:@!$&'()*+,;=-._~") + (f"?{query}" if query else "")
        return self.http.request(
            scope["method"],
            URL(replica.url + path, encoded=True),
            headers=headers,
            # aiohttp warns of large bytes, and not of a file.
            data=io.BytesIO(b"".join(line + b"\n" for line in lines) + body) if body or lines else None,
            skip_auto_headers=SKIPPED,
            allow_redirects=False,
        )

    def lose_unless_listening(self, replica: Replica, error: Exception) -> bool:
        """Loses a replica where ``error`` of a request to it says that nothing listens there: whether it does."""
        is_refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
            error.os_error, ConnectionRefusedError
        )
        if is_refused:
            self.replicas.lose(replica, str(error))
        return is_refused


class Relay:
    """One request.

    Args:
        link: What all requests share.
        scope: Its ASGI scope.
        body: Its body.
        send: ASGI's ``send`` of its client.
    """

    def __init__(self, link: Link, scope, body: bytes, send: Callable):
        self._link, self._scope, self._body, self._send = link, scope, body, send
        self.aborts: list[tuple[dict, bytes]] = []
        self._run = RunHeader(uuid.uuid4().hex, int(time.time()), scope.get("client"))
        # Recorded pieces, of which the client has all events; events that it has; whether its answer has begun.
        self._lines: list[bytes] = []
        self._events, self._has_begun = 0, False
        # Whether a replica has lost it, or failed at it: then it waits where all replicas are full.
        self._was_lost = False
        self._answer: Answer | None = None

    def add_abort(self, scope, body: bytes) -> None:
        """Keeps an abort for the next replica of a stream."""
        if len(self.aborts) < ABORTS:
            self.aborts.append((scope, body))

    async def run(self, receive: Callable) -> None:
        """Answers the request.

        Raises:
            ClientGoneError: The client has disconnected.
        """
        link, tried, failures, full_since = self._link, [], 0, None
        beginnings = beginnings_of(dict(self._scope["headers"]), self._body)
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            while failures < ATTEMPTS:
                replica = await self._replica(beginnings, tried, gone)
                if replica is None:
                    break
                known = len(self._lines)
                try:
                    await self._attempt_at(replica, gone)
                    return
                except FullError:
                    tried = [*tried, replica]
                    if not all(each in tried for each in link.replicas.open):
                        continue
                    if not self._was_lost and self._answer is not None:
                        await self._answer.send(self._send)
                        return
                    full_since = time.monotonic() if full_since is None else full_since
                    if time.monotonic() - full_since >= link.wait_s:
                        break
                    await asyncio.wait({gone}, timeout=LOOK_S)
                    if gone.done():
                        raise ClientGoneError from None
                    tried = []
                except NotThereError:
                    # It is no replica any more. One that dies may join again, until it has ended.
                    continue
                except LostError as e:
                    log.info("%s at %s: %s", self._scope["path"], replica.name, e)
                    link.waiting.add(self)
                    self._was_lost, full_since = True, None
                    is_stream = self._has_begun
                    link.counts.resumed += is_stream
                    link.counts.repeated += not is_stream
                    failures = 1 if len(self._lines) > known else failures + 1
                    tried = [*tried, replica] if failures > 1 else [replica]
            await self._give_up()
        finally:
            gone.cancel()
            link.waiting.discard(self)

    async def _replica(
        self, beginnings: Sequence[Beginning], tried: Sequence[Replica], gone: asyncio.Future
    ) -> Replica | None:
        replicas = self._link.replicas
        if (replica := replicas.choose(beginnings, tried)) is not None or not replicas.has_begun:
            return replica
        self._link.waiting.add(self)
        waiting = asyncio.ensure_future(replicas.wait(beginnings, tried, self._link.wait_s))
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            waiting.cancel()
            raise ClientGoneError
        return waiting.result()

    async def _attempt_at(self, replica: Replica, gone: asyncio.Future) -> None:
        task = asyncio.ensure_future(self._attempt(replica))
        self._link.replicas.begin(replica, task)
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            if task.cancelled():
                raise LostError("the replica is lost")
            task.result()
        except (aiohttp.ClientError, OSError) as e:
            if self._link.lose_unless_listening(replica, e):
                raise NotThereError from None
            # One that dies resets connections for a moment: it gets no further attempts of this request.
            await self._link.replicas.is_ready(replica)
            raise LostError(str(e) or type(e).__name__) from None
        finally:
            self._link.replicas.end(replica, task)
            task.cancel()

    async def _attempt(self, replica: Replica) -> None:
        run = RunHeader(self._run.key, self._run.created, self._run.client, sum(len(line) + 1 for line in self._lines))
        async with self._link.request(replica, self._scope, self._body, run, self._lines) as answer:
            headers = [(name, value) for name, value in answer.raw_headers if name.lower() not in HOP_HEADERS]
            if answer.content_type == "text/event-stream":
                await self._stream(replica, answer, headers)
                return
            complete = Answer(answer.status, headers, await answer.read())
        is_refusal = answer.status == TOO_MANY_REQUESTS and self._was_lost
        if answer.status in RETRIED or is_refusal or self._has_begun:
            self._answer = complete
            # 503 is of a replica that does not work, and of one that works and has no place.
            if is_refusal or (answer.status == SERVICE_UNAVAILABLE and await self._link.replicas.is_ready(replica)):
                raise FullError
            raise LostError(f"status {answer.status}{' to a stream that goes on' if self._has_begun else ''}")
        await complete.send(self._send)

    async def _stream(self, replica: Replica, answer: aiohttp.ClientResponse, headers) -> None:
        if not self._has_begun:
            await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
            self._has_begun = True
        is_replay, rest, events = bool(self._lines), b"", []
        async for data in answer.content.iter_any():
            *complete, rest = (rest + data).split(END)
            for event in complete:
                if event.startswith(RECORD):
                    # Recorded once the client has the events: a slow client may be waited for, and the replica end.
                    await self._forward(events)
                    events = []
                    self._lines.append(event[len(RECORD) :])
                    if self in self._link.waiting:
                        await self._send_aborts(replica)
                elif event + END == REPLAYED:
                    is_replay, events = False, []
                    await self._send_aborts(replica)
                elif event + END == LOST:
                    self._link.replicas.leave(replica.name)
                    raise LostError("its engine has failed")
                elif event + END in IDLE:
                    # It only keeps the connection. It belongs to no piece, and is not repeated.
                    await self._send({"type": "http.response.body", "body": event + END, "more_body": True})
                else:
                    events.append(event)
        if is_replay or rest:
            raise LostError("the stream ended early")
        # The answer is complete: the replica's end does not end this task any more.
        if (task := asyncio.current_task()) is not None:
            self._link.replicas.end(replica, task)
        body = END.join(events) + END if events else b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _forward(self, events: Sequence[bytes]) -> None:
        if events:
            await self._send({"type": "http.response.body", "body": END.join(events) + END, "more_body": True})
            self._events += len(events)

    async def _send_aborts(self, replica: Replica) -> None:
        """Sends the replica the aborts that came while no replica had the request."""
        self._link.waiting.discard(self)
        try:
            for scope, body in self.aborts:
                async with self._link.request(replica, scope, body, self._run) as answer:
                    await answer.read()
        except aiohttp.ClientConnectorError as e:
            # The replica has the request, which is lost with it.
            raise LostError(str(e)) from None
        self.aborts = []

    async def _give_up(self) -> None:
        self._link.counts.failed += 1
        message = "the server of this request was lost, and no other can go on with it: send the request again"
        if not self._has_begun:
            if self._answer is not None:
                await self._answer.send(self._send)
                return
            error = ApiError(503, message if self._link.replicas.has_begun else "the server is warming up")
            # A response reads nothing.
            await error_response(error, self._scope)(self._scope, None, self._send)  # pyright: ignore[reportArgumentType]
            return
        error, path = ApiError(500, message), self._scope["path"]
        if path == "/v1/responses":
            last = responses.error_frame(error, self._events)
        elif path == messages.PATH:
            last = messages.error_frame(error)
        else:
            last = error_frame(error) + DONE
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


def as_json(value) -> Answer:
    """A good answer of the ingress itself."""
    return Answer(200, [(b"content-type", b"application/json")], json.dumps(value).encode())
