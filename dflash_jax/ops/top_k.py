"""Operation: the k largest values of the last axis and their indices.

The largest come first, of equal ones the lowest index; NaNs may be anywhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything

# Values of a block whose maximum is taken first.
BLOCK = 64


def reference(backend: Backend, x: Float[Array, "*batch V"], *, k: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`."""
    return jax.lax.top_k(x, k)


def in_blocks(backend: Backend, x: Float[Array, "*batch V"], *, k: int) -> tuple[Array, Array]:
    """The k blocks with the largest maxima have the k largest values.

    On a GPU XLA gives each row one program's threads, and sorts all of it for k above 16; on a CPU it takes the values
    one at a time. The maxima are one pass of the whole device, and of vectors.
    """
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    # In the order of their indices, so that equal values of several blocks are, too.
    best = jnp.sort(jax.lax.top_k(blocks.max(-1), k)[1], axis=-1)
    values = jnp.take_along_axis(blocks, best[..., None], axis=-2)
    values, places = jax.lax.top_k(values.reshape(*x.shape[:-1], -1), k)
    return values, jnp.take_along_axis(best, places // BLOCK, axis=-1) * BLOCK + places % BLOCK


def _supports_blocks(backend: Backend, x: Array, *, k: int) -> str | None:
    if x.shape[-1] % BLOCK:
        return f"{x.shape[-1]} values are not blocks of {BLOCK}"
    return f"{x.shape[-1]} values have fewer than {k} blocks of {BLOCK}" if x.shape[-1] < k * BLOCK else None


IMPLEMENTATIONS = (
    Implementation("blocks", _supports_blocks, in_blocks),
    Implementation("reference", supports_everything, reference),
)


def top_k(
    backend: Backend, x: Float[Array, "*batch V"], *, k: int
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """The k largest values.

    Args:
        backend: Where it runs.
        x: [..., V].
        k: At most V.

    Returns:
        Values [..., k], the largest first, and their indices, int32 [..., k].
    """
    return choose("top_k", IMPLEMENTATIONS, backend, x, k=k).call(backend, x, k=k)
