"""The device memory that an engine needs, before it is allocated."""

import os
from dataclasses import dataclass

import jax
import numpy as np

from dflash_jax.decoding.state import Settings
from dflash_jax.engine.config import PREFILL_BYTES, EngineConfig
from dflash_jax.engine.executables import Executables
from dflash_jax.errors import InputError


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: Parameters.
        vision: The vision tower: its parameters and, estimated, its temporary arrays.
        slots: The decoding state.
        prefixes: The prefix cache.
        workspace: Temporary arrays of a step, estimated.
        limit: What may be used.
    """

    weights: int
    vision: int
    slots: int
    prefixes: int
    workspace: int
    limit: int

    @property
    def all(self) -> int:
        """The sum without the limit."""
        return self.weights + self.vision + self.slots + self.prefixes + self.workspace

    def __str__(self) -> str:
        parts = ("weights", *(("vision",) if self.vision else ()), "slots", "prefixes", "workspace", "limit")
        return ", ".join(f"{name} {getattr(self, name) / 1e9:.2f} GB" for name in parts)


def device_memory() -> int:
    """Bytes of one device's memory; for CPU devices, the machine's memory divided among them."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def on_device(tree) -> int:
    """Bytes that arrays, or shapes with shardings, take on one device."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def plan_memory(
    programs: Executables,
    slots: int,
    capacity: int,
    settings: Settings,
    config: EngineConfig,
    fraction: float,
    vision: int = 0,
) -> Memory:
    """Computes the memory of an engine.

    Args:
        programs: The executables, with the weights.
        slots: Slots of the engine.
        capacity: Positions of each slot.
        settings: What the programs share.
        config: The engine's configuration.
        fraction: The share of a device's memory that may be used.
        vision: As in `Memory`.

    Raises:
        InputError: The memory is not enough; the message says what would fit.
    """
    state = on_device(programs.abstract_state(slots, capacity, settings))
    model = programs.config
    # float32 logits of a round three times over, and activations of a prefill chunk.
    batch, prefill = slots // programs.data, PREFILL_BYTES * config.prefill_sizes[-1] * model.hidden_size
    logits = 12 * batch * config.largest_block * model.vocab_size
    limit = int(fraction * device_memory())
    memory = Memory(on_device(programs.weights), vision, state, config.prefix_bytes, prefill + logits, limit)
    if memory.all <= memory.limit:
        return memory
    room = memory.limit - memory.weights - memory.vision - memory.prefixes - prefill
    need = state + logits
    fewer = max(0, room * slots // need)
    advice = f"{fewer} slots fit" if fewer else "not one slot fits"
    shorter = max(0, room * capacity // need) if room > 0 else 0
    raise InputError(
        f"{slots} slots of {capacity} positions do not fit: {memory}; {advice} at this length, or about {shorter} "
        f"positions in each: give less of either, a larger share of the memory, or more devices"
        + (", or leave out the vision tower (language_model_only)" if vision else "")
    )
