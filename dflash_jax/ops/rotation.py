"""The operation `rotate`: RMSNorm and rotary positions (arXiv 2104.09864) of queries and keys.

The reference implementation is transformers' Qwen3NextAttention. Letters as in `ops.attention`.
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything, with_gradient_of
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.linear import rms_norm


def apply_rope(
    x: Float[Array, "B T N D"], angles: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]]
) -> Float[Array, "B T N D"]:
    """Rotary positions (arXiv 2104.09864): rotates the first 2 · half dimensions of x by ``angles``, cos and sin."""
    cos, sin = (a[:, :, None, :].astype(x.dtype) for a in angles)
    half = cos.shape[-1]
    first, second, unrotated = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, unrotated], axis=-1)


def reference(
    backend: Backend,
    q: Float[Array, "B T N halves D"] | None,
    k: Float[Array, "B T K D"],
    angles: tuple[Array, Array],
    norms: tuple[Array | None, Array | None],
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Array | None, Array]:
    """`rotate` by XLA."""

    def rotated(x: Array, norm: Array | None) -> Array:
        return apply_rope(x if norm is None else rms_norm(x, norm, eps, offset), angles)

    return None if q is None else rotated(q[..., 0, :], norms[0]), rotated(k, norms[1])


def _supports_cpp(
    backend: Backend,
    q: Array | None,
    k: Array,
    angles: tuple[Array, Array],
    norms: tuple[Array | None, Array | None],
    *args: Any,
    **options: Any,
) -> str | None:
    if not backend.has_cpp:
        return backend.no_cpp
    given = [x.dtype for x in (q, k, *angles, *norms) if x is not None]
    other = next((jnp.dtype(dtype).name for dtype in given if dtype != jnp.float32), None)
    return None if other is None else f"{other}: the kernel is for float32"


def _cpp(backend: Backend, *args: Any, **options: float) -> tuple[Array | None, Array]:
    kernel = with_gradient_of(partial(reference, backend, **options), partial(cpp.rotate, **options))
    return kernel(*args)


def _supports_triton(backend: Backend, q: Array | None, k: Array, *args: Any, **options: Any) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    return triton_attention.why_not_rotated(k)


def _triton(backend: Backend, *args: Any, **options: float) -> tuple[Array | None, Array]:
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    kernel = partial(triton_attention.rotate_triton, backend.triton_card, **options)
    return with_gradient_of(partial(reference, backend, **options), kernel)(*args)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton", _supports_triton, _triton),
    Implementation("reference", supports_everything, reference),
)


def rotate(
    backend: Backend,
    q: Float[Array, "B T N halves D"] | None,
    k: Float[Array, "B T K D"],
    angles: tuple[Float[Array, "#B T half"], Float[Array, "#B T half"]],
    norms: tuple[Float[Array, " D"] | None, Float[Array, " D"] | None],
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Float[Array, "B T N D"] | None, Float[Array, "B T K D"]]:
    """RMSNorm and rotation of queries and keys.

    Args:
        backend: Where it runs.
        q: [B, T, N, 1 or 2, D]: queries, then, where there are two, their gates; None for keys alone.
        k: [B, T, K, D].
        angles: cos and sin, float32 [B or 1, T, half].
        norms: Weights [D] of the norms of queries and keys, each None for no norm.
        eps: Added to the means of squares of the norms.
        offset: Added to the weights of the norms.

    Returns:
        Queries [B, T, N, D] (or None) and keys [B, T, K, D].
    """
    args, options = (q, k, angles, norms), {"eps": eps, "offset": offset}
    return choose("rotate", IMPLEMENTATIONS, backend, *args, **options).call(backend, *args, **options)
