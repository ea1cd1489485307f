"""One call of XLA that launches Triton kernels, one after another, with what is needed for it: `launch_p`.

`launcher.cc` is the call. XLA has one node for it in its graph of a loop, where each launch through jax-triton has a
node of its own, and a kernel may begin while the one before it ends.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

import base64
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.library import Library, NotBuiltError
from dflash_jax.ops.kernels.triton.ptx import PTX_VERSION

log = logging.getLogger("dflash_jax")

# The parameter of kernels that wait for the kernel before them by themselves, where it is true.
DEPENDENT = "DEPENDENT"
TARGET = "dflash_launch"
DRIVER = "libcuda.so.1"
# Hopper and later have dependent launches.
OLDEST_DEPENDENT = 90
WARP = 32
# Triton's names of dtypes, by JAX's names.
KINDS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv",
    "int8": "i8", "uint8": "u8", "int32": "i32", "uint32": "u32", "bool": "i1",
}  # fmt: skip


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


@dataclass(frozen=True)
class Kernel:
    """A kernel of a call; the other attributes are those of `Launch`.

    Attributes:
        buffers: The buffer of each argument and result: those of the call's arguments are counted first, then those of
            its results.
        dtypes: JAX's names of their dtypes.
        meta: Names and values of the kernel's constants.
        capability: The card's.
    """

    kernel: Any
    buffers: tuple[int, ...]
    dtypes: tuple[str, ...]
    grid: tuple[int, ...]
    meta: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int
    capability: int


launch_p = jex.Primitive("dflash_launch")
launch_p.multiple_results = True


@launch_p.def_abstract_eval
def _abstract_results(*_: Any, results: tuple[jax.ShapeDtypeStruct, ...], **__: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def launch_by_call(launch: Launch, dependent: bool = False) -> tuple[Any, ...]:
    """A launcher for `launching`: each launch is a call of `launch_p`.

    Args:
        launch: The launch.
        dependent: Whether kernels with a parameter `DEPENDENT` wait for the kernel before them by themselves.

    Returns:
        As `launch.triton_call`.
    """
    meta, count, in_place = dict(launch.meta), len(launch.args), launch.in_place
    if dependent and DEPENDENT in meta and launch.card.capability >= OLDEST_DEPENDENT:
        meta[DEPENDENT] = True
    results = tuple(map(shape_of, (*(launch.args[i] for i in in_place), *launch.out)))
    kernel = Kernel(
        launch.kernel,
        (*range(count), *range(count + len(in_place), count + len(results))),
        tuple(str(x.dtype) for x in (*launch.args, *launch.out)),
        launch.grid,
        tuple(meta.items()),
        launch.num_warps,
        launch.num_stages,
        launch.card.capability,
    )
    aliases = tuple((i, j) for j, i in enumerate(in_place))
    return tuple(launch_p.bind(*launch.args, kernels=(kernel,), results=results, aliases=aliases))


# Compilation, and the call.


def compile_kernel(
    kernel: Any, dtypes: Sequence[str], meta: dict[str, Any], num_warps: int, num_stages: int, capability: int
) -> Any:
    """Compiles a kernel with Triton and its assembler.

    Args:
        kernel: A `triton.jit` function, or one of Gluon.
        dtypes: JAX's names of the dtypes of its arrays, arguments and results.
        meta: Values of its constants.
        num_warps: Warps of a program.
        num_stages: Loop steps whose loads are in flight together.
        capability: The card's, 10 times major plus minor.

    Returns:
        Triton's compiled kernel.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler as nvidia
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = list(kernel.arg_names)
    signature = {name: f"*{KINDS[dtype]}" for name, dtype in zip(names, dtypes, strict=False)}
    signature |= dict.fromkeys(names[len(dtypes) :], "constexpr")
    # As jax-triton has it: JAX's arrays begin at multiples of 16 bytes.
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(dtypes))}
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        # Triton's own assembler for older cards is older than XLA's.
        "ptx_version": min(PTX_VERSION, nvidia.ptx_get_version(nvidia.get_ptxas(capability).version)),
        # Fused multiply-add is set explicitly: Triton's default changes with its version.
        "enable_fp_fusion": True,
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, meta, attributes)
    with knobs.compilation.scope():
        # Lines of sources are two thirds of a cubin, and each call has its own.
        knobs.compilation.disable_line_info = True
        return triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)


@functools.cache
def _compiled(kernel: Any, dtypes: tuple[str, ...], meta: tuple, warps: int, stages: int, capability: int) -> Any:
    return compile_kernel(kernel, dtypes, dict(meta), warps, stages, capability)


