"""Attention of new tokens over a cached context and over one another, rotation and cache writes in Triton.

Queries are split among programs; where these are few, the context is split too. Each program reads its part of the
cache in place, and a second kernel joins the partial softmaxes (flash decoding, arXiv 2311.01282).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.cache import FP8, Bounds, KVCache
from dflash_jax.ops.card import KIB, OLDEST_FP8, Card
from dflash_jax.ops.kernels.triton.dependent import wait_for_inputs
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import next_power_of_two

# Programs that keep an H200 busy (`Card.scaled` on others), and the most splits of a context: further splits cost more
# to join than they save.
PROGRAMS, MAX_SPLITS = 264, 32
# Query rows of a program (for up to FEW_TOKENS new tokens, and for more), context positions of a loop step (both are
# reduced where the card's shared memory is too small), warps (for fewer than 64 rows, and for more) and stages.
ROWS, FEW_TOKENS, POSITIONS, WARPS, STAGES = (64, 128), 64, 128, (4, 8), 2
# Numbers of a step's keys in FP8 from which a program of few rows has as many warps as one of 64.
WIDE_STEP = 64 * 256
# Long contexts: stages of the loop, steps whose keys and values shared memory has at once then, and positions of a part
# at least. With `STAGES` a step is asked for when the one before it has ended, since its address comes from the page
# table: nothing is in flight while a step computes. From five stages on the next step is.
LONG_STAGES, LONG_BUFFERS, LONG_PART = 5, 3, 64
# Its programs on an H200: one a multiprocessor.
LONG_PROGRAMS = 132
# Columns of a query that a program of `_join` has where there are more than `MAX_SPLITS` parts.
COLUMNS = 64
# Supported head sizes, and the most tokens whose queries and keys are normed, rotated and written by these kernels.
HEAD_SIZES, MAX_TOKENS = (16, 32, 64, 128, 256), 512


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Keys or values in the dtype of queries; FP8 is exact in it, and goes through float32 as in `tiles.tile`."""
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def _fold(q, k, v, mask, running_max, total, acc, scale, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(mask, scores, -1e30)
    new_max = tl.maximum(running_max, tl.max(scores, axis=1))
    weights = tl.where(mask, tl.exp(scores - new_max[:, None]), 0.0)
    rescale = tl.exp(running_max - new_max)
    total = total * rescale + tl.sum(weights, axis=1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_max, total, acc


@triton.jit
def _attend(
    q, k_new, v_new, block_mask, k_cache, v_cache, table, rows, length, first, recent, sinks, skip_from, skipped,
    max_out, total_out, acc_out,
    T: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    LAST_PAGE: tl.constexpr, PAGE: tl.constexpr, MASKS: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    LEAST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One part of the context, for BM query rows of one KV head; the last part has the new tokens, too.

    Parts have LEAST positions or more, and the values of one that sees no key are not written; LEAST 0: parts are of
    any size and all are written.
    """
    wait_for_inputs(DEPENDENT)
    b = tl.program_id(0) // KH
    head = tl.program_id(0) % KH
    split = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    t = m // R
    live = m < T * R
    d = tl.arange(0, D)
    query = tl.load(
        q + ((b * T + t) * KH * R + head * R + m % R)[:, None] * D + d[None, :], mask=live[:, None], other=0.0
    )
    running_max = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)

    row = tl.minimum(tl.load(rows + b), ROWS - 1).to(tl.int64)
    first_position = tl.load(first + b * T + t, mask=live, other=2147483647)
    lowest = tl.min(first_position, axis=0)
    recent_start = tl.load(recent + b)
    sink_end = tl.load(sinks + b)
    # Places are positions without those of skipped pages.
    skip_start = tl.load(skip_from + b) * PAGE
    skip_size = tl.load(skipped + b) * PAGE
    used = tl.maximum(tl.minimum(tl.load(length + b), PAGES * PAGE) - skip_size, 0)
    split_size = tl.cdiv(tl.cdiv(used, SPLITS), BS) * BS
    if LEAST > 0:
        split_size = tl.maximum(split_size, LEAST)
    end = tl.minimum((split + 1) * split_size, used)
    for start in range(split * split_size, end, BS):
        place = start + tl.arange(0, BS)
        inside = place < end
        # A page is a multiple of a tile, so that a tile is in one page.
        first_place = start + tl.where(start < skip_start, 0, skip_size)
        position = first_place + tl.arange(0, BS)
        page = tl.minimum(tl.load(table + row * PAGES + first_place // PAGE), LAST_PAGE).to(tl.int64)
        offset = (page * KH + head) * PAGE * D + (first_place % PAGE + tl.arange(0, BS))[:, None] * D + d[None, :]
        k = _widened(tl.load(k_cache + offset, mask=inside[:, None], other=0.0), query.dtype)
        seen = inside & (position >= lowest) & ((position >= recent_start) | (position < sink_end))
        # What was never written may be NaN.
        v = _widened(tl.load(v_cache + offset, mask=seen[:, None], other=0.0), query.dtype)
        mask = seen[None, :] & (position[None, :] >= first_position[:, None])
        running_max, total, acc = _fold(query, k, v, mask, running_max, total, acc, SCALE, PRECISION)

    if BT > 0:
        # New tokens up to this program's last one, or all.
        block_end = T
        if CAUSAL:
            block_end = tl.minimum((tl.program_id(2) * BM + BM - 1) // R + 1, T)
        for start in range(0, tl.where(split == SPLITS - 1, block_end, 0), BT):
            u = start + tl.arange(0, BT)
            offset = ((b * T + u) * KH + head)[:, None] * D + d[None, :]
            k = _widened(tl.load(k_new + offset, mask=(u < T)[:, None], other=0.0), query.dtype)
            v = _widened(tl.load(v_new + offset, mask=(u < T)[:, None], other=0.0), query.dtype)
            mask = live[:, None] & (u < T)[None, :]
            if CAUSAL:
                mask = mask & (u[None, :] <= t[:, None])
            else:
                mask_offset = (b % MASKS) * T * T + t[:, None] * T + u[None, :]
                mask = tl.load(block_mask + mask_offset, mask=mask, other=0) != 0
            running_max, total, acc = _fold(query, k, v, mask, running_max, total, acc, SCALE, PRECISION)

    out = (tl.program_id(0) * SPLITS + split) * T * R + m
    tl.store(max_out + out, running_max, mask=live)
    tl.store(total_out + out, total, mask=live)
    if LEAST > 0:
        live = live & (total > 0.0)
    tl.store(acc_out + out[:, None] * D + d[None, :], acc, mask=live[:, None])


@triton.jit
def _join(
    maxima, total, acc, gate, y,
    T: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    GATED: tl.constexpr, COLUMNS: tl.constexpr, SPARSE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Joins the splits of one query into one softmax and applies its gate, for COLUMNS of its D values.

    SPARSE: splits that see no key have no values.
    """
    wait_for_inputs(DEPENDENT)
    program = tl.program_id(0)
    pair, m = program // (T * R), program % (T * R)
    b, t, n = pair // KH, m // R, pair % KH * R + m % R
    s = tl.arange(0, SP)
    d = tl.arange(0, COLUMNS)
    if COLUMNS < D:
        d += tl.program_id(1) * COLUMNS
    offset = (pair * SPLITS + s) * T * R + m
    written = s < SPLITS
    maximum = tl.load(maxima + offset, mask=written, other=-1e30)
    weight = tl.exp(maximum - tl.max(maximum, axis=0))
    totals = tl.load(total + offset, mask=written, other=0.0)
    weight = weight / tl.sum(weight * totals, axis=0)
    if SPARSE:
        written = totals > 0.0
    values = tl.load(acc + offset[:, None] * D + d[None, :], mask=written[:, None], other=0.0)
    joined = tl.sum(values * weight[:, None], axis=0)
    query = (b * T + t) * KH * R + n
    if GATED:
        joined = joined / (1.0 + tl.exp(-tl.load(gate + (query * 2 + 1) * D + d).to(tl.float32)))
    tl.store(y + query * D + d, joined.to(y.dtype.element_ty))


@triton.jit
def _rotate(
    q, k, q_norm, k_norm, cos, sin, q_out, k_out,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norms and rotates one head of one token's queries or keys."""
    wait_for_inputs(DEPENDENT)
    token, head = tl.program_id(0) // (N + KH), tl.program_id(0) % (N + KH)
    d = tl.arange(0, D)
    source, norm, target = q + (token * N + head) * HALVES * D, q_norm, q_out + (token * N + head) * D
    if head >= N:
        source, norm, target = k + (token * KH + head - N) * D, k_norm, k_out + (token * KH + head - N) * D
    # The index that each index is rotated with; unrotated indices pair with themselves at a sine of 0.
    pair = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(source + d).to(tl.float32)
    other = tl.load(source + pair).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
        x *= scale * (OFFSET + tl.load(norm + d).to(tl.float32))
        other *= scale * (OFFSET + tl.load(norm + pair).to(tl.float32))
    angle = token * HALF + d % HALF
    c = tl.load(cos + angle, mask=d < 2 * HALF, other=1.0)
    s = tl.load(sin + angle, mask=d < 2 * HALF, other=0.0)
    tl.store(target + d, (x * c + other * tl.where(d < HALF, -s, s)).to(target.dtype.element_ty))


@triton.jit
def _write(
    k_cache, v_cache, table, k, v, rows, positions,
    T: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    LAST_PAGE: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes one head of one token's key and value to its page; out-of-range rows, positions and pages are padding."""
    wait_for_inputs(DEPENDENT)
    token, head = tl.program_id(0) // KH, tl.program_id(0) % KH
    row = tl.load(rows + token // T).to(tl.int64)
    position = tl.load(positions + token)
    is_inside = (position >= 0) & (position < PAGES * PAGE) & (row < ROWS)
    page = tl.load(table + row * PAGES + position // PAGE, mask=is_inside, other=LAST_PAGE + 1).to(tl.int64)
    d = tl.arange(0, D)
    source, target = token * KH * D + head * D + d, ((page * KH + head) * PAGE + position % PAGE) * D + d
    is_written = d < tl.where(is_inside & (page <= LAST_PAGE), D, 0)
    tl.store(k_cache + target, tl.load(k + source).to(k_cache.dtype.element_ty), mask=is_written)
    tl.store(v_cache + target, tl.load(v + source).to(v_cache.dtype.element_ty), mask=is_written)


def why_not_written(card: Card, k: Array) -> str | None:
    """The reason why `write_triton` does not support keys ``k`` [B, T, K, D], in the cache's dtype, or None."""
    return _why_not_size(k) or _why_not_read(card, k) or _why_not_tokens(k)


def _why_not_tokens(k: Array) -> str | None:
    """The reason why rotation and writing leave this many tokens to XLA, whose code is as fast for them, or None."""
    tokens = k.shape[0] * k.shape[1]
    return f"{tokens} tokens: the kernel takes {MAX_TOKENS} at most" if tokens > MAX_TOKENS else None


def write_triton(
    card: Card,
    k_cache: Float[Array, "pages K P D"],
    v_cache: Float[Array, "pages K P D"],
    table: Int[Array, "rows n"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    rows: Int[Array, " B"],
    positions: Int[Array, "B T"],
) -> tuple[Array, ...]:
    """`ops.cache_write.reference`, in place.

    Args:
        card: The card that tiles are chosen for.
        k_cache: Keys, [pages, K, P, D].
        v_cache: Values, [pages, K, P, D].
        table: The pages of each row, int32 [rows, n].
        k: New keys, [B, T, K, D].
        v: New values, [B, T, K, D].
        rows: int32 [B], the row of each batch entry.
        positions: int32 [B, T], the position of each token in its row; out-of-range positions are dropped.

    Returns:
        The buffers of keys and values.
    """
    b, t, heads, d = k.shape
    return triton_call(
        card, _write, [k_cache, v_cache, table, k, v, rows, positions], [], (b * t * heads,), in_place=(0, 1),
        num_warps=1, T=t, KH=heads, D=d, ROWS=table.shape[0], PAGES=table.shape[1], LAST_PAGE=k_cache.shape[0] - 1,
        PAGE=k_cache.shape[2],
    )  # fmt: skip


def why_not_rotated(k: Array) -> str | None:
    """The reason why `rotate_triton` does not support keys ``k`` [B, T, K, D] and their queries, or None."""
    return _why_not_size(k) or _why_not_tokens(k)


def rotate_triton(
    card: Card,
    q: Float[Array, "B T N halves D"] | None,
    k: Float[Array, "B T K D"],
    angles: tuple[Array, Array],
    norms: tuple[Array | None, Array | None],
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Array | None, Array]:
    """`ops.rotation.rotate`, with the card in place of the backend."""
    b, t, heads, d = k.shape
    n, half = 0 if q is None else q.shape[2], angles[0].shape[-1]
    out = [jax.ShapeDtypeStruct((b, t, n, d), k.dtype), jax.ShapeDtypeStruct(k.shape, k.dtype)]
    cos, sin = (jnp.broadcast_to(a, (b, t, half)) for a in angles)
    q_norm, k_norm = (k if norm is None else norm for norm in norms)
    rotated = triton_call(
        card, _rotate, [k if q is None else q, k, q_norm, k_norm, cos, sin], out, (b * t * (n + heads),), num_warps=1,
        N=n, KH=heads, D=d, HALVES=1 if q is None else q.shape[3], HALF=half, NORMED=norms[1] is not None, EPS=eps,
        OFFSET=offset,
    )  # fmt: skip
    return (None if q is None else rotated[0]), rotated[1]


def why_not(card: Card, k: Array) -> str | None:
    """The reason why `attend_triton` does not support keys ``k`` [B, T, K, D], in the cache's dtype, or None."""
    return _why_not_size(k) or _why_not_read(card, k)


def _why_not_size(x: Array) -> str | None:
    return None if x.shape[3] in HEAD_SIZES else f"heads of {x.shape[3]}: sizes are {', '.join(map(str, HEAD_SIZES))}"


def _why_not_read(card: Card, k: Array) -> str | None:
    is_read = k.dtype != FP8 or card.capability >= OLDEST_FP8
    return None if is_read else f"sm_{card.capability} does not read float8"


def why_not_long(card: Card, q: Array, k: Array) -> str | None:
    """Why `attend_triton` with ``is_long`` supports no queries ``q`` [B, T, N, D] and keys ``k``, or None."""
    if not card.reads_shared:
        return f"sm_{card.capability}: the kernel's parts are for Hopper and data-centre Blackwell"
    rows, most = q.shape[1] * q.shape[2] // k.shape[2], _most_rows(q.shape[3] * q.dtype.itemsize, ROWS[1])
    if q.shape[1] > FEW_TOKENS or rows > most:
        return f"{q.shape[1]} tokens are {rows} query rows of a KV head: one program has {most} at most"
    return why_not(card, k)


def _most_rows(bytes_of_row: int, rows: int) -> int:
    """Query rows of a program at most, of which ``rows`` are for rows of 512 bytes."""
    return rows * 512 // max(bytes_of_row, 512)


def tile_sizes(
    rows: int, positions: int, bytes_of_row: int, card: Card, buffers: int | None = None, least_rows: int = 64
) -> tuple[int, int]:
    """Reduces a program's tile until the card's shared memory has room for it.

    Triton keeps the queries and one step's keys and values in shared memory. On Hopper and data-centre Blackwell, whose
    products read operands there, it keeps the next step's too; on other cards, the weights of the softmax.

    Args:
        rows: Query rows of a program at most.
        positions: Context positions of a step at most.
        bytes_of_row: Bytes of one query, key or value.
        card: The card.
        buffers: Steps whose keys and values shared memory has at once; None: those of `STAGES`.
        least_rows: Rows from which positions are reduced first.

    Returns:
        Query rows and positions.
    """
    if buffers is None:
        buffers = STAGES if card.reads_shared else STAGES - 1

    def needed_bytes() -> int:
        keys_and_values = 2 * positions * bytes_of_row * buffers
        # Weights have the dtype of values: 4 bytes at most.
        weights = 0 if card.reads_shared else 4 * rows * positions
        return rows * bytes_of_row + keys_and_values + weights

    # 1 KiB is for barriers.
    while needed_bytes() + KIB > card.shared_memory and max(rows, positions) > 16:
        rows, positions = (rows // 2, positions) if rows > least_rows or positions <= 16 else (rows, positions // 2)
    return rows, positions


def attend_triton(
    card: Card,
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    mask: Bool[Array, "..."] | None,
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds,
    gate: Float[Array, "B T N 2 D"] | None = None,
    is_long: bool = False,
) -> Float[Array, "B T N D"]:
    """`ops.attention.attention`, with the card in place of the backend; ``cache`` and ``bounds`` are required.

    ``is_long``: for long contexts, each key is read once, by one of as many programs as the card can run at once. A KV
    head's query rows are one program's, so that no key goes to two multiprocessors, and the keys of the next step are
    in flight while a step computes.
    """
    b, t, n, d = q.shape
    heads = k.shape[2]
    maxima, total, acc = _partial_softmaxes(card, q, heads, (k, v), mask, cache, length, bounds, is_long)
    splits = maxima.shape[2]
    padded_splits, columns = next_power_of_two(splits), d if splits <= MAX_SPLITS else min(d, COLUMNS)
    (y,) = triton_call(
        card, _join, [maxima, total, acc, q if gate is None else gate], [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        (b * t * n,) if columns == d else (b * t * n, d // columns),
        num_warps=4 if padded_splits * columns >= 2048 else 1, T=t, KH=heads, R=n // heads, D=d, SPLITS=splits,
        SP=padded_splits, GATED=gate is not None, COLUMNS=columns, SPARSE=is_long,
    )  # fmt: skip
    return y


def partial_softmaxes_triton(
    card: Card,
    q: Float[Array, "B T K R D"],
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds,
    new: tuple[Array, Array] | None = None,
    mask: Bool[Array, "..."] | None = None,
) -> tuple[Array, ...]:
    """The fields of `ops.attention.PartialSoftmax` over parts of the keys.

    Args:
        card: The card that tiles are chosen for.
        q: Queries by their KV head.
        cache: The context.
        length: As of `attend_triton`.
        bounds: As of `attend_triton`.
        new: Keys and values of the new tokens; None: these are not seen.
        mask: As of `attend_triton`.

    Returns:
        Float32 [splits, B, K, R, T] twice and [splits, B, K, R, T, D].
    """
    b, t, heads, group, d = q.shape
    parts = _partial_softmaxes(card, q.reshape(b, t, heads * group, d), heads, new, mask, cache, length, bounds)

    def by_split(x: Array) -> Array:
        x = x.reshape(*x.shape[:3], t, group, *x.shape[4:])
        return jnp.moveaxis(x, (2, 4), (0, 3))

    return tuple(map(by_split, parts))


def _partial_softmaxes(
    card: Card,
    q: Float[Array, "B T N D"],
    heads: int,
    new: tuple[Array, Array] | None,
    mask: Bool[Array, "..."] | None,
    cache: KVCache,
    length: Int[Array, " B"],
    bounds: Bounds,
    is_long: bool = False,
) -> tuple[Array, ...]:
    """The splits' softmaxes.

    Args:
        card: The card.
        q: Queries.
        heads: K.
        new: Keys and values of the new tokens, which the last split has; None leaves them out.
        mask: As in `attend_triton`.
        cache: The context.
        length: As in `attend_triton`.
        bounds: As in `attend_triton`.
        is_long: As `attend_triton` describes it.

    Returns:
        Largest score and sum of weights, float32 [B, K, splits, T R], and weighted values, [B, K, splits, T R, D].
        Where ``is_long``, the values of a split that sees no key are arbitrary.
    """
    b, t, n, d = q.shape
    k, v = (q, q) if new is None else new
    group = n // heads
    m = t * group
    bytes_of_row = d * q.dtype.itemsize
    block = max(16, min(_most_rows(bytes_of_row, ROWS[is_long or t > FEW_TOKENS]), 1 << (m - 1).bit_length()))
    step = min(POSITIONS, POSITIONS * 256 // bytes_of_row, cache.page_size)
    kept = (LONG_BUFFERS, block) if is_long else ()
    block, positions = tile_sizes(block, step, bytes_of_row, card, *kept)
    tiles = -(-m // block)
    # Splits do not depend on the capacity, which other requests may raise: in a batch and block of one shape a context
    # is always split the same way.
    splits = max(1, min(card.scaled(PROGRAMS) // (b * heads * tiles), MAX_SPLITS))
    if is_long:
        # One program a multiprocessor, whose shared memory the steps in flight fill.
        splits = max(1, card.scaled(LONG_PROGRAMS) // (b * heads * tiles))
    if mask is None:
        block_mask = jnp.zeros((1, 1, 1), jnp.int8)
    else:
        block_mask = jnp.broadcast_to(mask, (mask.shape[0] if mask.ndim == 3 else 1, t, t)).astype(jnp.int8)
    shape = (b, heads, splits, m)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, d))]
    context = [cache.k, cache.v, cache.table, cache.row_indices(), length]
    seen = [bounds.first, bounds.recent, bounds.sinks, *bounds.skipped(cache.page_size)]
    # A step's keys in FP8 pass through float32: of heads of 256 they take the registers of 8 warps.
    is_wide = block >= 64 or (cache.k.dtype == FP8 and positions * d >= WIDE_STEP)
    return triton_call(
        card, _attend, [q, k, v, block_mask, *context, *seen], out, (b * heads, splits, tiles),
        num_warps=WARPS[is_wide], num_stages=LONG_STAGES if is_long else STAGES,
        T=t, KH=heads, R=group, D=d, ROWS=cache.table.shape[0], PAGES=cache.table.shape[1],
        LAST_PAGE=cache.k.shape[0] - 1, PAGE=cache.page_size, MASKS=block_mask.shape[0], SPLITS=splits, SCALE=d**-0.5,
        BM=block, BS=positions, BT=0 if new is None else min(positions, max(16, next_power_of_two(t))),
        CAUSAL=mask is None, PRECISION="ieee" if q.dtype == jnp.float32 else "tf32", LEAST=LONG_PART if is_long else 0,
    )  # fmt: skip
