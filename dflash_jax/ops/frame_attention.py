"""Operation: attention of a vision tower's patches, each over those of its own frame.

    y_i = Σ_j softmax_j(q_i · k_j) v_j,    low_i ≤ j < high_i

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

# Queries and keys of a tile of scores on an accelerator. A frame has thousands of patches, which all see one another,
# and the tiles follow one another: small tiles would leave most of the device idle. 16 heads take 64 MiB of scores.
LARGE_TILE = 1024


def reference(backend: Backend, q: Array, k: Array, v: Array, low: Array, high: Array) -> Array:
    """`frame_attention` by XLA, in tiles."""
    tile = (QUERIES, KEYS) if backend.platform == "cpu" else (LARGE_TILE, LARGE_TILE)
    y, _ = interval_attention(q[None, :, :, None], k[None], v[None], low[None], high[None], tile)
    return y[0, :, :, 0]


def _supports_cpp(backend: Backend, q: Array, *args: Any) -> str | None:
    return cpp.why_not_frames(q) if backend.has_cpp else backend.no_cpp


def _cpp(backend: Backend, *args: Array) -> Array:
    return cpp.attend_frames(*args)


def _supports_triton(backend: Backend, q: Array, *args: Any) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import frames

    return frames.why_not(q)


def _triton(backend: Backend, *args: Array) -> Array:
    from dflash_jax.ops.kernels.triton import frames

    return frames.attend_frames(backend.triton_card, *args)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton", _supports_triton, _triton),
    Implementation("reference", supports_everything, reference),
)


def frame_attention(
    backend: Backend,
    q: Float[Array, "N heads D"],
    k: Float[Array, "N heads D"],
    v: Float[Array, "N heads D"],
    low: Int[Array, " N"],
    high: Int[Array, " N"],
) -> Float[Array, "N heads D"]:
    """Softmax attention in which patch i sees the patches low[i] ≤ j < high[i]. Without a gradient.

    Args:
        backend: Where it runs.
        q: Queries, already scaled, [N, heads, D].
        k: Keys, [N, heads, D].
        v: Values, [N, heads, D].
        low: int32 [N].
        high: int32 [N]; a patch whose ``high`` equals its ``low`` sees none.

    Returns:
        [N, heads, D] in q's dtype, zeros where a patch sees none.
    """
    args = (q, k, v, low.astype(jnp.int32), high.astype(jnp.int32))
    return choose("frame_attention", IMPLEMENTATIONS, backend, *args).call(backend, *args)
