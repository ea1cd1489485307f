"""`dflash cluster`: its options, which are those of `serve` and of the replicas. `dflash_jax.cluster` runs it."""

import argparse
import math
import re
from importlib import import_module

from dflash_jax.aliases import json_object
from dflash_jax.cli import serve_arguments
from dflash_jax.cli.options import exit_code, program
from dflash_jax.errors import InputError

# Of a replica.
MOST_HOSTS = 1024
DESCRIPTION = """Replicas of `dflash serve` behind one address, on Ray Serve. A stream whose replica dies goes on from
another one. Takes all options of `dflash serve`."""


def add_options(p: argparse.ArgumentParser) -> None:
    """Adds the options of the cluster."""
    cluster = p.add_argument_group("cluster")
    text = "a number, or MIN:MAX, between which it follows the load (default: %(default)s)"
    cluster.add_argument("--replicas", type=replicas, default=(1, 1), metavar="N|MIN:MAX", help=text)
    text = "of this cluster, on a Ray cluster that has several (default: %(default)s)"
    cluster.add_argument("--name", type=name, default="dflash", metavar="NAME", help=text)
    text = "of a running Ray cluster, or auto for this machine's (default: Ray is started on this machine)"
    cluster.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "requests of a replica that MIN:MAX aims at (default: --slots)"
    cluster.add_argument("--target-ongoing", type=float, metavar="N", help=text)
    text = "seconds of more load before a replica is added (default: %(default)g)"
    cluster.add_argument("--scale-up-s", type=float, default=10.0, metavar="S", help=text)
    text = "seconds of less load before one is ended (default: %(default)g)"
    cluster.add_argument("--scale-down-s", type=float, default=120.0, metavar="S", help=text)
    text = "seconds that a request waits for a replica where all are lost (default: %(default)g)"
    cluster.add_argument("--wait-s", type=float, default=120.0, metavar="S", help=text)
    text = "CPUs that a replica reserves (default: %(default)g)"
    cluster.add_argument("--replica-cpus", type=float, default=0.0, metavar="N", help=text)
    text = "GPUs that a replica reserves and sees (default: the devices of its --mesh, where the cluster has GPUs)"
    cluster.add_argument("--replica-gpus", type=float, metavar="N", help=text)
    text = 'other resources that a replica reserves, on each of its hosts, such as {"TPU": 4}'
    cluster.add_argument("--replica-resources", type=json_object, default={}, metavar="JSON", help=text)
    text = "hosts that the devices of a replica's --mesh are divided among (default: %(default)s)"
    cluster.add_argument("--replica-hosts", type=int, default=1, metavar="N", help=text)
    text = "TPU slice that each replica has for itself, such as v6e:4x4, with all its hosts"
    cluster.add_argument("--replica-slice", type=tpu_slice, metavar="VERSION:TOPOLOGY", help=text)


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


def make_parser() -> argparse.ArgumentParser:
    """The parser of `cluster`."""
    p = serve_arguments.make_parser()
    p.prog, p.description = program("cluster"), DESCRIPTION
    add_options(p)
    return p


def parse(argv: list[str] | None):
    """Arguments, and the `System` of --config, or None. Raises InputError."""
    args, system = serve_arguments.parse(argv, make_parser())
    if args.distributed:
        raise InputError("--distributed is of `dflash serve`: here --replica-hosts N divides a replica among hosts")
    if not 1 <= args.replica_hosts <= MOST_HOSTS:
        raise InputError(f"--replica-hosts {args.replica_hosts}: it must be 1 to {MOST_HOSTS}")
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
    for name in ("target_ongoing", "scale_up_s", "scale_down_s", "wait_s", "replica_cpus", "replica_gpus"):
        value = getattr(args, name)
        if value is not None and not (0 <= value < 1e9 and (value > 0 or name != "target_ongoing")):
            least = "above 0" if name == "target_ongoing" else "0 or more"
            raise InputError(f"--{name.replace('_', '-')} {value}: it must be {least}")
    return args, system


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    # It imports this package, so that it is imported by its name.
    return exit_code(lambda: import_module("dflash_jax.cluster.command").run(*parse(argv)))
