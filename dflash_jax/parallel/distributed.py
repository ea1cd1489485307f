"""Several processes as one: started from the environment that a cluster gives."""

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dflash_jax import progress
from dflash_jax.errors import InputError
from dflash_jax.process import end_process

# Bytes that `broadcast` sends.
MOST_BYTES = 4096
# The coordinator's port where nothing names one: JAX's on a TPU slice, whose driver has others for itself.
PORT = 8482
# Seconds in which all processes must be there. JAX alone would abort without a name.
START_S = 300.0
# Seconds to look up the addresses of missing hosts, after which the error is written without their names.
LOOK_UP_S = 10.0
# Flags of compilers: programs of processes with others may wait for one another for ever.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Of these, what only writes files, or says where files are.
OF_FILES = re.compile(r"--xla_(\w+_)?dump_.*|.*_(dir|file|path)")


def slice_hosts() -> list[str]:
    """The hosts of this host's TPU slice, in order, as GKE tells them; none elsewhere."""
    names = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES", ""))
    return [name.strip() for name in names.split(",") if name.strip()]


def check_whole(platforms: str | None = None) -> None:
    """Raises InputError in a process by itself on one host of a TPU slice, whose driver waits for the others.

    Args:
        platforms: Those of the process, as JAX has them; None: of this one.
    """
    if len(hosts := slice_hosts()) < 2:
        return
    import jax

    platforms = platforms or jax.config.values["jax_platforms"]
    if platforms != "cpu" and not jax.distributed.is_initialized():
        # It comes first where it is set.
        also = ", and unset TPU_PROCESS_ADDRESSES" * bool(os.environ.get("TPU_PROCESS_ADDRESSES"))
        raise InputError(
            f"this is host {os.environ.get('TPU_WORKER_ID', '?')} of the {len(hosts)} of a TPU slice: start a command "
            f"that has --distributed, or a program that calls parallel.distributed.start(), on each; for the devices "
            f"of this host alone set TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0{also} (no slice has tried it)"
        )


def build() -> dict[str, str]:
    """What decides, beside the arguments, which programs this process compiles."""
    # The package itself imports the frontend, which this layer may not.
    import jax

    found = {"dflash_jax": sys.modules[__name__.partition(".")[0]].__version__}
    is_tpu = jax.default_backend() == "tpu"
    for name in ("jax", "jaxlib", *["libtpu"] * is_tpu):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found | {name: flags for name in FLAGS[: 1 + is_tpu] if (flags := _flags(os.environ.get(name, "")))}


def _flags(text: str) -> str:
    """Of a compiler's flags those that decide about programs, the last of each name."""
    flags = {flag.partition("=")[0]: flag for flag in text.split()}
    return " ".join(flag for name, flag in sorted(flags.items()) if not OF_FILES.fullmatch(name))


