"""Phi-3 and Phi-4 (`phi3`): llama's layers, whose q, k and v are one tensor on disk, and gate and up another.

LongRoPE is refused by name, as are windows shorter than the context.
"""

from collections.abc import Collection

from dflash_jax.models.config import AttentionSpec, ModelConfig
from dflash_jax.models.families.names import Entry, rows_of, same
from dflash_jax.models.families.qwen3 import is_skipped, read_classic
from dflash_jax.models.families.reading import Raw
from dflash_jax.models.families.tables import decoder_entries

__all__ = ["is_skipped", "read_config", "weight_names"]


def read_config(raw: dict) -> ModelConfig:
    text = Raw(raw)
    # Dropout of training, and the original context, which LongRoPE alone reads.
    for key in ("embd_pdrop", "resid_pdrop", "original_max_position_embeddings"):
        text.allow(key)
    window = text.integer("sliding_window", None)
    if window is not None and window >= text.need("max_position_embeddings"):
        # The whole context is in the window.
        text["use_sliding_window"] = False
    return read_classic(text, qk_norm=False)


def attention(path: str, name: str, spec: AttentionSpec, hidden: int) -> list[Entry]:
    n, k, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
    # Rows of one tensor are three parameters: each is divided over devices by its own heads.
    queries, keys, values = rows_of(f"{name}qkv_proj.weight", (n * d, k * d, k * d), hidden)
    return [
        Entry(f"{path}q", (n, 1, d, hidden), (queries,)),
        Entry(f"{path}k", (k, d, hidden), (keys,)),
        Entry(f"{path}v", (k, d, hidden), (values,)),
        same(f"{path}o", (hidden, n, d), f"{name}o_proj.weight", (hidden, n * d)),
    ]


def mlp(path: str, name: str, size: int, hidden: int) -> list[Entry]:
    return [
        same(f"{path}gate_up", (2, size, hidden), f"{name}gate_up_proj.weight", (2 * size, hidden)),
        same(f"{path}down", (hidden, size), f"{name}down_proj.weight"),
    ]


def weight_names(config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
    return decoder_entries(config, names, attention=attention, mlp=mlp)
