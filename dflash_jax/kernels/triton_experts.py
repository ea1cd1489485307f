"""Grouped expert products in Triton: choices are sorted by expert into blocks of rows, and every block reads its
expert's weights once. A row's arithmetic does not depend on the rows beside it.

Letters: C choices (tokens times experts per token), M rows of a block, S blocks' slots (blocks times M).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.kernels.launch import triton_call

# (outputs of a program, warps, stages) with few rows a block and with 64.
GATE_UP, DOWN = ((64, 4, 4), (64, 4, 3)), ((64, 4, 4), (64, 4, 3))
# For more choices than this part of the experts: with fewer hardly two are of one expert, and the gathered form is
# faster. For as many as a chunk of prefill has: `_align` compares each with all.
LEAST_SHARE, MOST_CHOICES = 4, 8192
# Choices that one program of `_align` sorts.
_CHUNK = 64


@triton.jit
def _align(
    chosen, weights, order, owner, blocks,
    C: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """order [S]: the choice in each slot, C for none; owner [blocks]: each block's expert; blocks [1]."""
    p = tl.program_id(0)
    ids = tl.arange(0, EP)
    before = tl.zeros([EP], tl.int32)
    count = tl.zeros([EP], tl.int32)
    for start in range(0, C, CHUNK):
        at = start + tl.arange(0, CHUNK)
        live = tl.load(weights + at, mask=at < C, other=0.0) != 0.0
        e = tl.load(chosen + at, mask=live, other=EP)
        n = tl.sum((e[:, None] == ids[None, :]).to(tl.int32), axis=0)
        count += n
        before += tl.where(start < p * CHUNK, n, 0)
    needed = (count + M - 1) // M
    upto = tl.cumsum(needed, axis=0)
    first = upto - needed
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


