"""Triton kernels: whether they are wanted.

A kernel is a form named "cuda" in a `jax.lax.platform_dependent` beside those that XLA makes (`cache.attend`,
`models.moe.experts`), which are its definition. It needs the packages of the extra ``cuda13``.
"""

from importlib.util import find_spec

import jax

from dflash_jax.errors import InputError
from dflash_jax.options import CHOICES

_choice = "auto"


def choose(kernels: str) -> None:
    """ "auto": kernels where they are the better form and jax-triton is installed; "xla": none. For programs that are
    traced from now on."""
    global _choice
    if kernels not in CHOICES:
        raise InputError(f"kernels {kernels!r}: it must be one of {', '.join(CHOICES)}")
    _choice = kernels


def are_wanted() -> bool:
    """Whether programs that are traced now get kernels. Their tiles are cut for the shared memory of Hopper and
    later."""
    if _choice != "auto" or find_spec("jax_triton") is None:
        return False
    device = jax.devices()[0]
    return device.platform != "gpu" or float(getattr(device, "compute_capability", 0)) >= 9
