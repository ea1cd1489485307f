"""The gated delta rule (arXiv 2412.06464) in plain JAX, in chunks, as section 3.3 of the paper.

    S ← e^g S;   δ = β (v - Sᵀk);   S ← S + k ⊗ δ;   o = Sᵀq

The reference implementation is transformers' ``torch_chunk_gated_delta_rule``. Letters as in `ops.gated_delta`.
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64
# On a GPU without kernels an iteration of the loop over chunks takes 30 microseconds whatever it computes (H200): it
# takes this many chunks at a time. Not in training, whose compilation would take longer.
UNROLLED = 8


def l2_normalise(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Normalises x to length 1 along the last axis (1e-6 is added to the sum of squares)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def split_cumsum(log_decay: Float[Array, "*batch M"]) -> Float[Array, "2 *batch M"]:
    """The cumulative sums of log decays in two parts, whose differences are exact to float32.

    The difference of two sums of about -100 would have the roundings of -100, and its exponential as many units in the
    last place. Here the first part is summed without rounding: it consists of multiples of 2⁻¹¹, at most 64 · 128 in
    all. The second part is small. A decay below e⁻¹²⁸ is 0 in float32 in any case.
    """
    log_decay = jnp.maximum(log_decay, -128.0)
    first = jnp.round(log_decay * 2.0**11) * 2.0**-11
    return jnp.cumsum(jnp.stack([first, log_decay - first]), axis=-1)


def unit_lower_inverse(a: Float[Array, "*batch M M"]) -> Float[Array, "*batch M M"]:
    """Inverse of unit lower triangular matrices, M a power of two, by halving.

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


def delta_rule(
    q: Float[Array, "B T G Dk"],
    k: Float[Array, "B T G Dk"],
    v: Float[Array, "B T G R Dv"],
    beta: Float[Array, "B T G R"],
    log_decay: Float[Array, "B T G R"],
    state: Float[Array, "B G R Dk Dv"],
    chunk: int = CHUNK,
    starts: Int[Array, "B T"] | None = None,
    unrolled: bool = False,
) -> tuple[Float[Array, "B T G R Dv"], Float[Array, "B T G R Dv"]]:
    """The gated delta rule over T tokens in chunks; equal to its recurrence but for roundings.

    Args:
        q: Queries, float32 [B, T, G, Dk].
        k: Keys, [B, T, G, Dk].
        v: Values, [B, T, G, R, Dv].
        beta: Step sizes, [B, T, G, R].
        log_decay: g, [B, T, G, R].
        state: S before the first token, [B, G, R, Dk, Dv].
        chunk: Tokens of a chunk at most, a power of two.
        starts: int [B, T], where the document of each token begins, for several documents in a sequence; each document
            starts from a state of zeros unless it began before the first token. None: one document.
        unrolled: Whether an iteration of the loop takes several chunks.

    Returns:
        o and δ, both [B, T, G, R, Dv].
    """
    b, t = q.shape[:2]
    m = min(chunk, 1 << (t - 1).bit_length())
    count = -(-t // m)
    pad = count * m - t

    def split(x: Array, order: str) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.einsum(order, x.reshape(b, count, m, *x.shape[2:]))

    q, k = split(q, "bcmgk->cbgmk"), split(k, "bcmgk->cbgmk")
    v = split(v, "bcmgrv->cbgrmv")
    beta, log_decay = split(beta, "bcmgr->cbgrm"), split(log_decay, "bcmgr->cbgrm")

    sums = split_cumsum(log_decay)
    cumulative = sums[0] + sums[1]

    def between(later: Array, earlier: Array) -> Array:
        first, second = later - earlier
        return first + second

    lower = jnp.tril(jnp.ones((m, m), bool))
    if starts is not None:
        starts = split(starts, "bcm->cbm")[:, :, None, None]
        lower = lower & (starts[..., :, None] == starts[..., None, :])
    # The exponent is masked before exp: above the diagonal it is positive and may overflow.
    decay = jnp.exp(jnp.where(lower, between(sums[..., :, None], sums[..., None, :]), -jnp.inf))
    # Products with a common factor are computed together: with few tokens the time is that of starting kernels.
    products = jnp.einsum("cbgik,cbgjk->cbgij", jnp.concatenate([k, q], axis=-2), k)[:, :, :, None]
    gram, scores = jnp.split(products, 2, axis=-2)
    strict = jnp.tril(jnp.ones((m, m), bool), -1)
    a = jnp.eye(m) + jnp.where(strict, beta[..., None] * gram * decay, 0.0)
    k_decayed, q_decayed = (x[:, :, :, None] * jnp.exp(cumulative)[..., None] for x in (k, q))
    u, w = jnp.split(
        unit_lower_inverse(a) @ (beta[..., None] * jnp.concatenate([v, k_decayed], axis=-1)), [v.shape[-1]], axis=-1
    )
    wq, scores = jnp.concatenate([w, q_decayed], axis=-2), scores * decay
    k_to_end = k[:, :, :, None] * jnp.exp(between(sums[..., -1:], sums))[..., None]

    chunk_decay = jnp.exp(cumulative[..., -1])
    if starts is not None:
        # The state before a chunk belongs to a document that began before the chunk.
        seen = starts < (jnp.arange(count) * m)[:, None, None, None, None]
        wq = jnp.where(jnp.concatenate([seen, seen], axis=-1)[..., None], wq, 0.0)
        k_to_end = jnp.where((starts == starts[..., -1:])[..., None], k_to_end, 0.0)
        chunk_decay = jnp.where(seen[..., -1], chunk_decay, 0.0)

    def step(state: Array, x: Sequence[Array]) -> tuple[Array, tuple[Array, Array]]:
        u, wq, scores, k_to_end, chunk_decay = x
        recalled, out = jnp.split(wq @ state, 2, axis=-2)
        delta = u - recalled
        out = out + scores @ delta
        state = state * chunk_decay[..., None, None] + jnp.einsum("bgrmk,bgrmv->bgrkv", k_to_end, delta)
        return state, (out, delta)

    xs = (u, wq, scores, k_to_end, chunk_decay)
    if count == 1:
        out, delta = (y[None] for y in step(state, [x[0] for x in xs])[1])
    elif unrolled:
        out, delta = _unrolled(step, state, xs, v)
    else:
        out, delta = jax.lax.scan(step, state, xs)[1]

    def join(x: Array) -> Array:
        return jnp.einsum("cbgrmv->bcmgrv", x).reshape(b, count * m, *x.shape[2:4], x.shape[-1])[:, :t]

    return join(out), join(delta)


def _unrolled(
    step: Callable[[Array, Sequence[Array]], tuple[Array, tuple[Array, Array]]],
    state: Array,
    xs: tuple[Array, ...],
    v: Array,
) -> tuple[Array, Array]:
    """The loop over chunks, several in an iteration.

    Results are written over u and v: XLA allocates buffers of a loop's results for the whole program, those of all
    layers at once.
    """
    count = v.shape[0]
    size = next(n for n in range(min(UNROLLED, count), 0, -1) if count % n == 0)

    def iteration(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, delta, out = carry
        chunks = [jax.lax.dynamic_slice_in_dim(x, i * size, size) for x in (delta, *xs[1:])]
        results: list[tuple[Array, Array]] = []
        for j in range(size):
            state, result = step(state, [x[j] for x in chunks])
            results.append(result)
        outs, deltas = (jnp.stack(x) for x in zip(*results, strict=True))
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
        return state, put(delta, deltas), put(out, outs)

    _, delta, out = jax.lax.fori_loop(0, count // size, iteration, (state, xs[0], v))
    return out, delta
