"""Gated DeltaNet of many new tokens in Triton.

One kernel computes what each chunk needs independently of the others, from the convolution on; another one carries the
state from chunk to chunk (arXiv 2412.06464, section 3.3). Letters as in `ops.gated_delta`.
"""

# A Triton kernel is compiled from Python's syntax; Triton's annotations describe the host's objects.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.ops.cache import DeltaState
from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import triton_call
from dflash_jax.ops.kernels.triton.tiles import log_decay_of, next_power_of_two, why_not_sizes

# Tokens of a chunk.
CHUNK = 64
# Values of a head in each program of `_chunks`, least and most: as few as leave each multiprocessor one program.
VALUES = 32, 64


@triton.jit
def _convolved(
    x, conv_state, conv_weight, b, state_row, g, first, start, end,
    T: tl.constexpr, G: tl.constexpr, C: tl.constexpr, CZ: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Convolution and silu of N channels from ``first`` on, for tokens ``start`` to ``end``, [M, N], then zeros."""
    t, c = start + tl.arange(0, M)[:, None], first + tl.arange(0, N)[None, :]
    total = tl.zeros([M, N], tl.float32)
    for j in tl.static_range(W):
        s = t - (W - 1) + j
        previous = conv_state + ((state_row * (W - 1) + s + W - 1) * G + g) * C
        value = tl.load(tl.where(s < 0, previous, x + ((b * T + s) * G + g) * CZ) + c, mask=t < end, other=0.0)
        total += value.to(tl.float32) * tl.load(conv_weight + (g * C + c) * W + j).to(tl.float32)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _inverse(a, M: tl.constexpr, LEVELS: tl.constexpr):
    """`delta._inverse` of 2^LEVELS tokens in a loop; unrolled, its products do not fit Blackwell's tensor memory."""
    i, j = tl.arange(0, M)[:, None], tl.arange(0, M)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, a, 0.0)
    for level in range(1, LEVELS):
        corner = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), a, 0.0)
        inverse -= tl.dot(inverse, tl.dot(corner, inverse))
    return inverse


