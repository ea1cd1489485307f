"""The gated delta rule of many tokens in Triton: what of it goes from chunk to chunk, in one kernel.

Each program has some values of one head and keeps their state in registers. Letters as in `models.gated_delta`.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dflash_jax.kernels.launch import triton_call

# As many programs as Hopper's cards have multiprocessors, each of so many values of a head: at least, at most.
PROGRAMS, VALUES = 132, (32, 64)


@triton.jit
def _chunks(
    uw, q, scores, k, left, state, out, delta,
    T: tl.constexpr, COUNT: tl.constexpr, HEADS: tl.constexpr, GR: tl.constexpr, M: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    value = (tl.program_id(1) * BV + tl.arange(0, BV))[None, :]
    m, dk = tl.arange(0, M), tl.arange(0, DK)
    s = tl.load(state + (head.to(tl.int64) * DK + dk[:, None]) * DV + value)
    for c in range(COUNT):
        chunk = head.to(tl.int64) + c * HEADS
        row = (chunk * M + m)[:, None]
        old, new = tl.load(q + row * DK + dk[None, :]), tl.load(k + row * DK + dk[None, :])
        u, w = tl.load(uw + row * (DV + DK) + value), tl.load(uw + row * (DV + DK) + DV + dk[None, :])
        held = s.to(old.dtype)
        d = u - tl.dot(w.to(old.dtype), held)
        o = tl.dot(old, held)
        rounded = d.to(old.dtype)
        o += tl.dot(tl.load(scores + row * M + m[None, :]), rounded)
        s = s * tl.load(left + chunk) + tl.dot(tl.trans(new), rounded)
        token = (c * M + m)[:, None]
        place = ((head // GR * T + token) * GR + head % GR).to(tl.int64) * DV + value
        tl.store(out + place, o, mask=token < T)
        tl.store(delta + place, d, mask=token < T)


def fits(state, dtype) -> bool:
    """Whether the kernel takes such heads, state [B, G, R, Dk, Dv], of models in ``dtype``. Exact products of float32
    would not find room in its registers."""
    return dtype != jnp.float32 and all(16 <= n <= 128 and n & (n - 1) == 0 for n in state.shape[-2:])


def chunks_triton(state, uw, q, scores, k, left, tokens: int, dtype):
    """As `models.gated_delta.chunk_by_chunk`, the products in ``dtype``."""
    count, b, g, r, m, dk = q.shape
    dv, heads = state.shape[-1], b * g * r
    values = min(dv, VALUES[1])
    while values > VALUES[0] and 2 * heads * dv // values <= PROGRAMS:
        values //= 2
    q, scores, k = (x.astype(dtype) for x in (q, scores, k))
    out = [jax.ShapeDtypeStruct((b, tokens, g, r, dv), jnp.float32)] * 2
    return triton_call(
        _chunks, [uw, q, scores, k, left, state], out, (heads, dv // values), num_warps=4, num_stages=2, T=tokens,
        COUNT=count, HEADS=heads, GR=g * r, M=m, DK=dk, DV=dv, BV=values,
    )  # fmt: skip
