"""The side of a replica: it answers the ingress alone, and takes from it what no other client may send."""

import hmac
import json
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from dflash_jax.server.errors import ApiError, ClientGoneError, error_response
from dflash_jax.server.response_store import StoredResponse
from dflash_jax.server.resume import Run

# The secret that ingress and replicas share, and the fields of `RunHeader` as JSON.
SECRET_HEADER, RUN_HEADER = b"x-dflash-cluster", b"x-dflash-run"
INTERNAL_HEADERS = frozenset((SECRET_HEADER, RUN_HEADER))


@dataclass(frozen=True)
class RunHeader:
    """What the ingress sends with each request.

    Attributes:
        key: The key of the request, as `Run` takes it.
        created: When it came, in seconds since the epoch.
        client: Host and port of the client; None behind a Unix socket.
        recorded: Bytes before the body that are recorded pieces of earlier runs, one a line.
    """

    key: str
    created: int
    client: Sequence | None
    recorded: int = 0

    def encode(self) -> bytes:
        """The header's value."""
        return json.dumps(vars(self)).encode("ascii")

    @classmethod
    def decode(cls, value: bytes) -> "RunHeader":
        """Reads the header's value."""
        return cls(**json.loads(value))


class Member:
    """An ASGI application around a replica's.

    Args:
        app: The replica's application.
        secret: What requests must have in `SECRET_HEADER`.
    """

    def __init__(self, app, secret: str):
        self.app, self._secret = app, secret.encode("ascii")

    async def __call__(self, scope, receive, send) -> None:
        """The ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(SECRET_HEADER, b""), self._secret):
            error = ApiError(403, "this server is a replica of a cluster: send requests to the cluster's address")
            await error_response(error, scope)(scope, receive, send)
            return
        given = RunHeader.decode(headers[RUN_HEADER])
        try:
            lines, receive = await _without_lines(receive, given.recorded)
        except ClientGoneError:
            return
        kept = [(name, value) for name, value in scope["headers"] if name not in INTERNAL_HEADERS]
        kept = [
            (name, b"%d" % (int(value) - given.recorded) if name == b"content-length" else value)
            for name, value in kept
        ]
        state = scope.get("state", {}) | {"run": Run(given.key, given.created, lines)}
        client = None if given.client is None else tuple(given.client)
        await self.app(scope | {"headers": kept, "client": client, "state": state}, receive, send)


async def _without_lines(receive: Callable, size: int) -> tuple[list[bytes], Callable]:
    """The lines in the first ``size`` bytes of a body, and what receives the rest of it."""
    if not size:
        return [], receive
    data, message = bytearray(), {}
    while len(data) < size:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        data += message.get("body", b"")
    messages = [{"type": "http.request", "body": bytes(data[size:]), "more_body": message.get("more_body", False)}]

    async def receive_rest():
        return messages.pop() if messages else await receive()

    return bytes(data[:size]).splitlines(), receive_rest


class SharedResponses:
    """The stored responses of all replicas, which the ingress keeps. It takes the place of a `ResponseStore`.

    Args:
        size: Most entries.
        call: ``call(name, *arguments)`` calls a method of the ingress's `ResponseStore`.

    Attributes:
        size: Most entries.
    """

    def __init__(self, size: int, call: Callable[..., Awaitable]):
        self.size, self._call = size, call

    async def get(self, owner: bytes, response_id: str) -> StoredResponse | None:
        """See `ResponseStore`."""
        return await self._call("get", owner, response_id)

    async def put(self, owner: bytes, response_id: str, entry: StoredResponse, client: Hashable = None) -> bool:
        """See `ResponseStore`."""
        return await self._call("put", owner, response_id, entry, client)

    async def delete(self, owner: bytes, response_id: str) -> bool:
        """See `ResponseStore`."""
        return await self._call("delete", owner, response_id)
