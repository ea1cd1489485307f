"""Tokens of an engine on a card, or in Triton's interpreter.

Default kernels, all (which are launched in joined calls) and none, drafter on and off, prompts of many lengths, alone
and together.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models.layers import with_backend
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.kernels.triton import call
from dflash_jax.ops.kernels.triton.launch import launch_by_default, launching
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

    def backend(self, kernels: str) -> Backend:
        """The backend with "auto", "all" or "xla" kernels."""
        if not self.on_card:
            return Backend.xla() if kernels == "xla" else replace(INTERPRETED_BACKEND, kernels=kernels)
        backend = Backend.detect(kernels)
        if kernels != "xla" and backend.no_triton:
            raise RuntimeError(f"no kernels: {backend.no_triton}")
        if kernels == "all" and not backend.joins_launches:
            raise InputError(f"launches cannot be joined: {call.why_not()}")
        return backend

    @cache  # noqa: B019
    def models(self, dtype, kernels: str):
        """(target, drafter) in a dtype, with some kernels."""
        pair = jax.tree.map(lambda x: x.astype(dtype), token_runs.random_pair(self.shapes))
        return [with_backend(module, self.backend(kernels)) for module in pair]

    def continued(
        self, count: int, dtype, temperature: float, block_size: int, together: bool, kernels: str, coach=None
    ):
        """The requests with their tokens."""
        plan, (target, _) = self.plan, self.models(dtype, kernels)
        lengths = np.resize(plan.lengths, count).tolist()
        # The interpreter's own launcher joins nothing.
        with launching(launch_by_default) if kernels == "all" else nullcontext():
            return token_runs.run(
                target, coach,
                token_runs.requests(lengths, temperature, plan.new, self.shapes.target.vocab_size), block_size,
                together=together, reproducible=0 if dtype == jnp.float32 else plan.wide, capacity=plan.capacity,
                prefill_sizes=plan.prefill_sizes, prefill_batch_tokens=plan.prefill_sizes[1],
            )  # fmt: skip

    @cache  # noqa: B019
    def expected(self, dtype, temperature: float, kernels: str):
        """The tokens without a drafter, all prompts together."""
        return self.continued(self.plan.together, dtype, temperature, 1, True, kernels)

    def check(self, dtype, temperature: float, kernels: str, drafting: bool, together: bool) -> dict:
        """Compares a run with `expected`.

        In float32 that is computed without kernels; in bfloat16, where tokens depend on the program, with the same.
        """
        plan = self.plan
        right = self.expected(dtype, temperature, "xla" if dtype == jnp.float32 else kernels)
        _, drafter = self.models(dtype, kernels)
        coach = Remembering.of(drafter, right, plan.wide, plan.capacity) if drafting else None
        count = plan.together if together else len(plan.lengths)
        runs = self.continued(count, dtype, temperature, plan.wide if drafting else 1, together, kernels, coach)

        def margin(*args) -> float:
            return token_runs.margin(self.models(dtype, "xla")[0], *args)

        return token_runs.compared(runs, right, margin if dtype == jnp.float32 else None)


def cases(on_card: bool) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, check), the most used first."""
    runs, f32, bf16 = Runs(on_card), jnp.float32, jnp.bfloat16
    plan = runs.plan

    def named(dtype, temperature, kernels, drafting, together):
        name = f"{jnp.dtype(dtype).name}, temperature {temperature}, kernels {kernels}, "
        name += (
            f"{f'rounds of {plan.wide}' if drafting else 'plain'}, {f'{plan.together} together' * together or 'alone'}"
        )
        return name, lambda: runs.check(dtype, temperature, kernels, drafting, together)

    if not on_card:
        yield named(f32, 0.8, "auto", True, True)
        yield named(f32, 0.8, "all", True, True)
        yield named(f32, 0.8, "auto", False, False)
        yield named(bf16, 0.8, "auto", True, True)
        return
    for temperature in (0.8, 0.0):
        yield named(f32, temperature, "auto", True, True)
        yield named(f32, temperature, "auto", True, False)
        yield named(f32, temperature, "auto", False, False)
    yield named(bf16, 0.8, "auto", True, True)
    yield named(f32, 0.8, "all", True, True)
    yield named(bf16, 0.8, "all", True, True)
    yield named(bf16, 0.0, "all", False, False)
    yield named(bf16, 0.8, "auto", True, False)
    yield named(bf16, 0.0, "auto", True, True)
    yield named(bf16, 0.0, "auto", False, False)
    yield named(f32, 0.8, "auto", False, True)
    yield named(f32, 0.8, "xla", True, True)
    yield named(f32, 0.8, "xla", True, False)
