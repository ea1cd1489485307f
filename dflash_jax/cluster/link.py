"""Connections between fronts and engines, over TCP: both ends prove the cluster's secret before any record is read.

TLS comes first where it is on, and the proofs are of the engine's certificate, too: who relays them has another one.
Who connects has `GREETING_S` seconds for all of that. Never more than `GREETINGS` connections without a proof are open:
the oldest one is closed for the next.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax import protocol
from dflash_jax.cluster.fleet import Engine, Fleet
from dflash_jax.errors import EngineError, InputError
from dflash_jax.parallel.handshake import GREETING_S, GREETINGS, NONCE, PROOF, proof_of, tune
from dflash_jax.server import transport, wire

log = logging.getLogger("dflash_jax.cluster")

# Begins what each end says. The last byte is the version.
MAGIC = b"dflash\x01\x03"
# Bytes of each end's beginning.
OPENING = len(MAGIC) + NONCE
# A reader with this limit takes one piece of a connection at a time: a channel's buffer has room for what it leaves.
ONE_PIECE = 1
# Seconds between two attempts to connect, and until an address that does not answer is tried again.
AGAIN_S, CONNECT_S = 0.5, 10.0


class StrangerError(EngineError):
    """The other end does not know the secret, or speaks another version."""


class Tls(NamedTuple):
    """TLS between fronts and engines.

    Attributes:
        engines: What engines accept connections with.
        fronts: What fronts connect with. They demand the certificate of the engines.
        certificate: The certificate of the engines, in DER.
    """

    engines: ssl.SSLContext
    fronts: ssl.SSLContext
    certificate: bytes


def tls_of(args: Namespace) -> Tls | None:
    """TLS with the certificate of the cluster's address; None without a certificate, or on one machine.

    Raises:
        InputError: A file cannot be used.
    """
    if args.ssl_certfile is None or args.address is None:
        return None
    # Fronts prove themselves by the secret.
    engines = transport.tls_context(Namespace(**vars(args) | {"ssl_cert_reqs": 0, "ssl_ca_certs": None}))
    assert engines is not None
    fronts = ssl.create_default_context(cafile=args.ssl_certfile)
    # It is a certificate of this very file, whatever the host's name.
    fronts.check_hostname = False
    fronts.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # The file begins with the engine's certificate; certificates of its authorities follow.
    body = Path(args.ssl_certfile).read_text("latin-1").partition(ssl.PEM_HEADER)[2].partition(ssl.PEM_FOOTER)[0]
    if not body:
        raise InputError(f"--ssl-certfile {args.ssl_certfile}: it must begin a certificate with {ssl.PEM_HEADER}")
    return Tls(engines, fronts, ssl.PEM_cert_to_DER_cert(ssl.PEM_HEADER + body + ssl.PEM_FOOTER))


def _check(data: bytes, secret: bytes, end: bytes, *parts: bytes) -> None:
    """Checks the proof of the other end. Raises StrangerError."""
    if not hmac.compare_digest(data, proof_of(secret, end, *parts)):
        raise StrangerError(
            f"no {end.decode()} of this cluster is there: it does not know the secret, or passes on another's proof"
        )


async def _hand_over(reader: asyncio.StreamReader, connection: Any, make: Callable[[], wire.Channel]) -> None:
    """Gives a connection to a new channel, with what has come after the other end's proof. It does not wait."""
    if connection.is_closing() or reader.at_eof():
        # The channel would not be told.
        raise StrangerError("the connection was closed")
    reader.feed_eof()
    rest = await reader.read()
    tune(connection.get_extra_info("socket"))
    channel = make()
    connection.set_protocol(channel)
    channel.connection_made(connection)
    # The reader may have paused it, and the channel may do so.
    connection.resume_reading()
    if rest:
        channel.get_buffer(len(rest))[: len(rest)] = rest
        channel.buffer_updated(len(rest))


