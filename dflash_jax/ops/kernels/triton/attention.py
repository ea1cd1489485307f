"""Attention of new tokens over a long context and over one another in Triton: queries are split among programs, and
where these are few the context too; each reads its part of the cache where it lies, and what they bring is joined
(flash decoding, arXiv 2311.01282)."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import KIB, Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import power

# Executables that keep an accelerator busy, and parts of a context: more cost more to join than they bring (H200).
PROGRAMS, MOST_PARTS = 264, 32
# Query rows of a program, of few new tokens and of more than FEW; positions that it takes at a time; both fewer where
# the card's shared memory has no room for them. Warps, stages.
ROWS, FEW, POSITIONS, WARPS, STAGES = (64, 128), 64, 128, (4, 8), 2
# Sizes of heads, and how many tokens' queries and keys are normed, rotated and written here.
SIZES, MOST_ROTATED = (16, 32, 64, 128, 256), 512


@triton.jit
def _fold(q, k, v, mask, best, total, acc, scale, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    scores = tl.where(mask, scores, -1e30)
    most = tl.maximum(best, tl.max(scores, axis=1))
    weight = tl.where(mask, tl.exp(scores - most[:, None]), 0.0)
    kept = tl.exp(best - most)
    total = total * kept + tl.sum(weight, axis=1)
    acc = acc * kept[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return most, total, acc


@triton.jit
def _attend(
    q, k_new, v_new, own, k_held, v_held, rows, length, first, recent, sinks, best_out, total_out, acc_out,
    T: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr,
    RING: tl.constexpr, RING_SINKS: tl.constexpr, OWN_ROWS: tl.constexpr, SPLITS: tl.constexpr, SCALE: tl.constexpr,
    BM: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    best = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)

    row = tl.minimum(tl.load(rows + b), ROWS - 1).to(tl.int64)
    held_by_row = tl.load(length + b)
    used = tl.minimum(held_by_row, CAP)
    lowest = tl.load(first + b * T + t, mask=live, other=0)
    since = tl.load(recent + b)
    sunk = tl.load(sinks + b)
    part = tl.cdiv(tl.cdiv(used, SPLITS), BS) * BS
    end = tl.minimum((split + 1) * part, used)
    cache = (row * KH + head) * CAP * D
    for start in range(split * part, end, BS):
        slot = start + tl.arange(0, BS)
        inside = slot < end
        held = slot
        if RING:
            size = CAP - RING_SINKS
            last = held_by_row - 1 - RING_SINKS
            turn = (last - (slot - RING_SINKS)) % size
            turn = tl.where(turn < 0, turn + size, turn)
            held = tl.where(slot < RING_SINKS, slot, last - turn + RING_SINKS)
        place = cache + slot[:, None] * D + d[None, :]
        k = tl.load(k_held + place, mask=inside[:, None], other=0.0)
        v = tl.load(v_held + place, mask=inside[:, None], other=0.0)
        seen = inside & ((held >= since) | (held < sunk))
        mask = seen[None, :] & (held[None, :] >= lowest[:, None])
        best, total, acc = _fold(query, k, v, mask, best, total, acc, SCALE, PRECISION)

    # New tokens up to the last of this program's, or all.
    upto = T
    if CAUSAL:
        upto = tl.minimum((tl.program_id(2) * BM + BM - 1) // R + 1, T)
    for start in range(0, tl.where(split == SPLITS - 1, upto, 0), BT):
        u = start + tl.arange(0, BT)
        place = ((b * T + u) * KH + head)[:, None] * D + d[None, :]
        k = tl.load(k_new + place, mask=(u < T)[:, None], other=0.0)
        v = tl.load(v_new + place, mask=(u < T)[:, None], other=0.0)
        mask = live[:, None] & (u < T)[None, :]
        if CAUSAL:
            mask = mask & (u[None, :] <= t[:, None])
        else:
            at = (b % OWN_ROWS) * T * T + t[:, None] * T + u[None, :]
            mask = tl.load(own + at, mask=mask, other=0) != 0
        best, total, acc = _fold(query, k, v, mask, best, total, acc, SCALE, PRECISION)

    out = (tl.program_id(0) * SPLITS + split) * T * R + m
    tl.store(best_out + out, best, mask=live)
    tl.store(total_out + out, total, mask=live)
    tl.store(acc_out + out[:, None] * D + d[None, :], acc, mask=live[:, None])


@triton.jit
def _join(
    best, total, acc, both, y,
    T: tl.constexpr, KH: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One query's parts in one softmax, and through its gate."""
    program = tl.program_id(0)
    pair, m = program // (T * R), program % (T * R)
    b, t, n = pair // KH, m // R, pair % KH * R + m % R
    s = tl.arange(0, SP)
    d = tl.arange(0, D)
    place = (pair * SPLITS + s) * T * R + m
    most = tl.load(best + place, mask=s < SPLITS, other=-1e30)
    share = tl.exp(most - tl.max(most, axis=0))
    share = share / tl.sum(share * tl.load(total + place, mask=s < SPLITS, other=0.0), axis=0)
    parts = tl.load(acc + place[:, None] * D + d[None, :], mask=(s < SPLITS)[:, None], other=0.0)
    made = tl.sum(parts * share[:, None], axis=0)
    query = (b * T + t) * KH * R + n
    if GATED:
        made = made / (1.0 + tl.exp(-tl.load(both + (query * 2 + 1) * D + d).to(tl.float32)))
    tl.store(y + query * D + d, made.to(y.dtype.element_ty))


