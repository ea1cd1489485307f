"""Operations of Gated DeltaNet (arXiv 2412.06464): `gated_delta`, `advance`, `replay` and `replay_layers`.

    S ← e^g S;   δ = β (v - Sᵀk);   S ← S + k ⊗ δ;   o = Sᵀq

A short convolution and gates come before the rule, a gated RMSNorm after it. The reference implementation is
transformers' Qwen3NextGatedDeltaNet. `ops.delta_rule` has the rule itself, one form for any number of tokens.

Letters as in `ops.cache`; the C convolution channels of a group are its q, k and R values; M tokens of a chunk.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.delta_rule import delta_rule, l2_normalise
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.linear import DeferredDivision, rms_norm


class Weights(NamedTuple):
    """Weights of the operation.

    Attributes:
        conv_weight: Weights of the convolution, [G, C, kernel].
        a_log: Logarithms of the decay's rates, [G, R].
        dt_bias: Added to the gate of the decay, [G, R].
        norm: Weight of the gated norm, [Dv].
    """

    conv_weight: Float[Array, "G C W"]
    a_log: Float[Array, "G R"]
    dt_bias: Float[Array, "G R"]
    norm: Float[Array, " Dv"]


def gated_norm(
    out: Float[Array, "B T G R Dv"], z: Float[Array, "B T G RDv"], norm: Float[Array, " Dv"], eps: float
) -> Float[Array, "B T G R Dv"]:
    """RMSNorm of the rule's outputs, gated by z: ``rms_norm(out) · silu(z)``, in z's dtype."""
    gate = jax.nn.silu(z.reshape(out.shape).astype(jnp.float32))
    return (rms_norm(out, norm, eps) * gate).astype(z.dtype)


def _steps_and_decays(
    gates: Float[Array, "B T 2 G R"], weights: Weights
) -> tuple[Float[Array, "B T G R"], Float[Array, "B T G R"]]:
    """Step sizes, and logarithms of the decays, float32."""
    beta, alpha = jnp.moveaxis(gates, 2, 0).astype(jnp.float32)
    dt = jax.nn.softplus(alpha + weights.dt_bias.astype(jnp.float32))
    return jax.nn.sigmoid(beta), -jnp.exp(weights.a_log.astype(jnp.float32)) * dt


def reference(
    backend: Backend,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Int[Array, "B T"] | None = None,
    unrolled: bool = False,
) -> tuple[Float[Array, "B T G R Dv"], DeltaRecord]:
    """`gated_delta` by XLA, a scan over chunks."""
    b, t = qkvz.shape[:2]
    conv_weight, norm = weights.conv_weight, weights.norm
    channels, kernel = conv_weight.shape[1:]
    state = state.copied()
    *_, r, dk, dv = state.recurrent.shape
    inputs, z = jnp.split(qkvz, [channels], axis=-1)
    window = jnp.concatenate([state.conv_inputs.astype(inputs.dtype), inputs], axis=1)

    def tap(j: int) -> Array:
        y = window[:, j : j + t] * conv_weight[..., j]
        if starts is None:
            return y
        return jnp.where((jnp.arange(t) - (kernel - 1 - j) >= starts)[..., None, None], y, 0)

    mixed = jax.nn.silu(sum((tap(j) for j in range(1, kernel)), tap(0))).astype(jnp.float32)
    q = l2_normalise(mixed[..., :dk]) * dk**-0.5
    k = l2_normalise(mixed[..., dk : 2 * dk])
    v = mixed[..., 2 * dk :].reshape(b, t, -1, r, dv)
    beta, log_decay = _steps_and_decays(gates, weights)
    out, delta = delta_rule(q, k, v, beta, log_decay, state.recurrent, starts=starts, unrolled=unrolled)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def _supports_triton(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Array | None = None,
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if starts is not None:
        return "a sequence has several documents"
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.why_not(qkvz.shape[1], state)


def _triton(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: None = None,
    in_parts: bool = False,
) -> tuple[Array | DeferredDivision, DeltaRecord]:
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    y, squares, record = triton_delta.gated_delta_triton(
        backend.triton_card, qkvz, gates, state, *weights, eps, in_parts=in_parts
    )
    return y if squares is None else DeferredDivision(y, squares, eps), DeltaRecord(*record)


def _supports_triton_chunks(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Array | None = None,
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if starts is not None:
        return "a sequence has several documents"
    from dflash_jax.ops.kernels.triton import delta_chunks

    return delta_chunks.why_not(state, qkvz.dtype)


def _triton_chunks(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, starts: None = None
) -> tuple[Array, DeltaRecord]:
    from dflash_jax.ops.kernels.triton import delta_chunks

    conv_weight, a_log, dt_bias, norm = weights
    out, k, delta, log_decay = delta_chunks.chunked_delta_rule(
        backend.triton_card, qkvz, gates, state, conv_weight, a_log, dt_bias, untried=backend.kernels == "all"
    )
    inputs, z = jnp.split(qkvz, [conv_weight.shape[1]], axis=-1)
    return gated_norm(out, z, norm, eps), DeltaRecord(k, delta, log_decay, inputs)


def _supports_pallas(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Array | None = None,
) -> str | None:
    if backend.no_pallas is not None:
        return backend.no_pallas
    if starts is not None:
        return "a sequence has several documents"
    from dflash_jax.ops.kernels.tpu import delta as tpu_delta

    return tpu_delta.why_not(qkvz.dtype, state)


def _pallas(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, starts: None = None
) -> tuple[Array, DeltaRecord]:
    from dflash_jax.ops.kernels.tpu import delta as tpu_delta

    beta, log_decay = _steps_and_decays(gates, weights)
    y, k, delta = tpu_delta.mix(qkvz, beta, log_decay, state, weights.conv_weight, weights.norm, eps)
    return y, DeltaRecord(k, delta, log_decay, qkvz[..., : weights.conv_weight.shape[1]])


def _supports_cpp(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Array | None = None,
) -> str | None:
    if not backend.has_cpp:
        return backend.no_cpp
    return "a sequence has several documents" if starts is not None else cpp.why_not_gated_delta(state)


def _cpp(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, starts: None = None
) -> tuple[Array, DeltaRecord]:
    y, *record = cpp.gated_delta(qkvz, gates, state, *weights, eps)
    return y, DeltaRecord(*record)


def _supports_unrolled(
    backend: Backend,
    qkvz: Array,
    gates: Array,
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Array | None = None,
) -> str | None:
    if backend.platform != "cuda":
        return f"the platform is {backend.platform}"
    return "a sequence has several documents" if starts is not None else None


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton, parts of heads", _supports_triton, partial(_triton, in_parts=True), is_tried=False),
    Implementation("triton, one chunk", _supports_triton, _triton),
    Implementation("triton, chunks", _supports_triton_chunks, _triton_chunks),
    Implementation("pallas", _supports_pallas, _pallas, is_tried=False),
    Implementation("unrolled", _supports_unrolled, partial(reference, unrolled=True)),
    Implementation("reference", supports_everything, reference),
)


def gated_delta(
    backend: Backend,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    weights: Weights,
    eps: float,
    starts: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T G R Dv"] | DeferredDivision, DeltaRecord]:
    """Convolution, gates, delta rule and gated norm of projected tokens.

    Args:
        backend: Where it runs. The kernels have no gradient.
        qkvz: Projections to q, k, v and the norm's gate z, [B, T, G, C + R Dv].
        gates: Projections to beta and alpha, [B, T, 2, G, R].
        state: The state before the tokens; it is not changed.
        weights: The layer's weights.
        eps: Epsilon of the norm.
        starts: int [B, T], where in its sequence the document of each token begins; None: a sequence is one document.

    Returns:
        y [B, T, G, R, Dv] in qkvz's dtype, which may be left to `linear` to be divided, and the record for `replay`.
    """
    args = (qkvz, gates, state, weights, eps, starts)
    return choose("gated_delta", IMPLEMENTATIONS, backend, *args).call(backend, *args)


# The state after tokens.


def last_inputs(
    conv: Float[Array, "B W G C"], inputs: Float[Array, "B T G C"], n: Int[Array, " B"]
) -> Float[Array, "B W G C"]:
    """The last W = kernel - 1 inputs of the convolution.

    Args:
        conv: Those before the tokens, [B, W, G, C].
        inputs: Those of T tokens, [B, T, G, C].
        n: int [B], how many tokens count.

    Returns:
        Those after the first n tokens, [B, W, G, C].
    """
    window = jnp.concatenate([conv, inputs.astype(conv.dtype)], axis=1)
    places = n[:, None] + jnp.arange(conv.shape[1])[None]
    return jnp.take_along_axis(window, places[..., None, None], axis=1)


def replay_reference(backend: Backend, state: DeltaState, record: DeltaRecord, n: Int[Array, " B"]) -> DeltaState:
    """`replay` by XLA."""
    before = state.copied()
    t = record.k.shape[1]
    counts = jnp.arange(t)[None] < n[:, None]
    decay = jnp.where(counts[..., None, None], record.log_decay, 0.0)
    # Summed from the end: a difference of two sums would have the roundings of the larger one.
    after = jax.lax.cumsum(jnp.pad(decay, [(0, 0), (0, 1), (0, 0), (0, 0)]), axis=1, reverse=True)
    total, to_end = after[:, 0], after[:, 1:]
    # Selected, not multiplied by zero: uncounted tokens may be NaN.
    delta = jnp.where(counts[..., None, None, None], record.delta * jnp.exp(to_end)[..., None], 0.0)
    k = jnp.where(counts[..., None, None], record.k, 0.0)
    added = jnp.einsum("btgk,btgrv->bgrkv", k, delta)
    recurrent = before.recurrent * jnp.exp(total)[..., None, None] + added
    return state.put(DeltaState(recurrent, last_inputs(before.conv_inputs, record.conv_inputs, n)))


def _supports_triton_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.why_not(record.k.shape[1], state)


def _triton_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> DeltaState:
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.replay_triton(backend.triton_card, state, record, n)


def _supports_pallas_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> str | None:
    if backend.no_pallas is not None:
        return backend.no_pallas
    from dflash_jax.ops.kernels.tpu import replay as tpu_replay

    return tpu_replay.why_not(record.k.shape[1], state)


def _pallas_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> DeltaState:
    from dflash_jax.ops.kernels.tpu import replay as tpu_replay

    conv = last_inputs(state.copied().conv_inputs, record.conv_inputs, n)
    return DeltaState(tpu_replay.replay(state, record, n), state.placed(state.conv_inputs, conv), state.rows)


def _supports_cpp_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> str | None:
    return cpp.why_not_gated_delta(state) if backend.has_cpp else backend.no_cpp


def _cpp_replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Array) -> DeltaState:
    recurrent, conv = cpp.replay(state, record, n)
    return DeltaState(recurrent, conv, state.rows)


PALLAS_REPLAY = Implementation("pallas", _supports_pallas_replay, _pallas_replay, is_tried=False)
REPLAYS = (
    Implementation("cpp", _supports_cpp_replay, _cpp_replay),
    Implementation("triton", _supports_triton_replay, _triton_replay),
    PALLAS_REPLAY,
    Implementation("reference", supports_everything, replay_reference),
)


def replay(backend: Backend, state: DeltaState, record: DeltaRecord, n: Int[Array, " B"]) -> DeltaState:
    """The state after the first n recorded tokens: S·e^{c_n} + Σ_{j<n} e^{c_n - c_j} k_j ⊗ δ_j with c = cumsum(g).

    Args:
        backend: Where it runs. The kernels write the state in place.
        state: The state before the tokens.
        record: The record of T tokens, from `gated_delta`.
        n: int [B], 0 ≤ n ≤ T.

    Returns:
        The state after them.
    """
    return choose("replay", REPLAYS, backend, state, record, n).call(backend, state, record, n)


def replay_layers_reference(
    backend: Backend, states: Sequence[DeltaState], records: Sequence[DeltaRecord], n: Int[Array, " B"]
) -> tuple[DeltaState, ...]:
    """`replay` of each layer, with the implementation that the backend chooses."""
    return tuple(replay(backend, state, record, n) for state, record in zip(states, records, strict=True))


def _supports_triton_layers(
    backend: Backend, states: Sequence[DeltaState], records: Sequence[DeltaRecord], n: Array
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.why_not_layers(states, records)


def _triton_layers(
    backend: Backend, states: Sequence[DeltaState], records: Sequence[DeltaRecord], n: Array
) -> tuple[DeltaState, ...]:
    from dflash_jax.ops.kernels.triton import delta as triton_delta

    return triton_delta.replay_layers_triton(backend.triton_card, states, records, n)


LAYERS_REPLAYS = (
    Implementation("triton", _supports_triton_layers, _triton_layers, is_tried=False),
    Implementation("reference", supports_everything, replay_layers_reference),
)


def replay_layers(
    backend: Backend, states: Sequence[DeltaState], records: Sequence[DeltaRecord], n: Int[Array, " B"]
) -> tuple[DeltaState, ...]:
    """`replay` of several layers, which does not depend on their order.

    Args:
        backend: As in `replay`.
        states: The state of each layer before the tokens.
        records: Their records.
        n: As in `replay`, of all layers.

    Returns:
        The states after the first n tokens.
    """
    args = (states, records, n)
    return choose("replay_layers", LAYERS_REPLAYS, backend, *args).call(backend, *args)


def works_in_place(backend: Backend, state: DeltaState, tokens: int) -> bool:
    """Whether a loop over ``tokens`` tokens at a time reads and writes rows of a larger state in place.

    Otherwise it is faster on a copy of the rows.
    """
    if backend.has_triton:
        from dflash_jax.ops.kernels.triton import delta as triton_delta

        return triton_delta.why_not(tokens, state) is None
    if backend.no_pallas is None and (PALLAS_REPLAY.is_tried or backend.kernels == "all"):
        from dflash_jax.ops.kernels.tpu import replay as tpu_replay

        return tpu_replay.why_not(tokens, state) is None
    return backend.has_cpp and cpp.why_not_gated_delta(state) is None


def advance_reference(
    backend: Backend,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    weights: Weights,
    eps: float,
    n: Int[Array, " B"],
) -> tuple[Float[Array, "B T G R Dv"] | DeferredDivision, DeltaState]:
    """`advance` by `gated_delta` and `replay`, each with the implementation that the backend chooses."""
    y, record = gated_delta(backend, qkvz, gates, state, weights, eps)
    return y, replay(backend, state, record, n)


def _supports_triton_advance(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, n: Array
) -> str | None:
    if reason := _supports_triton_chunks(backend, qkvz, gates, state, weights, eps):
        return reason
    if _supports_triton(backend, qkvz, gates, state, weights, eps) is None:
        return "one chunk is computed and replayed by other kernels"
    return None


def _triton_advance(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, n: Array
) -> tuple[Array, DeltaState]:
    from dflash_jax.ops.kernels.triton import delta_chunks

    conv_weight, a_log, dt_bias, norm = weights
    out, recurrent = delta_chunks.advance(
        backend.triton_card, qkvz, gates, state, conv_weight, a_log, dt_bias, n, untried=backend.kernels == "all"
    )
    inputs, z = jnp.split(qkvz, [conv_weight.shape[1]], axis=-1)
    conv = state.placed(state.conv_inputs, last_inputs(state.copied().conv_inputs, inputs, n))
    return gated_norm(out, z, norm, eps), DeltaState(recurrent, conv, state.rows)


def _supports_pallas_advance(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, n: Array
) -> str | None:
    if reason := _supports_pallas(backend, qkvz, gates, state, weights, eps):
        return reason
    from dflash_jax.ops.kernels.tpu import replay as tpu_replay

    if tpu_replay.why_not(qkvz.shape[1], state) is None:
        return "one chunk is computed and replayed by other kernels"
    return None


def _pallas_advance(
    backend: Backend, qkvz: Array, gates: Array, state: DeltaState, weights: Weights, eps: float, n: Array
) -> tuple[Array, DeltaState]:
    from dflash_jax.ops.kernels.tpu import delta as tpu_delta

    steps = _steps_and_decays(gates, weights)
    y, recurrent = tpu_delta.mix(qkvz, *steps, state, weights.conv_weight, weights.norm, eps, n)
    inputs = qkvz[..., : weights.conv_weight.shape[1]]
    return y, state.put(DeltaState(recurrent, last_inputs(state.copied().conv_inputs, inputs, n)))


ADVANCES = (
    Implementation("triton, chunks", _supports_triton_advance, _triton_advance),
    Implementation("pallas", _supports_pallas_advance, _pallas_advance, is_tried=False),
    Implementation("reference", supports_everything, advance_reference),
)


def advance(
    backend: Backend,
    qkvz: Float[Array, "B T G CZ"],
    gates: Float[Array, "B T 2 G R"],
    state: DeltaState,
    weights: Weights,
    eps: float,
    n: Int[Array, " B"],
) -> tuple[Float[Array, "B T G R Dv"] | DeferredDivision, DeltaState]:
    """`gated_delta` and `replay` in one, where n is known beforehand; no record is returned.

    Args:
        backend: Where it runs. The kernels have no gradient and write the state in place.
        qkvz: As in `gated_delta`.
        gates: As in `gated_delta`.
        state: The state before the tokens.
        weights: The layer's weights.
        eps: Epsilon of the norm.
        n: int [B], how many tokens count.

    Returns:
        y as `gated_delta` returns it, and the state after the first n tokens.
    """
    args = (qkvz, gates, state, weights, eps, n)
    return choose("advance", ADVANCES, backend, *args).call(backend, *args)
