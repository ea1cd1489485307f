"""Experts in Triton: choices come sorted by expert in blocks of rows, and every block reads its expert's weights once.
The shared expert, where it is of the experts' size, is one more for every token. A row's arithmetic does not depend on
the rows beside it.

Letters: N tokens, C choices (tokens times experts per token), M rows of a block, S blocks' slots (blocks times M).
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.routing import aligned
from dflash_jax.ops.kernels.triton.tiles import divisor, parts, power, products, reads, stages_within, tile

# By the rows of a block: outputs of a program of `_gate_up` (twice as many products) and of `_down`, warps, steps whose
# loads are in flight together, and bytes of a row's inputs in one.
TILES = {16: (64, 64, 4, 4, 256), 32: (64, 64, 4, 4, 256), 64: (64, 64, 4, 3, 256), 128: (128, 256, 8, 3, 128)}
# Of one token, whose products have no matrix: (outputs of a program, warps, those for weights in few bits).
GATE_UP_ONE, DOWN_ONE = (1, 2, 1), (1, 1, 1)
# More are for XLA, whose arrays are as large as the experts and not as the choices.
MOST_CHOICES = 1 << 16


@triton.jit
def _whose(
    chosen, weights, order, owner, blocks, block,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, M: tl.constexpr, SB: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """Of a block: (whether it is one, its expert, each slot's token, where that has its place in `_down`'s result: C +
    N for none). The first SB blocks are the shared expert's. Not ``SORTED``: all tokens fit a block, which is of the
    first choice of an expert."""
    slot = tl.arange(0, M)
    e = tl.full([], 0, tl.int32)
    if block < SB:
        token = block * M + slot
        place = tl.where(token < N, C + token, C + N)
        is_one = block >= 0
    elif SORTED:
        is_one = block - SB < tl.load(blocks)
        e = tl.load(owner + block - SB)
        choice = tl.load(order + (block - SB) * M + slot)
        token = choice // TOP
        place = tl.where(choice < C, choice, C + N)
    else:
        e = tl.load(chosen + block - SB)
        k = tl.arange(0, TP)[None, :]
        choice = slot[:, None] * TOP + k
        inside = (slot[:, None] < N) & (k < TOP)
        same = tl.load(chosen + choice, mask=inside, other=-1) == e
        same = same & (tl.load(weights + choice, mask=inside, other=0.0) != 0.0)
        place = tl.min(tl.where(same, choice, C + N), axis=1)
        token = slot
        is_one = tl.min(place, axis=0) == block - SB
    return is_one, e.to(tl.int64), token.to(tl.int64), place


@triton.jit
def _gate_up(
    x, values, scale, shared, shared_scale, chosen, weights, order, owner, blocks, h,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr, BF: tl.constexpr, BH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """h [S, F] = silu(gate · x) · (up · x)."""
    block = tl.program_id(0)
    is_one, e, token, place = _whose(chosen, weights, order, owner, blocks, block, C, N, TOP, TP, M, SB, SORTED)
    if is_one:
        weight, weight_scale = values, scale
        if block < SB:
            weight, weight_scale = shared, shared_scale
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        row = e * 2 * F + f
        gate = tl.zeros([M, BF], tl.float32)
        up = tl.zeros([M, BF], tl.float32)
        for inner in range(0, H, BH):
            at = token[:, None] * H + inner + tl.arange(0, BH)[None, :]
            a = tl.load(x + at, mask=(place < C + N)[:, None], other=0.0)
            w, s = tile(weight, weight_scale, row, inner, H, RUN, BH, x.dtype.element_ty)
            gate += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
            w, s = tile(weight, weight_scale, row + F, inner, H, RUN, BH, x.dtype.element_ty)
            up += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
        made = gate / (1.0 + tl.exp(-gate)) * up
        slot = block * M + tl.arange(0, M)
        tl.store(h + slot[:, None].to(tl.int64) * F + f[None, :], made.to(h.dtype.element_ty))


@triton.jit
def _down(
    h, values, scale, shared, shared_scale, chosen, weights, order, owner, blocks, y,
    C: tl.constexpr, N: tl.constexpr, TOP: tl.constexpr, TP: tl.constexpr, F: tl.constexpr, H: tl.constexpr,
    M: tl.constexpr, SB: tl.constexpr, SORTED: tl.constexpr, RUN: tl.constexpr, BN: tl.constexpr, BF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """y [C + N, H] = down · h, each slot's where its choice is, the shared expert's behind them."""
    block = tl.program_id(0)
    is_one, e, _, place = _whose(chosen, weights, order, owner, blocks, block, C, N, TOP, TP, M, SB, SORTED)
    if is_one:
        weight, weight_scale = values, scale
        if block < SB:
            weight, weight_scale = shared, shared_scale
        slot = (block * M + tl.arange(0, M)).to(tl.int64)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        total = tl.zeros([M, BN], tl.float32)
        for inner in range(0, F, BF):
            a = tl.load(h + slot[:, None] * F + inner + tl.arange(0, BF)[None, :])
            w, s = tile(weight, weight_scale, e * H + n, inner, F, RUN, BF, h.dtype.element_ty)
            total += tl.dot(a, tl.trans(w), input_precision=PRECISION) * s
        at = place[:, None].to(tl.int64) * H + n[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=(place < C + N)[:, None])


@triton.jit
def _gate_up_one(
    x, values, scale, shared, shared_scale, chosen, weights, h,
    TOP: tl.constexpr, F: tl.constexpr, H: tl.constexpr, RUN: tl.constexpr, BF: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """`_gate_up` of one token's choices [TOP], the shared expert behind them: h [TOP or TOP + 1, F], of a choice of
    weight 0 whatever."""
    block = tl.program_id(0)
    weight, weight_scale = values, scale
    e = tl.load(chosen + block, mask=block < TOP, other=0).to(tl.int64)
    share = tl.load(weights + block, mask=block < TOP, other=1.0)
    if block == TOP:
        weight, weight_scale = shared, shared_scale
    if share != 0.0:
        f = tl.program_id(1) * BF + tl.arange(0, BF)
        gate = tl.zeros([BF], tl.float32)
        up = tl.zeros([BF], tl.float32)
        for inner in tl.static_range(0, H, BH):
            a = tl.load(x + inner + tl.arange(0, BH))[None, :].to(tl.float32)
            gate += tl.sum(products(weight, weight_scale, e * 2 * F + f, a, inner, H, RUN, BH, BF), axis=1)
            up += tl.sum(products(weight, weight_scale, e * 2 * F + F + f, a, inner, H, RUN, BH, BF), axis=1)
        made = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(h + block * F + f, made.to(h.dtype.element_ty))


@triton.jit
def _down_one(
    h, values, scale, shared, shared_scale, chosen, weights, gate, residual, y,
    TOP: tl.constexpr, F: tl.constexpr, H: tl.constexpr, SHARED: tl.constexpr, REST: tl.constexpr, RUN: tl.constexpr,
    BN: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """y [H]: the choices' products by their weights, the shared expert's by its gate, and the residual."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Summed at the end: one sum over threads for all choices.
    total = tl.zeros([BN, BF // RUN if RUN else BF], tl.float32)
    for c in tl.static_range(TOP):
        weight = tl.load(weights + c)
        e = tl.load(chosen + c).to(tl.int64)
        for inner in tl.static_range(0, F, BF):
            a = tl.load(h + c * F + inner + tl.arange(0, BF))[None, :].to(tl.float32)
            made = products(values, scale, e * H + n, a, inner, F, RUN, BF, BN)
            # Selected, never multiplied by zero: what was not computed may hold anything.
            total += tl.where(weight != 0.0, weight * made, 0.0)
    if SHARED:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
        for inner in tl.static_range(0, F, BF):
            a = tl.load(h + TOP * F + inner + tl.arange(0, BF))[None, :].to(tl.float32)
            total += weight * products(shared, shared_scale, n, a, inner, F, RUN, BF, BN)
    made = tl.sum(total, axis=1)
    if REST:
        made += tl.load(residual + n).to(tl.float32)
    tl.store(y + n, made.to(y.dtype.element_ty))


def _rows_of_a_block(choices: int, experts: int, weight, card: Card) -> int:
    """About as many as an expert has on average. 128, whose tiles read weights and inputs from the L2 cache half as
    often, where products read 16-bit operands in shared memory."""
    if choices <= 16 * experts:
        return 16 if choices <= 2 * experts else 32
    is_wide = card.reads_shared and weight.dtype.itemsize == 2
    return 128 if choices > 64 * experts and is_wide else 64


def why_not(choices: int, gate_up, down, card: Card) -> str | None:
    """Why the kernels do not take ``choices`` choices of experts with these weights; None where they do."""
    if choices > MOST_CHOICES:
        return f"{choices} choices of experts: it takes {MOST_CHOICES} at most"
    if not (reads(gate_up, card) and reads(down, card)):
        return f"sm_{card.capability} does not read float8"
    inner = [w.shape[-1] // (w.scale.shape[-1] if hasattr(w, "scale") else 1) for w in (gate_up, down)]
    sizes = (*inner, gate_up.shape[-2], down.shape[-2])
    # Products are of 16 and more, a scale's run at a time.
    return f"sizes {sizes}: all must be multiples of 16" if any(n % 16 for n in sizes) else None


def are_alike(experts, other) -> bool:
    """Whether another weight is of the shape and kind of each of the experts'."""
    (values, scale, run), (one, one_scale, one_run) = parts(experts), parts(other)
    return values.shape[1:] == one.shape and (values.dtype, scale.dtype, run) == (one.dtype, one_scale.dtype, one_run)


def experts_triton(card: Card, x, weights, chosen, gate_up, down, shared=None, residual=None):
    """As `ops.moe.experts`, and with ``shared`` and ``residual`` as `ops.moe.mixture`. A choice of
    weight 0 is not computed; products are summed in float32, and what lies between them and, of several tokens, each
    choice's share are rounded to x's dtype."""
    (n, hidden), top = x.shape, chosen.shape[1]
    e, _, f, _ = gate_up.shape
    first, second = parts(gate_up), parts(down)
    mine, *others = (None, first, second) if shared is None else (shared[2], *map(parts, shared[:2]))
    # Sums over a run's inputs need a power of two of them.
    if n == 1 and not any(run & (run - 1) for *_, run in (first, second)):
        return _one_token(card, x, weights, chosen, (first, others[0]), (second, others[1]), mine, residual)
    c, rows = chosen.size, _rows_of_a_block(chosen.size, e, first[0], card)
    is_sorted = n > rows
    nothing = [jnp.zeros(1, jnp.int32)] * 3
    plan = [chosen, weights, *(aligned(card, weights, chosen, e, rows) if is_sorted else nothing)]
    own_blocks = 0 if shared is None else -(-n // rows)
    most = own_blocks + (plan[3].shape[0] if is_sorted else c)
    sizes = {"C": c, "N": n, "TOP": top, "TP": power(top), "F": f, "H": hidden, "M": rows, "SB": own_blocks}
    sizes |= {"SORTED": is_sorted, "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32"}
    gate_outputs, down_outputs, warps, stages, step_bytes = TILES[rows]
    inner = step_bytes // x.dtype.itemsize
    block_f, block_h, run = divisor(f, gate_outputs), divisor(first[2] or hidden, inner), first[2]
    step = block_h * (rows * x.dtype.itemsize + 2 * block_f * first[0].dtype.itemsize)
    (h,) = triton_call(
        card, _gate_up, [x, *first[:2], *others[0][:2], *plan],
        [jax.ShapeDtypeStruct((most * rows, f), x.dtype)], (most, f // block_f), num_warps=warps,
        num_stages=stages_within(stages, step, card), RUN=run, BF=block_f, BH=block_h, **sizes,
    )  # fmt: skip
    block_n, block_f, run = divisor(hidden, down_outputs), divisor(second[2] or f, inner), second[2]
    step = block_f * (rows * x.dtype.itemsize + block_n * second[0].dtype.itemsize)
    (y,) = triton_call(
        card, _down, [h, *second[:2], *others[1][:2], *plan],
        [jax.ShapeDtypeStruct((c + (n if own_blocks else 0), hidden), x.dtype)], (most, hidden // block_n),
        num_warps=warps, num_stages=stages_within(stages, step, card), RUN=run, BN=block_n, BF=block_f, **sizes,
    )  # fmt: skip
    routed = y[:c].reshape(n, top, hidden).astype(jnp.float32)
    total = jnp.sum(jnp.where(weights[..., None] != 0, routed * weights[..., None], 0.0), axis=1)
    if shared is not None:
        total += jax.nn.sigmoid(mine.astype(jnp.float32))[:, None] * y[c:].astype(jnp.float32)
    if residual is not None:
        total += residual.astype(jnp.float32)
    return total.astype(x.dtype)


def _one_token(card: Card, x, weights, chosen, gate_up, down, gate, residual):
    """``gate_up`` and ``down``: `parts` of the experts' and of the shared expert's; ``gate`` [1] and ``residual``
    [1, H], or None."""
    (hidden, top), (values, scale, run) = (x.shape[1], chosen.shape[1]), gate_up[0]
    f, held = values.shape[2], top + (gate is not None)
    sizes = {"TOP": top, "F": f, "H": hidden}
    outputs, *warps = GATE_UP_ONE
    block = divisor(f, outputs)
    (h,) = triton_call(
        card, _gate_up_one, [x, values, scale, *gate_up[1][:2], chosen, weights], [jax.ShapeDtypeStruct((held, f),
        x.dtype)],
        (held, f // block), num_warps=warps[run > 0], RUN=run, BF=block, BH=max(run, divisor(hidden, 2048)), **sizes,
    )  # fmt: skip
    values, scale, run = down[0]
    outputs, *warps = DOWN_ONE
    block = divisor(hidden, outputs)
    (y,) = triton_call(
        card, _down_one,
        [h, values, scale, *down[1][:2], chosen, weights, *(x if a is None else a for a in (gate, residual))],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)], (hidden // block,), num_warps=warps[run > 0],
        SHARED=held > top, REST=residual is not None, RUN=run, BN=block, BF=max(run, divisor(f, 1024)), **sizes,
    )  # fmt: skip
    return y
