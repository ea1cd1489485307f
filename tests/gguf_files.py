"""Tiny GGUF files of random models, and GGUF files as transformers reads them."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gguf
import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dflash_jax.frontend.llm_config import TINY
from tests.helpers import draw

TOKENIZER = json.loads((TINY / "target" / "tokenizer.json").read_text(encoding="utf-8"))
SHAPE = {
    "vocab_size": len(TOKENIZER["model"]["vocab"]),
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
# GGUF architecture: (model class, config)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False)),
    "qwen3moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=32, tie_word_embeddings=False)),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def random_model(architecture: str, seed: int = 0) -> torch.nn.Module:
    kind, config = MODELS[architecture]
    model, rng = kind(config).eval(), np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(draw(rng, name, tuple(p.shape), p.shape[-1])))
    return model


def stored(model) -> dict[str, np.ndarray]:
    """The tensors of a model as llama.cpp's converter names and orders them."""
    config, tensors = model.config, {}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = np.split(array, 2, axis=1)
            tensors |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            continue
        if name.endswith("experts.down_proj"):
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = array
            continue
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        for theirs, theirs_there in NAMES.items():
            name = name.replace(f"{theirs}.", f"{theirs_there}.")
        tensors[name] = array
    return tensors


def metadata(model, architecture: str) -> dict:
    """The keys of a file's metadata that say what the model is."""
    c = model.config
    keys = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": c.rope_parameters["rope_theta"],
        "vocab_size": c.vocab_size,
    }
    if architecture == "llama":
        keys["rope.dimension_count"] = c.head_dim
    else:
        keys |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if architecture == "qwen3moe":
        keys |= {"expert_count": c.num_experts, "expert_used_count": c.num_experts_per_tok}
        keys["expert_feed_forward_length"] = c.moe_intermediate_size
    return {f"{architecture}.{k}": v for k, v in keys.items()}


def tokenizer_metadata() -> dict:
    """The bundled target's tokenizer, which is Qwen's but for the vocabulary."""
    special = {t["id"] for t in TOKENIZER["added_tokens"]}
    vocabulary = sorted(TOKENIZER["model"]["vocab"].items(), key=lambda item: item[1])
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [token for token, _ in vocabulary],
        "token_type": [3 if i in special else 1 for _, i in vocabulary],
        "merges": [" ".join(pair) for pair in TOKENIZER["model"]["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 0,
    }


def write_gguf(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    keys: dict,
    tokenizer: dict,
    kind: str = "F32",
    chat_template: str | None = None,
) -> Path:
    """``kind``: the type of matrices; vectors stay float32, and so does what does not divide into its blocks.

    Whole numbers stay as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    everything = keys | {f"tokenizer.ggml.{k}": v for k, v in tokenizer.items()}
    for key, value in everything.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if array.dtype.kind == "i":
            writer.add_tensor(name, array)
            continue
        fits = array.ndim > 1 and array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        used = wanted if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(array.astype(np.float32), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_by_transformers(path: Path, model: torch.nn.Module) -> torch.nn.Module:
    """``model`` with the weights of a GGUF file. This is what ``from_pretrained`` calls: for every submodule
    it would work out all names again, and each slice of a mapped header is slow."""
    named = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: ())
    with mock.patch("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=named)["tensors"]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= tied
    assert not unexpected
    model.tie_weights()
    return model.eval()