@triton.jit
def _prepare(
    x, gates, conv_state, conv_weight, a_log, dt_bias, rows, valid, u, w, q_out, scores, k_to_end, chunk_decay, k_out,
    decay_out, T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr,
    CZ: tl.constexpr, W: tl.constexpr, M: tl.constexpr, LEVELS: tl.constexpr, STATE_ROWS: tl.constexpr,
    RECORD: tl.constexpr,
):  # fmt: skip
    """One chunk of one key head of one batch entry, [count, B G] programs.

    The first ``valid`` tokens count; later ones change nothing. ``RECORD``: k_out and decay_out are written.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    b, g = (head // G).to(tl.int64), head % G
    state_row = tl.minimum(tl.load(rows + b), STATE_ROWS - 1).to(tl.int64)
    end = tl.load(valid + b)
    m, dk, dv = tl.arange(0, M), tl.arange(0, DK)[None, :], tl.arange(0, DV)[None, :]
    row, column, t = m[:, None], m[None, :], chunk * M + m
    q = _convolved(x, conv_state, conv_weight, b, state_row, g, 0, chunk * M, end, T, G, C, CZ, W, M, DK)
    k = _convolved(x, conv_state, conv_weight, b, state_row, g, DK, chunk * M, end, T, G, C, CZ, W, M, DK)
    # Rounded here, so that everything below is computed from the same values.
    q = (q * tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6)[:, None]).to(w.dtype.element_ty)
    k = (k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]).to(w.dtype.element_ty)
    if RECORD:
        tl.store(k_out + ((b * T + t) * G + g)[:, None] * DK + dk, k.to(tl.float32), mask=t[:, None] < T)
    gram, raw = tl.dot(k, tl.trans(k)), tl.dot(q, tl.trans(k)) * (DK**-0.5)
    for r in range(R):
        offset = ((b * T + t) * 2 * G + g) * R + r
        beta = tl.load(gates + offset, mask=t < end, other=0.0).to(tl.float32)
        alpha = tl.load(gates + offset + G * R, mask=t < end, other=0.0)
        log_decay = log_decay_of(alpha, tl.load(a_log + g * R + r), tl.load(dt_bias + g * R + r))
        beta = tl.where(t < end, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
        log_decay = tl.where(t < end, log_decay, 0.0)
        if RECORD:
            tl.store(decay_out + ((b * T + t) * G + g) * R + r, log_decay, mask=t < T)
        cumulative, total = tl.cumsum(log_decay, axis=0), tl.sum(log_decay, axis=0)
        # The exponent is masked before exp: above the diagonal it is positive and may overflow.
        decay = tl.exp(tl.where(row >= column, cumulative[:, None] - cumulative[None, :], float("-inf")))
        inverse = _inverse(tl.where(row > column, beta[:, None] * gram * decay, 0.0), M, LEVELS)
        v = _convolved(
            x, conv_state, conv_weight, b, state_row, g, 2 * DK + r * DV, chunk * M, end, T, G, C, CZ, W, M, DV
        )
        decay_from_start = tl.exp(cumulative)[:, None]
        chunk_head = (chunk * tl.num_programs(1) + head).to(tl.int64) * R + r
        offset = (chunk_head * M + m)[:, None]
        tl.store(u + offset * DV + dv, tl.dot(inverse, beta[:, None] * v))
        tl.store(w + offset * DK + dk, tl.dot(inverse, beta[:, None] * decay_from_start * k).to(w.dtype.element_ty))
        tl.store(q_out + offset * DK + dk, (q * (decay_from_start * DK**-0.5)).to(w.dtype.element_ty))
        tl.store(scores + offset * M + column, (raw * decay).to(w.dtype.element_ty))
        tl.store(k_to_end + offset * DK + dk, (k * tl.exp(total - cumulative)[:, None]).to(w.dtype.element_ty))
        tl.store(chunk_decay + chunk_head, tl.exp(total))


@triton.jit
def _chunks(
    u, w, q, scores, k, chunk_decay, state, rows, valid, out, delta,
    T: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, GR: tl.constexpr, M: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr, STATE_ROWS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """BV values of one head of one batch entry, [B G R, Dv / BV] programs, which keep their state in registers.

    ``RECORD``: δ is written; otherwise the state after the last token, in place.
    """
    head = tl.program_id(0)
    value = (tl.program_id(1) * BV + tl.arange(0, BV))[None, :]
    m, dk = tl.arange(0, M), tl.arange(0, DK)
    state_slot = tl.load(rows + head // GR)
    state_row = tl.minimum(state_slot, STATE_ROWS - 1).to(tl.int64)
    state_offset = ((state_row * GR + head % GR) * DK + dk[:, None]) * DV + value
    s = tl.load(state + state_offset)
    for c in range(COUNT):
        chunk = head.to(tl.int64) + c * HEADS
        row = (chunk * M + m)[:, None]
        q_chunk, k_chunk = tl.load(q + row * DK + dk[None, :]), tl.load(k + row * DK + dk[None, :])
        state_rounded = s.to(q_chunk.dtype)
        d = tl.load(u + row * DV + value) - tl.dot(tl.load(w + row * DK + dk[None, :]), state_rounded)
        delta_rounded = d.to(q_chunk.dtype)
        o = tl.dot(q_chunk, state_rounded) + tl.dot(tl.load(scores + row * M + m[None, :]), delta_rounded)
        s = s * tl.load(chunk_decay + chunk) + tl.dot(tl.trans(k_chunk), delta_rounded)
        token = (c * M + m)[:, None]
        offset = ((head // GR * T + token) * GR + head % GR).to(tl.int64) * DV + value
        tl.store(out + offset, o, mask=token < T)
        if RECORD:
            tl.store(delta + offset, d, mask=token < T)
    if not RECORD:
        # Rows past the end are padding, and where no token is valid nothing changes.
        is_written = (state_slot < STATE_ROWS) & (tl.load(valid + head // GR) > 0)
        tl.store(state + state_offset, s, mask=dk[:, None] < tl.where(is_written, DK, 0))


def why_not(state: DeltaState, dtype: DTypeLike) -> str | None:
    """The reason why the kernels do not support an `ops.cache.DeltaState` of a model in ``dtype``, or None.

    Exact float32 products do not fit the kernels' registers, and states may exceed the range of float16.
    """
    if dtype != jnp.bfloat16 or state.conv_inputs.dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}: the kernel is for bfloat16"
    return why_not_sizes(state)


def prepare(
    card: Card,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    a_log: Float[Array, "G R"],
    dt_bias: Float[Array, "G R"],
    valid: Int[Array, " B"] | None = None,
) -> tuple[Array, ...]:
    """Computes the inputs of `from_chunk_to_chunk` and the record's keys and decays.

    Args:
        card: The card that tiles are chosen for.
        qkvz: As in `ops.gated_delta.gated_delta`, bfloat16.
        gates: As there.
        state: `ops.cache.DeltaState`.
        conv_weight: As in `ops.gated_delta.Weights`; likewise ``a_log`` and ``dt_bias``.
        a_log: See ``conv_weight``.
        dt_bias: See ``conv_weight``.
        valid: int32 [B], how many tokens count; the record is then not written. None: all tokens, with a record.

    Returns:
        u [count, B, G, R, M, Dv] float32; in qkvz's dtype w, q [count, B, G, R, M, Dk], scores [count, B, G, R, M, M]
        and k [count, B, G, R, M, Dk]; the decay of each chunk [count, B, G, R] float32; and for the record k [B, T,
        G, Dk] and log_decay [B, T, G, R], float32 (placeholders of one element without a record).
    """
    (b, t), (_, g, r, dk, dv) = qkvz.shape[:2], state.recurrent.shape
    m = min(CHUNK, next_power_of_two(t))
    count, is_recorded = -(-t // m), valid is None
    out = [jax.ShapeDtypeStruct((count, b, g, r, m, dv), jnp.float32)]
    out += [jax.ShapeDtypeStruct((count, b, g, r, m, n), qkvz.dtype) for n in (dk, dk, m, dk)]
    record = [(b, t, g, dk), (b, t, g, r)] if is_recorded else [(1,), (1,)]
    out += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((count, b, g, r), *record)]
    args = [qkvz, gates, state.conv_inputs, conv_weight, a_log, dt_bias, state.row_indices(), _valid(valid, b, t)]
    return triton_call(
        card, _prepare, args, out, (count, b * g), num_warps=8, num_stages=1,
        T=t, G=g, R=r, DK=dk, DV=dv, C=2 * dk + r * dv, CZ=qkvz.shape[-1], W=state.conv_inputs.shape[1] + 1, M=m,
        LEVELS=m.bit_length() - 1, STATE_ROWS=state.recurrent.shape[0], RECORD=is_recorded,
    )  # fmt: skip


def _valid(valid: Array | None, rows: int, tokens: int) -> Array:
    """``valid`` as int32, by default all tokens."""
    return jnp.full(rows, tokens, jnp.int32) if valid is None else valid.astype(jnp.int32)


def from_chunk_to_chunk(
    card: Card,
    state: DeltaState,
    u: Array,
    w: Array,
    q: Array,
    scores: Array,
    k: Array,
    chunk_decay: Array,
    tokens: int,
    valid: Int[Array, " B"] | None = None,
) -> tuple[Array, Array]:
    """The outputs of the delta rule from the results of `prepare`; products in q's dtype, sums in float32.

    Returns:
        Outputs [B, tokens, G, R, Dv] float32; and δ in the same shape or, with ``valid`` as in `prepare`, the recurrent
        state of all rows after the valid tokens, written in place.
    """
    count, b, g, r, m, dk = q.shape
    dv, heads, is_recorded = u.shape[-1], b * g * r, valid is None
    values = min(dv, VALUES[1])
    while values > VALUES[0] and 2 * heads * dv // values <= card.multiprocessors:
        values //= 2
    shape = (b, tokens, g, r, dv)
    out = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape if is_recorded else (1,))]
    args = [u, w, q, scores, k, chunk_decay, state.recurrent, state.row_indices(), _valid(valid, b, tokens)]
    *recurrent, out, delta = triton_call(
        card, _chunks, args, out, (heads, dv // values), in_place=() if is_recorded else (6,),
        num_warps=4, num_stages=2, T=tokens, COUNT=count, HEADS=heads, GR=g * r, M=m, DK=dk, DV=dv, BV=values,
        STATE_ROWS=state.recurrent.shape[0], RECORD=is_recorded,
    )  # fmt: skip
    return (out, delta) if is_recorded else (out, recurrent[0])


def chunked_delta_rule(
    card: Card,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    a_log: Float[Array, "G R"],
    dt_bias: Float[Array, "G R"],
) -> tuple[Array, Array, Array, Array]:
    """Convolution, gates and delta rule.

    Returns:
        Outputs [B, T, G, R, Dv], and k, δ and log_decay of the record.
    """
    *chunks, k, log_decay = prepare(card, qkvz, gates, state, conv_weight, a_log, dt_bias)
    out, delta = from_chunk_to_chunk(card, state, *chunks, qkvz.shape[1])
    return out, k, delta, log_decay


def advance(
    card: Card,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    conv_weight: Float[Array, "G C W"],
    a_log: Float[Array, "G R"],
    dt_bias: Float[Array, "G R"],
    valid: Int[Array, " B"],
) -> tuple[Array, Array]:
    """`chunked_delta_rule` for tokens of which the first ``valid`` int [B] count.

    Returns:
        Outputs [B, T, G, R, Dv], and the recurrent state of all rows, written in place.
    """
    *chunks, _, _ = prepare(card, qkvz, gates, state, conv_weight, a_log, dt_bias, valid)
    return from_chunk_to_chunk(card, state, *chunks, qkvz.shape[1], valid)
