"""DFlash (arXiv 2602.06036) and DFlash2 restated in NumPy, one row at a time, from their descriptions alone.

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


def option(raw, key, default=None):
    """A key of the config, of ``dflash_config`` first."""
    value = raw["dflash_config"].get(key)
    value = raw.get(key) if value is None else value
    return default if value is None else value


def convolution(raw, w, at, normed):
    """The two maps (before, after) of a sublayer of DFlash2, each [W, H] → [W, H]; the identity without them."""
    taps, group = option(raw, "conv_kernel_size"), option(raw, "conv_group_size")
    if not taps:
        return lambda v: v, lambda v: v
    width, hidden = normed.shape
    own = (normed @ w[at + "kernel_projection.weight"].T).reshape(width, 2, taps, hidden // group)

    def side(s):
        def mapped(v):
            out = np.zeros_like(v)
            for place in range(width):
                for tap in range(min(taps, place + 1)):
                    for channel in range(hidden):
                        factor = w[at + "base_kernel"][s, tap, channel] + own[place, s, tap, channel // group]
                        out[place, channel] += factor * v[place - tap, channel]
            return out

        return mapped

    return side(0), side(1)


def logits(raw, hidden, head):
    """The drafter's logits [W, V] of hidden states [W, H]."""
    out = hidden @ head.T * option(raw, "output_multiplier", 1.0)
    cap = option(raw, "final_logit_softcapping", 0.0)
    return cap * np.tanh(out / cap) if cap else out


def chain(raw, tensors, hidden, last, scores, scale=1.0, dtype=np.float64):
    """Drafted tokens, one after another, and how much each led the next best.

    hidden [L, H]: final states of the places of the drafts; scores [L, V]: what each token has there alone; a pair's
    score counts ``scale`` times.
    """
    w = {name: np.asarray(value, dtype) for name, value in tensors.items()}
    tokens, leads = [], []
    rank, kind = option(raw, "markov_rank"), option(raw, "markov_head_type")
    state = np.zeros(rank or 0)
    for place, row in enumerate(scores):
        previous, candidates, total = tokens[-1] if tokens else last, np.arange(len(row)), row
        if top := option(raw, "selector_top_k") or (rank and option(raw, "dspark_draft_topk", 16)):
            candidates = np.argsort(-row, kind="stable")[:top]
        if option(raw, "selector_top_k"):
            gate = w["candidate_selector.hidden_projection.weight"] @ hidden[place]
            before = gate * w["candidate_selector.predecessor_codebook"][previous]
            total = row[candidates] + scale * w["candidate_selector.successor_codebook"][candidates] @ before
        elif rank:
            before = w["markov_head.markov_w1.weight"][previous]
            if kind == "gated":
                read = np.concatenate([hidden[place], before])
                gate = w["markov_head.gate_proj.weight"] @ read + w["markov_head.gate_proj.bias"]
                before = before / (1 + np.exp(-gate))
            elif kind == "rnn":
                read = np.concatenate([state, before, hidden[place]])
                mixed = w["markov_head.joint_proj.weight"] @ read + w["markov_head.joint_proj.bias"]
                keep = 1 / (1 + np.exp(-mixed[:rank]))
                state = keep * state + (1 - keep) * np.tanh(mixed[rank : 2 * rank])
                before = np.tanh(mixed[2 * rank :])
            total = row[candidates] + scale * w["markov_head.markov_w2.weight"][candidates] @ before
        best = np.sort(total)
        tokens.append(int(candidates[total.argmax()]))
        leads.append(best[-1] - best[-2])
    return tokens, leads


def confidence(raw, tensors, hidden, last, tokens):
    """The probability of each drafted token as DSpark's head says it."""
    w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    read = hidden
    if option(raw, "confidence_head_with_markov"):
        read = np.concatenate([hidden, w["markov_head.markov_w1.weight"][[last, *tokens[:-1]]]], axis=1)
    logit = read @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    return 1 / (1 + np.exp(-logit))


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
    x = np.asarray(block, dtype) * option(raw, "input_embedding_scale", 1.0)
    context = np.asarray(features, dtype).reshape(start, w["fc.weight"].shape[1]) @ w["fc.weight"].T
    context = rms_norm(context, w["hidden_norm.weight"], eps)
    for layer in range(raw["num_hidden_layers"]):
        at = f"layers.{layer}."
        window, causal = layer_rule(raw, layer)
        normed = rms_norm(x, w[at + "input_layernorm.weight"], eps)
        before, after = convolution(raw, w, f"{at}attention_conv.", normed)
        normed = before(normed)
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
        x = x + after(mixed.reshape(width, -1) @ w[at + "self_attn.o_proj.weight"].T)
        normed = rms_norm(x, w[at + "post_attention_layernorm.weight"], eps)
        before, after = convolution(raw, w, f"{at}mlp_conv.", normed)
        normed = before(normed)
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        x = x + after((gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T)
    return rms_norm(x, w["norm.weight"], eps)
