"""A tiny target of every family, of sizes that eight devices can partly share."""

from dataclasses import replace

from dflash_jax.models.config import LayerSpec, MlpSpec, ModelConfig
from tests.helpers import ATTENTION, DELTA, MOE, tiny_config

VOCAB = 64

gated = replace(ATTENTION, num_heads=8, num_kv_heads=2)
plain = replace(gated, gated=False)
delta = replace(DELTA, num_key_heads=4, num_value_heads=12)
experts = replace(MOE, num_experts=8, intermediate_size=16, shared_intermediate_size=24)
lone = replace(experts, shared_intermediate_size=None, normalise_top_k=False)
MIXERS = {"a": gated, "d": delta, "p": plain, "n": replace(plain, qk_norm=False, num_heads=9, num_kv_heads=3)}
FFNS = {"m": MlpSpec(32), "e": experts, "l": lone}
# Layers as (mixer, feed-forward) letters; "n" has head counts that eight devices cannot share.
FAMILIES = {
    "qwen3_5_moe": ["de", "ae"],
    "qwen3_5": ["dm", "am"],
    "qwen3_next": ["de", "dm", "ae"],
    "qwen3_moe": ["pl", "pm"],
    "qwen3": ["pm", "pm"],
    "llama": ["nm", "nm"],
}


def family_config(family: str) -> ModelConfig:
    layers = tuple(LayerSpec(MIXERS[m], FFNS[f]) for m, f in FAMILIES[family])
    return tiny_config("a", vocab_size=VOCAB, layers=layers, tied_embeddings=family == "llama")
