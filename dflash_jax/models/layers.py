"""The pieces that every model here is made of: linear maps, RMSNorm, attention, SwiGLU.

Dimension letters: B rows, T tokens of this call, S cached positions, H hidden, N heads, K KV heads, D head_dim, F FFN.
Weights are stored ``[out, in]`` with head axes of their own, so that they shard without permutation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.cache import KVCache, attend, through_gate
from dflash_jax.models.config import AttentionSpec
from dflash_jax.models.rope import apply_rope
from dflash_jax.ops import backend
from dflash_jax.ops.interval_attention import interval_attention
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.weights import PackedWeight, is_packed
from dflash_jax.parallel.sharding import ONE_DEVICE, WHOLE, AxisSharding, Layout


def parameter(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, draw: Callable) -> nnx.Param:
    """``draw(key) → array``; without ``rngs`` only the shape, for modules that a loader fills or a plan counts."""
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(draw(rngs.params()).astype(dtype))


def normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, scale: float = 0.02) -> nnx.Param:
    return parameter(rngs, shape, dtype, lambda key: scale * jax.random.normal(key, shape, dtype))


def constant(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype, value: float) -> nnx.Param:
    return parameter(rngs, shape, dtype, lambda key: jnp.full(shape, value, dtype))


def _dot(x, y, axes: tuple[int, int], kind):
    """Of bfloat16 matrices, over these axes of theirs, summed in float32 → ``kind``."""

    def dot(x, y, kind):
        return jax.lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=kind)

    # XLA's CPU multiplies in bfloat16, several times as fast, where float32 comes out, and in float32 otherwise.
    return jax.lax.platform_dependent(
        x, y, cpu=lambda x, y: dot(x, y, jnp.float32).astype(kind), default=lambda x, y: dot(x, y, kind)
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x, matrix, kind):
    return _dot(x, matrix, (1, 1), kind)


def _product_backward(kind, kept, given):
    x, matrix = kept
    given = given.astype(x.dtype)
    return _dot(given, matrix, (1, 0), x.dtype), _dot(given, x, (0, 0), matrix.dtype)


_product.defvjp(lambda x, matrix, kind: (_product(x, matrix, kind), (x, matrix)), _product_backward)


def product(x, matrix, kind=None):
    """x [T, I] times the transpose of an array [O, I] → [T, O] in ``kind`` (default: the wider of their dtypes).

    Where both are bfloat16 their gradients are products in it too, whatever ``kind`` is: a float32 gradient is rounded
    first, as PyTorch's autocast does. Forward-mode derivatives are for other dtypes.
    """
    if x.dtype == matrix.dtype == jnp.bfloat16:
        return _product(x, matrix, jnp.dtype(kind or x.dtype))
    return jnp.einsum("ti,oi->to", x, matrix, preferred_element_type=kind)


def project(x, weight, contracted: int = 1, kind=None):
    """Linear map: x [..., *in], weight [*out, *in] (an array or a form of `models.weights`), ``contracted`` axes in
    *in, → [..., *out] in ``kind`` (default: x's dtype).

    The weight is flattened to a matrix first, which is free. A product over several weight axes would make XLA
    transpose, and so copy, the whole weight at every call.
    """
    out, inner = weight.shape[: weight.ndim - contracted], weight.shape[weight.ndim - contracted :]
    matrix, x2 = weight.reshape(math.prod(out), math.prod(inner)), x.reshape(-1, math.prod(inner))
    y = matrix.matmul(x2).astype(kind or x.dtype) if is_packed(matrix) else product(x2, matrix, kind)
    return y.reshape(*x.shape[: x.ndim - contracted], *out)


def rms_norm(x, weight, eps: float, offset: float = 0.0):
    """``(offset + weight) * x / sqrt(mean(x²) + eps)`` in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (offset + weight.astype(jnp.float32))).astype(x.dtype)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, offset: float, rngs: nnx.Rngs | None, dtype):
        self.weight = constant(rngs, (size,), dtype, 1.0 - offset)
        self.eps, self.offset = eps, offset

    def __call__(self, x):
        return rms_norm(x, self.weight[...], self.eps, self.offset)

    def deferred(self, x) -> "DeferredNorm":
        """x, to be normed by what projects it."""
        return DeferredNorm(x, self.weight[...], self.eps, self.offset)


