"""The server's address: TCP or a Unix socket, with or without TLS, below a proxy's path."""

import errno
import os
import socket
import ssl
import stat
from contextlib import suppress
from pathlib import Path

from dflash_jax.errors import InputError

BACKLOG = 2048
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback name or address."""
    return host in LOOPBACK or host.startswith("127.")


def listen(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A listening socket, opened before anything is loaded, so that an address in use is an error at once.

    Args:
        host: A name or an address.
        port: 0 for any free port.
        uds: Path of a Unix socket in place of TCP.

    Raises:
        InputError: The address cannot be used.
    """
    if uds is None and not host:
        # The system would take the empty string for all networks.
        raise InputError("--host is empty: give a name or an address, 0.0.0.0 for all networks")
    try:
        if uds is not None:
            return _listen_at(uds)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, ValueError) as e:
        code = getattr(e, "errno", None)
        reason = os.strerror(code) if code and code > 0 else str(e)
        raise InputError(f"{f'{host}:{port}' if uds is None else f'--uds {uds[:120]}'}: {reason}") from None


def _listen_at(path: str) -> socket.socket:
    """A Unix socket. A socket file without a listening server is replaced; any other file is an error."""
    # Linux treats these paths as sockets without a file.
    if not path or "\0" in path:
        raise ValueError("the path is empty or has a NUL")
    listening = socket.socket(socket.AF_UNIX)
    try:
        try:
            listening.bind(path)
        except OSError as e:
            if e.errno != errno.EADDRINUSE or not _is_dead(path):
                raise
            os.unlink(path)
            listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _is_dead(path: str) -> bool:
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def close(listening: socket.socket, uds: str | None) -> None:
    """Closes a listening socket, and removes the file of a Unix socket."""
    if uds is not None:
        with suppress(OSError):
            os.unlink(uds)
    listening.close()


def url(listening: socket.socket, is_tls: bool) -> str:
    """The URL that clients connect to."""
    scheme = "https" if is_tls else "http"
    if listening.family == socket.AF_UNIX:
        return f"{scheme}+unix://{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_context(args) -> ssl.SSLContext | None:
    """The TLS context of the ``--ssl-…`` flags; None without a certificate.

    Raises:
        InputError: Flags contradict each other, or a file cannot be used.
    """
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(args, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} needs --ssl-certfile")
        if args.ssl_cert_reqs:
            raise InputError("--ssl-cert-reqs needs --ssl-certfile")
        return None
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise InputError(f"--ssl-cert-reqs {args.ssl_cert_reqs} needs --ssl-ca-certs, to check clients against")
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        _check_readable(f"--{name.replace('_', '-')}", getattr(args, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # The password function keeps OpenSSL from asking on the terminal.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or "")
    except (OSError, ValueError) as e:
        raise InputError(
            f"--ssl-certfile {args.ssl_certfile}: the certificate and key cannot be used: {_why(e)}"
        ) from None
    try:
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ValueError) as e:
        raise InputError(f"--ssl-ca-certs {args.ssl_ca_certs}: {_why(e)}") from None
    context.verify_mode = ssl.VerifyMode(args.ssl_cert_reqs)
    return context


def _check_readable(flag: str, name: str | None) -> None:
    if name is None:
        return
    try:
        if Path(name).is_dir():
            raise InputError(f"{flag} {name} is a directory: give a PEM file")
        with open(name, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as e:
        raise InputError(f"{flag} {name[:200]} cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(reason).replace("_", " ").lower()


class UnderPath:
    """An application that a proxy serves below ``prefix``; the proxy may remove the prefix from paths or keep it.

    The application sees paths without it, so that decisions by path do not depend on the proxy.
    """

    def __init__(self, app, prefix: str):
        self.app, self._prefix = app, prefix

    async def __call__(self, scope, receive, send) -> None:
        """The ASGI application."""
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            scope = scope | {"path": path[len(self._prefix) :] or "/"}
        await self.app(scope, receive, send)
