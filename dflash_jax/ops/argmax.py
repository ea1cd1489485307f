"""Operation: arg-max over the last axis. Of equal values the lowest index, of NaNs the first."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything

# Values of a block whose maximum is taken first.
BLOCK = 64


def reference(backend: Backend, x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """`jnp.argmax`."""
    return jnp.argmax(x, axis=-1)


def in_blocks(backend: Backend, x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """The block of the largest value, then its index in the block.

    XLA's reduction of (value, index) pairs on a CPU computes fused operations one element at a time; a maximum is
    vectorised.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    # XLA's maximum on a CPU may ignore a NaN.
    largest = jnp.where(jnp.isnan(blocks).any(-1), jnp.nan, blocks.max(-1))
    best = jnp.argmax(largest, axis=-1)
    block = jnp.take_along_axis(blocks, best[..., None, None], axis=-2)[..., 0, :]
    return best * BLOCK + jnp.argmax(block, axis=-1)


def _supports_blocks(backend: Backend, x: Array) -> str | None:
    if backend.platform != "cpu":
        return f"the platform is {backend.platform}"
    return f"{x.shape[-1]} values are not blocks of {BLOCK}" if x.shape[-1] % BLOCK else None


IMPLEMENTATIONS = (
    Implementation("blocks", _supports_blocks, in_blocks),
    Implementation("reference", supports_everything, reference),
)


def argmax(backend: Backend, x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Index of the largest value.

    Args:
        backend: Where it runs.
        x: [..., V].

    Returns:
        int32 [...].
    """
    return choose("argmax", IMPLEMENTATIONS, backend, x).call(backend, x)
