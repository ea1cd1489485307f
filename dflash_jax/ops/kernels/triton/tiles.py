"""Shared parts of the Triton kernels: tiles of arrays and of quantized weights, tile sizes, checks."""

import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array

from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.card import KIB, OLDEST_FP8, Card
from dflash_jax.ops.weights import QuantizedWeight


@triton.jit
def tile(values, scale, row, inner, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Loads rows of a weight [rows, BLOCK] from input ``inner`` on in ``dtype``, and their scales or 1."""
    w = tl.load(values + row[:, None] * K + (inner + tl.arange(0, BLOCK))[None, :])
    s = tl.full([1], 1.0, tl.float32)
    if RUN != 0:
        s = tl.load(scale + row * (K // RUN) + inner // RUN).to(tl.float32)
        # Through float32, which is exact: Hopper has no packed conversion from float8 to bfloat16.
        w = w.to(tl.float32)
    return w.to(dtype), s[None, :]


@triton.jit
def products(values, scale, row, a, inner, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """Rows of a weight from input ``inner`` on, each times a [1, BLOCK]: [R, BLOCK].

    For quantized weights, the sums over each run of inputs times the run's scale: [R, BLOCK // RUN].
    """
    w = tl.load(values + row[:, None] * K + inner + tl.arange(0, BLOCK)[None, :]).to(tl.float32) * a
    if RUN != 0:
        s = tl.load(scale + row[:, None] * (K // RUN) + inner // RUN + tl.arange(0, BLOCK // RUN)[None, :])
        w = tl.sum(tl.reshape(w, [R, BLOCK // RUN, RUN]), axis=2) * s.to(tl.float32)
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


def parts(weight: Array | QuantizedWeight) -> tuple[Array, Array, int]:
    """Values, scale (or a placeholder) and inputs of a scale (or 0) of an array or `ops.weights.QuantizedWeight`."""
    if not isinstance(weight, QuantizedWeight):
        return weight, jnp.zeros(1, weight.dtype), 0
    return weight.values, weight.scale, weight.values.shape[-1] // weight.scale.shape[-1]


def why_not_weight(weight: Array | QuantizedWeight, card: Card) -> str | None:
    """The reason why kernels on a card do not support the form of a weight, or None."""
    if isinstance(weight, QuantizedWeight) and (weight.code or weight.zero is not None or weight.factor is not None):
        return "weights in four bits"
    if parts(weight)[0].dtype == jnp.float8_e4m3fn and card.capability < OLDEST_FP8:
        return f"sm_{card.capability} does not read float8"
    return None


def stages_within(stages: int, bytes_of_step: int, card: Card) -> int:
    """The stages of a loop: ``stages``, or as many as the card's shared memory has room for.

    A stage's operands take ``bytes_of_step``. On cards whose products read registers, one stage is kept there.
    """
    room = (card.shared_memory - KIB) // bytes_of_step
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
