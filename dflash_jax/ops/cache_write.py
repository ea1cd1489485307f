"""The operation `write`: keys and values of new tokens into the pages of a cache. Letters as in `ops.cache`."""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything
from dflash_jax.ops.cache import KVCache
from dflash_jax.ops.kernels.cpu import calls as cpp


def reference(
    backend: Backend,
    k_buffer: Float[Array, "pages K P D"],
    v_buffer: Float[Array, "pages K P D"],
    table: Int[Array, "rows n"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    rows: Int[Array, " B"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "pages K P D"], Float[Array, "pages K P D"]]:
    """The writes of `write` by XLA: k and v at ``positions`` of ``rows``; out-of-range indices are dropped."""
    pages, size = k_buffer.shape[0], k_buffer.shape[2]
    # A negative index would count from the end.
    index = jnp.where(positions < 0, table.shape[1], positions // size)
    page = table.at[rows[:, None], index].get(mode="fill", fill_value=pages)

    def placed(buffer: Array, new: Array) -> Array:
        return buffer.at[page, :, positions % size].set(new.astype(buffer.dtype), mode="drop")

    return placed(k_buffer, k), placed(v_buffer, v)


def _supports_cpp(
    backend: Backend, k_buffer: Array, v_buffer: Array, table: Array, k: Array, *args: Array
) -> str | None:
    if not backend.has_cpp:
        return backend.no_cpp
    if k.dtype != k_buffer.dtype:
        return f"{jnp.dtype(k.dtype).name} into {jnp.dtype(k_buffer.dtype).name}: the kernel converts nothing"
    return None


def _cpp(backend: Backend, *args: Array) -> tuple[Array, Array]:
    k_buffer, v_buffer = cpp.write(*args)
    return k_buffer, v_buffer


def _supports_triton(
    backend: Backend, k_buffer: Array, v_buffer: Array, table: Array, k: Array, *args: Array
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    return triton_attention.why_not_written(backend.triton_card, k)


def _triton(backend: Backend, *args: Array) -> tuple[Array, Array]:
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    k_buffer, v_buffer = triton_attention.write_triton(backend.triton_card, *args)
    return k_buffer, v_buffer


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton", _supports_triton, _triton),
    Implementation("reference", supports_everything, reference),
)


def write(
    backend: Backend,
    cache: KVCache,
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
    keep: Bool[Array, "B T"],
) -> KVCache:
    """Writes keys and values into a cache. The buffers are written in place where they are donated.

    Args:
        backend: Where it runs.
        cache: The cache. What falls on no page is dropped.
        k: Keys, [B, T, K, D].
        v: Values, [B, T, K, D].
        positions: int [B, T].
        keep: bool [B, T]; other tokens leave no trace.

    Returns:
        The cache after the writes.
    """
    places = jnp.where(keep, cache.places(positions), cache.capacity)
    args = (cache.k, cache.v, cache.table, k, v, cache.row_indices(), places)
    k_buffer, v_buffer = choose("write", IMPLEMENTATIONS, backend, *args).call(backend, *args)
    return replace(cache, k=k_buffer, v=v_buffer)
