"""Tokens of an engine on a card or TPUs, or interpreted.

Default kernels, all (on a card launched in joined calls) and none, drafter on and off, prompts of many lengths, alone
and together; on TPUs also several draft lengths, and all devices of the host.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.errors import InputError
from dflash_jax.models.decoder import abstract_decoder
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.layers import with_backend
from dflash_jax.models.packing import transpose_experts
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.kernels.triton import call
from dflash_jax.ops.kernels.triton.launch import launch_by_default, launching
from dflash_jax.ops.moe import transposes_experts
from dflash_jax.parallel.sharding import Layout, parameter_specs, place
from tools import token_runs
from tools.token_runs import Remembering


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
    """Runs of one pair of models, and what they are compared with.

    Args:
        kind: "cuda" or "tpu".
        on_device: Whether there is such a device; the CPU stands for it otherwise.
    """

    def __init__(self, kind: str, on_device: bool):
        self.kind, self.on_device, self.plan = kind, on_device, ON_CARD if on_device else INTERPRETED
        self.shapes = token_runs.real_heads(512) if on_device else token_runs.small()

    def backend(self, kernels: str) -> Backend:
        """The backend with "auto", "all" or "xla" kernels."""
        if self.on_device:
            backend = Backend.detect(kernels)
        elif self.kind == "tpu":
            backend = replace(Backend.xla("tpu"), kernels=kernels)
        else:
            backend = Backend.xla() if kernels == "xla" else Backend.for_card(HOPPER, kernels)
        if self.kind == "tpu" or not self.on_device:
            return backend
        if kernels != "xla" and backend.no_triton:
            raise RuntimeError(f"no kernels: {backend.no_triton}")
        if kernels == "all" and not backend.joins_launches:
            raise InputError(f"launches cannot be joined: {call.why_not()}")
        return backend

    @cache  # noqa: B019
    def models(self, dtype, kernels: str, devices: int = 1):
        """(target, drafter) in a dtype, with some kernels, on so many devices."""
        pair = jax.tree.map(lambda x: x.astype(dtype), token_runs.random_pair(self.shapes))
        if devices > 1:
            layout = Layout(tensor=devices)
            pair = [_divided(m, f, layout) for m, f in zip(pair, (abstract_decoder, abstract_drafter), strict=True)]
        # As `LLM` has them.
        backend = replace(self.backend(kernels), reproducible=dtype != jnp.float32)
        pair = [with_backend(module, backend) for module in pair]
        return [transpose_experts(module) for module in pair] if transposes_experts(backend) else pair

    def continued(self, count: int, dtype, temperature: float, block_size: int, way: "Way", coach=None):
        """The requests with their tokens."""
        plan, (target, _) = self.plan, self.models(dtype, way.kernels, way.devices)
        lengths = np.resize(plan.lengths, count).tolist()
        # The interpreter's own launcher joins nothing.
        is_joined = way.kernels == "all" and self.kind == "cuda"
        with launching(launch_by_default) if is_joined else nullcontext():
            return token_runs.run(
                target, coach,
                token_runs.requests(lengths, temperature, plan.new, self.shapes.target.vocab_size), block_size,
                together=way.together, reproducible=0 if dtype == jnp.float32 else plan.wide, capacity=plan.capacity,
                prefill_sizes=plan.prefill_sizes, prefill_batch_tokens=plan.prefill_sizes[1],
            )  # fmt: skip

    @cache  # noqa: B019
    def expected(self, dtype, temperature: float, kernels: str, devices: int):
        """The tokens without a drafter, all prompts together."""
        return self.continued(self.plan.together, dtype, temperature, 1, Way(kernels, True, devices))

    def check(self, dtype, temperature: float, width: int, way: "Way") -> dict:
        """Compares a run, of rounds of a width or plain (1), with `expected`.

        In float32 that is computed without kernels on one device; in bfloat16, where tokens depend on the program, with
        the same.
        """
        plan = self.plan
        right = self.expected(dtype, temperature, *(("xla", 1) if dtype == jnp.float32 else (way.kernels, way.devices)))
        _, drafter = self.models(dtype, way.kernels, way.devices)
        coach = Remembering.of(drafter, right, width, plan.capacity) if width > 1 else None
        if coach is not None and way.devices > 1:
            mesh = Layout(tensor=way.devices).mesh()
            coach = replace(coach, table=place(np.asarray(coach.table), NamedSharding(mesh, PartitionSpec())))
        count = plan.together if way.together else len(plan.lengths)
        runs = self.continued(count, dtype, temperature, width, way, coach)

        def margin(*args) -> float:
            return token_runs.margin(self.models(dtype, "xla")[0], *args)

        return token_runs.compared(runs, right, margin if dtype == jnp.float32 else None)


@dataclass(frozen=True)
class Way:
    """How an engine runs.

    Attributes:
        kernels: As of ``--kernels``.
        together: Whether all prompts are continued at once.
        devices: Devices that divide the models.
    """

    kernels: str
    together: bool
    devices: int = 1


def _divided(module, abstract: Callable, layout: Layout):
    """``module`` over the devices of a mesh; ``abstract`` makes one of its kind without weights."""
    shape = abstract(module.config, layout=layout)
    shardings = [NamedSharding(layout.mesh(), spec) for spec in parameter_specs(shape)]
    leaves = [place(np.asarray(x), s) for x, s in zip(jax.tree.leaves(module), shardings, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def cases(kind: str, on_device: bool) -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, check), the most used first."""
    runs, f32, bf16 = Runs(kind, on_device), jnp.float32, jnp.bfloat16
    plan = runs.plan

    def named(dtype, temperature, kernels, drafting, together, width=plan.wide, devices=1):
        name = f"{jnp.dtype(dtype).name}, temperature {temperature}, kernels {kernels}, "
        name += f"{f'rounds of {width}' if drafting else 'plain'}, {f'{plan.together} together' * together or 'alone'}"
        name += f", {devices} devices" * (devices > 1)
        way = Way(kernels, together, devices)
        return name, lambda: runs.check(dtype, temperature, width if drafting else 1, way)

    if kind == "tpu":
        many = jax.local_device_count()
        yield named(f32, 0.8, "auto", True, True)
        yield named(f32, 0.8, "auto", False, False)
        if many > 1:
            yield named(f32, 0.8, "auto", True, True, devices=many)
        yield named(bf16, 0.8, "auto", True, True)
        yield named(f32, 0.8, "all", True, True)
        if not on_device:
            return
        for width in (8, 4, 2):
            yield named(f32, 0.8, "auto", True, True, width)
        yield named(f32, 0.8, "auto", True, False)
        yield named(bf16, 0.8, "auto", True, False)
        yield named(bf16, 0.8, "all", True, True)
        if many > 1:
            yield named(bf16, 0.0, "auto", True, True, devices=many)
        yield named(f32, 0.0, "auto", True, True)
        yield named(f32, 0.8, "xla", True, True)
        return
    if not on_device:
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
