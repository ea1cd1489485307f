"""Attention of few new tokens over a long context in Triton: the context is split among programs, each reads its part
of the cache where it lies, and what they bring is joined (flash decoding)."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.kernels.launch import triton_call

# Programs that keep an accelerator busy, and parts of a context: more cost more to join than they bring (H200).
PROGRAMS, MOST_PARTS = 264, 32
# Query rows of a program, positions that it takes at a time (fewer of large heads: shared memory), warps, stages.
ROWS, POSITIONS, WARPS, STAGES = 64, 128, (4, 8), 2


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
    BM: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr,
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

    if split == SPLITS - 1:
        u = tl.arange(0, BT)
        place = ((b * T + u) * KH + head)[:, None] * D + d[None, :]
        k = tl.load(k_new + place, mask=(u < T)[:, None], other=0.0)
        v = tl.load(v_new + place, mask=(u < T)[:, None], other=0.0)
        at = (b % OWN_ROWS) * T * T + t[:, None] * T + u[None, :]
        mask = tl.load(own + at, mask=live[:, None] & (u < T)[None, :], other=0) != 0
        best, total, acc = _fold(query, k, v, mask, best, total, acc, SCALE, PRECISION)

    out = (tl.program_id(0) * SPLITS + split) * T * R + m
    tl.store(best_out + out, best, mask=live)
    tl.store(total_out + out, total, mask=live)
    tl.store(acc_out + out[:, None] * D + d[None, :], acc, mask=live[:, None])


def fits(q) -> bool:
    """Whether the kernel takes these queries."""
    t, d = q.shape[1], q.shape[3]
    return t <= 64 and d in (16, 32, 64, 128, 256)


def attend_triton(q, k, v, own_mask, cache, length, bounds):
    """As `cache.attend`, with a cache and bounds."""
    b, t, n, d = q.shape
    heads = k.shape[2]
    group = n // heads
    m = t * group
    bytes_of_row = d * q.dtype.itemsize
    block = max(16, min(ROWS * 512 // max(bytes_of_row, 512), 1 << (m - 1).bit_length()))
    tiles = -(-m // block)
    positions = min(POSITIONS, POSITIONS * 256 // bytes_of_row)
    # Not by the capacity, which another request may have made larger: the same context has the same parts.
    splits = max(1, min(PROGRAMS // (b * heads * tiles), MOST_PARTS))
    own = jnp.broadcast_to(own_mask, (own_mask.shape[0] if own_mask.ndim == 3 else 1, t, t)).astype(jnp.int8)
    rows = jnp.arange(b, dtype=jnp.int32) if cache.rows is None else cache.rows
    shape = (b, heads, splits, m)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, d))]
    args = [q, k, v, own, cache.k, cache.v, rows, length, bounds.first, bounds.recent, bounds.sinks]
    best, total, acc = triton_call(
        _attend, args, out, (b * heads, splits, tiles),
        num_warps=WARPS[block >= 64], num_stages=STAGES,
        T=t, KH=heads, R=group, D=d, ROWS=cache.k.shape[0], CAP=cache.capacity, RING=cache.ring,
        RING_SINKS=cache.sinks, OWN_ROWS=own.shape[0], SPLITS=splits, SCALE=d**-0.5,
        BM=block, BS=positions, BT=max(16, 1 << (t - 1).bit_length()),
        PRECISION="ieee" if q.dtype == jnp.float32 else "tf32",
    )  # fmt: skip
    share = jnp.exp(best - best.max(2, keepdims=True))
    y = jnp.sum(acc * share[..., None], axis=2) / jnp.sum(total * share, axis=2)[..., None]
    return jnp.moveaxis(y.reshape(b, heads, t, group, d), 1, 2).reshape(b, t, n, d).astype(q.dtype)
