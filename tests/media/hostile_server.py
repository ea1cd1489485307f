"""A server that answers as attackers do, and a network in which it is on the public internet."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache

import httpcore
import trustme

from dflash_jax.media.public_http import PublicNetwork, resolve
from tests.streams import StreamServer

PUBLIC = "93.184.216.34"
CONTENT = b"content of an image"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
ADDRESSES = {
    "images.example": [PUBLIC],
    "other.example": [PUBLIC],
    "six.example": ["2606:2800:220:1:248:1893:25c8:1946"],
    "two.example": ["192.0.9.1", PUBLIC],
    "private.example": ["10.11.12.13"],
    "mapped.example": ["::ffff:10.11.12.13"],
    "mixed.example": [PUBLIC, "127.0.0.1"],
    "empty.example": [],
}


def response(status: int = 200, headers: str = "", content: bytes = CONTENT) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def redirect(url: str) -> bytes:
    return response(302, f"Location: {url}\r\n", b"")


async def send(writer):
    """Waits for the client, and lets others run where it is as fast as the server."""
    await writer.drain()
    await asyncio.sleep(0)


async def slow_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X")
        await writer.drain()
        await asyncio.sleep(0.01)


async def slow_body(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def silence(writer):
    await asyncio.Event().wait()


async def endless(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(2**16))
        await send(writer)


async def endless_chunks(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
        await send(writer)


async def tiny_chunks(writer):
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1\r\nx\r\n" * 2**12)
        await send(writer)


async def endless_headers(writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: " + b"y" * 2**12 + b"\r\n")
        await send(writer)


async def endless_continues(writer):
    while True:
        writer.write(b"HTTP/1.1 103 Early\r\n\r\n")
        await send(writer)


PATHS: dict[str, bytes | Answer] = {
    "/image": response(),
    "/query?a=b&c": response(),
    "/missing": response(404),
    "/broken": response(503),
    "/cut": response().replace(b"19", b"99"),
    "/garbage": b"SSH-2.0-OpenSSH_9.6\r\n",
    "/nothing": b"",
    "/huge": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
    "/negative": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "/two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    "/slow-headers": slow_headers,
    "/slow-body": slow_body,
    "/silence": silence,
    "/endless": endless,
    "/endless-chunks": endless_chunks,
    "/tiny-chunks": tiny_chunks,
    "/endless-headers": endless_headers,
    "/endless-continues": endless_continues,
    "/relative": redirect("image"),
    "/to-other": redirect("http://other.example/image"),
    "/secure": redirect("https://images.example/image"),
    "/insecure": redirect("http://images.example/image"),
    "/loop": redirect("/loop"),
    "/three": redirect("/two"),
    "/two": redirect("/one"),
    "/one": redirect("/image"),
    "/four": redirect("/three"),
    "/no-location": response(302, "", b""),
    "/to-loopback": redirect("http://127.0.0.1/latest/secret"),
    "/to-private": redirect("http://private.example/secret"),
    "/to-mapped": redirect("http://[::ffff:10.0.0.1]/secret"),
    "/to-metadata": redirect("//169.254.169.254/latest/secret"),
    "/to-decimal": redirect("http://2130706433/secret"),
    "/to-user": redirect("http://images.example@127.0.0.1/secret"),
    "/to-port": redirect("http://images.example:6379/secret"),
    "/to-file": redirect("file:///etc/passwd"),
    "/to-data": redirect("data:image/png;base64,AAAA"),
    "/to-bad": redirect("http://[secret"),
}


class Internet(httpcore.AsyncNetworkBackend):
    """Connects addresses of the public internet to servers on this machine.

    Attributes:
        connections: Addresses and ports that were connected to.
    """

    def __init__(self, ports: dict[int, int]):
        self._ports, self._network, self.connections = ports, httpcore.AnyIOBackend(), []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        self.connections.append((host, port))
        if host not in (PUBLIC, ADDRESSES["six.example"][0]):
            raise httpcore.ConnectError("no host there")
        return await self._network.connect_tcp("127.0.0.1", self._ports[port], timeout)


async def addresses(host: str, port: int) -> list[str]:
    """Made-up names; literal addresses in all forms as the system reads them."""
    if host not in ADDRESSES and host[0] not in "0123456789" and ":" not in host:
        raise socket.gaierror
    return ADDRESSES[host] if host in ADDRESSES else await resolve(host, port)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        path = (await reader.readline()).split()[1].decode()
        while (await reader.readline()).strip():
            pass
        answer = PATHS[path]
        if isinstance(answer, bytes):
            writer.write(answer)
            await writer.drain()
        else:
            await answer(writer)
    except (OSError, IndexError, ssl.SSLError):
        pass
    finally:
        writer.close()


@cache
def _contexts(names: tuple[str, ...]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server with a certificate for ``names``, and of a client that trusts it."""
    authority = trustme.CA()
    server, client = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert(*names).configure_cert(server)
    authority.configure_trust(client)
    return server, client


@asynccontextmanager
async def internet(names: tuple[str, ...] = ("images.example", "other.example")):
    """Servers on ports 80 and 443, with a certificate for ``names``.

    Yields:
        The `Internet`, a `PublicNetwork` in it, and a context that trusts the certificate.
    """
    server_context, client_context = _contexts(names)
    async with StreamServer(_answer) as plain, StreamServer(_answer, server_context) as secure:
        network = Internet({80: plain.port, 443: secure.port})
        yield network, PublicNetwork(addresses, network), client_context