@dataclass(frozen=True)
class DeferredNorm:
    """What `rms_norm` takes, before `linear`: one kernel may do both."""

    x: jax.Array
    weight: jax.Array
    eps: float
    offset: float

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


def linear(x, weights, contracted: int = 1, *, kind=None, kept: bool = False, gated: bool = False, residual=None):
    """`project` of one x [..., *in], an array or `DeferredNorm`, by each of ``weights`` [*out, *in]: a tuple.

    ``kept``: the normed x follows. ``gated``: weights are [2, F, H], and what the first half gives gates, through a
    silu, what the second gives. ``residual`` [..., *out] is added to each.
    """
    normed = isinstance(x, DeferredNorm)
    x, norm, eps, offset = (x.x, x.weight, x.eps, x.offset) if normed else (x, None, 0.0, 0.0)

    def plain(x, norm, weights, residual):
        x = x if norm is None else rms_norm(x, norm, eps, offset)
        made = [project(x, w, contracted, kind) for w in weights]
        if gated:
            made = [jax.nn.silu(y[..., 0, :]) * y[..., 1, :] for y in made]
        if residual is not None:
            made = [residual + y for y in made]
        return (*made, x) if kept else tuple(made)

    rows, inner = math.prod(x.shape[: x.ndim - contracted]), math.prod(x.shape[x.ndim - contracted :])
    shapes = [w.shape[gated : w.ndim - contracted] for w in weights]

    def shaped(made, normed):
        out = [y.reshape(*x.shape[: x.ndim - contracted], *s) for y, s in zip(made, shapes, strict=False)]
        return (*out, normed.reshape(x.shape)) if kept else tuple(out)

    if all(isinstance(w, PackedWeight) for w in weights) and not (gated and not cpu.gates(weights[0])):
        matrices = [w.reshape(-1, inner) for w in weights]
        rest = None if residual is None else residual.reshape(rows, -1)
        made = cpu.linear(x.reshape(rows, inner), matrices, norm, eps, offset, kept=kept, gated=gated, residual=rest)
        return shaped(made, made[-1])
    if backend.are_wanted():
        from dflash_jax.ops.kernels.triton import linear as triton_project

        def kernel(x, norm, weights, residual):
            if norm is not None and not triton_project.norms(x.dtype, rows, inner, weights):
                x, norm = rms_norm(x, norm, eps, offset), None
            rest = None if residual is None else residual.reshape(rows, -1)
            made = triton_project.project_triton(
                x.reshape(rows, inner), [w.reshape(-1, inner) for w in weights], norm, eps, offset,
                kept=kept and norm is not None, gated=gated, rest=rest, kind=kind,
            )  # fmt: skip
            return shaped(made, made[-1] if norm is not None else x)

        if triton_project.fits(rows, inner, weights):
            return backend.instead_of(plain, kernel, x, norm, weights, residual)
    return plain(x, norm, weights, residual)


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
    ):
        self.spec = spec
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
        return cache.specs(self.kv_heads)

    def keys_values(self, x, angles):
        """k (normed, rotated) and v, [B, T, K, D], of x [B, T, H]."""
        k, v = linear(x, (self.k[...], self.v[...]))
        return self.rotated(None, k, angles)[1], v

    def rotated(self, q, k, angles):
        """q [B, T, N, 1 or 2, D], of which the first counts, or None, and k [B, T, K, D] → both [B, T, heads, D],
        normed and rotated."""
        norms = (self.q_norm, self.k_norm) if self.spec.qk_norm else (None, None)

        def plain(q, k, angles, weights):
            def turned(x, norm, weight):
                return apply_rope(x if norm is None else rms_norm(x, weight, norm.eps, norm.offset), angles)

            q = None if q is None else turned(q[..., 0, :], norms[0], weights[0])
            return q, turned(k, norms[1], weights[1])

        args = (q, k, angles, [None if norm is None else norm.weight[...] for norm in norms])
        if backend.are_wanted():
            from dflash_jax.ops.kernels.triton import attention as triton_attention

            def kernel(*args):
                more = {} if norms[0] is None else {"eps": norms[0].eps, "offset": norms[0].offset}
                return triton_attention.rotate_triton(*args, **more)

            if triton_attention.rotates(k):
                return backend.instead_of(plain, kernel, *args)
        return plain(*args)

    def inputs(self, x, angles):
        """q, k (normed, rotated) and v, [B, T, heads, D], of x [B, T, H], an array or `DeferredNorm`; and what
        `cache.through_gate` takes, [B, T, N, 2, D], or None."""
        both, k, v = linear(x, (self.q[...], self.k[...], self.v[...]))
        q, k = self.rotated(both, k, angles)
        return q, k, v, both if self.spec.gated else None

    def output(self, y, residual=None):
        """Attended values [B, T, N, D] → [B, T, H], with ``residual`` [B, T, H] if given."""
        return output(y, self.o[...], 2, self.heads, residual)

    def forward_full(self, x, starts, angles):
        """x [B, T, H] → y [B, T, H] over whole documents, each from its first token ``starts`` int [B, T] on."""
        q, k, v, both = self.inputs(x, angles)
        b, t, n, d = q.shape
        upto = jnp.broadcast_to(jnp.arange(1, t + 1), (b, t))
        q = q.reshape(b, t, k.shape[2], -1, d) * d**-0.5
        return self.output(through_gate(interval_attention(q, k, v, starts, upto)[0].reshape(b, t, n, d), both))

    def __call__(self, x, angles, own_mask, cache: KVCache | None, length, bounds=None, residual=None):
        """x [B, T, H] or `DeferredNorm` → (y [B, T, H], with ``residual`` if given, k, v). Masks and ``bounds`` as in
        `cache.attend`."""
        q, k, v, both = self.inputs(x, angles)
        return self.output(attend(q, k, v, own_mask, cache, length, bounds, both), residual), k, v


