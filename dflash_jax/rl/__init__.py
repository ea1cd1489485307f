"""Reinforcement learning with `LLM` as the engine of rollouts."""

from typing import TYPE_CHECKING

from dflash_jax.rl.grpo import DrafterTrainer, PolicyTrainer, Rollouts, group_advantages

if TYPE_CHECKING:
    from dflash_jax.rl.tunix import TunixRollout

__all__ = ["DrafterTrainer", "PolicyTrainer", "Rollouts", "TunixRollout", "group_advantages"]


def __getattr__(name: str):
    # tunix is no dependency.
    if name == "TunixRollout":
        from dflash_jax.rl.tunix import TunixRollout

        return TunixRollout
    raise AttributeError(f"module 'dflash_jax.rl' has no attribute {name!r}")
