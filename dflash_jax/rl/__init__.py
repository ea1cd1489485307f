"""Reinforcement learning with `LLM` as the engine of rollouts. Names are imported when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.rl.grpo import DrafterTrainer as DrafterTrainer
    from dflash_jax.rl.grpo import PolicyTrainer as PolicyTrainer
    from dflash_jax.rl.grpo import Rollouts as Rollouts
    from dflash_jax.rl.tunix import TunixRollout as TunixRollout

_WHERE = {"Rollouts": "grpo", "PolicyTrainer": "grpo", "DrafterTrainer": "grpo", "TunixRollout": "tunix"}
__all__ = list(_WHERE)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'dflash_jax.rl' has no attribute {name!r}")
    return getattr(import_module(f"dflash_jax.rl.{_WHERE[name]}"), name)


def __dir__():
    return sorted({*globals(), *_WHERE})
