"""`Backend`: the platform and its kernels; `choose` chooses an operation's implementation.

An operation (`ops.linear`, `ops.attention`, `ops.rotation`, `ops.cache_write`, `ops.frame_attention`,
`ops.gated_delta`, `ops.moe`, `ops.block_convolution`, `ops.sampling_noise`, `ops.argmax`, `ops.top_k`) is one public
function with a reference in plain JAX and an ordered list of implementations. The first implementation that supports
the backend and the arguments computes the result; the reference comes last and supports everything.
``dflash ops`` prints the choices for a config and a device.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.errors import InputError
from dflash_jax.ops.card import CHOICES, OLDEST, Card
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.kernels.triton import call
from dflash_jax.ops.kernels.triton.launch import why_not_jax_triton

# The oldest Triton that kernels are compiled with. With an older one jax-triton 0.4.1 fails at the first launch.
OLDEST_TRITON = (3, 7)
# `Backend.eight_bits` by how a TPU's device_kind begins. Of other weights in eight bits libtpu 0.0.48 makes a copy in
# 16 bits in each call.
EIGHT_BITS = {"TPU7x": "float8_e4m3fn", "TPU v6": "int8", "TPU v5": "int8"}


@dataclass(frozen=True)
class Choice:
    """The implementation that was chosen for an operation.

    Attributes:
        op: The operation's name.
        implementation: The implementation's name.
        passed_over: Name and reason of each implementation before it in the list.
        shapes: Shapes and dtypes of the operation's arrays.
    """

    op: str
    implementation: str
    passed_over: tuple[tuple[str, str], ...]
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend:
    """The platform that programs run on, and the kernels that it has. It is created once and passed down.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        card: The NVIDIA card that tiles are chosen for; None on other platforms.
        kernels: The user's choice: "auto"; "all", also those of this package's kernels that no card has run; or "xla"
            for none of them.
        no_cpp: Why the C++ kernels are not used; None where they are.
        no_triton: Why the Triton kernels are not used; None where they are.
        on_choice: Called with each `Choice` while programs are traced. Comparisons of backends ignore it.
        fp4_activations: Whether products with weights in NVFP4 round their inputs to NVFP4, too.
        reproducible: Whether experts' implementations are passed over of which no TPU has shown that they compute each
            token without regard to the others.
        eight_bits: Dtype of the numbers in eight bits that `jax.lax.ragged_dot` multiplies with wider ones on this TPU
            without a copy in 16 bits; None: of none.
    """

    platform: str
    card: Card | None = None
    kernels: str = "auto"
    no_cpp: str | None = "the backend was created without kernels"
    no_triton: str | None = "the backend was created without kernels"
    on_choice: Callable[[Choice], None] | None = field(default=None, compare=False, repr=False)
    fp4_activations: bool = False
    reproducible: bool = False
    eight_bits: str | None = None

    @classmethod
    def detect(cls, kernels: str = "auto") -> "Backend":
        """The backend of this process's first device.

        On a CPU the C++ kernels are compiled unless they are cached.

        Args:
            kernels: One of `CHOICES`.

        Returns:
            The backend.

        Raises:
            InputError: ``kernels`` is not one of `CHOICES`.
        """
        return cls.of_device(jax.devices()[0], kernels)

    @classmethod
    def of_device(cls, device: Any, kernels: str = "auto") -> "Backend":
        """The backend of a `jax.Device` of this machine; see `detect`."""
        if kernels not in CHOICES:
            raise InputError(f"kernels {kernels!r}: it must be one of {', '.join(CHOICES)}")
        platform, card = _platform(device), None
        if platform == "cuda":
            card = Card.of_device(device)
        if platform == "tpu":
            return cls.for_tpu(kernels, device.device_kind)
        if kernels == "xla":
            return cls.xla(platform, card)
        no_cpp = cpp.why_not() if platform == "cpu" else f"the platform is {platform}"
        return cls(platform, card, kernels, no_cpp, _no_triton(device, card, kernels))

    @classmethod
    def for_card(cls, card: Card, kernels: str = "auto") -> "Backend":
        """CUDA with Triton kernels, "auto" or "all", for a card that need not be in this machine."""
        return cls("cuda", card, kernels, "the platform is cuda", None)

    @classmethod
    def for_tpu(cls, kernels: str = "auto", kind: str = "") -> "Backend":
        """A TPU, with any of `CHOICES`, that need not be in this machine; ``kind``: as JAX's device_kind."""
        reason = "kernels are 'xla'" if kernels == "xla" else "the platform is tpu"
        eight_bits = next((name for begin, name in EIGHT_BITS.items() if kind.startswith(begin)), None)
        return cls("tpu", None, kernels, reason, reason, eight_bits=eight_bits)

    @classmethod
    def xla(cls, platform: str = "cpu", card: Card | None = None) -> "Backend":
        """A backend without this package's kernels."""
        return cls(platform, card, "xla", "kernels are 'xla'", "kernels are 'xla'")

    @property
    def is_gpu(self) -> bool:
        """Whether the platform is a GPU of any vendor."""
        return self.platform in ("cuda", "rocm")

    @property
    def has_cpp(self) -> bool:
        """Whether the C++ kernels are used."""
        return self.no_cpp is None

    @property
    def has_triton(self) -> bool:
        """Whether the Triton kernels are used."""
        return self.no_triton is None

    @property
    def no_pallas(self) -> str | None:
        """Why Pallas' kernels for TPUs are not used; None where they are."""
        if self.platform != "tpu":
            return f"the platform is {self.platform}"
        return "kernels are 'xla'" if self.kernels == "xla" else None

    @property
    def joins_launches(self) -> bool:
        """Whether calls of this package launch the Triton kernels (`launch.chained`), in place of jax-triton.

        No card has run them: the user's "all" takes them.
        """
        return self.has_triton and self.kernels == "all" and call.why_not() is None

    @property
    def triton_card(self) -> Card:
        """The card that Triton kernels are launched for.

        Raises:
            ValueError: The backend has no card.
        """
        if self.card is None:
            raise ValueError(f"{self} has no card")
        return self.card


