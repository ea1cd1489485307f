"""DFlash drafters: every published layout of their ``config.json``, and their weight names."""

from collections.abc import Collection

from dflash_jax.errors import InputError
from dflash_jax.models.config import AttentionSpec, DraftConfig, DraftLayerSpec
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.reading import LIMITS, Raw, check_activation, read_rope, shown
from dflash_jax.models.families.tables import attention_entries, mlp_entries

# Classes that have DFlash's tensors and mathematics: z-lab's, NeMo Automodel's, vLLM's.
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashQwen3ForCausalLM")
# What ``dflash_config`` may have. JetSpec's drafters differ from DFlash's in ``causal_head`` alone.
KEYS = (
    *("block_size", "mask_token_id", "num_target_layers", "target_layer_ids", "target_hidden_size"),
    *("is_causal", "causal", "causal_head", "use_swa", "swa_window_size"),
)
# Other block drafters: their names, as their architectures begin with them, and the keys that only they have. Off
# (null, false, 0), a key asks for nothing.
OTHERS = {
    "DFlash2": (
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "selector_vocab_size"),
        *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
    ),
    "LiLiCorr": (
        *("lilicorr_enabled", "lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers"),
        *("lilicorr_num_heads", "lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps"),
        "lilicorr_logit_scale",
    ),
    "DSpark": (
        *("markov_rank", "enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"),
        "dspark_draft_topk",
    ),
    "XPress": ("xpress_rank", "xpress_topk", "xpress_passes"),
    "Domino": ("projector_type", "shift_label", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
}


def architectures(raw: dict) -> list[str]:
    return Raw(raw).words("architectures", [])


def is_drafter(raw: dict) -> bool:
    """Whether a config is a block drafter's, one of those that are refused by `read_config` included."""
    return "dflash_config" in raw or any(a in ARCHITECTURES or a.endswith("DraftModel") for a in architectures(raw))


def check_method(raw: dict, own: dict) -> None:
    """Raises InputError, naming it, for a drafter that is not DFlash or has an option that is not known here."""
    named = [a for a in architectures(raw) if a not in ARCHITECTURES]
    options = {key for key, value in (raw | own).items() if value}
    for method, keys in OTHERS.items():
        whose = [a for a in named if a.lower().startswith(method.lower())]
        whose += sorted(k for k in options if k in keys or k.startswith(f"{method.lower()}_"))
        if whose:
            raise InputError(f"this is a {method} drafter ({', '.join(whose)}): only DFlash is known here")
    if named:
        raise InputError(f"architectures is {shown(named)}: the drafters known here are {', '.join(ARCHITECTURES)}")
    if raw.get("head_type") not in (None, "auto"):
        raise InputError(f"head_type is {shown(raw['head_type'])}: it is not known here, dflash_config.causal_head is")
    known = {*KEYS, *(key for keys in OTHERS.values() for key in keys)}
    unknown = sorted(own.keys() - known)
    if unknown:
        raise InputError(f"dflash_config has {', '.join(map(shown, unknown[:5]))}: known are {', '.join(KEYS)}")


def default_taps(num_target: int, num_draft: int) -> tuple[int, ...]:
    """The reference's evenly spread taps, for configs that do not list them."""
    if num_draft == 1:
        return (num_target // 2,)
    return tuple(round(1 + i * (num_target - 4) / (num_draft - 1)) for i in range(num_draft))


def read_taps(both: Raw, depth: int) -> tuple[int, ...]:
    ids = both.get("target_layer_ids")
    if ids is None or ids == []:
        return default_taps(both.need("num_target_layers"), depth)
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"target_layer_ids is {shown(ids)}: it must be a list of layers")
    if len(ids) > LIMITS["num_target_layers"]:
        raise InputError(f"target_layer_ids has {len(ids)} layers: at most {LIMITS['num_target_layers']} are possible")
    return tuple(ids)


def read_layers(both: Raw, depth: int) -> list[tuple[int | None, bool]]:
    """(window, causal) of every layer.

    Sliding: ``layer_types``, or all with ``use_swa`` where those say nothing. Causal within the block: ``is_causal``,
    else ``causal``, else ``causal_head`` (JetSpec's, which means all layers), else exactly the sliding layers.
    """
    kinds = both.words("layer_types", []) or ["full_attention"] * depth
    if len(kinds) != depth:
        raise InputError(f"the drafter's layer_types has {len(kinds)} entries, num_hidden_layers is {depth}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise InputError(
            f"the drafter's layer_types has {shown(unknown)}: known are full_attention and sliding_attention"
        )
    sliding = [kind == "sliding_attention" for kind in kinds]
    if both.flag("use_swa") and not any(sliding):
        sliding = [True] * depth
    window = None
    if any(sliding):
        window = both.whole("swa_window_size", None) or both.whole("sliding_window", None)
        if window is None:
            raise InputError(
                "the drafter has sliding layers but neither dflash_config.swa_window_size nor sliding_window"
            )
    flags = [both.flag(key, None) for key in ("is_causal", "causal", "causal_head")]
    causal = next((c for c in flags if c is not None), None)
    return [(window if slides else None, slides if causal is None else causal) for slides in sliding]


def read_config(raw: dict) -> DraftConfig:
    """``config.json`` → DraftConfig. Keys inside ``dflash_config`` win over those at top level."""
    own = Raw(raw).section("dflash_config")
    check_method(raw, own)
    both = Raw({**raw, **{k: v for k, v in own.items() if v is not None}})
    check_activation(both)
    depth, hidden = both.need("num_hidden_layers"), both.need("hidden_size")
    heads, kv_heads, head_dim = both.heads
    attention = AttentionSpec(heads, kv_heads, head_dim, read_rope(both, head_dim))
    target_size = both.whole("target_hidden_size", hidden)
    if target_size != hidden:
        raise InputError(f"target_hidden_size is {target_size}: it must be the drafter's hidden_size, {hidden}")
    return DraftConfig(
        hidden_size=hidden,
        vocab_size=both.need("vocab_size"),
        layers=tuple(
            DraftLayerSpec(attention, both.need("intermediate_size"), window, causal)
            for window, causal in read_layers(both, depth)
        ),
        block_size=both.need("block_size"),
        mask_token_id=both.need("mask_token_id", least=0),
        target_layer_ids=read_taps(both, depth),
        num_target_layers=both.need("num_target_layers"),
        norm_eps=both.norm_eps,
        max_positions=both.need("max_position_embeddings"),
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
