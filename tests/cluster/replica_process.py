"""A replica's engine in a process of its own: ``python -m tests.cluster.replica_process WORD ...``.

It says where it listens, and ends as Serve ends one when a line comes.
"""

import sys

from dflash_jax.cluster.options import parse
from dflash_jax.cluster.replica import ReplicaServer
from dflash_jax.process import leave

SECRET = b"s" * 32


def main() -> None:
    args, system = parse(sys.argv[1:])
    server = ReplicaServer(args, system, SECRET, "127.0.0.1")
    server.start()
    assert server.failure is None
    print(*server.address, flush=True)
    sys.stdin.readline()
    print(server.ongoing, flush=True)
    server.stop()
    assert server.failure is not None
    # Threads may still compile, and the interpreter's end would crash them.
    leave(0)


if __name__ == "__main__":
    main()
