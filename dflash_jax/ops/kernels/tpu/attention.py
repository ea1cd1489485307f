"""Attention of a block over a cached context, on a TPU.

A program has a row of the batch. It attends to the row's new tokens, and then to the pages of its context one after
another, with a running softmax (arXiv 2205.14135). Several pages are on their way from HBM at once, those of the next
rows too, and no page is read that no token sees. Letters as in `ops.attention`; M are the R query heads on a KV head
times `TOKENS` tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.cache import FP8, Bounds, KVCache

# Tokens of a block. Shorter blocks are padded to it: a token's products then have one shape, and its result the same
# bits at any block length.
TOKENS = 16
# Sizes of heads are multiples of a vector register's lanes.
LANES = 128
# Bytes of keys and values that are on their way at once, about bandwidth times latency, and how many pages at most and
# at least.
IN_FLIGHT, MOST_PAGES, LEAST_PAGES = 4 << 20, 16, 2
# Bytes of scalar memory that the page table may take, of 1 MiB.
TABLE_BYTES = 512 << 10
_MASKED = -1e30
# Scalars of the kernel that last from row to row: the row and page that are fetched next, pages fetched, pages read.
_ROW, _PAGE, _FETCHED, _READ = range(4)


def why_not(q: Array, k: Array, cache: KVCache) -> str | None:
    """The reason why `attend` does not support queries [B, T, N, D], keys [B, T, K, D] and a cache, or None."""
    rows, tokens, _, size = q.shape
    if tokens > TOKENS:
        return f"{tokens} tokens: the kernel takes {TOKENS} at most"
    if size % LANES:
        return f"heads of {size}: sizes are multiples of {LANES}"
    if cache.positions.axes:
        return "pages are divided over devices"
    if q.dtype not in (jnp.bfloat16, jnp.float32) or k.dtype not in (q.dtype, FP8):
        names = [jnp.dtype(x.dtype).name for x in (q, k)]
        return f"queries in {names[0]} and keys in {names[1]}: the kernel takes bfloat16, float32, and keys in FP8"
    if (table := 4 * rows * cache.table.shape[1]) > TABLE_BYTES:
        return f"a page table of {table} bytes: the kernel takes {TABLE_BYTES} at most"
    return None


def pages_in_flight(cache: KVCache) -> int:
    """How many pages are on their way at once."""
    page = 2 * int(np.prod(cache.k.shape[1:])) * cache.k.dtype.itemsize
    return min(max(IN_FLIGHT // page, LEAST_PAGES), MOST_PAGES)


def _kernel(
    table, context, left, following, used, lowest, recent, sinks, skip_from, skipped,
    q, k, v, mask, first, k_pages, v_pages, out, k_buffer, v_buffer, semaphores, place, largest, total, values,
):  # fmt: skip
    """A row: scalars of all rows, then its arrays, the cache, its result, and what is kept in between.

    Scalars, int32 [B]: positions of the ``context`` without skipped pages, which ``table`` [B, n] has; pages ``left``
    to read from the row on; the ``following`` row that has any; positions ``used`` with those of skipped pages; the
    others as in `Bounds`. Arrays: q [1, K, M, D], k and v [1, K, TOKENS, D], mask [1, TOKENS, TOKENS], first [1,
    TOKENS, 1], out as q. The running softmax: largest and total [K, M, 1], values [K, M, D], float32.
    """
    row, heads, size = pl.program_id(0), q.shape[1], k_buffer.shape[2]

    def index(row, i):
        return i + jnp.where(i < skip_from[row], 0, skipped[row])

    def copies(page, slot):
        pairs = enumerate(((k_pages, k_buffer), (v_pages, v_buffer)))
        return [pltpu.make_async_copy(x.at[page], y.at[slot], semaphores.at[i, slot]) for i, (x, y) in pairs]

    def fetch():
        """Starts the copies of the next page, of this row or of the next one that has any."""
        of, i = place[_ROW], place[_PAGE]
        is_last = (i + 1) * size >= context[of]
        place[_ROW], place[_PAGE] = jnp.where(is_last, following[of], of), jnp.where(is_last, 0, i + 1)
        for copy in copies(table[of, index(of, i)], place[_FETCHED] % k_buffer.shape[0]):
            copy.start()
        place[_FETCHED] += 1

    def fold(keys, kept, seen):
        """Adds keys and values [s, D] of each head, which tokens see under ``seen`` [TOKENS, s].

        All heads are at the same operation, so that one fills the other's latencies.
        """
        exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        product = partial(jax.lax.dot_general, precision=exact, preferred_element_type=jnp.float32)
        scores = [product(q[0, h], keys(h).astype(q.dtype), (((1,), (1,)), ((), ()))) for h in range(heads)]
        split = (-1, *seen.shape)
        scores = [
            jnp.where(seen[None], x.reshape(split) * q.shape[3] ** -0.5, _MASKED).reshape(x.shape) for x in scores
        ]
        new = [jnp.maximum(largest[h], x.max(1, keepdims=True)) for h, x in enumerate(scores)]
        weights = [jnp.exp(x - y) for x, y in zip(scores, new, strict=True)]
        mixed = [
            product(x.astype(q.dtype), kept(h).astype(q.dtype), (((1,), (0,)), ((), ()))) for h, x in enumerate(weights)
        ]
        for h in range(heads):
            scale = jnp.exp(largest[h] - new[h])
            largest[h] = new[h]
            total[h] = total[h] * scale + weights[h].sum(1, keepdims=True)
            values[h] = values[h] * scale + mixed[h]

    def read(i, _):
        """Folds a page of the row."""
        slot, start = place[_READ] % k_buffer.shape[0], index(row, i) * size
        for copy in copies(0, slot):
            copy.wait()

        def admitted(shape, axis):
            """Whether any token sees a position: `Bounds.admit`, but for each token's own first position."""
            position = start + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            seen = (position < used[row]) & (position >= lowest[row])
            return seen & ((position >= recent[row]) | (position < sinks[row]))

        end = start + size
        is_whole = (end <= used[row]) & (start >= lowest[row]) & ((start >= recent[row]) | (end <= sinks[row]))

        # A weight of zero is not enough: what was never written may be NaN.
        @pl.when(jnp.logical_not(is_whole))
        def _():
            for head in range(heads):
                kept = v_buffer[slot, head]
                v_buffer[slot, head] = jnp.where(admitted(kept.shape, 0), kept, jnp.zeros_like(kept))

        position = start + jax.lax.broadcasted_iota(jnp.int32, (TOKENS, size), 1)
        seen = admitted((TOKENS, size), 1) & (position >= first[0])
        fold(lambda h: k_buffer[slot, h], lambda h: v_buffer[slot, h], seen)
        place[_READ] += 1
        pl.when(left[row] - i > k_buffer.shape[0])(fetch)
        return 0

    @pl.when(row == 0)
    def _():
        for i in range(4):
            place[i] = 0
        place[_ROW] = jnp.where(context[0] > 0, 0, following[0])
        for i in range(k_buffer.shape[0]):
            pl.when(left[0] > i)(fetch)

    largest[...] = jnp.full(largest.shape, _MASKED, jnp.float32)
    total[...], values[...] = jnp.zeros(total.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    fold(lambda h: k[0, h], lambda h: v[0, h], mask[0] != 0)
    jax.lax.fori_loop(0, jax.lax.div(context[row] + size - 1, size), read, 0)
    for head in range(heads):
        out[0, head] = (values[head] / total[head]).astype(out.dtype)


def attend(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds,
) -> Float[Array, "B T N D"]:
    """`ops.attention.attention` of a block without a gate."""
    b, t, n, d = q.shape
    heads, pad, page = k.shape[2], TOKENS - t, cache.page_size

    def by_head(x: Array) -> Array:
        """[B, T, K x, D] → [B, K, x TOKENS, D]."""
        x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(b, TOKENS, heads, -1, d)
        return jnp.einsum("btkrd->bkrtd", x).reshape(b, heads, -1, d)

    if mask is None:
        seen = jnp.tril(jnp.ones((1, TOKENS, TOKENS), bool))
    else:
        seen = jnp.broadcast_to(mask, (*jnp.broadcast_shapes(mask.shape, (1, t, t))[:1], t, t))
        # A token of the padding sees itself.
        seen = jnp.pad(seen, ((0, 0), (0, pad), (0, pad))) | jnp.diag(jnp.arange(TOKENS) >= t)
    used = jnp.minimum(length, cache.capacity)
    skip_from, skipped = bounds.skipped(page)
    context = jnp.maximum(used - skipped * page, 0)
    count, row = -(-context // page), jnp.arange(b)
    # The next row with a page; one past the end is not fetched.
    following = jnp.where((row > row[:, None]) & (count > 0), row, b).min(1)
    left = jnp.cumsum(count[::-1])[::-1]
    pages = jnp.minimum(cache.table[jnp.minimum(cache.row_indices(), len(cache.table) - 1)], len(cache.k) - 1)
    scalars = (
        pages,
        context,
        left,
        following,
        used,
        bounds.first.min(1),
        bounds.recent,
        bounds.sinks,
        skip_from,
        skipped,
    )
    first = jnp.pad(bounds.first, ((0, 0), (0, pad)))[..., None]
    queries, depth = by_head(q), pages_in_flight(cache)
    m = queries.shape[2]

    def rows(*shape: int, shared: bool = False) -> pl.BlockSpec:
        zeros = (0,) * len(shape)
        return pl.BlockSpec((1, *shape), lambda i, *_: (0 if shared else i, *zeros))

    buffer = pltpu.VMEM((depth, *cache.k.shape[1:]), cache.k.dtype)
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(b,),
            in_specs=[
                rows(heads, m, d),
                *[rows(heads, TOKENS, d)] * 2,
                rows(TOKENS, TOKENS, shared=seen.shape[0] == 1),
                rows(TOKENS, 1),
                # Not pl.ANY, which lets XLA copy a small cache into VMEM first.
                *[pl.BlockSpec(memory_space=pltpu.HBM)] * 2,
            ],
            out_specs=rows(heads, m, d),
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.SemaphoreType.DMA((2, depth)),
                pltpu.SMEM((4,), jnp.int32),
                *[pltpu.VMEM((heads, m, 1), jnp.float32)] * 2,
                pltpu.VMEM((heads, m, d), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="attend",
    )
    new = queries, by_head(k), by_head(v), seen.astype(jnp.int32), first
    out = call(*(x.astype(jnp.int32) for x in scalars), *new, cache.k, cache.v)
    return jnp.einsum("bkrtd->btkrd", out.reshape(b, heads, -1, TOKENS, d))[:, :t].reshape(b, t, n, d)
