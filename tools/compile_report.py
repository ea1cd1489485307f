"""Programs compiled for accelerators that this machine need not have, and what XLA makes of them.

Devices: h100, h200, b200, or a TPU slice such as v6e:2x4. It needs Python 3.12 and jax 0.11 or later with the
compilers: jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cuda-nvcc for NVIDIA, libtpu for TPUs.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from dflash_jax.errors import InputError
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import Card
from tools.xla_text import KERNELS, copied_bytes, launched, shape_key, thunk_kinds, weights_read, written_bytes

# Read when jax, the CUDA plugin or libtpu loads.
WITHOUT_DEVICES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # JAX asks NVIDIA's libraries for their versions, which fails without a driver.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
SCRIPTS = Path(__file__).parents[1] / "scripts" / "compile"
SPECS = Path(__file__).parent / "gpu_specs"
# H200 is H100 with another memory.
H200 = {
    "memory_bandwidth: 3352320000000": "memory_bandwidth: 4800000000000",
    "device_memory_size: 84942979072": "device_memory_size: 151397597184",
    "NVIDIA H100 80GB HBM3": "NVIDIA H200 141GB HBM3e",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


def prepare() -> None:
    """Sets up compilers of absent devices; to be called before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for variable, value in WITHOUT_DEVICES.items():
        os.environ.setdefault(variable, value)


def reported(script: str, command: str) -> dict:
    """What a script of `scripts/compile` reports, from a process of its own: compilers keep what they have.

    Args:
        script: The script's name.
        command: A system and the script's options.
    """
    config, *options = command.split()
    argv = [sys.executable, str(SCRIPTS / script), "--config", config, *options, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout)


def topology(device: str, count: int) -> list:
    """The devices that a name stands for, to compile for.

    Raises:
        InputError: There is no compiler for them here.
    """
    try:
        return _topology(device, count)
    except Exception as e:  # the plugins raise many types: all mean that they are not there
        raise InputError(f"no compiler for {device} here: {' '.join(str(e).split())[:200]}") from None


def _topology(device: str, count: int) -> list:
    from jax.experimental import topologies

    if ":" in device:
        one = all(int(n) == 1 for n in device.partition(":")[2].split("x"))
        options = {"chips_per_host_bounds": (1, 1, 1)} if one else {}
        return topologies.get_topology_desc(platform="tpu", topology_name=device, **options).devices
    text = (SPECS / f"{'h100' if device == 'h200' else device}.txtpb").read_text()
    if device == "h200":
        for old, new in H200.items():
            text = text.replace(old, new)
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology=f"1x1x{count}").devices


def backend_of(device, kernels: str) -> Backend:
    """The backend of a device that programs are compiled for, which this machine need not have."""
    if hasattr(device, "compute_capability"):
        card = Card.of_device(device)
        has_triton = kernels != "xla" and find_spec("jax_triton")
        return Backend.for_card(card, kernels) if has_triton else Backend.xla("cuda", card)
    return Backend.for_tpu(kernels, device.device_kind)


def thunks(folder: Path) -> str:
    """The GPU's list of kernels, copies, collectives and graphs."""
    # The second file is missing where no pass changed the first.
    for pattern in ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt"):
        if found := sorted(folder.glob(pattern), key=lambda p: p.stat().st_size):
            return found[-1].read_text()
    return ""


def local_shapes(tree) -> set[tuple[int, ...]]:
    """Keys of a device's parts of arrays from 64 KiB on."""
    import jax

    leaves = [x for x in jax.tree.leaves(tree) if x.size * x.dtype.itemsize >= 1 << 16]
    return {shape_key(x.sharding.shard_shape(x.shape)) for x in leaves}


def resident_bytes(tree) -> int:
    """Bytes of a device's parts of arrays from 64 KiB on."""
    import jax

    leaves = [x for x in jax.tree.leaves(tree) if x.size * x.dtype.itemsize >= 1 << 16]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def measure(lowered, layers: int, arrays: dict, platform: str, options: dict | None) -> tuple[dict, str]:
    """Compiles a program and counts its kernels, copies and bytes.

    A loop's body counts once, so figures of a decode program are per round.

    Args:
        lowered: The program.
        layers: Its layers.
        arrays: Trees of arrays that should not be copied, by name.
        platform: What it is for, such as "tpu" or "cuda"; a GPU's kernels are counted.
        options: The compiler's; None: its own.

    Returns:
        The figures, and the optimised program's text.
    """
    import jax

    folder = Path(tempfile.mkdtemp(prefix="xla_"))
    began = time.perf_counter()
    try:
        dump = {} if platform == "tpu" else {"xla_dump_to": str(folder)}
        compiled = lowered.compile(compiler_options=dump | (options or {}))
        seconds, text = time.perf_counter() - began, thunks(folder)
    except jax.errors.JaxRuntimeError as e:  # a TPU's compiler refuses what its memory cannot hold
        return {"failed": " ".join(str(e).split())[:200]}, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    memory, hlo, weights = compiled.memory_analysis(), compiled.as_text(), arrays.get("weights")
    always, branches = thunk_kinds(text)
    figures = {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "donated": memory.alias_size_in_bytes,
        "copied": {name: copied_bytes(hlo, local_shapes(tree)) for name, tree in arrays.items()},
        "written": written_bytes(hlo, set().union(*map(local_shapes, arrays.values()))),
        "collectives_per_layer": sum(len(re.findall(rf" {c}(?:-start)?\(", hlo)) for c in COLLECTIVES) / layers,
        "compile_s": round(seconds, 1),
    }
    if weights is not None:
        figures["weights"] = {"held": resident_bytes(weights), "read": weights_read(hlo, local_shapes(weights))}
    if text:
        # A call of ours is one custom call of XLA's, and all are outside of branches.
        calls = launched(hlo)
        figures["kernels_per_layer"] = (sum(always[kind] for kind in KERNELS) + sum(calls) - len(calls)) / layers
        figures["calls_per_layer"] = sum(always[kind] for kind in KERNELS) / layers
        figures["kernels_in_branches"] = sum(branches[kind] for kind in KERNELS)
        figures |= {"thunks": dict(always + branches), "graphs": (always + branches)["CommandBuffer"]}
    return figures, hlo


def shorten(shapes, count: int):
    """A model of the first ``count`` layers only; the drafter taps the last of them."""
    from dflash_jax.models.mtp_config import MtpConfig

    target = replace(shapes.target, layers=shapes.target.layers[:count])
    draft = shapes.draft
    if isinstance(draft, MtpConfig):
        draft = replace(draft, target=target)
    elif draft is not None:
        taps = tuple(min(i, count - 1) for i in draft.target_layer_ids)
        draft = replace(draft, target_layer_ids=taps, num_target_layers=count)
    return replace(shapes, target=target, draft=draft)
