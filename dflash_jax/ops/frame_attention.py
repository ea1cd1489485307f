"""Operation: attention of a vision tower's patches within their frames, after the rotation of queries and keys.

    y_i = Σ_j softmax_j(R_i q_i · R_j k_j / √D) v_j,    low_i ≤ j < high_i,    R_i: the rotation of patch i

The reference is `ops.interval_attention` in tiles of scores. It writes and reads every tile of scores in memory, which
takes several times as long as the products; the Triton kernel keeps them on the chip, and the C++ kernel in a core's
caches. cuDNN's attention does as well, but takes frames of different lengths only through a private module of JAX, or
as a batch of frames padded to the longest one.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything
from dflash_jax.ops.interval_attention import KEYS, QUERIES, interval_attention
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.rotation import apply_rope

# Queries and keys of a tile of scores on an accelerator. A frame has thousands of patches, which all see one another,
# and the tiles follow one another: small tiles would leave most of the device idle. 16 heads take 64 MiB of scores.
LARGE_TILE = 1024


def rotated(qkv: Array, angles: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Queries, rotated and scaled, keys, rotated, and values, [N, heads, D] each: rounded once."""
    q, k, v = jnp.moveaxis(qkv, 1, 0)
    of_row = (angles[0][None], angles[1][None])
    q, k = (apply_rope(x[None].astype(jnp.float32), of_row)[0] for x in (q, k))
    return (q * q.shape[-1] ** -0.5).astype(v.dtype), k.astype(v.dtype), v


def reference(backend: Backend, qkv: Array, angles: tuple[Array, Array], low: Array, high: Array) -> Array:
    """`frame_attention` by XLA, in tiles."""
    q, k, v = rotated(qkv, angles)
    tile = (QUERIES, KEYS) if backend.platform == "cpu" else (LARGE_TILE, LARGE_TILE)
    y, _ = interval_attention(q[None, :, :, None], k[None], v[None], low[None], high[None], tile)
    return y[0, :, :, 0]


def _supports_cpp(backend: Backend, qkv: Array, *args: Any) -> str | None:
    return cpp.why_not_frames(qkv) if backend.has_cpp else backend.no_cpp


def _cpp(backend: Backend, *args: Any) -> Array:
    return cpp.attend_frames(*args)


def _supports_triton(backend: Backend, qkv: Array, *args: Any) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import frames

    return frames.why_not(qkv)


def _triton(backend: Backend, qkv: Array, angles: tuple[Array, Array], low: Array, high: Array) -> Array:
    from dflash_jax.ops.kernels.triton import frames

    return frames.attend_frames(backend.triton_card, *rotated(qkv, angles), low, high)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton", _supports_triton, _triton),
    Implementation("reference", supports_everything, reference),
)


def frame_attention(
    backend: Backend,
    qkv: Float[Array, "N 3 heads D"],
    angles: tuple[Float[Array, "N half"], Float[Array, "N half"]],
    low: Int[Array, " N"],
    high: Int[Array, " N"],
) -> Float[Array, "N heads D"]:
    """Softmax attention in which patch i sees the patches low[i] ≤ j < high[i]. Without a gradient.

    Args:
        backend: Where it runs.
        qkv: Queries, keys and values, [N, 3, heads, D].
        angles: cos and sin of the patches' rotation, float32 [N, D / 2] each.
        low: int32 [N].
        high: int32 [N]; a patch whose ``high`` equals its ``low`` sees none.

    Returns:
        [N, heads, D] in the dtype of ``qkv``, zeros where a patch sees none.
    """
    args = (qkv, angles, low.astype(jnp.int32), high.astype(jnp.int32))
    return choose("frame_attention", IMPLEMENTATIONS, backend, *args).call(backend, *args)
