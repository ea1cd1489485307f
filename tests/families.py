"""A tiny target of every family, of sizes that eight devices can partly share, and the families of examples/."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import pytest

from dflash_jax import register_family
from dflash_jax.checkpoint.load import save_module
from dflash_jax.models import families
from dflash_jax.models.config import LayerSpec, MlpSpec, ModelConfig
from tests.helpers import ATTENTION, DELTA, MOE, random_decoder, tiny_config

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


EXAMPLES = Path(__file__).parents[1] / "examples" / "families"
OUTSIDE = ("qwen2", "phi3")


def example_family(name: str) -> ModuleType:
    """A file of examples/families/ as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def examples_registered() -> Iterator[None]:
    """Within it the examples are registered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "registered", {})
        for name in OUTSIDE:
            register_family(name, example_family(name))
        yield


def save_example(name: str, path: Path) -> ModelConfig:
    """Writes a random checkpoint of an example, of odd sizes but for what two devices share."""
    raw = {
        "model_type": name,
        "vocab_size": 102,
        "hidden_size": 36,
        "intermediate_size": 30,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    if name == "phi3":
        raw["rope_parameters"]["partial_rotary_factor"] = 0.7
    family = example_family(name)
    config = family.read_config(raw)
    save_module(random_decoder(config, 1), family.weight_names(config), raw, path, jnp.float32)
    return config