@triton.jit
def _rotate(
    q, k, q_norm, k_norm, cos, sin, q_out, k_out,
    N: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, HALVES: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A head of a token's queries or keys, normed and rotated."""
    token, head = tl.program_id(0) // (N + KH), tl.program_id(0) % (N + KH)
    d = tl.arange(0, D)
    source, norm, into = q + (token * N + head) * HALVES * D, q_norm, q_out + (token * N + head) * D
    if head >= N:
        source, norm, into = k + (token * KH + head - N) * D, k_norm, k_out + (token * KH + head - N) * D
    # What a place is rotated with; behind the rotated ones, itself by a sine of 0.
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
    tl.store(into + d, (x * c + other * tl.where(d < HALF, -s, s)).to(into.dtype.element_ty))


@triton.jit
def _write(
    k_held, v_held, k, v, rows, slots,
    T: tl.constexpr, KH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """A head of a token's key and value to where it has its place, if it has one."""
    token, head = tl.program_id(0) // KH, tl.program_id(0) % KH
    row = tl.load(rows + token // T).to(tl.int64)
    slot = tl.load(slots + token)
    d = tl.arange(0, D)
    source, into = token * KH * D + head * D + d, ((row * KH + head) * CAP + slot) * D + d
    is_kept = d < tl.where((slot >= 0) & (slot < CAP) & (row < ROWS), D, 0)
    tl.store(k_held + into, tl.load(k + source).to(k_held.dtype.element_ty), mask=is_kept)
    tl.store(v_held + into, tl.load(v + source).to(v_held.dtype.element_ty), mask=is_kept)


def why_not_written(k) -> str | None:
    """Why the kernel does not write keys [B, T, K, D]; None where it does."""
    return why_not(k) or _too_many(k)


def _too_many(k) -> str | None:
    """XLA's code is as good for many tokens."""
    tokens = k.shape[0] * k.shape[1]
    return f"{tokens} tokens: it is for {MOST_ROTATED} at most" if tokens > MOST_ROTATED else None


def write_triton(card: Card, k_held, v_held, k, v, rows, slots) -> tuple:
    """As `ops.attention.put`, in place."""
    b, t, heads, d = k.shape
    return triton_call(
        card, _write, [k_held, v_held, k, v, rows, slots], [], (b * t * heads,), in_place=(0, 1), num_warps=1, T=t,
        KH=heads, D=d, ROWS=k_held.shape[0], CAP=k_held.shape[2],
    )  # fmt: skip


def why_not_rotated(k) -> str | None:
    """Why the kernel does not rotate keys [B, T, K, D] and their queries; None where it does."""
    return why_not(k) or _too_many(k)


def rotate_triton(card: Card, q, k, angles, norms, eps: float = 0.0, offset: float = 0.0) -> tuple:
    """As `ops.attention.rotate`."""
    b, t, heads, d = k.shape
    n, half = 0 if q is None else q.shape[2], angles[0].shape[-1]
    out = [jax.ShapeDtypeStruct((b, t, n, d), k.dtype), jax.ShapeDtypeStruct(k.shape, k.dtype)]
    angles = [jnp.broadcast_to(a, (b, t, half)) for a in angles]
    q_norm, k_norm = (k if norm is None else norm for norm in norms)
    made = triton_call(
        card, _rotate, [k if q is None else q, k, q_norm, k_norm, *angles], out, (b * t * (n + heads),), num_warps=1,
        N=n, KH=heads, D=d, HALVES=1 if q is None else q.shape[3], HALF=half, NORMED=norms[1] is not None, EPS=eps,
        OFFSET=offset,
    )  # fmt: skip
    return (None if q is None else made[0]), made[1]


def why_not(q) -> str | None:
    """Why the kernel does not take queries [B, T, N, D]; None where it does."""
    return None if q.shape[3] in SIZES else f"heads of {q.shape[3]}: sizes are {', '.join(map(str, SIZES))}"


def tile_sizes(rows: int, positions: int, bytes_of_row: int, card: Card) -> tuple[int, int]:
    """(query rows, positions) of a program: at most those, as many as the card's shared memory has room for.

    Triton keeps there the queries, a step's keys and values, and on Hopper and the data centre's Blackwell, whose
    products read them there, the next step's too; elsewhere, instead, the softmax's weights.
    """

    def needed() -> int:
        keys_and_values = 2 * positions * bytes_of_row * (STAGES if card.reads_shared else STAGES - 1)
        # Weights have the dtype of values; 4 bytes are the most.
        weights = 0 if card.reads_shared else 4 * rows * positions
        return rows * bytes_of_row + keys_and_values + weights

    # What barriers take is small.
    while needed() + KIB > card.shared_memory and max(rows, positions) > 16:
        rows, positions = (rows // 2, positions) if rows > 64 or positions <= 16 else (rows, positions // 2)
    return rows, positions


def attend_triton(card: Card, q, k, v, own_mask, cache, length, bounds, both=None):
    """As `ops.attention.attention`, with a cache and bounds."""
    b, t, n, d = q.shape
    heads = k.shape[2]
    group = n // heads
    m = t * group
    bytes_of_row = d * q.dtype.itemsize
    block = max(16, min(ROWS[t > FEW] * 512 // max(bytes_of_row, 512), 1 << (m - 1).bit_length()))
    block, positions = tile_sizes(block, min(POSITIONS, POSITIONS * 256 // bytes_of_row), bytes_of_row, card)
    tiles = -(-m // block)
    # Not by the capacity, which another request may have made larger: the same context has the same parts.
    splits = max(1, min(PROGRAMS // (b * heads * tiles), MOST_PARTS))
    if own_mask is None:
        own = jnp.zeros((1, 1, 1), jnp.int8)
    else:
        own = jnp.broadcast_to(own_mask, (own_mask.shape[0] if own_mask.ndim == 3 else 1, t, t)).astype(jnp.int8)
    rows = jnp.arange(b, dtype=jnp.int32) if cache.rows is None else cache.rows
    shape = (b, heads, splits, m)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, d))]
    args = [q, k, v, own, cache.k, cache.v, rows, length, bounds.first, bounds.recent, bounds.sinks]
    best, total, acc = triton_call(
        card, _attend, args, out, (b * heads, splits, tiles),
        num_warps=WARPS[block >= 64], num_stages=STAGES,
        T=t, KH=heads, R=group, D=d, ROWS=cache.k.shape[0], CAP=cache.capacity, RING=cache.ring,
        RING_SINKS=cache.sinks, OWN_ROWS=own.shape[0], SPLITS=splits, SCALE=d**-0.5,
        BM=block, BS=positions, BT=min(positions, max(16, power(t))), CAUSAL=own_mask is None,
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )  # fmt: skip
    parts = power(splits)
    (y,) = triton_call(
        card, _join, [best, total, acc, q if both is None else both], [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        (b * t * n,),
        num_warps=4 if parts * d >= 2048 else 1, T=t, KH=heads, R=group, D=d, SPLITS=splits, SP=parts,
        GATED=both is not None,
    )  # fmt: skip
    return y
