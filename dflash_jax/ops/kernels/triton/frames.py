"""Attention of patches within their frames in Triton: FlashAttention (arXiv 2205.14135), whose scores stay on the chip.

A program has one head of a tile of queries, and goes over the keys that any of them sees. A head need not be a power of
two, as Triton's tiles must: it is read in two parts, 72 as 64 and 8 of 16.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import jax
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import next_power_of_two

# Queries and keys of a tile in 16 bits, and in float32, whose operands take twice the memory; warps and stages. Chosen
# by registers and shared memory of the compiled kernel, not measured.
TILES, WARPS, STAGES = {2: (128, 64), 4: (64, 32)}, 8, 2
# The smallest side of a product.
LEAST = 16
MAX_HEAD_SIZE = 256
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_frames(
    q, k, v, low, high, y,
    N: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d1 = tl.arange(0, D1)
    row = (m * H + head)[:, None] * D
    live = (m < N)[:, None]
    q1 = tl.load(q + row + d1[None, :], mask=live & (d1 < D)[None, :], other=0.0)
    acc1 = tl.zeros([BM, D1], tl.float32)
    if D2:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q + row + d2[None, :], mask=live & (d2 < D)[None, :], other=0.0)
        acc2 = tl.zeros([BM, D2], tl.float32)
    first = tl.load(low + m, mask=m < N, other=0)
    last = tl.load(high + m, mask=m < N, other=0)
    some = last > first
    # Tiles of keys begin at the same places whoever shares the tile of queries, so that a query has the same bits.
    begin = tl.min(tl.where(some, first, N), axis=0) // BN * BN
    end = tl.max(tl.where(some, last, 0), axis=0)
    running_max = tl.full([BM], -1e30, tl.float32)
    total = tl.zeros([BM], tl.float32)
    for start in range(begin, end, BN):
        n = start + tl.arange(0, BN)
        inside = (n < end)[:, None]
        place = (n * H + head)[:, None] * D
        k1 = tl.load(k + place + d1[None, :], mask=inside & (d1 < D)[None, :], other=0.0)
        v1 = tl.load(v + place + d1[None, :], mask=inside & (d1 < D)[None, :], other=0.0)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if D2:
            k2 = tl.load(k + place + d2[None, :], mask=inside & (d2 < D)[None, :], other=0.0)
            v2 = tl.load(v + place + d2[None, :], mask=inside & (d2 < D)[None, :], other=0.0)
            scores += tl.dot(q2, tl.trans(k2), input_precision=PRECISION)
        seen = (n[None, :] >= first[:, None]) & (n[None, :] < last[:, None])
        scores = tl.where(seen, scores * LOG2_E, -1e30)
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - new_max[:, None]), 0.0)
        rescale = tl.exp2(running_max - new_max)
        total = total * rescale + tl.sum(weights, axis=1)
        weights = weights.to(v1.dtype)
        acc1 = acc1 * rescale[:, None] + tl.dot(weights, v1, input_precision=PRECISION)
        if D2:
            acc2 = acc2 * rescale[:, None] + tl.dot(weights, v2, input_precision=PRECISION)
        running_max = new_max
    scale = (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    tl.store(y + row + d1[None, :], (acc1 * scale).to(y.dtype.element_ty), mask=live & (d1 < D)[None, :])
    if D2:
        tl.store(y + row + d2[None, :], (acc2 * scale).to(y.dtype.element_ty), mask=live & (d2 < D)[None, :])


def why_not(qkv: Array) -> str | None:
    """The reason why `attend_frames` does not support the heads of ``qkv`` [N, 3, heads, D], or None."""
    size = qkv.shape[-1]
    return None if size <= MAX_HEAD_SIZE else f"heads of {size}: sizes are {MAX_HEAD_SIZE} at most"


def parts_of(size: int) -> tuple[int, int]:
    """The widths of the tiles that a head of ``size`` is read in: a power of two, and the rest of it or 0."""
    first = max(LEAST, next_power_of_two(size + 1) // 2)
    return first, max(LEAST, next_power_of_two(size - first)) if size > first else 0


def attend_frames(
    card: Card,
    q: Float[Array, "N heads D"],
    k: Float[Array, "N heads D"],
    v: Float[Array, "N heads D"],
    low: Int[Array, " N"],
    high: Int[Array, " N"],
) -> Float[Array, "N heads D"]:
    """`ops.frame_attention.frame_attention` of what `ops.frame_attention.rotated` returns."""
    n, heads, size = q.shape
    rows, keys = TILES[q.dtype.itemsize]
    first, rest = parts_of(size)
    (y,) = triton_call(
        card, _attend_frames, [q, k, v, low, high], [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        (-(-n // rows), heads), num_warps=WARPS, num_stages=STAGES, N=n, H=heads, D=size, D1=first, D2=rest, BM=rows,
        BN=keys, PRECISION="ieee" if q.dtype.itemsize == 4 else "tf32", LOG2_E=LOG2_E,
    )  # fmt: skip
    return y
