"""The device memory that an engine needs, before it is allocated, and the memory of the host."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from dflash_jax.decoding.speculative import deferred_features
from dflash_jax.decoding.state import Settings, is_kv_cache
from dflash_jax.engine.config import COPIED_PAGES, IN_FLIGHT, PREFILL_BYTES, EngineConfig
from dflash_jax.engine.dispatch import round_settings
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.steps import REPORT_SIZE
from dflash_jax.errors import InputError
from dflash_jax.models.drafting import proposing
from dflash_jax.ops.cache import page_size, pages_of, window_pages

# Least limit of the bytes of prefixes' pages on a device: an engine of few slots is small, but its prefixes are not.
LEAST_PREFIX_BYTES = 2**26
# JAX's name of the host's memory that devices read and write without a detour.
PINNED = "pinned_host"
# The variable with the most pinned memory that XLA allocates for a GPU, in GiB; a limit, not a reservation.
LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
# Files of cgroups with the memory of this process: (limit, usage), of version 2 and 1.
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: Parameters.
        vision: The vision tower: its parameters and, estimated, its temporary arrays.
        slots: The decoding state without pages.
        pages: The pages of keys and values.
        prefixes: The prefix cache, but for its pages.
        workspace: Temporary arrays of a step, estimated.
        limit: Bytes that may be used.
        counts: Pages of a data shard, in caches that keep all positions and in those with a window.
    """

    weights: int
    vision: int
    slots: int
    pages: int
    prefixes: int
    workspace: int
    limit: int
    counts: tuple[int, int]

    @property
    def all(self) -> int:
        """The sum without the limit."""
        return self.weights + self.vision + self.slots + self.pages + self.prefixes + self.workspace

    def __str__(self) -> str:
        parts = ("weights", *(("vision",) if self.vision else ()), "slots", "pages", "prefixes", "workspace", "limit")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.2f} GB" for name in parts)


def device_memory() -> int:
    """Bytes of one device's memory; for CPU devices, the machine's memory divided among them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


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


def on_device(tree) -> int:
    """Bytes that arrays, or shapes with shardings, take on one device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def deferred_bytes(programs: Executables, batch: int, settings: Settings, config: EngineConfig) -> int:
    """Most bytes of `deferred_features` that any speculation keeps in a dispatch of ``batch`` sequences."""
    target, drafter = programs.pair
    rounds = [round_settings(settings, speculation) for speculation in config.speculations]
    drafters = [proposing(drafter, r.drafter, r.is_alone) for r in rounds]
    features = [deferred_features(target, d, batch, r.block_size) for d, r in zip(drafters, rounds, strict=True)]
    return max((math.prod(x.shape) * x.dtype.itemsize for x in features if x is not None), default=0)


def plan_memory(
    programs: Executables,
    slots: int,
    capacity: int,
    settings: Settings,
    config: EngineConfig,
    fraction: float,
    vision: int = 0,
    max_total_tokens: int | None = None,
) -> Memory:
    """Computes the memory of an engine.

    Args:
        programs: The executables, with the weights.
        slots: Slots of the engine.
        capacity: Positions of each slot at most.
        settings: Settings that the programs share.
        config: The engine's configuration.
        fraction: The share of a device's memory that may be used.
        vision: As in `Memory`.
        max_total_tokens: Tokens that the pages of all data shards have room for, rounded up to whole pages. None: as
            many as all slots of the largest length and the prefix cache can use, or fewer where the memory has no room
            for these.

    Raises:
        InputError: The memory is not enough; the message says what would fit.
    """

    def state_bytes(*pages: int) -> int:
        return on_device(programs.abstract_state(slots, capacity, settings, (pages[0], pages[1])))

    fixed = state_bytes(0, 0)
    page, windowed = state_bytes(1, 0) - fixed, state_bytes(0, 1) - fixed
    model, batch, longest = programs.config, slots // programs.data, pages_of(capacity, capacity) if page else 0
    most, most_windowed = pages_of_slots(programs, slots, capacity, settings)
    prefill = PREFILL_BYTES * config.prefill_sizes[-1] * model.hidden_size
    # Temporary arrays of decoding, which grow with the slots.
    rounds = 12 * batch * config.largest_block * model.vocab_size + deferred_bytes(programs, batch, settings, config)
    limit = int(fraction * device_memory())
    fewest = longest + (config.prefix_bytes > 0 and page > 0)
    # Copies of pages on their way to the host and back.
    copies = 2 * (IN_FLIGHT + 1) * COPIED_PAGES[-1] * max(page, windowed)
    # Each kind of page may use half of the prefix budget.
    most = most if page else 0
    if page:
        most += min(-(-config.prefix_bytes // (2 * page)), max(most, -(-LEAST_PREFIX_BYTES // page)))
    if windowed:
        most_windowed = min(most, most_windowed + config.prefix_bytes // (2 * windowed))
    size = page_size(capacity)
    count = most if max_total_tokens is None else -(-max_total_tokens // (size * programs.data))

    def memory(count: int) -> Memory:
        counts = count, min(count, most_windowed)
        pages = counts[0] * page + counts[1] * windowed
        weights = on_device(programs.weights)
        return Memory(weights, vision, fixed, pages, config.prefix_bytes, prefill + rounds + copies, limit, counts)

    if count < fewest:
        least = fewest * size * programs.data
        raise InputError(
            f"max_total_tokens is {max_total_tokens}: a request of {capacity} tokens needs pages for {least}"
        )
    while memory(count).all > limit and max_total_tokens is None and count > fewest:
        excess = memory(count).all - limit
        count = max(fewest, count - max(1, excess // (page + windowed)))
    plan = memory(count)
    if plan.all <= limit:
        return plan
    room = limit - plan.weights - vision - plan.prefixes - prefill - copies
    fewer = max(0, (room - plan.pages) * slots // (fixed + rounds))
    advice = f"{fewer} slots fit" if fewer else "not one slot fits"
    shorter = max(0, room * capacity // (fixed + rounds + plan.pages)) if room > 0 else 0
    raise InputError(
        f"{slots} slots of at most {capacity} positions do not fit: {plan}; {advice} at this length, or about "
        f"{shorter} positions in each: give less of either, a larger share of the memory, or more devices"
        + (", or leave out the vision tower (language_model_only)" if vision else "")
    )


def pages_of_slots(
    programs: Executables, slots: int, capacity: int, settings: Settings, ahead: int = 2 * REPORT_SIZE
) -> tuple[int, int]:
    """Pages of a data shard that all slots use where each has ``capacity`` positions.

    Args:
        programs: The executables.
        slots: The slots.
        capacity: Positions of each.
        settings: Settings that the programs share.
        ahead: Positions of started dispatches, which may be written before pages that a window has left are given up.

    Returns:
        Pages of caches that keep all positions, and pages of caches with a window.
    """
    state = programs.abstract_state(slots, capacity, settings, (0, 0))
    caches = jax.tree.leaves((state.target, state.draft), is_leaf=is_kv_cache)
    windows = [(c.window, c.sinks) for c in caches if is_kv_cache(c) and c.window is not None]
    windowed = 0
    if windows:
        last, first = max(w for w, _ in windows), max(n for _, n in windows)
        windowed = window_pages(last, first, ahead, capacity)
    batch = slots // programs.data
    return batch * pages_of(capacity, capacity), batch * windowed
