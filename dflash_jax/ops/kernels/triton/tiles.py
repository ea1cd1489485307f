"""Shared parts of the Triton kernels: tiles of arrays and of quantized weights, tile sizes, checks."""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportArgumentType=false, reportAssignmentType=false

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array

from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.card import KIB, OLDEST_FP8, Card
from dflash_jax.ops.weights import CODES, QuantizedWeight


@triton.jit
def _float_of_e4m3(b, dtype: tl.constexpr):
    """Bytes of float8_e4m3fn, but NaN, in bfloat16 or float16, which have them exactly."""
    # Sign, exponent and mantissa in their places: the exponent's bias is then 120 or 8 too small.
    b = b.to(tl.int8, bitcast=True).to(tl.int32)
    if dtype == tl.bfloat16:
        w = ((b << 4) & 0x87F0).to(tl.uint16).to(tl.bfloat16, bitcast=True) * 2.0**120
    else:
        w = ((b << 7) & 0xBF80).to(tl.uint16).to(tl.float16, bitcast=True) * 2.0**8
    return w


@triton.jit
def _scales(scale, offset):
    """Loads scales in float32."""
    s = tl.load(scale + offset)
    if scale.dtype.element_ty == tl.uint8:
        s = _float_of_e4m3(s, tl.float16)
    return s.to(tl.float32)


