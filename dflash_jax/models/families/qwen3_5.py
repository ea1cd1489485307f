"""Qwen3.5 and Qwen3.6, dense (`qwen3_5`) and mixture-of-experts (`qwen3_5_moe`): text configs and weight names."""

from collections.abc import Collection

import numpy as np

from dflash_jax.config import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelConfig, MoeSpec, RopeSpec
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry, Tensor, same, stacked

PREFIXES = ("model.language_model.", "model.")
# Parts of the checkpoint that a text model does not run.
SKIPPED = ("model.visual.", "visual.", "mtp.", "model.mtp.")


def read_config(raw: dict) -> ModelConfig:
    """``config.json`` (multimodal, or text only) → ModelConfig."""
    text = raw.get("text_config", raw)

    def need(key):
        if key not in text:
            raise InputError(f"config.json of model_type {raw.get('model_type')!r} lacks {key!r}")
        return text[key]

    head_dim = need("head_dim")
    rope = {**text, **(text.get("rope_parameters") or text.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise InputError(f"rope_type {kind!r} is not known for {text.get('model_type')!r}: it must be 'default'")
    if text.get("attention_bias"):
        raise InputError("attention_bias true is not known for this family: it must be false")
    attention = AttentionSpec(
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        head_dim=head_dim,
        rope=RopeSpec(
            theta=float(rope.get("rope_theta", 10000.0)),
            dim=int(head_dim * rope.get("partial_rotary_factor", 0.25)),
            sections=tuple(rope["mrope_section"]) if rope.get("mrope_section") else None,
        ),
        gated=True,
    )
    delta = GatedDeltaSpec(
        num_key_heads=need("linear_num_key_heads"),
        num_value_heads=need("linear_num_value_heads"),
        key_dim=need("linear_key_head_dim"),
        value_dim=need("linear_value_head_dim"),
        conv_kernel=text.get("linear_conv_kernel_dim", 4),
    )
    if "num_experts" in text:
        ffn = MoeSpec(
            num_experts=text["num_experts"],
            experts_per_token=need("num_experts_per_tok"),
            intermediate_size=need("moe_intermediate_size"),
            shared_intermediate_size=need("shared_expert_intermediate_size"),
        )
    else:
        ffn = MlpSpec(need("intermediate_size"))
    depth, interval = need("num_hidden_layers"), text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(depth)
    ]
    if len(kinds) != depth:
        raise InputError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {depth}: they must agree")
    mixers = {"full_attention": attention, "linear_attention": delta}
    unknown = sorted(set(kinds) - set(mixers))
    if unknown:
        raise InputError(f"layer_types has {unknown}: known are {sorted(mixers)}")
    return ModelConfig(
        model_type=raw.get("model_type", text.get("model_type")),
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], ffn) for kind in kinds),
        norm_eps=text.get("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        max_positions=need("max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


def is_skipped(name: str) -> bool:
    """Tensors of the vision tower and of the multi-token-prediction head."""
    return name.startswith(SKIPPED)


def group_qkv(
    rows: int, columns: tuple[int, ...], spec: GatedDeltaSpec, path: str, name: str, disk: tuple[int, ...]
) -> Entry:
    """Flat ``[q | k | v]`` rows on disk ↔ rows grouped by key head, ``[G, q k v, …]``: the layout that shards."""
    g, dk = spec.num_key_heads, spec.key_dim
    cuts = [g * dk, 2 * g * dk]

    def join(arrays):
        parts = np.split(arrays[0].reshape(rows, *columns), cuts)
        return np.concatenate([p.reshape(g, -1, *columns) for p in parts], axis=1)

    def split(array):
        parts = np.split(array, [dk, 2 * dk], axis=1)
        return [np.concatenate([p.reshape(-1, *columns) for p in parts])]

    return Entry(path, (g, spec.channels_per_key, *columns), (Tensor(name, disk),), join, split)


def delta_entries(path: str, name: str, spec: GatedDeltaSpec, hidden: int) -> list[Entry]:
    g, r, dv = spec.num_key_heads, spec.values_per_key, spec.value_dim
    heads, rows = spec.num_value_heads, spec.num_key_heads * spec.channels_per_key
    gates = [Tensor(f"{name}in_proj_{x}.weight", (heads, hidden)) for x in "ba"]
    return [
        group_qkv(rows, (hidden,), spec, f"{path}qkv", f"{name}in_proj_qkv.weight", (rows, hidden)),
        group_qkv(rows, (spec.conv_kernel,), spec, f"{path}conv", f"{name}conv1d.weight", (rows, 1, spec.conv_kernel)),
        same(f"{path}z", (g, r, dv, hidden), f"{name}in_proj_z.weight", (heads * dv, hidden)),
        stacked(f"{path}beta_alpha", (2, g, r, hidden), gates),
        same(f"{path}a_log", (g, r), f"{name}A_log", (heads,)),
        same(f"{path}dt_bias", (g, r), f"{name}dt_bias", (heads,)),
        same(f"{path}norm", (dv,), f"{name}norm.weight"),
        same(f"{path}out", (hidden, g, r, dv), f"{name}out_proj.weight", (hidden, heads * dv)),
    ]


def attention_entries(path: str, name: str, spec: AttentionSpec, hidden: int) -> list[Entry]:
    n, k, d, parts = spec.num_heads, spec.num_kv_heads, spec.head_dim, 2 if spec.gated else 1
    entries = [
        same(f"{path}q", (n, parts, d, hidden), f"{name}q_proj.weight", (n * parts * d, hidden)),
        same(f"{path}k", (k, d, hidden), f"{name}k_proj.weight", (k * d, hidden)),
        same(f"{path}v", (k, d, hidden), f"{name}v_proj.weight", (k * d, hidden)),
        same(f"{path}o", (hidden, n, d), f"{name}o_proj.weight", (hidden, n * d)),
    ]
    if spec.qk_norm:
        entries += [same(f"{path}{x}_norm.weight", (d,), f"{name}{x}_norm.weight") for x in "qk"]
    return entries


def mlp_entries(path: str, name: str, size: int, hidden: int) -> list[Entry]:
    pair = [Tensor(f"{name}{x}_proj.weight", (size, hidden)) for x in ("gate", "up")]
    return [
        stacked(f"{path}gate_up", (2, size, hidden), pair),
        same(f"{path}down", (hidden, size), f"{name}down_proj.weight"),
    ]


def moe_entries(path: str, name: str, spec: MoeSpec, hidden: int, fused: bool) -> list[Entry]:
    e, f = spec.num_experts, spec.intermediate_size
    gate_up, down = (e, 2, f, hidden), (e, hidden, f)
    entries = [same(f"{path}router", (e, hidden), f"{name}gate.weight")]
    if fused:
        entries.append(same(f"{path}gate_up", gate_up, f"{name}experts.gate_up_proj", (e, 2 * f, hidden)))
        entries.append(same(f"{path}down", down, f"{name}experts.down_proj"))
    else:
        each = [f"{name}experts.{i}." for i in range(e)]
        pairs = [Tensor(f"{x}{part}_proj.weight", (f, hidden)) for x in each for part in ("gate", "up")]
        entries.append(stacked(f"{path}gate_up", gate_up, pairs))
        entries.append(stacked(f"{path}down", down, [Tensor(f"{x}down_proj.weight", (hidden, f)) for x in each]))
    if spec.shared_intermediate_size is not None:
        entries += mlp_entries(f"{path}shared.", f"{name}shared_expert.", spec.shared_intermediate_size, hidden)
        entries.append(same(f"{path}shared_gate", (hidden,), f"{name}shared_expert_gate.weight", (1, hidden)))
    return entries


def weight_names(config: ModelConfig, names: Collection[str] = ()) -> list[Entry]:
    """The table for a checkpoint that holds ``names`` (default: text only, fused experts)."""
    prefix = next((p for p in PREFIXES if any(n.startswith(f"{p}layers.") for n in names)), "model.")
    fused = not any(".mlp.experts.0." in n for n in names)
    hidden = config.hidden_size
    entries = [
        same("embed", (config.vocab_size, hidden), f"{prefix}embed_tokens.weight"),
        same("norm.weight", (hidden,), f"{prefix}norm.weight"),
    ]
    if not config.tied_embeddings:
        entries.append(same("head", (config.vocab_size, hidden), "lm_head.weight"))
    for i, spec in enumerate(config.layers):
        path, name = f"layers.{i}.", f"{prefix}layers.{i}."
        entries.append(same(f"{path}input_norm.weight", (hidden,), f"{name}input_layernorm.weight"))
        entries.append(same(f"{path}post_norm.weight", (hidden,), f"{name}post_attention_layernorm.weight"))
        if isinstance(spec.mixer, GatedDeltaSpec):
            entries += delta_entries(f"{path}mixer.", f"{name}linear_attn.", spec.mixer, hidden)
        else:
            entries += attention_entries(f"{path}mixer.", f"{name}self_attn.", spec.mixer, hidden)
        if isinstance(spec.ffn, MlpSpec):
            entries += mlp_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn.intermediate_size, hidden)
        else:
            entries += moe_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn, hidden, fused)
    return entries
