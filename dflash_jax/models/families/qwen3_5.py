"""Qwen3.5 and Qwen3.6, dense (`qwen3_5`) and mixture-of-experts (`qwen3_5_moe`): configs, weight names of the text."""

from collections.abc import Collection
from dataclasses import replace

from dflash_jax.errors import InputError
from dflash_jax.models.config import GatedDeltaSpec, LayerSpec, ModelConfig
from dflash_jax.models.families.names import Entry, Tensor, stacked
from dflash_jax.models.families.reading import Raw, read_attention, read_delta, read_ffns, read_kinds, read_positions
from dflash_jax.models.families.tables import by_key_head, decoder_entries, shared_delta_entries
from dflash_jax.models.families.vision import PREFIXES as VISION_PREFIXES
from dflash_jax.models.families.vision import read_media_tokens, read_vision

PREFIXES = ("model.language_model.", "model.")
# Prefixes of tensors that a text model does not use.
SKIPPED = (*VISION_PREFIXES, "mtp.", "model.mtp.")


def read_hybrid(raw: Raw, is_normalised: bool = False) -> ModelConfig:
    """Reads the config of a hybrid of Gated DeltaNet and gated attention, multimodal or text only.

    Args:
        raw: The ``config.json``, of which all that is not the text model's was read before.
        is_normalised: Whether the weights of the chosen experts sum to one whatever ``norm_topk_prob`` says.

    Raises:
        InputError: A value is invalid, or a key is not known.
    """
    text = Raw(raw.section("text_config"), raw.model_type) if "text_config" in raw else raw
    depth, interval = text.need("num_hidden_layers"), text.integer("full_attention_interval", 4)
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(depth)]
    text.need("head_dim")
    attention = read_attention(text, gated=True, partial=0.25)
    mixers = {"full_attention": attention, "linear_attention": read_delta(text)}
    kinds = read_kinds(text, tuple(mixers), default)
    if is_normalised:
        text.allow("norm_topk_prob", True)
    ffns = read_ffns(text, shared=True, normalise=is_normalised or text.flag("norm_topk_prob", True))
    config = ModelConfig(
        model_type=text.model_type or "",
        vocab_size=text.need("vocab_size"),
        hidden_size=text.need("hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind, ffn in zip(kinds, ffns, strict=True)),
        norm_eps=text.norm_eps,
        norm_offset=1.0,
        max_positions=read_positions(text, attention.rope),
        tied_embeddings=raw.flag("tie_word_embeddings", text.flag("tie_word_embeddings")),
    )
    # The MTP head's, which `mtp.read_config` reads.
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"):
        text.allow(key)
    if text is raw:
        text.refuse_unread()
    else:
        text.refuse_unread(lambda key: f"text_config.{key}")
        raw.refuse_unread(same=text)
    return config


def read_config(raw: dict) -> ModelConfig:
    """Reads a target's ``config.json``."""
    top = Raw(raw)
    vision = read_vision(top)
    tokens = None if vision is None else read_media_tokens(top)
    config = read_hybrid(top, is_normalised=True)
    if vision is None:
        return config
    if vision.out_hidden_size != config.hidden_size:
        raise InputError(
            f"out_hidden_size of the vision tower is {vision.out_hidden_size}: it must be the text model's "
            f"hidden_size, {config.hidden_size}"
        )
    return replace(config, vision=vision, media_tokens=tokens)


def is_skipped(name: str) -> bool:
    """Whether a tensor is ignored: it is of the vision tower or of the multi-token-prediction head."""
    return name.startswith(SKIPPED)


def delta_entries(path: str, name: str, spec: GatedDeltaSpec, hidden: int) -> list[Entry]:
    """The entries of a Gated DeltaNet mixer; its projections q, k, v and z are flat on disk."""
    g, r = spec.num_key_heads, spec.values_per_key
    heads, channels, values = spec.num_value_heads, g * spec.channels_per_key, r * spec.value_dim
    flat = (
        Tensor(f"{name}in_proj_qkv.weight", (channels, hidden)),
        Tensor(f"{name}in_proj_z.weight", (g * values, hidden)),
    )
    gates = [Tensor(f"{name}in_proj_{x}.weight", (heads, hidden)) for x in "ba"]
    return [
        by_key_head(spec, (spec.key_dim, spec.key_dim, values, values), f"{path}qkvz", flat),
        stacked(f"{path}beta_alpha", (2, g, r, hidden), gates),
        *shared_delta_entries(path, name, spec, hidden),
    ]


def weight_names(config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table for a checkpoint with the tensors ``names`` (default: text only, fused experts)."""
    prefix = next((p for p in PREFIXES if any(n.startswith(f"{p}layers.") for n in names)), "model.")
    return decoder_entries(config, names, delta_entries, prefix)
