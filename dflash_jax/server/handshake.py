"""TLS handshakes as connections: counted among them, and with as much time as a request's head.

asyncio would make a handshake before the HTTP protocol sees the connection, which no limit would then hold for.
"""

import asyncio
import ssl
from typing import Any, Protocol

# asyncio's limit of a TLS connection's end, which counts from its beginning, however fast the client reads: `http` has
# its own.
SHUTDOWN_S = 86400.0


class HttpProtocol(Protocol):
    """What a handshake needs of the HTTP protocol that gets the connection, a `LimitedProtocol`."""

    connections: set
    table: Any
    limits: Any
    loop: asyncio.AbstractEventLoop
    raw_transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None: ...

    def data_received(self, data: bytes) -> None: ...


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is done; then ``http`` has it.

    Attributes:
        is_unread: That no answer waits, as of a `LimitedProtocol`.
        transport: The connection without TLS.
    """

    is_unread = False

    def __init__(self, context: ssl.SSLContext, http: HttpProtocol):
        self._context, self._http = context, http
        # What arrives with the handshake's end, before the HTTP protocol has the connection.
        self._early, self._has_ended = bytearray(), False

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self._http.connections.add(self)
        # A client can read a refusal only behind the handshake: the HTTP protocol sends it.
        self._http.table.enter(self)
        self._http.table.set_waiting(self)
        self._task = self._http.loop.create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        http, limits = self._http, self._http.limits
        try:
            if self.transport.is_closing():
                return
            transport = await http.loop.start_tls(
                self.transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limits.head_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:
            # A client that fails to shake hands has nothing to be told.
            self.transport.abort()
            return
        finally:
            http.connections.discard(self)
            http.table.leave(self)
        if self._has_ended or transport is None:
            self.transport.abort()
            return
        transport.set_protocol(http)
        http.raw_transport = self.transport
        http.connection_made(transport)
        if self._early:
            http.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def eof_received(self) -> None:
        self._has_ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_ended = True

    def shutdown(self) -> None:
        """What the HTTP server calls of every connection when it stops."""
        self.transport.abort()
