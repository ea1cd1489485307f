"""Servers by URL that share requests: several of one model, each of which may answer any of them."""

import asyncio
import re
import socket
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflash_jax.errors import EngineError, InputError

if TYPE_CHECKING:
    import httpx

# Seconds between two looks at a server, seconds that it has to answer, and looks without an answer after which its
# requests are sent to others.
LOOK_S, ANSWER_S, LOOKS = 2.0, 10.0, 3
# Seconds without an answer of any server, after which a run ends; and of nothing but TOO_MANY_REQUESTS, after which
# that is a request's answer.
WAIT_S = 300.0
# A request is given up after this many failures: it may be what ends the servers. Errors of a server's own are repeated
# as often.
ATTEMPTS = 4
# What a proxy says of a server that it asked; statuses of a server that is elsewhere, or takes no requests; and that of
# one that has too many.
PROXY_ERRORS, UNAVAILABLE, TOO_MANY_REQUESTS = (502, 504), (*range(300, 400), 503), 429
# Seconds without traffic before TCP asks whether the other end is there, and between two such questions, and how many.
# An answer comes whole, and what is between may forget a connection that is quiet meanwhile.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


class RequestLostError(Exception):
    """No server answers a request, and all servers answer others."""


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        url: Its address.
        attempts: Its requests.
        silent_since: When it was closed, on the monotonic clock; None while it is open.
        reason: Why it was closed last.
    """

    url: str
    attempts: set[asyncio.Future] = field(default_factory=set)
    silent_since: float | None = None
    reason: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it gets requests."""
        return self.silent_since is None


def base_urls(urls: Sequence[str]) -> list[str]:
    """The addresses of servers, without the /v1 of OpenAI's clients. Raises InputError for what is none."""
    for number, url in enumerate(urls, 1):
        # Before anything else: these may be secrets, and other errors show the address.
        if not {"@", "?", "#"}.isdisjoint(url):
            text = "a user, a query or a fragment (@, ? or #): it must be like http://127.0.0.1:30000"
            raise InputError(f"url {number} of {len(urls)} has {text}")
    bases = [url.rstrip("/").removesuffix("/v1") for url in urls]
    for url, base in zip(urls, bases, strict=True):
        try:
            parts = urlsplit(base)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid or not base.isascii() or not base.isprintable() or " " in base:
            raise InputError(f"url {url[:200]!r}: it must be like http://127.0.0.1:30000")
        if bases.count(base) > 1:
            raise InputError(f"url {url[:200]!r} is given twice")
    return bases


