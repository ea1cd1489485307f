"""What kernels share: tiles of weights in many bits or few, and sizes."""

import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import KIB, OLDEST_FP8, Card


@triton.jit
def tile(values, scale, row, inner, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, like: tl.constexpr):
    """(rows of a weight [rows, BLOCK] from ``inner`` on, as ``like``; their scales or 1)."""
    w = tl.load(values + row[:, None] * K + (inner + tl.arange(0, BLOCK))[None, :])
    s = tl.full([1], 1.0, tl.float32)
    if RUN != 0:
        s = tl.load(scale + row * (K // RUN) + inner // RUN).to(tl.float32)
        # By way of float32, which loses nothing: from float8 to bfloat16 there is no packed conversion on Hopper.
        w = w.to(tl.float32)
    return w.to(like), s[None, :]


@triton.jit
def products(values, scale, row, a, inner, K: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    """[R, BLOCK] of rows of a weight from ``inner`` on, each times a [1, BLOCK]; or, in few bits, their sums over each
    run of inputs times its scale, [R, BLOCK // RUN]."""
    w = tl.load(values + row[:, None] * K + inner + tl.arange(0, BLOCK)[None, :]).to(tl.float32) * a
    if RUN != 0:
        s = tl.load(scale + row[:, None] * (K // RUN) + inner // RUN + tl.arange(0, BLOCK // RUN)[None, :])
        w = tl.sum(tl.reshape(w, [R, BLOCK // RUN, RUN]), axis=2) * s.to(tl.float32)
    return w


def parts(weight) -> tuple:
    """Of an array or a `ops.weights.QuantizedWeight`: (values, scale or a stand-in, inputs of a scale or 0)."""
    if not hasattr(weight, "scale"):
        return weight, jnp.zeros(1, weight.dtype), 0
    return weight.values, weight.scale, weight.values.shape[-1] // weight.scale.shape[-1]


def reads(weight, card: Card) -> bool:
    """Whether kernels on a card take a weight of this kind."""
    return parts(weight)[0].dtype != jnp.float8_e4m3fn or card.capability >= OLDEST_FP8


def stages_within(stages: int, bytes_of_step: int, card: Card) -> int:
    """How many steps of a loop have their loads in flight: ``stages``, or as many as the card's shared memory has room
    for, a step's operands of ``bytes_of_step`` each. Where products read registers, one step's are there."""
    room = (card.shared_memory - KIB) // bytes_of_step
    return max(1, min(stages, room if card.reads_shared else room + 1))


def divisor(n: int, most: int) -> int:
    """The largest power of two up to ``most`` that divides n."""
    return min(n & -n, most)


def power(n: int) -> int:
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()
