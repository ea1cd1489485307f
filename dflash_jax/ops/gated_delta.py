"""Operations of Gated DeltaNet (arXiv 2412.06464): `gated_delta`, `advance` and `replay`.

    S ← e^g S;   δ = β (v - Sᵀk);   S ← S + k ⊗ δ;   o = Sᵀq

behind a short convolution and gates, and before a gated RMSNorm, as in transformers' Qwen3NextGatedDeltaNet. One form
serves any number of tokens: chunks of up to `CHUNK`, section 3.3 of the paper.

Letters as in `ops.cache`; C convolution channels of a group are its q, k and R values; M tokens of a chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.ops.backend import Backend, Implementation, everything, take
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.linear import rms_norm

CHUNK = 64
# On a GPU without kernels a turn of the loop over chunks costs 30 microseconds whatever it computes (H200): it takes
# this many chunks at a time. Not in training, whose compilation would pay for it.
UNROLLED = 8


class Weights(NamedTuple):
    """Weights of the operation.

    Attributes:
        taps: Of the convolution, [G, C, kernel].
        a_log: Logarithms of the decay's rates, [G, R].
        dt_bias: Added to the gate of the decay, [G, R].
        norm: Of the gated norm, [Dv].
    """

    taps: jax.Array
    a_log: jax.Array
    dt_bias: jax.Array
    norm: jax.Array


def l2_normalise(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def split_cumsum(log_decay):
    """The cumulative sums of log decays [..., M] in two parts, [2, ..., M], whose differences are exact to float32.

    The difference of two sums of about -100 would be off by the roundings of -100, and its exponential by as many units
    in the last place. Here the first part is summed without rounding: it consists of multiples of 2⁻¹¹, at most
    64 · 128 in all. The second part is small. A decay below e⁻¹²⁸ is 0 in float32 in any case.
    """
    log_decay = jnp.maximum(log_decay, -128.0)
    first = jnp.round(log_decay * 2.0**11) * 2.0**-11
    return jnp.cumsum(jnp.stack([first, log_decay - first]), axis=-1)


def unit_lower_inverse(a):
    """Inverse of unit lower triangular matrices [..., M, M], M a power of two, by halving.

    Direct block inversion: as stable as substitution, and log2(M) batched products deep instead of M steps.
    """
    m = a.shape[-1]
    if m == 1:
        return jnp.ones_like(a)
    h = m // 2
    flat = a.reshape(-1, m, m)
    halves = unit_lower_inverse(jnp.concatenate([flat[:, :h, :h], flat[:, h:, h:]]))
    first, second = jnp.split(halves, 2)
    corner = -second @ (flat[:, h:, :h] @ first)
    top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    bottom = jnp.concatenate([corner, second], axis=-1)
    return jnp.concatenate([top, bottom], axis=-2).reshape(a.shape)


def delta_rule(q, k, v, beta, log_decay, state, chunk: int = CHUNK, starts=None, unrolled: bool = False):
    """The gated delta rule over T tokens, float32, in chunks (arXiv 2412.06464, section 3.3).

    q, k [B, T, G, Dk]; v [B, T, G, R, Dv]; beta, log_decay [B, T, G, R]; state [B, G, R, Dk, Dv]. Equal to the
    recurrence S ← e^g S; δ = β (v - Sᵀk); S ← S + k ⊗ δ; o = Sᵀq. Returns o and δ, both [B, T, G, R, Dv]. ``starts``
    int [B, T]: where the document of each token begins, for several in a row; what was before is then forgotten.
    ``unrolled``: several chunks in each turn of the loop.
    """
    b, t = q.shape[:2]
    m = min(chunk, 1 << (t - 1).bit_length())
    count = -(-t // m)
    pad = count * m - t

    def split(x, order):
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.einsum(order, x.reshape(b, count, m, *x.shape[2:]))

    q, k = split(q, "bcmgk->cbgmk"), split(k, "bcmgk->cbgmk")
    v = split(v, "bcmgrv->cbgrmv")
    beta, log_decay = split(beta, "bcmgr->cbgrm"), split(log_decay, "bcmgr->cbgrm")

    sums = split_cumsum(log_decay)
    upto = sums[0] + sums[1]

    def between(later, earlier):
        first, second = later - earlier
        return first + second

    lower = jnp.tril(jnp.ones((m, m), bool))
    if starts is not None:
        starts = split(starts, "bcm->cbm")[:, :, None, None]
        lower = lower & (starts[..., :, None] == starts[..., None, :])
    # The exponent is masked before exp: above the diagonal it is positive and may overflow.
    decay = jnp.exp(jnp.where(lower, between(sums[..., :, None], sums[..., None, :]), -jnp.inf))
    # Products with a common factor are taken together: with few tokens each kernel costs its start.
    both = jnp.einsum("cbgik,cbgjk->cbgij", jnp.concatenate([k, q], axis=-2), k)[:, :, :, None]
    gram, scores = jnp.split(both, 2, axis=-2)
    strict = jnp.tril(jnp.ones((m, m), bool), -1)
    a = jnp.eye(m) + jnp.where(strict, beta[..., None] * gram * decay, 0.0)
    k_decayed, q_decayed = (x[:, :, :, None] * jnp.exp(upto)[..., None] for x in (k, q))
    u, w = jnp.split(
        unit_lower_inverse(a) @ (beta[..., None] * jnp.concatenate([v, k_decayed], axis=-1)), [v.shape[-1]], axis=-1
    )
    wq, scores = jnp.concatenate([w, q_decayed], axis=-2), scores * decay
    k_rest = k[:, :, :, None] * jnp.exp(between(sums[..., -1:], sums))[..., None]

    left = jnp.exp(upto[..., -1])
    if starts is not None:
        # The state before a chunk is that of a document which began before the chunk.
        seen = starts < (jnp.arange(count) * m)[:, None, None, None, None]
        wq = jnp.where(jnp.concatenate([seen, seen], axis=-1)[..., None], wq, 0.0)
        k_rest = jnp.where((starts == starts[..., -1:])[..., None], k_rest, 0.0)
        left = jnp.where(seen[..., -1], left, 0.0)

    def step(state, x):
        u, wq, scores, k_rest, left = x
        recalled, out = jnp.split(wq @ state, 2, axis=-2)
        delta = u - recalled
        out = out + scores @ delta
        state = state * left[..., None, None] + jnp.einsum("bgrmk,bgrmv->bgrkv", k_rest, delta)
        return state, (out, delta)

    xs = (u, wq, scores, k_rest, left)
    if count == 1:
        out, delta = jax.tree.map(lambda y: y[None], step(state, jax.tree.map(lambda x: x[0], xs))[1])
    elif unrolled:
        out, delta = _unrolled(step, state, xs, v)
    else:
        out, delta = jax.lax.scan(step, state, xs)[1]

    def join(x):
        return jnp.einsum("cbgrmv->bcmgrv", x).reshape(b, count * m, *x.shape[2:4], x.shape[-1])[:, :t]

    return join(out), join(delta)


def _unrolled(step, state, xs, v):
    """The loop over chunks, several at a turn. Results are written over u and v: XLA has a buffer for what a loop
    returns from the start of the program on, those of all layers at once."""
    count = v.shape[0]
    size = next(n for n in range(min(UNROLLED, count), 0, -1) if count % n == 0)

    def turn(i, carry):
        state, delta, out = carry
        chunks = [jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (delta, *xs[1:])]
        results = []
        for j in range(size):
            state, result = step(state, [x[j] for x in chunks])
            results.append(result)
        outs, deltas = (jnp.stack(x) for x in zip(*results, strict=True))
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
        return state, put(delta, deltas), put(out, outs)

    _, delta, out = jax.lax.fori_loop(0, count // size, turn, (state, xs[0], v))
    return out, delta


def gated_norm(out, z, norm, eps: float):
    """Outputs of the rule [B, T, G, R, Dv] float32, normed and gated by z [B, T, G, R Dv], in z's dtype."""
    gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
    return (rms_norm(out, norm, eps) * gate).astype(z.dtype)


