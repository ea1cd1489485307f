"""What an engine will hold on a device, before it holds it."""

import os
from dataclasses import dataclass

import jax
import numpy as np

from dflash_jax.decoding.state import Settings
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.options import PREFILL_BYTES, Options
from dflash_jax.errors import InputError


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: parameters, slots, prefixes, the arrays of a step (roughly), and what may be used."""

    weights: int
    slots: int
    prefixes: int
    workspace: int
    limit: int

    @property
    def all(self) -> int:
        return self.weights + self.slots + self.prefixes + self.workspace

    def __str__(self) -> str:
        parts = ("weights", "slots", "prefixes", "workspace", "limit")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.2f} GB" for name in parts)


def device_memory() -> int:
    """Bytes of one device; of a CPU, the machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def on_device(tree) -> int:
    """Bytes that arrays, or their shapes, take on one device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def plan_memory(
    programs: Executables,
    slots: int,
    capacity: int,
    settings: Settings,
    options: Options,
    fraction: float,
) -> Memory:
    """Raises InputError, with what would fit, where ``fraction`` of a device is not enough."""
    held = on_device(programs.abstract_state(slots, capacity, settings))
    config = programs.config
    # float32 logits of a round three times over, and activations of a prefill chunk.
    rows, prefill = slots // programs.data, PREFILL_BYTES * options.prefill_sizes[-1] * config.hidden_size
    logits = 12 * rows * options.widths[-1] * config.vocab_size
    limit = int(fraction * device_memory())
    memory = Memory(on_device(programs.weights), held, options.prefix_bytes, prefill + logits, limit)
    if memory.all <= memory.limit:
        return memory
    room = memory.limit - memory.weights - memory.prefixes - prefill
    each = held + logits
    fewer = max(0, room * slots // each)
    advice = f"{fewer} slots fit" if fewer else "not one slot fits"
    shorter = max(0, room * capacity // each) if room > 0 else 0
    raise InputError(
        f"{slots} slots of {capacity} positions do not fit: {memory}; {advice} at this length, or about {shorter} "
        f"positions in each: give less of either, a larger share of the memory, or more devices"
    )
