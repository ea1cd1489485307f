"""Launches of Triton kernels: through jax-triton, or by a replacement that tests and reports install (`launching`)."""

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
# An assembler prints "Cuda compilation tools, release 13.0, V13.0.88".
_RELEASE = re.compile(r"release (\d+\.\d+)")


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments.

    Attributes:
        kernel: A `triton.jit` function of ``args``, a pointer for each of ``out``, and ``meta``.
        args: Arrays.
        out: Shapes and dtypes of the kernel's results.
        grid: Programs along up to three axes.
        in_place: Indices of the ``args`` that are written in place.
        meta: Values of the kernel's ``tl.constexpr`` parameters.
        num_warps: Warps of a program.
        num_stages: Loop steps whose loads are in flight together.
        card: The card that the kernel is compiled for.
    """

    kernel: Any
    args: Sequence[Any]
    out: Sequence[Any]
    grid: tuple[int, ...]
    in_place: tuple[int, ...]
    meta: dict[str, Any]
    num_warps: int
    num_stages: int
    card: Card


def triton_call(
    card: Card, kernel: Any, args: Sequence[Any], out: Sequence[Any], grid: tuple[int, ...], *,
    in_place: tuple[int, ...] = (), num_warps: int = 4, num_stages: int = 3, **meta: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``kernel`` as `Launch` describes.

    Returns:
        The arrays of ``in_place``, then those of ``out``.
    """
    return _launcher(Launch(kernel, args, out, grid, in_place, meta, num_warps, num_stages, card))


def _through_jax_triton(launch: Launch) -> tuple[Any, ...]:
    import jax
    import jax_triton  # pyright: ignore[reportMissingImports]  (the extra cuda13)

    refs = {i: jax.new_ref(launch.args[i]) for i in launch.in_place}
    # Fused multiply-add is set explicitly: Triton's default changes with its version.
    options = {"ptx_version": ptx_version(launch.card.least_ptx), "enable_fp_fusion": True}
    written = jax_triton.triton_call(
        *(refs.get(i, x) for i, x in enumerate(launch.args)), kernel=launch.kernel, out_type=list(launch.out),
        grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages, backend_options=options,
        **launch.meta,
    )  # fmt: skip
    return (*map(jax.freeze, refs.values()), *written)


# Replaced by tests and reports only, through `launching`: it is a global of the process.
_launcher: Callable[[Launch], tuple[Any, ...]] = _through_jax_triton


@contextmanager
def launching(launcher: Callable[[Launch], tuple[Any, ...]]) -> Iterator[None]:
    """Replaces the launcher inside the context: kernels run in Triton's interpreter, or are only recorded."""
    global _launcher
    previous, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = previous


@functools.cache
def ptx_version(least: int) -> int:
    """The PTX version of Triton's code, as 10 times major plus minor.

    Triton stamps its code with the version of its own assembler. XLA assembles the code with another assembler, the
    first on PATH or that of a CUDA toolkit, which refuses newer versions. So the result is a version that all of them
    read.

    Args:
        least: The oldest version that has the card's instructions. An assembler that does not read it cannot be XLA's
            for this card, and is ignored.
    """
    from triton.backends.nvidia.compiler import ptx_get_version

    read = (ptx_get_version(release) for release in map(release_of, assemblers()) if release)
    return min([PTX_VERSION, *(version for version in read if version >= least)])


def assemblers() -> list[Path]:
    """The assemblers that XLA may use: the one on PATH, and those in the usual places of a CUDA toolkit."""
    roots = [*map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT")), TOOLKIT]
    places = [shutil.which("ptxas"), *(f"{root}/bin/ptxas" for root in roots if root)]
    return [path for path in dict.fromkeys(map(Path, filter(None, places))) if os.access(path, os.X_OK)]


def release_of(assembler: Path) -> str | None:
    """The CUDA release that an assembler reports, such as "13.0"; None where it reports none."""
    try:
        output = subprocess.run([assembler, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _RELEASE.search(output)
    return match and match[1]
