"""Linear maps of few tokens in Triton.

One kernel applies several weights to one input, with the norm before them and SwiGLU or a residual after them. One
token has a kernel without matrix products; two to 16 tokens have one whose products have 16 rows (with weights of four
bits up to 32), or, where it would have too few programs (a router's), the first one for each token. Each program
computes some outputs of one weight from all inputs, so that no second kernel has to sum partial results.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.dependent import wait_for_inputs
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import (
    Parts,
    divisor,
    has_four_bits,
    next_power_of_two,
    part_of,
    products,
    run_of,
    spread,
    stages_within,
    tile,
    why_not_weight,
)
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, Weight

# The most weights of one kind in a kernel; rows of its products; and the most rows with a weight of four bits, of which
# XLA would write an unpacked copy.
MAX_WEIGHTS, MAX_ROWS, MAX_FOUR_BITS_ROWS = 3, 16, 32
# For one token: outputs of a program (second: of quantized weights, or of more than MANY_INPUTS inputs), and warps.
OUTPUTS, MANY_INPUTS, WARPS = (4, 8), 8192, 4
# For more tokens, by outputs of a program: bytes of a row of x in a step, warps, stages, and stages for quantized
# weights, so that an H200 has about 5 MB of weights in flight. Each program reads all of x from the L2 cache, and
# therefore has as many outputs as leave PROGRAMS programs (second: with quantized weights) for 132 multiprocessors, and
# for fewer in proportion. With more, half as many outputs would be twice as many reads of x, while the multiprocessor
# with most outputs had as many: programs stay, and where each has a multiprocessor to itself, it has more steps in
# flight in proportion.
TILES, PROGRAMS = {64: (256, 4, 4, 6), 32: (512, 2, 4, 8), 16: (512, 2, 6, 8)}, (128, 64)
# The same for products in SUMS sums, of SUMS lines of a row of x: each sum has its own warp and part of the inputs. In
# one sum a warp's products of 4,096 inputs are a chain of 256, each of which waits for the one before it.
SUMS, TILES_OF_SUMS = 4, {32: (256, 4, 3, 4), 16: (256, 4, 4, 4)}
# With at most BY_ROW_OUTPUTS outputs, each of several tokens has programs of its own: the products would have a program
# for 16 outputs (a router's 257 outputs of 2,048 inputs, on an H200: 16.5 µs for 4 tokens, 2.7 µs for one with its
# kernel). The other tokens read the weights from the L2 cache, at most BY_ROW_READ of them (16 tokens of that router).
BY_ROW_OUTPUTS, BY_ROW_READ = 1024, 10**7
# The norm is fused for up to MAX_NORMED_OUTPUTS outputs, since every program computes it again, and for at most
# MAX_INPUTS_PER_OUTPUT inputs per output, since each program also stores its part of the normed input.
MAX_NORMED_OUTPUTS, MAX_INPUTS_PER_OUTPUT = 1024, 32


@triton.jit
def _inverse_rms(squares, head, mask, HEADS: tl.constexpr, EPS: tl.constexpr):
    """One over the root mean squares of heads, from the sums of the parts of each; HEADS as in `_project_one`."""
    total = tl.load(squares + head * HEADS[1], mask=mask, other=0.0)
    for part in tl.static_range(1, HEADS[1]):
        total += tl.load(squares + head * HEADS[1] + part, mask=mask, other=0.0)
    return tl.rsqrt(total / HEADS[0] + EPS)


@triton.jit
def _one_token(
    x, norm, residual, normed, weight, scale, more, y, N, row,
    FORM: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr, RETURN_NORMED: tl.constexpr,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr,
    BC: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Outputs ``row`` of y [N] = W · norm(x), x [H], of a token. The division of the norm comes last.

    With HEADS, ``norm`` has the squares of the heads, which are divided first.
    """
    token = tl.program_id(1)
    x += token * H
    clipped_row = tl.minimum(row, N - 1).to(tl.int64)
    total = tl.zeros([BN], tl.float32)
    up = tl.zeros([BN], tl.float32)
    # The sum over threads comes at the end: in the loop, the next loads would wait.
    squares = tl.zeros([BH], tl.float32)
    for inner in tl.static_range(0, H, BH):
        k = inner + tl.arange(0, BH)
        a = tl.load(x + k).to(tl.float32)
        if NORMED:
            squares += a * a
            a *= OFFSET + tl.load(norm + k).to(tl.float32)
        if HEADS[0] > 0:
            head = (token * H + inner) // HEADS[0] + tl.arange(0, BH // HEADS[0])
            a *= tl.reshape(spread(_inverse_rms(norm, head, head >= 0, HEADS, EPS)[None, :], 1, BH, HEADS[0]), [BH])
        terms = products(weight, scale, more, clipped_row, a[None, :], inner, H, FORM, BN, BH)
        if SWIGLU:
            terms_up = products(weight, scale, more, N + clipped_row, a[None, :], inner, H, FORM, BN, BH)
            up += tl.sum(terms_up, axis=1)
        total += tl.sum(terms, axis=1)
    if NORMED:
        inverse_rms = tl.rsqrt(tl.sum(squares, axis=0) / H + EPS)
        total *= inverse_rms
        up *= inverse_rms
        if RETURN_NORMED:
            c = tl.program_id(0) * BC + tl.arange(0, BC)
            a = tl.load(x + c, mask=c < H, other=0.0).to(tl.float32) * inverse_rms
            a *= OFFSET + tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
            tl.store(normed + token * H + c, a.to(normed.dtype.element_ty), mask=c < H)
    if SWIGLU:
        total = total / (1.0 + tl.exp(-total)) * up
    if RESIDUAL:
        total += tl.load(residual + token * N + clipped_row).to(tl.float32)
    tl.store(y + token * N + row, total.to(y.dtype.element_ty), mask=row < N)


