"""HTTP that reaches public addresses only."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from ssl import SSLContext
from typing import Any, cast
from urllib.parse import urljoin

import httpcore
import httpx

from dflash_jax.media.errors import MediaError

# The whole of the IPv6 addresses that are assigned to anyone; mapped and translated IPv4 addresses are outside, but for
# those of 6to4 and Teredo.
IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
# Those that `ipaddress` takes for public, in this or an older version of Python, and that are services of a cloud or a
# network: IETF's assignments, Azure's wire server, relays of 6to4, documentation.
SERVICES = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "168.63.129.16/32", "192.88.99.0/24", "3fff::/20")))
REDIRECTS = (301, 302, 303, 307, 308)
# A name server that does not answer occupies a thread for half a minute, but a fetch of an image for 5 s: eight fetches
# at a time (`MediaLimits`) leave at most 56 threads behind, and the next name still finds one.
_RESOLVERS = ThreadPoolExecutor(64, "media-resolve")
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def is_public(address: str) -> bool:
    """Whether an IP address is a host's on the public internet, and contains no other address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if any(parsed in network for network in SERVICES if network.version == parsed.version):
        return False
    if parsed.version == 6:
        is_plain = parsed in IPV6_UNICAST and parsed.sixtofour is None and parsed.teredo is None
        return is_plain and parsed.is_global
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of ``host``, the best first.

    Raises:
        OSError: It has none.
        UnicodeError: It is no name.
    """
    infos = await asyncio.get_running_loop().run_in_executor(
        _RESOLVERS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    )
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


@cache
def _ssl_context() -> SSLContext:
    # Reading the certificates takes tens of milliseconds.
    return httpx.create_ssl_context()


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Resolves a name once, and connects to the very addresses that were checked."""

    def __init__(self, resolve: Resolve = resolve, network: httpcore.AsyncNetworkBackend | None = None):
        """Describes the network.

        Args:
            resolve: Gives the addresses of a host and a port.
            network: Connects to an address.
        """
        self._resolve = resolve
        self._network: httpcore.AsyncNetworkBackend = network or cast(Any, httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connects to ``host``.

        Raises:
            MediaError: The host has no address, or one that is not public.
            httpcore.ConnectError: No address answers.
        """
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        # One that is not public among others is the sign of an attack: a name that changes between two looks.
        if not addresses or not all(map(is_public, addresses)):
            # Without the host, which a redirect may have named.
            raise MediaError("its host has no public address", 422)
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        raise httpcore.ConnectError


async def get(
    url: httpcore.URL,
    check: Callable[[str], httpcore.URL],
    most_bytes: int,
    redirects: int,
    network: httpcore.AsyncNetworkBackend,
    ssl_context: SSLContext | None = None,
) -> bytes:
    """Fetches a URL. The caller limits the time.

    Args:
        url: The URL, checked, without a port.
        check: Checks the URL of a redirect; raises MediaError.
        most_bytes: Most bytes of the answer.
        redirects: Most redirects.
        network: Connects to hosts.
        ssl_context: Verifies servers; None: by the certificates of the system, or of the variable ``SSL_CERT_FILE``.

    Raises:
        MediaError: It cannot be fetched, or is too large.
    """
    context = ssl_context or _ssl_context()
    for _ in range(redirects + 1):
        location, host = None, url.host.decode()
        authority = f"[{host}]" if ":" in host else host
        try:
            # No compression: bytes are counted as they arrive.
            fixed = {"Host": authority, "User-Agent": "dflash-jax", "Accept-Encoding": "identity"}
            headers = [(name.encode(), value.encode()) for name, value in fixed.items()]
            async with (
                httpcore.AsyncConnectionPool(context, network_backend=network) as pool,
                pool.stream("GET", url, headers=headers) as response,
            ):
                fields = {name.lower(): value for name, value in response.headers}
                if response.status not in REDIRECTS:
                    if response.status != 200:
                        raise MediaError(f"its server answers with status {response.status}", 422)
                    return await _content(response, fields, most_bytes)
                location = fields.get(b"location", b"").decode("latin-1")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise MediaError("its server cannot be reached, or does not answer as it should", 422) from None
        try:
            redirected = check(urljoin(f"{url.scheme.decode()}://{authority}{url.target.decode()}", location))
            if (url.scheme, redirected.scheme) == (b"https", b"http"):
                raise MediaError("it redirects from https to http", 422)
            url = redirected
        except (MediaError, ValueError):
            # The message does not repeat the URL, which may be an internal one.
            raise MediaError("it redirects to a URL that is not allowed", 422) from None
    raise MediaError(f"it redirects more than {redirects} times", 422)


async def _content(response: httpcore.Response, fields: dict[bytes, bytes], most_bytes: int) -> bytes:
    content = bytearray()
    if int(fields.get(b"content-length", b"0")) <= most_bytes:
        async for part in response.aiter_stream():
            content += part
            if len(content) > most_bytes:
                break
        else:
            return bytes(content)
    raise MediaError(f"it has more than {most_bytes} bytes", 413)
