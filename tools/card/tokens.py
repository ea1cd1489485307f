"""Tokens of an engine on a card, or in Triton's interpreter.

Kernels on and off, drafter on and off, prompts of many lengths, alone and together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.layers import with_backend
from dflash_jax.ops.backend import Backend
from tools import token_runs
from tools.token_runs import Remembering
from tools.triton_interpreter import INTERPRETED as INTERPRETED_BACKEND


@dataclass(frozen=True)
class Plan:
    """Sizes of the comparisons.

    Attributes:
        lengths: Lengths of the prompts that are continued alone.
        together: Number of prompts, of these lengths in turn, that are continued together.
        new: Tokens by which each is continued.
        wide: The block size.
        capacity: Positions of a slot.
        prefill_sizes: Tokens of a prompt that a program takes.
    """

    lengths: tuple[int, ...]
    together: int
    new: int
    wide: int
    capacity: int
    prefill_sizes: tuple[int, ...]


ON_CARD = Plan((17, 64, 300, 1024, 4096), 32, 32, 16, 4352, (64, 512, 4096))
INTERPRETED = Plan((17, 75), 3, 4, 8, 384, (32, 128))


class Runs:
    """Runs of one pair of models, and what they are compared with."""

    def __init__(self, on_card: bool):
        self.on_card, self.plan = on_card, ON_CARD if on_card else INTERPRETED
        self.shapes = token_runs.real_heads(512) if on_card else token_runs.small()

    def backend(self, on: bool) -> Backend:
        """The backend, with kernels or without."""
        if not self.on_card:
            return INTERPRETED_BACKEND if on else Backend.xla()
        backend = Backend.detect("auto" if on else "xla")
        if on and backend.no_triton:
            raise RuntimeError(f"no kernels: {backend.no_triton}")
        return backend

    @cache  # noqa: B019
    def models(self, dtype, on: bool):
        """(target, drafter) in a dtype, with or without kernels."""
        pair = jax.tree.map(lambda x: x.astype(dtype), token_runs.random_pair(self.shapes))
        return [with_backend(module, self.backend(on)) for module in pair]

    def continued(self, count: int, dtype, temperature: float, block_size: int, together: bool, on: bool, coach=None):
        """The requests with their tokens."""
        plan, (target, _) = self.plan, self.models(dtype, on)
        lengths = np.resize(plan.lengths, count).tolist()
        return token_runs.run(
            target, coach,
            token_runs.requests(lengths, temperature, plan.new, self.shapes.target.vocab_size), block_size,
            together=together, reproducible=0 if dtype == jnp.float32 else plan.wide, capacity=plan.capacity,
            prefill_sizes=plan.prefill_sizes, prefill_batch_tokens=plan.prefill_sizes[1],
        )  # fmt: skip

    @cache  # noqa: B019
    def expected(self, dtype, temperature: float):
        """The tokens without a drafter, all prompts together.

        In float32 they are computed without kernels; in bfloat16, where tokens depend on the program, with kernels.
        """
        return self.continued(self.plan.together, dtype, temperature, 1, True, dtype != jnp.float32)

    def check(self, dtype, temperature: float, on: bool, drafting: bool, together: bool) -> dict:
        """Compares a run with `expected`."""
        plan, right = self.plan, self.expected(dtype, temperature)
        _, drafter = self.models(dtype, on)
        coach = Remembering.of(drafter, right, plan.wide, plan.capacity) if drafting else None
        count = plan.together if together else len(plan.lengths)
        runs = self.continued(count, dtype, temperature, plan.wide if drafting else 1, together, on, coach)

        def margin(*args) -> float:
            return token_runs.margin(self.models(dtype, False)[0], *args)

        return token_runs.compared(runs, right, margin if dtype == jnp.float32 else None)


def cases(on_card: bool) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, check), the most used first."""
    runs, f32, bf16 = Runs(on_card), jnp.float32, jnp.bfloat16
    plan = runs.plan

    def named(dtype, temperature, on, drafting, together):
        name = f"{jnp.dtype(dtype).name}, temperature {temperature}, kernels {'on' if on else 'off'}, "
        name += (
            f"{f'rounds of {plan.wide}' if drafting else 'plain'}, {f'{plan.together} together' * together or 'alone'}"
        )
        return name, lambda: runs.check(dtype, temperature, on, drafting, together)

    temperatures = (0.8, 0.0) if on_card else (0.8,)
    for temperature in temperatures:
        yield named(f32, temperature, True, True, True)
        yield named(f32, temperature, True, True, False)
        yield named(f32, temperature, True, False, False)
    yield named(bf16, 0.8, True, True, True)
    if not on_card:
        return
    yield named(bf16, 0.8, True, True, False)
    yield named(bf16, 0.0, True, True, True)
    yield named(bf16, 0.0, True, False, False)
    yield named(f32, 0.8, True, False, True)
    yield named(f32, 0.8, False, True, True)
    yield named(f32, 0.8, False, True, False)