class Servers:
    """Several servers, as ``async with Servers(urls, 32) as servers``.

    A request goes to the server that has the fewest. Where it is cut off, or the server is unavailable, it goes to
    another one, from its beginning: a request has a seed where its answer must not depend on that. A server that does
    not answer gets no requests until ``/health`` is good again, and ``/ready`` no error.

    Args:
        urls: Their addresses.
        concurrency: Requests that each has at a time.
        key: The API key of all.

    Raises:
        InputError: httpx is missing, an address or the key is invalid, or none of the servers answers.
    """

    def __init__(self, urls: Sequence[str], concurrency: int, key: str = "EMPTY"):
        try:
            import httpx
        except ImportError:
            raise InputError('servers by URL need httpx: pip install "dflash-jax[server]"') from None
        # The errors of a header that cannot be sent show it.
        if not re.fullmatch("[!-~]+", key):
            raise InputError("the API key must be printable ASCII without spaces")
        self._servers = [Server(url) for url in base_urls(urls)]
        self.concurrency, self._errors = concurrency, (httpx.TransportError, httpx.DecodingError)
        # A connection that is kept longer may be closed by the server as a request is sent.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=ANSWER_S)
        known = [(getattr(socket, name), value) for name, value in KEEPALIVE.items() if hasattr(socket, name)]
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, *each) for each in known)]
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=options)
        self._http = httpx.AsyncClient(transport=transport, headers=headers, timeout=timeout)
        self._changed = asyncio.Event()
        self._watches: list[asyncio.Task] = []

    async def __aenter__(self) -> "Servers":
        await asyncio.gather(*map(self._look, self._servers))
        if not any(server.is_open for server in self._servers):
            await self._http.aclose()
            raise InputError(f"no server answers: {self._reasons()}")
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._servers]
        return self

    async def __aexit__(self, *error) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self._http.aclose()

    def _reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.reason}" for server in self._servers)

    async def get(self, path: str) -> "list[tuple[str, httpx.Response]]":
        """(address, answer) of each server that answers a GET request."""
        answers = []
        for server in self._servers:
            try:
                answers.append((server.url, await self._http.get(server.url + path, timeout=ANSWER_S)))
            except self._errors as e:
                self._close(server, _words(e))
        return answers

    async def post(self, path: str, content: bytes) -> "httpx.Response":
        """Sends a request until a server answers it.

        Args:
            path: The endpoint.
            content: The body, JSON.

        Returns:
            The answer; after ATTEMPTS errors of a server's own (500), or WAIT_S of nothing but 429, that one.

        Raises:
            RequestLostError: It was cut off or turned away ATTEMPTS times.
            EngineError: No server has answered for WAIT_S.
            InputError: The API key is wrong.
        """
        failures, errors, tried, failed, full_since = 0, 0, set[Server](), set[Server](), None
        while True:
            server = await self._place(tried)
            tried.add(server)
            reason, is_counted, response = "", False, None
            try:
                response = await self._attempt(server, path, content)
            except self._errors as e:
                reason, is_counted = _words(e), _was_sent(e)
            else:
                status = response.status_code
                if status in PROXY_ERRORS or status in UNAVAILABLE:
                    reason, is_counted = f"status {status}", status in PROXY_ERRORS
            if response is None or reason:
                # A server that was not available is not the request's fault, unless it was healthy again in between.
                failures += is_counted or server in failed
                failed.add(server)
                full_since = None
                self._close(server, reason)
                if failures >= ATTEMPTS:
                    raise RequestLostError(f"it failed {failures} times, last at {server.url}: {reason}")
                continue
            if response.status_code == TOO_MANY_REQUESTS:
                now = time.monotonic()
                full_since = now if full_since is None else full_since
                if now - full_since >= WAIT_S:
                    return response
                await asyncio.sleep(1)
                continue
            full_since = None
            if response.status_code in (401, 403):
                raise InputError(f"{server.url} wants another API key: {' '.join(response.text.split())[:200]}")
            errors += response.status_code == 500
            if response.status_code != 500 or errors >= ATTEMPTS:
                return response

    async def _place(self, tried: Set[Server]) -> Server:
        """The server with the fewest requests, as soon as one takes another; if there are others, none of ``tried``."""
        while True:
            choices = [server for server in self._servers if server.is_open]
            choices = [server for server in choices if server not in tried] or choices
            if free := [server for server in choices if len(server.attempts) < self.concurrency]:
                return min(free, key=lambda server: len(server.attempts))
            if all(_is_gone(server) for server in self._servers):
                raise EngineError(f"no server has answered for {WAIT_S:.0f} s: {self._reasons()}")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def _attempt(self, server: Server, path: str, content: bytes) -> "httpx.Response":
        import httpx

        task = asyncio.ensure_future(self._http.post(server.url + path, content=content))
        server.attempts.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                raise httpx.ReadError("it does not answer any more")
            return task.result()
        finally:
            task.cancel()
            server.attempts.discard(task)
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _close(self, server: Server, reason: str) -> None:
        """Gives a server no further requests, until its next good look."""
        server.reason = reason
        if server.is_open:
            server.silent_since = time.monotonic()

    async def _look(self, server: Server) -> bool:
        """Looks whether a server answers, and opens it or closes it."""
        try:
            response = await self._http.get(f"{server.url}/health", timeout=ANSWER_S)
            reason = "" if response.is_success else f"/health is {response.status_code}"
            if not reason and not server.is_open:
                # One that warms up or drains is healthy, and turns requests away. Not all servers have /ready.
                response = await self._http.get(f"{server.url}/ready", timeout=ANSWER_S)
                if response.status_code >= 500:
                    server.reason = f"/ready is {response.status_code}"
                    return True
        except self._errors as e:
            reason = _words(e)
        if reason:
            self._close(server, reason)
        elif not server.is_open:
            server.silent_since = None
            self._change()
        return not reason

    async def _watch(self, server: Server) -> None:
        """Looks at a server until it is cancelled, and ends the requests of one that does not answer."""
        missed = 0
        while True:
            await asyncio.sleep(LOOK_S)
            missed = 0 if await self._look(server) else missed + 1
            if missed >= LOOKS:
                for task in list(server.attempts):
                    task.cancel()


def _is_gone(server: Server) -> bool:
    since = server.silent_since
    return since is not None and time.monotonic() - since > WAIT_S


def _was_sent(error: Exception) -> bool:
    """Whether a server may have got the request."""
    import httpx

    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
