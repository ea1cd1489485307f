"""Linear maps of one token in Triton: several of one input in one kernel, with the norm before them."""

import math

import jax
import triton
import triton.language as tl

from dflash_jax.kernels.launch import triton_call
from dflash_jax.kernels.triton_tiles import divisor, parts, products

# A kernel takes at most so many weights.
MOST = 3
# Outputs of a program, and with weights in few bits; warps.
OUTPUTS, WARPS = (4, 8), 4


@triton.jit
def _project(
    x, norm, w0, s0, w1, s1, w2, s2, y0, y1, y2,
    H: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, NORMED: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """y [outputs] = W · norm(x), x [H]. What the norm divides by comes last."""
    block = tl.program_id(0)
    weight, scale, y = w0, s0, y0
    if block >= (N0 + N1) // BN:
        block -= (N0 + N1) // BN
        weight, scale, y = w2, s2, y2
    elif block >= N0 // BN:
        block -= N0 // BN
        weight, scale, y = w1, s1, y1
    row = block * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    square = 0.0
    for inner in tl.static_range(0, H, BH):
        k = inner + tl.arange(0, BH)
        a = tl.load(x + k).to(tl.float32)
        if NORMED:
            square += tl.sum(a * a, axis=0)
            a *= OFFSET + tl.load(norm + k).to(tl.float32)
        total += tl.sum(products(weight, scale, row.to(tl.int64), a[None, :], inner, H, RUN, BH, BN), axis=1)
    if NORMED:
        total *= tl.rsqrt(square / H + EPS)
    tl.store(y + row, total.to(y.dtype.element_ty))


def fits(rows: int, weights) -> bool:
    """Whether the kernel takes so many rows and such weights [*out, in]: sums over a run's inputs need a power of two
    of them, and some hundred inputs a step."""
    runs = [parts(w)[2] for w in weights]
    return rows == 1 and weights[0].shape[-1] % 64 == 0 and not any(run & (run - 1) for run in runs)


def project_triton(x, norm, weights, eps: float, offset: float) -> tuple:
    """As `models.parts.projections` of one token: x [*, H], norm [H] or None."""
    found, kinds = {}, {}
    for i, w in enumerate(weights):
        values, scale, run = parts(w)
        kinds.setdefault((values.dtype, scale.dtype, run), []).append(i)
    # A kernel's weights are of one kind.
    for kind in kinds.values():
        for at in range(0, len(kind), MOST):
            taken = kind[at : at + MOST]
            made = _together(x.reshape(-1), norm, [weights[i] for i in taken], eps, offset)
            found |= dict(zip(taken, made, strict=True))
    return tuple(found[i].reshape(*x.shape[:-1], *w.shape[:-1]) for i, w in enumerate(weights))


def _together(x, norm, weights, eps: float, offset: float) -> tuple:
    held, sizes = [parts(w) for w in weights], [math.prod(w.shape[:-1]) for w in weights]
    run, spare = held[0][2], MOST - len(weights)
    block = divisor(math.gcd(*sizes), OUTPUTS[run > 0])
    args = [x, x if norm is None else norm, *(part for w in held for part in w[:2]), *held[0][:2] * spare]
    out = [jax.ShapeDtypeStruct((size,), x.dtype) for size in (*sizes, *[0] * spare)]
    n0, n1, _ = *sizes, *[0] * spare
    return triton_call(
        _project, args, out, (sum(sizes) // block,), num_warps=WARPS, H=x.shape[0], N0=n0, N1=n1,
        NORMED=norm is not None, EPS=eps, OFFSET=offset, RUN=run, BN=block, BH=max(run, divisor(x.shape[0], 2048)),
    )[: len(weights)]  # fmt: skip
