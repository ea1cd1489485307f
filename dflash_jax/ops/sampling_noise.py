"""Operation: Gumbel noise of draws, a function of seed, position and token alone.

The noise is -log(-log(u)) of a uniform u. Its 32 bits are the first word of Threefry-2x32 with 20 rounds (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) under the key (seed, position) at the counter (token, 0).
"""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from dflash_jax.ops.backend import Backend, Implementation, everything, take
from dflash_jax.ops.kernels.cpu import calls as cpp


def threefry_elementwise(key_hi, key_lo, hi, lo):
    """The first word of Threefry-2x32 as elementwise code: JAX's own is a loop over whole arrays on a CPU, and takes
    six times as long."""
    keys = (key_hi, key_lo, key_hi ^ key_lo ^ jnp.uint32(0x1BD11BDA))
    hi, lo = hi + keys[0], lo + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            hi = hi + lo
            lo = hi ^ ((lo << jnp.uint32(rotation)) | (lo >> jnp.uint32(32 - rotation)))
        hi, lo = hi + keys[(group + 1) % 3], lo + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return hi


def _noise(threefry, seed, positions, ids):
    shape = (*positions.shape, len(ids))
    key_hi = jnp.broadcast_to(seed[:, None, None], shape)
    key_lo = jnp.broadcast_to(positions[..., None].astype(jnp.uint32), shape)
    words = (key_hi, key_lo, jnp.broadcast_to(ids.astype(jnp.uint32), shape), jnp.zeros(shape, jnp.uint32))
    # u in (0, 1); the exponential -log1p(-u) keeps its precision where it matters, near 0.
    u = jnp.minimum((threefry(*words).astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-u))


def reference(backend: Backend, seed, positions, ids):
    """By JAX's Threefry."""
    return _noise(lambda *words: threefry2x32_p.bind(*words)[0], seed, positions, ids)


def elementwise(backend: Backend, seed, positions, ids):
    """By `threefry_elementwise`: the same bits."""
    return _noise(threefry_elementwise, seed, positions, ids)


def _only_on_cpu(backend: Backend, *args) -> str | None:
    return None if backend.platform == "cpu" else f"the platform is {backend.platform}"


IMPLEMENTATIONS = (
    Implementation("cpp", lambda backend, *args: backend.no_cpp or None, lambda backend, *args: cpp.noise(*args)),
    Implementation("elementwise", _only_on_cpu, elementwise),
    Implementation("reference", everything, reference),
)


def gumbel_noise(backend: Backend, seed, positions, ids) -> jax.Array:
    """Standard Gumbel noise.

    Args:
        backend: Where it runs. The C++ implementation differs from the reference in the last places.
        seed: uint32 [B].
        positions: Absolute positions, int [B, T].
        ids: Token ids, int [V].

    Returns:
        float32 [B, T, V].
    """
    return take("sampling_noise", IMPLEMENTATIONS, backend, seed, positions, ids).call(backend, seed, positions, ids)
