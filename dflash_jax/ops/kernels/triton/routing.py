"""Routing in Triton: the experts of each token, and choices sorted by expert into blocks of rows.

Letters: N tokens, C choices (tokens times experts per token), M rows of a block, S block rows (blocks times M).
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.dependent import wait_for_inputs
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import next_power_of_two

# Choices that one program sorts (fewer where the card's shared memory has no room for chunk × experts int32), and the
# most chunks whose counts each program adds up by itself.
CHUNK, MAX_COUNTED_CHUNKS = 64, 128


@triton.jit
def _route(
    logits, live, first, chosen, weights,
    E: tl.constexpr, EP: tl.constexpr, LOCAL: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr,
    NORMALISE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One token's ``chosen`` and ``weights`` [N, TOP]; weight 0 for idle tokens and for experts of other devices."""
    wait_for_inputs(DEPENDENT)
    n = tl.program_id(0)
    e = tl.arange(0, EP)
    k = tl.arange(0, TP)
    x = tl.load(logits + n * E + e, mask=e < E, other=float("-inf"))
    is_live = tl.load(live + n) != 0
    first_local = tl.load(first)
    maximum = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - maximum), axis=0)
    chosen_total = 0.0
    ids = tl.zeros([TP], tl.int32)
    probability = tl.zeros([TP], tl.float32)
    for j in tl.static_range(TOP):
        best = tl.max(x, axis=0)
        # The lowest index of equal maxima.
        index = tl.min(tl.where(x == best, e, EP), axis=0)
        value = tl.exp(best - maximum) / total
        chosen_total += value
        ids = tl.where(k == j, index, ids)
        probability = tl.where(k == j, value, probability)
        x = tl.where(e == index, float("-inf"), x)
    if NORMALISE:
        probability = probability / chosen_total
    ids -= first_local
    is_local = (ids >= 0) & (ids < LOCAL) & is_live
    tl.store(chosen + n * TOP + k, tl.where(is_local, ids, 0), mask=k < TOP)
    tl.store(weights + n * TOP + k, tl.where(is_local, probability, 0.0), mask=k < TOP)


@triton.jit
def _count(chosen, weights, counts, C: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr):
    """Writes counts [chunks, EP]: how many choices of each chunk are of each expert."""
    p = tl.program_id(0)
    choice = p * CHUNK + tl.arange(0, CHUNK)
    live = tl.load(weights + choice, mask=choice < C, other=0.0) != 0.0
    e = tl.load(chosen + choice, mask=live, other=EP)
    ids = tl.arange(0, EP)
    tl.store(counts + p * EP + ids, tl.sum((e[:, None] == ids[None, :]).to(tl.int32), axis=0))


@triton.jit
def _before(counts, before, EP: tl.constexpr, CHUNKS: tl.constexpr, STEP: tl.constexpr, BE: tl.constexpr):
    """Writes before [chunks + 1, EP]: the sums of ``counts`` over earlier chunks; in the last row, over all chunks."""
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
    chosen, weights, counts, order, block_expert, blocks,
    C: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    """Writes order [S], the choice in each block row (C for none), block_expert [blocks], and the number of blocks [1].

    ``counts``: the result of `_count` for up to PP chunks, or of `_before` for more.
    """
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
    choice = p * CHUNK + tl.arange(0, CHUNK)
    live = tl.load(weights + choice, mask=choice < C, other=0.0) != 0.0
    e = tl.load(chosen + choice, mask=live, other=EP)
    is_expert = (e[:, None] == ids[None, :]).to(tl.int32)
    rank = tl.cumsum(is_expert, axis=0) - is_expert + before[None, :] + first[None, :] * M
    block_row = tl.sum(rank * is_expert, axis=1)
    tl.store(order + block_row, choice, mask=live)
    if p == 0:
        tl.store(blocks, tl.sum(needed, axis=0))
        for i in range(tl.max(needed, axis=0)):
            tl.store(block_expert + first + i, ids, mask=i < needed)
        for i in range(M):
            empty = count + i
            tl.store(order + first * M + empty, tl.full([EP], C, tl.int32), mask=empty < needed * M)


def route_triton(
    card: Card,
    logits: Float[Array, "N E"],
    live: Bool[Array, " N"],
    first: Array | int,
    local: int,
    experts_per_token: int,
    normalise: bool,
) -> tuple[Float[Array, "N top"], Int[Array, "N top"]]:
    """The routing of `ops.moe.mixture`.

    Args:
        card: The card that tiles are chosen for.
        logits: Router logits, [N, E].
        live: bool [N], tokens that count.
        first: The id of the first local expert.
        local: How many experts are local.
        experts_per_token: TOP.
        normalise: Whether the weights of a token's experts sum to 1.

    Returns:
        Weights float32 and local ids int32 of the chosen experts, both [N, TOP].
    """
    (n, e), top = logits.shape, experts_per_token
    chosen, weights = triton_call(
        card, _route, [logits, live.astype(jnp.int8), jnp.asarray(first, jnp.int32).reshape(1)],
        [jax.ShapeDtypeStruct((n, top), jnp.int32), jax.ShapeDtypeStruct((n, top), jnp.float32)], (n,), num_warps=1,
        E=e, EP=next_power_of_two(e), LOCAL=local, TOP=top, TP=next_power_of_two(top), NORMALISE=normalise,
    )  # fmt: skip
    return weights, chosen


def aligned(
    card: Card, weights: Float[Array, "N top"], chosen: Int[Array, "N top"], experts: int, rows: int
) -> list[Array]:
    """Sorts choices by expert into blocks of ``rows`` rows.

    Args:
        card: The card that tiles are chosen for.
        weights: float32 [N, TOP]; choices of weight 0 are dropped.
        chosen: Expert ids, int32 [N, TOP].
        experts: How many experts there are.
        rows: Rows of a block.

    Returns:
        The arrays that `_align` writes: order, block_expert and the number of blocks.
    """
    c = chosen.size
    ep, chunk = next_power_of_two(experts), CHUNK
    while 4 * chunk * ep > card.shared_memory and chunk > 16:
        chunk //= 2
    blocks, chunks = min(c, experts) + c // rows, -(-c // chunk)
    chosen, weights = chosen.reshape(-1), weights.reshape(-1)
    (counts,) = triton_call(
        card, _count, [chosen, weights], [jax.ShapeDtypeStruct((chunks, ep), jnp.int32)], (chunks,),
        num_warps=8, C=c, EP=ep, CHUNK=chunk,
    )  # fmt: skip
    if chunks > MAX_COUNTED_CHUNKS:
        block = min(ep, 16)
        (counts,) = triton_call(
            card, _before, [counts], [jax.ShapeDtypeStruct((chunks + 1, ep), jnp.int32)], (ep // block,), num_warps=4,
            EP=ep, CHUNKS=chunks, STEP=MAX_COUNTED_CHUNKS, BE=block,
        )  # fmt: skip
    out = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (blocks * rows, blocks, 1)]
    return list(triton_call(
        card, _align, [chosen, weights, counts], out, (chunks,), num_warps=8, C=c, EP=ep, M=rows, CHUNK=chunk,
        CHUNKS=chunks, PP=next_power_of_two(min(chunks, MAX_COUNTED_CHUNKS)),
    ))  # fmt: skip
