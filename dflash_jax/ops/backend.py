"""Kernels: whether they are wanted.

On a GPU they are Triton's: a form named "cuda" in a `jax.lax.platform_dependent` beside those that XLA makes, which are
its definition: `cache.attend`, `cache.put`, `cache.replay`, `models.moe.mixture_by_platform`,
`models.gated_delta.GatedDelta`, `models.parts.linear` and `Attention.rotated`. They need the packages of the extra
``cuda13``. On a CPU they are in C++: a form named "cpu" in `cache.attend`, `cache.replay`, `GatedDelta` and
`sampling.gumbel_noise`, and what comes with the weights (`ops.weights.PackedWeight`), products and
mixtures of experts.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from dflash_jax.errors import InputError
from dflash_jax.ops.card import HOPPER, OLDEST, OLDEST_FP8, Card

CHOICES = ("auto", "xla")
# From this jax on, these versions of jax-triton cannot be traced.
JAX_OF_JAX_TRITON = ((0, 12), "0.4.")
_choice = "auto"
_card: Card | None = None


def choose(kernels: str, for_card: Card | None = None) -> None:
    """For weights that are loaded and programs that are traced from now on.

    Args:
        kernels: "auto": kernels where `why_not` finds nothing against them; "xla": none; "triton": Triton's wherever
            the program will run.
        for_card: The card that programs are compiled for, where it is not this machine's.

    Raises:
        InputError: ``kernels`` is none of these.
    """
    global _choice, _card
    if kernels not in (*CHOICES, "triton"):
        raise InputError(f"kernels {kernels!r}: it must be one of {', '.join(CHOICES)}")
    _choice, _card = kernels, for_card


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
    """kernel(*args) on a GPU and plain(*args) elsewhere; the gradient is that of ``plain``. Not for kernels that write
    their arguments in place: `jax.custom_jvp` takes no Refs."""
    import jax

    differentiable = jax.custom_jvp(kernel)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    return jax.lax.platform_dependent(*args, default=plain, cuda=differentiable)


def for_cpu() -> bool:
    """Whether weights that are loaded now, and programs that are traced now, are for the CPU's kernels."""
    import jax

    from dflash_jax.ops.kernels.cpu import calls as cpu

    return _choice == "auto" and jax.default_backend() == "cpu" and cpu.is_here()


def is_automatic() -> bool:
    """Whether the platform decides, and not the user."""
    return _choice == "auto"


def are_wanted() -> bool:
    """Whether programs that are traced now get Triton kernels."""
    return why_not() is None


def why_not() -> str | None:
    """Why programs that are traced now get no Triton kernels; None where they do."""
    import jax

    if _choice != "auto":
        return None if _choice == "triton" else f"kernels are {_choice!r}"
    device = jax.devices()[0]
    if device.platform != "gpu" or "cuda" not in device.client.platform_version.lower():
        return f"{device.device_kind} is not an NVIDIA GPU"
    capability = Card.of_device(device).capability
    if capability < OLDEST:
        needed = f"{OLDEST // 10}.{OLDEST % 10}"
        return f"{device.device_kind} has compute capability {device.compute_capability}: kernels need {needed}"
    if find_spec("jax_triton") is None or find_spec("triton") is None:
        return "jax-triton is not installed: it comes with the extra cuda13 on Python 3.12 and later"
    if jax.__version_info__ >= JAX_OF_JAX_TRITON[0] and version("jax-triton").startswith(JAX_OF_JAX_TRITON[1]):
        first = ".".join(map(str, JAX_OF_JAX_TRITON[0]))
        return f"jax {jax.__version__} cannot trace jax-triton {version('jax-triton')}: it needs jax below {first}"
    return None


def why_not_of(dtypes: Iterable) -> str | None:
    """Why weights of these dtypes go without Triton kernels where others have them; None where they do not, or where
    there are no kernels at all."""
    import jax.numpy as jnp

    card = target_card()
    if not are_wanted() or card.capability >= OLDEST_FP8 or jnp.dtype(jnp.float8_e4m3fn) not in dtypes:
        return None
    had, needed = (f"{n // 10}.{n % 10}" for n in (card.capability, OLDEST_FP8))
    return f"the card has compute capability {had}: kernels for float8 need {needed}"


def target_card() -> Card:
    """The card that tiles are chosen for: what `choose` was given, or this machine's; Hopper's where it has none."""
    import jax

    if _card is not None:
        return _card
    device = jax.devices()[0]
    return Card.of_device(device) if hasattr(device, "compute_capability") else HOPPER
