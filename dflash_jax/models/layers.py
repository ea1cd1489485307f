"""The layers that all models share: linear maps, RMSNorm, attention, SwiGLU.

Dimension letters: B sequences, T tokens of this call, S cached positions, H hidden size, N heads, K KV heads, D head
size, F features of a feed-forward part. Weights are stored ``[out, in]`` with separate axes for heads, so that they are
divided over devices without permutation.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.config import AttentionSpec
from dflash_jax.models.rope import CosSin
from dflash_jax.ops.attention import attention, through_gate
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import FP8, Bounds, KVCache, rounded
from dflash_jax.ops.interval_attention import interval_attention
from dflash_jax.ops.linear import DeferredDivision, DeferredNorm, linear, rms_norm
from dflash_jax.ops.rotation import rotate
from dflash_jax.ops.weights import Weight
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, UNSHARDED, AxisSharding, Layout, spec

Module = TypeVar("Module", bound=nnx.Module)


def parameter(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: DTypeLike, draw: Callable[[Array], Array]
) -> nnx.Param:
    """A parameter.

    Args:
        rngs: Source of the key; None gives a shape in place of an array, for modules that a loader fills or a plan
            counts.
        shape: Its shape.
        dtype: Its dtype.
        draw: ``draw(key)`` returns the array.

    Returns:
        The parameter.
    """
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype))
    return nnx.Param(draw(rngs.params()).astype(dtype))


def look_up(table: Weight, tokens: Int[Array, "B T"], vocab: AxisSharding) -> Any:
    """Rows of a table, such as embeddings, of tokens.

    Args:
        table: This device's rows of the table, [V, H].
        tokens: Token ids, int [B, T].
        vocab: How the table is divided.

    Returns:
        [B, T, H]: an array; or, of a table in few bits, a `QuantizedWeight`.
    """
    local, is_local = vocab.local(tokens, table.shape[0])

    def of_all(rows: Array) -> Array:
        # Bytes in place of float8, whose sums not all platforms have: those of the other devices are zeros.
        added = rows.view(jnp.uint8) if rows.dtype.itemsize == 1 else rows
        return vocab.sum(jnp.where(is_local[..., None], added, 0)).view(rows.dtype)

    return jax.tree.map(of_all, table[jnp.where(is_local, local, 0)])


def normal(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: DTypeLike, scale: float = 0.02) -> nnx.Param:
    """A parameter of normal random numbers with standard deviation ``scale``. Arguments as in `parameter`."""
    return parameter(rngs, shape, dtype, lambda key: scale * jax.random.normal(key, shape, dtype))


def constant(rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: DTypeLike, value: float) -> nnx.Param:
    """A parameter with ``value`` everywhere. Arguments as in `parameter`."""
    return parameter(rngs, shape, dtype, lambda key: jnp.full(shape, value, dtype))


def with_backend(module: Module, backend: Backend) -> Module:
    """A copy of ``module``, over the same arrays, whose operations run on ``backend``."""
    copy = jax.tree.map(lambda x: x, module)
    for _, part in nnx.iter_modules(copy):
        if hasattr(part, "backend"):
            setattr(part, "backend", backend)  # noqa: B010
    return copy


class RMSNorm(nnx.Module):
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x²) + eps) · (weight + offset).

    Attributes:
        weight: The stored weight.
        eps: Epsilon.
        offset: Added to the stored weight.
    """

    def __init__(self, size: int, eps: float, offset: float, rngs: nnx.Rngs | None, dtype: DTypeLike):
        self.weight = constant(rngs, (size,), dtype, 1.0 - offset)
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
        """Normalises x [..., H]."""
        return rms_norm(x, self.weight[...], self.eps, self.offset)

    def deferred(self, x: Float[Array, "*B H"]) -> DeferredNorm:
        """Defers the norm of x, so that the projection kernel can fuse it."""
        return DeferredNorm(x, self.weight[...], self.eps, self.offset)


