"""Qwen3-Next and Qwen3-Coder-Next (`qwen3_next`): Qwen3.5's hybrid with projections packed differently on disk."""

from collections.abc import Collection

import numpy as np

from dflash_jax.models.config import GatedDeltaSpec, ModelConfig
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.qwen3_5 import is_skipped, read_hybrid
from dflash_jax.models.families.reading import Raw
from dflash_jax.models.families.tables import decoder_entries, shared_delta_entries

__all__ = ["is_skipped", "read_config", "weight_names"]


def read_config(raw: dict) -> ModelConfig:
    """Reads a target's ``config.json``."""
    return read_hybrid(Raw(raw))


def delta_entries(path: str, name: str, spec: GatedDeltaSpec, hidden: int) -> list[Entry]:
    """The entries of a Gated DeltaNet mixer; on disk it is grouped by key head: ``[q | k | v | z]`` and ``[b | a]``."""
    g, r = spec.num_key_heads, spec.values_per_key
    rows = spec.channels_per_key + r * spec.value_dim

    def join(arrays):
        return np.moveaxis(arrays[0].reshape(g, 2, r, -1), 1, 0)

    def split(array):
        return [np.moveaxis(array.reshape(2, g, r, hidden), 0, 1)]

    gates = (Tensor(f"{name}in_proj_ba.weight", (g * 2 * r, hidden)),)
    return [
        same(f"{path}qkvz", (g, rows, hidden), f"{name}in_proj_qkvz.weight", (g * rows, hidden)),
        Entry(f"{path}beta_alpha", (2, g, r, hidden), gates, join, split),
        *shared_delta_entries(path, name, spec, hidden),
    ]


def weight_names(config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table for a checkpoint with the tensors ``names`` (default: fused experts)."""
    return decoder_entries(config, names, delta_entries)
