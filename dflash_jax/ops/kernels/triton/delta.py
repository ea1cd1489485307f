"""Gated DeltaNet of few new tokens in Triton: convolution, gates, delta rule and gated norm in one kernel, the state
read once; and another that writes what was accepted into the state, where it lies.

Each program has one value head of one row. Letters as in `models.gated_delta`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call

# Tokens of a chunk, all that a program takes.
TOKENS = 16
# Up to so many programs have more warps: there is nothing else to keep the accelerator busy (H200).
FEW, FEW_WARPS, WARPS = 264, 8, 4


@triton.jit
def _convolved(
    x, held, taps, record, b, line, g, first, recorded,
    T: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of N channels from ``first`` on, [BT, N]; what went in is kept of the first
    ``recorded`` tokens."""
    t = tl.arange(0, BT)[:, None]
    c = first + tl.arange(0, N)[None, :]
    total = tl.zeros([BT, N], tl.float32)
    for j in tl.static_range(W):
        s = t - (W - 1) + j
        value = tl.load(x + ((b * T + s) * G + g) * CZ + c, mask=(s >= 0) & (t < T), other=0.0)
        if j == W - 1:
            tl.store(record + ((b * T + t) * G + g) * C + c, value, mask=t < recorded)
            value = value.to(tl.float32)
        else:
            old = tl.load(held + ((line * (W - 1) + s + W - 1) * G + g) * C + c, mask=(s < 0) & (t < T), other=0.0)
            value = value.to(tl.float32) + old.to(tl.float32)
        total += value * tl.load(taps + (g * C + c) * W + j).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _log_decay(alpha, a_log, dt_bias):
    """-e^a_log · softplus(alpha + dt_bias)."""
    alpha = alpha.to(tl.float32) + dt_bias.to(tl.float32)
    small = tl.exp(-tl.abs(alpha))
    one = 1.0 + small
    # log(1 + small) without the loss of what 1 + small rounds away.
    log1p = tl.where(one == 1.0, small, small * tl.log(one) / tl.where(one == 1.0, 1.0, one - 1.0))
    return -tl.exp(a_log.to(tl.float32)) * (tl.maximum(alpha, 0.0) + log1p)


