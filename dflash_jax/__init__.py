"""DFlash speculative decoding in JAX. Names are imported when first used, so that ``--help`` does not wait for JAX."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.checkpoint.load import load_drafter as load_drafter
    from dflash_jax.checkpoint.load import load_target as load_target
    from dflash_jax.decoding.batch_init import init_state as init_state
    from dflash_jax.decoding.prefill import prefill_chunk as prefill_chunk
    from dflash_jax.decoding.sampling_state import SamplingState as SamplingState
    from dflash_jax.decoding.speculative import decode as decode
    from dflash_jax.decoding.speculative import decode_round as decode_round
    from dflash_jax.decoding.state import DecodeState as DecodeState
    from dflash_jax.decoding.state import Settings as Settings
    from dflash_jax.decoding.state import empty_state as empty_state
    from dflash_jax.errors import InputError as InputError
    from dflash_jax.frontend.llm import LLM as LLM
    from dflash_jax.frontend.outputs import Completion as Completion
    from dflash_jax.models.config import DraftConfig as DraftConfig
    from dflash_jax.models.config import ModelConfig as ModelConfig
    from dflash_jax.models.decoder import Decoder as Decoder
    from dflash_jax.models.drafter import Drafter as Drafter
    from dflash_jax.models.drafting import DraftWindow as DraftWindow
    from dflash_jax.models.families import register_family as register_family
    from dflash_jax.parallel.sharding import Layout as Layout
    from dflash_jax.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_WHERE = {
    "LLM": "frontend.llm",
    "SamplingParams": "sampling_params",
    "Completion": "frontend.outputs",
    "InputError": "errors",
    "Layout": "parallel.sharding",
    "ModelConfig": "models.config",
    "DraftConfig": "models.config",
    "Decoder": "models.decoder",
    "Drafter": "models.drafter",
    "DraftWindow": "models.drafting",
    "register_family": "models.families",
    "load_target": "checkpoint.load",
    "load_drafter": "checkpoint.load",
    "SamplingState": "decoding.sampling_state",
    "Settings": "decoding.state",
    "DecodeState": "decoding.state",
    "init_state": "decoding.batch_init",
    "empty_state": "decoding.state",
    "prefill_chunk": "decoding.prefill",
    "decode_round": "decoding.speculative",
    "decode": "decoding.speculative",
}
__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    return getattr(import_module(f"dflash_jax.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *_WHERE})