@triton.jit
def spread(s, R: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr):
    """A number of each run for each input: [R, BLOCK // RUN] → [R, BLOCK]."""
    return tl.reshape(tl.broadcast_to(s[:, :, None], [R, BLOCK // RUN, RUN]), [R, BLOCK])


@triton.jit
def _unpacked(b, CODE: tl.constexpr, IS_SMALL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Numbers in four bits: bytes [R, BLOCK // 2] → [R, BLOCK].

    Both codes of a byte become two floats in one word, by products with two bits set, whose parts do not meet. The bits
    of e2m1 are the lowest of the exponent and the highest of the mantissa, so that 0.5 is subnormal as it is in e2m1;
    with ``IS_SMALL`` the numbers are left as they then are, 2**126 times too small in bfloat16, 2**14 times in others.
    """
    base: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    b = b.to(tl.uint32)
    if CODE == "int4":
        # 128 or 1,024 and the code, 0 to 15, in the lowest bits.
        bits = ((b * 0x1001) & 0x000F000F) | (0x43004300 if base == tl.bfloat16 else 0x64006400)
    elif base == tl.bfloat16:
        bits = ((b * 0x01001000) & 0x80008000) | ((b * 0x00040040) & 0x01C001C0)
    else:
        bits = ((b * 0x01001000) & 0x80008000) | ((b * 0x00200200) & 0x0E000E00)
    halves = tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))
    w = tl.reshape(halves, [R, BLOCK]).to(base, bitcast=True)
    if CODE == "int4":
        w -= 136.0 if base == tl.bfloat16 else 1032.0
    elif not IS_SMALL:
        w *= 2.0**126 if base == tl.bfloat16 else 2.0**14
    return w.to(dtype)


@triton.jit
def _numbers(
    values, row, inner, K: tl.constexpr, CODE: tl.constexpr, IS_SMALL: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Loads numbers of a quantized weight [R, BLOCK]; ``IS_SMALL`` as in `_unpacked`."""
    if CODE == "int4" or CODE == "e2m1":
        b = tl.load(values + row[:, None] * (K // 2) + inner // 2 + tl.arange(0, BLOCK // 2)[None, :])
        w = _unpacked(b, CODE, IS_SMALL, R, BLOCK, dtype)
    else:
        w = tl.load(values + row[:, None] * K + inner + tl.arange(0, BLOCK)[None, :])
        if CODE == "e4m3":
            w = _float_of_e4m3(w, tl.float16)
        # Through float32, which is exact: Hopper has no packed conversion from float8 to bfloat16.
        w = w.to(tl.float32).to(dtype)
    return w


@triton.jit
def tile(
    values, scale, more, row, inner, K: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Loads rows of a weight [R, BLOCK] from input ``inner`` on in ``dtype``, and what their products are scaled by.

    Runs that are shorter than the block are scaled in the tile; e2m1 times e4m3 is exact in bfloat16.
    """
    run: tl.constexpr = FORM[0]
    part: tl.constexpr = FORM[3]
    s = tl.full([1], 1.0, tl.float32)
    if run == 0:
        w = tl.load(values + row[:, None] * K + (inner + tl.arange(0, BLOCK))[None, :])
    else:
        of_scale: tl.constexpr = scale.dtype.element_ty
        # 2**126 times the largest scale would overflow: 2**118 comes with the scale, 2**8 after the sum.
        is_small: tl.constexpr = FORM[1] == "e2m1" and dtype == tl.bfloat16 and of_scale == tl.uint8 and run < BLOCK
        w = _numbers(values, row, inner, K, FORM[1], is_small, R, BLOCK, dtype)
        if run < BLOCK:
            offset = row[:, None] * (K // run) + inner // run + tl.arange(0, BLOCK // run)[None, :]
            if FORM[2]:
                w -= spread(tl.load(more + offset).to(tl.float32).to(dtype), R, BLOCK, run)
            if is_small:
                w *= spread(_float_of_e4m3(tl.load(scale + offset), dtype) * 2.0**118, R, BLOCK, run)
                s *= 2.0**8
            elif of_scale == tl.uint8 or of_scale == dtype:
                w *= spread(_scales(scale, offset).to(dtype), R, BLOCK, run)
            else:
                w = (w.to(tl.float32) * spread(_scales(scale, offset), R, BLOCK, run)).to(dtype)
        else:
            offset = row * (K // run) + inner // run
            if FORM[2]:
                w -= tl.load(more + offset).to(tl.float32).to(dtype)[:, None]
            s = _scales(scale, offset)
        if part == K:
            s *= tl.load(more + row)
        elif part != 0:
            s *= tl.load(more + row * (K // part) + inner // part)
    return w.to(dtype), s[None, :]


@triton.jit
def products(
    values, scale, more, row, a, inner, K: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows of a weight from input ``inner`` on, each times a [1, BLOCK]: [R, BLOCK].

    For quantized weights, the sums over each run of inputs times the run's scale: [R, BLOCK // run].
    """
    run: tl.constexpr = FORM[0]
    part: tl.constexpr = FORM[3]
    if run == 0:
        w = tl.load(values + row[:, None] * K + inner + tl.arange(0, BLOCK)[None, :]).to(tl.float32) * a
    else:
        is_small: tl.constexpr = FORM[1] == "e2m1" and not FORM[2]
        column = inner // run + tl.arange(0, BLOCK // run)[None, :]
        offset = row[:, None] * (K // run) + column
        w = _numbers(values, row, inner, K, FORM[1], is_small, R, BLOCK, tl.float32)
        if FORM[2]:
            w -= spread(tl.load(more + offset).to(tl.float32), R, BLOCK, run)
        s = _scales(scale, offset)
        if is_small:
            s *= 2.0**14
        if part == K:
            s *= tl.load(more + row)[:, None]
        elif part != 0:
            s *= tl.load(more + row[:, None] * (K // part) + column // (part // run))
        w = tl.sum(tl.reshape(w * a, [R, BLOCK // run, run]), axis=2) * s
    return w


@triton.jit
def log_decay_of(alpha, a_log, dt_bias):
    """The logarithm of the decay, -e^a_log · softplus(alpha + dt_bias)."""
    alpha = alpha.to(tl.float32) + dt_bias.to(tl.float32)
    small = tl.exp(-tl.abs(alpha))
    one = 1.0 + small
    # log1p(small): corrects for the rounding of 1 + small.
    log1p = tl.where(one == 1.0, small, small * tl.log(one) / tl.where(one == 1.0, 1.0, one - 1.0))
    return -tl.exp(a_log.to(tl.float32)) * (tl.maximum(alpha, 0.0) + log1p)


# Shorter runs than `LONG_RUN` of four bits are scaled in a tile, so that its rows need not be as short.
LONG_RUN = 64


class Parts(NamedTuple):
    """A weight as kernels take it.

    Attributes:
        values: Its values; bytes where they hold four bits, or a card has no float8.
        scale: Its scales, those of float8 as bytes; without scales, the values.
        more: Its zeros or its factors; without either, the values.
        form: Inputs of a scale (0: an array), the code of the bytes or "", whether there are zeros, and inputs of a
            factor (0: no factors).
    """

    values: Array
    scale: Array
    more: Array
    form: tuple[int, str, bool, int]

    @classmethod
    def of(cls, weight: Array | QuantizedWeight, card: Card) -> "Parts":
        """The parts of an array or of a quantized weight."""
        if not isinstance(weight, QuantizedWeight):
            return cls(weight, weight, weight, (0, "", False, 0))
        values, scale, code = weight.values, weight.scale, weight.code or ""
        if values.dtype == jnp.float8_e4m3fn and card.capability < OLDEST_FP8:
            values, code = _bytes(values), "e4m3"
        more = weight.zero if weight.factor is None else weight.factor
        scale = _bytes(scale) if scale.dtype == jnp.float8_e4m3fn else scale
        form = weight.run, code, weight.zero is not None, part_of(weight)
        return cls(values, scale, values if more is None else more, form)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Form and dtypes: weights of one kind share a kernel's code."""
        return (self.form, *(x.dtype for x in self[:3]))

    @property
    def bytes_of_input(self) -> float:
        """Bytes of an input's number in a tile, with its share of what scales the tile."""
        if not self.has_four_bits:
            return self.values.dtype.itemsize
        run, _, has_zeros, _ = self.form
        return 0.5 + (self.scale.dtype.itemsize + has_zeros) / run if self.is_scaled_in_tile else 0.5

    @property
    def is_scaled_in_tile(self) -> bool:
        """Whether a tile has several runs."""
        run, *_ = self.form
        return self.has_four_bits and run < LONG_RUN and not run & (run - 1)

    @property
    def has_four_bits(self) -> bool:
        """Whether a byte has two numbers."""
        return self.form[1] in CODES

    def step(self, inner: int, limit: int) -> int:
        """Inputs of a tile, at most ``limit``: of one run, or of several short ones of four bits."""
        run, _, _, part = self.form
        if self.is_scaled_in_tile:
            return max(run, divisor(part or inner, limit))
        return divisor(run or inner, limit)


def _bytes(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def run_of(weight: Array | QuantizedWeight) -> int:
    """Inputs of a scale of a weight; 0 for an array."""
    return weight.run if isinstance(weight, QuantizedWeight) else 0


def part_of(weight: Array | QuantizedWeight) -> int:
    """Inputs of a factor of a weight; 0 without factors."""
    factor = weight.factor if isinstance(weight, QuantizedWeight) else None
    return 0 if factor is None else weight.shape[-1] // factor.shape[-1]


def has_four_bits(weight: Array | QuantizedWeight) -> bool:
    """Whether a byte of a weight has two numbers."""
    return isinstance(weight, QuantizedWeight) and weight.code is not None


def why_not_weight(weight: Array | QuantizedWeight) -> str | None:
    """The reason why kernels do not support the form of a weight, or None."""
    if not isinstance(weight, QuantizedWeight) or weight.zero is None:
        return None
    if weight.factor is not None:
        return "a weight with zeros and factors: the kernel takes either"
    return "a weight in e2m1 with zeros: no format has it, nor the kernel" if weight.code == "e2m1" else None


def stages_within(stages: int, bytes_of_step: float, card: Card) -> int:
    """The stages of a loop: ``stages``, or as many as the card's shared memory has room for.

    A stage's operands take ``bytes_of_step``. On cards whose products read registers, one stage is kept there.
    """
    room = int((card.shared_memory - KIB) // bytes_of_step)
    return max(1, min(stages, room if card.reads_shared else room + 1))


def divisor(n: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides n."""
    return min(n & -n, limit)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def why_not_sizes(state: DeltaState) -> str | None:
    """The reason why the kernels of Gated DeltaNet do not support the sizes of an `ops.cache.DeltaState`, or None."""
    if state.conv_inputs.shape[1] > 4:
        return f"a convolution over {state.conv_inputs.shape[1] + 1} tokens: the kernel takes 5 at most"
    sizes = state.recurrent.shape[-2:]
    if any(not 16 <= n <= 128 or n & (n - 1) for n in sizes):
        return f"heads of {list(sizes)}: sizes must be powers of two from 16 to 128"
    return None
