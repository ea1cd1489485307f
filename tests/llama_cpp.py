"""What llama.cpp's converter makes of Qwen's hybrids and of DFlash drafters, restated, on random tiny checkpoints."""

import re
from pathlib import Path

import jax
import numpy as np

from dflash_jax.models import families
from dflash_jax.models.config import DraftConfig
from dflash_jax.models.families import dflash, mtp
from dflash_jax.parallel.sharding import parameter_paths
from tests.gguf_files import TOKENIZER, tokenizer_metadata, write_gguf
from tests.helpers import random_decoder, random_drafter, random_head

VOCAB = len(TOKENIZER["model"]["vocab"])
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
HYBRID = COMMON | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}
SECTIONS = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
QWEN35 = HYBRID | {"rope_parameters": HYBRID["rope_parameters"] | SECTIONS, "mtp_num_hidden_layers": 1}
# llama.cpp's architecture → config.json.
TARGETS = {
    "qwen35": QWEN35 | {"model_type": "qwen3_5_text", "intermediate_size": 96},
    "qwen35moe": QWEN35 | {"model_type": "qwen3_5_moe_text"} | EXPERTS,
    "qwen3next": HYBRID | {"model_type": "qwen3_next", "norm_topk_prob": True} | EXPERTS,
}
DFLASH = COMMON | {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "is_causal": False,
    "rope_theta": 5000.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
}
CONVS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 4}
MARKOV = {"markov_rank": 32, "enable_confidence_head": True, "confidence_head_with_markov": True}
DRAFTERS = {
    "dflash": DFLASH,
    "dflash2": DFLASH
    | {"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH["dflash_config"] | CONVS, "is_causal": True},
    "dspark": DFLASH
    | {
        "architectures": ["DSparkDraftModel"],
        "dflash_config": DFLASH["dflash_config"] | MARKOV | {"sample_from_anchor": True},
    },
}
PER_EXPERT = ("model.layers.0.mlp.experts.0.", "mtp.layers.0.mlp.experts.0.")


def tensors_of(module, entries) -> dict[str, np.ndarray]:
    """The tensors of a module under Hugging Face's names, rounded to bfloat16, as they are published."""
    leaves, tensors = dict(zip(parameter_paths(module), jax.tree.leaves(module), strict=True)), {}
    for entry in entries:
        if entry.path in leaves:
            arrays = entry.write(np.asarray(leaves[entry.path], np.float32))
            tensors |= zip((t.name for t in entry.tensors), arrays, strict=True)
    return {name: array.astype(jax.numpy.bfloat16).astype(np.float32) for name, array in tensors.items()}


def target(architecture: str) -> tuple[dict, dict[str, np.ndarray]]:
    """A random target, with an MTP head where the config says so: (config.json, tensors)."""
    raw = TARGETS[architecture]
    config = families.read_target(raw)
    names = PER_EXPERT if "num_experts" in raw else ()
    tensors = tensors_of(random_decoder(config), families.target_family(raw).weight_names(config, names))
    if "mtp_num_hidden_layers" in raw:
        head = random_head(config)
        entries = [e for e in mtp.weight_names(head.config, names) if e.path != "final_norm.weight"]
        tensors |= tensors_of(head, entries)
    return raw, tensors


def drafter(kind: str) -> tuple[dict, dict[str, np.ndarray]]:
    """A random drafter: (config.json, tensors)."""
    raw = DRAFTERS[kind]
    config = dflash.read_config(raw)
    assert isinstance(config, DraftConfig)
    return raw, tensors_of(random_drafter(config), dflash.weight_names(config))


def tiled(array: np.ndarray, raw: dict, size: int, axis: int = 0) -> np.ndarray:
    """Value heads, grouped by key head along an axis, in the order of ggml's broadcast."""
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    lead, rest = array.shape[:axis], array.shape[axis + 1 :]
    heads = array.reshape(*lead, keys, values // keys, size, *rest)
    return np.moveaxis(heads, axis, axis + 1).reshape(array.shape)


PARTS = {
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "mtp.fc.weight": "blk.3.nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "blk.3.nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "blk.3.nextn.hnorm.weight",
    "mtp.norm.weight": "blk.3.nextn.shared_head_norm.weight",
}
OF_DRAFTERS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def stored(raw: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A hybrid target's tensors as the converter writes them in float32."""
    out: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    is_tiled = raw["model_type"] != "qwen3_next"
    keys, values = raw["linear_num_key_heads"], raw["linear_num_value_heads"]
    key_size, size = raw["linear_key_head_dim"], raw["linear_value_head_dim"]
    first = 2 * keys * key_size
    for name, array in tensors.items():
        if "norm" in name and not name.endswith("linear_attn.norm.weight"):
            array = array + np.float32(1)
        if name.endswith("A_log"):
            array = -np.exp(array)
        if name.endswith("conv1d.weight"):
            array = array[:, 0]
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]
        if is_tiled and name.endswith((".A_log", ".dt_bias", ".in_proj_a.weight", ".in_proj_b.weight")):
            array = tiled(array, raw, 1)
        if is_tiled and name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
            array = np.concatenate([array[:first], tiled(array[first:], raw, size)])
        if is_tiled and name.endswith(".in_proj_z.weight"):
            array = tiled(array, raw, size)
        if is_tiled and name.endswith(".out_proj.weight"):
            array = tiled(array, raw, size, axis=1)
        if name in WHOLE:
            out[WHOLE[name]] = array
            continue
        layer, part = re.fullmatch(r"(?:model|(?:mtp))\.layers\.(\d+)\.(.*)", name).groups()
        layer = raw["num_hidden_layers"] if name.startswith("mtp.") else layer
        if found := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", part):
            experts.setdefault(f"blk.{layer}.ffn_{found[2]}_exps.weight", {})[int(found[1])] = array
        elif part == "linear_attn.in_proj_qkvz.weight":
            each = values // keys * size
            parts = np.split(array.reshape(keys, -1, array.shape[-1]), np.cumsum([key_size, key_size, each]), axis=1)
            q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in parts)
            out |= {f"blk.{layer}.attn_qkv.weight": np.concatenate([q, k, v]), f"blk.{layer}.attn_gate.weight": z}
        else:
            out[f"blk.{layer}.{PARTS[part]}"] = array
    return out | {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def stored_drafter(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A drafter's tensors as the converter writes them."""
    names = PARTS | {"post_attention_layernorm.weight": "ffn_norm.weight"}
    out = {}
    for name, array in tensors.items():
        found = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        out[f"blk.{found[1]}.{names[found[2]]}" if found else OF_DRAFTERS[name]] = array
    return out


def keys(architecture: str, raw: dict) -> dict:
    """A file's metadata."""
    rope = raw.get("rope_parameters", raw)
    out = {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"] + raw.get("mtp_num_hidden_layers", 0),
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
    }
    if "intermediate_size" in raw:
        out["feed_forward_length"] = raw["intermediate_size"]
    if "num_experts" in raw:
        out |= {"expert_count": raw["num_experts"], "expert_used_count": raw["num_experts_per_tok"]}
        out["expert_feed_forward_length"] = raw["moe_intermediate_size"]
        out["expert_shared_feed_forward_length"] = raw["shared_expert_intermediate_size"]
    if "linear_num_key_heads" in raw:
        values = raw["linear_num_value_heads"]
        out |= {
            "full_attention_interval": 3,
            "ssm.conv_kernel": raw["linear_conv_kernel_dim"],
            "ssm.state_size": raw["linear_key_head_dim"],
            "ssm.group_count": raw["linear_num_key_heads"],
            "ssm.time_step_rank": values,
            "ssm.inner_size": values * raw["linear_value_head_dim"],
            "rope.dimension_count": int(raw["head_dim"] * rope["partial_rotary_factor"]),
        }
        if "mrope_section" in rope:
            out["rope.dimension_sections"] = [*rope["mrope_section"], 0]
        if "mtp_num_hidden_layers" in raw:
            out["nextn_predict_layers"] = raw["mtp_num_hidden_layers"]
    if own := raw.get("dflash_config"):
        out |= {
            "attention.sliding_window": raw["sliding_window"],
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in raw["layer_types"]],
            "attention.causal": raw["is_causal"],
            "target_layers": [i + 1 for i in own["target_layer_ids"]],
            "block_size": raw["block_size"],
            "vocab_size": raw["vocab_size"],
        }
        out |= {key: own[key] for key in (*CONVS, "sample_from_anchor") if key in own}
    out = {f"{architecture}.{key}": value for key, value in out.items()}
    return out | ({"tokenizer.ggml.mask_token_id": own["mask_token_id"]} if own else {})


def write_target(path: Path, architecture: str, kind: str = "F32", tensors=None, more: dict | None = None) -> Path:
    """Writes the file of `target`, with changes to its tensors and keys; None removes one."""
    raw, own = target(architecture)
    everything = stored(raw, own) | (tensors or {})
    metadata = keys(architecture, raw) | (more or {})
    return write_gguf(
        path,
        architecture,
        {name: array for name, array in everything.items() if array is not None},
        {key: value for key, value in metadata.items() if value is not None},
        tokenizer_metadata() | {"pre": "qwen35"},
        kind,
        "{{ messages }}",
    )


def write_drafter(path: Path, kind: str, architecture: str = "dflash", stored_as: str = "F32", **changes) -> Path:
    """Writes the file of `drafter`: ``tensors`` and ``more`` as of `write_target`, ``names`` to rename tensors."""
    raw, own = drafter(kind)
    renamed = changes.get("names", {})
    everything = {renamed.get(name, name): array for name, array in stored_drafter(own).items()}
    everything |= changes.get("tensors", {})
    metadata = keys(architecture, raw) | changes.get("more", {})
    return write_gguf(
        path,
        architecture,
        {name: array for name, array in everything.items() if array is not None},
        {key: value for key, value in metadata.items() if value is not None},
        {},
        stored_as,
    )