# A CPU without this package's kernels.
XLA = Backend.xla()


def _platform(device: Any) -> str:
    if device.platform in ("gpu", "cuda", "rocm"):
        return "cuda" if "cuda" in device.client.platform_version.lower() else "rocm"
    return device.platform


def _no_triton(device: Any, card: Card | None, kernels: str) -> str | None:
    """Why a device gets no Triton kernels; None where it does."""
    if card is None:
        return f"{device.device_kind} is not an NVIDIA GPU"
    if card.capability < OLDEST:
        needed = f"{OLDEST // 10}.{OLDEST % 10}"
        return f"{device.device_kind} has compute capability {device.compute_capability}: kernels need {needed}"
    if find_spec("triton") is None:
        return "triton is not installed: it comes with the extra cuda13 on Linux"
    try:
        of_triton = version("triton")
    except PackageNotFoundError:
        # Of a distribution with another name, such as a PyTorch nightly's.
        of_triton = import_module("triton").__version__
    if tuple(map(int, of_triton.split(".")[:2])) < OLDEST_TRITON:
        return f"Triton {of_triton} is too old: {'.'.join(map(str, OLDEST_TRITON))} or later is needed"
    if (reason := why_not_jax_triton()) is None:
        return None
    if kernels != "all":
        return f"{reason}; --kernels all launches them without jax-triton, as no card has done"
    another = call.why_not()
    return another and f"{reason}; nor can this package launch them: {another}"


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        name: Short, unique in the operation's list.
        supports: A function of the backend and the operation's arguments, arrays or shape structs. It returns None, or
            the reason why this implementation does not support them.
        call: The implementation, a function of the same arguments.
        is_tried: Whether it has run where it is for. Others are taken only where the user wants "all" kernels.
    """

    name: str
    supports: Callable[..., str | None]
    call: Callable[..., Any]
    is_tried: bool = True


def choose(
    op: str, implementations: Sequence[Implementation], backend: Backend, *args: Any, **options: Any
) -> Implementation:
    """The first implementation that supports a backend and arguments.

    Args:
        op: The operation's name, for `Choice` and errors.
        implementations: In order.
        backend: Where it runs.
        *args: The operation's arguments, arrays or shape structs.
        **options: Its keyword arguments.

    Returns:
        The implementation; ``backend.on_choice`` is called with the choice.

    Raises:
        ValueError: No implementation supports them.
    """
    passed_over: list[tuple[str, str]] = []
    for implementation in implementations:
        reason = implementation.supports(backend, *args, **options)
        if reason is None and not implementation.is_tried and backend.kernels != "all":
            reason = "no card has run it: kernels 'all' takes it"
        if reason is None:
            if backend.on_choice is not None:
                shapes = (jnp.dtype(x.dtype).name + str(list(x.shape)) for x in jax.tree.leaves(args) if _is_array(x))
                backend.on_choice(Choice(op, implementation.name, tuple(passed_over), tuple(shapes)))
            return implementation
        passed_over.append((implementation.name, reason))
    raise ValueError(f"{op}: no implementation supports these arguments: {passed_over}")


def _is_array(x: object) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape")


def supports_everything(backend: Backend, *args: Any, **options: Any) -> None:
    """The ``supports`` of a reference: always None."""


def with_gradient_of(reference: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with the derivative of ``reference``, a function of the same arrays.

    It does not support kernels that write their arguments in place, since `jax.custom_jvp` takes no references.
    """
    differentiable = jax.custom_jvp(kernel)

    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(reference, primals, tangents)

    differentiable.defjvp(derivative)
    return differentiable
