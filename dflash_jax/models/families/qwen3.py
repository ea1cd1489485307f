"""Qwen3, dense (`qwen3`) and mixture-of-experts (`qwen3_moe`, Qwen3-Coder-30B-A3B): attention with q/k norms."""

from collections.abc import Collection

from dflash_jax.models.config import LayerSpec, ModelConfig
from dflash_jax.models.families.names import Entry
from dflash_jax.models.families.reading import Raw, read_attention, read_ffns, read_kinds, read_positions
from dflash_jax.models.families.tables import decoder_entries


def read_classic(text: Raw, *, qk_norm: bool, qkv_bias: bool = False) -> ModelConfig:
    """Reads the config of a stack of attention layers.

    Args:
        text: The ``config.json``.
        qk_norm: Whether queries and keys are normed.
        qkv_bias: Whether the projections of queries, keys and values have biases.

    Raises:
        InputError: A value is invalid, or a key is not known.
    """
    attention = read_attention(text, qk_norm=qk_norm, qkv_bias=qkv_bias)
    ffns = read_ffns(text, shared=False, normalise=text.flag("norm_topk_prob"))
    read_kinds(text, ("full_attention",), ["full_attention"] * len(ffns))
    config = ModelConfig(
        model_type=text.model_type or "",
        vocab_size=text.need("vocab_size"),
        hidden_size=text.need("hidden_size"),
        layers=tuple(LayerSpec(attention, ffn) for ffn in ffns),
        norm_eps=text.norm_eps,
        norm_offset=0.0,
        max_positions=read_positions(text, attention.rope),
        tied_embeddings=text.flag("tie_word_embeddings"),
    )
    text.refuse_unread()
    return config


def read_config(raw: dict) -> ModelConfig:
    """Reads a target's ``config.json``."""
    return read_classic(Raw(raw), qk_norm=True)


def is_skipped(name: str) -> bool:
    """Whether a tensor is ignored: rotary frequencies, which old checkpoints carry."""
    return name.endswith(".rotary_emb.inv_freq")


def weight_names(config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table for a checkpoint with the tensors ``names`` (default: fused experts)."""
    return decoder_entries(config, names)