@triton.jit
def _tile(values, scale, base, row, inner, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, like: tl.constexpr):
    """(rows of a weight [rows, BLOCK] from ``inner`` on, as ``like``; their scales or 1)."""
    w = tl.load(values + (base + row)[:, None] * K + (inner + tl.arange(0, BLOCK))[None, :])
    if RUN == 0:
        s = tl.full([1], 1.0, tl.float32)
    else:
        s = tl.load(scale + (base + row) * (K // RUN) + inner // RUN).to(tl.float32)
    return w.to(like), s[None, :]


@triton.jit
def _gate_up(
    x, values, scale, order, owner, blocks, h,
    C: tl.constexpr, TOP: tl.constexpr, F: tl.constexpr, H: tl.constexpr, M: tl.constexpr, RUN: tl.constexpr,
    BF: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h [S, F] = silu(gate · x) · (up · x)."""
    block = tl.program_id(0)
    if block < tl.load(blocks):
        e = tl.load(owner + block).to(tl.int64)
        slots = block * M + tl.arange(0, M)
        choice = tl.load(order + slots)
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        gate = tl.zeros([M, BF], tl.float32)
        up = tl.zeros([M, BF], tl.float32)
        for inner in range(0, H, BH):
            token = (choice // TOP)[:, None].to(tl.int64) * H + inner + tl.arange(0, BH)[None, :]
            a = tl.load(x + token, mask=(choice < C)[:, None], other=0.0)
            w, s = _tile(values, scale, e * 2 * F, f, inner, H, RUN, BH, x.dtype.element_ty)
            gate += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
            w, s = _tile(values, scale, e * 2 * F + F, f, inner, H, RUN, BH, x.dtype.element_ty)
            up += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
        made = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(h + slots[:, None].to(tl.int64) * F + f[None, :], made.to(h.dtype.element_ty))


@triton.jit
def _down(
    h, values, scale, order, owner, blocks, y,
    C: tl.constexpr, F: tl.constexpr, H: tl.constexpr, M: tl.constexpr, RUN: tl.constexpr,
    BN: tl.constexpr, BF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [C, H] = down · h, each slot's where its choice is."""
    block = tl.program_id(0)
    if block < tl.load(blocks):
        e = tl.load(owner + block).to(tl.int64)
        slots = block * M + tl.arange(0, M)
        choice = tl.load(order + slots)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros([M, BN], tl.float32)
        for inner in range(0, F, BF):
            a = tl.load(h + slots[:, None].to(tl.int64) * F + inner + tl.arange(0, BF)[None, :])
            w, s = _tile(values, scale, e * H, n, inner, F, RUN, BF, h.dtype.element_ty)
            total += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
        place = choice[:, None].to(tl.int64) * H + n[None, :]
        tl.store(y + place, total.to(y.dtype.element_ty), mask=(choice < C)[:, None])


def _parts(weight) -> tuple:
    """Of an array or a `models.weights.Scaled`: (values, scale or a stand-in, inputs of a scale or 0)."""
    if not hasattr(weight, "scale"):
        return weight, jnp.zeros(1, weight.dtype), 0
    return weight.values, weight.scale, weight.values.shape[-1] // weight.scale.shape[-1]


def _divisor(n: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides n."""
    return min(n & -n, most)


def fits(choices: int, gate_up, down) -> bool:
    """Whether the kernel is for so many choices, and products of 16 and more can be taken of these shapes, a scale's
    run at a time."""
    if not gate_up.shape[0] // LEAST_SHARE < choices <= MOST_CHOICES:
        return False
    inner = [w.shape[-1] // (w.scale.shape[-1] if hasattr(w, "scale") else 1) for w in (gate_up, down)]
    return all(n % 16 == 0 for n in (*inner, gate_up.shape[-2], down.shape[-2]))


def experts_triton(x, weights, chosen, gate_up, down):
    """As `models.moe.experts`. A choice of weight 0 is not computed; products are summed in float32, and what lies
    between them and each choice's share are rounded to x's dtype."""
    (tokens, hidden), top = x.shape, chosen.shape[1]
    e, _, f, _ = gate_up.shape
    c = tokens * top
    rows = 16 if c <= 2 * e else 32 if c <= 16 * e else 64
    most = min(c, e) + c // rows
    precision = "ieee" if x.dtype == jnp.float32 else "tf32"
    order, owner, blocks = triton_call(
        _align, [chosen.reshape(-1), weights.reshape(-1)],
        [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (most * rows, most, 1)], (-(-c // _CHUNK),),
        num_warps=8, C=c, E=e, EP=1 << (e - 1).bit_length(), M=rows, CHUNK=_CHUNK,
    )  # fmt: skip
    inner, large = 256 // x.dtype.itemsize, rows >= 64
    values, scale, run = _parts(gate_up)
    outputs, warps, stages = GATE_UP[large]
    block_f, block_h = _divisor(f, outputs), _divisor(run or hidden, inner)
    (h,) = triton_call(
        _gate_up, [x, values, scale, order, owner, blocks],
        [jax.ShapeDtypeStruct((most * rows, f), x.dtype)], (most, f // block_f), num_warps=warps, num_stages=stages,
        C=c, TOP=top, F=f, H=hidden, M=rows, RUN=run, BF=block_f, BH=block_h, PRECISION=precision,
    )  # fmt: skip
    values, scale, run = _parts(down)
    outputs, warps, stages = DOWN[large]
    block_n, block_f = _divisor(hidden, outputs), _divisor(run or f, inner)
    (y,) = triton_call(
        _down, [h, values, scale, order, owner, blocks],
        [jax.ShapeDtypeStruct((c, hidden), x.dtype)], (most, hidden // block_n), num_warps=warps, num_stages=stages,
        C=c, F=f, H=hidden, M=rows, RUN=run, BN=block_n, BF=block_f, PRECISION=precision,
    )  # fmt: skip
    y = y.reshape(tokens, top, hidden).astype(jnp.float32)
    return jnp.sum(jnp.where(weights[..., None] != 0, y * weights[..., None], 0.0), axis=1).astype(x.dtype)
