"""Access control: API keys, host names, and pages of other origins."""

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from dflash_jax.server.errors import ApiError
from dflash_jax.server.transport import LOOPBACK, is_loopback

# Paths without a key: probes, metrics and documentation. The page's files need none either; all other paths do.
OPEN_PATHS = frozenset(
    ("/health", "/health_generate", "/ready", "/ping", "/version", "/metrics", "/docs", "/openapi.json")
)
ADMIN_FLAG = "start the server with --admin-api-key-file"
# Paths at which a GET changes state.
CHANGING_GETS = frozenset(("/flush_cache",))
# Content-Types of a POST that a browser sends for a page of any site without asking the server first.
SIMPLE_TYPES = frozenset((b"", b"text/plain", b"multipart/form-data", b"application/x-www-form-urlencoded"))


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
        admin_keys: An administrator's keys, which serve as API keys, too; empty: there is no administrator.
        admin_paths: Paths that need one of them.
        origins: Other origins whose pages may use the server; ``*`` for all.
    """

    def __init__(
        self,
        keys: Sequence[str],
        hosts: Collection[str] | None,
        open_paths: Collection[str],
        origins: Collection[str] = (),
        admin_keys: Sequence[str] = (),
        admin_paths: Collection[str] = (),
    ):
        self.keys, self.admin_keys = [key.encode() for key in keys], [key.encode() for key in admin_keys]
        self.admin_paths = frozenset(admin_paths)
        self.hosts = None if hosts is None or "*" in hosts else tuple(h.lower().strip("[]") for h in hosts)
        self.open_paths, self.origins = frozenset(open_paths), frozenset(origins)

    def check(self, scope) -> bytes:
        """Checks host, origin and key of a request.

        Returns:
            The request's owner, a digest of its key. Without keys, clients are distinguished by the key they send.

        Raises:
            ApiError: 400, 401 or 403: the request is not allowed.
        """
        headers = dict(scope["headers"])
        self._check_host([value.decode("latin-1") for name, value in scope["headers"] if name == b"host"])
        if "*" not in self.origins and _is_simple(scope, headers):
            self._check_origin(headers)
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            # Anthropic's clients send the key in this header.
            given = headers.get(b"x-api-key", b"")
        # Every key is compared, so that the time does not depend on which one matches.
        is_known, is_admin = (
            sum(hmac.compare_digest(given, key) for key in keys) for keys in (self.keys, self.admin_keys)
        )
        if scope["path"] in self.admin_paths and not is_admin and not self.is_open(scope):
            if not self.admin_keys:
                raise ApiError(403, f"{scope['path']} is an administrator's: {ADMIN_FLAG}")
            raise ApiError(401, "the administrator's key is missing or wrong: send it as Authorization: Bearer KEY")
        if self.keys and not (is_known or is_admin) and not self.is_open(scope):
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

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuses a page of another origin. Clients that are no browsers send neither of the headers."""
        origin, site = headers.get(b"origin", b"").decode("latin-1"), headers.get(b"sec-fetch-site")
        if site is None:
            is_own = not origin or _netloc(origin) == headers.get(b"host", b"").decode("latin-1").lower()
        else:
            is_own = site in (b"same-origin", b"none")
        if not is_own and origin not in self.origins:
            page = f"a page of {origin!a}" if origin else "a page of another origin"
            raise ApiError(403, f"{page} may not send this request: start the server with --allowed-origins")


def _is_simple(scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request changes state, and a page of any site can have a browser send it without a preflight."""
    if scope["method"] in ("GET", "HEAD"):
        return scope["path"] in CHANGING_GETS
    return scope["method"] == "POST" and media_type(headers) in SIMPLE_TYPES


def media_type(headers: Mapping[bytes, bytes]) -> bytes:
    """The Content-Type of a request, without its parameters."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
