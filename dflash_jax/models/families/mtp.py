"""Multi-token prediction heads of `qwen3_5` and `qwen3_next` targets: configuration and weight names."""

from collections.abc import Collection
from dataclasses import replace

from dflash_jax.errors import InputError
from dflash_jax.models.config import AttentionSpec, MlpSpec, ModelConfig
from dflash_jax.models.families import qwen3_5, qwen3_next
from dflash_jax.models.families.dflash import recorded_acceptance
from dflash_jax.models.families.names import Entry, Tensor, same
from dflash_jax.models.families.reading import Raw
from dflash_jax.models.families.tables import attention_entries, has_fused_experts, mlp_entries, moe_entries
from dflash_jax.models.mtp_config import MtpConfig

PREFIXES = ("mtp.", "model.mtp.")
FAMILIES = (qwen3_5, qwen3_next)
# The target's final norm.
FINAL_NORMS = tuple(f"{prefix}norm.weight" for prefix in qwen3_5.PREFIXES)


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
    for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        if (depth := text.integer(key, 0, minimum=0)) > 1:
            raise InputError(f"{key} is {depth}: only MTP heads of one layer are known here")
    config = MtpConfig(target)
    return replace(config, acceptance_rates=recorded_acceptance(raw, config.block_size))


def head_prefix(names: Collection[str]) -> str | None:
    """The prefix of the head among the tensors ``names``; None where there is no head."""
    return next((p for p in PREFIXES if any(n.startswith(p) for n in names)), None)


def weight_names(config: MtpConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table of a head's parameters for a checkpoint with the tensors ``names`` (default: fused experts)."""
    prefix, hidden = head_prefix(names) or PREFIXES[0], config.hidden_size
    (spec,), path, name = config.layers, "layers.0.", f"{prefix}layers.0."
    assert isinstance(spec.mixer, AttentionSpec)
    entries = [
        same("final_norm.weight", (hidden,), next((n for n in FINAL_NORMS if n in names), FINAL_NORMS[-1])),
        same("embed_norm.weight", (hidden,), f"{prefix}pre_fc_norm_embedding.weight"),
        same("hidden_norm.weight", (hidden,), f"{prefix}pre_fc_norm_hidden.weight"),
        Entry("fc", (hidden, 2, hidden), (Tensor(f"{prefix}fc.weight", (hidden, 2 * hidden)),)),
        same("norm.weight", (hidden,), f"{prefix}norm.weight"),
        same(f"{path}input_norm.weight", (hidden,), f"{name}input_layernorm.weight"),
        same(f"{path}post_norm.weight", (hidden,), f"{name}post_attention_layernorm.weight"),
        *attention_entries(f"{path}mixer.", f"{name}self_attn.", spec.mixer, hidden),
    ]
    if isinstance(spec.ffn, MlpSpec):
        return entries + mlp_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn.intermediate_size, hidden)
    fused = has_fused_experts(names, f"{prefix}layers.")
    return entries + moe_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn, hidden, fused)
