"""DFlash speculative decoding in JAX. Names are imported when first used, so that ``--help`` does not wait for JAX."""

from importlib import import_module

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
    "DraftWindow": "models.drafter",
    "load_target": "checkpoint.load",
    "load_drafter": "checkpoint.load",
    "SamplingState": "decoding.sampling_state",
    "Settings": "decoding.state",
    "DecodeState": "decoding.state",
    "init_state": "decoding.batch_init",
    "empty_state": "decoding.state",
    "prefill_chunk": "decoding.speculative",
    "decode_round": "decoding.speculative",
    "decode": "decoding.speculative",
}
__all__ = list(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    return getattr(import_module(f"dflash_jax.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *_WHERE})
