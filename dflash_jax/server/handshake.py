"""TLS handshakes as connections: they count among the connections, and have the time of a request's head.

asyncio would finish a handshake before the HTTP protocol sees the connection, so that no limit would apply to it.
"""

import asyncio
import ssl
from typing import Any, Protocol, cast

# asyncio's limit for closing a TLS connection. It counts from the start of closing however fast the client reads, so
# the limits of the HTTP protocol apply instead.
SHUTDOWN_S = 86400.0


class HttpProtocol(Protocol):
    """The HTTP protocol that gets the connection; `LimitedProtocol` implements it.

    Attributes:
        connections: Open connections of the server.
        table: The connection table.
        limits: Limits of connections.
        loop: The event loop.
        raw_transport: The connection below TLS.
    """

    connections: set
    table: Any
    limits: Any
    loop: asyncio.AbstractEventLoop
    raw_transport: asyncio.Transport | None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Takes over the connection after the handshake."""

    def data_received(self, data: bytes) -> None:
        """Parses data that arrived with the handshake."""


class TlsHandshake(asyncio.Protocol):
    """The protocol of a connection until its handshake is done; then ``http`` takes over.

    Attributes:
        is_unread: False: no answer waits, see `LimitedProtocol`.
        transport: The connection below TLS.
    """

    is_unread = False

    def __init__(self, context: ssl.SSLContext, http: HttpProtocol):
        self._context, self._http = context, http
        # Data that arrives with the end of the handshake, before the HTTP protocol takes over.
        self._early, self._has_ended = bytearray(), False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Enters the connection into the table and starts the handshake."""
        self.transport = transport
        self._http.connections.add(self)
        # A refusal is readable only after the handshake, so the HTTP protocol sends it.
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
            # Without a handshake, the client cannot read an answer.
            self.transport.abort()
            return
        finally:
            http.connections.discard(self)
            http.table.leave(self)
        if self._has_ended or transport is None:
            self.transport.abort()
            return
        # `http` has asyncio.Protocol's methods without deriving from it.
        transport.set_protocol(cast("asyncio.Protocol", http))
        http.raw_transport = self.transport
        http.connection_made(transport)
        if self._early:
            http.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        """Keeps early data."""
        self._early += data

    def eof_received(self) -> None:
        """Notes that the client has closed."""
        self._has_ended = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes that the connection is gone."""
        self._has_ended = True

    def shutdown(self) -> None:
        """Closes the connection when the server stops."""
        self.transport.abort()
