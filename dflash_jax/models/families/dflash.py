"""DFlash drafters: every published layout of their ``config.json``, and their weight names."""

from collections.abc import Collection

from dflash_jax.config import AttentionSpec, DraftConfig, DraftLayerSpec
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.reading import Raw, check_activation, read_rope, whole
from dflash_jax.models.families.tables import attention_entries, mlp_entries

# What only DFlash2 drafters have.
DFLASH2 = {"conv_kernel_size", "selector_rank", "output_multiplier", "final_logit_softcapping"}


def is_drafter(raw: dict) -> bool:
    return "dflash_config" in raw or any("DFlash" in a for a in raw.get("architectures") or [])


def default_taps(num_target: int, num_draft: int) -> tuple[int, ...]:
    """The reference's evenly spread taps, for configs that do not list them."""
    if num_draft == 1:
        return (num_target // 2,)
    return tuple(round(1 + i * (num_target - 4) / (num_draft - 1)) for i in range(num_draft))


def read_taps(ids, need, depth: int) -> tuple[int, ...]:
    if not ids:
        return default_taps(need("num_target_layers"), depth)
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"the drafter's target_layer_ids is {ids!r}: it must be a list of layers")
    return tuple(ids)


def read_layers(raw: dict, own: dict, depth: int) -> list[tuple[int | None, bool]]:
    """(window, causal) of every layer.

    Sliding: ``layer_types``, or all with ``use_swa`` where those say nothing. Causal: top-level ``is_causal``, else
    ``dflash_config.causal``, else exactly the sliding layers.
    """
    kinds = raw.get("layer_types") or ["full_attention"] * depth
    if len(kinds) != depth:
        raise InputError(f"the drafter's layer_types has {len(kinds)} entries, num_hidden_layers is {depth}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(f"the drafter's layer_types has {unknown}: known are full_attention and sliding_attention")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if own.get("use_swa") and not any(sliding):
        sliding = [True] * depth
    window = own.get("swa_window_size") or raw.get("sliding_window")
    if any(sliding) and not window:
        raise InputError("the drafter has sliding layers but neither dflash_config.swa_window_size nor sliding_window")
    if any(sliding):
        whole("sliding_window", window)
    causal = raw.get("is_causal")
    if causal is None:
        causal = own.get("causal")
    return [(window if slides else None, slides if causal is None else bool(causal)) for slides in sliding]


def read_config(raw: dict) -> DraftConfig:
    """``config.json`` → DraftConfig. Keys inside ``dflash_config`` win over those at top level."""
    own = raw.get("dflash_config") or {}
    if not isinstance(own, dict):
        raise InputError(f"the drafter's dflash_config must be an object, it is {own!r}")

    def need(key, default=None, least=1):
        value = own.get(key, raw.get(key, default))
        if value is None:
            raise InputError(f"the drafter's config.json lacks {key!r}")
        return whole(key, value, least)

    check_activation(raw)
    depth = need("num_hidden_layers")
    heads, hidden = need("num_attention_heads"), need("hidden_size")
    head_dim = raw.get("head_dim") or hidden // heads
    attention = AttentionSpec(heads, need("num_key_value_heads", heads), head_dim, read_rope(raw, head_dim))
    unsupported = sorted(DFLASH2 & {k for k, v in (raw | own).items() if v})
    if unsupported:
        raise InputError(
            f"this is a DFlash2 drafter (dflash_config has {', '.join(unsupported)}): only DFlash is known here"
        )
    return DraftConfig(
        hidden_size=hidden,
        vocab_size=need("vocab_size"),
        layers=tuple(
            DraftLayerSpec(attention, need("intermediate_size"), window, causal)
            for window, causal in read_layers(raw, own, depth)
        ),
        block_size=need("block_size"),
        mask_token_id=need("mask_token_id", least=0),
        target_layer_ids=read_taps(own.get("target_layer_ids") or raw.get("target_layer_ids"), need, depth),
        num_target_layers=need("num_target_layers"),
        norm_eps=Raw(raw).norm_eps,
        max_positions=need("max_position_embeddings"),
    )


def is_skipped(name: str) -> bool:
    """Embedding and head are borrowed from the target; some checkpoints carry copies."""
    return name in ("embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight")


def weight_names(config: DraftConfig, names: Collection[str] = ()) -> list[Entry]:
    hidden, taps = config.hidden_size, len(config.target_layer_ids)
    entries = [
        Entry("fc", (hidden, taps, hidden), (Tensor("fc.weight", (hidden, taps * hidden)),)),
        same("hidden_norm.weight", (hidden,), "hidden_norm.weight"),
        same("norm.weight", (hidden,), "norm.weight"),
    ]
    for i, spec in enumerate(config.layers):
        at = f"layers.{i}."
        entries.append(same(f"{at}input_norm.weight", (hidden,), f"{at}input_layernorm.weight"))
        entries.append(same(f"{at}post_norm.weight", (hidden,), f"{at}post_attention_layernorm.weight"))
        entries += attention_entries(f"{at}mixer.", f"{at}self_attn.", spec.attention, hidden)
        entries += mlp_entries(f"{at}ffn.", f"{at}mlp.", spec.intermediate_size, hidden)
    return entries
