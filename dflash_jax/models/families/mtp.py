"""Multi-token prediction heads of `qwen3_5` and `qwen3_next` targets: configuration and weight names.

A head is among its target's tensors, or alone in a directory. The layouts of heads alone are those of the target's
tensors, of speculators 0.9.0 (``models/mtp``) and of mlx-vlm (``speculative/drafters/qwen3_5_mtp``).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models.config import AttentionSpec, MlpSpec, ModelConfig, MoeSpec
from dflash_jax.models.families import qwen3_5, qwen3_next
from dflash_jax.models.families.dflash import recorded_acceptance
from dflash_jax.models.families.draft_layouts import SERVING
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.reading import Raw
from dflash_jax.models.families.tables import attention_entries, has_fused_experts, mlp_entries, moe_entries
from dflash_jax.models.mtp_config import MtpConfig

PREFIXES = ("mtp.", "model.mtp.")
# The prefix of speculators, and its names where they differ.
SPECULATORS = "mtp_layers.0."
RENAMED = {
    "fc.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
    "pre_fc_norm_embedding.weight": "token_layernorm.weight",
    "pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
}
# A tensor of mlx-vlm's heads, whose names have no prefix, and the model types of heads alone with what they are of.
BARE = "pre_fc_norm_hidden.weight"
MODEL_TYPES = {f"{kind}_mtp": kind for kind in ("qwen3_5", "qwen3_5_moe", "qwen3_next")}
FAMILIES = (qwen3_5, qwen3_next)
# The target's final norm.
FINAL_NORMS = tuple(f"{prefix}norm.weight" for prefix in qwen3_5.PREFIXES)
# Copies of the target's tables beside a head alone, and the target's parameters.
TABLES = {f"{prefix}embed_tokens.weight": "embed" for prefix in ("", *qwen3_5.PREFIXES)} | {"lm_head.weight": "head"}


def of_target(raw: dict) -> dict:
    """The target's ``config.json`` as far as a head alone has it; unchanged where it is a target's.

    Raises:
        InputError: A key of a head alone is not known, or the head has another form.
    """
    if raw.get("speculators_model_type") == "mtp":
        given = Raw(raw, "mtp")
        layers = given.section("transformer_layer_config")
        _check_depth(given)
        for key in (*SERVING, "speculators_model_type"):
            given.allow(key)
        given.refuse_unread()
        return layers
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        return raw
    inner = Raw(raw).section("text_config").get("model_type", MODEL_TYPES[model_type])
    # How many steps it was made to draft, and of tables that it has not.
    others = ("block_size", "n_predict", "tie_word_embeddings")
    return {key: value for key, value in raw.items() if key not in others} | {"model_type": inner}


def _check_depth(text: Raw) -> None:
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if (depth := text.integer(key, 0, minimum=0)) > 1:
            raise InputError(f"{key} is {depth}: only MTP heads of one layer are known here")


def read_config(raw: dict, target: ModelConfig) -> MtpConfig:
    """Reads the head of a target's ``config.json``. The tensors tell whether the checkpoint has one.

    Args:
        raw: The target's ``config.json``.
        target: What it says of the target.

    Raises:
        InputError: The head has another form.
    """
    if not any(isinstance(spec.mixer, AttentionSpec) for spec in target.layers):
        raise InputError("the target has no attention layer, as which its MTP head is made")
    text = Raw(raw.get("text_config", raw), raw.get("model_type"))
    if text.flag("mtp_use_dedicated_embeddings"):
        raise InputError("mtp_use_dedicated_embeddings is True: only MTP heads that embed as the target are known here")
    _check_depth(text)
    config = MtpConfig(target)
    return replace(config, acceptance_rates=recorded_acceptance(raw, config.block_size))


def head_prefix(names: Collection[str]) -> str | None:
    """The prefix of the head among the tensors ``names``; None where there is no head."""
    prefix = next((p for p in (*PREFIXES, SPECULATORS) if any(n.startswith(p) for n in names)), None)
    return "" if prefix is None and BARE in names else prefix


def is_alone(names: Collection[str]) -> bool:
    """Whether the tensors ``names`` are of a head without its target's layers."""
    layers = tuple(f"{prefix}layers." for prefix in qwen3_5.PREFIXES)
    return not any(name.startswith(layers) for name in names)


def weight_names(config: MtpConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table of a head's parameters for a checkpoint with the tensors ``names`` (default: fused experts)."""
    prefix, hidden = head_prefix(names), config.hidden_size
    prefix = PREFIXES[0] if prefix is None else prefix
    is_renamed = prefix == SPECULATORS
    (spec,), path, name = config.layers, "layers.0.", prefix if is_renamed else f"{prefix}layers.0."
    assert isinstance(spec.mixer, AttentionSpec)

    def own(name: str) -> str:
        return prefix + (RENAMED[name] if is_renamed else name)

    entries = [
        same("embed_norm.weight", (hidden,), own("pre_fc_norm_embedding.weight")),
        same("hidden_norm.weight", (hidden,), own("pre_fc_norm_hidden.weight")),
        Entry("fc", (hidden, 2, hidden), (Tensor(own("fc.weight"), (hidden, 2 * hidden)),)),
        same("norm.weight", (hidden,), own("norm.weight")),
        same(f"{path}input_norm.weight", (hidden,), f"{name}input_layernorm.weight"),
        same(f"{path}post_norm.weight", (hidden,), f"{name}post_attention_layernorm.weight"),
        *attention_entries(f"{path}mixer.", f"{name}self_attn.", spec.mixer, hidden),
    ]
    if isinstance(spec.ffn, MlpSpec):
        entries += mlp_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn.intermediate_size, hidden)
    else:
        entries += moe_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn, hidden, has_fused_experts(names, name))
    if not prefix:
        entries = [_of_mlx(entry, config, name) for entry in entries]
    final = next((n for n in FINAL_NORMS if n in names), FINAL_NORMS[-1])
    return [same("final_norm.weight", (hidden,), final), *entries]


def _of_mlx(entry: Entry, config: MtpConfig, layer: str) -> Entry:
    """An entry as mlx-vlm writes it: norms have their offset added, and the experts' matrices are stacked alone."""
    offset, (spec,), hidden = config.target.norm_offset, config.layers, config.hidden_size

    def moved(array: np.ndarray, by: float) -> np.ndarray:
        return (array.astype(np.float32) + by).astype(array.dtype)

    if entry.path.endswith("norm.weight"):
        return replace(entry, join=lambda arrays: moved(arrays[0], -offset), split=lambda array: [moved(array, offset)])
    if not isinstance(spec.ffn, MoeSpec) or ".ffn.shared" in entry.path:
        return entry
    each, at = (spec.ffn.num_experts, spec.ffn.intermediate_size, hidden), f"{layer}mlp.switch_mlp."
    if entry.path.endswith(".ffn.gate_up"):
        pair = tuple(Tensor(f"{at}{part}_proj.weight", each) for part in ("gate", "up"))
        return Entry(entry.path, entry.shape, pair, _beside, lambda array: list(np.moveaxis(array, 1, 0)))
    if entry.path.endswith(".ffn.down"):
        return same(entry.path, entry.shape, f"{at}down_proj.weight")
    return entry


def _beside(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(arrays, axis=1)
