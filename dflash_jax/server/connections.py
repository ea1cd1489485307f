"""Limits of connections: their number, the time in which a request must arrive, the size of its head.

uvicorn has none of them. They apply before any key is checked, so that an unknown client cannot use up the server.
"""

import asyncio
import contextlib
import fcntl
import json
import ssl
import struct
import termios
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Union, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dflash_jax.server.errors import RETRY_S, ApiError

# Bytes that the parser gets at a time while a head arrives.
SLICE_BYTES = 2**14
# Connections beyond the limit that get an answer (503) at a time; further ones are closed.
MOST_REFUSED = 64
# Connections with an unread answer that `enter` looks at, so that its time does not grow with their number.
MOST_LOOKS = 64
# asyncio's limit for closing a TLS connection. It counts from the start of closing however fast the client reads, so
# the limits of the HTTP protocol apply instead.
SHUTDOWN_S = 86400.0


def system_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes in the system's send buffer, those that the client's system has not acknowledged included.

    It is 0 on systems without TIOCOUTQ for sockets; Linux has it.
    """
    # A transport closes its socket one turn of the event loop before it tells its protocol (ValueError).
    with contextlib.suppress(OSError, ValueError):
        descriptor = transport.get_extra_info("socket").fileno()
        return struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0]
    return 0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    Attributes:
        connections: Connections at a time.
        head_bytes: Bytes of a request's line and headers, and of the trailer after its last chunk.
        head_lines: Headers of a request.
        framing_bytes: Bytes of a body's chunked encoding beside its content.
        pipelined: Requests that a connection may send before the previous one is answered.
        head_s: Seconds in which a request's head must arrive, and a TLS handshake be done.
        stall_s: Seconds that a body may pause.
        body_s: Seconds that a body has to arrive, and one more for each ``body_rate`` bytes received.
        body_rate: Bytes per second.
        idle_s: Seconds that a connection may wait between two requests.
        unread_s: Seconds that an answer may wait for its client to read it, and one more for each ``unread_rate`` bytes
            read.
        unread_rate: Bytes per second.
        discard_bytes: Bytes that are read after an answer to an incomplete request, so that its client can read it.
        discard_s: Seconds that these bytes may pause; all of them must arrive in the time of a body.
    """

    connections: int = 4096
    head_bytes: int = 2**16
    head_lines: int = 100
    framing_bytes: int = 2**18
    pipelined: int = 16
    head_s: float = 20.0
    stall_s: float = 20.0
    body_s: float = 20.0
    body_rate: int = 2**16
    idle_s: float = 65.0
    unread_s: float = 120.0
    unread_rate: int = 2**9
    discard_bytes: int = 2**28
    discard_s: float = 10.0


Connection = Union["LimitedProtocol", "TlsHandshake"]