def reference(
    backend: Backend, qkvz, gates, state: DeltaState, weights: Weights, eps: float, starts=None, unrolled: bool = False
):
    """By XLA, a scan over chunks."""
    b, t = qkvz.shape[:2]
    taps, a_log, dt_bias, norm = weights
    channels, kernel = taps.shape[1:]
    state = state.copied()
    *_, r, dk, dv = state.recurrent.shape
    inputs, z = jnp.split(qkvz, [channels], axis=-1)
    window = jnp.concatenate([state.conv.astype(inputs.dtype), inputs], axis=1)

    def tap(j):
        y = window[:, j : j + t] * taps[..., j]
        if starts is None:
            return y
        return jnp.where((jnp.arange(t) - (kernel - 1 - j) >= starts)[..., None, None], y, 0)

    mixed = jax.nn.silu(sum(tap(j) for j in range(kernel))).astype(jnp.float32)
    q = l2_normalise(mixed[..., :dk]) * dk**-0.5
    k = l2_normalise(mixed[..., dk : 2 * dk])
    v = mixed[..., 2 * dk :].reshape(b, t, -1, r, dv)
    beta, alpha = jnp.moveaxis(gates, 2, 0).astype(jnp.float32)
    dt = jax.nn.softplus(alpha + dt_bias.astype(jnp.float32))
    log_decay = -jnp.exp(a_log.astype(jnp.float32)) * dt
    beta = jax.nn.sigmoid(beta)
    out, delta = delta_rule(q, k, v, beta, log_decay, state.recurrent, starts=starts, unrolled=unrolled)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def _supports_triton(backend: Backend, qkvz, gates, state, weights, eps, starts=None) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if starts is not None:
        return "a row has several documents"
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.why_not(qkvz.shape[1], state)