class Attention(nnx.Module):
    """Attention of new tokens over a cache and over one another. The caller stores keys and values.

    Attributes:
        spec: Its configuration.
        backend: Where operations run.
        heads: How the query heads are divided over devices.
        kv_heads: How the KV heads are divided.
        positions: How the positions of a cache's pages are divided.
        q: Query projection, and gate projection of a gated layer, [N, 1 or 2, D, H].
        k: Key projection, [K, D, H].
        v: Value projection, [K, D, H].
        q_bias: Its bias, [N, 1 or 2, D]; the biases are absent without ``qkv_bias``.
        k_bias: [K, D].
        v_bias: [K, D].
        o: Output projection, [H, N, D].
        q_norm: Norm of queries; absent without ``qk_norm``.
        k_norm: Norm of keys; absent without ``qk_norm``.
        k_scale: What keys in FP8 are multiplied by, float32 [K]; absent where caches have the model's dtype
            (`kv_scales` adds it).
        v_scale: The same of values.
    """

    k_scale: nnx.Param
    v_scale: nnx.Param

    def __init__(
        self,
        spec: AttentionSpec,
        hidden: int,
        eps: float,
        norm_offset: float,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout,
        backend: Backend,
    ):
        self.spec, self.backend = spec, backend
        n, k, d = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.heads, self.kv_heads, self.positions = layout.heads(n, k), layout.wide(k), layout.positions(n, k)
        self.q = normal(rngs, (n, 2 if spec.gated else 1, d, hidden), dtype)
        self.k = normal(rngs, (k, d, hidden), dtype)
        self.v = normal(rngs, (k, d, hidden), dtype)
        self.o = normal(rngs, (hidden, n, d), dtype)
        if spec.qkv_bias:
            self.q_bias = constant(rngs, (n, 2 if spec.gated else 1, d), dtype, 0.0)
            self.k_bias = constant(rngs, (k, d), dtype, 0.0)
            self.v_bias = constant(rngs, (k, d), dtype, 0.0)
        if spec.qk_norm:
            self.q_norm = RMSNorm(d, eps, norm_offset, rngs, dtype)
            self.k_norm = RMSNorm(d, eps, norm_offset, rngs, dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        cuts = {"q": (self.heads,), "k": (self.kv_heads,), "v": (self.kv_heads,)}
        more = {f"{name}_{what}": cut for name, cut in cuts.items() for what in ("bias", "scale")}
        return {**cuts, **more, "o": (None, self.heads)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"q": 1, "k": 1, "v": 1, "o": 2}

    def cache_specs(self, cache: KVCache) -> KVCache:
        """PartitionSpecs in the shape of ``cache``."""
        pages = spec(DATA, self.kv_heads, self.positions)
        return replace(cache, k=pages, v=pages, table=spec(DATA))

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are rounded to FP8."""
        return hasattr(self, "k_scale")

    def kv_dtype(self, dtype: DTypeLike) -> DTypeLike:
        """The dtype of cached keys and values, of a model of ``dtype``."""
        return FP8 if self.has_fp8_cache else dtype

    def projected(self, x: Float[Array, "B T H"] | DeferredNorm, names: str) -> tuple[Array, ...]:
        """The projections ``names`` (of "qkv") of x, with their biases."""
        biases = [getattr(self, f"{name}_bias")[...] for name in names] if self.spec.qkv_bias else None
        return linear(self.backend, x, [getattr(self, name)[...] for name in names], biases=biases)

    def keys_values(
        self, x: Float[Array, "B T H"] | DeferredNorm, angles: CosSin
    ) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Keys and values alone.

        Args:
            x: [B, T, H], an array or `DeferredNorm`.
            angles: Rotary angles of the tokens.

        Returns:
            Keys (normed and rotated) and values, [B, T, K, D] each.
        """
        k, v = self.projected(x, "kv")
        return self.rotate(None, k, angles)[1], v

    def rotate(
        self, q: Float[Array, "B T N parts D"] | None, k: Float[Array, "B T K D"], angles: CosSin
    ) -> tuple[Float[Array, "B T N D"] | None, Float[Array, "B T K D"]]:
        """`ops.rotation.rotate` with this layer's norms."""
        if not self.spec.qk_norm:
            return rotate(self.backend, q, k, angles, (None, None))
        norms = (self.q_norm.weight[...], self.k_norm.weight[...])
        return rotate(self.backend, q, k, angles, norms, self.k_norm.eps, self.k_norm.offset)

    def inputs(
        self, x: Float[Array, "B T H"] | DeferredNorm, angles: CosSin
    ) -> tuple[
        Float[Array, "B T N D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T N 2 D"] | None
    ]:
        """Queries, keys, values and gates.

        Args:
            x: [B, T, H], an array or `DeferredNorm`.
            angles: Rotary angles of the tokens.

        Returns:
            Queries [B, T, N, D] and keys [B, T, K, D], normed and rotated; values [B, T, K, D]; and queries with gates
            [B, T, N, 2, D] for `ops.attention.through_gate`, or None without gates.
        """
        queries, k, v = self.projected(x, "qkv")
        q, k = self.rotate(queries, k, angles)
        assert q is not None
        return q, k, v, queries if self.spec.gated else None

    def as_cached(
        self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"]
    ) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Keys and values as caches have them, in which form every query reads them, those of their own pass too."""
        if not self.has_fp8_cache:
            return k, v
        return rounded(k, self.k_scale[...]), rounded(v, self.v_scale[...])

    def attend(
        self,
        q: Float[Array, "B T N D"],
        k: Float[Array, "B T K D"],
        v: Float[Array, "B T K D"],
        mask: Bool[Array, "*B T T"] | None,
        cache: KVCache | None,
        length: Int[Array, " B"],
        bounds: Bounds | None = None,
        gates: Float[Array, "B T N 2 D"] | None = None,
    ) -> Float[Array, "B T N D"]:
        """`ops.attention.attention` of keys and values as `as_cached` gives them."""
        y = attention(self.backend, self._scaled(q, "k_scale"), k, v, mask, cache, length, bounds, gates)
        return self._scaled(y, "v_scale")

    def _scaled(self, x: Float[Array, "B T N D"], name: str) -> Float[Array, "B T N D"]:
        """Queries or attended values times the scale of their KV head, where there is one.

        All keys of a head have the same scale, which so may multiply the query; all values likewise.
        """
        if not self.has_fp8_cache:
            return x
        scale = getattr(self, name)[...]
        return (x * jnp.repeat(scale, x.shape[2] // len(scale))[:, None]).astype(x.dtype)

    def output(
        self, y: Float[Array, "B T N D"], residual: Float[Array, "B T H"] | None = None
    ) -> Float[Array, "B T H"]:
        """Attended values [B, T, N, D] → [B, T, H], plus ``residual`` [B, T, H] if given."""
        return output(self.backend, y, self.o[...], 2, self.heads, residual)

    def forward_full(
        self, x: Float[Array, "B T H"], starts: Int[Array, "B T"], angles: CosSin
    ) -> Float[Array, "B T H"]:
        """One pass over whole documents, without a cache.

        Args:
            x: [B, T, H].
            starts: First token of each token's document, int [B, T].
            angles: Rotary angles of the tokens.

        Returns:
            [B, T, H].
        """
        q, k, v, gates = self.inputs(x, angles)
        k, v = (each.astype(q.dtype) for each in self.as_cached(k, v))
        b, t, n, d = q.shape
        ends = jnp.broadcast_to(jnp.arange(1, t + 1), (b, t))
        q = self._scaled(q, "k_scale").reshape(b, t, k.shape[2], -1, d) * d**-0.5
        y, _ = interval_attention(q, k, v, starts, ends)
        return self.output(through_gate(self._scaled(y.reshape(b, t, n, d), "v_scale"), gates))

    def __call__(
        self,
        x: Float[Array, "B T H"] | DeferredNorm,
        angles: CosSin,
        mask: Bool[Array, "*B T T"] | None,
        cache: KVCache | None,
        length: Int[Array, " B"],
        bounds: Bounds | None = None,
        residual: Float[Array, "B T H"] | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """One pass of new tokens over a cache, which is only read.

        Args:
            x: [B, T, H], an array or `DeferredNorm`.
            angles: Rotary angles of the tokens.
            mask: Which new tokens see one another, as in `ops.attention.attention`.
            cache: Keys and values of the context.
            length: Cached tokens, int [B].
            bounds: The part of the context that is seen, as in `ops.attention.attention`.
            residual: [B, T, H], added; None adds nothing.

        Returns:
            [B, T, H], and the keys and values of the new tokens as `as_cached` gives them, [B, T, K, D] each.
        """
        q, k, v, gates = self.inputs(x, angles)
        k, v = self.as_cached(k, v)
        return self.output(self.attend(q, k, v, mask, cache, length, bounds, gates), residual), k, v


def output(
    backend: Backend,
    y: Array | DeferredDivision,
    weight: Weight,
    contracted: int,
    sharding: AxisSharding,
    residual: Float[Array, "*B H"] | None,
) -> Float[Array, "*B H"]:
    """The output projection of a mixer or feed-forward part.

    Args:
        backend: Where operations run.
        y: [..., *inputs], an array or `ops.linear.DeferredDivision`.
        weight: [H, *inputs].
        contracted: Number of input axes.
        sharding: How the inputs are divided over devices; their parts are summed.
        residual: [..., H], added once, after the sum; None adds nothing.

    Returns:
        [..., H].
    """
    if not sharding.axes:
        return linear(backend, y, (weight,), contracted, residual=residual)[0]
    y = sharding.sum(linear(backend, y, (weight,), contracted, axes=sharding.axes)[0])
    return y if residual is None else residual + y


def swiglu(
    backend: Backend,
    x: Float[Array, "*B H"] | DeferredNorm,
    gate_up: Weight,
    down: Weight,
    sharding: AxisSharding = UNSHARDED,
    residual: Float[Array, "*B H"] | None = None,
) -> Float[Array, "*B H"]:
    """SwiGLU (arXiv 2002.05202): down · (silu(gate · x) · (up · x)).

    Args:
        backend: Where operations run.
        x: [..., H], an array or `DeferredNorm`.
        gate_up: Gate and up projection, [2, F, H].
        down: Down projection, [H, F].
        sharding: How F is divided over devices.
        residual: [..., H], added; None adds nothing.

    Returns:
        [..., H].
    """
    return output(backend, linear(backend, x, (gate_up,), swiglu=True)[0], down, 1, sharding, residual)


class Mlp(nnx.Module):
    """SwiGLU feed-forward part.

    Attributes:
        backend: Where operations run.
        gate_up: Gate and up projection, [2, F, H].
        down: Down projection, [H, F].
        features: How F is divided over devices.
    """

    def __init__(
        self,
        intermediate: int,
        hidden: int,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.backend = backend
        self.gate_up = normal(rngs, (2, intermediate, hidden), dtype)
        self.down = normal(rngs, (hidden, intermediate), dtype)
        self.features = layout.wide(intermediate)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        return {"gate_up": (None, self.features), "down": (None, self.features)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"gate_up": 1, "down": 1}

    def __call__(
        self, x: Float[Array, "*B H"] | DeferredNorm, residual: Float[Array, "*B H"] | None = None
    ) -> Float[Array, "*B H"]:
        """Maps x [..., H], an array or `DeferredNorm`, to [..., H], and adds ``residual`` [..., H] if given."""
        return swiglu(self.backend, x, self.gate_up[...], self.down[...], self.features, residual)
