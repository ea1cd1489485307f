"""Gated DeltaNet of many new tokens in Triton: a kernel for what each chunk of them is by itself, from the convolution
on, and one for what goes from chunk to chunk. Letters as in `models.gated_delta`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.delta import _log_decay
from dflash_jax.ops.kernels.triton.launch import triton_call

# Tokens of a chunk.
CHUNK = 64
# As many programs from chunk to chunk as Hopper's cards have multiprocessors, each of so many values of a head: at
# least, at most.
PROGRAMS, VALUES = 132, (32, 64)


@triton.jit
def _convolved(
    x, held, taps, b, line, g, first, start, end,
    T: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of N channels from ``first`` on, of the tokens from ``start`` to ``end``, [M, N]; zeros
    behind it."""
    t, c = start + tl.arange(0, M)[:, None], first + tl.arange(0, N)[None, :]
    total = tl.zeros([M, N], tl.float32)
    for j in tl.static_range(W):
        s = t - (W - 1) + j
        before = held + ((line * (W - 1) + s + W - 1) * G + g) * C
        value = tl.load(tl.where(s < 0, before, x + ((b * T + s) * G + g) * CZ) + c, mask=t < end, other=0.0)
        total += value.to(tl.float32) * tl.load(taps + (g * C + c) * W + j).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _inverse(a, M: tl.constexpr, LEVELS: tl.constexpr):
    """As `triton_delta._inverse`, of 2^LEVELS tokens, in a loop: side by side, the products of all levels would not
    find room in Blackwell's tensor memory."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    made = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in range(1, LEVELS):
        corner = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), a, 0.0)
        made -= tl.dot(made, tl.dot(corner, made))
    return made


@triton.jit
def _prepare(
    x, gates, held, taps, a_log, dt_bias, rows, valid, u, w, q_out, scores, k_rest, left, k_out, decay_out,
    T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    CZ: tl.constexpr, W: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, ALL: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """A chunk of a key head of a row, [count, B G] programs. Of the first ``valid`` tokens of a row; those behind them
    change nothing. ``RECORD``: k_out and decay_out are written."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, g = (head // G).to(tl.int64), head % G
    line = tl.minimum(tl.load(rows + b), ALL - 1).to(tl.int64)
    end = tl.load(valid + b)
    m, dk, dv = tl.arange(0, M), tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
    row, column, t = m[:, None], m[None, :], chunk * M + m
    q = _convolved(x, held, taps, b, line, g, 0, chunk * M, end, T, G, C, CZ, W, M, DK)
    k = _convolved(x, held, taps, b, line, g, DK, chunk * M, end, T, G, C, CZ, W, M, DK)
    # Rounded here, before anything is made of them, so that all of it is made of the same.
    q = (q * tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None]).to(w.dtype.element_ty)
    k = (k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]).to(w.dtype.element_ty)
    if RECORD:
        tl.store(k_out + ((b * T + t) * G + g)[:, None] * DK + dk, k.to(tl.float32), mask=t[:, None] < T)
    gram, raw = tl.dot(k, tl.trans(k)), tl.dot(q, tl.trans(k)) * (DK**-0.5)
    for r in range(R):
        place = ((b * T + t) * 2 * G + g) * R + r
        beta = tl.load(gates + place, mask=t < end, other=0.0).to(tl.float32)
        alpha = tl.load(gates + place + G * R, mask=t < end, other=0.0)
        log_decay = _log_decay(alpha, tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
        beta = tl.where(t < end, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
        log_decay = tl.where(t < end, log_decay, 0.0)
        if RECORD:
            tl.store(decay_out + ((b * T + t) * G + g) * R + r, log_decay, mask=t < T)
        upto, total = tl.cumsum(log_decay, axis=0), tl.sum(log_decay, axis=0)
        # The exponent is masked before exp: above the diagonal it is positive and may overflow.
        decay = tl.exp(tl.where(row >= column, upto[:, None] - upto[None, :], float("-inf")))
        inverse = _inverse(tl.where(row > column, beta[:, None] * gram * decay, 0.0), M, LEVELS)
        v = _convolved(x, held, taps, b, line, g, 2 * DK + r * DV, chunk * M, end, T, G, C, CZ, W, M, DV)
        since = tl.exp(upto)[:, None]
        at = (chunk * tl.num_programs(1) + head).to(tl.int64) * R + r
        place = (at * M + m)[:, None]
        tl.store(u + place * DV + dv, tl.dot(inverse, beta[:, None] * v))
        tl.store(w + place * DK + dk, tl.dot(inverse, beta[:, None] * since * k).to(w.dtype.element_ty))
        tl.store(q_out + place * DK + dk, (q * (since * DK**-0.5)).to(w.dtype.element_ty))
        tl.store(scores + place * M + column, (raw * decay).to(w.dtype.element_ty))
        tl.store(k_rest + place * DK + dk, (k * tl.exp(total - upto)[:, None]).to(w.dtype.element_ty))
        tl.store(left + at, tl.exp(total))


@triton.jit
def _chunks(
    u, w, q, scores, k, left, state, rows, valid, out, delta,
    T: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, GR: tl.constexpr, M: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr, ALL: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Some values of a head of a row, [B G R, Dv / BV] programs, which keep their state in registers. ``RECORD``: δ is
    written; else the state behind the last token, where it was read."""
    head = tl.program_id(0)
    value = (tl.program_id(1) * BV + tl.arange(0, BV))[None, :]
    m, dk = tl.arange(0, M), tl.arange(0, DK)
    row_of_state = tl.load(rows + head // GR)
    line = tl.minimum(row_of_state, ALL - 1).to(tl.int64)
    held_at = ((line * GR + head % GR) * DK + dk[:, None]) * DV + value
    s = tl.load(state + held_at)
    for c in range(COUNT):
        chunk = head.to(tl.int64) + c * HEADS
        row = (chunk * M + m)[:, None]
        old, new = tl.load(q + row * DK + dk[None, :]), tl.load(k + row * DK + dk[None, :])
        held = s.to(old.dtype)
        d = tl.load(u + row * DV + value) - tl.dot(tl.load(w + row * DK + dk[None, :]), held)
        rounded = d.to(old.dtype)
        o = tl.dot(old, held) + tl.dot(tl.load(scores + row * M + m[None, :]), rounded)
        s = s * tl.load(left + chunk) + tl.dot(tl.trans(new), rounded)
        token = (c * M + m)[:, None]
        place = ((head // GR * T + token) * GR + head % GR).to(tl.int64) * DV + value
        tl.store(out + place, o, mask=token < T)
        if RECORD:
            tl.store(delta + place, d, mask=token < T)
    if not RECORD:
        # Rows past the end are padding, and where no token is valid nothing changes.
        is_written = (row_of_state < ALL) & (tl.load(valid + head // GR) > 0)
        tl.store(state + held_at, s, mask=dk[:, None] < tl.where(is_written, DK, 0))


def why_not(state, dtype) -> str | None:
    """Why the kernels do not take an `ops.cache.DeltaState` of a model in ``dtype``; None where they do. Exact products
    of float32 would not find room in their registers, and states could outgrow float16."""
    if dtype != jnp.bfloat16 or state.conv.dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}: it is for bfloat16"
    if state.conv.shape[1] > 4:
        return f"a convolution of {state.conv.shape[1] + 1} taps: it takes 5 at most"
    sizes = state.recurrent.shape[-2:]
    if any(not 16 <= n <= 128 or n & (n - 1) for n in sizes):
        return f"heads of {list(sizes)}: sizes must be powers of two from 16 to 128"
    return None


def prepare(card: Card, qkvz, gates, state, taps, a_log, dt_bias, valid=None):
    """What `from_chunk_to_chunk` takes, [count, B, G, R, M, ·]: u (Dv), and in qkvz's dtype w, q (Dk), scores (M) and k
    (Dk); left [count, B, G, R]; and for the record k [B, T, G, Dk] and log_decay [B, T, G, R]. ``valid`` int32 [B]: how
    many of the tokens count, where no record is wanted; what comes for one is then no more than a place."""
    (b, t), (_, g, r, dk, dv) = qkvz.shape[:2], state.recurrent.shape
    m = min(CHUNK, triton.next_power_of_2(t))
    count, is_recorded = -(-t // m), valid is None
    out = [jax.ShapeDtypeStruct((count, b, g, r, m, dv), jnp.float32)]
    out += [jax.ShapeDtypeStruct((count, b, g, r, m, n), qkvz.dtype) for n in (dk, dk, m, dk)]
    record = [(b, t, g, dk), (b, t, g, r)] if is_recorded else [(1,), (1,)]
    out += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((count, b, g, r), *record)]
    args = [qkvz, gates, state.conv, taps, a_log, dt_bias, state.row_indices(), _valid(valid, b, t)]
    return triton_call(
        card, _prepare, args, out, (count, b * g), num_warps=8, num_stages=1, T=t, G=g, R=r, DK=dk, DV=dv,
        C=2 * dk + r * dv,
        CZ=qkvz.shape[-1], W=state.conv.shape[1] + 1, M=m, LEVELS=m.bit_length() - 1, ALL=state.recurrent.shape[0],
        RECORD=is_recorded,
    )  # fmt: skip


def _valid(valid, rows: int, tokens: int):
    return jnp.full(rows, tokens, jnp.int32) if valid is None else valid.astype(jnp.int32)


def from_chunk_to_chunk(card: Card, state, u, w, q, scores, k, left, tokens: int, valid=None):
    """Outputs of the first ``tokens``, [B, tokens, G, R, Dv], of a `ops.cache.DeltaState` and what `prepare` gives;
    products in q's dtype, sums in float32. And δ, in the same shape; or, with ``valid`` as in `prepare`, the recurrent
    state of all rows after those tokens, written in place."""
    count, b, g, r, m, dk = q.shape
    dv, heads, is_recorded = u.shape[-1], b * g * r, valid is None
    values = min(dv, VALUES[1])
    while values > VALUES[0] and 2 * heads * dv // values <= PROGRAMS:
        values //= 2
    shape = (b, tokens, g, r, dv)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape if is_recorded else (1,))]
    args = [u, w, q, scores, k, left, state.recurrent, state.row_indices(), _valid(valid, b, tokens)]
    *recurrent, out, delta = triton_call(
        card, _chunks, args, out, (heads, dv // values), in_place=() if is_recorded else (6,), num_warps=4,
        num_stages=2,
        T=tokens, COUNT=count, HEADS=heads, GR=g * r, M=m, DK=dk, DV=dv, BV=values, ALL=state.recurrent.shape[0],
        RECORD=is_recorded,
    )  # fmt: skip
    return (out, delta) if is_recorded else (out, *recurrent)


def rule(card: Card, qkvz, gates, state, taps, a_log, dt_bias):
    """Convolution, gates and delta rule: outputs [B, T, G, R, Dv], and k, δ and log_decay of the record."""
    *chunks, k, log_decay = prepare(card, qkvz, gates, state, taps, a_log, dt_bias)
    out, delta = from_chunk_to_chunk(card, state, *chunks, qkvz.shape[1])
    return out, k, delta, log_decay


def advance(card: Card, qkvz, gates, state, taps, a_log, dt_bias, valid):
    """`rule` of tokens of which the first ``valid`` int [B] count: outputs, and the recurrent state of all rows."""
    *chunks, _, _ = prepare(card, qkvz, gates, state, taps, a_log, dt_bias, valid)
    return from_chunk_to_chunk(card, state, *chunks, qkvz.shape[1], valid)
