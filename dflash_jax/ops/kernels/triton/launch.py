"""Launches of Triton kernels: by jax-triton, by calls of this package (`call`, `chained`), or by what tests install."""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
import jax.extend.core as jex

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.call import DEPENDENT, Launch, launch_by_call
from dflash_jax.ops.kernels.triton.join import join
from dflash_jax.ops.kernels.triton.ptx import ptx_version

# From this version of jax on, versions of jax-triton with this prefix cannot be traced.
JAX_OF_JAX_TRITON = ((0, 12), "0.4.")


def triton_call(
    card: Card, kernel: Any, args: Sequence[Any], out: Sequence[Any], grid: tuple[int, ...], *,
    in_place: tuple[int, ...] = (), num_warps: int = 4, num_stages: int = 3, **meta: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Launches ``kernel`` as `Launch` describes.

    Returns:
        The arrays of ``in_place``, then those of ``out``.

    Raises:
        ValueError: An array of ``in_place`` is another argument, too, for which XLA makes no copy.
    """
    for i in in_place:
        if sum(x is args[i] for x in args) > 1:
            raise ValueError(f"argument {i} of {kernel.__name__} is written in place, and is another argument, too")
    if DEPENDENT in kernel.arg_names:
        meta.setdefault(DEPENDENT, False)
    return _launcher.get()(Launch(kernel, args, out, grid, in_place, meta, num_warps, num_stages, card))


def _through_jax_triton(launch: Launch) -> tuple[Any, ...]:
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


def launch_by_default(launch: Launch) -> tuple[Any, ...]:
    """Launches by jax-triton, or by calls of this package where jax-triton cannot be used."""
    if why_not_jax_triton() is None:
        return _through_jax_triton(launch)
    return launch_by_call(launch)


_launcher: ContextVar[Callable[[Launch], tuple[Any, ...]]] = ContextVar("launcher", default=launch_by_default)


@contextmanager
def launching(launcher: Callable[[Launch], tuple[Any, ...]]) -> Iterator[None]:
    """Replaces the launcher inside the context: kernels are joined, run in an interpreter, or are only recorded."""
    token = _launcher.set(launcher)
    try:
        yield
    finally:
        _launcher.reset(token)


def chained(function: Callable[..., Any], dependent: bool = True) -> Callable[..., Any]:
    """``function`` of trees of arrays, whose launches are joined where they follow one another.

    Inside `launching` it is ``function`` itself.

    Args:
        function: What launches kernels through `launch.triton_call`.
        dependent: As in `launch_by_call`.

    Returns:
        A function with the same results.
    """
    if _launcher.get() is not launch_by_default:
        return function

    def run(*args: Any) -> Any:
        with launching(functools.partial(launch_by_call, dependent=dependent)):
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = jex.jaxpr_as_fun(join(traced))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


@functools.cache
def why_not_jax_triton() -> str | None:
    """The reason why jax-triton cannot launch kernels, or None."""
    if find_spec("jax_triton") is None:
        return "jax-triton is not installed: it comes with the extra cuda13 on Python 3.12 and later"
    of_triton, of_jax = version("jax-triton"), jax.__version__
    if jax.__version_info__ >= JAX_OF_JAX_TRITON[0] and of_triton.startswith(JAX_OF_JAX_TRITON[1]):
        first = ".".join(map(str, JAX_OF_JAX_TRITON[0]))
        return f"jax {of_jax} cannot trace jax-triton {of_triton}: it needs jax below {first}"
    return None
