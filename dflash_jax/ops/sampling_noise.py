"""Operation: Gumbel noise of draws, a function of seed, position and token alone.

The noise is -log(-log(1 - u)) with u = (w + ½) · 2⁻³², rounded to float32 and at most 1 - 2⁻²⁴; w is the first word of
Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; reference
implementation: Random123, and JAX's ``jax.random``) under the key (seed, position) at the counter (token, 0).
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything
from dflash_jax.ops.kernels.cpu import calls as cpp


def threefry_elementwise(
    key_hi: UInt32[Array, "*n"], key_lo: UInt32[Array, "*n"], hi: UInt32[Array, "*n"], lo: UInt32[Array, "*n"]
) -> UInt32[Array, "*n"]:
    """The first word of Threefry-2x32 as elementwise code.

    JAX's primitive is a loop over whole arrays on a CPU, and takes six times as long.
    """
    keys = (key_hi, key_lo, key_hi ^ key_lo ^ jnp.uint32(0x1BD11BDA))
    hi, lo = hi + keys[0], lo + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            hi = hi + lo
            lo = hi ^ ((lo << jnp.uint32(rotation)) | (lo >> jnp.uint32(32 - rotation)))
        hi, lo = hi + keys[(group + 1) % 3], lo + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return hi


def _threefry(key_hi: Array, key_lo: Array, hi: Array, lo: Array) -> Array:
    """The first word of JAX's Threefry-2x32."""
    return threefry2x32_p.bind(key_hi, key_lo, hi, lo)[0]


def _noise(threefry: Callable[[Array, Array, Array, Array], Array], seed: Array, positions: Array, ids: Array) -> Array:
    shape = (*positions.shape, len(ids))
    key_hi = jnp.broadcast_to(seed[:, None, None], shape)
    key_lo = jnp.broadcast_to(positions[..., None].astype(jnp.uint32), shape)
    words = threefry(key_hi, key_lo, jnp.broadcast_to(ids.astype(jnp.uint32), shape), jnp.zeros(shape, jnp.uint32))
    # u in (0, 1); the exponential -log1p(-u) keeps its precision where it matters, near 0.
    u = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def reference(
    backend: Backend, seed: UInt32[Array, " B"], positions: Int[Array, "B T"], ids: Int[Array, " V"]
) -> Float[Array, "B T V"]:
    """`gumbel_noise` by JAX's Threefry."""
    return _noise(_threefry, seed, positions, ids)


def elementwise(
    backend: Backend, seed: UInt32[Array, " B"], positions: Int[Array, "B T"], ids: Int[Array, " V"]
) -> Float[Array, "B T V"]:
    """`gumbel_noise` by `threefry_elementwise`: the same bits."""
    return _noise(threefry_elementwise, seed, positions, ids)


def _supports_elementwise(backend: Backend, *args: Array) -> str | None:
    return None if backend.platform == "cpu" else f"the platform is {backend.platform}"


def _supports_cpp(backend: Backend, *args: Array) -> str | None:
    return backend.no_cpp


def _cpp(backend: Backend, seed: Array, positions: Array, ids: Array) -> Array:
    return cpp.noise(seed, positions, ids)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("elementwise", _supports_elementwise, elementwise),
    Implementation("reference", supports_everything, reference),
)


def gumbel_noise(
    backend: Backend, seed: UInt32[Array, " B"], positions: Int[Array, "B T"], ids: Int[Array, " V"]
) -> Float[Array, "B T V"]:
    """Standard Gumbel noise.

    Args:
        backend: Where it runs. The C++ implementation differs from the reference in the last places.
        seed: uint32 [B].
        positions: Absolute positions, int [B, T].
        ids: Token ids, int [V].

    Returns:
        float32 [B, T, V].
    """
    return choose("sampling_noise", IMPLEMENTATIONS, backend, seed, positions, ids).call(backend, seed, positions, ids)
