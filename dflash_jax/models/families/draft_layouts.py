"""Configs of drafters in the layouts of other trainers, as z-lab's, which `dflash` reads.

Sources: speculators 0.9.0 (``models/{dflash,dflash2,dspark}/config.py``), DeepSpec (``modeling/dspark``), SpecForge.
"""

from dflash_jax.errors import InputError
from dflash_jax.models.families.reading import Raw, shown

# A speculators config has what differs from the defaults of transformers' config of its layers' model type. Its layers
# are Qwen3's, with norms of queries and keys, whatever the type.
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
}
LAYER_DEFAULTS = {"qwen3": QWEN3, "llama": LLAMA}
# Keys of a speculators config beside the layers', with the kinds that have them.
SPECULATORS = {
    "dflash": (),
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "dspark": ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
}
DSPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
# What says how a drafter was trained or is to be served, and no number of it.
SERVING = (
    *("speculators_config", "speculators_version", "num_anchors", "max_anchors", "num_nextn_predict_layers"),
    *("tie_word_embeddings", "has_no_defaults_at_init"),
)
# Keys that configs of DeepSpec and speculators have from their target's, of which they are copies. Their drafters
# rotate whole heads, whatever the configs say.
OF_TARGET = (
    *("partial_rotary_factor", "attn_output_gate", "mrope_section", "mrope_interleaved", "full_attention_interval"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "mtp_num_hidden_layers", "num_nextn_predict_layers"),
)


def is_speculators(raw: dict) -> bool:
    """Whether a config is of a block drafter in speculators' layout."""
    return raw.get("speculators_model_type") in tuple(SPECULATORS)


def as_published(raw: dict) -> dict:
    """A drafter's config with z-lab's keys; unchanged where it has them.

    Raises:
        InputError: A value of another layout has no counterpart here.
    """
    if is_speculators(raw):
        return _speculators(raw)
    architectures = Raw(raw).words("architectures", [])
    if any(name.startswith("Qwen3DSpark") for name in architectures):
        return _deepspec(raw)
    if "DSparkDraftModel" in architectures or Raw(raw).section("dflash_config").get("projector_type") == "dspark":
        return _shifted(raw)
    return raw


def _speculators(raw: dict) -> dict:
    kind = raw["speculators_model_type"]
    given = Raw(raw, kind)
    layers = Raw(given.section("transformer_layer_config"), kind)
    if (model_type := layers.get("model_type") or "qwen3") not in tuple(LAYER_DEFAULTS):
        known = " and ".join(LAYER_DEFAULTS)
        raise InputError(f"transformer_layer_config.model_type is {shown(model_type)}: known are {known}")
    defaults = LAYER_DEFAULTS[model_type]
    merged = defaults | {key: value for key, value in layers.items() if value is not None and key not in OF_TARGET}
    own: dict = {key: given.get(key) for key in SPECULATORS[kind] if given.get(key) is not None}
    own = {"dflash2": DFLASH2_DEFAULTS, "dspark": DSPARK_DEFAULTS}.get(kind, {}) | own
    own["target_layer_ids"] = _taps(given.get("aux_hidden_state_layer_ids"))
    own["block_size"] = given.integer("block_size", 8)
    own["mask_token_id"] = given.get("mask_token_id")
    if (target_size := given.get("target_hidden_size")) is not None:
        own["target_hidden_size"] = target_size
    # Versions before this key, which is always written since, had DFlash's places for DSpark, too.
    own["sample_from_anchor"] = given.flag("sample_from_anchor")
    # Full layers are bidirectional in any case; sliding ones causal unless it says otherwise.
    if given.flag("sliding_window_non_causal", kind == "dflash2"):
        own["is_causal"] = False
    if (drafted := given.integer("draft_vocab_size", None)) not in (None, merged["vocab_size"]):
        own["draft_vocab_size"] = drafted
    rope = Raw(merged).section("rope_parameters")
    merged["rope_parameters"] = _whole_heads(Raw(rope).section("sliding_attention") or rope)
    if not merged.get("layer_types"):
        # As Qwen3Config names its layers; a window of any other is not used.
        depth, full = Raw(merged).need("num_hidden_layers"), Raw(merged).integer("max_window_layers", 0, minimum=0)
        slides = Raw(merged).flag("use_sliding_window") and model_type == "qwen3"
        kinds = ("full_attention", "sliding_attention")
        merged["layer_types"] = [kinds[slides and i >= full] for i in range(depth)]
    for key in (*SERVING, "transformer_layer_config", "speculators_model_type"):
        given.allow(key)
    given.refuse_unread()
    return merged | {"architectures": raw.get("architectures"), "dflash_config": own}


def _taps(ids: object) -> list[int]:
    """Target layers of speculators' ids, which count the layers before a state: 0 is the embeddings."""
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InputError(f"aux_hidden_state_layer_ids is {shown(ids)}: it must be a list of layers")
    if min(ids) < 1:
        raise InputError(
            f"aux_hidden_state_layer_ids has {min(ids)}: a drafter that reads embeddings is not known here"
        )
    return [i - 1 for i in ids]


def _deepspec(raw: dict) -> dict:
    """DeepSpec's: a copy of the target's config, of which it changes what it names."""
    rope = _whole_heads(Raw(raw).section("rope_parameters"))
    kept = {key: value for key, value in raw.items() if key not in OF_TARGET}
    return _shifted(kept | {"rope_parameters": rope})


def _whole_heads(rope: dict) -> dict:
    return {key: value for key, value in rope.items() if key not in OF_TARGET}


def _shifted(raw: dict) -> dict:
    """DeepSpec's and SpecForge's: a place drafts the token after it where the config does not say."""
    section = Raw(raw).section("dflash_config")
    if raw.get("sample_from_anchor") is None and section.get("sample_from_anchor") is None:
        section = section | {"sample_from_anchor": True}
    return raw | {"dflash_config": section}
