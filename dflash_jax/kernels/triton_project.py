"""Linear maps of few tokens in Triton: several of one input in one kernel, with the norm before them."""

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.kernels.launch import triton_call
from dflash_jax.kernels.triton_tiles import divisor, parts, tile

# Rows that one product takes, at most so many weights in a kernel.
ROWS, MOST = 16, 3
# Outputs of a program, warps, stages.
OUTPUTS, WARPS, STAGES = 32, 4, 4


@triton.jit
def _project(
    x, norm, w0, s0, w1, s1, w2, s2, y0, y1, y2,
    N: tl.constexpr, H: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, NORMED: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, RUN: tl.constexpr, M: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [N, outputs] = W · norm(x), x [N, H]. What a row's norm divides by comes last: it is summed on the way."""
    block = tl.program_id(0)
    weight, scale, y, size = w0, s0, y0, N0
    if block >= (N0 + N1) // BN:
        block -= (N0 + N1) // BN
        weight, scale, y, size = w2, s2, y2, N2
    elif block >= N0 // BN:
        block -= N0 // BN
        weight, scale, y, size = w1, s1, y1, N1
    out = block * BN + tl.arange(0, BN)
    row = tl.arange(0, M)
    total = tl.zeros([M, BN], tl.float32)
    square = tl.zeros([M], tl.float32)
    for inner in range(0, H, BH):
        k = inner + tl.arange(0, BH)
        a = tl.load(x + row[:, None] * H + k[None, :], mask=row[:, None] < N, other=0.0)
        if NORMED:
            full = a.to(tl.float32)
            square += tl.sum(full * full, axis=1)
            a = (full * (OFFSET + tl.load(norm + k).to(tl.float32))[None, :]).to(a.dtype)
        w, s = tile(weight, scale, out.to(tl.int64), inner, H, RUN, BH, x.dtype.element_ty)
        total += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
    if NORMED:
        total *= tl.rsqrt(square / H + EPS)[:, None]
    tl.store(y + row[:, None] * size + out[None, :], total.to(y.dtype.element_ty), mask=row[:, None] < N)


def fits(rows: int, weights) -> bool:
    """Whether the kernel takes so many rows and such weights [*out, in]."""
    return rows <= ROWS and all(
        math.prod(w.shape[:-1]) % 16 == 0 and (parts(w)[2] or w.shape[-1]) % 16 == 0 for w in weights
    )


def project_triton(x, norm, weights, eps: float, offset: float) -> tuple:
    """As `models.parts.projections`: x [*, H], norm [H] or None."""
    x2, found, kinds = x.reshape(-1, x.shape[-1]), {}, {}
    for i, w in enumerate(weights):
        values, scale, run = parts(w)
        kinds.setdefault((values.dtype, scale.dtype, run), []).append(i)
    # A kernel's weights are of one kind.
    for kind in kinds.values():
        for at in range(0, len(kind), MOST):
            taken = kind[at : at + MOST]
            made = _together(x2, norm, [weights[i] for i in taken], eps, offset)
            found |= dict(zip(taken, made, strict=True))
    return tuple(found[i].reshape(*x.shape[:-1], *w.shape[:-1]) for i, w in enumerate(weights))


def _together(x, norm, weights, eps: float, offset: float) -> tuple:
    (n, hidden), held = x.shape, [parts(w) for w in weights]
    sizes = [math.prod(w.shape[:-1]) for w in weights]
    block, run = divisor(math.gcd(*sizes), OUTPUTS), held[0][2]
    spare = MOST - len(weights)
    args = [x, x if norm is None else norm, *(part for w in held for part in w[:2]), *held[0][:2] * spare]
    out = [jax.ShapeDtypeStruct((n, size), x.dtype) for size in (*sizes, *[0] * spare)]
    n0, n1, n2 = *sizes, *[0] * spare
    return triton_call(
        _project, args, out, (sum(sizes) // block,), num_warps=WARPS, num_stages=STAGES, N=n, H=hidden,
        N0=n0, N1=n1, N2=n2, NORMED=norm is not None, EPS=eps, OFFSET=offset, RUN=run, M=ROWS, BN=block,
        BH=divisor(run or hidden, 512 // x.dtype.itemsize), PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
    )[: len(weights)]  # fmt: skip
