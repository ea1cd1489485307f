"""Gated DeltaNet of few new tokens in Triton.

One kernel computes convolution, gates, delta rule and gated norm, and reads the state once. Another one writes accepted
tokens into the state in place, of one layer or of many. Each program has one value head of one batch entry and layer,
or a part of it. Letters as in `ops.gated_delta`.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.dependent import wait_for_inputs
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.linear import MAX_ROWS
from dflash_jax.ops.kernels.triton.tiles import log_decay_of, why_not_sizes

# Tokens of a chunk, and the most that a program takes.
TOKENS = 16
# Parts of a head's values with programs of their own, each of at least LEAST_VALUES; keys of a product with the state.
PARTS, LEAST_VALUES, KEYS = 4, 16, 64
# Up to FEW_PROGRAMS programs have more warps each: otherwise an H200 (`Card.scaled` on others) is not busy.
FEW_PROGRAMS, FEW_WARPS, WARPS = 264, 8, 4
# The most layers of a launch, each of which has seven pointers among its arguments. Compilation takes no longer for 16
# than for one, and 4 KB of arguments have room for 72. More than 16 save no launch of 16 and 32 layers, and one of 30,
# 45 and 48, the published models', whose launches have 15 or 16.
MAX_LAYERS = 16


@triton.jit
def _convolved(
    x, conv_state, conv_weight, record, b, state_row, g, first, recorded,
    T: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    N: tl.constexpr, ONE_LOAD: tl.constexpr,
):  # fmt: skip
    """Convolution and silu of N channels from ``first`` on, [BT, N]; records the inputs of ``recorded`` tokens.

    ONE_LOAD: an input is loaded once, from where it is, and not from both places with one of them masked.
    """
    t = tl.arange(0, BT)[:, None]
    c = first + tl.arange(0, N)[None, :]
    total = tl.zeros([BT, N], tl.float32)
    for j in tl.static_range(W):
        source = t - (W - 1) + j
        before = conv_state + ((state_row * (W - 1) + source + W - 1) * G + g) * C
        if ONE_LOAD:
            place = tl.where(source < 0, before, x + ((b * T + source) * G + g) * CZ) + c
            # The choice between two places hides that channels are successive.
            value = tl.load(tl.max_contiguous(tl.multiple_of(place, [1, 16]), [1, 16]), mask=t < T, other=0.0)
        else:
            value = tl.load(x + ((b * T + source) * G + g) * CZ + c, mask=(source >= 0) & (t < T), other=0.0)
        if j == W - 1:
            tl.store(record + ((b * T + t) * G + g) * C + c, value, mask=t < recorded)
            value = value.to(tl.float32)
        elif ONE_LOAD:
            value = value.to(tl.float32)
        else:
            previous = tl.load(before + c, mask=(source < 0) & (t < T), other=0.0)
            value = value.to(tl.float32) + previous.to(tl.float32)
        total += value * tl.load(conv_weight + (g * C + c) * W + j).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _inverse(a, T: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + a, a [BT, BT] strictly lower triangular, by doubling diagonal blocks."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, 4):
        block = 1 << level
        if block < T:
            corner = tl.where((i // (2 * block) == j // (2 * block)) & (i // block != j // block), a, 0.0)
            inverse -= tl.dot(inverse, tl.dot(corner, inverse, input_precision=PRECISION), input_precision=PRECISION)
    return inverse


@triton.jit
def _mix(
    x, gates, conv_state, conv_weight, a_log, dt_bias, norm, state, rows, y, k_out, delta_out, decay_out, conv_out,
    squares,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    CZ: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STATE_ROWS: tl.constexpr, EPS: tl.constexpr,
    PRECISION: tl.constexpr, SMALL: tl.constexpr, PARTS: tl.constexpr, BK: tl.constexpr,
    ONE_LOAD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The operation for T tokens: one chunk of the delta rule (arXiv 2412.06464, section 3.3).

    A program has one of PARTS parts of a head's values. Of several, the division of the norm is left to what reads y,
    and ``squares`` has the sums for it. Products with the state take BK keys at a time.
    """
    wait_for_inputs(DEPENDENT)
    size: tl.constexpr = DV // PARTS
    head, part = tl.program_id(0), 0
    if PARTS > 1:
        part = tl.program_id(1)
    b, g, r = head // (G * R), head // R % G, head % R
    t = tl.arange(0, BT)
    row, column = t[:, None], t[None, :]
    dk, dv = tl.arange(0, DK), part * size + tl.arange(0, size)
    # The largest loads come first.
    state_row = tl.minimum(tl.load(rows + b), STATE_ROWS - 1).to(tl.int64)
    first_key = (state_row * (G * R) + head % (G * R)) * DK
    if BK == DK or PARTS > 1:
        s = tl.load(state + (first_key + dk[:, None]) * DV + dv[None, :])
    z = tl.load(x + ((b * T + row) * G + g) * CZ + C + r * DV + dv[None, :], mask=row < T, other=0.0).to(tl.float32)
    scale = tl.load(norm + dv).to(tl.float32)
    offset = ((b * T + t) * 2 * G + g) * R + r
    beta = tl.load(gates + offset, mask=t < T, other=0.0).to(tl.float32)
    alpha = tl.load(gates + offset + G * R, mask=t < T, other=0.0)
    log_decay = log_decay_of(alpha, tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
    # All value heads of a key head share its keys: the first program of the first value head records them.
    first = tl.where(part == 0, T, 0)
    recorded = tl.where(r == 0, first, 0)
    inputs, value = (x, conv_state, conv_weight, conv_out, b, state_row, g), 2 * DK + r * DV + part * size
    q = _convolved(*inputs, 0, recorded, T, G, C, CZ, W, BT, DK, ONE_LOAD)
    k = _convolved(*inputs, DK, recorded, T, G, C, CZ, W, BT, DK, ONE_LOAD)
    v = _convolved(*inputs, value, T, T, G, C, CZ, W, BT, size, ONE_LOAD)
    q = q * tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None] * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]
    tl.store(k_out + ((b * T + row) * G + g) * DK + dk[None, :], k, mask=row < recorded)
    beta = tl.where(t < T, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    log_decay = tl.where(t < T, log_decay, 0.0)
    tl.store(decay_out + ((b * T + t) * G + g) * R + r, log_decay, mask=t < first)

    cumulative = tl.cumsum(log_decay, axis=0)
    # The exponent is masked before exp: above the diagonal it is positive and may overflow.
    decay = tl.exp(tl.where(row >= column, cumulative[:, None] - cumulative[None, :], float("-inf")))
    if BK == DK:
        gram = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    else:
        # The operands of whole products would not fit the registers.
        gram, scores = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        recalled, seen = tl.zeros([BT, size], tl.float32), tl.zeros([BT, size], tl.float32)
        keys, queries = tl.reshape(k, [BT, DK // BK, BK]), tl.reshape(q, [BT, DK // BK, BK])
        blocks = tl.arange(0, DK // BK)[None, :, None]
        for i in range(DK // BK):
            if PARTS > 1:
                values = tl.reshape(s, [1, DK // BK, BK * size])
                values = tl.reshape(tl.sum(tl.where(blocks == i, values, 0.0), axis=1), [BK, size])
            else:
                values = tl.load(state + (first_key + i * BK + tl.arange(0, BK)[:, None]) * DV + dv[None, :])
            key = tl.sum(tl.where(blocks == i, keys, 0.0), axis=1)
            query = tl.sum(tl.where(blocks == i, queries, 0.0), axis=1)
            gram += tl.dot(key, tl.trans(key), input_precision=PRECISION)
            scores += tl.dot(query, tl.trans(key), input_precision=PRECISION)
            recalled += tl.dot(key, values, input_precision=PRECISION)
            seen += tl.dot(query, values, input_precision=PRECISION)
    decay_from_start = tl.exp(cumulative)[:, None]
    if BK == DK:
        recalled = tl.dot(k, s, input_precision=PRECISION)
    delta = beta[:, None] * (v - decay_from_start * recalled)
    a = tl.where(row > column, beta[:, None] * gram * decay, 0.0)
    delta = tl.dot(_inverse(a, T, BT, SMALL), delta, input_precision=SMALL)
    offset = ((b * T + row) * G + g) * R + r
    tl.store(delta_out + offset * DV + dv[None, :], delta, mask=row < T)
    if BK == DK:
        seen = tl.dot(q, s, input_precision=PRECISION)
    out = decay_from_start * seen
    out += tl.dot(scores * decay, delta, input_precision=SMALL)
    square = tl.sum(out * out, axis=1)
    if PARTS == 1:
        out *= tl.rsqrt(square / DV + EPS)[:, None] * scale[None, :]
    else:
        tl.store(squares + (((b * T + t) * G + g) * R + r) * PARTS + part, square, mask=t < T)
        out *= scale[None, :]
    out *= z / (1.0 + tl.exp(-z))
    tl.store(y + offset * DV + dv[None, :], out.to(y.dtype.element_ty), mask=row < T)


@triton.jit
def _convolved_one(
    x, conv_state, conv_weight, record, b, state_row, g, first, recorded,
    G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`_convolved` of one token, [N]; records the input where ``recorded`` is not 0."""
    n = tl.arange(0, N)
    c = first + n
    value = tl.load(x + (b * G + g) * CZ + c)
    total = value.to(tl.float32) * tl.load(conv_weight + (g * C + c) * W + W - 1).to(tl.float32)
    for j in tl.static_range(W - 1):
        previous = tl.load(conv_state + ((state_row * (W - 1) + j) * G + g) * C + c).to(tl.float32)
        total += previous * tl.load(conv_weight + (g * C + c) * W + j).to(tl.float32)
    tl.store(record + (b * G + g) * C + c, value, mask=n < recorded * N)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _mix_one(
    x, gates, conv_state, conv_weight, a_log, dt_bias, norm, state, rows, y, k_out, delta_out, decay_out, conv_out,
    squares, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr,
    W: tl.constexpr, STATE_ROWS: tl.constexpr, EPS: tl.constexpr, PARTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_mix` for one token per batch entry, without matrix products."""
    wait_for_inputs(DEPENDENT)
    size: tl.constexpr = DV // PARTS
    head, part = tl.program_id(0), 0
    if PARTS > 1:
        part = tl.program_id(1)
    b, g, r = head // (G * R), head // R % G, head % R
    dk, dv = tl.arange(0, DK), part * size + tl.arange(0, size)
    state_row = tl.minimum(tl.load(rows + b), STATE_ROWS - 1).to(tl.int64)
    s = tl.load(state + ((state_row * (G * R) + head % (G * R)) * DK + dk[:, None]) * DV + dv[None, :])
    z = tl.load(x + (b * G + g) * CZ + C + r * DV + dv).to(tl.float32)
    scale = tl.load(norm + dv).to(tl.float32)
    offset = (b * 2 * G + g) * R + r
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + offset).to(tl.float32)))
    log_decay = log_decay_of(tl.load(gates + offset + G * R), tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
    first = tl.where(part == 0, 1, 0)
    recorded = tl.where(r == 0, first, 0)
    q = _convolved_one(x, conv_state, conv_weight, conv_out, b, state_row, g, 0, recorded, G, C, CZ, W, DK)
    k = _convolved_one(x, conv_state, conv_weight, conv_out, b, state_row, g, DK, recorded, G, C, CZ, W, DK)
    channel = 2 * DK + r * DV + part * size
    v = _convolved_one(x, conv_state, conv_weight, conv_out, b, state_row, g, channel, 1, G, C, CZ, W, size)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    tl.store(k_out + (b * G + g) * DK + dk, k, mask=dk < recorded * DK)
    tl.store(decay_out + head, log_decay, mask=first > 0)
    decay_from_start = tl.exp(log_decay)
    delta = beta * (v - decay_from_start * tl.sum(k[:, None] * s, axis=0))
    tl.store(delta_out + head * DV + dv, delta)
    out = decay_from_start * tl.sum(q[:, None] * s, axis=0) + tl.sum(q * k, axis=0) * delta
    square = tl.sum(out * out, axis=0)
    if PARTS == 1:
        out *= tl.rsqrt(square / DV + EPS) * scale
    else:
        tl.store(squares + head * PARTS + part, square)
        out *= scale
    out *= z / (1.0 + tl.exp(-z))
    tl.store(y + head * DV + dv, out.to(y.dtype.element_ty))


@triton.jit
def _replay_head(
    state, conv, rows, k, delta, log_decay, fresh, count, head,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, STATE_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """S·e^{c_n} + Σ_{j<n} e^{c_n - c_j} k_j ⊗ δ_j for one value head, and the inputs of the convolution."""
    b, g, r = head // (G * R), head // R % G, head % R
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    state_row, n = tl.load(rows + b), tl.load(count + b)
    # Rows past the end are padding, and a count of 0 changes nothing.
    n = tl.where(state_row < STATE_ROWS, n, 0)
    is_active = tl.where(n > 0, 1, 0)
    state_row = tl.minimum(state_row, STATE_ROWS - 1).to(tl.int64)
    offset = ((state_row * (G * R) + head % (G * R)) * DK + dk[:, None]) * DV + dv[None, :]
    state_mask = dk[:, None] < is_active * DK
    s = tl.load(state + offset, mask=state_mask, other=0.0)
    if T == 1:
        decay = tl.load(log_decay + head)
        new = tl.load(delta + head * DV + dv)
        key = tl.load(k + (b * G + g) * DK + dk)
        s = s * tl.exp(decay) + key[:, None] * new[None, :]
    else:
        t = tl.arange(0, BT)
        decay = tl.load(log_decay + ((b * T + t) * G + g) * R + r, mask=t < T, other=0.0)
        new = tl.load(
            delta + (((b * T + t) * G + g) * R + r)[:, None] * DV + dv[None, :], mask=t[:, None] < T, other=0.0
        )
        key = tl.load(k + ((b * T + t) * G + g)[:, None] * DK + dk[None, :], mask=t[:, None] < T, other=0.0)
        # Selected, not multiplied by zero: uncounted tokens may be NaN.
        is_counted = t < n
        decay = tl.where(is_counted, decay, 0.0)
        # c_n - c_j is summed over the later tokens: a difference of two sums has the roundings of the larger one.
        later = tl.where(t[None, :] > t[:, None], decay[None, :], 0.0)
        decay_to_end = tl.exp(tl.sum(later, axis=1))
        new = tl.where(is_counted[:, None], new * decay_to_end[:, None], 0.0)
        key = tl.where(is_counted[:, None], key, 0.0)
        s = s * tl.exp(tl.sum(decay, axis=0)) + tl.dot(tl.trans(key), new, input_precision=PRECISION)
    # The last inputs of the convolution: all loads come before the first store.
    j = tl.arange(0, 4)[:, None]
    source = n + j
    is_old, in_window = source < W - 1, j < is_active * (W - 1)
    old_inputs = conv + ((state_row * (W - 1) + source) * G + g) * C
    new_inputs = fresh + ((b * T + source - (W - 1)) * G + g) * C
    target = conv + ((state_row * (W - 1) + j) * G + g) * C
    # Channels of queries and keys are written by the program of the first value head.
    in_key_window = j < tl.where(r == 0, is_active * (W - 1), 0)
    c = tl.arange(0, 2 * DK)[None, :]
    keys = tl.load(old_inputs + c, mask=in_key_window & is_old, other=0.0)
    new_keys = tl.load(new_inputs + c, mask=in_key_window & (source >= W - 1), other=0.0)
    v = 2 * DK + r * DV + dv[None, :]
    values = tl.load(old_inputs + v, mask=in_window & is_old, other=0.0)
    new_values = tl.load(new_inputs + v, mask=in_window & (source >= W - 1), other=0.0)
    tl.debug_barrier()
    tl.store(target + c, tl.where(is_old, keys, new_keys), mask=in_key_window)
    tl.store(target + v, tl.where(is_old, values, new_values), mask=in_window)
    tl.store(state + offset, s, mask=state_mask)


@triton.jit
def _replay(
    state, conv, rows, k, delta, log_decay, fresh, count,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, STATE_ROWS: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_replay_head` of one layer."""
    wait_for_inputs(DEPENDENT)
    _replay_head(
        state, conv, rows, k, delta, log_decay, fresh, count, tl.program_id(0), T, G, R, DK, DV, C, W, BT, STATE_ROWS,
        PRECISION,
    )  # fmt: skip


@triton.jit
def _replay_layers(
    s0, c0, r0, k0, d0, g0, x0, s1, c1, r1, k1, d1, g1, x1, s2, c2, r2, k2, d2, g2, x2, s3, c3, r3, k3, d3, g3, x3,
    s4, c4, r4, k4, d4, g4, x4, s5, c5, r5, k5, d5, g5, x5, s6, c6, r6, k6, d6, g6, x6, s7, c7, r7, k7, d7, g7, x7,
    s8, c8, r8, k8, d8, g8, x8, s9, c9, r9, k9, d9, g9, x9, s10, c10, r10, k10, d10, g10, x10,
    s11, c11, r11, k11, d11, g11, x11, s12, c12, r12, k12, d12, g12, x12, s13, c13, r13, k13, d13, g13, x13,
    s14, c14, r14, k14, d14, g14, x14, s15, c15, r15, k15, d15, g15, x15,
    count,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, STATE_ROWS: tl.constexpr, PRECISION: tl.constexpr,
    LAYERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_replay_head` of LAYERS layers, the second axis of the programs; the arrays of others are not read."""
    wait_for_inputs(DEPENDENT)
    layers = (
        (s0, c0, r0, k0, d0, g0, x0), (s1, c1, r1, k1, d1, g1, x1), (s2, c2, r2, k2, d2, g2, x2),
        (s3, c3, r3, k3, d3, g3, x3), (s4, c4, r4, k4, d4, g4, x4), (s5, c5, r5, k5, d5, g5, x5),
        (s6, c6, r6, k6, d6, g6, x6), (s7, c7, r7, k7, d7, g7, x7), (s8, c8, r8, k8, d8, g8, x8),
        (s9, c9, r9, k9, d9, g9, x9), (s10, c10, r10, k10, d10, g10, x10), (s11, c11, r11, k11, d11, g11, x11),
        (s12, c12, r12, k12, d12, g12, x12), (s13, c13, r13, k13, d13, g13, x13), (s14, c14, r14, k14, d14, g14, x14),
        (s15, c15, r15, k15, d15, g15, x15),
    )  # fmt: skip
    layer = tl.program_id(1)
    state, conv, rows, k, delta, log_decay, fresh = layers[0]
    for i in tl.static_range(1, LAYERS):
        if layer == i:
            state, conv, rows, k, delta, log_decay, fresh = layers[i]
    _replay_head(
        state, conv, rows, k, delta, log_decay, fresh, count, tl.program_id(0), T, G, R, DK, DV, C, W, BT, STATE_ROWS,
        PRECISION,
    )  # fmt: skip


def why_not(tokens: int, state: DeltaState) -> str | None:
    """The reason why the kernels do not support this many tokens over an `ops.cache.DeltaState`, or None."""
    if tokens > TOKENS:
        return f"{tokens} tokens: the kernel takes {TOKENS} at most"
    return why_not_sizes(state)


def _sizes(state: DeltaState, tokens: int) -> dict[str, int]:
    rows, g, r, dk, dv = state.recurrent.shape
    channels, kernel = 2 * dk + r * dv, state.conv_inputs.shape[1] + 1
    sizes = {"T": tokens, "W": kernel, "BT": TOKENS, "G": g, "R": r, "DK": dk, "DV": dv}
    return sizes | {"C": channels, "STATE_ROWS": rows}


def gated_delta_triton(
    card: Card,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    a_log: Float[Array, "G R"],
    dt_bias: Float[Array, "G R"],
    norm: Float[Array, " Dv"],
    eps: float,
    in_parts: bool = False,
) -> tuple[Array, Array | None, tuple[Array, Array, Array, Array]]:
    """`ops.gated_delta.gated_delta`, with the card in place of the backend and the fields of the weights unpacked.

    The convolution of bfloat16 inputs is summed in float32. With ``in_parts``, few heads are divided over programs, and
    products with the state over keys.

    Returns:
        y; the squares of `ops.linear.DeferredDivision` where programs have parts of heads, or None; and the fields of
        the record as a tuple.
    """
    b, t = qkvz.shape[:2]
    sizes = _sizes(state, t)
    g, r, dk, dv = (sizes[n] for n in ("G", "R", "DK", "DV"))
    programs, parts = b * g * r, 1
    in_parts = in_parts and state.conv_inputs.dtype == qkvz.dtype
    # More rows are divided by XLA, in a kernel of its own; and float16 might overflow before the division.
    if in_parts and b * t <= MAX_ROWS and qkvz.dtype != jnp.float16 and programs * PARTS <= card.scaled(FEW_PROGRAMS):
        parts = min(PARTS, dv // LEAST_VALUES)
    # One token has no matrix product, which would need more warps.
    warps = FEW_WARPS if t > 1 and programs <= card.scaled(FEW_PROGRAMS) else WARPS
    out = [
        jax.ShapeDtypeStruct((b, t, g, r, dv), qkvz.dtype),
        jax.ShapeDtypeStruct((b, t, g, dk), jnp.float32),
        jax.ShapeDtypeStruct((b, t, g, r, dv), jnp.float32),
        jax.ShapeDtypeStruct((b, t, g, r), jnp.float32),
        jax.ShapeDtypeStruct((b, t, *state.conv_inputs.shape[2:]), qkvz.dtype),
        jax.ShapeDtypeStruct((b, t, g, r, parts) if parts > 1 else (0,), jnp.float32),
    ]
    args = [qkvz, gates, state.conv_inputs, conv_weight, a_log, dt_bias, norm, state.recurrent, state.row_indices()]
    if t == 1:
        kernel, sizes = _mix_one, {n: sizes[n] for n in ("G", "R", "DK", "DV", "C", "W", "STATE_ROWS")}
    else:
        kernel, exact = _mix, qkvz.dtype == jnp.float32
        sizes |= {"PRECISION": "ieee" if exact else "tf32", "SMALL": "ieee" if exact else "tf32x3"}
        sizes |= {"BK": min(KEYS, dk) if in_parts else dk, "ONE_LOAD": in_parts}
    y, k, delta, log_decay, conv, squares = triton_call(
        card, kernel, args, out, (programs, parts), num_warps=warps, num_stages=1 if in_parts else 3, EPS=eps,
        CZ=qkvz.shape[-1], PARTS=parts, **sizes,
    )  # fmt: skip
    return y, squares if parts > 1 else None, (k, delta, log_decay, conv)


def replay_triton(card: Card, state: DeltaState, record: DeltaRecord, n: Int[Array, " B"]) -> DeltaState:
    """`ops.gated_delta.replay`, with the card in place of the backend."""
    return _replayed(card, _replay, [state], [record], n, {})[0]


def why_not_layers(states: Sequence[DeltaState], records: Sequence[DeltaRecord]) -> str | None:
    """The reason why `replay_layers_triton` does not support these layers, or None."""
    if len(states) < 2:
        return "one layer: the kernel is for several"
    shapes = {tuple((x.shape, x.dtype) for x in jax.tree.leaves(pair)) for pair in zip(states, records, strict=True)}
    if len(shapes) > 1:
        return f"layers of {len(shapes)} shapes: the kernel takes one"
    return why_not(records[0].k.shape[1], states[0])


def replay_layers_triton(
    card: Card, states: Sequence[DeltaState], records: Sequence[DeltaRecord], n: Int[Array, " B"]
) -> tuple[DeltaState, ...]:
    """`ops.gated_delta.replay_layers`, with the card in place of the backend, by as few launches of about one size."""
    after = list(states)
    launches = -(-len(states) // MAX_LAYERS)
    for i in range(launches):
        some = states[i::launches], records[i::launches]
        after[i::launches] = _replayed(card, _replay_layers, *some, n, {"LAYERS": len(some[0])}, MAX_LAYERS)
    return tuple(after)


def _replayed(
    card: Card,
    kernel: Any,
    states: Sequence[DeltaState],
    records: Sequence[DeltaRecord],
    n: Int[Array, " B"],
    meta: dict[str, int],
    room: int = 1,
) -> list[DeltaState]:
    """The states after one launch of a kernel with arguments for ``room`` layers."""
    b, t, g = records[0].k.shape[:3]
    sizes, grid = _sizes(states[0], t) | meta, (b * g * states[0].recurrent.shape[2], len(states))
    warps = FEW_WARPS if math.prod(grid) <= card.scaled(FEW_PROGRAMS) else WARPS
    pairs = zip(states, records, strict=True)
    args = [x for s, r in pairs for x in (s.recurrent, s.conv_inputs, s.row_indices(), *jax.tree.leaves(r))]
    of_layer = len(args) // len(states)
    args += [n] * (of_layer * (room - len(states)) + 1)
    # Products of bfloat16 models are TF32, as XLA's are; sums are float32.
    precision = "ieee" if records[0].conv_inputs.dtype == jnp.float32 else "tf32"
    written = triton_call(
        card, kernel, args, [], grid,
        in_place=tuple(of_layer * i + j for i in range(len(states)) for j in (0, 1)), num_warps=warps,
        PRECISION=precision, **sizes,
    )  # fmt: skip
    arrays = zip(states, written[::2], written[1::2], strict=True)
    return [DeltaState(recurrent, conv, state.rows) for state, recurrent, conv in arrays]
