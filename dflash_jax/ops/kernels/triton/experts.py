"""Mixtures of experts in Triton: choices are sorted by expert into blocks of rows; a block reads its weights once.

A shared expert of the experts' size is one further expert of every token. A row's arithmetic does not depend on the
other rows of its block.

Letters: N tokens, C choices (tokens times experts per token), M rows of a block, S block rows (blocks times M).
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from dflash_jax.ops.card import KIB, Card
from dflash_jax.ops.kernels.triton.dependent import wait_for_inputs
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.routing import aligned
from dflash_jax.ops.kernels.triton.tiles import (
    Parts,
    divisor,
    next_power_of_two,
    products,
    run_of,
    stages_within,
    tile,
    why_not_weight,
)
from dflash_jax.ops.weights import QuantizedWeight

# By the rows of a block: outputs of a program of `_gate_up` (which computes two products for each) and of `_down`,
# warps, stages, and bytes of a row's inputs in a step.
TILES = {16: (64, 64, 4, 4, 256), 32: (64, 64, 4, 4, 256), 64: (64, 64, 4, 3, 256), 128: (128, 256, 8, 3, 128)}
# What no card has run: outputs of a program of `_down` by the rows of a block, which halve the reads of its inputs; and
# programs of a multiprocessor for blocks of fewer than 128 rows. While one finds out its rows and stores its results,
# which takes about a sixth of its time, the other one reads.
UNTRIED_DOWN, UNTRIED_PROGRAMS = {64: 128}, 2
# For one token, without matrix products: outputs of a program, warps, and warps for quantized weights.
GATE_UP_ONE, DOWN_ONE = (1, 2, 1), (1, 1, 1)
# More choices are left to XLA, whose arrays are of the experts' size and not of the choices'.
MAX_CHOICES = 1 << 16


@triton.jit
def block_plan(
    chosen, weights, order, block_expert, blocks, block,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, M: tl.constexpr, SB: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """The contents of a block: whether it is used, its expert, each block row's token and row of `_down`'s result.

    The row is C + N for an empty block row. The first SB blocks are the shared expert's. Without ``SORTED`` all tokens
    fit one block, and each expert's block is that of its first choice.
    """
    block_row = tl.arange(0, M)
    e = tl.full([], 0, tl.int32)
    if block < SB:
        token = block * M + block_row
        place = tl.where(token < N, C + token, C + N)
        is_used = block >= 0
    elif SORTED:
        is_used = block - SB < tl.load(blocks)
        e = tl.load(block_expert + block - SB)
        choice = tl.load(order + (block - SB) * M + block_row)
        token = choice // TOP
        place = tl.where(choice < C, choice, C + N)
    else:
        e = tl.load(chosen + block - SB)
        k = tl.arange(0, TP)[None, :]
        choice = block_row[:, None] * TOP + k
        inside = (block_row[:, None] < N) & (k < TOP)
        same = tl.load(chosen + choice, mask=inside, other=-1) == e
        same = same & (tl.load(weights + choice, mask=inside, other=0.0) != 0.0)
        place = tl.min(tl.where(same, choice, C + N), axis=1)
        token = block_row
        is_used = tl.min(place, axis=0) == block - SB
    return is_used, e.to(tl.int64), token.to(tl.int64), place


@triton.jit
def _gate_up(
    x, values, scale, more, shared, shared_scale, shared_more, chosen, weights, order, block_expert, blocks, h,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, FORM: tl.constexpr, BF: tl.constexpr, BH: tl.constexpr,
    PRECISION: tl.constexpr, AFTER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes h [S, F] = silu(gate · x) · (up · x). ``AFTER``: the sums are scaled, not their terms."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    is_used, e, token, place = block_plan(
        chosen, weights, order, block_expert, blocks, block, C, N, TOP, TP, M, SB, SORTED
    )
    if is_used:
        weight, weight_scale, weight_more = values, scale, more
        if block < SB:
            weight, weight_scale, weight_more = shared, shared_scale, shared_more
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        row = e * 2 * F + f
        gate = tl.zeros([M, BF], tl.float32)
        up = tl.zeros([M, BF], tl.float32)
        for inner in range(0, H, BH):
            offset = token[:, None] * H + inner + tl.arange(0, BH)[None, :]
            a = tl.load(x + offset, mask=(place < C + N)[:, None], other=0.0)
            w, s = tile(weight, weight_scale, weight_more, row, inner, H, FORM, BF, BH, x.dtype.element_ty)
            product = tl.dot(a, tl.trans(w), input_precision=PRECISION)
            gate += product if AFTER else product * s
            w, s = tile(weight, weight_scale, weight_more, row + F, inner, H, FORM, BF, BH, x.dtype.element_ty)
            product = tl.dot(a, tl.trans(w), input_precision=PRECISION)
            up += product if AFTER else product * s
        if AFTER:
            # The numbers are not read again: the compiler leaves out what nothing uses.
            gate *= tile(weight, weight_scale, weight_more, row, 0, H, FORM, BF, BH, x.dtype.element_ty)[1]
            up *= tile(weight, weight_scale, weight_more, row + F, 0, H, FORM, BF, BH, x.dtype.element_ty)[1]
        activated = gate / (1.0 + tl.exp(-gate)) * up
        block_row = block * M + tl.arange(0, M)
        tl.store(h + block_row[:, None].to(tl.int64) * F + f[None, :], activated.to(h.dtype.element_ty))


@triton.jit
def _down(
    h, values, scale, more, shared, shared_scale, shared_more, chosen, weights, order, block_expert, blocks, y,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, FORM: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
    PRECISION: tl.constexpr, AFTER: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes y [C + N, H] = down · h: the choices' rows in their order, then the shared expert's."""
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    is_used, e, _, place = block_plan(chosen, weights, order, block_expert, blocks, block, C, N, TOP, TP, M, SB, SORTED)
    if is_used:
        weight, weight_scale, weight_more = values, scale, more
        if block < SB:
            weight, weight_scale, weight_more = shared, shared_scale, shared_more
        block_row = (block * M + tl.arange(0, M)).to(tl.int64)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros([M, BN], tl.float32)
        for inner in range(0, F, BF):
            a = tl.load(h + block_row[:, None] * F + inner + tl.arange(0, BF)[None, :])
            w, s = tile(weight, weight_scale, weight_more, e * H + n, inner, F, FORM, BN, BF, h.dtype.element_ty)
            product = tl.dot(a, tl.trans(w), input_precision=PRECISION)
            total += product if AFTER else product * s
        if AFTER:
            total *= tile(weight, weight_scale, weight_more, e * H + n, 0, F, FORM, BN, BF, h.dtype.element_ty)[1]
        offset = place[:, None].to(tl.int64) * H + n[None, :]
        tl.store(y + offset, total.to(y.dtype.element_ty), mask=(place < C + N)[:, None])


