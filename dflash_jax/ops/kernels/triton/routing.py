"""Routing in Triton: each token's best experts, and choices sorted by expert into blocks of rows.

Letters: N tokens, C choices (tokens times experts per token), M rows of a block, S blocks' slots (blocks times M).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import power

# Choices that one program sorts (fewer where the card's shared memory has no room for a number for each and each
# expert), and of how many such chunks it adds up the counts itself.
_CHUNK, _COUNTED = 64, 128


@triton.jit
def _route(
    logits, live, first, chosen, weights,
    E: tl.constexpr, EP: tl.constexpr, LOCAL: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """One token's chosen, weights [N, TOP]; of a choice that is not this device's, or of an idle token: expert 0,
    weight 0."""
    n = tl.program_id(0)
    e = tl.arange(0, EP)
    k = tl.arange(0, TP)
    x = tl.load(logits + n * E + e, mask=e < E, other=float("-inf"))
    busy = tl.load(live + n) != 0
    lowest = tl.load(first)
    most = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - most), axis=0)
    kept = 0.0
    ids = tl.zeros([TP], tl.int32)
    share = tl.zeros([TP], tl.float32)
    for j in tl.static_range(TOP):
        best = tl.max(x, axis=0)
        # The lowest of equal ones.
        at = tl.min(tl.where(x == best, e, EP), axis=0)
        value = tl.exp(best - most) / total
        kept += value
        ids = tl.where(k == j, at, ids)
        share = tl.where(k == j, value, share)
        x = tl.where(e == at, float("-inf"), x)
    if NORMALISE:
        share = share / kept
    ids -= lowest
    mine = (ids >= 0) & (ids < LOCAL) & busy
    tl.store(chosen + n * TOP + k, tl.where(mine, ids, 0), mask=k < TOP)
    tl.store(weights + n * TOP + k, tl.where(mine, share, 0.0), mask=k < TOP)


@triton.jit
def _count(chosen, weights, counts, C: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """counts [chunks, EP]: how many choices of each chunk are of each expert."""
    p = tl.program_id(0)
    at = p * CHUNK + tl.arange(0, CHUNK)
    live = tl.load(weights + at, mask=at < C, other=0.0) != 0.0
    e = tl.load(chosen + at, mask=live, other=EP)
    ids = tl.arange(0, EP)
    tl.store(counts + p * EP + ids, tl.sum((e[:, None] == ids[None, :]).to(tl.int32), axis=0))


@triton.jit
def _before(counts, before, EP: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr, BE: tl.constexpr):
    """before [chunks + 1, EP]: the sums of ``counts`` over earlier chunks; behind the last, over all."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    total = tl.zeros([BE], tl.int32)
    for first in range(0, CHUNKS, STEP):
        chunk = first + tl.arange(0, STEP)[:, None]
        each = tl.load(counts + chunk * EP + e[None, :], mask=chunk < CHUNKS, other=0)
        tl.store(before + chunk * EP + e[None, :], total[None, :] + tl.cumsum(each, axis=0) - each, mask=chunk < CHUNKS)
        total += tl.sum(each, axis=0)
    tl.store(before + CHUNKS * EP + e, total)


@triton.jit
def _align(
    chosen, weights, counts, order, owner, blocks,
    C: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """order [S]: the choice in each slot, C for none; owner [blocks]: each block's expert; blocks [1]. ``counts``:
    those of each chunk where there are up to PP, or else `_before`'s."""
    p = tl.program_id(0)
    ids = tl.arange(0, EP)
    if CHUNKS > PP:
        before = tl.load(counts + p * EP + ids)
        count = tl.load(counts + CHUNKS * EP + ids)
    else:
        chunk = tl.arange(0, PP)[:, None]
        each = tl.load(counts + chunk * EP + ids[None, :], mask=chunk < CHUNKS, other=0)
        count = tl.sum(each, axis=0)
        before = tl.sum(tl.where(chunk < p, each, 0), axis=0)
    needed = (count + M - 1) // M
    first = tl.cumsum(needed, axis=0) - needed
    at = p * CHUNK + tl.arange(0, CHUNK)
    live = tl.load(weights + at, mask=at < C, other=0.0) != 0.0
    e = tl.load(chosen + at, mask=live, other=EP)
    mine = (e[:, None] == ids[None, :]).to(tl.int32)
    rank = tl.cumsum(mine, axis=0) - mine + before[None, :] + first[None, :] * M
    slot = tl.sum(rank * mine, axis=1)
    tl.store(order + slot, at, mask=live)
    if p == 0:
        tl.store(blocks, tl.sum(needed, axis=0))
        for i in range(tl.max(needed, axis=0)):
            tl.store(owner + first + i, ids, mask=i < needed)
        for i in range(M):
            empty = count + i
            tl.store(order + first * M + empty, tl.full([EP], C, tl.int32), mask=empty < needed * M)


def route_triton(card: Card, logits, live, first, local: int, experts_per_token: int, normalise: bool) -> tuple:
    """Of router logits [N, E]: the chosen experts' weights and ids, [N, TOP], as `ops.moe.mixture` has them."""
    (n, e), top = logits.shape, experts_per_token
    chosen, weights = triton_call(
        card, _route, [logits, live.astype(jnp.int8), jnp.asarray(first, jnp.int32).reshape(1)],
        [jax.ShapeDtypeStruct((n, top), jnp.int32), jax.ShapeDtypeStruct((n, top), jnp.float32)], (n,), num_warps=1,
        E=e, EP=power(e), LOCAL=local, TOP=top, TP=power(top), NORMALISE=normalise,
    )  # fmt: skip
    return weights, chosen


def aligned(card: Card, weights, chosen, experts: int, rows: int) -> list:
    """[order, owner, blocks] of `_align`."""
    c = chosen.size
    ep, chunk = power(experts), _CHUNK
    while 4 * chunk * ep > card.shared_memory and chunk > 16:
        chunk //= 2
    most, chunks = min(c, experts) + c // rows, -(-c // chunk)
    chosen, weights = chosen.reshape(-1), weights.reshape(-1)
    (counts,) = triton_call(
        card, _count, [chosen, weights], [jax.ShapeDtypeStruct((chunks, ep), jnp.int32)], (chunks,),
        num_warps=8, C=c, EP=ep, CHUNK=chunk,
    )  # fmt: skip
    if chunks > _COUNTED:
        block = min(ep, 16)
        (counts,) = triton_call(
            card, _before, [counts], [jax.ShapeDtypeStruct((chunks + 1, ep), jnp.int32)], (ep // block,), num_warps=4,
            EP=ep, CHUNKS=chunks, STEP=_COUNTED, BE=block,
        )  # fmt: skip
    return list(triton_call(
        card, _align, [chosen, weights, counts], [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (most * rows,
        most, 1)],
        (chunks,), num_warps=8, C=c, EP=ep, M=rows, CHUNK=chunk, CHUNKS=chunks, PP=power(min(chunks, _COUNTED)),
    ))  # fmt: skip
