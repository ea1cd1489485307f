"""Servers by URL that share requests: several of one model, each of which may answer any of them."""

import asyncio
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflash_jax.errors import EngineError, InputError

if TYPE_CHECKING:
    import httpx

# Seconds between two looks at a server, seconds that it has to answer, and looks without an answer behind which its
# requests are sent to others.
LOOK_S, ANSWER_S, LOOKS = 2.0, 10.0, 3
# Seconds without an answer of any server, behind which a run ends.
WAIT_S = 300.0
# A request is given up that was cut off so often: it may be what ends the servers. Errors of a server's own are
# repeated as often.
ATTEMPTS = 4
# Statuses of a server that takes no requests at the moment, and of one that has too many.
UNAVAILABLE, TOO_MANY_REQUESTS = (502, 503, 504), 429


class RequestLostError(Exception):
    """No server answers a request, and all servers answer others."""


@dataclass(eq=False)
class Server:
    """One server.

    Attributes:
        url: Its address.
        is_open: Whether it gets requests.
        attempts: Its requests.
        silent_since: When it failed to answer, on the monotonic clock; None once it has answered a request.
        reason: Why it failed to.
    """

    url: str
    is_open: bool = True
    attempts: set[asyncio.Future] = field(default_factory=set)
    silent_since: float | None = None
    reason: str = ""


def base_urls(urls: Sequence[str]) -> list[str]:
    """The addresses of servers, without the /v1 of OpenAI's clients. Raises InputError for what is none."""
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
    not answer gets no requests until ``/health`` is good again.

    Args:
        urls: Their addresses.
        concurrency: Requests that each has at a time.
        key: The API key of all.

    Raises:
        InputError: httpx is missing, an address is invalid, or none of the servers answers.
    """

    def __init__(self, urls: Sequence[str], concurrency: int, key: str = "EMPTY"):
        try:
            import httpx
        except ImportError:
            raise InputError('servers by URL need httpx: pip install "dflash-jax[server]"') from None
        self._servers = [Server(url) for url in base_urls(urls)]
        self.concurrency, self._errors = concurrency, (httpx.TransportError, httpx.DecodingError)
        # A connection that is kept longer may be closed by the server as a request is sent.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        timeout = httpx.Timeout(None, connect=ANSWER_S)
        self._http = httpx.AsyncClient(limits=limits, headers=headers, timeout=timeout)
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
            The answer; where ATTEMPTS have ended with an error of the server (500) or of a proxy before it, that one.

        Raises:
            RequestLostError: It was cut off ATTEMPTS times.
            EngineError: No server has answered for WAIT_S.
            InputError: The API key is wrong.
        """
        cuts, errors, tried = 0, 0, set[Server]()
        while True:
            server = await self._place(tried)
            tried.add(server)
            try:
                response = await self._attempt(server, path, content)
            except self._errors as e:
                cuts += _was_sent(e)
                self._close(server, _words(e))
                if cuts >= ATTEMPTS:
                    raise RequestLostError(f"it was cut off {cuts} times, last by {server.url}: {_words(e)}") from None
                continue
            if response.status_code in UNAVAILABLE:
                # 503 is about the server; the others are what a proxy says of this request.
                cuts += response.status_code != 503
                self._close(server, f"status {response.status_code}")
                if cuts >= ATTEMPTS:
                    return response
                continue
            if response.status_code == TOO_MANY_REQUESTS:
                await asyncio.sleep(1)
                continue
            if response.status_code in (401, 403):
                raise InputError(f"{server.url} wants another API key: {' '.join(response.text.split())[:200]}")
            server.silent_since = None
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
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

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
        server.is_open, server.reason = False, reason
        if server.silent_since is None:
            server.silent_since = time.monotonic()

    async def _look(self, server: Server) -> bool:
        """Looks whether a server answers, and opens it or closes it."""
        try:
            response = await self._http.get(f"{server.url}/health", timeout=ANSWER_S)
        except self._errors as e:
            reason = _words(e)
        else:
            reason = "" if response.status_code < 500 else f"/health is {response.status_code}"
        if reason:
            self._close(server, reason)
        elif not server.is_open:
            server.is_open = True
            self._change()
        return not reason

    async def _watch(self, server: Server) -> None:
        """Looks at a server, for ever, and ends the requests of one that does not answer."""
        missed = 0
        while True:
            await asyncio.sleep(LOOK_S)
            missed = 0 if await self._look(server) else missed + 1
            if missed >= LOOKS:
                for task in list(server.attempts):
                    task.cancel()


def _is_gone(server: Server) -> bool:
    since = server.silent_since
    return not server.is_open and since is not None and time.monotonic() - since > WAIT_S


def _was_sent(error: Exception) -> bool:
    """Whether a server may have got the request."""
    import httpx

    return not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
