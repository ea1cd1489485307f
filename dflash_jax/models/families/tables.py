"""Tables of weight names that families share: mixers, feed-forwards, and the decoder around them.

``path`` is the prefix of a part in the module, ``name`` its prefix on disk; both end with a dot.
"""

from collections.abc import Callable, Collection

import numpy as np

from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, MlpSpec, ModelConfig, MoeSpec
from dflash_jax.models.families.names import Entry, Tensor, same, stacked


def by_key_head(spec: GatedDeltaSpec, rows: tuple[int, ...], path: str, tensors: tuple[Tensor, ...]) -> Entry:
    """The entry of one parameter grouped by key head, the layout that shards; its tensors on disk are flat.

    Args:
        spec: The mixer.
        rows: Rows of each key head in q, k, v (and z), which follow one another on disk.
        path: The parameter's path.
        tensors: Its tensors.
    """
    g, columns = spec.num_key_heads, tensors[0].shape[1:]
    starts = np.cumsum([g * r for r in rows])[:-1]

    def join(arrays):
        parts = np.split(np.concatenate(arrays), starts)
        return np.concatenate([p.reshape(g, -1, *p.shape[1:]) for p in parts], axis=1)

    def split(array):
        parts = np.split(array.reshape(g, sum(rows), -1), np.cumsum(rows)[:-1], axis=1)
        flat = np.concatenate([p.reshape(-1, p.shape[-1]) for p in parts])
        return np.split(flat, np.cumsum([t.shape[0] for t in tensors])[:-1])

    flat = tuple(c for c in columns if c != 1)
    return Entry(path, (g, sum(rows), *flat), tensors, join, split)


def conv_entry(path: str, name: str, spec: GatedDeltaSpec) -> Entry:
    """The entry of the convolution of a Gated DeltaNet mixer."""
    channels, r = spec.num_key_heads * spec.channels_per_key, spec.values_per_key
    rows = (spec.key_dim, spec.key_dim, r * spec.value_dim)
    return by_key_head(spec, rows, f"{path}conv", (Tensor(f"{name}conv1d.weight", (channels, 1, spec.conv_kernel)),))


def shared_delta_entries(path: str, name: str, spec: GatedDeltaSpec, hidden: int) -> list[Entry]:
    """The entries that all layouts of Gated DeltaNet share: everything but the input projections."""
    g, r, dv = spec.num_key_heads, spec.values_per_key, spec.value_dim
    heads = spec.num_value_heads
    return [
        conv_entry(path, name, spec),
        same(f"{path}a_log", (g, r), f"{name}A_log", (heads,)),
        same(f"{path}dt_bias", (g, r), f"{name}dt_bias", (heads,)),
        same(f"{path}norm", (dv,), f"{name}norm.weight"),
        same(f"{path}out", (hidden, g, r, dv), f"{name}out_proj.weight", (hidden, heads * dv)),
    ]


def attention_entries(path: str, name: str, spec: AttentionSpec, hidden: int) -> list[Entry]:
    """The entries of an attention mixer."""
    n, k, d, parts = spec.num_heads, spec.num_kv_heads, spec.head_dim, 2 if spec.gated else 1
    entries = [
        same(f"{path}q", (n, parts, d, hidden), f"{name}q_proj.weight", (n * parts * d, hidden)),
        same(f"{path}k", (k, d, hidden), f"{name}k_proj.weight", (k * d, hidden)),
        same(f"{path}v", (k, d, hidden), f"{name}v_proj.weight", (k * d, hidden)),
        same(f"{path}o", (hidden, n, d), f"{name}o_proj.weight", (hidden, n * d)),
    ]
    if spec.qkv_bias:
        entries += [
            same(f"{path}q_bias", (n, parts, d), f"{name}q_proj.bias", (n * parts * d,)),
            same(f"{path}k_bias", (k, d), f"{name}k_proj.bias", (k * d,)),
            same(f"{path}v_bias", (k, d), f"{name}v_proj.bias", (k * d,)),
        ]
    if spec.qk_norm:
        entries += [same(f"{path}{x}_norm.weight", (d,), f"{name}{x}_norm.weight") for x in "qk"]
    return entries


def mlp_entries(path: str, name: str, size: int, hidden: int) -> list[Entry]:
    """The entries of a dense feed-forward; gate and up are one parameter."""
    pair = [Tensor(f"{name}{x}_proj.weight", (size, hidden)) for x in ("gate", "up")]
    return [
        stacked(f"{path}gate_up", (2, size, hidden), pair),
        same(f"{path}down", (hidden, size), f"{name}down_proj.weight"),
    ]


def moe_entries(path: str, name: str, spec: MoeSpec, hidden: int, fused: bool) -> list[Entry]:
    """The entries of a mixture of experts; ``fused``: experts are stacked on disk."""
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


def has_fused_experts(names: Collection[str], layers: str) -> bool:
    """Whether the experts of the layers with this prefix are stacked among the tensors ``names``."""
    return not any(n.startswith(layers) and ".mlp.experts.0." in n for n in names)


def decoder_entries(
    config: ModelConfig,
    names: Collection[str],
    delta: Callable[..., list[Entry]] | None = None,
    prefix: str = "model.",
    attention: Callable[..., list[Entry]] = attention_entries,
    mlp: Callable[..., list[Entry]] = mlp_entries,
) -> list[Entry]:
    """The table of a target.

    Args:
        config: The target's configuration.
        names: Tensors of the checkpoint, which tell whether experts are fused; none: fused.
        delta: ``delta(path, name, spec, hidden)`` returns the entries of a Gated DeltaNet mixer.
        prefix: Prefix of the decoder on disk.
        attention: As `attention_entries`, for another layout on disk.
        mlp: As `mlp_entries`, for another layout on disk.
    """
    # Only the decoder's layers count: an MTP head may be packed differently.
    fused = has_fused_experts(names, f"{prefix}layers.")
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
            assert delta is not None
            entries += delta(f"{path}mixer.", f"{name}linear_attn.", spec.mixer, hidden)
        else:
            entries += attention(f"{path}mixer.", f"{name}self_attn.", spec.mixer, hidden)
        if isinstance(spec.ffn, MlpSpec):
            entries += mlp(f"{path}ffn.", f"{name}mlp.", spec.ffn.intermediate_size, hidden)
        else:
            entries += moe_entries(f"{path}ffn.", f"{name}mlp.", spec.ffn, hidden, fused)
    return entries
