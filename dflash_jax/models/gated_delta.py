"""Gated DeltaNet: short convolution, gates and the delta rule, in one form for any number of tokens.

Letters beyond `parts`: G key heads, R value heads on each, C convolution channels of a group (q, k and its R values),
M chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.cache import DeltaRecord, DeltaState, last_inputs, replay
from dflash_jax.models.config import GatedDeltaSpec
from dflash_jax.models.layers import constant, linear, normal, output, parameter, rms_norm
from dflash_jax.ops import backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.parallel.sharding import ONE_DEVICE, AxisSharding, Layout

CHUNK = 64
# On a GPU without kernels a turn of the loop over chunks costs 30 microseconds whatever it computes (H200): it takes so
# many at a time. Not in training, whose compilation would pay for it.
UNROLLED = 8


def l2_normalise(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def split_cumsum(log_decay):
    """The cumulative sums of log decays [..., M] in two parts, [2, ..., M], whose differences are exact to float32.

    The difference of two sums of -100 or so would be off by the roundings of -100, and what it decays by as many units
    in the last place. Here the first part is summed without rounding: it consists of multiples of 2⁻¹¹, at most
    64 · 128 in all. The second is small. A decay below e⁻¹²⁸ is 0 in float32 anyway.
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


def delta_rule(q, k, v, beta, log_decay, state, chunk: int = CHUNK, starts=None):
    """The gated delta rule over T tokens, float32, in chunks (arXiv 2412.06464, section 3.3).

    q, k [B, T, G, Dk]; v [B, T, G, R, Dv]; beta, log_decay [B, T, G, R]; state [B, G, R, Dk, Dv]. Equal to the
    recurrence S ← e^g S; δ = β (v - Sᵀk); S ← S + k ⊗ δ; o = Sᵀq. Returns o and δ, both [B, T, G, R, Dv]. ``starts``
    int [B, T]: where the document of each token begins, for several in a row; what was before is then forgotten.
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
    # Products with a common factor are taken together: few kernels is what a short window costs.
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
        held, out = jnp.split(wq @ state, 2, axis=-2)
        delta = u - held
        out = out + scores @ delta
        state = state * left[..., None, None] + jnp.einsum("bgrmk,bgrmv->bgrkv", k_rest, delta)
        return state, (out, delta)

    xs = (u, wq, scores, k_rest, left)
    if count == 1:
        out, delta = jax.tree.map(lambda y: y[None], step(state, jax.tree.map(lambda x: x[0], xs))[1])
    else:

        def loop(state, xs, v):
            return jax.lax.scan(step, state, xs)[1]

        def in_place(state, xs, v):
            """``loop``, what comes out written over u and v: XLA has a buffer for what a loop gives from the start of
            the program on, those of all layers at once."""
            size = next(n for n in range(min(UNROLLED, count), 0, -1) if count % n == 0)

            def turn(i, carry):
                state, delta, out = carry
                part = [jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (delta, *xs[1:])]
                made = []
                for j in range(size):
                    state, found = step(state, [x[j] for x in part])
                    made.append(found)
                outs, deltas = (jnp.stack(x) for x in zip(*made, strict=True))
                put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
                return state, put(delta, deltas), put(out, outs)

            _, delta, out = jax.lax.fori_loop(0, count // size, turn, (state, xs[0], v))
            return out, delta

        forms = {"default": loop}
        if starts is None:
            forms["cuda"] = in_place
        out, delta = jax.lax.platform_dependent(state, xs, v, **forms)

    def join(x):
        return jnp.einsum("cbgrmv->bcmgrv", x).reshape(b, count * m, *x.shape[2:4], x.shape[-1])[:, :t]

    return join(out), join(delta)


def gated_norm(out, z, norm, eps: float):
    """What the rule gives, out [B, T, G, R, Dv] float32, normed and gated by z [B, T, G, R Dv], in z's dtype."""
    gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
    return (rms_norm(out, norm, eps) * gate).astype(z.dtype)


def mix(qkvz, gates, state: DeltaState, taps, a_log, dt_bias, norm, eps: float, starts=None):
    """Convolution, gates, delta rule and gated norm of what the projections gave.

    qkvz [B, T, G, C + R Dv], gates (of beta and alpha) [B, T, 2, G, R], taps [G, C, kernel], a_log and dt_bias [G, R],
    norm [Dv]; ``starts`` as in `delta_rule`. Returns (y [B, T, G, R, Dv] in qkvz's dtype, `DeltaRecord`).
    """
    b, t = qkvz.shape[:2]
    channels, kernel = taps.shape[1:]
    state = state.taken()
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
    out, delta = delta_rule(q, k, v, jax.nn.sigmoid(beta), log_decay, state.recurrent, starts=starts)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def mix_in_chunks(qkvz, gates, state: DeltaState, taps, a_log, dt_bias, norm, eps: float):
    """`mix` of many tokens, convolution, gates and delta rule by Triton's kernels."""
    from dflash_jax.ops.kernels.triton import delta_chunks as triton_chunks

    out, k, delta, log_decay = triton_chunks.rule(qkvz, gates, state, taps, a_log, dt_bias)
    inputs, z = jnp.split(qkvz, [taps.shape[1]], axis=-1)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def advance_in_chunks(qkvz, gates, state: DeltaState, taps, a_log, dt_bias, norm, n, eps: float):
    """`mix_in_chunks` of tokens of which the first n int [B] count: (y, the `DeltaState` after them)."""
    from dflash_jax.ops.kernels.triton import delta_chunks as triton_chunks

    out, recurrent = triton_chunks.advance(qkvz, gates, state, taps, a_log, dt_bias, n)
    inputs, z = jnp.split(qkvz, [taps.shape[1]], axis=-1)
    conv = state.placed(state.conv, last_inputs(state.taken().conv, inputs, n))
    return gated_norm(out, z, norm, eps), DeltaState(recurrent, conv, state.rows)