def _triton(backend: Backend, qkvz, gates, state, weights, eps, starts=None):
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    y, record = triton_delta.mix_triton(backend.card, qkvz, gates, state, *weights, eps)
    return y, DeltaRecord(*record)


def _supports_triton_chunks(backend: Backend, qkvz, gates, state, weights, eps, starts=None) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if starts is not None:
        return "a row has several documents"
    from dflash_jax.ops.kernels.triton import delta_chunks

    return delta_chunks.why_not(state, qkvz.dtype)


def _triton_chunks(backend: Backend, qkvz, gates, state, weights, eps, starts=None):
    from dflash_jax.ops.kernels.triton import delta_chunks

    taps, a_log, dt_bias, norm = weights
    out, k, delta, log_decay = delta_chunks.rule(backend.card, qkvz, gates, state, taps, a_log, dt_bias)
    inputs, z = jnp.split(qkvz, [taps.shape[1]], axis=-1)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def _supports_cpp(backend: Backend, qkvz, gates, state, weights, eps, starts=None) -> str | None:
    if not backend.has_cpp:
        return backend.no_cpp
    return "a row has several documents" if starts is not None else cpp.why_not_mixed(state)


def _cpp(backend: Backend, qkvz, gates, state, weights, eps, starts=None):
    y, *record = cpp.mix(qkvz, gates, state, *weights, eps)
    return y, DeltaRecord(*record)


def _supports_unrolled(backend: Backend, qkvz, gates, state, weights, eps, starts=None) -> str | None:
    if backend.platform != "cuda":
        return f"the platform is {backend.platform}"
    return "a row has several documents" if starts is not None else None


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton, one chunk", _supports_triton, _triton),
    Implementation("triton, chunks", _supports_triton_chunks, _triton_chunks),
    Implementation("unrolled", _supports_unrolled, partial(reference, unrolled=True)),
    Implementation("reference", everything, reference),
)


def gated_delta(
    backend: Backend, qkvz, gates, state: DeltaState, weights: Weights, eps: float, starts=None
) -> tuple[jax.Array, DeltaRecord]:
    """Convolution, gates, delta rule and gated norm of projected tokens.

    Args:
        backend: Where it runs. The kernels have no gradient.
        qkvz: Projections to q, k, v and the norm's gate z, [B, T, G, C + R Dv].
        gates: Projections to beta and alpha, [B, T, 2, G, R].
        state: What was before; it stays as it is.
        weights: The layer's.
        eps: Of the norm.
        starts: int [B, T]: where in its row the document of each token begins; None: a row is one document.

    Returns:
        y [B, T, G, R, Dv] in qkvz's dtype, and the record for `replay`.
    """
    args = (qkvz, gates, state, weights, eps, starts)
    return take("gated_delta", IMPLEMENTATIONS, backend, *args).call(backend, *args)


# The state behind tokens.


def last_inputs(conv, fresh, n):
    """The last inputs of the convolution, as ``conv`` [B, kernel - 1, G, C] has them, after the first n [B] of the
    ``fresh`` [B, T, G, C]."""
    window = jnp.concatenate([conv, fresh.astype(conv.dtype)], axis=1)
    places = n[:, None] + jnp.arange(conv.shape[1])[None]
    return jnp.take_along_axis(window, places[..., None, None], axis=1)


