"""The bytes that a URL of a request names: of itself, of an allowed host, or below an allowed directory."""

import asyncio
import ipaddress
import os
import re
import stat
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from dflash_jax.argument_checks import shown
from dflash_jax.errors import InputError
from dflash_jax.media.data_url import MOST_HEADER_CHARACTERS, DataUrl
from dflash_jax.media.errors import MediaError
from dflash_jax.media.limits import DEFAULT_LIMITS, MediaLimits
from dflash_jax.media.medium import Kind

if TYPE_CHECKING:
    from ssl import SSLContext

    import httpcore

T = TypeVar("T")
PORTS = {"http": 80, "https": 443}
MOST_URL_CHARACTERS = 8192
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
PRINTABLE = re.compile(r"[!-~]+")


class _LoopThread:
    """Runs coroutines in the event loop of a thread of its own, which starts with the first of them."""

    def __init__(self):
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._running is None:
                started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
                threading.Thread(target=lambda: asyncio.run(_serve(started)), name="media-fetch", daemon=True).start()
                self._running = started.result()
            return asyncio.run_coroutine_threadsafe(coroutine, self._running[0])

    def stop(self) -> None:
        """Cancels all coroutines and ends the thread. It starts again with the next coroutine."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, stopped = running
            loop.call_soon_threadsafe(stopped.set)


async def _serve(started: Future) -> None:
    stopped = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stopped))
    await stopped.wait()


class Fetcher:
    """Fetches images and videos.

    Attributes:
        limits: The limits.
    """

    def __init__(
        self,
        domains: Sequence[str] = (),
        directory: Path | None = None,
        limits: MediaLimits = DEFAULT_LIMITS,
        network: "httpcore.AsyncNetworkBackend | None" = None,
        ssl_context: "SSLContext | None" = None,
    ):
        """Fetches ``data:`` URLs, and others where they are allowed.

        Args:
            domains: Hosts of ``http:`` and ``https:`` URLs, without their subdomains; "*": all. In either case, only
                public addresses are connected to.
            directory: ``file:`` URLs are read below it; None: not at all.
            limits: The limits.
            network: Connects to hosts, in place of `PublicNetwork`.
            ssl_context: Verifies servers, in place of the system's certificates.

        Raises:
            InputError: ``directory`` is none, or a domain is written in another form, or httpx is not installed.
        """
        self.limits = limits
        self._domains = frozenset(each.lower().rstrip(".") for each in domains)
        for each in self._domains - {"*"}:
            if not _is_host(each):
                raise InputError(f"allowed_media_domains has {each!r}: it must be host names, like example.com, or *")
        self._directory = directory.resolve() if directory else None
        if self._directory is not None and not self._directory.is_dir():
            raise InputError(f"allowed_local_media_path is {str(directory)!r}: it is no directory")
        self._network, self._ssl_context = network, ssl_context
        if self._domains:
            try:
                from dflash_jax.media.public_http import PublicNetwork
            except ImportError:
                raise InputError("allowed_media_domains needs httpx: pip install 'dflash-jax[server]'") from None
            self._network = network or PublicNetwork()
        # Parsing a flood of tiny chunks would keep the server's loop busy for a second at a time.
        self._loop_thread = _LoopThread()

    def stop(self) -> None:
        """Ends all fetches."""
        self._loop_thread.stop()

    async def fetch(self, url: str, kind: Kind) -> bytes:
        """The content of a URL: an encoded image or video.

        Args:
            url: The URL.
            kind: "image" or "video", for the limit of time.

        Raises:
            MediaError: The URL is malformed or not allowed, cannot be fetched, or its content is too large.
        """
        scheme = url[:MOST_HEADER_CHARACTERS].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(DataUrl(url, self.limits.item_bytes).content)
        if scheme == "file":
            return await asyncio.to_thread(self._file, url)
        return await self._http(url, kind)

    def fetch_now(self, url: str, kind: Kind) -> bytes:
        """`fetch` for callers without an event loop, or whose loop may wait."""
        return self._loop_thread.submit(self.fetch(url, kind)).result()

    async def _http(self, url: str, kind: Kind) -> bytes:
        target = self.check(url)
        from dflash_jax.media.public_http import get

        limits, network = self.limits, self._network
        assert network is not None, "a checked URL without allowed domains"
        seconds = limits.video_fetch_s if kind == "video" else limits.image_fetch_s

        async def limited() -> bytes:
            async with asyncio.timeout(seconds):
                return await get(target, self.check, limits.item_bytes, limits.redirects, network, self._ssl_context)

        try:
            return await asyncio.wrap_future(self._loop_thread.submit(limited()))
        except TimeoutError:
            raise MediaError(f"{shown(url)} takes more than {seconds:g} s to fetch", 422) from None
        except MediaError as e:
            raise MediaError(f"{shown(url)} cannot be fetched: {e}", e.status) from None

    def check(self, url: str) -> "httpcore.URL":
        """Checks a URL of http or https, without the network.

        Returns:
            Its parts. The request is built from them, so that nothing reads the URL in another way.

        Raises:
            MediaError: The URL is malformed, or its host is not allowed.
        """
        try:
            parts = urlsplit(url) if len(url) <= MOST_URL_CHARACTERS and PRINTABLE.fullmatch(url) else None
            scheme, host, port = ("", "", None) if parts is None else (parts.scheme, parts.hostname or "", parts.port)
        except ValueError:
            parts, scheme, host, port = None, "", "", None
        if parts is None or "\\" in url or scheme not in PORTS:
            raise MediaError(f"the URL is {shown(url)}: it must begin with data:, https:, http: or file:")
        host = host.removesuffix(".")
        if "@" in parts.netloc or ("[" in parts.netloc) != (":" in host) or not _is_host(host):
            raise MediaError(f"the URL is {shown(url)}: its host must be a plain name")
        if port not in (None, PORTS[scheme]):
            raise MediaError(f"the URL is {shown(url)}: its port must be {PORTS[scheme]}", 422)
        if host not in self._domains and "*" not in self._domains:
            hint = f"{host} is not among them" if self._domains else "send the content as a data: URL"
            raise MediaError(
                f"the URL is {shown(url)}: only hosts of --allowed-media-domains are fetched from; {hint}", 422
            )
        import httpcore

        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return httpcore.URL(scheme=scheme, host=host, target=path)

    def _file(self, url: str) -> bytes:
        """The content of a ``file:`` URL. All failures have one message, which says nothing of other files."""
        if self._directory is None:
            raise MediaError(f"the URL is {shown(url)}: this server reads no files", 422)
        failure = MediaError(f"the URL is {shown(url)}: it is no file below the directory that this server allows", 422)
        # Parsing takes the square of a host's length where it is not ASCII.
        if len(url) > MOST_URL_CHARACTERS or not PRINTABLE.fullmatch(url):
            raise failure
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or parts.path[:1] != "/":
                raise failure
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._directory):
                raise failure
            # The path has no links any more. Opening a pipe would wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise failure
                content = file.read(self.limits.item_bytes + 1)
        except (OSError, ValueError, RuntimeError):
            raise failure from None
        if len(content) > self.limits.item_bytes:
            raise MediaError(f"{shown(url)} has more than {self.limits.item_bytes} bytes", 413)
        return content


def _is_host(host: str) -> bool:
    """Whether ``host`` is a name in ASCII or a literal address."""
    if ":" not in host:
        return HOST.fullmatch(host) is not None
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False
