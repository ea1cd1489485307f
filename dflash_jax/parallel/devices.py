"""Accelerators by name, for plans and for choosing a system's mesh; the platform of this process."""

import argparse
import platform as python_platform
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from dflash_jax.argument_checks import suggestion
from dflash_jax.errors import InputError
from dflash_jax.ops.kernels.triton import ptx


@dataclass(frozen=True)
class Device:
    """An accelerator, as JAX counts them: each of a TPU v7's two halves is one.

    Attributes:
        kind: How JAX's device_kind begins.
        memory: Bytes, as CUDA or the TPU's driver reports them. The driver's version changes them: a figure in GiB is
            the least that users of PyTorch have seen.
        bandwidth: Bytes per second, as the maker states them; 0 where that is not known.
        capability: 10 times the CUDA compute capability; None for TPUs.
        operations: Floating-point operations per second of products of 16-bit numbers with sums in float32, without
            sparsity, as the maker states them; 0 where that is not known.
        fp8: The same of products of FP8 numbers; 0 where they are not faster.
        int8: The same of products of 8-bit integers.
        link: Bytes per second of one link to another TPU, in one direction; 0 for GPUs.
        clock: Cycles per second of a TPU, in which its compiler estimates times.
    """

    kind: str
    memory: int
    bandwidth: float
    capability: int | None = None
    operations: float = 0.0
    fp8: float = 0.0
    int8: float = 0.0
    link: float = 0.0
    clock: float = 0.0

    @property
    def platform(self) -> str:
        """The platform, as `jax.default_backend` names it."""
        return "cpu" if self.kind == "cpu" else "tpu" if self.kind.startswith("TPU") else "gpu"


def _tpu(kind: str, gib: float, bandwidth: float, operations: float, **figures: float) -> Device:
    """A TPU with this memory in GiB."""
    return Device(kind, int(gib * 2**30), bandwidth, None, operations, **figures)


# How JAX names a v5p, which is how its name of a v5e begins.
V5P = "TPU v5"

# Operations: NVIDIA's data sheets of DGX B200, H200, H100 (SXM), A100 and L40S; its white papers on the architectures
# of Ada, RTX Blackwell and RTX PRO Blackwell; and Google Cloud's pages on TPUs (docs.cloud.google.com/tpu/docs/v5e,
# v5p, v6e, tpu7x). They state a v7 by the chip, of which half is a device. Links, and a v5p's rate of int8: "How to
# Scale Your Model" (jax-ml.github.io/scaling-book/tpus); a v7's links are taken as a v5p's, whose bandwidth Google
# states to be the same. Clocks: with them the matrix units (v5e four of 128 x 128, v5p eight, v6e and half a v7 four of
# 256 x 256) have the stated rate.
DEVICES = {
    "b200": Device("NVIDIA B200", 191_514_411_008, 8.0e12, 100, 2.25e15),
    "h200": Device("NVIDIA H200", 151_397_597_184, 4.8e12, 90, 989e12),
    "h100": Device("NVIDIA H100", 84_942_979_072, 3.35e12, 90, 989e12),
    "a100": Device("NVIDIA A100-SXM4-80GB", int(79.1 * 2**30), 2.039e12, 80, 312e12),
    "l40s": Device("NVIDIA L40S", int(44.3 * 2**30), 0.864e12, 89, 362e12),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", int(23.6 * 2**30), 1.008e12, 89, 165.2e12),
    "rtx5090": Device("NVIDIA GeForce RTX 5090", int(31.3 * 2**30), 1.792e12, 120, 209.5e12),
    "rtxpro6000": Device("NVIDIA RTX PRO 6000 Blackwell", int(94.9 * 2**30), 1.792e12, 120, 503.8e12),
    "v5e": _tpu("TPU v5 lite", 16, 0.819e12, 197e12, int8=393e12, link=4.5e10, clock=1.5e9),
    "v5p": _tpu(V5P, 95, 2.765e12, 459e12, int8=918e12, link=9e10, clock=1.75e9),
    "v6e": _tpu("TPU v6 lite", 32, 1.638e12, 918e12, int8=1836e12, link=9e10, clock=1.75e9),
    "tpu7x": _tpu("TPU7x", 192 / 2, 7.38e12 / 2, 2307e12 / 2, fp8=4614e12 / 2, link=9e10, clock=2.2e9),
}


def _bare(name: str) -> str:
    """A device's name without its maker, spaces and capitals."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "tpu"))


def device_name(kind: str) -> str | None:
    """The name in `DEVICES` of a device; None for an unknown one.

    Args:
        kind: That name, or how JAX (device_kind) or nvidia-smi names the device, in any case.
    """
    bare = _bare(kind)
    if bare in DEVICES:
        return bare
    # Those of notebooks have less memory.
    known = {} if "laptop" in bare else {_bare(device.kind): name for name, device in DEVICES.items()}
    # The longest; and only "TPU v5" itself is a v5p, not all that begins so.
    matches = (kind for kind in known if bare == kind or (bare.startswith(kind) and kind != _bare(V5P)))
    return known.get(max(matches, key=len, default=""))


def device_of_text(text: str) -> str:
    """A device of a command line: its name in `DEVICES`. Raises argparse.ArgumentTypeError, with the nearest name."""
    if (name := device_name(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not known: {suggestion(_bare(text), DEVICES)}")
    return name


def mesh_for(meshes: dict[str, str], kind: str, count: int) -> str:
    """The mesh of a system on a machine.

    Args:
        meshes: Mesh by machine, such as "b200x8".
        kind: JAX's device_kind.
        count: Devices.

    Returns:
        The largest mesh that fits; "", one device, where none does.
    """
    name, best = device_name(kind), (0, "")
    for machine, mesh in meshes.items():
        device, _, size = machine.rpartition("x")
        if device == name and int(size) <= count:
            best = max(best, (int(size), mesh))
    return best[1]


def check_meshes(meshes, where: str) -> None:
    """Raises InputError for a mesh table of a wrong form; the message begins with ``where``."""
    for machine, mesh in meshes.items():
        if not machine.rpartition("x")[2].isdecimal() or not isinstance(mesh, str):
            raise InputError(f'{where}: mesh {machine} = {mesh!r} must be like b200x8 = "tensor=8"')


def set_platform(platform: str | None) -> str:
    """Chooses the platform, and returns a description of its first device."""
    import jax

    from dflash_jax.parallel.distributed import check_whole

    if platform:
        jax.config.update("jax_platforms", platform)
    check_whole()
    try:
        device = jax.devices(platform)[0]
    except (RuntimeError, AssertionError) as e:
        reason = (str(e) or "JAX has no support for it here").splitlines()[0]
        raise InputError(f"platform {platform or 'default'!r} is not there: {reason}") from None
    return f"{device.platform} {device.device_kind}" if device.platform != device.device_kind else device.platform


def versions() -> str:
    """Versions of Python, JAX and the GPU's driver, on which figures depend."""
    found = [f"Python {python_platform.python_version()}"]
    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "triton", "jax-triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    for assembler in ptx.assemblers()[:1]:
        found += [f"ptxas {release}"] if (release := ptx.release_of(assembler)) else []
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout.split()
            found += [f"driver {said[0]}"] if said else []
    return ", ".join(found)
