"""DFlash speculative decoding in JAX. Names are imported when first used, so that ``--help`` does not wait for JAX."""

from importlib import import_module

_WHERE = {
    "LLM": "llm",
    "SamplingParams": "params",
    "Completion": "params",
    "InputError": "errors",
    "Layout": "sharding",
    "ModelConfig": "config",
    "DraftConfig": "config",
    "Decoder": "models.decoder",
    "Drafter": "models.drafter",
    "DraftWindow": "models.drafter",
    "load_target": "checkpoint.load",
    "load_drafter": "checkpoint.load",
    "SamplingRows": "sampling",
    "Settings": "state",
    "DecodeState": "state",
    "init_state": "prompts",
    "empty_state": "state",
    "prefill_chunk": "speculative",
    "decode_round": "speculative",
    "decode": "speculative",
}
__all__ = list(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    return getattr(import_module(f"dflash_jax.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *_WHERE})
