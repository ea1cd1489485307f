"""Llama (`llama`: Llama-3.1, SmolLM2): attention without q/k norms, dense."""

from dflash_jax.models.config import ModelConfig
from dflash_jax.models.families.qwen3 import is_skipped, read_classic, weight_names
from dflash_jax.models.families.reading import Raw

__all__ = ["is_skipped", "read_config", "weight_names"]


def read_config(raw: dict) -> ModelConfig:
    """Reads a target's ``config.json``."""
    return read_classic(Raw(raw), qk_norm=False)