@triton.jit
def _inverse(a, T: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Of unit lower triangular matrices I + a, a [BT, BT] strictly lower, by doubling blocks of the diagonal."""
    i = tl.arange(0, BT)[:, None]
    j = tl.arange(0, BT)[None, :]
    made = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in tl.static_range(1, 4):
        block = 1 << level
        if block < T:
            corner = tl.where((i // (2 * block) == j // (2 * block)) & (i // block != j // block), a, 0.0)
            made -= tl.dot(made, tl.dot(corner, made, input_precision=PRECISION), input_precision=PRECISION)
    return made


@triton.jit
def _mix(
    x, gates, held, taps, a_log, dt_bias, norm, state, rows, y, k_out, delta_out, decay_out, conv_out,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    CZ: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, ALL: tl.constexpr, EPS: tl.constexpr,
    PRECISION: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, g, r = head // (G * R), head // R % G, head % R
    t = tl.arange(0, BT)
    row, column = t[:, None], t[None, :]
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    # What takes longest to come is asked for first.
    line = tl.minimum(tl.load(rows + b), ALL - 1).to(tl.int64)
    s = tl.load(state + ((line * (G * R) + head % (G * R)) * DK + dk[:, None]) * DV + dv[None, :])
    z = tl.load(x + ((b * T + row) * G + g) * CZ + C + r * DV + dv[None, :], mask=row < T, other=0.0).to(tl.float32)
    scale = tl.load(norm + dv).to(tl.float32)
    place = ((b * T + t) * 2 * G + g) * R + r
    beta = tl.load(gates + place, mask=t < T, other=0.0).to(tl.float32)
    alpha = tl.load(gates + place + G * R, mask=t < T, other=0.0)
    log_decay = _log_decay(alpha, tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
    # Keys are of all value heads of a key head: the first one's program records them.
    first = tl.where(r == 0, T, 0)
    q = _convolved(x, held, taps, conv_out, b, line, g, 0, first, T, G, C, CZ, W, BT, DK)
    k = _convolved(x, held, taps, conv_out, b, line, g, DK, first, T, G, C, CZ, W, BT, DK)
    v = _convolved(x, held, taps, conv_out, b, line, g, 2 * DK + r * DV, T, T, G, C, CZ, W, BT, DV)
    q = q * tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None] * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]
    tl.store(k_out + ((b * T + row) * G + g) * DK + dk[None, :], k, mask=row < first)
    beta = tl.where(t < T, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    log_decay = tl.where(t < T, log_decay, 0.0)
    tl.store(decay_out + ((b * T + t) * G + g) * R + r, log_decay, mask=t < T)

    upto = tl.cumsum(log_decay, axis=0)
    # The exponent is masked before exp: above the diagonal it is positive and may overflow.
    decay = tl.exp(tl.where(row >= column, upto[:, None] - upto[None, :], float("-inf")))
    gram = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    since = tl.exp(upto)[:, None]
    delta = beta[:, None] * (v - since * tl.dot(k, s, input_precision=PRECISION))
    a = tl.where(row > column, beta[:, None] * gram * decay, 0.0)
    delta = tl.dot(_inverse(a, T, BT, SMALL), delta, input_precision=SMALL)
    place = ((b * T + row) * G + g) * R + r
    tl.store(delta_out + place * DV + dv[None, :], delta, mask=row < T)
    out = since * tl.dot(q, s, input_precision=PRECISION)
    out += tl.dot(scores * decay, delta, input_precision=SMALL)
    out *= tl.rsqrt(tl.sum(out * out, axis=1) / DV + EPS)[:, None] * scale[None, :]
    out *= z / (1.0 + tl.exp(-z))
    tl.store(y + place * DV + dv[None, :], out.to(y.dtype.element_ty), mask=row < T)


@triton.jit
def _convolved_one(
    x, held, taps, record, b, line, g, first, recorded,
    G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`_convolved` of one token, [N]; what went in is kept where ``recorded`` is not 0."""
    n = tl.arange(0, N)
    c = first + n
    value = tl.load(x + (b * G + g) * CZ + c)
    total = value.to(tl.float32) * tl.load(taps + (g * C + c) * W + W - 1).to(tl.float32)
    for j in tl.static_range(W - 1):
        old = tl.load(held + ((line * (W - 1) + j) * G + g) * C + c).to(tl.float32)
        total += old * tl.load(taps + (g * C + c) * W + j).to(tl.float32)
    tl.store(record + (b * G + g) * C + c, value, mask=n < recorded * N)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _mix_one(
    x, gates, held, taps, a_log, dt_bias, norm, state, rows, y, k_out, delta_out, decay_out, conv_out,
    G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr,
    W: tl.constexpr, ALL: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """`_mix` of one token a row: no products of matrices."""
    head = tl.program_id(0)
    b, g, r = head // (G * R), head // R % G, head % R
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    line = tl.minimum(tl.load(rows + b), ALL - 1).to(tl.int64)
    s = tl.load(state + ((line * (G * R) + head % (G * R)) * DK + dk[:, None]) * DV + dv[None, :])
    z = tl.load(x + (b * G + g) * CZ + C + r * DV + dv).to(tl.float32)
    scale = tl.load(norm + dv).to(tl.float32)
    place = (b * 2 * G + g) * R + r
    beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + place).to(tl.float32)))
    log_decay = _log_decay(tl.load(gates + place + G * R), tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
    first = tl.where(r == 0, 1, 0)
    q = _convolved_one(x, held, taps, conv_out, b, line, g, 0, first, G, C, CZ, W, DK)
    k = _convolved_one(x, held, taps, conv_out, b, line, g, DK, first, G, C, CZ, W, DK)
    v = _convolved_one(x, held, taps, conv_out, b, line, g, 2 * DK + r * DV, 1, G, C, CZ, W, DV)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    tl.store(k_out + (b * G + g) * DK + dk, k, mask=dk < first * DK)
    tl.store(decay_out + head, log_decay)
    since = tl.exp(log_decay)
    delta = beta * (v - since * tl.sum(k[:, None] * s, axis=0))
    tl.store(delta_out + head * DV + dv, delta)
    out = since * tl.sum(q[:, None] * s, axis=0) + tl.sum(q * k, axis=0) * delta
    out *= tl.rsqrt(tl.sum(out * out, axis=0) / DV + EPS) * scale
    out *= z / (1.0 + tl.exp(-z))
    tl.store(y + head * DV + dv, out.to(y.dtype.element_ty))


@triton.jit
def _replay(
    state, conv, rows, k, delta, log_decay, fresh, count,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    b, g, r = head // (G * R), head // R % G, head % R
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    line, n = tl.load(rows + b), tl.load(count + b)
    # Rows past the end are nobody's, and where nothing is kept nothing changes.
    n = tl.where(line < ALL, n, 0)
    goes_on = tl.where(n > 0, 1, 0)
    line = tl.minimum(line, ALL - 1).to(tl.int64)
    place = ((line * (G * R) + head % (G * R)) * DK + dk[:, None]) * DV + dv[None, :]
    kept_state = dk[:, None] < goes_on * DK
    s = tl.load(state + place, mask=kept_state, other=0.0)
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
        # Selected, never multiplied by zero: what was not kept may hold anything.
        kept = t < n
        decay = tl.where(kept, decay, 0.0)
        rest = tl.exp(tl.sum(decay, axis=0) - tl.cumsum(decay, axis=0))
        new = tl.where(kept[:, None], new * rest[:, None], 0.0)
        key = tl.where(kept[:, None], key, 0.0)
        s = s * tl.exp(tl.sum(decay, axis=0)) + tl.dot(tl.trans(key), new, input_precision=PRECISION)
    # The last inputs of the convolution: all are read before any is written.
    j = tl.arange(0, 4)[:, None]
    source = n + j
    old, live = source < W - 1, j < goes_on * (W - 1)
    held, now = conv + ((line * (W - 1) + source) * G + g) * C, fresh + ((b * T + source - (W - 1)) * G + g) * C
    into = conv + ((line * (W - 1) + j) * G + g) * C
    # Keys' and queries': by the first value head's program.
    first = j < tl.where(r == 0, goes_on * (W - 1), 0)
    c = tl.arange(0, 2 * DK)[None, :]
    keys = tl.load(held + c, mask=first & old, other=0.0)
    new_keys = tl.load(now + c, mask=first & (source >= W - 1), other=0.0)
    v = 2 * DK + r * DV + dv[None, :]
    values = tl.load(held + v, mask=live & old, other=0.0)
    new_values = tl.load(now + v, mask=live & (source >= W - 1), other=0.0)
    tl.debug_barrier()
    tl.store(into + c, tl.where(old, keys, new_keys), mask=first)
    tl.store(into + v, tl.where(old, values, new_values), mask=live)
    tl.store(state + place, s, mask=kept_state)


def why_not(tokens: int, state) -> str | None:
    """Why the kernels do not take ``tokens`` tokens over an `ops.cache.DeltaState`; None where they do."""
    if tokens > TOKENS:
        return f"{tokens} tokens: it takes {TOKENS} at most"
    if state.conv.shape[1] > 4:
        return f"a convolution of {state.conv.shape[1] + 1} taps: it takes 5 at most"
    sizes = state.recurrent.shape[-2:]
    if any(not 16 <= n <= 128 or n & (n - 1) for n in sizes):
        return f"heads of {list(sizes)}: sizes must be powers of two from 16 to 128"
    return None


def _sizes(state, tokens: int) -> dict:
    rows, g, r, dk, dv = state.recurrent.shape
    channels, kernel = 2 * dk + r * dv, state.conv.shape[1] + 1
    return {"T": tokens, "W": kernel, "BT": TOKENS, "G": g, "R": r, "DK": dk, "DV": dv, "C": channels, "ALL": rows}


def mix_triton(card: Card, qkvz, gates, state, taps, a_log, dt_bias, norm, eps: float):
    """As `ops.gated_delta.reference`, the record as a tuple; the convolution of bfloat16 inputs is summed in
    float32."""
    b, t = qkvz.shape[:2]
    sizes = _sizes(state, t)
    g, r, dk, dv = (sizes[n] for n in ("G", "R", "DK", "DV"))
    programs = b * g * r
    # One token has no product of matrices that would want many.
    warps = FEW_WARPS if t > 1 and programs <= FEW else WARPS
    out = [
        jax.ShapeDtypeStruct((b, t, g, r, dv), qkvz.dtype),
        jax.ShapeDtypeStruct((b, t, g, dk), jnp.float32),
        jax.ShapeDtypeStruct((b, t, g, r, dv), jnp.float32),
        jax.ShapeDtypeStruct((b, t, g, r), jnp.float32),
        jax.ShapeDtypeStruct((b, t, *state.conv.shape[2:]), qkvz.dtype),
    ]
    args = [qkvz, gates, state.conv, taps, a_log, dt_bias, norm, state.recurrent, state.row_indices()]
    if t == 1:
        kernel, sizes = _mix_one, {n: sizes[n] for n in ("G", "R", "DK", "DV", "C", "W", "ALL")}
    else:
        kernel, exact = _mix, qkvz.dtype == jnp.float32
        sizes |= {"PRECISION": "ieee" if exact else "tf32", "SMALL": "ieee" if exact else "tf32x3"}
    y, *record = triton_call(card, kernel, args, out, (programs,), num_warps=warps, EPS=eps, CZ=qkvz.shape[-1], **sizes)
    return y, tuple(record)


def replay_triton(card: Card, state, record, n):
    """As `ops.gated_delta.replay`, (recurrent, conv)."""
    b, t, g = record.k.shape[:3]
    sizes, programs = _sizes(state, t), b * g * state.recurrent.shape[2]
    held = [state.recurrent, state.conv, state.row_indices()]
    args = [*held, record.k, record.delta, record.log_decay, record.conv, n]
    # Of bfloat16 models the products are tf32, as XLA's are; the sum is float32.
    precision = "ieee" if record.conv.dtype == jnp.float32 else "tf32"
    return triton_call(
        card, _replay, args, [], (programs,), in_place=(0, 1), num_warps=FEW_WARPS if programs <= FEW else WARPS,
        PRECISION=precision, **sizes,
    )  # fmt: skip
