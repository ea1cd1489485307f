"""Qwen2 and Qwen2.5, dense (`qwen2`): attention without q/k norms, with biases of queries, keys and values."""

from dflash_jax.models.config import ModelConfig
from dflash_jax.models.families.qwen3 import is_skipped, read_classic, weight_names
from dflash_jax.models.families.reading import Raw

__all__ = ["is_skipped", "read_config", "weight_names"]


def read_config(raw: dict) -> ModelConfig:
    text = Raw(raw)
    # A key of some published configs, known at the value that this mathematics has.
    text.allow("use_mrope", False)
    return read_classic(text, qk_norm=False, qkv_bias=True)
