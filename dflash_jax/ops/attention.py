"""The operation `attention`, over a cached context and a block of new tokens.

    y_t = softmax(q_t · [k_context, k_block]ᵀ / √D) · [v_context, v_block],    optionally times sigmoid(gate_t)

Grouped queries (arXiv 2305.13245) and the output gate of Qwen3-Next; the reference implementation is transformers'
Qwen3NextAttention. Letters as in `ops.cache`, and N query heads.
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything
from dflash_jax.ops.cache import FP8, Bounds, KVCache
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.parallel.sharding import UNSHARDED

# On an accelerator an iteration of the loop over the context takes about 25 microseconds whatever it reads (H200), as
# long as reading 50 MB. So pieces are larger there: at least this many positions, and at most this many pieces.
WIDE_CHUNK, MAX_CHUNKS = 2048, 16
_MASKED = -1e30


def through_gate(y: Float[Array, "B T N D"], gate: Float[Array, "B T N 2 D"] | None) -> Float[Array, "B T N D"]:
    """The output gate of Qwen3-Next: y times the sigmoid of the second half of ``gate``; None: no gate."""
    return y if gate is None else y * jax.nn.sigmoid(gate[..., 1, :])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialSoftmax:
    """Attention over a part of the keys: what joins with that over other parts (arXiv 2205.14135).

    R are the query heads on each KV head. A part without a visible key has any ``total`` and ``values``, and joins with
    a part that has one as if it were not there.

    Attributes:
        largest: The largest score, float32 [B, K, R, T].
        total: Sum of exp(score - largest), float32 [B, K, R, T].
        values: The values, each times exp(score - largest), float32 [B, K, R, T, D].
    """

    largest: Float[Array, "*parts B K R T"]
    total: Float[Array, "*parts B K R T"]
    values: Float[Array, "*parts B K R T D"]

    @classmethod
    def empty(cls, q: Float[Array, "B T K R D"]) -> "PartialSoftmax":
        """Of queries that see no key."""
        b, t, heads, group, d = q.shape
        shape = (b, heads, group, t)
        zeros = jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, d), jnp.float32)
        return cls(jnp.full(shape, _MASKED, jnp.float32), *zeros)

    def fold(self, q: Array, k: Array, v: Array, mask: Array) -> "PartialSoftmax":
        """Adds keys and values [B, K, s, D] that queries [B, T, K, R, D] see under ``mask`` [B, T, s]."""
        if k.dtype == FP8:
            k, v = k.astype(q.dtype), v.astype(q.dtype)
        scores = jnp.einsum("btkrd,bksd->bkrts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        scores = jnp.where(mask[:, None, None], scores, _MASKED)
        largest = jnp.maximum(self.largest, scores.max(-1))
        weights = jnp.exp(scores - largest[..., None])
        scale = jnp.exp(self.largest - largest)
        mixed = jnp.einsum("bkrts,bksd->bkrtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = self.total * scale + weights.sum(-1)
        return PartialSoftmax(largest, total, self.values * scale[..., None] + mixed)

    def join(self, parts: "PartialSoftmax") -> "PartialSoftmax":
        """Adds parts, which are stacked along a first axis."""
        largest = jnp.maximum(self.largest, parts.largest.max(0))
        scale, scales = jnp.exp(self.largest - largest), jnp.exp(parts.largest - largest)
        total = self.total * scale + (parts.total * scales).sum(0)
        values = self.values * scale[..., None] + (parts.values * scales[..., None]).sum(0)
        return PartialSoftmax(largest, total, values)

    def output(self, dtype: DTypeLike) -> Float[Array, "B T N D"]:
        """The softmax's mean of the values, [B, T, N, D]."""
        y = jnp.moveaxis(self.values / self.total[..., None], 3, 1)
        return y.reshape(*y.shape[:2], -1, y.shape[-1]).astype(dtype)


def _grouped(q: Float[Array, "B T N D"], heads: int) -> Float[Array, "B T K R D"]:
    """Queries by their KV head."""
    b, t, n, d = q.shape
    return q.reshape(b, t, heads, n // heads, d)


def _fold_block(
    q: Float[Array, "B T K R D"], k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], mask: Array | None
) -> PartialSoftmax:
    """Attention over the new tokens."""
    b, t = q.shape[:2]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)) if mask is None else mask, (b, t, t))
    return PartialSoftmax.empty(q).fold(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)


