"""Access control: API keys and host names."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from dflash_jax.server.errors import ApiError

# Paths without a key: probes, metrics and documentation. The page's files need none either; all other paths do.
OPEN_PATHS = frozenset(
    ("/health", "/health_generate", "/ready", "/ping", "/version", "/metrics", "/docs", "/openapi.json")
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback name or address."""
    return host in LOOPBACK or host.startswith("127.")


def default_hosts(host: str) -> tuple[str, ...] | None:
    """The Host names that a server bound to ``host`` accepts; None for any.

    A page of another site can have its own name resolve to 127.0.0.1, and so reach a local server from a browser. The
    browser then sends that name.
    """
    return (*LOOPBACK, host) if is_loopback(host) else None


class Access:
    """Checks the headers of requests.

    Attributes:
        keys: API keys, one of which a request must have; empty: none is needed.
        hosts: Names that the Host header may have, ``*.example.com`` for all below a domain; None or ``*`` for any.
        open_paths: Paths that need no key.
    """

    def __init__(self, keys: Sequence[str], hosts: Collection[str] | None, open_paths: Collection[str]):
        self.keys = [key.encode() for key in keys]
        self.hosts = None if hosts is None or "*" in hosts else tuple(h.lower().strip("[]") for h in hosts)
        self.open_paths = frozenset(open_paths)

    def check(self, scope) -> bytes:
        """Checks host and key of a request.

        Returns:
            The request's owner, a digest of its key. Without keys, clients are distinguished by the key they send.

        Raises:
            ApiError: 400, 401 or 403: the request is not allowed.
        """
        headers = dict(scope["headers"])
        self._check_host([value.decode("latin-1") for name, value in scope["headers"] if name == b"host"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            # Anthropic's clients send the key in this header.
            given = headers.get(b"x-api-key", b"")
        # Every key is compared, so that the time does not depend on which one matches.
        is_known = sum(hmac.compare_digest(given, key) for key in self.keys)
        if self.keys and not is_known and not self.is_open(scope):
            raise ApiError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        return hashlib.sha256(given).digest()

    def is_open(self, scope) -> bool:
        """Whether a request needs no key."""
        # Browsers send OPTIONS without a key before the actual request.
        return scope["path"] in self.open_paths or scope["method"] == "OPTIONS"

    def _check_host(self, given: list[str]) -> None:
        if len(given) > 1:
            raise ApiError(400, f"the request has {len(given)} Host headers: send one")
        if self.hosts is None:
            return
        host = given[0] if given else ""
        name, _, _ = host[1:].partition("]") if host.startswith("[") else host.partition(":")
        name = name.lower()
        domains = [allowed[1:] for allowed in self.hosts if allowed.startswith("*.")]
        if name not in self.hosts and not name.endswith(tuple(domains)):
            # The header may have any bytes; the message is ASCII.
            raise ApiError(403, f"the host {host!a} is not served here: start the server with --allowed-hosts {name!a}")
