"""Connections between fronts and engines, over TCP: both ends prove the cluster's secret before any record is read.

Who connects is asked for a proof at once, and has `GREETING_S` seconds for it. A stranger's connection costs a socket
and 72 bytes for that time, and never more than `GREETINGS` of them are open: the oldest one is closed for the next.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
from argparse import Namespace
from collections.abc import Callable

from dflash_jax import protocol
from dflash_jax.cluster.fleet import Engine, Fleet
from dflash_jax.errors import EngineError
from dflash_jax.parallel.handshake import GREETING_S, GREETINGS, NONCE, PROOF, proof_of, tune
from dflash_jax.server import transport, wire

log = logging.getLogger("dflash_jax.cluster")

# Begins what a listener says. The last byte is the version.
MAGIC = b"dflash\x01\x01"
# Seconds between two attempts to connect, and until an address that does not answer is tried again.
AGAIN_S, CONNECT_S = 0.5, 10.0


class StrangerError(EngineError):
    """The other end does not know the secret, or speaks another version."""


async def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not part:
            raise StrangerError("the connection was closed")
        data += part
    return data


async def _prove_engine(connection: socket.socket, secret: bytes) -> None:
    """The engine's part of the proof: the other end is first."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
    await loop.sock_sendall(connection, MAGIC + nonce)
    answer = await _exactly(connection, NONCE + PROOF)
    if not hmac.compare_digest(answer[NONCE:], proof_of(secret, b"front", nonce, answer[:NONCE])):
        raise StrangerError("the other end does not know the secret of this cluster")
    await loop.sock_sendall(connection, proof_of(secret, b"engine", answer[:NONCE], nonce))


async def _prove_front(connection: socket.socket, secret: bytes) -> None:
    """The front's part of the proof."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE)
    first = await _exactly(connection, len(MAGIC) + NONCE)
    if first[: len(MAGIC)] != MAGIC:
        raise StrangerError("no engine of this version listens there")
    await loop.sock_sendall(connection, nonce + proof_of(secret, b"front", first[len(MAGIC) :], nonce))
    if not hmac.compare_digest(
        await _exactly(connection, PROOF), proof_of(secret, b"engine", nonce, first[len(MAGIC) :])
    ):
        raise StrangerError("the engine there does not know the secret of this cluster")


def tls_contexts(args: Namespace) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """TLS of engines and of fronts, with the certificate of the cluster's address, which fronts demand.

    Returns:
        The contexts; None without a certificate, or on one machine.

    Raises:
        InputError: A file cannot be used.
    """
    if args.ssl_certfile is None or args.address is None:
        return None
    # Fronts prove themselves by the secret.
    engines = transport.tls_context(Namespace(**vars(args) | {"ssl_cert_reqs": 0, "ssl_ca_certs": None}))
    assert engines is not None
    fronts = ssl.create_default_context(cafile=args.ssl_certfile)
    # It is this very certificate, whatever the host's name.
    fronts.check_hostname = False
    fronts.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return engines, fronts


class Listener:
    """Accepts fronts.

    Args:
        listening: The listening socket.
        secret: What fronts prove.
        make: Makes the channel of a front.
        tls: TLS of engines; None for none.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        make: Callable[[], wire.Channel],
        tls: ssl.SSLContext | None = None,
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
                    # A front has its turn within a round trip: the oldest is a stranger's.
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

    async def _greet(self, connection: socket.socket) -> None:
        loop, channel = asyncio.get_running_loop(), None
        try:
            connection.setblocking(False)
            async with asyncio.timeout(GREETING_S):
                await _prove_engine(connection, self._secret)
                tune(connection)
                channel = self._make()
                await loop.connect_accepted_socket(lambda: channel, connection, ssl=self._tls)
        except (OSError, TimeoutError, EngineError, asyncio.CancelledError):
            connection.close()
            if channel is not None and not channel.has_ended:
                channel.connection_lost(None)


async def connect(
    address: tuple[str, int], secret: bytes, channel: wire.Channel, tls: ssl.SSLContext | None = None
) -> None:
    """Connects a channel to an engine.

    Args:
        address: Where the engine listens.
        secret: What both ends prove.
        channel: The channel.
        tls: TLS of fronts; None for none.

    Raises:
        OSError: The engine cannot be reached.
        EngineError: What listens there does not know the secret.
    """
    loop, host = asyncio.get_running_loop(), address[0]
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(connection, address)
            await _prove_front(connection, secret)
            tune(connection)
            await loop.create_connection(
                lambda: channel, sock=connection, ssl=tls, server_hostname=None if tls is None else host
            )
    except BaseException:
        connection.close()
        raise


class Link:
    """Keeps an engine of a fleet connected.

    Args:
        fleet: The fleet.
        name: The engine's name.
        address: Where it listens.
        secret: What both ends prove.
        tls: TLS of fronts; None for none.

    Attributes:
        address: As above.
        engine: The engine.
    """

    def __init__(self, fleet: Fleet, name: str, address: tuple[str, int], secret: bytes, tls: ssl.SSLContext | None):
        self._fleet, self.address, self._secret, self._tls = fleet, address, secret, tls
        self.engine = Engine(name, self._send, self._break_off)
        self._channel: wire.Channel | None = None
        fleet.replicas.join(self.engine)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def _send(self, record: protocol.FromFront) -> None:
        if self._channel is None:
            self.engine.client.lost("there is no connection")
        else:
            self._channel.send(record)

    def _break_off(self) -> None:
        if self._channel is not None:
            self._channel.abort()

    async def _run(self) -> None:
        fleet, engine, said = self._fleet, self.engine, ""
        while not engine.is_leaving:
            ended = asyncio.Event()
            channel = wire.Channel(protocol.FromEngine, lambda record: fleet.receive(engine, record), ended.set)
            try:
                # It may be asked as soon as its first records are here.
                self._channel = channel
                await connect(self.address, self._secret, channel, self._tls)
                log.info("engine %s is connected at %s:%d", engine.name, *self.address)
                await ended.wait()
            except (OSError, TimeoutError, EngineError) as e:
                if (reason := str(e) or type(e).__name__) != said:
                    log.warning("engine %s cannot be reached at %s:%d: %s", engine.name, *self.address, reason)
                said = reason
            self._channel = None
            if ended.is_set():
                fleet.lose(engine, "its connection has ended")
            await asyncio.sleep(AGAIN_S)

    def set_leaving(self, is_leaving: bool) -> None:
        """As of `Fleet`."""
        self._fleet.set_leaving(self.engine, is_leaving)

    def is_over(self) -> bool:
        """Whether the engine was left, and its connection has ended: it connects no more."""
        return self._task.done() or (self.engine.is_leaving and self._channel is None)

    async def stop(self) -> None:
        """Ends the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._break_off()
        self._fleet.replicas.remove(self.engine)