def output(y, weight, contracted: int, cut: AxisSharding, residual):
    """The last map of a part of a layer, summed over the devices that have its inputs; ``residual`` is added once."""
    if not cut.axes:
        return linear(y, (weight,), contracted, residual=residual)[0]
    y = cut.sum(linear(y, (weight,), contracted)[0])
    return y if residual is None else residual + y


def swiglu(x, gate_up, down, cut: AxisSharding = WHOLE, residual=None):
    """x [..., H] or `DeferredNorm` → down · (silu(gate · x) · (up · x)), [..., H]; gate_up [2, F, H], down
    [H, F]. ``cut`` and ``residual`` as in `output`."""
    return output(linear(x, (gate_up,), gated=True)[0], down, 1, cut, residual)


class Mlp(nnx.Module):
    def __init__(self, intermediate: int, hidden: int, rngs: nnx.Rngs | None, dtype, layout: Layout = ONE_DEVICE):
        self.gate_up = normal(rngs, (2, intermediate, hidden), dtype)
        self.down = normal(rngs, (hidden, intermediate), dtype)
        self.features = layout.wide(intermediate)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"gate_up": (None, self.features), "down": (None, self.features)}

    def matrices(self) -> dict[str, int]:
        return {"gate_up": 1, "down": 1}

    def __call__(self, x, residual=None):
        """x [..., H] or `DeferredNorm` → [..., H], with ``residual`` [..., H] if given."""
        return swiglu(x, self.gate_up[...], self.down[...], self.features, residual)