def replay_reference(backend: Backend, state: DeltaState, record: DeltaRecord, n) -> DeltaState:
    """By XLA: S·e^{c_n} + Σ_{j<n} e^{c_n - c_j} k_j ⊗ δ_j with c = cumsum(g)."""
    before = state.copied()
    t = record.k.shape[1]
    counts = jnp.arange(t)[None] < n[:, None]
    decay = jnp.where(counts[..., None, None], record.log_decay, 0.0)
    # Summed from the end: a difference of two sums would be off by the roundings of the larger one.
    after = jax.lax.cumsum(jnp.pad(decay, [(0, 0), (0, 1), (0, 0), (0, 0)]), axis=1, reverse=True)
    total, rest = after[:, 0], after[:, 1:]
    # Selected, never multiplied by zero: what does not count may be anything.
    delta = jnp.where(counts[..., None, None, None], record.delta * jnp.exp(rest)[..., None], 0.0)
    k = jnp.where(counts[..., None, None], record.k, 0.0)
    added = jnp.einsum("btgk,btgrv->bgrkv", k, delta)
    recurrent = before.recurrent * jnp.exp(total)[..., None, None] + added
    return state.put(DeltaState(recurrent, last_inputs(before.conv, record.conv, n)))


def _supports_triton_replay(backend: Backend, state, record, n) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.why_not(record.k.shape[1], state)


def _triton_replay(backend: Backend, state, record, n) -> DeltaState:
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return DeltaState(*triton_delta.replay_triton(backend.card, state, record, n), state.rows)


def _supports_cpp_replay(backend: Backend, state, record, n) -> str | None:
    return cpp.why_not_mixed(state) if backend.has_cpp else backend.no_cpp


def _cpp_replay(backend: Backend, state, record, n) -> DeltaState:
    return DeltaState(*cpp.replay(state, record, n), state.rows)


REPLAYS = (
    Implementation("cpp", _supports_cpp_replay, _cpp_replay),
    Implementation("triton", _supports_triton_replay, _triton_replay),
    Implementation("reference", everything, replay_reference),
)


def replay(backend: Backend, state: DeltaState, record: DeltaRecord, n) -> DeltaState:
    """The state after the first n int [B] recorded tokens, 0 ≤ n ≤ T. The kernels write it in place."""
    return take("replay", REPLAYS, backend, state, record, n).call(backend, state, record, n)


def works_in_place(backend: Backend, state: DeltaState, tokens: int) -> bool:
    """Whether a loop over ``tokens`` tokens at a time reads and writes rows of a larger state in place. Otherwise it is
    faster on a copy of the rows."""
    if backend.has_triton:
        from dflash_jax.ops.kernels.triton import delta as triton_delta

        return triton_delta.why_not(tokens, state) is None
    return backend.has_cpp and cpp.why_not_mixed(state) is None


def advance_reference(backend: Backend, qkvz, gates, state: DeltaState, weights: Weights, eps: float, n):
    """By `gated_delta` and `replay`, each by its own implementation."""
    y, record = gated_delta(backend, qkvz, gates, state, weights, eps)
    return y, replay(backend, state, record, n)


def _supports_triton_advance(backend: Backend, qkvz, gates, state, weights, eps, n) -> str | None:
    if reason := _supports_triton_chunks(backend, qkvz, gates, state, weights, eps):
        return reason
    if _supports_triton(backend, qkvz, gates, state, weights, eps) is None:
        return "one chunk is computed and replayed by other kernels"
    return None


def _triton_advance(backend: Backend, qkvz, gates, state, weights, eps, n):
    from dflash_jax.ops.kernels.triton import delta_chunks

    taps, a_log, dt_bias, norm = weights
    out, recurrent = delta_chunks.advance(backend.card, qkvz, gates, state, taps, a_log, dt_bias, n)
    inputs, z = jnp.split(qkvz, [taps.shape[1]], axis=-1)
    conv = state.placed(state.conv, last_inputs(state.copied().conv, inputs, n))
    return gated_norm(out, z, norm, eps), DeltaState(recurrent, conv, state.rows)


ADVANCES = (
    Implementation("triton, chunks", _supports_triton_advance, _triton_advance),
    Implementation("reference", everything, advance_reference),
)


def advance(
    backend: Backend, qkvz, gates, state: DeltaState, weights: Weights, eps: float, n
) -> tuple[jax.Array, DeltaState]:
    """`gated_delta` of tokens of which the first n int [B] count: y, and the state after them instead of a record."""
    args = (qkvz, gates, state, weights, eps, n)
    return take("advance", ADVANCES, backend, *args).call(backend, *args)