class Listener:
    """Accepts fronts.

    Args:
        listening: The listening socket.
        secret: What fronts prove.
        make: Makes the channel of a front.
        tls: TLS of the cluster; None for none.
    """

    def __init__(
        self, listening: socket.socket, secret: bytes, make: Callable[[], wire.Channel], tls: Tls | None = None
    ):
        self._listening, self._secret, self._make, self._tls = listening, secret, make, tls
        listening.setblocking(False)
        # Connections whose other end has proved nothing, the oldest first.
        self._greetings: dict[asyncio.Task, None] = {}

    async def serve(self) -> None:
        """Accepts fronts until it is cancelled, which closes the socket."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listening)
                except OSError as e:
                    # Too many open files, say.
                    log.error("no front can connect: %s", e.strerror or e)
                    await asyncio.sleep(AGAIN_S)
                    continue
                if len(self._greetings) >= GREETINGS:
                    # A front has its turn within a few round trips: the oldest is a stranger's.
                    oldest = next(iter(self._greetings))
                    del self._greetings[oldest]
                    oldest.cancel()
                greeting = loop.create_task(self._greet(connection))
                self._greetings[greeting] = None
                greeting.add_done_callback(lambda greeting: self._greetings.pop(greeting, None))
        finally:
            self._listening.close()
            for greeting in list(self._greetings):
                greeting.cancel()

    async def _greet(self, accepted: socket.socket) -> None:
        loop, reader, connection = asyncio.get_running_loop(), asyncio.StreamReader(ONE_PIECE), None
        try:
            accepted.setblocking(False)
            async with asyncio.timeout(GREETING_S):
                connection, _ = await loop.connect_accepted_socket(
                    lambda: asyncio.StreamReaderProtocol(reader), accepted, ssl=self._tls and self._tls.engines
                )
                first, own = await reader.readexactly(OPENING), MAGIC + secrets.token_bytes(NONCE)
                if not first.startswith(MAGIC):
                    raise StrangerError("no front of this version is there")
                parts = first, own, self._tls.certificate if self._tls else b""
                connection.write(own + proof_of(self._secret, b"engine", *parts))
                _check(await reader.readexactly(PROOF), self._secret, b"front", *parts)
            await _hand_over(reader, connection, self._make)
        except (OSError, TimeoutError, EOFError, EngineError, asyncio.CancelledError):
            # asyncio closes a socket that it makes no connection of.
            if connection is not None:
                connection.abort()


async def connect(address: tuple[str, int], secret: bytes, channel: wire.Channel, tls: Tls | None = None) -> None:
    """Connects a channel to an engine.

    Args:
        address: Where the engine listens.
        secret: What both ends prove.
        channel: The channel.
        tls: TLS of the cluster; None for none.

    Raises:
        OSError: The engine cannot be reached, or has another certificate.
        EngineError: What listens there does not know the secret.
    """
    loop, reader, connection = asyncio.get_running_loop(), asyncio.StreamReader(ONE_PIECE), None
    try:
        async with asyncio.timeout(CONNECT_S):
            connection, _ = await loop.create_connection(
                lambda: asyncio.StreamReaderProtocol(reader), *address, ssl=tls and tls.fronts
            )
            connection.write(own := MAGIC + secrets.token_bytes(NONCE))
            answer = await reader.readexactly(OPENING + PROOF)
        if not answer.startswith(MAGIC):
            raise StrangerError("no engine of this version listens there")
        # Of this very session: a relay's is another one, unless it has the key of the engines' certificate.
        certificate = connection.get_extra_info("ssl_object").getpeercert(True) if tls else b""
        parts = own, answer[:OPENING], certificate
        _check(answer[OPENING:], secret, b"engine", *parts)
        connection.write(proof_of(secret, b"front", *parts))
        await _hand_over(reader, connection, lambda: channel)
    except BaseException as e:
        if connection is not None:
            connection.abort()
        if isinstance(e, EOFError):
            raise StrangerError("the connection was closed") from None
        raise


class Link(Engine):
    """An engine of a fleet that is kept connected while it is not left.

    Args:
        fleet: The fleet.
        name: The engine's name.
        address: Where it listens.
        secret: What both ends prove.
        tls: TLS of the cluster; None for none.
    """

    def __init__(self, fleet: Fleet, name: str, address: tuple[str, int], secret: bytes, tls: Tls | None):
        super().__init__(name, self._send, self._break_off)
        self._fleet, self._address, self._secret, self._tls = fleet, address, secret, tls
        self._channel: wire.Channel | None = None

    def _send(self, record: protocol.FromFront) -> None:
        if self._channel is None:
            self.client.lost("there is no connection")
        else:
            self._channel.send(record)

    def _break_off(self) -> None:
        if self._channel is not None:
            self._channel.abort()

    async def run(self) -> None:
        """Keeps it connected. Returns when the engine is left and its connection has ended."""
        said = ""
        self._fleet.replicas.join(self)
        try:
            while not self.is_leaving:
                try:
                    await self._be_connected()
                except (OSError, TimeoutError, EngineError) as e:
                    if (reason := str(e) or type(e).__name__) != said:
                        log.warning("engine %s cannot be reached at %s:%d: %s", self.name, *self._address, reason)
                    said = reason
                await asyncio.sleep(AGAIN_S)
        finally:
            self._fleet.replicas.remove(self)

    async def _be_connected(self) -> None:
        """Connects, and returns when the connection has ended."""
        ended = asyncio.Event()
        # It may be asked as soon as its first records are here.
        self._channel = wire.Channel(protocol.FromEngine, partial(self._fleet.receive, self), ended.set)
        try:
            await connect(self._address, self._secret, self._channel, self._tls)
            log.info("engine %s is connected at %s:%d", self.name, *self._address)
            watching = asyncio.get_running_loop().create_task(self._fleet.watch(self))
            try:
                await ended.wait()
            finally:
                watching.cancel()
        finally:
            self._break_off()
            self._channel = None
        self._fleet.lose(self, "its connection has ended")