class GatedDelta(nnx.Module):
    """The Gated DeltaNet mixer of Qwen3-Next and Qwen3.5. It returns a record for `cache.replay`, or, where it is
    known beforehand how many tokens count, the new state."""

    def __init__(
        self, spec: GatedDeltaSpec, hidden: int, eps: float, rngs: nnx.Rngs | None, dtype, layout: Layout = ONE_DEVICE
    ):
        self.spec, self.eps, self.key_heads = spec, eps, layout.wide(spec.num_key_heads)
        g, r, dv = spec.num_key_heads, spec.values_per_key, spec.value_dim
        self.qkvz = normal(rngs, (g, spec.channels_per_key + r * dv, hidden), dtype)
        self.conv = normal(rngs, (g, spec.channels_per_key, spec.conv_kernel), dtype, 0.5)
        self.beta_alpha = normal(rngs, (2, g, r, hidden), dtype)
        self.a_log = parameter(
            rngs, (g, r), dtype, lambda key: jnp.log(jax.random.uniform(key, (g, r), minval=1.0, maxval=16.0))
        )
        self.dt_bias = constant(rngs, (g, r), dtype, -3.0)
        self.norm = constant(rngs, (dv,), dtype, 1.0)
        self.out = normal(rngs, (hidden, g, r, dv), dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        first, second = (self.key_heads,), (None, self.key_heads)
        return dict.fromkeys(("qkvz", "conv", "a_log", "dt_bias"), first) | {"beta_alpha": second, "out": second}

    def matrices(self) -> dict[str, int]:
        return {"qkvz": 1, "beta_alpha": 1, "out": 3}

    def cache_specs(self, state: DeltaState) -> DeltaState:
        return state.specs(self.key_heads)

    def forward_full(self, x, starts):
        """x [B, T, H] → y [B, T, H] over whole documents, each from its first token ``starts`` int [B, T] on."""
        spec, (g, channels, kernel) = self.spec, self.conv.get_value().shape
        shape = (x.shape[0], g, spec.values_per_key, spec.key_dim, spec.value_dim)
        empty = DeltaState(jnp.zeros(shape, jnp.float32), jnp.zeros((x.shape[0], kernel - 1, g, channels), x.dtype))
        return self(x, empty, starts)[0]

    def __call__(
        self, x, state: DeltaState, starts=None, residual=None, n=None
    ) -> tuple[jax.Array, DeltaRecord | DeltaState]:
        """x [B, T, H] or `parts.DeferredNorm` → (y [B, T, H], with ``residual`` if given, record). ``starts`` as in
        `delta_rule`. With n int [B], how many of the tokens count, the state after them instead of the record."""
        qkvz, gates = linear(x, (self.qkvz[...], self.beta_alpha[...]))
        weights = (self.conv[...], self.a_log[...], self.dt_bias[...], self.norm[...])
        y, kept = self._mixed(qkvz, gates, state, weights, starts, n)
        return output(y, self.out[...], 3, self.key_heads, residual), kept

    def _mixed(self, qkvz, gates, state: DeltaState, weights: tuple, starts, n):
        forms = {"default": partial(mix, eps=self.eps, starts=starts)}
        if starts is None and backend.are_wanted():
            from dflash_jax.ops.kernels.triton import delta as triton_delta
            from dflash_jax.ops.kernels.triton import delta_chunks as triton_chunks

            def kernel(*args):
                y, record = triton_delta.mix_triton(*args, self.eps)
                return y, DeltaRecord(*record)

            if triton_delta.fits(qkvz.shape[1], state):
                forms["cuda"] = kernel
            elif triton_chunks.fits(state, qkvz.dtype):
                if n is not None:
                    return self._advanced(qkvz, gates, state, weights, n)
                forms["cuda"] = partial(mix_in_chunks, eps=self.eps)
        if starts is None and cpu.mixes(state) and backend.for_cpu():

            def in_cpp(*args):
                y, *record = cpu.mix(*args, self.eps)
                return y, DeltaRecord(*record)

            forms["cpu"] = in_cpp
        y, record = jax.lax.platform_dependent(qkvz, gates, state, *weights, **forms)
        return y, record if n is None else replay(state, record, n)

    def _advanced(self, qkvz, gates, state: DeltaState, weights: tuple, n):
        def plain(qkvz, gates, state, *rest):
            *weights, n = rest
            y, record = mix(qkvz, gates, state, *weights, eps=self.eps)
            return y, replay(state, record, n)

        forms = {"default": plain, "cuda": partial(advance_in_chunks, eps=self.eps)}
        return jax.lax.platform_dependent(qkvz, gates, state, *weights, n, **forms)
