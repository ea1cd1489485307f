"""Products of weights in NVFP4 with activations in NVFP4, by tensor cores that take both as they are stored.

Outputs are the rows of a product and tokens its columns: data-centre Blackwell takes FP4 in products of 128 rows, and
of any multiple of 16 columns. A plain linear map is that of a shared expert of all tokens, beside no other experts.

Letters: as in `experts`.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.ops.card import OLDEST_FP4, Card
from dflash_jax.ops.kernels.triton.experts import block_plan, joined
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.routing import aligned
from dflash_jax.ops.kernels.triton.tiles import Parts, divisor, next_power_of_two, stages_within
from dflash_jax.ops.weights import GROUPS, QuantizedWeight, Weight, activations_in_nvfp4

RUN = GROUPS["nvfp4"]
# Outputs of a program, inputs of a step, and stages.
OUTPUTS, INPUTS, STAGES = 128, 256, 4
# The most tokens of a block, and on cards whose sums are in registers; with more than the last one there are 8 warps.
MAX_ROWS, FEW_ROWS = (128, 64), 32
# The most choices of an expert on average that a block of so many tokens is for.
ROWS = (2, 16), (16, 32), (64, 64)
# The programs that a map of few outputs is given by splitting its inputs, and the most tokens that have split ones: the
# partial sums of more take longer than the product.
PROGRAMS, MAX_SPLIT_TOKENS = 128, 1024


@triton.jit
def _operand(codes, scale, row, live, inner, K: tl.constexpr, BLOCK: tl.constexpr):
    """Loads the codes [rows, BLOCK / 2] and the scales [rows, BLOCK / 16] of rows from input ``inner`` on.

    Rows that are not ``live`` are zero.
    """
    row, live = row[:, None].to(tl.int64), live[:, None]
    c = tl.load(codes + row * (K // 2) + inner // 2 + tl.arange(0, BLOCK // 2)[None, :], mask=live, other=0)
    s = tl.load(scale + row * (K // 16) + inner // 16 + tl.arange(0, BLOCK // 16)[None, :], mask=live, other=0)
    return c, s.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _gate_up(
    x, x_scale, x_factor, values, scale, factor, shared, shared_scale, shared_factor, chosen, weights, order,
    block_expert, blocks, h,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Computes h [C + N, F] = silu(gate · x) · (up · x), in the order of `_down`'s result."""
    block = tl.program_id(0)
    is_used, e, token, place = block_plan(
        chosen, weights, order, block_expert, blocks, block, C, N, TOP, TP, M, SB, SORTED
    )
    if is_used:
        weight, weight_scale, weight_factor = values, scale, factor
        if block < SB:
            weight, weight_scale, weight_factor = shared, shared_scale, shared_factor
        f = tl.program_id(1) * BN + tl.arange(0, BN)
        inside, live = f < F, place < C + N
        row = e * 2 * F + f
        gate = tl.zeros([BN, M], tl.float32)
        up = tl.zeros([BN, M], tl.float32)
        for inner in range(0, H, BK):
            a, a_scale = _operand(x, x_scale, token, live, inner, H, BK)
            w, s = _operand(weight, weight_scale, row, inside, inner, H, BK)
            gate = tl.dot_scaled(w, s, "e2m1", tl.trans(a), a_scale, "e2m1", gate)
            w, s = _operand(weight, weight_scale, row + F, inside, inner, H, BK)
            up = tl.dot_scaled(w, s, "e2m1", tl.trans(a), a_scale, "e2m1", up)
        of_token = tl.load(x_factor + token, mask=live, other=0.0)[None, :]
        gate *= tl.load(weight_factor + row, mask=inside, other=0.0)[:, None] * of_token
        up *= tl.load(weight_factor + row + F, mask=inside, other=0.0)[:, None] * of_token
        activated = tl.trans(gate / (1.0 + tl.exp(-gate)) * up)
        offset = place[:, None].to(tl.int64) * F + f[None, :]
        tl.store(h + offset, activated.to(h.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _down(
    h, h_scale, h_factor, values, scale, factor, shared, shared_scale, shared_factor, chosen, weights, order,
    block_expert, blocks, y,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Computes y [F / SPLIT, C + N, H] = down · h: the choices' rows, then the shared expert's.

    Each of SPLIT inputs has its part of the sum; each of PART inputs has a factor of the weight.
    """
    block = tl.program_id(0)
    is_used, e, _, place = block_plan(chosen, weights, order, block_expert, blocks, block, C, N, TOP, TP, M, SB, SORTED)
    if is_used:
        weight, weight_scale, weight_factor = values, scale, factor
        if block < SB:
            weight, weight_scale, weight_factor = shared, shared_scale, shared_factor
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        inside, live = n < H, place < C + N
        row = e * H + n
        total = tl.zeros([BN, M], tl.float32)
        start = tl.program_id(2) * SPLIT
        for inner in range(start, start + SPLIT, BK):
            a, a_scale = _operand(h, h_scale, place, live, inner, F, BK)
            w, s = _operand(weight, weight_scale, row, inside, inner, F, BK)
            if PART == F:
                total = tl.dot_scaled(w, s, "e2m1", tl.trans(a), a_scale, "e2m1", total)
            else:
                of_part = tl.load(weight_factor + row * (F // PART) + inner // PART, mask=inside, other=0.0)
                total += tl.dot_scaled(w, s, "e2m1", tl.trans(a), a_scale, "e2m1") * of_part[:, None]
        total *= tl.load(h_factor + place, mask=live, other=0.0)[None, :]
        if PART == F:
            total *= tl.load(weight_factor + row, mask=inside, other=0.0)[:, None]
        offset = (tl.program_id(2) * (C + N) + place[:, None]).to(tl.int64) * H + n[None, :]
        tl.store(y + offset, tl.trans(total).to(y.dtype.element_ty), mask=live[:, None] & inside[None, :])


def why_not(card: Card, inputs: int, weights: Sequence[Weight], one_factor: bool) -> str | None:
    """The reason why the kernels do not support a card, or weights of so many inputs; None where they do."""
    if card.capability < OLDEST_FP4:
        return f"compute capability {card.capability / 10}: products of FP4 need {OLDEST_FP4 / 10}"
    scales = [(w.shape, w.factor) for w in weights if isinstance(w, QuantizedWeight) and w.factor is not None]
    factors = [math.prod(factor.shape) * inputs // math.prod(shape) for shape, factor in scales]
    parts = [inputs // n for n in factors]
    if any(part % 64 for part in parts):
        return f"{inputs} inputs with {factors} factors: each must be for a multiple of 64"
    return f"{factors} factors: the kernel takes one" if one_factor and max(factors) > 1 else None


@dataclass(frozen=True)
class _Plan:
    """Which tokens and choices each block has: arguments and sizes that both kernels share.

    Attributes:
        card: The card that tiles are chosen for.
        arrays: The choices, their weights, and what `aligned` returns or placeholders.
        blocks: Blocks, those of the shared expert included.
        sizes: Arguments of `block_plan`: numbers of choices and tokens, rows of a block, blocks of the shared expert.
    """

    card: Card
    arrays: list[Array]
    blocks: int
    sizes: dict[str, Any]

    @classmethod
    def of(cls, card: Card, weights: Array, chosen: Array, tokens: int, experts: int, has_shared: bool) -> "_Plan":
        """The plan of choices [N, TOP] of so many experts, and of a shared expert of all tokens."""
        choices, top = chosen.size, chosen.shape[1]
        # For all tokens where there is only the shared expert, else for more than the mean of an expert's.
        rows = next((rows for most, rows in ROWS if choices <= most * experts), MAX_ROWS[0])
        rows = min(MAX_ROWS[not card.reads_shared], rows if choices else max(16, next_power_of_two(tokens)))
        is_sorted = choices > 0 and tokens > rows
        no_plan = [jnp.zeros(1, jnp.int32)] * 3
        plan = [chosen, weights, *(aligned(card, weights, chosen, experts, rows) if is_sorted else no_plan)]
        shared = -(-tokens // rows) if has_shared else 0
        sizes = {"C": choices, "N": tokens, "TOP": top, "TP": next_power_of_two(top), "M": rows, "SB": shared}
        blocks = shared + (plan[3].shape[0] if is_sorted else choices)
        return cls(card, plan, blocks, sizes | {"SORTED": is_sorted})

    def gate_up(self, x: QuantizedWeight, weight: Parts, shared: Parts, dtype: DTypeLike) -> Array:
        """The activations between the products, [C + N, F], or [C, F] without a shared expert."""
        *_, f, bytes_of_row = weight.values.shape
        return self._launched(_gate_up, x, weight, shared, f, 2 * bytes_of_row, 2, (), dtype, F=f, H=2 * bytes_of_row)

    def down(self, h: QuantizedWeight, weight: Parts, shared: Parts, dtype: DTypeLike, is_split: bool) -> Array:
        """The products of all choices and tokens, [C + N, H], or [C, H] without a shared expert."""
        *_, outputs, bytes_of_row = weight.values.shape
        inputs, part = 2 * bytes_of_row, weight.form[3]
        steps, programs = inputs // divisor(part, INPUTS), -(-outputs // OUTPUTS)
        is_split = is_split and self.sizes["N"] <= MAX_SPLIT_TOKENS
        splits = divisor(steps, next_power_of_two(-(-PROGRAMS // programs))) if is_split else 1
        y = self._launched(
            _down, h, weight, shared, outputs, part, 1, (splits,), dtype, F=inputs, H=outputs, PART=part,
            SPLIT=inputs // splits,
        )  # fmt: skip
        return y.sum(axis=0, dtype=jnp.float32).astype(dtype)

    def _launched(
        self,
        kernel: Any,
        x: QuantizedWeight,
        weight: Parts,
        shared: Parts,
        outputs: int,
        part: int,
        products: int,
        splits: tuple[int, ...],
        dtype: DTypeLike,
        **meta: int,
    ) -> Array:
        """A kernel's results, [*splits, rows, outputs]; ``products``: weights of a step."""
        tokens = self.sizes["N"] if self.sizes["SB"] else 0
        step = divisor(part, INPUTS)
        bytes_of_step = step * (self.sizes["M"] + products * OUTPUTS) * (0.5 + 1 / RUN)
        (y,) = triton_call(
            self.card, kernel,
            [*Parts.of(x, self.card)[:3], *weight[:3], *shared[:3], *self.arrays],
            [jax.ShapeDtypeStruct((*splits, self.sizes["C"] + tokens, outputs), dtype)],
            (self.blocks, -(-outputs // OUTPUTS), *splits), num_warps=4 if self.sizes["M"] <= FEW_ROWS else 8,
            num_stages=stages_within(STAGES, bytes_of_step, self.card), BN=OUTPUTS, BK=step, **self.sizes,
            **meta,
        )  # fmt: skip
        return y


def project(card: Card, x: QuantizedWeight, weight: QuantizedWeight, swiglu: bool) -> Float[Array, "R O"]:
    """`ops.linear.linear` of activations [R, I] by one weight [O, I], or [2 O, I] with ``swiglu``, in float32."""
    matrix = Parts.of(weight.reshape(2, -1, weight.shape[-1]) if swiglu else weight, card)
    plan = _Plan.of(card, jnp.zeros((0, 1)), jnp.zeros((0, 1), jnp.int32), x.shape[0], 1, has_shared=True)
    if swiglu:
        return plan.gate_up(x, matrix, matrix, jnp.float32)
    return plan.down(x, matrix, matrix, jnp.float32, is_split=True)


def experts(
    card: Card,
    x: Float[Array, "N H"],
    weights: Float[Array, "N top"],
    chosen: Int[Array, "N top"],
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    shared: tuple[QuantizedWeight, QuantizedWeight, Array] | None = None,
    residual: Float[Array, "N H"] | None = None,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """`experts.experts_triton` with activations in FP4; ``axes``: the mesh axes that F is divided over."""
    first, second = Parts.of(gate_up, card), Parts.of(down, card)
    gate, *parts = (None, first, second) if shared is None else (shared[2], *(Parts.of(w, card) for w in shared[:2]))
    plan = _Plan.of(card, weights, chosen, len(x), gate_up.shape[0], shared is not None)
    h = plan.gate_up(activations_in_nvfp4(x), first, parts[0], x.dtype)
    y = plan.down(activations_in_nvfp4(h, axes), second, parts[1], x.dtype, is_split=False)
    return joined(y, weights, gate, residual).astype(x.dtype)