def start() -> None:
    """Joins this process to the others.

    JAX recognises Slurm, Open MPI, Kubernetes and TPU pods by itself, and this function the variables of a
    LeaderWorkerSet. Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID identify the processes.
    The only process of a host has all of its devices, unless JAX_LOCAL_DEVICE_IDS names some.

    Raises:
        InputError: No cluster is recognised, or the coordinator's address is none.
    """
    import jax

    # GPUs and TPUs have collectives of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Collectives of several programs in flight wait for one another on a CPU's few threads, for ever in the worst case.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if "LWS_LEADER_ADDRESS" in os.environ:
        os.environ.setdefault("JAX_COORDINATOR_ADDRESS", f"{os.environ['LWS_LEADER_ADDRESS']}:{PORT}")
        for name, given in (("JAX_NUM_PROCESSES", "LWS_GROUP_SIZE"), ("JAX_PROCESS_ID", "LWS_WORKER_INDEX")):
            os.environ.setdefault(name, os.environ.get(given, ""))
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if coordinator and not re.fullmatch(r".+:\d{1,5}", coordinator):
        raise InputError(f"--distributed: JAX_COORDINATOR_ADDRESS is {coordinator!r}: it must be host:port")
    try:
        num_processes, process_id = _count("JAX_NUM_PROCESSES"), _count("JAX_PROCESS_ID")
        # Without a list, JAX gives each process of Slurm and Open MPI one device. An empty list restricts nothing.
        has_all = "JAX_LOCAL_DEVICE_IDS" not in os.environ and _is_alone_on_host()
        with _watched():
            jax.distributed.initialize(
                num_processes=num_processes,
                process_id=process_id,
                local_device_ids=[] if has_all else None,
                initialization_timeout=int(START_S) + 60,
            )
        if not is_first():
            progress.disable()
    except (ValueError, RuntimeError, OSError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise InputError(
            f"--distributed: no cluster is recognised here ({reason}); set JAX_COORDINATOR_ADDRESS=host:port, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave it out"
        ) from None


@contextmanager
def _watched() -> Iterator[None]:
    """Ends the process with one line where the block takes longer than `START_S`."""
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(START_S):
            try:
                missing = _who_is_missing()
            except Exception as e:
                missing = f"{type(e).__name__}: {' '.join(str(e).split())}"
            end_process(
                f"--distributed: not all processes are there after {START_S:g} s: {missing}; "
                f"the same command has to run on every host"
            )

    threading.Thread(target=watch, name="start", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _who_is_missing() -> str:
    """What this process knows of the others, in words: by the environment, and by connections."""
    hosts, port = slice_hosts(), os.environ.get("JAX_COORDINATOR_PORT", PORT)
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", f"{hosts[0].partition(':')[0]}:{port}" if hosts else "")
    index = os.environ.get("JAX_PROCESS_ID", os.environ.get("TPU_WORKER_ID", ""))
    if not coordinator or not index:
        return "the others are not named here"
    host, _, port = coordinator.rpartition(":")
    if index != "0":
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
        except OSError as e:
            return f"process {index} finds no first process at {coordinator} ({e.strerror or e})"
        return f"process {index} waits at {coordinator} for others"
    there = _connected(int(port))
    those = f"other hosts with connections to {coordinator}: {', '.join(sorted(there)) or 'none'}"
    addresses = _addresses(hosts[1:])
    named = {f"process {i} ({name})": addresses[name] for i, name in enumerate(hosts) if i}
    absent = [name for name, own in named.items() if own is not None and not there & own]
    late = [name for name, own in named.items() if own is None]
    missing = f"missing are {', '.join(absent)}; " if absent else ""
    missing += f"no address in {LOOK_UP_S:g} s of {', '.join(late)}; " if late else ""
    return f"{missing}{those}"


def _addresses(hosts: list[str]) -> dict[str, set[str] | None]:
    """The addresses of hosts; None where looking them up takes longer than `LOOK_UP_S`."""

    def look_up(host: str) -> set[str]:
        try:
            found = socket.getaddrinfo(host.partition(":")[0], None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return set()
        return {str(entry[4][0]) for entry in found}

    pool = ThreadPoolExecutor(64)
    futures = {host: pool.submit(look_up, host) for host in hosts}
    done, _ = wait(futures.values(), LOOK_UP_S)
    pool.shutdown(wait=False, cancel_futures=True)
    return {host: future.result() if future in done else None for host, future in futures.items()}


def _connected(port: int) -> set[str]:
    """The other hosts that have connections to a port of this one, by Linux's tables."""
    found = set()
    for path, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(path).read_text().splitlines()[1:]:
                _, local, remote, state, *_ = line.split()
                (own, _, own_port), (other, *_) = local.partition(":"), remote.partition(":")
                # From this host to itself, both ends have one address.
                if state == "01" and int(own_port, 16) == port and other != own:
                    # Words of the machine's byte order.
                    data = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in re.findall("." * 8, other))
                    found.add(socket.inet_ntop(family, data).removeprefix("::ffff:"))
    return found


def _is_alone_on_host() -> bool:
    """Whether Slurm or Open MPI has started one process on each host."""
    # Such as "1(x2)" or "2,1(x3)".
    slurm = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    is_one_each = bool(slurm) and all(re.fullmatch(r"1(\(x\d+\))?", each) for each in slurm.split(","))
    return is_one_each or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def _count(name: str) -> int | None:
    """An environment variable as a number; None where it is not set."""
    value = os.environ.get(name)
    return None if value is None else int(value)


def is_first() -> bool:
    """Whether this is the process that speaks."""
    import jax

    return jax.process_index() == 0


def one_voice() -> None:
    """Only the first process writes to stdout, and libraries that write there (Gloo) write to stderr."""
    sys.stdout.flush()
    descriptor = os.dup(1) if is_first() else os.open(os.devnull, os.O_WRONLY)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(descriptor, "w", encoding="utf-8")


def broadcast(data: bytes) -> bytes:
    """The first process's ``data``, at most `MOST_BYTES`, everywhere; that of the others is ignored."""
    import numpy as np
    from jax.experimental import multihost_utils

    assert len(data) <= MOST_BYTES, f"{len(data)} bytes"
    padded = np.zeros(MOST_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).rstrip(b"\0")


def agreed(value: int) -> int:
    """The first process's ``value``, everywhere."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.uint32(value)))


def anywhere(flag: Callable[[], bool]) -> Callable[[], bool]:
    """Starts to ask every process for its flag; all of them call this at the same place.

    Args:
        flag: This process's own.

    Returns:
        Whether a process had raised its flag, the same everywhere. Of the only process: its flag as it is then.
    """
    import jax
    import numpy as np

    if jax.process_count() == 1:
        return flag
    sharding, reduced = _reduction()
    own = np.full(jax.local_device_count(), flag())
    found = reduced(jax.make_array_from_process_local_data(sharding, own))
    return lambda: bool(found)


@cache
def _reduction():
    """The sharding of a flag for each device, and the program that says whether one is raised."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("devices",))
    replicated = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("devices")), jax.jit(lambda x: x.any(), out_shardings=replicated)
