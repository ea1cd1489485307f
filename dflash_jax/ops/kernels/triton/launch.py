"""How a Triton kernel is launched: through jax-triton, or as a test or a report does it instead (`launching`)."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_jax.ops.card import Card

# The last PTX version whose features Triton's LLVM emits; the assemblers of CUDA 13 read it.
PTX_VERSION = 90
TOOLKIT = "/usr/local/cuda"
# An assembler says "Cuda compilation tools, release 13.0, V13.0.88".
_RELEASE = re.compile(r"release (\d+\.\d+)")


@dataclass(frozen=True)
class Launch:
    """A kernel with what it is called with.

    Attributes:
        kernel: A `triton.jit` function of ``args``, a pointer for each of ``out``, and ``meta``.
        args: Arrays. Those numbered by ``in_place`` are written where they are.
        out: Shapes and dtypes of what the kernel writes besides.
        grid: Executables along up to three axes.
        meta: Values of the kernel's ``tl.constexpr`` parameters.
        num_warps: Warps of a program.
        num_stages: Steps of a loop whose loads are in flight together.
        card: The card that the kernel is compiled for.
    """

    kernel: Any
    args: Sequence
    out: Sequence
    grid: tuple[int, ...]
    in_place: tuple[int, ...]
    meta: dict[str, Any]
    num_warps: int
    num_stages: int
    card: Card


def triton_call(
    card: Card, kernel, args: Sequence, out: Sequence, grid: tuple[int, ...], *, in_place: tuple[int, ...] = (),
    num_warps: int = 4, num_stages: int = 3, **meta,
) -> tuple:  # fmt: skip
    """Launches ``kernel`` as `Launch` describes.

    Returns:
        What was written: the arrays numbered by ``in_place``, then those of ``out``.
    """
    return _launcher(Launch(kernel, args, out, grid, in_place, meta, num_warps, num_stages, card))


def _through_jax_triton(launch: Launch) -> tuple:
    import jax
    import jax_triton

    refs = {i: jax.new_ref(launch.args[i]) for i in launch.in_place}
    # Fused multiplications and additions are asked for by name: Triton's default for them changes with its version.
    options = {"ptx_version": ptx_version(launch.card.least_ptx), "enable_fp_fusion": True}
    written = jax_triton.triton_call(
        *(refs.get(i, x) for i, x in enumerate(launch.args)), kernel=launch.kernel, out_type=list(launch.out),
        grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages, backend_options=options,
        **launch.meta,
    )  # fmt: skip
    return (*map(jax.freeze, refs.values()), *written)


_launcher: Callable[[Launch], tuple] = _through_jax_triton


@contextmanager
def launching(launcher: Callable[[Launch], tuple]) -> Iterator[None]:
    """Inside, kernels are launched by ``launcher``: in Triton's interpreter, or only recorded."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


@functools.cache
def ptx_version(least: int) -> int:
    """The PTX version that Triton is asked for, as 10 times major plus minor.

    Args:
        least: The oldest one that has the card's instructions. An assembler that does not read it cannot be XLA's for
            this card, and is passed over.

    Triton stamps its code with the version of its own assembler. XLA assembles it with another one, the first on PATH
    or a CUDA toolkit's, which refuses what is newer than itself. So the version is one that each of them reads.
    """
    from triton.backends.nvidia.compiler import ptx_get_version

    read = (ptx_get_version(release) for release in map(release_of, assemblers()) if release)
    return min([PTX_VERSION, *(version for version in read if version >= least)])


def assemblers() -> list[Path]:
    """Those that XLA may take: on PATH, and in the usual places of a CUDA toolkit."""
    roots = [*map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT")), TOOLKIT]
    places = [shutil.which("ptxas"), *(f"{root}/bin/ptxas" for root in roots if root)]
    return [path for path in dict.fromkeys(map(Path, filter(None, places))) if os.access(path, os.X_OK)]


def release_of(assembler: Path) -> str | None:
    """The CUDA release that an assembler names, such as "13.0"; None where it names none."""
    try:
        output = subprocess.run([assembler, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _RELEASE.search(output)
    return match and match[1]
