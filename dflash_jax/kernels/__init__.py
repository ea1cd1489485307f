"""Kernels: whether they are wanted.

On a GPU they are Triton's: a form named "cuda" in a `jax.lax.platform_dependent` beside those that XLA makes, which are
its definition: `cache.attend`, `cache.put`, `cache.replay`, `models.moe.mixture_by_platform`,
`models.gated_delta.GatedDelta`, `models.parts.linear` and `Attention.rotated`. They need the packages of the extra
``cuda13``. On a CPU they are in C++: a form named "cpu" in `cache.attend`, `cache.replay`, `GatedDelta` and
`sampling.gumbel_noise`, and what comes with the weights (`models.weights.Panels`), products and mixtures of experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dflash_jax.errors import InputError

CHOICES = ("auto", "xla")
_choice = "auto"


def choose(kernels: str) -> None:
    """For weights that are loaded and programs that are traced from now on. "auto": kernels where jax-triton and a card
    that they were made for are, and on a CPU where a C++ compiler is; "xla": none; "triton": for a card that is not
    here, too."""
    global _choice
    if kernels not in (*CHOICES, "triton"):
        raise InputError(f"kernels {kernels!r}: it must be one of {', '.join(CHOICES)}")
    _choice = kernels


@contextmanager
def without() -> Iterator[None]:
    """What is traced inside gets no kernels, but for what comes with weights."""
    global _choice
    before, _choice = _choice, "xla"
    try:
        yield
    finally:
        _choice = before


def instead_of(plain: Callable, kernel: Callable, *args) -> Any:
    """kernel(*args) on a GPU and plain(*args) elsewhere; the gradient is that of ``plain``."""
    import jax

    differentiable = jax.custom_jvp(kernel)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return jax.lax.platform_dependent(*args, default=plain, cuda=differentiable)


def for_cpu() -> bool:
    """Whether weights that are loaded now, and programs that are traced now, are for the CPU's kernels."""
    import jax

    from dflash_jax.kernels import cpu

    return _choice == "auto" and jax.default_backend() == "cpu" and cpu.is_here()


def are_wanted() -> bool:
    """Whether programs that are traced now get Triton kernels. Their tiles are cut for the shared memory of Hopper's
    and Blackwell's data-centre cards (compute capability 9 and 10)."""
    import jax

    if _choice != "auto" or find_spec("jax_triton") is None:
        return _choice == "triton"
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return False
    return 9 <= float(device.compute_capability) < 11
