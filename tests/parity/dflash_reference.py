"""The DFlash drafter restated in NumPy, one row at a time, from its description alone (arXiv 2602.06036).

It reads the raw ``config.json`` and the tensors under their names on disk, keeps no cache and shares no code.
"""

import math

import numpy as np


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rope_frequencies(raw, head_dim):
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    plain = np.array([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if scaling.get("rope_type", "default") == "default":
        return plain, 1.0
    factor, longest = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension_that_turns(times):
        return head_dim * math.log(longest / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dimension_that_turns(scaling.get("beta_slow", 1))), head_dim - 1)
    mixed = []
    for i, frequency in enumerate(plain):
        share = min(max((i - low) / (high - low if high != low else 1e-3), 0), 1)
        mixed.append(share * frequency / factor + (1 - share) * frequency)
    return np.array(mixed), scaling.get("attention_factor", 0.1 * math.log(factor) + 1)


def rotate(x, positions, frequencies, factor):
    """x [T, heads, D], rotate-half."""
    angle = positions[:, None, None].astype(x.dtype) * frequencies.astype(x.dtype)
    a, b = np.split(x, 2, axis=-1)
    cos, sin = factor * np.cos(angle), factor * np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer_rule(raw, layer):
    """(window or None, causal within the block) of a layer."""
    own = raw["dflash_config"]
    kinds = raw.get("layer_types") or []
    slides = bool(kinds) and kinds[layer] == "sliding_attention"
    if own.get("use_swa") and "sliding_attention" not in kinds:
        slides = True
    window = own.get("swa_window_size") or raw.get("sliding_window")
    causal = slides
    # The first that says something; causal_head is how JetSpec writes "each slot sees the block up to itself".
    for key in ("is_causal", "causal", "causal_head"):
        stated = own.get(key) if own.get(key) is not None else raw.get(key)
        if stated is not None:
            causal = stated
            break
    return (window if slides else None), causal


def sees(query, key, start, window, causal, draft_window, sinks):
    """May the block's token at position ``query`` see position ``key``? The block begins at ``start``."""
    if key < start:
        if window is not None and key <= query - window:
            return False
        return draft_window is None or key >= start - draft_window or key < sinks
    if causal and key > query:
        return False
    return window is None or abs(query - key) < window


def drafter(raw, tensors, features, block, draft_window=None, sinks=0, dtype=np.float64):
    """Hidden states [B, H], after the final norm, of one block.

    features [S, taps, H]: the target's tapped outputs for positions 0 … S-1; block [B, H]: embeddings of the last
    token and of the masks, which stand at positions S … S+B-1.
    """
    w = {name: np.asarray(value, dtype) for name, value in tensors.items()}
    eps = raw["rms_norm_eps"]
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    frequencies, factor = rope_frequencies(raw, head_dim)
    start, width = len(features), len(block)
    positions = np.arange(start + width)
    x = np.asarray(block, dtype)
    context = np.asarray(features, dtype).reshape(start, w["fc.weight"].shape[1]) @ w["fc.weight"].T
    context = rms_norm(context, w["hidden_norm.weight"], eps)
    for layer in range(raw["num_hidden_layers"]):
        at = f"layers.{layer}."
        window, causal = layer_rule(raw, layer)
        normed = rms_norm(x, w[at + "input_layernorm.weight"], eps)
        everything = np.concatenate([context, normed])
        q = (normed @ w[at + "self_attn.q_proj.weight"].T).reshape(width, heads, head_dim)
        k = (everything @ w[at + "self_attn.k_proj.weight"].T).reshape(-1, kv_heads, head_dim)
        v = (everything @ w[at + "self_attn.v_proj.weight"].T).reshape(-1, kv_heads, head_dim)
        q = rotate(rms_norm(q, w[at + "self_attn.q_norm.weight"], eps), positions[start:], frequencies, factor)
        k = rotate(rms_norm(k, w[at + "self_attn.k_norm.weight"], eps), positions, frequencies, factor)
        mask = np.array(
            [[sees(p, s, start, window, causal, draft_window, sinks) for s in positions] for p in positions[start:]]
        )
        mixed = np.zeros((width, heads, head_dim), dtype)
        for head in range(heads):
            mine = head // (heads // kv_heads)
            score = np.where(mask, q[:, head] @ k[:, mine].T / math.sqrt(head_dim), -np.inf)
            weight = np.exp(score - score.max(-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, mine]
        x = x + mixed.reshape(width, -1) @ w[at + "self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[at + "post_attention_layernorm.weight"], eps)
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"], eps)
