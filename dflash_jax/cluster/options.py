"""`dflash cluster`: its options, which are those of `serve` and of the replicas."""

import argparse
import math
import re
from dataclasses import dataclass
from functools import partial

from dflash_jax.errors import InputError
from dflash_jax.options import serve
from dflash_jax.options.option import option
from dflash_jax.options.parser import Parser, program

# Hosts of a replica, and any other number.
MOST_HOSTS, MOST = 1024, 10**9
DESCRIPTION = """Replicas of `dflash serve` behind one address, on Ray Serve. A stream whose replica dies goes on from
another one. Takes all options of `dflash serve`."""


def devices_of(mesh: str | None) -> int:
    """Devices of a ``--mesh``."""
    return math.prod(map(int, re.findall(r"\d+", mesh or "")))


def replicas(given: str) -> tuple[int, int]:
    """Reads ``--replicas``: N or MIN:MAX."""
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", given)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{given[:40]!r}: it must be N or MIN:MAX, of 1 or more")
    return least, most


def name(given: str) -> str:
    """Reads ``--name``."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", given, re.ASCII):
        raise argparse.ArgumentTypeError(f"{given[:40]!r}: it must be 1 to 63 letters, digits, '-', '_' and '.'")
    return given


def tpu_slice(given: str) -> tuple[str, str]:
    """Reads ``--replica-slice``: the version and the topology."""
    match = re.fullmatch(r"(v\w{1,9}):(\d{1,3}(?:x\d{1,3}){1,2})", given)
    if not match:
        raise argparse.ArgumentTypeError(f"{given[:40]!r}: it must be VERSION:TOPOLOGY, such as v6e:4x4")
    return match[1], match[2]


_cluster = partial(option, group="cluster")


@dataclass(frozen=True)
class ClusterOptions:
    """The options that only `dflash cluster` has."""

    replicas: tuple[int, int] = _cluster(
        (1, 1), "a number, or MIN:MAX, between which it follows the load (default: 1)", "N|MIN:MAX", read=replicas
    )
    ingresses: int = _cluster(
        1, "addresses of the cluster, each on a node of its own (default: 1)", "N", least=1, most=MOST_HOSTS
    )
    name: str = _cluster("dflash", "of this cluster, on a Ray cluster that has several", "NAME", read=name)
    address: str | None = _cluster(
        None,
        "of a running Ray cluster, or auto for this machine's (default: Ray is started on this machine)",
        "HOST:PORT",
    )
    target_ongoing: float | None = _cluster(
        None, "requests of a replica that MIN:MAX aims at (default: --slots)", "N", above=0, most=MOST
    )
    scale_up_s: float = _cluster(10.0, "seconds of more load before a replica is added", "S", least=0, most=MOST)
    scale_down_s: float = _cluster(120.0, "seconds of less load before one is ended", "S", least=0, most=MOST)
    wait_s: float = _cluster(
        120.0, "seconds that a request waits for a replica where all are lost", "S", least=0, most=MOST
    )
    replica_cpus: float = _cluster(0.0, "CPUs that a replica reserves", "N", least=0, most=MOST)
    replica_gpus: float | None = _cluster(
        None,
        "GPUs that a replica reserves and sees (default: the devices of its --mesh, where the cluster has GPUs)",
        "N",
        least=0,
        most=MOST,
    )
    replica_resources: dict = _cluster(
        dict, 'other resources that a replica reserves, on each of its hosts, such as {"TPU": 4}', "JSON"
    )
    replica_hosts: int = _cluster(
        1, "hosts that the devices of a replica's --mesh are divided among", "N", least=1, most=MOST_HOSTS
    )
    replica_slice: tuple[str, str] | None = _cluster(
        None,
        "TPU slice that each replica has for itself, such as v6e:4x4, with all its hosts",
        "VERSION:TOPOLOGY",
        read=tpu_slice,
    )


def make_parser() -> Parser:
    """The parser of `cluster`."""
    p = serve.make_parser()
    p.prog, p.description = program("cluster"), DESCRIPTION
    p.add_options(ClusterOptions)
    return p


def parse(argv: list[str] | None):
    """Arguments, and the `System` of --config, or None. Raises InputError."""
    args, system = serve.parse(argv, make_parser())
    if args.distributed:
        raise InputError("--distributed is of `dflash serve`: here --replica-hosts N divides a replica among hosts")
    devices = devices_of(args.mesh)
    if devices % args.replica_hosts:
        raise InputError(f"--replica-hosts {args.replica_hosts}: it must divide the {devices} devices of --mesh")
    if (args.replica_gpus or 0) % args.replica_hosts:
        raise InputError(f"--replica-gpus {args.replica_gpus:g}: --replica-hosts {args.replica_hosts} must divide it")
    if args.replica_slice is not None:
        reserved = {"hosts": args.replica_hosts > 1, "gpus": args.replica_gpus, "resources": args.replica_resources}
        if given := next((name for name, value in reserved.items() if value), None):
            raise InputError(f"--replica-{given}: what a replica reserves follows from its --replica-slice")
    if args.target_ongoing is None:
        args.target_ongoing = float(args.slots)
    return args, system
