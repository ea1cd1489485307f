"""The launches of kernels in a system's programs, traced without a card, and each compiled for a card with Triton.

It needs triton (x86_64 Linux), and no card.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dflash_jax.ops.card import SHARED_MEMORY, Card
from dflash_jax.ops.kernels.triton.call import Launch, compile_kernel
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.options.systems import read_system
from dflash_jax.planner import abstract_pair, read_shapes
from tools.compile_report import shorten

# Devices of the CPU: a mesh of eight is traced, nothing is computed.
DEVICES = 8
SYSTEMS = {
    "qwen3.6-35b-a3b": "",
    "qwen3.6-35b-a3b-fp8": "",
    "qwen3.6-27b": "",
    "qwen3.5-397b-a17b": "tensor=8",
    "qwen3.8-27b": "",
    # Without the kernels that no card has run.
    "qwen3.6-35b-a3b auto": "",
    "qwen3.6-35b-a3b-fp8 auto": "",
    # With how its weights are quantized, and, in FP4, its activations.
    "qwen3.6-35b-a3b nvfp4": "",
    "qwen3.6-35b-a3b int4": "",
    "qwen3.6-35b-a3b int4-128": "",
    "qwen3.6-35b-a3b nvfp4 fp4": "",
    "qwen3.8-27b nvfp4 fp4": "",
}
# One period of the hybrid models' layers: the others launch the same kernels.
LAYERS, SLOTS, MAX_LEN = 4, (1, 32), 8192
# Tokens of a prompt that a program takes: a small and the largest number.
PREFILLS = (64, 4096)
TENSOR_MEMORY = 512


def prepare() -> None:
    """Sets up eight CPU devices and compiled kernels; to be called before jax and triton are imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ.pop("TRITON_INTERPRET", None)


def described(launch: Launch) -> dict:
    """A launch in JSON's types: everything that its machine code depends on."""
    return {
        "kernel": f"{launch.kernel.__module__.rpartition('.')[2]}.{launch.kernel.__name__}",
        "kinds": [str(x.dtype) for x in (*launch.args, *launch.out)],
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "meta": dict(launch.meta),
    }


def digest(launched: list[dict]) -> str:
    """The number and a hash of `described` launches, in any order."""
    text = "\n".join(sorted(json.dumps(launch, sort_keys=True) for launch in launched))
    return f"{len(launched)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def shapes_of(launch: Launch) -> dict:
    """The shapes and the grid of a launch, in JSON's types."""
    return {
        "args": [list(x.shape) for x in launch.args],
        "out": [list(x.shape) for x in launch.out],
        "grid": list(launch.grid),
        "in_place": list(launch.in_place),
    }


def launches(
    config: str,
    mesh: str,
    card: Card,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    shapes: bool = False,
    has_fp8_caches: bool = False,
) -> list[dict]:
    """`described` launches of a system's prefill, plain steps and rounds on a card, each once.

    Args:
        config: Name or file of the system, or a key of `SYSTEMS`.
        mesh: The mesh.
        card: The card.
        dtype: Dtype of the weights that are not quantized.
        quantize: As in `abstract_pair`.
        shapes: Whether each launch also has the `shapes_of` its first occurrence.
        has_fp8_caches: As in `abstract_pair`.
    """
    import jax
    import jax.numpy as jnp

    from dflash_jax.decoding.state import Settings
    from dflash_jax.engine.executables import Executables
    from dflash_jax.ops.backend import Backend
    from dflash_jax.parallel.sharding import Layout
    from dflash_jax.sampling_params import MAX_LOGPROBS

    found: dict[str, dict] = {}

    def record(launch: Launch) -> tuple:
        one = described(launch)
        # A grid of several rows is another launch with the same machine code.
        key = json.dumps(one | ({"rows": launch.grid[1:2]} if shapes else {}))
        found.setdefault(key, one | (shapes_of(launch) if shapes else {}))
        written = [launch.args[i] for i in launch.in_place] + list(launch.out)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in written)

    words: list[str] = []
    if config in SYSTEMS:
        config, *words = config.split()
    fp4, kernels = "fp4" in words, "auto" if "auto" in words else "all"
    quantize = next((word for word in words if word not in ("auto", "fp4")), quantize)
    system = read_system(config)
    pair = shorten(read_shapes(*(str(system.shapes[k]) for k in ("target", "draft"))), LAYERS)
    block_size = pair.draft.block_size if pair.draft is not None else 1
    layout = Layout.parse(mesh)
    backend = replace(Backend.for_card(card, kernels), fp4_activations=fp4)
    target, drafter = abstract_pair(pair, layout, jnp.dtype(dtype), quantize, backend, has_fp8_caches)
    devices = layout.mesh(jax.devices()[: layout.devices])
    plain, drafting = Executables(target, None, devices), Executables(target, drafter, devices)
    with launching(record):
        for slots in SLOTS:
            settings = Settings(1, top_logprobs=MAX_LOGPROBS)
            state = drafting.abstract_state(slots, MAX_LEN, settings)
            plain.lower_decode(plain.abstract_state(slots, MAX_LEN, settings), slots, settings)
            for tokens in PREFILLS if slots == 1 else ():
                drafting.lower_prefill(state, layout.data, tokens)
            settings = Settings(block_size, top_logprobs=MAX_LOGPROBS)
            drafting.lower_decode(drafting.abstract_state(slots, MAX_LEN, settings), slots, settings)
    return list(found.values())


def compile_launch(launch: dict, capability: int) -> Any:
    """Compiles a `described` launch for a card; returns Triton's compiled kernel."""
    module, _, name = launch["kernel"].partition(".")
    kernel = getattr(import_module(f"dflash_jax.ops.kernels.triton.{module}"), name)
    # JSON has no tuples.
    meta = {name: tuple(value) if isinstance(value, list) else value for name, value in launch["meta"].items()}
    return compile_kernel(kernel, launch["kinds"], meta, launch["num_warps"], launch["num_stages"], capability)


def compiled(launch: dict, capability: int) -> dict:
    """Compiles a launch for a card and measures what it takes of it.

    Returns:
        Registers and bytes of the stack of a thread, bytes of shared memory and columns of tensor memory of a program;
        or {"failed": why}.
    """
    from triton.backends.nvidia import compiler as nvidia

    try:
        compiled = compile_launch(launch, capability)
    except Exception as e:  # errors have many kinds: a pass of MLIR, the assembler, a limit of the card
        return {"failed": " ".join(str(e).split())[-1000:] or type(e).__name__}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", said)}
    return {
        "registers": used["REG"],
        "stack": used["STACK"],
        "shared": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size or 0,
    }


def over_limit(figures: dict, capability: int) -> str | None:
    """Why a card cannot run what was compiled, or None."""
    if "failed" in figures:
        return figures["failed"]
    if figures["shared"] > SHARED_MEMORY[capability]:
        return f"{figures['shared']} bytes of shared memory, of {SHARED_MEMORY[capability]}"
    if figures["tensor_memory"] > TENSOR_MEMORY:
        return f"{figures['tensor_memory']} columns of tensor memory, of {TENSOR_MEMORY}"
    return None