@triton.jit
def _gate_up_one(
    x, values, scale, more, shared, shared_scale, shared_more, chosen, weights, h,
    TOP: tl.constexpr, F: tl.constexpr, H: tl.constexpr, FORM: tl.constexpr, BF: tl.constexpr, BH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_gate_up` of one token's choices [TOP], then the shared expert: h [TOP or TOP + 1, F].

    Rows of choices of weight 0 are not written.
    """
    wait_for_inputs(DEPENDENT)
    block = tl.program_id(0)
    weight, weight_scale, weight_more = values, scale, more
    e = tl.load(chosen + block, mask=block < TOP, other=0).to(tl.int64)
    probability = tl.load(weights + block, mask=block < TOP, other=1.0)
    if block == TOP:
        weight, weight_scale, weight_more = shared, shared_scale, shared_more
    if probability != 0.0:
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        gate = tl.zeros([BF], tl.float32)
        up = tl.zeros([BF], tl.float32)
        for inner in tl.static_range(0, H, BH):
            a = tl.load(x + inner + tl.arange(0, BH))[None, :].to(tl.float32)
            row = e * 2 * F + f
            gate += tl.sum(products(weight, weight_scale, weight_more, row, a, inner, H, FORM, BF, BH), axis=1)
            up += tl.sum(products(weight, weight_scale, weight_more, row + F, a, inner, H, FORM, BF, BH), axis=1)
        activated = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(h + block * F + f, activated.to(h.dtype.element_ty))


@triton.jit
def _down_one(
    h, values, scale, more, shared, shared_scale, shared_more, chosen, weights, gate, residual, y,
    TOP: tl.constexpr, F: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr, RESIDUAL: tl.constexpr,
    FORM: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes y [H]: the choices' products by their weights, the shared expert's by its gate, and the residual."""
    wait_for_inputs(DEPENDENT)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # The sum over threads comes once, at the end, for all choices.
    total = tl.zeros([BN, BF // FORM[0] if FORM[0] else BF], tl.float32)
    for c in tl.static_range(TOP):
        weight = tl.load(weights + c)
        e = tl.load(chosen + c).to(tl.int64)
        for inner in tl.static_range(0, F, BF):
            a = tl.load(h + c * F + inner + tl.arange(0, BF))[None, :].to(tl.float32)
            product = products(values, scale, more, e * H + n, a, inner, F, FORM, BN, BF)
            # Selected, not multiplied by zero: rows that were not computed may be NaN.
            total += tl.where(weight != 0.0, weight * product, 0.0)
    if SHARED:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
        for inner in tl.static_range(0, F, BF):
            a = tl.load(h + TOP * F + inner + tl.arange(0, BF))[None, :].to(tl.float32)
            total += weight * products(shared, shared_scale, shared_more, n, a, inner, F, FORM, BN, BF)
    product = tl.sum(total, axis=1)
    if RESIDUAL:
        product += tl.load(residual + n).to(tl.float32)
    tl.store(y + n, product.to(y.dtype.element_ty))


def _rows_of_a_block(choices: int, experts: int, weight: Array, card: Card, scales_after: bool = False) -> int:
    """Rows of a block, about the average choices of an expert.

    128, whose tiles halve the reads of weights and inputs from the L2 cache, needs a card whose products read operands
    of 16 bits, or of 8 bits that are scaled after the sums, in shared memory. Where they read registers, each warp of
    64 rows would convert the same weights; where each term is scaled, its registers do not suffice.
    """
    if choices <= 16 * experts or (weight.dtype.itemsize == 1 and not card.reads_shared):
        return 16 if choices <= 2 * experts else 32
    is_wide = card.reads_shared and (weight.dtype.itemsize == 2 or scales_after)
    return 128 if choices > 64 * experts and is_wide else 64


def _stages(stages: int, bytes_of_step: float, rows: int, card: Card, shares: bool) -> int:
    """Stages of a loop, at most ``stages``; ``shares``: with which two programs fit on a multiprocessor."""
    if not shares:
        return stages_within(stages, bytes_of_step, card)
    memory = (card.shared_memory + KIB) // UNTRIED_PROGRAMS - 2 * KIB
    # Products of fewer rows than 64 read registers, where one stage is kept.
    return min(stages, max(2, int(memory // bytes_of_step) + (rows < 64)))


def why_not(choices: int, gate_up: Array | QuantizedWeight, down: Array | QuantizedWeight) -> str | None:
    """The reason why the kernels do not support ``choices`` choices of experts with these weights, or None."""
    if choices > MAX_CHOICES:
        return f"{choices} choices of experts: the kernel takes {MAX_CHOICES} at most"
    if reason := why_not_weight(gate_up) or why_not_weight(down):
        return reason
    inner = [run_of(w) or w.shape[-1] for w in (gate_up, down)]
    sizes = (*inner, gate_up.shape[-2], down.shape[-2])
    # Products have at least 16 inputs, and one scale each.
    return f"sizes {sizes}: all must be multiples of 16" if any(n % 16 for n in sizes) else None


def are_alike(experts: Array | QuantizedWeight, other: Array | QuantizedWeight, card: Card) -> bool:
    """Whether another weight has the shape and the kind of each expert's weight."""
    return Parts.of(experts, card).kind == Parts.of(other, card).kind and experts.shape[1:] == other.shape


def experts_triton(
    card: Card,
    x: Float[Array, "N H"],
    weights: Float[Array, "N top"],
    chosen: Int[Array, "N top"],
    gate_up: Array | QuantizedWeight,
    down: Array | QuantizedWeight,
    shared: tuple[Array | QuantizedWeight, Array | QuantizedWeight, Array] | None = None,
    residual: Float[Array, "N H"] | None = None,
    untried: bool = False,
) -> Float[Array, "N H"]:
    """The products of `ops.moe.mixture` after its routing.

    Products are summed in float32. The activations between the two products and, for several tokens, each choice's
    result are rounded to x's dtype. Choices of weight 0 are not computed.

    Args:
        card: The card that tiles are chosen for.
        x: [N, H].
        weights: float32 [N, TOP], the weights of the chosen experts.
        chosen: int32 [N, TOP], their ids.
        gate_up: [E, 2, F, H].
        down: [E, H, F].
        shared: As in `ops.moe.mixture`, with weights that are `are_alike`; None: no shared expert.
        residual: [N, H] or None.
        untried: Whether what no card has run is taken: two programs on a multiprocessor, and weights with one scale for
            each output that are scaled after the sums.

    Returns:
        [N, H] in x's dtype.
    """
    (n, hidden), top = x.shape, chosen.shape[1]
    e, _, f, _ = gate_up.shape
    first, second = Parts.of(gate_up, card), Parts.of(down, card)
    shared_gate, *shared_parts = (
        (None, first, second) if shared is None else (shared[2], *(Parts.of(w, card) for w in shared[:2]))
    )
    # `_gate_up_one` and `_down_one` sum over runs whose length is a power of two.
    if n == 1 and not any(run & (run - 1) for run in (first.form[0], second.form[0])):
        gate_up_parts, down_parts = (first, shared_parts[0]), (second, shared_parts[1])
        return _one_token(card, x, weights, chosen, gate_up_parts, down_parts, shared_gate, residual)
    after = [untried and w.form[0] == size for w, size in ((first, hidden), (second, f))]
    c, rows = chosen.size, _rows_of_a_block(chosen.size, e, first.values, card, all(after))
    is_sorted = n > rows
    no_plan = [jnp.zeros(1, jnp.int32)] * 3
    plan = [chosen, weights, *(aligned(card, weights, chosen, e, rows) if is_sorted else no_plan)]
    shared_blocks = 0 if shared is None else -(-n // rows)
    blocks = shared_blocks + (plan[3].shape[0] if is_sorted else c)
    sizes = {
        "C": c,
        "N": n,
        "TOP": top,
        "TP": next_power_of_two(top),
        "F": f,
        "H": hidden,
        "M": rows,
        "SB": shared_blocks,
    }
    sizes |= {"SORTED": is_sorted, "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32"}
    gate_outputs, down_outputs, warps, stages, step_bytes = TILES[rows]
    shares = untried and card.reads_shared and rows < 128 and not first.has_four_bits
    down_outputs = UNTRIED_DOWN.get(rows, down_outputs) if shares else down_outputs
    # Of four bits twice as many inputs, where a block has few rows.
    inner = step_bytes // x.dtype.itemsize
    block_f, block_h = divisor(f, gate_outputs), first.step(hidden, inner)
    step = block_h * (rows * x.dtype.itemsize + 2 * block_f * first.bytes_of_input)
    (h,) = triton_call(
        card, _gate_up, [x, *first[:3], *shared_parts[0][:3], *plan],
        [jax.ShapeDtypeStruct((blocks * rows, f), x.dtype)], (blocks, f // block_f), num_warps=warps,
        num_stages=_stages(stages, step, rows, card, shares), FORM=first.form, BF=block_f, BH=block_h, AFTER=after[0],
        **sizes,
    )  # fmt: skip
    block_n, block_f = divisor(hidden, down_outputs), second.step(f, inner)
    step = block_f * (rows * x.dtype.itemsize + block_n * second.bytes_of_input)
    (y,) = triton_call(
        card, _down, [h, *second[:3], *shared_parts[1][:3], *plan],
        [jax.ShapeDtypeStruct((c + (n if shared_blocks else 0), hidden), x.dtype)], (blocks, hidden // block_n),
        num_warps=warps, num_stages=_stages(stages, step, rows, card, shares), FORM=second.form, BN=block_n, BF=block_f,
        AFTER=after[1], **sizes,
    )  # fmt: skip
    return joined(y, weights, shared_gate, residual).astype(x.dtype)


def joined(
    y: Float[Array, "rows H"], weights: Float[Array, "N top"], gate: Array | None, residual: Array | None
) -> Float[Array, "N H"]:
    """The choices' results by their weights, the shared expert's after them by its gate, and the residual, float32."""
    y, routed = y.astype(jnp.float32), y[: weights.size].astype(jnp.float32).reshape(*weights.shape, -1)
    total = jnp.sum(jnp.where(weights[..., None] != 0, routed * weights[..., None], 0.0), axis=1)
    if gate is not None:
        total += jax.nn.sigmoid(gate.astype(jnp.float32))[:, None] * y[weights.size :]
    return total if residual is None else total + residual.astype(jnp.float32)


def _one_token(
    card: Card,
    x: Array,
    weights: Array,
    chosen: Array,
    gate_up: tuple[Parts, Parts],
    down: tuple[Parts, Parts],
    gate: Array | None,
    residual: Array | None,
) -> Array:
    """`experts_triton` of one token; ``gate_up``, ``down``: the experts' and the shared expert's weights."""
    hidden, top = x.shape[1], chosen.shape[1]
    f, used_experts = gate_up[0].values.shape[2], top + (gate is not None)
    sizes = {"TOP": top, "F": f, "H": hidden}
    outputs, *warps = GATE_UP_ONE
    block, form = divisor(f, outputs), gate_up[0].form
    (h,) = triton_call(
        card, _gate_up_one, [x, *(part for w in gate_up for part in w[:3]), chosen, weights],
        [jax.ShapeDtypeStruct((used_experts, f), x.dtype)], (used_experts, f // block),
        num_warps=warps[form[0] > 0], FORM=form, BF=block, BH=max(form[0], divisor(hidden, 2048)), **sizes,
    )  # fmt: skip
    outputs, *warps = DOWN_ONE
    block, form = divisor(hidden, outputs), down[0].form
    (y,) = triton_call(
        card, _down_one,
        [h, *(p for w in down for p in w[:3]), chosen, weights, *(x if a is None else a for a in (gate, residual))],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)], (hidden // block,), num_warps=warps[form[0] > 0],
        SHARED=used_experts > top, RESIDUAL=residual is not None, FORM=form, BN=block,
        BF=max(form[0], divisor(f, 1024)),
        **sizes,
    )  # fmt: skip
    return y