@dataclass
class Plan:
    """The attributes of a call. `launcher.cc` describes the numbers.

    Attributes:
        count: Number of launches.
        launches: The numbers of each launch.
        images: The cubins, by their digest: (name of the kernel, cubin).
        scratch: Bytes of memory for kernels themselves; each is one more result of the call.
    """

    count: int = 0
    launches: list[int] = field(default_factory=list)
    images: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    scratch: list[int] = field(default_factory=list)

    def add(self, kernel: Kernel, buffers: int) -> None:
        """Adds a launch; ``buffers``: how many arguments and results the call has without scratch."""
        code = _compiled(
            kernel.kernel, kernel.dtypes, kernel.meta, kernel.num_warps, kernel.num_stages, kernel.capability
        )
        cubin, about = code.asm["cubin"], code.metadata
        digest = hashlib.sha256(cubin).hexdigest()
        self.images.setdefault(digest, (about.name, cubin))
        grid, scratch = (*kernel.grid, 1, 1)[:3], -1
        if about.global_scratch_size:
            scratch = buffers + len(self.scratch)
            self.scratch.append(about.global_scratch_size * about.num_ctas * math.prod(grid))
        is_dependent = bool(self.count) and dict(kernel.meta).get(DEPENDENT, False)
        self.count += 1
        addresses = [*kernel.buffers, scratch]
        self.launches += [[*self.images].index(digest), *grid, about.num_warps * WARP, about.shared, about.num_ctas]
        self.launches += [int(is_dependent), len(addresses), *addresses]

    def attributes(self) -> dict[str, Any]:
        """The attributes of the call."""
        sizes = [len(cubin) for _, cubin in self.images.values()]
        plan = np.array([len(sizes), self.count, *sizes, *self.launches], np.int64)
        names = "".join(f"{name}\n" for name, _ in self.images.values())
        images = base64.b64encode(b"".join(cubin for _, cubin in self.images.values())).decode()
        digest = hashlib.sha256(plan.tobytes() + names.encode() + images.encode()).hexdigest()
        return {"plan": plan, "names": names, "images": images, "digest": digest}


def _call(
    *args: Any,
    kernels: tuple[Kernel, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    aliases: tuple[tuple[int, int], ...],
) -> Sequence[Any]:
    if reason := why_not():
        raise RuntimeError(f"kernels cannot be launched: {reason}")
    plan = Plan()
    for kernel in kernels:
        plan.add(kernel, len(args) + len(results))
    out = [*results, *(jax.ShapeDtypeStruct((size,), jnp.uint8) for size in plan.scratch)]
    call = jax.ffi.ffi_call(TARGET, out, input_output_aliases=dict(aliases))
    return call(*args, **plan.attributes())[: len(results)]


_implementation: ContextVar[Callable[..., Sequence[Any]]] = ContextVar("implementation", default=_call)


@contextmanager
def calling(implementation: Callable[..., Sequence[Any]]) -> Iterator[None]:
    """Replaces what `launch_p` is lowered to inside the context, a function of its arguments and parameters."""
    token = _implementation.set(implementation)
    try:
        yield
    finally:
        _implementation.reset(token)


def _lowered(*args: Any, **params: Any) -> Sequence[Any]:
    return _implementation.get()(*args, **params)


mlir.register_lowering(launch_p, mlir.lower_fun(_lowered, multiple_results=True))
launch_p.def_impl(lambda *args, **params: jax.jit(functools.partial(_lowered, **params))(*args))


def library() -> Library:
    """The library of `launcher.cc`.

    Raises:
        NotBuiltError: Triton is not installed, whose package has CUDA's header.
    """
    try:
        from triton.backends.nvidia import compiler as nvidia
    except ImportError as e:
        raise NotBuiltError("triton is not installed") from e
    include = str(Path(nvidia.__file__).parent / "include")
    return Library("launcher", (Path(__file__).parent / "launcher.cc",), includes=(include,))


@functools.cache
def why_not() -> str | None:
    """The reason why kernels cannot be launched, or None; the first call compiles and registers the library."""
    try:
        loaded = library().load()
    except NotBuiltError as e:
        log.warning("Triton kernels are not launched in one call: %s", e)
        return str(e)
    loaded.DflashDriver(DRIVER.encode())
    capsules = {"initialize": jax.ffi.pycapsule(loaded.DflashLoad), "execute": jax.ffi.pycapsule(loaded.DflashRun)}
    jax.ffi.register_ffi_target(TARGET, capsules, platform="CUDA")
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.DflashRunWithoutStream), platform="cpu")
    return None
