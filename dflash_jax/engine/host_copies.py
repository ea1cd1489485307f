"""Copies of arrays in the host's pinned memory, and how much of it there is."""

import logging
import os
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger("dflash_jax")

# JAX's name of memory that devices read and write without a detour.
PINNED = "pinned_host"
# The most of it that XLA allocates on a GPU, GiB; a limit, not a reservation.
LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Where cgroups have the memory of this process: (limit, usage), of version 2 and 1.
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class HostCopies:
    """Copies between the devices and the host's pinned memory.

    Nothing but `wait` waits for a copy: what uses an array waits on the device.

    Args:
        devices: Devices of this host that have arrays. Each has its part, or its copy, of every array.
    """

    def __init__(self, devices: int):
        self.devices = devices

    def to_host(self, arrays: Any) -> Any:
        """Starts a copy to the host: arrays there, or None where the host has no memory for them."""
        try:
            return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding.with_memory_kind(PINNED), arrays))
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e) or jax.process_count() > 1:
                # Several hosts must all do the same.
                raise
            log.warning("the host's pinned memory is exhausted (%s)", LIMIT_VARIABLE)
            return None

    def to_device(self, arrays: Any) -> Any:
        """Starts a copy of what `to_host` returned: arrays on the device, sharded as before."""
        kind = jax.local_devices()[0].default_memory().kind
        return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), arrays))

    def wait(self, arrays: Any) -> None:
        """Waits for the copy of what `to_host` or `to_device` returned."""
        jax.block_until_ready(arrays)


def has_pinned_memory() -> bool:
    """Whether the devices have pinned host memory beside a memory of their own."""
    device = jax.local_devices()[0]
    return device.platform != "cpu" and any(m.kind == PINNED for m in device.addressable_memories())


def free_memory() -> int:
    """Bytes of this host's memory that are free, within the limit of its container."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    for limit, usage in CGROUPS:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):
            # No such file, or no limit: "max".
            continue
    return max(free, 0)


def allow_pinned_memory() -> None:
    """Lets XLA pin all of the host's memory on a GPU. Only has an effect before JAX starts its first device."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    os.environ.setdefault(LIMIT_VARIABLE, str(max(64, size // 2**30)))