class ConnectionTable:
    """At most ``most`` connections.

    Connections that may be closed are in queues, in the order in which they began to wait or to send a body, so that
    `enter` takes the same time for any number of them. A connection whose request is being answered is never closed.
    """

    def __init__(self, most: int):
        self._most = most
        # Aborted connections are removed at once, although asyncio reports their loss one turn later.
        self._open: set[Connection] = set()
        # Queues in the order in which they are closed, each from its first: without a request; without a request, but
        # with an unread answer; with a body that still arrives.
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._unread: OrderedDict[Connection, None] = OrderedDict()
        self._arriving: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, new: Connection) -> bool:
        """Adds a connection. Where there are too many, another one that is not being answered is closed.

        Returns:
            Whether the new connection may send requests. False: it is to be refused, or was closed where too many are
            refused already.
        """
        self._open.add(new)
        if len(self._open) <= self._most:
            return True
        if not self._idle:
            # Connections whose answer was read meanwhile are idle now.
            for connection in [c for c in islice(self._unread, MOST_LOOKS) if not c.is_unread]:
                self._idle[connection] = self._unread.pop(connection)
        if queue := self._idle or self._unread or self._arriving:
            self._abort(next(iter(queue)))
            return True
        if len(self._open) > self._most + MOST_REFUSED:
            self._abort(new)
        return False

    def set_waiting(self, connection: Connection) -> None:
        """Marks a connection as waiting for a request."""
        self.set_busy(connection)
        if connection in self._open:
            (self._unread if connection.is_unread else self._idle)[connection] = None

    def set_arriving(self, connection: Connection) -> None:
        """Marks a connection whose only request's body is arriving."""
        self.set_busy(connection)
        if connection in self._open:
            self._arriving[connection] = None

    def set_busy(self, connection: Connection) -> None:
        """Marks a connection whose request is being answered."""
        for queue in (self._idle, self._unread, self._arriving):
            queue.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Removes a connection that is closed or about to be."""
        self.set_busy(connection)
        self._open.discard(connection)

    def _abort(self, connection: Connection) -> None:
        self.leave(connection)
        connection.transport.abort()


class _AnswerTransport:
    """The transport for the sender of one answer. To close it closes the connection after that answer, not at once."""

    def __init__(self, protocol: "LimitedProtocol", cycle: RequestResponseCycle):
        self._protocol, self._cycle = protocol, cycle
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_after(self._cycle)


class LimitedProtocol(HttpToolsProtocol):
    """A connection within limits.

    A request is in one of three phases: its head arrives, its body arrives, or it is complete. A fourth phase follows
    an answer to an incomplete request: the connection's last, in which data is read and discarded. Closing at once
    would reset the connection, and a client that still sends would lose the answer (RFC 9112, 9.6).

    Attributes:
        limits: The limits.
        table: All connections of the server.
        raw_transport: The connection below TLS; None without TLS.
        began: When the phase began, on the event loop's clock.
    """

    def __init__(self, limits: ConnectionLimits, table: ConnectionTable, **options):
        super().__init__(**options)
        self.limits, self.table = limits, table
        self.raw_transport: asyncio.Transport | None = None
        self._phase = "head"
        self.began = self._last_data = self.loop.time()
        # Bytes received since the last byte of a body or of a completed part of the request.
        self._overhead = 0
        # Bytes of the body's chunked encoding beside its content.
        self._framing = 0
        # Bytes of the body.
        self._received = 0
        # Bytes received after an answer to an incomplete request.
        self._discarded = 0
        self._has_many_headers = False
        # Unread bytes of answers when they were last counted, and the time up to which the client read fast enough.
        self._unread, self._read = 0, 0.0
        self._timer: asyncio.TimerHandle | None = None

    # asyncio's callbacks.
    def connection_made(self, transport: asyncio.Transport) -> None:
        """Enters the connection into the table, or refuses it."""
        super().connection_made(transport)
        self._watch()
        if self.table.enter(self):
            self._update_table()
        else:
            self.refuse(ApiError(503, f"the server has {self.limits.connections} connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection from the table."""
        super().connection_lost(exc)
        self.table.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def shutdown(self) -> None:
        """Closes the connection when the server stops."""
        # Closing a TLS connection twice would discard its unsent bytes.
        if self.transport.is_closing():
            return
        if self._phase == "discarding":
            self.transport.close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Starts the clock of an unread answer."""
        super().pause_writing()
        self._unread, self._read = self._unread_bytes(), self.loop.time()

    def _unread_bytes(self) -> int:
        """Bytes of answers in this process and in the system's buffer.

        The system takes more only when a large part of its buffer is free, so a slow client's progress shows there
        first.
        """
        return self._process_bytes() + system_bytes(self.raw_transport or self.transport)

    def _process_bytes(self) -> int:
        """Bytes of answers in this process, which closing the connection would lose."""
        # TLS counts only bytes that it has not passed to the connection below, which has a buffer too.
        below = 0 if self.raw_transport is None else self.raw_transport.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + below

    @property
    def is_unread(self) -> bool:
        """Whether a complete answer waits for its client to read it."""
        return self._process_bytes() > 0 and (self.is_waiting or self.transport.is_closing())

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being received or answered. What is discarded does not count."""
        is_answered = self.cycle is None or self.cycle.response_complete or self._phase == "discarding"
        return is_answered and not self.pipeline

    def _update_table(self) -> None:
        if self.is_waiting:
            self.table.set_waiting(self)
        elif self._phase == "body" and not self.pipeline:
            self.table.set_arriving(self)
        else:
            self.table.set_busy(self)

    def data_received(self, data: bytes) -> None:
        """Parses data in slices and checks the limits of size."""
        self._last_data = self.loop.time()
        self._unset_keepalive_if_required()
        at = 0
        while at < len(data) and self._is_parsing:
            part = data[at : at + (len(data) if self._phase == "body" else SLICE_BYTES)]
            at += len(part)
            self._overhead += len(part)
            self._framing += len(part)
            self._parse(part)
            if self._overhead > self.limits.head_bytes:
                self._refuse_head()
            elif self._phase == "body" and self._framing > self.limits.framing_bytes:
                self.refuse(ApiError(400, "the body's chunks are too small"))
        if self._phase == "discarding":
            self._discarded += len(data) - at
            if self._discarded > self.limits.discard_bytes:
                self.transport.abort()

    @property
    def _is_parsing(self) -> bool:
        return self._phase != "discarding" and not self.transport.is_closing()

    def _parse(self, data: bytes) -> None:
        while data and self._is_parsing:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as e:
                if self.parser.get_method() == b"CONNECT":
                    self.refuse(ApiError(405, "the method CONNECT is not supported"))
                    return
                # The parser takes data after this head for another protocol's. A server may ignore an upgrade (RFC
                # 9110, 7.8): the head is parsed again without it, then its body and further requests.
                data = self._head_without_upgrade() + data[e.args[0] :]
                # This parser ignores data after a request that is its connection's last.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _head_without_upgrade(self) -> bytes:
        line = (self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode("ascii"))
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([b" ".join(line), b"\r\n", *headers, b"\r\n"])

    def _refuse_head(self) -> None:
        limits = self.limits
        message = f"the request's head has more than {limits.head_bytes} bytes or {limits.head_lines} headers"
        self.refuse(ApiError(431, message))

    def refuse(self, error: ApiError) -> None:
        """Answers a request that is not parsed further."""
        if not self._is_parsing:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self._phase != "body" or self.pipeline:
                # The answer to another request is being sent; a second answer would corrupt it.
                self.transport.abort()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(error.body).encode("ascii")
        head = [STATUS_LINE[error.status_code], b"content-type: application/json\r\nconnection: close\r\n"]
        if error.status_code == 503:
            head.append(b"retry-after: %d\r\n" % RETRY_S)
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        self.transport.write(b"".join([*head, body]))
        self._discard()

    def close_after(self, cycle: RequestResponseCycle) -> None:
        """Closes the connection after the answer of ``cycle``, or after its failure."""
        if cycle.response_complete and self._phase != "whole":
            self._discard()
        else:
            self.transport.close()

    def _discard(self) -> None:
        """Discards all further data until the client closes, or a limit is reached."""
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self.flow.resume_reading()
        self._phase, self.began = "discarding", self.loop.time()
        self._unread, self._read = self._unread_bytes(), self.began
        self._update_table()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser refuses."""
        if self._has_many_headers:
            self._refuse_head()
        else:
            self.refuse(ApiError(400, msg))

    # The parser's callbacks.
    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= self.limits.pipelined:
            self.transport.abort()
        super().on_message_begin()
        self._phase, self.began = "head", self.loop.time()
        self._update_table()
        self._watch()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header arrived.

        Raises:
            ValueError: There are too many headers.
        """
        if len(self.headers) >= self.limits.head_lines:
            self._has_many_headers = True
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.parser.should_upgrade():
            return
        self._phase, self._overhead, self._framing, self._received = "body", 0, 0, 0
        self.began = self.loop.time()
        super().on_headers_complete()
        self._update_table()

    def on_body(self, body: bytes) -> None:
        """A part of the body arrived."""
        self._overhead, self._framing, self._received = 0, self._framing - len(body), self._received + len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return
        self._phase, self._overhead = "whole", 0
        super().on_message_complete()
        self._update_table()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app) -> None:
        async def answer(scope, receive, send) -> None:
            async def send_message(message) -> None:
                if not cycle.response_started and cycle.more_body:
                    # The client may send the rest of its request, or not (Expect: 100-continue).
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, send_message)

        cycle.transport = cast("asyncio.Transport", _AnswerTransport(self, cycle))
        super()._start_asgi_task(cycle, answer)

    def on_response_complete(self) -> None:
        """The answer was written."""
        if self._phase == "discarding":
            return
        super().on_response_complete()
        if not self.flow.write_paused:
            self._unread, self._read = self._unread_bytes(), self.loop.time()
        self._update_table()

    # Time.
    def _watch(self) -> None:
        """Checks the deadline of the phase, and sets a timer for the next check."""
        if self._timer is not None:
            self._timer.cancel()
        # TLS still waits for its client to close when all bytes are read.
        if self.transport.is_closing() and not self.is_unread and self.raw_transport is None:
            return
        now, due = self.loop.time(), self._due()
        if now >= due:
            self._expire()
        else:
            self._timer = self.loop.call_at(due, self._watch)

    def _due(self) -> float:
        limits, now = self.limits, self.loop.time()
        if self.transport.is_closing():
            return self._unread_until(now)
        if self._phase == "discarding":
            arrived = self.began + limits.body_s + self._discarded / limits.body_rate
            due = min(max(self.began, self._last_data) + limits.discard_s, arrived)
            return max(due, self._unread_until(now)) if self.is_unread else due
        if self._phase == "head":
            return self.began + limits.head_s
        if self._phase == "body" and not self.flow.read_paused:
            arrived = self.began + limits.body_s + self._received / limits.body_rate
            return min(self._last_data + limits.stall_s, arrived)
        if self.flow.write_paused or self.is_unread:
            return self._unread_until(now)
        if self.is_waiting:
            return max(self._last_data, self._read) + limits.idle_s
        return now + min(limits.head_s, limits.stall_s, limits.idle_s, limits.unread_s)

    def _unread_until(self, now: float) -> float:
        """The deadline of an unread answer.

        Time that the client gains by reading faster than ``unread_rate`` is not saved up, so that the rest of a large
        answer cannot wait for hours.
        """
        unread, limits = self._unread_bytes(), self.limits
        self._read = min(now, self._read + max(0, self._unread - unread) / limits.unread_rate)
        self._unread = unread
        return self._read + limits.unread_s

    def _expire(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._phase in ("head", "body") and self.headers is not None:
            self.refuse(ApiError(408, "the request did not arrive in time"))
        else:
            self.transport.abort()


class TlsHandshake(asyncio.Protocol):
    """The protocol of a connection until its handshake is done; then ``http`` takes over.

    The connection counts from its beginning, and has the time of a request's head. asyncio would finish the handshake
    before the HTTP protocol sees the connection, so that no limit would apply to it.

    Attributes:
        is_unread: False: no answer waits, see `LimitedProtocol`.
        transport: The connection below TLS.
    """

    is_unread = False

    def __init__(self, context: ssl.SSLContext, http: LimitedProtocol):
        self._context, self._http = context, http
        # Data that arrives with the end of the handshake, before the HTTP protocol takes over.
        self._early, self._has_ended = bytearray(), False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Enters the connection into the table and starts the handshake."""
        self.transport = transport
        # uvicorn closes all of its connections by `shutdown` when it ends.
        self._http.connections.add(cast("LimitedProtocol", self))
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
            http.connections.discard(cast("LimitedProtocol", self))
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


def protocol(limits: ConnectionLimits = ConnectionLimits(), tls: ssl.SSLContext | None = None):
    """The ``http`` argument of uvicorn, which makes the protocol of each connection.

    Args:
        limits: Limits of all connections.
        tls: The TLS context; None without TLS.
    """
    table = ConnectionTable(limits.connections)

    def make(**options) -> asyncio.Protocol:
        http = LimitedProtocol(limits, table, **options)
        return http if tls is None else TlsHandshake(tls, http)

    return make
