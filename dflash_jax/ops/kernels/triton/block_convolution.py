"""Norm, coefficients and convolution of blocks of a DFlash2 drafter in Triton.

Each program takes some groups of channels and some whole blocks: it projects the blocks' inputs to these groups'
coefficients, as `linear` does, and then convolves the groups' channels.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import divisor, next_power_of_two, stages_within
from dflash_jax.ops.weights import Weight

# The most places of a block. By rows of a tile, which has whole blocks: bytes of a row of x in a step, warps, stages.
MAX_WIDTH, TILES = 64, {16: (512, 2, 6), 64: (256, 4, 4)}
# The least outputs of a product.
OUTPUTS = 16


@triton.jit
def _convolve(
    x, norm, projection, base, y, after,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr, TP: tl.constexpr,
    BG: tl.constexpr, BM: tl.constexpr, ROWS: tl.constexpr, BH: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BG groups of ROWS rows of x [R, H]: their channels of y [R, H], and ``after`` [R, TAPS, G] of them."""
    first_group = tl.program_id(0) * BG
    m = tl.arange(0, BM)
    row = tl.program_id(1) * ROWS + m
    is_live = (m < ROWS) & (row < R)
    # Columns of the product: sides times taps (TP, of which TAPS count) times groups.
    column = tl.arange(0, 2 * TP * BG)
    side, tap, group = column // (TP * BG), column // BG % TP, first_group + column % BG
    weight = projection + ((side * TAPS + tl.minimum(tap, TAPS - 1)) * G + tl.minimum(group, G - 1)).to(tl.int64) * H
    total = tl.zeros([BM, 2 * TP * BG], tl.float32)
    square = tl.zeros([BM], tl.float32)
    for inner in range(0, H, BH):
        k = inner + tl.arange(0, BH)
        a = tl.load(x + row[:, None] * H + k[None, :], mask=is_live[:, None], other=0.0)
        wide = a.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
        a = (wide * (OFFSET + tl.load(norm + k).to(tl.float32))[None, :]).to(a.dtype)
        w = tl.load(weight[:, None] + k[None, :])
        total += tl.dot(a, tl.trans(w), input_precision=PRECISION)
    inverse_rms = tl.rsqrt(square / H + EPS)
    total *= inverse_rms[:, None]
    is_after = is_live[:, None] & (side == 1)[None, :] & (tap < TAPS)[None, :] & (group < G)[None, :]
    tl.store(after + (row[:, None] * TAPS + tap[None, :]) * G + group[None, :], total, mask=is_after)

    own = tl.reshape(total, [BM, 2 * TP, BG])
    index = tl.arange(0, 2 * TP)[None, :, None]
    g = first_group + tl.arange(0, BG)
    channel = g[:, None] * (H // G) + tl.arange(0, H // G)[None, :]
    is_channel = (g < G)[:, None] & (channel < H)
    scale = OFFSET + tl.load(norm + channel, mask=is_channel, other=0.0).to(tl.float32)
    sums = tl.zeros([BM, BG, H // G], tl.float32)
    for o in tl.static_range(TAPS):
        is_inside = is_live & (m % W >= o)
        mask = is_inside[:, None, None] & is_channel[None, :, :]
        n = tl.load(x + (row - o)[:, None, None] * H + channel[None, :, :], mask=mask, other=0.0)
        rms = tl.sum(tl.where(m[None, :] == m[:, None] - o, inverse_rms[None, :], 0.0), axis=1)
        # Rounded, as the norm alone is.
        n = (n.to(tl.float32) * rms[:, None, None] * scale[None, :, :]).to(x.dtype.element_ty).to(tl.float32)
        coefficient = tl.sum(tl.where(index == o, own, 0.0), axis=1)[:, :, None]
        coefficient += tl.load(base + o * H + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :, :]
        sums += coefficient * n
    written = is_live[:, None, None] & is_channel[None, :, :]
    tl.store(y + row[:, None, None] * H + channel[None, :, :], sums.to(y.dtype.element_ty), mask=written)


def why_not(x: Float[Array, "*B W H"], projection: Weight) -> str | None:
    """The reason why the kernel does not support blocks x [..., W, H] and their projection, or None."""
    width, hidden = x.shape[-2:]
    if not isinstance(projection, jax.Array | jax.ShapeDtypeStruct):
        return "the projection is quantized or packed"
    if projection.dtype != x.dtype or x.dtype == jnp.float16:
        return f"a projection in {projection.dtype} of {x.dtype}: the kernel takes bfloat16 or float32 for both"
    if width > MAX_WIDTH:
        return f"blocks of {width}: the kernel takes {MAX_WIDTH} at most"
    group = hidden // projection.shape[-2]
    if group & (group - 1) or hidden % 16:
        return f"{hidden} channels in groups of {group}: a multiple of 16 and a power of two are needed"
    return None


def convolve_triton(
    card: Card,
    x: Float[Array, "*B W H"],
    norm: Float[Array, " H"],
    projection: Float[Array, "2 taps G H"],
    base: Float[Array, "taps H"],
    eps: float,
    offset: float,
) -> tuple[Float[Array, "*B W H"], Float[Array, "*B W taps G"]]:
    """`ops.block_convolution.block_convolution`.

    Args:
        card: The card that tiles are chosen for.
        x: Before the norm, [..., W, H].
        norm: Weight of RMSNorm, [H].
        projection: [2, taps, G, H].
        base: [taps, H].
        eps: Added to the mean of squares.
        offset: Added to the norm's weight.

    Returns:
        [..., W, H], and float32 [..., W, taps, G].
    """
    (width, hidden), (_, taps, groups, _) = x.shape[-2:], projection.shape
    rows, padded_taps = x.size // hidden, next_power_of_two(taps)
    tile = 16 if rows <= 16 else MAX_WIDTH
    step, warps, stages = TILES[tile]
    size, of_tile = x.dtype.itemsize, max(1, OUTPUTS // (2 * padded_taps))
    inner = divisor(hidden, step // size)
    whole = tile // width * width
    y, after = triton_call(
        card, _convolve, [x.reshape(rows, hidden), norm, projection.reshape(-1, hidden), base],
        [jax.ShapeDtypeStruct((rows, hidden), x.dtype), jax.ShapeDtypeStruct((rows, taps, groups), jnp.float32)],
        (-(-groups // of_tile), -(-rows // whole)), num_warps=warps,
        num_stages=stages_within(stages, inner * size * (tile + 2 * padded_taps * of_tile), card),
        R=rows, H=hidden, G=groups, W=width, TAPS=taps, TP=padded_taps, BG=of_tile, BM=tile, ROWS=whole, BH=inner,
        EPS=eps, OFFSET=offset, PRECISION="ieee" if x.dtype == jnp.float32 else "tf32",
    )  # fmt: skip
    return y.reshape(x.shape), after.reshape(*x.shape[:-1], taps, groups)
