"""All kernel launches of three systems: recorded without a card, built and launched on one.

    python -m tools.card.build CAPABILITY SHARED_MEMORY MULTIPROCESSORS

prints the launches, a JSON object a line: what `scripts/card/check.py` runs in a process of its own, for a system over
eight devices is traced on eight CPU devices.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module

from dflash_jax.ops.card import HOPPER, Card


def record(capability: int, shared_memory: int, multiprocessors: int) -> None:
    """Prints each launch of the systems of `compile_kernels` for a card once."""
    from tools import compile_kernels

    compile_kernels.prepare()

    card, seen = Card(capability, shared_memory, multiprocessors), set()
    for config, mesh in compile_kernels.SYSTEMS.items():
        for launch in compile_kernels.launches(config, mesh, card, shapes=True):
            if (text := json.dumps(launch)) not in seen:
                seen.add(text)
                print(json.dumps(launch | {"system": config}), flush=True)


def recorded(card: Card) -> list[dict]:
    """The lines that `record` prints in another process, since the JAX of this one has a card."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    numbers = card.capability, card.shared_memory, card.multiprocessors
    command = [sys.executable, "-m", "tools.card.build", *map(str, numbers)]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def launched(launch: dict) -> dict:
    """Builds a launch and runs it over zeros, so that every index is in range."""
    import jax
    import jax.numpy as jnp

    from dflash_jax.ops.kernels.triton.launch import triton_call
    from tools.kernels.comparisons import tested_card

    module, _, name = launch["kernel"].partition(".")
    kernel = getattr(import_module(f"dflash_jax.ops.kernels.triton.{module}"), name)
    kinds = launch["kinds"]
    arrays = [jnp.zeros(shape, kind) for shape, kind in zip(launch["args"], kinds, strict=False)]
    out = [jax.ShapeDtypeStruct(s, k) for s, k in zip(launch["out"], kinds[len(arrays) :], strict=True)]

    def call(*arrays):
        return triton_call(
            tested_card(), kernel, arrays, out, tuple(launch["grid"]), in_place=tuple(launch["in_place"]),
            num_warps=launch["num_warps"], num_stages=launch["num_stages"], **launch["meta"],
        )  # fmt: skip

    jax.block_until_ready(jax.jit(call)(*arrays))
    return {"status": "exact"}


def compiled(launch: dict, capability: int) -> dict:
    """Builds a launch for an absent card, and holds what it takes to the card's limits."""
    from tools import compile_kernels

    figures = compile_kernels.compiled(launch, capability)
    why = compile_kernels.over_limit(figures, capability)
    return {"status": "failed", "why": why} if why else {"status": "exact", "stack": figures["stack"]}


def cases(on_card: bool) -> Iterator[tuple[str, Callable[[], dict]]]:
    """The cases: launches that are built and run on a card, or built for Hopper without one."""
    import jax

    card = Card.of_device(jax.devices()[0]) if on_card else HOPPER
    count: dict[str, int] = {}
    for launch in recorded(card):
        what = f"{launch['kernel'].partition('.')[2]} of {launch['system']}"
        count[what] = number = count.get(what, 0) + 1
        name = f"{what}, form {number}"
        if on_card:
            yield name, lambda launch=launch: launched(launch)
        else:
            yield name, lambda launch=launch: compiled(launch, card.capability)


if __name__ == "__main__":
    record(*map(int, sys.argv[1:]))
