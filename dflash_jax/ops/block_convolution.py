"""Operation: DFlash2's convolution before a sublayer, with the norm before it and the coefficients of the one after it.

    c = n · Pᵀ,    y_t = Σ_o (b_o + c_{t,o}) ⊙ n_{t−o},    n = norm(x); n is 0 before a block

A channel's own coefficient b_o is the same at all places; c, which each group of channels shares, is a projection of
the place's input. Sources: the DFlash2 drafters of z-lab and NeMo Automodel's training code, which agree.

Dimension letters: W places of a block, H channels, G groups.
"""

# jax's own annotations are partial: members such as jnp.pad have unknown parameter types.
# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything, with_gradient_of
from dflash_jax.ops.linear import DeferredNorm, linear
from dflash_jax.ops.weights import Weight


def convolve(
    x: Float[Array, "*B W H"], base: Float[Array, "taps H"], own: Float[Array, "*B W taps G"]
) -> Float[Array, "*B W H"]:
    """Σ_o (base_o + own_o) · x[place − o], with zeros before the block.

    Args:
        x: [..., W, H].
        base: Coefficients of all places, [taps, H].
        own: Coefficients of each place, one of each group of channels, [..., W, taps, G].

    Returns:
        [..., W, H] in x's dtype; sums are float32.
    """
    width, (taps, channels) = x.shape[-2], base.shape
    coefficients = base.astype(jnp.float32) + jnp.repeat(own, channels // own.shape[-1], axis=-1)
    padded = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 2) + [(taps - 1, 0), (0, 0)])
    shifted = [jax.lax.slice_in_dim(padded, taps - 1 - o, taps - 1 - o + width, axis=-2) for o in range(taps)]
    return jnp.stack([coefficients[..., o, :] * shifted[o] for o in range(taps)]).sum(0).astype(x.dtype)


def reference(
    backend: Backend, x: DeferredNorm, projection: Weight, base: Float[Array, "taps H"]
) -> tuple[Array, Array]:
    """The norm with the product, which `linear` may fuse, then the convolution by XLA."""
    own, normed = linear(backend, x, [projection], dtype=jnp.float32, return_normed=True)
    # Without a barrier XLA writes the norm in float32, and converts it and divides the coefficients in further kernels.
    own, normed = jax.lax.optimization_barrier((own, normed))
    return convolve(normed, base, own[..., 0, :, :]), own[..., 1, :, :]


def _supports_triton(backend: Backend, x: DeferredNorm, projection: Weight, base: Float[Array, "taps H"]) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import block_convolution as kernel

    return kernel.why_not(x.x, projection)


def _triton(backend: Backend, x: DeferredNorm, projection: Array, base: Float[Array, "taps H"]) -> tuple[Array, Array]:
    from dflash_jax.ops.kernels.triton import block_convolution as kernel

    def plain(x: Array, norm: Array, projection: Array, base: Array) -> tuple[Array, Array]:
        return reference(backend, DeferredNorm(x, norm, eps, offset), projection, base)

    def by_kernel(x: Array, norm: Array, projection: Array, base: Array) -> tuple[Array, Array]:
        return kernel.convolve_triton(backend.triton_card, x, norm, projection, base, eps, offset)

    eps, offset = x.eps, x.offset
    return with_gradient_of(plain, by_kernel)(x.x, x.weight, projection, base)


IMPLEMENTATIONS = (
    Implementation("triton", _supports_triton, _triton, is_tried=False),
    Implementation("reference", supports_everything, reference),
)


def block_convolution(
    backend: Backend, x: DeferredNorm, projection: Weight, base: Float[Array, "taps H"]
) -> tuple[Float[Array, "*B W H"], Float[Array, "*B W taps G"]]:
    """The convolved norm of a sublayer's input, and the coefficients of the convolution after the sublayer.

    Args:
        backend: Where it runs.
        x: The input [..., W, H] with its RMSNorm.
        projection: Projection to the coefficients of the places, before and after the sublayer, [2, taps, G, H].
        base: Coefficients of all places before the sublayer, [taps, H].

    Returns:
        [..., W, H], and float32 [..., W, taps, G], which `convolve` takes.
    """
    return choose("block_convolution", IMPLEMENTATIONS, backend, x, projection, base).call(backend, x, projection, base)
