"""The pieces that every model here is made of: linear maps, RMSNorm, attention, SwiGLU.

Dimension letters: B rows, T tokens of this call, S cached positions, H hidden, N heads, K KV heads, D head_dim, F FFN.
Weights are stored ``[out, in]`` with head axes of their own, so that they shard without permutation.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.config import AttentionSpec
from dflash_jax.ops.attention import attention, rotate, through_gate
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import KVCache
from dflash_jax.ops.interval_attention import interval_attention
from dflash_jax.ops.linear import DeferredNorm, linear, rms_norm
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, WHOLE, AxisSharding, Layout, spec


def parameter(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, draw: Callable) -> nnx.Param:
    """``draw(key) → array``; without ``rngs`` only the shape, for modules that a loader fills or a plan counts."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(draw(rngs.params()).astype(dtype))


def normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, scale: float = 0.02) -> nnx.Param:
    return parameter(rngs, shape, dtype, lambda key: scale * jax.random.normal(key, shape, dtype))


def constant(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, value: float) -> nnx.Param:
    return parameter(rngs, shape, dtype, lambda key: jnp.full(shape, value, dtype))


M = TypeVar("M", bound=nnx.Module)


def with_backend(module: M, backend: Backend) -> M:
    """A copy of ``module``, over the same arrays, whose operations run on another backend."""
    copy = jax.tree.map(lambda x: x, module)
    for _, part in nnx.iter_modules(copy):
        if hasattr(part, "backend"):
            part.backend = backend
    return copy


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, offset: float, rngs: nnx.Rngs | None, dtype):
        self.weight = constant(rngs, (size,), dtype, 1.0 - offset)
        self.eps, self.offset = eps, offset

    def __call__(self, x):
        return rms_norm(x, self.weight[...], self.eps, self.offset)

    def deferred(self, x) -> "DeferredNorm":
        """x, to be normed by what projects it."""
        return DeferredNorm(x, self.weight[...], self.eps, self.offset)


class Attention(nnx.Module):
    """Attention of T new tokens over a cache and over one another. Pure: the caller decides what is kept of k and v."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden: int,
        eps: float,
        norm_offset: float,
        rngs: nnx.Rngs | None,
        dtype,
        layout: Layout,
        backend: Backend,
    ):
        self.spec, self.backend = spec, backend
        n, k, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.heads, self.kv_heads = layout.heads(n, k), layout.wide(k)
        self.q = normal(rngs, (n, 2 if spec.gated else 1, d, hidden), dtype)
        self.k = normal(rngs, (k, d, hidden), dtype)
        self.v = normal(rngs, (k, d, hidden), dtype)
        self.o = normal(rngs, (hidden, n, d), dtype)
        if spec.qk_norm:
            self.q_norm = RMSNorm(d, eps, norm_offset, rngs, dtype)
            self.k_norm = RMSNorm(d, eps, norm_offset, rngs, dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"q": (self.heads,), "k": (self.kv_heads,), "v": (self.kv_heads,), "o": (None, self.heads)}

    def matrices(self) -> dict[str, int]:
        return {"q": 1, "k": 1, "v": 1, "o": 2}

    def cache_specs(self, cache: KVCache) -> KVCache:
        return replace(cache, k=spec(DATA, self.kv_heads), v=spec(DATA, self.kv_heads))

    def keys_values(self, x, angles):
        """k (normed, rotated) and v, [B, T, K, D], of x [B, T, H]."""
        k, v = linear(self.backend, x, (self.k[...], self.v[...]))
        return self.rotated(None, k, angles)[1], v

    def rotated(self, q, k, angles):
        """`ops.attention.rotate` with this layer's norms."""
        if not self.spec.qk_norm:
            return rotate(self.backend, q, k, angles, (None, None))
        norms = (self.q_norm.weight[...], self.k_norm.weight[...])
        return rotate(self.backend, q, k, angles, norms, self.k_norm.eps, self.k_norm.offset)

    def inputs(self, x, angles):
        """q, k (normed, rotated) and v, [B, T, heads, D], of x [B, T, H], an array or `DeferredNorm`; and what
        `ops.attention.through_gate` takes, [B, T, N, 2, D], or None."""
        both, k, v = linear(self.backend, x, (self.q[...], self.k[...], self.v[...]))
        q, k = self.rotated(both, k, angles)
        return q, k, v, both if self.spec.gated else None

    def output(self, y, residual=None):
        """Attended values [B, T, N, D] → [B, T, H], with ``residual`` [B, T, H] if given."""
        return output(self.backend, y, self.o[...], 2, self.heads, residual)

    def forward_full(self, x, starts, angles):
        """x [B, T, H] → y [B, T, H] over whole documents, each from its first token ``starts`` int [B, T] on."""
        q, k, v, both = self.inputs(x, angles)
        b, t, n, d = q.shape
        upto = jnp.broadcast_to(jnp.arange(1, t + 1), (b, t))
        q = q.reshape(b, t, k.shape[2], -1, d) * d**-0.5
        return self.output(through_gate(interval_attention(q, k, v, starts, upto)[0].reshape(b, t, n, d), both))

    def __call__(self, x, angles, own_mask, cache: KVCache | None, length, bounds=None, residual=None):
        """x [B, T, H] or `DeferredNorm` → (y [B, T, H], with ``residual`` if given, k, v). Masks and ``bounds`` as in
        `ops.attention.attention`."""
        q, k, v, both = self.inputs(x, angles)
        return self.output(attention(self.backend, q, k, v, own_mask, cache, length, bounds, both), residual), k, v


def output(backend: Backend, y, weight, contracted: int, cut: AxisSharding, residual):
    """The last map of a part of a layer, summed over the devices that have its inputs; ``residual`` is added once."""
    if not cut.axes:
        return linear(backend, y, (weight,), contracted, residual=residual)[0]
    y = cut.sum(linear(backend, y, (weight,), contracted)[0])
    return y if residual is None else residual + y


def swiglu(backend: Backend, x, gate_up, down, cut: AxisSharding = WHOLE, residual=None):
    """x [..., H] or `DeferredNorm` → down · (silu(gate · x) · (up · x)), [..., H]; gate_up [2, F, H], down
    [H, F]. ``cut`` and ``residual`` as in `output`."""
    return output(backend, linear(backend, x, (gate_up,), swiglu=True)[0], down, 1, cut, residual)


class Mlp(nnx.Module):
    def __init__(
        self,
        intermediate: int,
        hidden: int,
        rngs: nnx.Rngs | None,
        dtype,
        layout: Layout = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.backend = backend
        self.gate_up = normal(rngs, (2, intermediate, hidden), dtype)
        self.down = normal(rngs, (hidden, intermediate), dtype)
        self.features = layout.wide(intermediate)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"gate_up": (None, self.features), "down": (None, self.features)}

    def matrices(self) -> dict[str, int]:
        return {"gate_up": 1, "down": 1}

    def __call__(self, x, residual=None):
        """x [..., H] or `DeferredNorm` → [..., H], with ``residual`` [..., H] if given."""
        return swiglu(self.backend, x, self.gate_up[...], self.down[...], self.features, residual)
