"""Several processes as one: started from the environment that a cluster gives."""

import os
import re
import sys
from collections.abc import Callable
from functools import cache

from dflash_jax import progress
from dflash_jax.errors import InputError

# Bytes that `broadcast` sends.
MOST_BYTES = 4096
# The coordinator's port in a LeaderWorkerSet, whose pods have addresses of their own.
LWS_PORT = 8476


def start() -> None:
    """Joins this process to the others.

    JAX recognises Slurm, Open MPI, Kubernetes and TPU pods by itself, and this function the variables of a
    LeaderWorkerSet. Elsewhere JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID identify the processes.
    The only process of a host has all of its devices, unless JAX_LOCAL_DEVICE_IDS names some.

    Raises:
        InputError: No cluster is recognised.
    """
    import jax

    # GPUs and TPUs have collectives of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Collectives of several programs in flight wait for one another on a CPU's few threads, for ever in the worst case.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if "LWS_LEADER_ADDRESS" in os.environ:
        os.environ.setdefault("JAX_COORDINATOR_ADDRESS", f"{os.environ['LWS_LEADER_ADDRESS']}:{LWS_PORT}")
        for name, given in (("JAX_NUM_PROCESSES", "LWS_GROUP_SIZE"), ("JAX_PROCESS_ID", "LWS_WORKER_INDEX")):
            os.environ.setdefault(name, os.environ.get(given, ""))
    try:
        num_processes, process_id = _count("JAX_NUM_PROCESSES"), _count("JAX_PROCESS_ID")
        # Without a list, JAX gives each process of Slurm and Open MPI one device. An empty list restricts nothing.
        has_all = "JAX_LOCAL_DEVICE_IDS" not in os.environ and _is_alone_on_host()
        jax.distributed.initialize(
            num_processes=num_processes, process_id=process_id, local_device_ids=[] if has_all else None
        )
        if not is_first():
            progress.disable()
    except (ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise InputError(
            f"--distributed: no cluster is recognised here ({reason}); set JAX_COORDINATOR_ADDRESS=host:port, "
            f"JAX_NUM_PROCESSES and JAX_PROCESS_ID, or leave it out"
        ) from None


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
