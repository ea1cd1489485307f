"""Exits with 0 where the server of this container is alive, wherever its options have it listen; a HEALTHCHECK.

Other commands have no server: they are alive as long as their process.
"""

import http.client
import logging
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

# Modules that read the options of the commands with a server.
PARSERS = {"serve": "dflash_jax.options.serve", "cluster": "dflash_jax.cluster.options"}
TIMEOUT_S = 4


def commands(processes: Path = Path("/proc")) -> Iterator[list[str]]:
    """Yields the words after ``dflash`` of each process, from the oldest one."""
    numbers = sorted(int(each.name) for each in processes.iterdir() if each.name.isdecimal())
    for number in numbers:
        try:
            words = (processes / str(number) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            # It has ended.
            continue
        at = next((i for i, word in enumerate(words[:2]) if Path(word).name == "dflash"), None)
        if at is not None and words[at + 1 :]:
            yield words[at + 1 :]


def connection(args) -> http.client.HTTPConnection:
    """A connection to the server of parsed arguments."""
    # What listens on all networks listens here.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host) or str(args.host)
    if args.ssl_certfile is None:
        found = http.client.HTTPConnection(host, args.port, timeout=TIMEOUT_S)
    else:
        # The certificate is of another name than the one that is asked here.
        context = ssl._create_unverified_context()
        found = http.client.HTTPSConnection(host, args.port, timeout=TIMEOUT_S, context=context)
    if args.uds is not None:
        found.sock = socket.socket(socket.AF_UNIX)
        found.sock.settimeout(TIMEOUT_S)
        found.sock.connect(args.uds)
        if args.ssl_certfile is not None:
            found.sock = context.wrap_socket(found.sock)
    return found


def is_alive(words: list[str]) -> bool:
    """Whether the server of ``dflash`` with these words answers."""
    args, _ = import_module(PARSERS[words[0]]).parse(words[1:])
    try:
        with closing(connection(args)) as asking:
            asking.request("GET", "/health")
            return asking.getresponse().status == 200
    except ssl.SSLError:
        # It demands a certificate of each client, and so it is there.
        return args.ssl_cert_reqs == ssl.CERT_REQUIRED
    except (OSError, http.client.HTTPException):
        return False


def main(processes: Path = Path("/proc")) -> int:
    """The exit code."""
    logging.disable()
    found = next(commands(processes), None)
    if found is None:
        return 1
    return 0 if found[0] not in PARSERS or is_alive(found) else 1


if __name__ == "__main__":
    sys.exit(main())
