"""What operations run on: `Backend`, and how an operation takes one of its implementations.

An operation (`ops.linear`, `ops.attention`, `ops.gated_delta`, `ops.moe`, `ops.sampling_noise`, `ops.argmax`) is one
public function with a reference in plain JAX and an ordered list of implementations. The first that supports the
backend and the arguments computes the result; the reference comes last and supports everything.
``python -m dflash_jax.ops`` prints the choices for a config and a device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec

import jax
import jax.numpy as jnp

from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES, OLDEST, OLDEST_FP8, Card
from dflash_jax.ops.kernels.cpu import calls as cpp

# From this jax on, these versions of jax-triton cannot be traced.
JAX_OF_JAX_TRITON = ((0, 12), "0.4.")


@dataclass(frozen=True)
class Choice:
    """Which implementation an operation took.

    Attributes:
        op: The operation's name.
        taken: The implementation's name.
        passed_over: Name and reason of each implementation before it in the list.
        shapes: Shapes and dtypes of the operation's arrays.
    """

    op: str
    taken: str
    passed_over: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """The platform that programs run on, and the kernels that exist there. Made once, then handed down.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        card: The NVIDIA card that tiles are chosen for; None on other platforms.
        kernels: The user's choice: "auto", or "xla" for none of this package's kernels.
        no_cpp: Why the C++ kernels are not used; empty where they are.
        no_triton: Why the Triton kernels are not used; empty where they are.
        on_choice: Called with each `Choice` while programs are traced. It takes no part in comparisons.
    """

    platform: str
    card: Card | None = None
    kernels: str = "auto"
    no_cpp: str = "no kernels were asked for"
    no_triton: str = "no kernels were asked for"
    on_choice: Callable[[Choice], None] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def detect(cls, kernels: str = "auto") -> "Backend":
        """The backend of this process's first device. On a CPU it compiles the C++ kernels unless they are cached.

        Raises:
            InputError: ``kernels`` is not one of `CHOICES`.
        """
        return cls.of_device(jax.devices()[0], kernels)

    @classmethod
    def of_device(cls, device, kernels: str = "auto") -> "Backend":
        """The backend of a `jax.Device` of this machine."""
        if kernels not in CHOICES:
            raise InputError(f"kernels {kernels!r}: it must be one of {', '.join(CHOICES)}")
        platform, card = _platform(device), None
        if platform == "cuda":
            card = Card.of_device(device)
        if kernels == "xla":
            reason = "kernels are 'xla'"
            return cls(platform, card, kernels, reason, reason)
        no_cpp = cpp.why_not() if platform == "cpu" else f"the platform is {platform}"
        return cls(platform, card, kernels, no_cpp, _no_triton(device, card))

    @classmethod
    def for_card(cls, card: Card) -> "Backend":
        """CUDA with Triton kernels, for a card that this machine need not have."""
        return cls("cuda", card, "auto", "the platform is cuda", "")

    @classmethod
    def xla(cls, platform: str = "cpu", card: Card | None = None) -> "Backend":
        """A platform without this package's kernels."""
        return cls(platform, card, "xla", "kernels are 'xla'", "kernels are 'xla'")

    @property
    def is_gpu(self) -> bool:
        """Whether the platform is a GPU of any maker."""
        return self.platform in ("cuda", "rocm")

    @property
    def has_cpp(self) -> bool:
        """Whether the C++ kernels are used."""
        return not self.no_cpp

    @property
    def has_triton(self) -> bool:
        """Whether the Triton kernels are used."""
        return not self.no_triton

    def no_triton_for(self, dtypes: Iterable) -> str | None:
        """Why weights of these dtypes go without Triton kernels where others have them; None where they do not."""
        if not self.has_triton or self.card.capability >= OLDEST_FP8:
            return None
        if jnp.dtype(jnp.float8_e4m3fn) not in dtypes:
            return None
        capability, needed = (f"{n // 10}.{n % 10}" for n in (self.card.capability, OLDEST_FP8))
        return f"the card has compute capability {capability}: kernels for float8 need {needed}"


# A CPU without this package's kernels.
XLA = Backend.xla()


def _platform(device) -> str:
    if device.platform in ("gpu", "cuda", "rocm"):
        return "cuda" if "cuda" in device.client.platform_version.lower() else "rocm"
    return device.platform


def _no_triton(device, card: Card | None) -> str:
    """Why a device gets no Triton kernels; empty where it does."""
    if card is None:
        return f"{device.device_kind} is not an NVIDIA GPU"
    if card.capability < OLDEST:
        needed = f"{OLDEST // 10}.{OLDEST % 10}"
        return f"{device.device_kind} has compute capability {device.compute_capability}: kernels need {needed}"
    if find_spec("jax_triton") is None or find_spec("triton") is None:
        return "jax-triton is not installed: it comes with the extra cuda13 on Python 3.12 and later"
    if jax.__version_info__ >= JAX_OF_JAX_TRITON[0] and version("jax-triton").startswith(JAX_OF_JAX_TRITON[1]):
        first = ".".join(map(str, JAX_OF_JAX_TRITON[0]))
        return f"jax {jax.__version__} cannot trace jax-triton {version('jax-triton')}: it needs jax below {first}"
    return ""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        name: Short, unique in the operation's list.
        supports: Takes the backend and the operation's arguments, arrays or shape structs; returns None, or the
            reason why this implementation does not take them.
        call: Takes the same and computes.
    """

    name: str
    supports: Callable[..., str | None]
    call: Callable


def take(op: str, implementations: Sequence[Implementation], backend: Backend, *args, **options) -> Implementation:
    """The first of an operation's ``implementations`` that supports the backend and the arguments."""
    passed_over = []
    for implementation in implementations:
        reason = implementation.supports(backend, *args, **options)
        if reason is None:
            if backend.on_choice is not None:
                shapes = (jnp.dtype(x.dtype).name + str(list(x.shape)) for x in jax.tree.leaves(args) if _is_array(x))
                backend.on_choice(Choice(op, implementation.name, tuple(passed_over), tuple(shapes)))
            return implementation
        passed_over.append((implementation.name, reason))
    raise ValueError(f"{op}: no implementation takes these arguments: {passed_over}")


def _is_array(x) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def everything(backend: Backend, *args, **options) -> None:
    """``supports`` of a reference."""


def with_gradient_of(reference: Callable, kernel: Callable) -> Callable:
    """``kernel`` with the derivative of ``reference``: both of the same arrays. It is not for kernels that write their
    arguments in place, since `jax.custom_jvp` takes no references."""
    differentiable = jax.custom_jvp(kernel)
    differentiable.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
    return differentiable
