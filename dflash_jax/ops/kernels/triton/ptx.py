"""The assemblers of PTX that XLA may use, and the version of PTX that all of them read. It is free of JAX."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

# The last PTX version whose features Triton's LLVM emits; the assemblers of CUDA 13 read it.
PTX_VERSION = 90
TOOLKIT = "/usr/local/cuda"
# An assembler prints "Cuda compilation tools, release 13.0, V13.0.88".
_RELEASE = re.compile(r"release (\d+\.\d+)")


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
