"""Linear maps of few tokens in Triton: several of one input in one kernel, with the norm before them, or with SwiGLU or
a residual behind them.

One token has a kernel without matrices, two to 16 one whose products have 16 rows. Each program has some outputs of one
weight and all of their inputs: nothing is left to sum for another kernel.
"""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import divisor, parts, power, products, reads, stages_within, tile

# A kernel takes at most so many weights, and so many rows.
MOST, ROWS = 3, 16
# Of one token, outputs of a program; of weights in few bits or of many inputs; warps.
OUTPUTS, LONG, WARPS = (4, 8), 8192, 4
# Of more tokens, {outputs of a program: (bytes of a row of x a step, warps, stages, those for few bits)}: some
# 5 MB of weights are on their way. Each program reads all of x, from the L2 cache: it has as many outputs as leave so
# many programs, and with weights in few bits.
TILES, PROGRAMS = {64: (256, 4, 4, 6), 32: (512, 2, 4, 8), 16: (512, 2, 6, 8)}, (128, 64)
# The norm comes with so many outputs, for every program takes it anew; and at least one for so many inputs, which the
# programs hand on in parts.
MOST_NORMED, INPUTS_OF_OUTPUT = 1024, 32


@triton.jit
def _one_token(
    x, norm, rest, normed, weight, scale, y, N, row,
    RUN: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr, KEPT: tl.constexpr, GATED: tl.constexpr,
    REST: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Outputs ``row`` of y [N] = W · norm(x), x [H]. What the norm divides by comes last."""
    at = tl.minimum(row, N - 1).to(tl.int64)
    total = tl.zeros([BN], tl.float32)
    up = tl.zeros([BN], tl.float32)
    # Summed at the end: a sum over threads would have the next loads wait.
    squares = tl.zeros([BH], tl.float32)
    for inner in tl.static_range(0, H, BH):
        k = inner + tl.arange(0, BH)
        a = tl.load(x + k).to(tl.float32)
        if NORMED:
            squares += a * a
            a *= OFFSET + tl.load(norm + k).to(tl.float32)
        made = products(weight, scale, at, a[None, :], inner, H, RUN, BH, BN)
        if GATED:
            up += tl.sum(products(weight, scale, N + at, a[None, :], inner, H, RUN, BH, BN), axis=1)
        total += tl.sum(made, axis=1)
    if NORMED:
        divided = tl.rsqrt(tl.sum(squares, axis=0) / H + EPS)
        total *= divided
        up *= divided
        if KEPT:
            c = tl.program_id(0) * BC + tl.arange(0, BC)
            a = tl.load(x + c, mask=c < H, other=0.0).to(tl.float32) * divided
            a *= OFFSET + tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
            tl.store(normed + c, a.to(normed.dtype.element_ty), mask=c < H)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    if REST:
        total += tl.load(rest + at).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)


@triton.jit
def _few_tokens(
    x, norm, rest, normed, weight, scale, y, N, row,
    RUN: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr, KEPT: tl.constexpr, GATED: tl.constexpr,
    REST: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_one_token` of R tokens, x [R, H]."""
    at = tl.minimum(row, N - 1).to(tl.int64)
    m = tl.arange(0, BM)[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM], tl.float32)
    for inner in range(0, H, BH):
        k = inner + tl.arange(0, BH)[None, :]
        a = tl.load(x + m * H + k, mask=m < R, other=0.0)
        if NORMED:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            a = (wide * (OFFSET + tl.load(norm + k).to(tl.float32))).to(a.dtype)
        w, s = tile(weight, scale, at, inner, H, RUN, BH, x.dtype.element_ty)
        total += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
        if GATED:
            w, s = tile(weight, scale, N + at, inner, H, RUN, BH, x.dtype.element_ty)
            up += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
    if NORMED:
        divided = tl.rsqrt(square / H + EPS)[:, None]
        total *= divided
        up *= divided
        if KEPT:
            c = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
            a = tl.load(x + m * H + c, mask=(m < R) & (c < H), other=0.0).to(tl.float32) * divided
            a *= OFFSET + tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
            tl.store(normed + m * H + c, a.to(normed.dtype.element_ty), mask=(m < R) & (c < H))
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    live = (m < R) & (row < N)[None, :]
    if REST:
        total += tl.load(rest + m * N + row[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(y + m * N + row[None, :], total.to(y.dtype.element_ty), mask=live)


@triton.jit
def _own(block, w0, s0, y0, w1, s1, y1, w2, s2, y2, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr,
         BN: tl.constexpr):  # fmt: skip
    """Of a program with outputs of three weights of one kind: (weight, scale, result, how many outputs that has, its
    own [BN]); past the end where they do not fill it."""
    b0: tl.constexpr = (N0 + BN - 1) // BN
    b1: tl.constexpr = b0 + (N1 + BN - 1) // BN
    weight, scale, y, outputs = w0, s0, y0, N0
    if block >= b1:
        block -= b1
        weight, scale, y, outputs = w2, s2, y2, N2
    elif block >= b0:
        block -= b0
        weight, scale, y, outputs = w1, s1, y1, N1
    return weight, scale, y, outputs, block * BN + tl.arange(0, BN)


@triton.jit
def _project_one(
    x, norm, rest, w0, s0, w1, s1, w2, s2, w3, s3, y0, y1, y2, y3, normed,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, RUN: tl.constexpr, BH: tl.constexpr,
    RUN3: tl.constexpr, BH3: tl.constexpr, ALIKE: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr,
    KEPT: tl.constexpr, GATED: tl.constexpr, REST: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y [N] of each weight, for one token. The first ALIKE programs are of weights of one kind, the others of another
    one."""
    block = tl.program_id(0)
    if N3 == 0:
        weight, scale, y, outputs, row = _own(block, w0, s0, y0, w1, s1, y1, w2, s2, y2, N0, N1, N2, BN)
        _one_token(
            x, norm, rest, normed, weight, scale, y, outputs, row, RUN, BH, H, NORMED, KEPT, GATED, REST, EPS, OFFSET,
            BN, BC,
        )  # fmt: skip
    elif block < ALIKE:
        weight, scale, y, outputs, row = _own(block, w0, s0, y0, w1, s1, y1, w2, s2, y2, N0, N1, N2, BN)
        _one_token(
            x, norm, rest, normed, weight, scale, y, outputs, row, RUN, BH, H, NORMED, KEPT, GATED, REST, EPS, OFFSET,
            BN, BC,
        )  # fmt: skip
    else:
        row = (block - ALIKE) * BN + tl.arange(0, BN)
        _one_token(
            x, norm, rest, normed, w3, s3, y3, N3, row, RUN3, BH3, H, NORMED, KEPT, GATED, REST, EPS, OFFSET, BN,
            BC,
        )  # fmt: skip


@triton.jit
def _project(
    x, norm, rest, w0, s0, w1, s1, w2, s2, w3, s3, y0, y1, y2, y3, normed,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, RUN: tl.constexpr, BH: tl.constexpr,
    RUN3: tl.constexpr, BH3: tl.constexpr, ALIKE: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr,
    KEPT: tl.constexpr, GATED: tl.constexpr, REST: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`_project_one` for R tokens, y [R, N]."""
    block = tl.program_id(0)
    if N3 == 0:
        weight, scale, y, outputs, row = _own(block, w0, s0, y0, w1, s1, y1, w2, s2, y2, N0, N1, N2, BN)
        _few_tokens(
            x, norm, rest, normed, weight, scale, y, outputs, row, RUN, BH, H, NORMED, KEPT, GATED, REST, EPS, OFFSET,
            BN, BC, R, BM, PRECISION,
        )  # fmt: skip
    elif block < ALIKE:
        weight, scale, y, outputs, row = _own(block, w0, s0, y0, w1, s1, y1, w2, s2, y2, N0, N1, N2, BN)
        _few_tokens(
            x, norm, rest, normed, weight, scale, y, outputs, row, RUN, BH, H, NORMED, KEPT, GATED, REST, EPS, OFFSET,
            BN, BC, R, BM, PRECISION,
        )  # fmt: skip
    else:
        row = (block - ALIKE) * BN + tl.arange(0, BN)
        _few_tokens(
            x, norm, rest, normed, w3, s3, y3, N3, row, RUN3, BH3, H, NORMED, KEPT, GATED, REST, EPS, OFFSET, BN,
            BC, R, BM, PRECISION,
        )  # fmt: skip


def why_not(rows: int, inner: int, weights, card: Card) -> str | None:
    """Why the kernels do not take ``rows`` rows of ``inner`` inputs and these weights; None where they do."""
    runs = [parts(w)[2] for w in weights]
    if any(hasattr(w, "panels") for w in weights):
        return "the weights are packed for a CPU"
    if not all(reads(w, card) for w in weights):
        return f"sm_{card.capability} does not read float8"
    if rows > ROWS:
        return f"{rows} rows: it takes {ROWS} at most"
    # Sums over a run's inputs need a power of two of them.
    if rows == 1 and (inner % 64 or any(run & (run - 1) for run in runs)):
        return f"{inner} inputs in runs of {runs}: a row needs a multiple of 64, in runs of a power of two"
    if rows > 1 and (inner % 16 or any(run % 16 for run in runs)):
        return f"{inner} inputs in runs of {runs}: both must be multiples of 16"
    return None


def norms(dtype, rows: int, inner: int, weights) -> bool:
    """Whether the norm is better taken with these products than before them. Of several rows the products take x times
    the norm's weight, and the division comes last: float16 might overflow before it."""
    outputs = sum(math.prod(w.shape[:-1]) for w in weights)
    return rows == 1 or (dtype != jnp.float16 and outputs <= MOST_NORMED and inner <= outputs * INPUTS_OF_OUTPUT)


def project_triton(
    x, weights, norm=None, eps: float = 0.0, offset: float = 0.0, kept: bool = False, gated: bool = False, rest=None,
    kind=None, *, card: Card,
) -> tuple:  # fmt: skip
    """As `ops.linear.linear`: x [R, H] by ``weights`` [O, H] (``gated``: [2 O, H]) → [R, O] each; the norm by
    ``norm`` [H] or None, the residual ``rest`` [R, O] or None."""
    kinds = {}
    for i, w in enumerate(weights):
        kinds.setdefault(_kind(w), []).append(i)
    groups = [alike[first : first + MOST] for alike in kinds.values() for first in range(0, len(alike), MOST)]
    # A kernel takes some weights of one kind, and one of another.
    if len(kinds) == 2 and [len(group) for group in groups[1:]] == [1]:
        groups = [groups[0] + groups[1]]
    found, normed = {}, []
    for group in groups:
        keeps, taken = kept and not normed, [weights[i] for i in group]
        *made, last = _together(x, taken, norm, rest, kind or x.dtype, eps, offset, keeps, gated, card)
        found |= dict(zip(group, made, strict=True))
        normed += [last] * keeps
    return (*(found[i] for i in range(len(weights))), *normed)


def _kind(weight) -> tuple:
    values, scale, run = parts(weight)
    return values.dtype, scale.dtype, run


def _together(x, weights, norm, rest, kind, eps: float, offset: float, kept: bool, gated: bool, card: Card) -> list:
    """The results of at most `MOST` weights of one kind and, behind them, one of another; and the normed x or a
    stand-in."""
    rows, hidden = x.shape
    alike = sum(_kind(w) == _kind(weights[0]) for w in weights)
    others, missing = len(weights) - alike, MOST - alike
    held = [*map(parts, [*weights[:alike], *weights[:1] * missing, weights[-1]])]
    sizes = [w.shape[0] >> gated for w in weights]
    sizes[alike:alike] = [0] * missing
    sizes += [0] * (1 - others)
    (*_, run), (*_, other_run) = held[0], held[-1]
    if rows == 1:
        kernel, block, warps, stages = _project_one, OUTPUTS[run > 0 or hidden > LONG], WARPS, [1, 1]
        steps, more = [max(r, divisor(hidden, 2048)) for r in (run, other_run)], {}
    else:
        block = next((n for n in TILES if sum(sizes) >= n * PROGRAMS[run > 0]), min(TILES))
        kernel, (step, warps, *stages) = _project, TILES[block]
        steps = [divisor(r or hidden, step // x.dtype.itemsize) for r in (run, other_run)]
        bytes_of_step = max(
            n * (ROWS * x.dtype.itemsize + (1 + gated) * block * w.dtype.itemsize)
            for n, (w, *_) in zip(steps, (held[0], held[-1]), strict=True)
        )
        stages = [stages_within(n, bytes_of_step, card) for n in stages]
        more = {"R": rows, "BM": ROWS, "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32"}
    programs = [-(-n // block) for n in sizes]
    more |= {f"N{i}": n for i, n in enumerate(sizes)}
    args = [x, x if norm is None else norm, x if rest is None else rest, *(part for w in held for part in w[:2])]
    out = [jax.ShapeDtypeStruct((rows, n), kind) for n in sizes]
    out.append(jax.ShapeDtypeStruct(x.shape if kept else (0,), x.dtype))
    made = triton_call(
        card, kernel, args, out, (sum(programs),), num_warps=warps, num_stages=stages[run > 0], RUN=run, BH=steps[0],
        RUN3=other_run, BH3=steps[1], ALIKE=sum(programs[:MOST]), H=hidden, NORMED=norm is not None, KEPT=kept,
        GATED=gated, REST=rest is not None, EPS=eps, OFFSET=offset, BN=block, BC=power(-(-hidden // sum(programs))),
        **more,
    )  # fmt: skip
    return [*made[:alike], *made[MOST : MOST + others], made[-1]]