@triton.jit
def _product(
    a, w, s, BM: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    """The product of a [SUMS BM, BH] and wᵀ, w [SUMS BN, BH], scaled by s: [BM, BN], or of sums [SUMS, BM, BN]."""
    if SUMS == 1:
        product = tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
    else:
        w = tl.permute(tl.reshape(w, [SUMS, BN, BH]), 0, 2, 1)
        s = tl.reshape(tl.broadcast_to(s, [1, SUMS * BN]), [SUMS, 1, BN])
        product = tl.dot(tl.reshape(a, [SUMS, BM, BH]), w, input_precision=PRECISION) * s
    return product


@triton.jit
def _few_tokens(
    x, norm, residual, normed, weight, scale, more, y, N, row,
    FORM: tl.constexpr, BH: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr, RETURN_NORMED: tl.constexpr,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, BN: tl.constexpr,
    BC: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """`_one_token` of R tokens, x [R, H].

    Each of SUMS sums has a part of the inputs: rows of x and of the weight are SUMS lines. No product waits for those
    of another sum.
    """
    length: tl.constexpr = H // SUMS
    clipped_row = tl.minimum(row, N - 1).to(tl.int64)
    m = tl.arange(0, BM)[:, None]
    line, in_x = m, m < R
    if SUMS > 1:
        line = tl.arange(0, SUMS * BM)[:, None]
        in_x = line % BM < R
        line = line % BM * SUMS + line // BM
        clipped_row = tl.reshape(clipped_row[None, :] * SUMS + tl.arange(0, SUMS)[:, None], [SUMS * BN])
    total = tl.zeros([BM, BN] if SUMS == 1 else [SUMS, BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    square = tl.zeros([BM], tl.float32)
    if HEADS[0] > 0:
        count: tl.constexpr = length // HEADS[0]
        head = tl.arange(0, HEADS[2])[None, :]
        inverses = _inverse_rms(norm, line * count + head, in_x & (head < count), HEADS, EPS)
    for inner in range(0, length, BH):
        k = inner + tl.arange(0, BH)[None, :]
        a = tl.load(x + line * length + k, mask=in_x, other=0.0)
        if NORMED:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, axis=1)
            a = (wide * (OFFSET + tl.load(norm + k).to(tl.float32))).to(a.dtype)
        w, s = tile(weight, scale, more, clipped_row, inner, length, FORM, SUMS * BN, BH, x.dtype.element_ty)
        product = _product(a, w, s, BM, BN, BH, PRECISION, SUMS)
        if HEADS[0] > 0:
            inverse = tl.sum(tl.where(head == inner // HEADS[0], inverses, 0.0), axis=1)
            product *= inverse[:, None] if SUMS == 1 else tl.reshape(inverse, [SUMS, BM, 1])
        total += product
        if SWIGLU:
            w, s = tile(weight, scale, more, N + clipped_row, inner, H, FORM, BN, BH, x.dtype.element_ty)
            up += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
    if SUMS > 1:
        total = tl.sum(total, axis=0)
    if NORMED:
        inverse_rms = tl.rsqrt(square / H + EPS)[:, None]
        total *= inverse_rms
        up *= inverse_rms
        if RETURN_NORMED:
            c = tl.program_id(0) * BC + tl.arange(0, BC)[None, :]
            a = tl.load(x + m * H + c, mask=(m < R) & (c < H), other=0.0).to(tl.float32) * inverse_rms
            a *= OFFSET + tl.load(norm + c, mask=c < H, other=0.0).to(tl.float32)
            tl.store(normed + m * H + c, a.to(normed.dtype.element_ty), mask=(m < R) & (c < H))
    if SWIGLU:
        total = total / (1.0 + tl.exp(-total)) * up
    live = (m < R) & (row < N)[None, :]
    if RESIDUAL:
        total += tl.load(residual + m * N + row[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(y + m * N + row[None, :], total.to(y.dtype.element_ty), mask=live)


@triton.jit
def _select_weight(
    block, w0, s0, m0, y0, w1, s1, m1, y1, w2, s2, m2, y2,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Selects a program's part of three weights of one kind: a weight's `Parts`, result, outputs, and its rows [BN].

    Rows past the last output are padding.
    """
    b0: tl.constexpr = (N0 + BN - 1) // BN
    b1: tl.constexpr = b0 + (N1 + BN - 1) // BN
    weight, scale, more, y, outputs = w0, s0, m0, y0, N0
    if block >= b1:
        block -= b1
        weight, scale, more, y, outputs = w2, s2, m2, y2, N2
    elif block >= b0:
        block -= b0
        weight, scale, more, y, outputs = w1, s1, m1, y1, N1
    return weight, scale, more, y, outputs, block * BN + tl.arange(0, BN)


@triton.jit
def _project_one(
    x, norm, residual, w0, s0, m0, w1, s1, m1, w2, s2, m2, w3, s3, m3, y0, y1, y2, y3, normed,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, FORM: tl.constexpr, BH: tl.constexpr,
    FORM3: tl.constexpr, BH3: tl.constexpr, ALIKE: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr,
    RETURN_NORMED: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes y [N] of each weight for each token, the second axis of the programs.

    HEADS: inputs of a head (0: no heads), parts of its squares, and a power of two that is at least a sum's heads. The
    first ALIKE programs compute weights of one kind, the others a weight of another kind.
    """
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    if N3 == 0:
        weight, scale, more, y, outputs, row = _select_weight(
            block, w0, s0, m0, y0, w1, s1, m1, y1, w2, s2, m2, y2, N0, N1, N2, BN
        )
        _one_token(
            x, norm, residual, normed, weight, scale, more, y, outputs, row, FORM, BH, H, NORMED, RETURN_NORMED, SWIGLU,
            RESIDUAL, EPS, OFFSET, BN, BC, HEADS,
        )  # fmt: skip
    elif block < ALIKE:
        weight, scale, more, y, outputs, row = _select_weight(
            block, w0, s0, m0, y0, w1, s1, m1, y1, w2, s2, m2, y2, N0, N1, N2, BN
        )
        _one_token(
            x, norm, residual, normed, weight, scale, more, y, outputs, row, FORM, BH, H, NORMED, RETURN_NORMED, SWIGLU,
            RESIDUAL, EPS, OFFSET, BN, BC, HEADS,
        )  # fmt: skip
    else:
        row = (block - ALIKE) * BN + tl.arange(0, BN)
        _one_token(
            x, norm, residual, normed, w3, s3, m3, y3, N3, row, FORM3, BH3, H, NORMED, RETURN_NORMED, SWIGLU, RESIDUAL,
            EPS, OFFSET, BN, BC, HEADS,
        )  # fmt: skip


@triton.jit
def _project(
    x, norm, residual, w0, s0, m0, w1, s1, m1, w2, s2, m2, w3, s3, m3, y0, y1, y2, y3, normed,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, FORM: tl.constexpr, BH: tl.constexpr,
    FORM3: tl.constexpr, BH3: tl.constexpr, ALIKE: tl.constexpr, H: tl.constexpr, NORMED: tl.constexpr,
    RETURN_NORMED: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    SUMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_project_one` for R tokens in each program: y [R, N]."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    if N3 == 0:
        weight, scale, more, y, outputs, row = _select_weight(
            block, w0, s0, m0, y0, w1, s1, m1, y1, w2, s2, m2, y2, N0, N1, N2, BN
        )
        _few_tokens(
            x, norm, residual, normed, weight, scale, more, y, outputs, row, FORM, BH, H, NORMED, RETURN_NORMED, SWIGLU,
            RESIDUAL, EPS, OFFSET, BN, BC, HEADS, R, BM, PRECISION, SUMS,
        )  # fmt: skip
    elif block < ALIKE:
        weight, scale, more, y, outputs, row = _select_weight(
            block, w0, s0, m0, y0, w1, s1, m1, y1, w2, s2, m2, y2, N0, N1, N2, BN
        )
        _few_tokens(
            x, norm, residual, normed, weight, scale, more, y, outputs, row, FORM, BH, H, NORMED, RETURN_NORMED, SWIGLU,
            RESIDUAL, EPS, OFFSET, BN, BC, HEADS, R, BM, PRECISION, SUMS,
        )  # fmt: skip
    else:
        row = (block - ALIKE) * BN + tl.arange(0, BN)
        _few_tokens(
            x, norm, residual, normed, w3, s3, m3, y3, N3, row, FORM3, BH3, H, NORMED, RETURN_NORMED, SWIGLU, RESIDUAL,
            EPS, OFFSET, BN, BC, HEADS, R, BM, PRECISION, SUMS,
        )  # fmt: skip


def why_not(rows: int, inner: int, weights: Sequence[Weight]) -> str | None:
    """The reason why the kernels do not support ``rows`` rows of ``inner`` inputs and these weights, or None."""
    unpacked = [w for w in weights if not isinstance(w, PackedWeight)]
    if len(unpacked) < len(weights):
        return "the weights are packed for a CPU"
    runs = [run_of(w) for w in unpacked]
    if reason := next(filter(None, map(why_not_weight, unpacked)), None):
        return reason
    limit = MAX_FOUR_BITS_ROWS if any(has_four_bits(w) for w in unpacked) else MAX_ROWS
    if rows > limit:
        return f"{rows} rows: the kernel takes {limit} at most"
    if rows == 1 and not _one_takes(inner, runs):
        return f"{inner} inputs in runs of {runs}: a row needs a multiple of 64, in runs of a power of two"
    if rows > 1 and (inner % 16 or any(run % 16 for run in runs)):
        return f"{inner} inputs in runs of {runs}: both must be multiples of 16"
    return None


def _one_takes(inner: int, runs: Sequence[int]) -> bool:
    """Whether `_project_one` supports ``inner`` inputs; `products` sums over runs whose length is a power of two."""
    return inner % 64 == 0 and not any(run & (run - 1) for run in runs)


def _is_by_row(rows: int, inner: int, outputs: int, runs: Sequence[int]) -> bool:
    """Whether each row has programs of its own."""
    is_small = outputs <= BY_ROW_OUTPUTS and rows * outputs * inner <= BY_ROW_READ
    return rows == 1 or (is_small and _one_takes(inner, runs))


def _block(outputs: int, run: int, card: Card) -> int:
    """Outputs of a program for several rows."""
    least = min(PROGRAMS[run > 0], card.scaled(PROGRAMS[run > 0]))
    return next((n for n in TILES if outputs >= n * least), min(TILES))


def why_not_sums(
    rows: int, inner: int, weights: Sequence[Array | QuantizedWeight], head: int, card: Card
) -> str | None:
    """The reason why a product has one sum, not `SUMS`, or None; ``head``: inputs of a head, or 0."""
    if len(weights) > 1:
        return f"{len(weights)} weights: one is in sums"
    (weight,) = weights
    outputs, run, part = math.prod(weight.shape) // inner, run_of(weight), part_of(weight)
    if _is_by_row(rows, inner, outputs, [run]):
        return "each row has programs of its own"
    if _block(outputs, run, card) not in TILES_OF_SUMS:
        return f"{outputs} outputs: a warp has several, whose products do not wait for one another"
    if any(n and inner % (n * SUMS) for n in (16, run, part, head)):
        return f"{inner} inputs are not {SUMS} parts of whole runs, factors and heads of {(run, part, head)}"
    return None


def divides_heads(head: int, weights: Sequence[Array | QuantizedWeight]) -> bool:
    """Whether the kernels divide heads of ``head`` inputs: a step of a product is within a head."""
    return not head & (head - 1) and not any(has_four_bits(w) and run_of(w) > head for w in weights)


def fuses_norm(dtype: DTypeLike, rows: int, inner: int, weights: Sequence[Array | QuantizedWeight]) -> bool:
    """Whether the norm is fused into these products, where that is faster.

    For several rows the products take x times the norm's weight, and the division comes last: float16 might overflow
    before it.
    """
    outputs = sum(math.prod(w.shape[:-1]) for w in weights)
    few_enough = outputs <= MAX_NORMED_OUTPUTS and inner <= outputs * MAX_INPUTS_PER_OUTPUT
    return rows == 1 or (dtype != jnp.float16 and few_enough)


def project_triton(
    x: Float[Array, "R H"],
    weights: Sequence[Array | QuantizedWeight],
    norm: Float[Array, " H"] | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    return_normed: bool = False,
    swiglu: bool = False,
    residual: Float[Array, "R O"] | None = None,
    dtype: DTypeLike | None = None,
    squares: Float[Array, "R N P"] | None = None,
    *,
    card: Card,
    in_sums: bool = False,
) -> tuple[Array, ...]:
    """`ops.linear.linear` of matrices.

    Args:
        x: [R, H].
        weights: [O, H] each, or [2 O, H] with ``swiglu``; arrays or `ops.weights.QuantizedWeight`.
        norm: Weight of RMSNorm, [H]; None: no norm.
        eps: Added to the mean of squares.
        offset: Added to the norm's weight.
        return_normed: Whether the normed x follows the results.
        swiglu: The first half of a weight's outputs, through silu, multiplies the second half.
        residual: [R, O], added to each result; None: nothing.
        dtype: Dtype of the results; None: x's.
        squares: As in `ops.linear.DeferredDivision`, where `divides_heads`; without ``norm``.
        card: The card that tiles are chosen for.
        in_sums: Whether products of few outputs are computed in `SUMS` sums where they can be.

    Returns:
        [R, O] for each weight, then the normed x [R, H] if ``return_normed``.
    """
    kinds, weight_parts = {}, [Parts.of(w, card) for w in weights]
    for i, w in enumerate(weight_parts):
        kinds.setdefault(w.kind, []).append(i)
    groups = [alike[i : i + MAX_WEIGHTS] for alike in kinds.values() for i in range(0, len(alike), MAX_WEIGHTS)]
    # One kernel takes several weights of one kind and one of another.
    if len(kinds) == 2 and [len(group) for group in groups[1:]] == [1]:
        groups = [groups[0] + groups[1]]
    results, normed = {}, []
    for group in groups:
        return_here, group_weights = return_normed and not normed, [weight_parts[i] for i in group]
        *outputs, last = _launch_group(
            x, group_weights, norm, residual, dtype or x.dtype, eps, offset, return_here, swiglu, squares, card, in_sums
        )
        results |= dict(zip(group, outputs, strict=True))
        normed += [last] * return_here
    return (*(results[i] for i in range(len(weights))), *normed)


def _launch_group(
    x: Array,
    weights: Sequence[Parts],
    norm: Array | None,
    residual: Array | None,
    dtype: DTypeLike,
    eps: float,
    offset: float,
    return_normed: bool,
    swiglu: bool,
    squares: Array | None,
    card: Card,
    in_sums: bool,
) -> list[Array]:
    """Results of up to `MAX_WEIGHTS` weights of one kind, then one of another; then the normed x or a placeholder."""
    rows, hidden = x.shape
    alike = sum(w.kind == weights[0].kind for w in weights)
    others, missing = len(weights) - alike, MAX_WEIGHTS - alike
    sizes = [w.values.shape[0] >> swiglu for w in weights]
    sizes[alike:alike] = [0] * missing
    sizes += [0] * (1 - others)
    both = weights[0], weights[-1]
    (run, *_), (other_run, *_) = (w.form for w in both)
    by_row = _is_by_row(rows, hidden, sum(sizes), (run, other_run))
    head, parts = (0, 0) if squares is None else (hidden // squares.shape[1], squares.shape[2])
    sums = 1
    if by_row:
        kernel, block, warps, stages = _project_one, OUTPUTS[run > 0 or hidden > MANY_INPUTS], WARPS, [1, 1]
        steps, meta = [max(r, divisor(hidden, 2048)) for r in (run, other_run)], {}
    else:
        block, kernel = _block(sum(sizes), run, card), _project
        few, tile_rows = both[0].has_four_bits, -(-rows // MAX_ROWS) * MAX_ROWS
        sums, (step, warps, *stages) = (SUMS, TILES_OF_SUMS[block]) if in_sums else (1, TILES[block])
        if sum(-(-n // block) for n in sizes) <= card.multiprocessors:
            stages = [max(n, 1 + card.scaled(n - 1)) for n in stages]
        inner = min(step // x.dtype.itemsize, head or hidden)
        # Of a weight beside one of four bits, about as many bytes.
        limits = inner, inner // (int(2 * both[1].bytes_of_input) if few else 1)
        steps = [w.step(hidden // sums, limit) for w, limit in zip(both, limits, strict=True)]
        bytes_of_step = max(
            sums * n * (tile_rows * x.dtype.itemsize + (1 + swiglu) * block * w.bytes_of_input)
            for n, w in zip(steps, both, strict=True)
        )
        # A step of four bits has half the bytes, and more work.
        stages = [stages_within(n << few, bytes_of_step, card) for n in stages]
        warps = min(4, block // 8) * (tile_rows // MAX_ROWS) if few and sums == 1 else warps
        meta = {"R": rows, "BM": tile_rows, "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32", "SUMS": sums}
    head_counts = next_power_of_two(hidden // sums // head) if head else 0
    programs = [-(-n // block) for n in sizes]
    meta |= {f"N{i}": n for i, n in enumerate(sizes)}
    of_norm = squares if norm is None else norm
    args = [x, x if of_norm is None else of_norm, x if residual is None else residual]
    args += [x for w in (*weights[:alike], *weights[:1] * missing, weights[-1]) for x in w[:3]]
    out = [jax.ShapeDtypeStruct((rows, n), dtype) for n in sizes]
    out.append(jax.ShapeDtypeStruct(x.shape if return_normed else (0,), x.dtype))
    outputs = triton_call(
        card, kernel, args, out, (sum(programs), rows if by_row else 1), num_warps=warps, num_stages=stages[run > 0],
        FORM=both[0].form, BH=steps[0], FORM3=both[1].form, BH3=steps[1], ALIKE=sum(programs[:MAX_WEIGHTS]), H=hidden,
        NORMED=norm is not None,
        RETURN_NORMED=return_normed, SWIGLU=swiglu, RESIDUAL=residual is not None, EPS=eps, OFFSET=offset, BN=block,
        BC=next_power_of_two(-(-hidden // sum(programs))), HEADS=(head, parts, head_counts), **meta,
    )  # fmt: skip
    return [*outputs[:alike], *outputs[MAX_WEIGHTS : MAX_WEIGHTS + others], outputs[-1]]