def _fold_context(
    part: PartialSoftmax,
    q: Float[Array, "B T K R D"],
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds | None,
    size: int | None,
) -> PartialSoftmax:
    """``part`` with the context, which is read a page at a time, or as many as ``size`` positions are."""
    (b, t), page, pages = q.shape[:2], cache.page_size, cache.table.shape[1]
    count = min((size or page) // page, pages)
    used = jnp.minimum(length, cache.capacity)[:, None]
    first, skipped = (0, 0) if bounds is None else (x[:, None] for x in bounds.skipped(page))

    def chunk(i: Array | int, part: PartialSoftmax) -> PartialSoftmax:
        indices = jnp.broadcast_to(i * count + jnp.arange(count), (b, count))
        indices = jnp.where(indices < first, indices, indices + skipped)
        keys, values = cache.read(indices)
        positions = (indices[..., None] * page + jnp.arange(page)).reshape(b, 1, -1)
        seen = positions < used[..., None]
        if bounds is not None:
            seen = seen & bounds.admit(positions)
        # A weight of zero is not enough: what was never written may be NaN, and 0 · NaN is NaN.
        values = jnp.where(seen.any(1)[:, None, :, None], values, 0)
        return part.fold(q, keys, values, jnp.broadcast_to(seen, (b, t, count * page)))

    if count == pages:
        return chunk(0, part)
    longest = jnp.max(-(-used // page) - skipped)
    return jax.lax.fori_loop(0, (longest + count - 1) // count, chunk, part)


def reference(
    backend: Backend,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache | None,
    length: Int[Array, " B"],
    bounds: Bounds | None = None,
    gate: Float[Array, "B T N 2 D"] | None = None,
    *,
    size: int | None = None,
) -> Float[Array, "B T N D"]:
    """`attention` by XLA, with a running softmax (arXiv 2205.14135).

    The context is read a page at a time, or as many as ``size`` positions are. Pages that no token sees are skipped.
    """
    queries = _grouped(q, k.shape[2])
    part = _fold_block(queries, k, v, mask)
    if cache is not None and cache.positions.axes:

        def context(q: Array, cache: KVCache, length: Array, bounds: Bounds | None) -> PartialSoftmax:
            return _fold_context(PartialSoftmax.empty(q), q, cache, length, bounds, size)

        part = part.join(_parts_of_context(context, queries, cache, length, bounds))
    elif cache is not None:
        part = _fold_context(part, queries, cache, length, bounds, size)
    return through_gate(part.output(q.dtype), gate)


def _parts_of_context(
    context: Callable[[Array, KVCache, Array, Bounds | None], PartialSoftmax],
    q: Float[Array, "B T K R D"],
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds | None,
) -> PartialSoftmax:
    """Attention over a context whose pages are divided over devices (decode context parallelism).

    Each device attends to its part of the context with the queries of all that have the same KV head, and these then
    exchange what they have for one another: two collectives.

    Args:
        context: The attention of queries to an undivided context.
        q: Queries of this device.
        cache: The cache; its arrays are this device's part.
        length: As in `attention`.
        bounds: As in `attention`.

    Returns:
        The parts for this device's queries, stacked along a first axis.
    """
    group, d = cache.positions, q.shape[-1]
    # The positions of a part are numbered through, in order: a bound becomes the number of those before it.
    local = None if bounds is None else jax.tree.map(cache.local, bounds)
    part = context(group.gather(q, 3), replace(cache, positions=UNSHARDED), cache.local(length), local)
    packed = jnp.concatenate([part.values, part.largest[..., None], part.total[..., None]], -1)
    packed = packed.reshape(*packed.shape[:2], group.size(), -1, *packed.shape[3:])
    received = group.exchange(packed, 2)
    return PartialSoftmax(received[..., d], received[..., d + 1], received[..., :d])


def in_wide_pieces(
    backend: Backend,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds | None = None,
    gate: Float[Array, "B T N 2 D"] | None = None,
) -> Float[Array, "B T N D"]:
    """`reference` with few large pieces of the context."""
    return reference(backend, q, k, v, mask, cache, length, bounds, gate, size=_wide_size(cache))


def _wide_size(cache: KVCache) -> int:
    """Positions of a wide piece."""
    # Of a divided context, a device reads a part with the queries of all.
    size = max(WIDE_CHUNK // cache.positions.size(), -(-cache.capacity // MAX_CHUNKS))
    return -(-size // cache.page_size) * cache.page_size


def _supports_wide(
    backend: Backend, q: Array, k: Array, v: Array, mask: Array | None, cache: KVCache | None, *args: Any
) -> str | None:
    if cache is None:
        return "there is no cached context"
    return "the platform is cpu, where a loop iteration is cheap" if backend.platform == "cpu" else None


def _supports_cpp(
    backend: Backend, q: Array, k: Array, v: Array, mask: Array | None, cache: KVCache | None, *args: Any
) -> str | None:
    if not backend.has_cpp:
        return backend.no_cpp
    if cache is None:
        return "there is no cached context"
    return "pages are divided over devices" if cache.positions.axes else cpp.why_not_attended(q, cache)


def _cpp(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    cache: KVCache,
    length: Array,
    bounds: Bounds | None = None,
    gate: Array | None = None,
) -> Array:
    bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    return through_gate(cpp.attend(q, k, v, mask, cache, length, bounds), gate)


def _supports_triton(
    backend: Backend, q: Array, k: Array, v: Array, mask: Array | None, cache: KVCache | None, *args: Any
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if cache is None:
        return "there is no cached context"
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    return triton_attention.why_not(backend.triton_card, k)


def _triton(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    cache: KVCache,
    length: Array,
    bounds: Bounds | None = None,
    gate: Array | None = None,
) -> Array:
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    if not cache.positions.axes:
        return triton_attention.attend_triton(backend.triton_card, q, k, v, mask, cache, length, bounds, gate)

    def part(q: Array, *args: Any) -> PartialSoftmax:
        splits = triton_attention.partial_softmaxes_triton(backend.triton_card, q, *args)
        return PartialSoftmax.empty(q).join(PartialSoftmax(*splits))

    queries = _grouped(q, k.shape[2])
    block = part(queries, replace(cache, positions=UNSHARDED), jnp.zeros_like(length), bounds, (k, v), mask)
    joined = block.join(_parts_of_context(part, queries, cache, length, bounds))
    return through_gate(joined.output(q.dtype), gate)


def _supports_long(
    backend: Backend, q: Array, k: Array, v: Array, mask: Array | None, cache: KVCache | None, *args: Any
) -> str | None:
    if reason := _supports_triton(backend, q, k, v, mask, cache, *args):
        return reason
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    assert cache is not None, "supported without a cache"
    is_divided = bool(cache.positions.axes)
    return "pages are divided over devices" if is_divided else triton_attention.why_not_long(backend.triton_card, q, k)


def _long(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    cache: KVCache,
    length: Array,
    bounds: Bounds | None = None,
    gate: Array | None = None,
) -> Array:
    from dflash_jax.ops.kernels.triton import attention as triton_attention

    bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    return triton_attention.attend_triton(backend.triton_card, q, k, v, mask, cache, length, bounds, gate, True)


def _supports_pallas(
    backend: Backend, q: Array, k: Array, v: Array, mask: Array | None, cache: KVCache | None, *args: Any
) -> str | None:
    if backend.no_pallas is not None:
        return backend.no_pallas
    if cache is None:
        return "there is no cached context"
    from dflash_jax.ops.kernels.tpu import attention as tpu_attention

    return tpu_attention.why_not(q, k, cache)


def _pallas(
    backend: Backend,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    cache: KVCache,
    length: Array,
    bounds: Bounds | None = None,
    gate: Array | None = None,
) -> Array:
    from dflash_jax.ops.kernels.tpu import attention as tpu_attention

    bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    return through_gate(tpu_attention.attend(q, k, v, mask, cache, length, bounds), gate)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton, long contexts", _supports_long, _long, is_tried=False),
    Implementation("triton", _supports_triton, _triton),
    Implementation("pallas", _supports_pallas, _pallas, is_tried=False),
    Implementation("wide pieces", _supports_wide, in_wide_pieces),
    Implementation("reference", supports_everything, reference),
)


def attention(
    backend: Backend,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache | None,
    length: Int[Array, " B"],
    bounds: Bounds | None = None,
    gate: Float[Array, "B T N 2 D"] | None = None,
) -> Float[Array, "B T N D"]:
    """Softmax attention of T new tokens over the cached context and over one another; float32 inside.

    Args:
        backend: Where it runs. The kernels have no gradient.
        q: Queries, [B, T, N, D].
        k: Keys of the new tokens, [B, T, K, D], in the cache's dtype.
        v: Values of the new tokens, likewise.
        mask: bool, broadcastable to [B, T, T]: which new tokens each new token sees, with at least itself. None: itself
            and those before it.
        cache: The context; None: no context. Pieces past the longest context are not read. Where the positions of its
            pages are divided over devices, so are the query heads of its KV heads.
        length: int [B]: positions of the context that are valid.
        bounds: Restricts the context further.
        gate: [B, T, N, 2, D], the queries' projection; its second half gates the result. None: no gate.

    Returns:
        [B, T, N, D] in q's dtype.
    """
    args = (q, k, v, mask, cache, length, bounds, gate)
    return choose("attention", IMPLEMENTATIONS, backend, *args).call(backend, *args)
