"""Logits → processed distribution → token, with log-probabilities.

The noise of a draw is a function of (seed, absolute position, token id) alone. So the token that is drawn from a given
distribution at a given position does not depend on whether it was drafted, on the block size or on the batch. A drafter
that draws with the same noise agrees with the target more often than one that drafts greedily: the coupling by shared
Gumbel noise of Daliri et al. (drafter-invariant speculative decoding, arXiv 2408.07978).

Dimension letters: B sequences, T positions of this call, V vocabulary (a device's part of it, where it is divided).
"""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.sampling_state import (
    GREEDY,
    PENALISED,
    PROCESSED,
    PROCESSED_LOGITS,
    RAW_LOGITS,
    SCALED,
    TABLES,
    SamplingState,
    sampling_mode,
)
from dflash_jax.models.selector import Candidates
from dflash_jax.ops.sampling_noise import gumbel_noise
from dflash_jax.parallel.sharding import UNSHARDED
from dflash_jax.sampling_params import MAX_LOGPROBS

# Codes in place of a token. NOT_FINITE: the model's logits are NaN or infinite. NOTHING_ALLOWED: the request's mask,
# penalties or bias leave no token. Both differ from the padding of stops and drafts, -1.
NOT_FINITE, NOTHING_ALLOWED = -2, -3
# A penalised logit has at most this magnitude, so that float32 holds sums of it with further penalties.
_MAX_LOGIT = 1e38
# The largest logit over the temperature is at most this. The next smaller float32 is then so far below that no noise
# reaches it, as with smaller temperatures.
_MAX_SCALED = 2.0**100


def _ordered_bits(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """float32 → int32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # -0.0 equals 0.0. The test is on bits, because a comparison with 0 would take denormals for it.
    bits = jnp.where(bits == -(2**31), 0, bits)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _smallest_top_set(
    values: Float[Array, "B T V"], is_enough: Callable[[Bool[Array, "B T V"]], Bool[Array, "B T 1"]]
) -> Bool[Array, "B T V"]:
    """The smallest set ``values >= t`` for which ``is_enough(set)`` holds; ties at t are in it.

    ``is_enough`` must hold for every superset of a set for which it holds. Bisection over the bits of t: exact, with 32
    comparisons and without a sort of the vocabulary.
    """
    keys = _ordered_bits(values)
    low = jnp.full((*values.shape[:-1], 1), -(2**31), jnp.int32)
    high = jnp.full_like(low, 2**31 - 1)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean rounded up, without overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        fits = is_enough(keys >= middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return keys >= low


def apply_penalties(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    block: Int[Array, "B T"] | None = None,
    num_known: Int[Array, " B"] | None = None,
) -> Float[Array, "B T V"]:
    """Adds the logit bias and applies the penalties.

    Place i is penalised for the tokens up to place i of the block, unverified drafts included. The repetition penalty
    is that of CTRL (arXiv 1909.05858); frequency and presence penalties are those of OpenAI's API.

    Args:
        logits: float32 [B, T, V].
        sampling: Options and counts.
        block: Tokens that the target was fed at these places, int [B, T]; None leaves the counts as they are.
        num_known: Tokens at the beginning of the block that the counts include, int [B]; None only without ``block``.

    Returns:
        float32 [B, T, V].

    Raises:
        ValueError: ``block`` is given without ``num_known``.
    """
    bias, prompt, output = (sampling.table(name)[:, None] for name in TABLES)
    if block is not None:
        if num_known is None:
            raise ValueError("a block without num_known: the counts include an unknown number of its tokens")
        place = jnp.arange(block.shape[1])
        # Tokens of other devices' parts are outside of the one-hot's range.
        local, _ = sampling.vocab.local(block, logits.shape[-1])
        is_draft = (place[None] >= num_known[:, None])[..., None]
        drafts = jax.nn.one_hot(local, logits.shape[-1], dtype=jnp.int32) * is_draft
        output = output + jnp.cumsum(drafts, axis=1)
    logits = logits + bias
    repetition = sampling.repetition[:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    # -inf stays what it is: no token.
    repeated = jnp.where(logits > -jnp.inf, jnp.clip(repeated, -_MAX_LOGIT, _MAX_LOGIT), logits)
    logits = jnp.where((prompt > 0) | (output > 0), repeated, logits)
    logits = logits - sampling.frequency[:, None, None] * output
    return logits - sampling.presence[:, None, None] * (output > 0)


def scale_logits(logits: Float[Array, "B T V"], sampling: SamplingState) -> Float[Array, "B T V"]:
    """Logits over the temperature, float32 [B, T, V]; those of greedy sequences stay.

    A temperature that is too small for float32 is replaced by the smallest that is not, with which the likeliest token
    is drawn, too.
    """
    vocab = sampling.vocab
    is_greedy = (sampling.temperature <= 0)[:, None, None]
    largest = vocab.max(logits.max(-1, keepdims=True))
    # Without an allowed token, the largest is -inf.
    smallest = jnp.where(jnp.isfinite(largest), jnp.abs(largest) / _MAX_SCALED, 0.0)
    divisor = jnp.where(is_greedy, 1.0, jnp.maximum(sampling.temperature[:, None, None], smallest))
    return logits / divisor


def _apply_filters(logits: Float[Array, "B T V"], sampling: SamplingState) -> Float[Array, "B T V"]:
    """Temperature, top-k, top-p (arXiv 1904.09751) and min-p (arXiv 2407.01082), in this order.

    Removed tokens get -inf; ties at a threshold stay.
    """
    vocab = sampling.vocab
    is_greedy = (sampling.temperature <= 0)[:, None, None]
    logits = scale_logits(logits, sampling)

    def filtered(logits: Array) -> Array:
        # Without top-k, k is more than the vocabulary: no set is enough, and the threshold is the lowest.
        k = jnp.where(sampling.top_k > 0, sampling.top_k, jnp.iinfo(jnp.int32).max)[:, None, None]
        stays = _smallest_top_set(logits, lambda is_in: vocab.sum(is_in.sum(-1, keepdims=True)) >= k)
        # Greedy sequences are not filtered, whatever the others of the batch need.
        logits = jnp.where(stays | is_greedy, logits, -jnp.inf)
        # Not a quotient of the largest before, since compilers may divide an array in another way.
        weights = jnp.exp(logits - vocab.max(logits.max(-1, keepdims=True)))

        def total(x: Array) -> Array:
            return vocab.sum(x.sum(-1, keepdims=True))

        # The largest weight is 1. Without a lower bound, a product that underflows to 0 would be reached by no token.
        mass = jnp.maximum(sampling.top_p, jnp.finfo(jnp.float32).tiny)[:, None, None] * total(weights)
        stays = _smallest_top_set(weights, lambda is_in: total(jnp.where(is_in, weights, 0.0)) >= mass)
        # At top_p 1 the rounding of a sum must not remove the tail.
        stays = stays | (sampling.top_p >= 1)[:, None, None]
        stays = stays & (weights >= sampling.min_p[:, None, None]) & (logits > -jnp.inf)
        return jnp.where(stays | is_greedy, logits, -jnp.inf)

    has_filters = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jax.lax.cond((has_filters & (sampling.temperature > 0)).any(), filtered, lambda x: x, logits)


def _unpack_mask(mask: UInt32[Array, "B T words"]) -> Bool[Array, "B T bits"]:
    """uint32 [B, T, ceil(V / 32)], bit i of word w for token 32 w + i → bool [B, T, V rounded up]."""
    bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*mask.shape[:-1], -1).astype(bool)


def _apply_mask(
    logits: Float[Array, "B T V"], sampling: SamplingState, mask: UInt32[Array, "B T words"] | None
) -> Float[Array, "B T V"]:
    """Logits with -inf for the tokens that the ``mask`` of `process_logits` forbids."""
    if mask is None:
        return logits
    allowed, size = _unpack_mask(mask), logits.shape[-1]
    allowed = jax.lax.dynamic_slice_in_dim(allowed, sampling.vocab.index() * size, size, axis=-1)
    return jnp.where(allowed, logits, -jnp.inf)


def _apply_rules(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    block: Int[Array, "B T"] | None,
    num_known: Int[Array, " B"] | None,
    mask: UInt32[Array, "B T words"] | None,
    mode: Int[Array, " B"],
) -> Float[Array, "B T V"]:
    """Bias, penalties and mask: `process_logits` before the temperature."""

    def penalised(x: Array) -> Array:
        return apply_penalties(x, sampling, block, num_known)

    logits = jax.lax.cond((mode == PENALISED).any(), penalised, lambda x: x, logits)
    return _apply_mask(logits, sampling, mask)


def process_logits(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    block: Int[Array, "B T"] | None = None,
    num_known: Int[Array, " B"] | None = None,
    mask: UInt32[Array, "B T words"] | None = None,
    mode: Int[Array, " B"] | None = None,
) -> Float[Array, "B T V"]:
    """Penalties, mask and filters.

    Args:
        logits: Raw logits, float32 [B, T, V].
        sampling: Options and counts.
        block: As in `apply_penalties`.
        num_known: As in `apply_penalties`.
        mask: Packed bits of the allowed tokens, uint32 [B, T, ceil(V / 32)]: bit i of word w for token 32 w + i. None
            allows all.
        mode: `sampling_mode` of the sequences, int [B]; None computes it.

    Returns:
        Logits of the distribution that is drawn from, float32 [B, T, V]. Greedy sequences take its arg-max.
    """
    mode = sampling_mode(sampling) if mode is None else mode
    logits = _apply_rules(logits, sampling, block, num_known, mask, mode)
    return jax.lax.cond((sampling.temperature > 0).any(), lambda x: _apply_filters(x, sampling), lambda x: x, logits)


def add_noise(
    processed: Float[Array, "B T V"],
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    ids: Int[Array, " V"] | None = None,
) -> Float[Array, "B T V"]:
    """Adds the Gumbel noise of the draw; the arg-max of the sum is the drawn token (the Gumbel-max trick).

    Args:
        processed: Processed logits, float32 [B, T, V].
        sampling: Options; greedy sequences get no noise.
        positions: Absolute positions of the drawn tokens, int [B, T].
        ids: Token ids of the logits, int [V]; None for the whole vocabulary.

    Returns:
        float32 [B, T, V].
    """
    if ids is None:
        ids = sampling.vocab.index() * processed.shape[-1] + jnp.arange(processed.shape[-1])
    noise = gumbel_noise(sampling.backend, sampling.seed, positions, ids)
    return processed + jnp.where((sampling.temperature > 0)[:, None, None], noise, 0.0)


def _mark_invalid(
    tokens: Int[Array, "B T"], largest: Float[Array, "B T"], code: int | Int[Array, "..."]
) -> Int[Array, "B T"]:
    """int32 tokens, with ``code`` (NOT_FINITE or NOTHING_ALLOWED) where their logit ``largest`` is not finite."""
    return jnp.where(jnp.isfinite(largest), tokens, code).astype(jnp.int32)


def draw_processed(
    processed: Float[Array, "B T V"],
    sampling: SamplingState,
    positions: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    """Draws from processed logits.

    Args:
        processed: float32 [B, T, V].
        sampling: Options.
        positions: Absolute positions of the drawn tokens, int [B, T].

    Returns:
        Token ids, int32 [B, T]. NOTHING_ALLOWED where the largest logit is not
        finite; `draw` replaces it by NOT_FINITE where the raw logits are not finite.
    """

    def random(logits: Array) -> tuple[Array, Array]:
        return sampling.argmax(add_noise(logits, sampling, positions))

    tokens, largest = jax.lax.cond((sampling.temperature > 0).any(), random, sampling.argmax, processed)
    return _mark_invalid(tokens, largest, NOTHING_ALLOWED)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities in nats at some positions, or logits in their modes.

    Attributes:
        chosen: Log-probability of the drawn token, float32 [..., T].
        ids: The n most likely tokens, int32 [..., T, n], the most likely first.
        values: Their log-probabilities, float32 [..., T, n].
        named: Log-probabilities of the tokens that the request names, float32 [..., T, MAX_LOGPROBS].
    """

    chosen: Float[Array, "*T"]
    ids: Int[Array, "*T n"]
    values: Float[Array, "*T n"]
    named: Float[Array, "*T named"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], top: int) -> "Logprobs":
        """Zeros for positions of that ``shape``, with ``top`` most likely tokens each."""
        best = (*shape, top)
        return cls(jnp.zeros(shape), jnp.zeros(best, jnp.int32), jnp.zeros(best), jnp.zeros((*shape, MAX_LOGPROBS)))

    def of_sequence(self, index: int, count: int) -> "Logprobs":
        """The first ``count`` positions of sequence ``index`` of [B, T]."""
        return jax.tree.map(lambda x: x[index, :count], self)


def compute_logprobs(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    sampling: SamplingState,
    top: int,
) -> Logprobs:
    """Log-probabilities of drawn tokens.

    Args:
        logits: Those of the sequence's ``logprobs_mode``, float32 [B, T, V].
        tokens: Drawn tokens, int [B, T].
        sampling: Options.
        top: Most likely tokens at each position.

    Returns:
        `Logprobs` [B, T].
    """
    vocab, mode = sampling.vocab, sampling.logprobs_mode
    are_logits = ((mode == RAW_LOGITS) | (mode == PROCESSED_LOGITS))[:, None, None]
    shifted = logits - vocab.max(logits.max(-1, keepdims=True))
    values = shifted - jnp.log(vocab.sum(jnp.exp(shifted).sum(-1, keepdims=True)))
    values = jnp.where(are_logits, logits, values)

    def of(ids: Array) -> Array:
        local, is_local = vocab.local(ids, logits.shape[-1])
        part = jnp.take_along_axis(values, jnp.where(is_local, local, 0), axis=-1)
        return vocab.sum(jnp.where(is_local, part, 0.0))

    chosen = of(tokens[..., None])[..., 0]
    best, ids = sampling.largest(values, top)
    named = of(jnp.maximum(sampling.logprob_ids, 0)[:, None])
    return Logprobs(chosen, ids.astype(jnp.int32), best, named)


def best_candidates(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    mode: Int[Array, " B"],
    count: int,
    ids: Int[Array, " V"] | None = None,
) -> Candidates:
    """The tokens that `draw` compares last: the best ones of the greedy logits, or of the noised processed logits.

    At a high temperature the draw is often outside the best tokens of the logits without noise.

    Args:
        logits: As of `draw`.
        sampling: As of `draw`.
        positions: As of `draw`.
        mode: As of `draw`.
        count: Candidates of each place; at most V are given.
        ids: As of `draw`.

    Returns:
        The candidates, of [B, T, K].
    """

    def greedy() -> tuple[Array, Array]:
        return (sampling if ids is None else replace(sampling, vocab=UNSHARDED)).largest(logits, count)

    def general() -> tuple[Array, Array]:
        options = sampling if ids is None else sampling.for_tokens(ids)
        processed = process_logits(logits, options, mode=mode)
        return options.largest(add_noise(processed, options, positions, ids), count)

    scores, tokens = jax.lax.cond((mode != GREEDY).any(), general, greedy)
    scale = jnp.where(sampling.temperature > 0, 1 / jnp.maximum(sampling.temperature, 1 / _MAX_SCALED), 1.0)
    tokens = tokens.astype(jnp.int32)
    return Candidates(tokens if ids is None else ids[tokens], scores, scale)


def draw_drafts(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    mode: Int[Array, " B"],
    ids: Int[Array, " V"] | None = None,
    has_scores: bool = False,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"] | None]:
    """The tokens that `draw` would draw from a drafter's logits, and how likely it says that they are.

    Args:
        logits: As of `draw`.
        sampling: As of `draw`.
        positions: As of `draw`.
        mode: As of `draw`.
        ids: Token ids of the logits, int [V], ascending; None for the whole vocabulary.
        has_scores: Whether scores are computed.

    Returns:
        Tokens int32 [B, T], also where logits are not finite; and their scores, the share of each in a softmax over
        what the draw compares, the noise included, float32 [B, T], or None.
    """

    def largest(values: Array, options: SamplingState) -> tuple[Array, Array | None]:
        tokens, most = options.argmax(values)
        return tokens, None if not has_scores else 1 / options.vocab.sum(jnp.exp(values - most[..., None]).sum(-1))

    def greedy() -> tuple[Array, Array | None]:
        return largest(logits, sampling if ids is None else replace(sampling, vocab=UNSHARDED))

    def general() -> tuple[Array, Array | None]:
        options = sampling if ids is None else sampling.for_tokens(ids)
        processed = process_logits(logits, options, mode=mode)
        return largest(add_noise(processed, options, positions, ids), options)

    tokens, scores = jax.lax.cond((mode != GREEDY).any(), general, greedy)
    tokens = tokens.astype(jnp.int32)
    return tokens if ids is None else ids[tokens], scores


def draw(
    logits: Float[Array, "B T V"],
    sampling: SamplingState,
    positions: Int[Array, "B T"],
    mode: Int[Array, " B"],
    block: Int[Array, "B T"] | None = None,
    num_known: Int[Array, " B"] | None = None,
    mask: UInt32[Array, "B T words"] | None = None,
    wants_logprobs: Bool[Array, " B"] | None = None,
    top: int = 0,
) -> tuple[Int[Array, "B T"], Logprobs | None]:
    """Draws tokens from raw logits.

    Where every sequence is greedy and none wants log-probabilities, this is one conditional around an arg-max. The
    processed logits are not returned: a conditional writes all its results to memory, even a branch that returns its
    input.

    Args:
        logits: Raw logits, float32 [B, T, V].
        sampling: Options and counts.
        positions: Absolute positions of the drawn tokens, int [B, T].
        mode: `sampling_mode` of the sequences, int [B]; GREEDY for those whose tokens are not used.
        block: As in `apply_penalties`.
        num_known: As in `apply_penalties`.
        mask: As in `process_logits`.
        wants_logprobs: Sequences whose log-probabilities are used, bool [B]; None for no log-probabilities at all.
        top: Most likely tokens of the log-probabilities.

    Returns:
        Tokens int32 [B, T], or NOT_FINITE or NOTHING_ALLOWED; and `Logprobs` [B, T], zeros where no
        sequence wants any, or None without ``wants_logprobs``.
    """

    def no_logprobs() -> Logprobs:
        return Logprobs.zeros(positions.shape, top)

    def greedy() -> tuple[Array, Logprobs | None]:
        tokens, largest = sampling.argmax(_apply_mask(logits, sampling, mask))
        nothing_allowed = mask is not None and largest == -jnp.inf
        tokens = _mark_invalid(tokens, largest, jnp.where(nothing_allowed, NOTHING_ALLOWED, NOT_FINITE))
        return tokens, None if wants_logprobs is None else no_logprobs()

    def general() -> tuple[Array, Logprobs | None]:
        processed = process_logits(logits, sampling, block, num_known, mask, mode)
        # Raw logits are checked too: a filter may remove a NaN.
        drawn = draw_processed(processed, sampling, positions)
        tokens = jnp.where(jnp.isfinite(sampling.argmax(logits)[1]), drawn, NOT_FINITE)
        if wants_logprobs is None:
            return tokens, None

        kind = sampling.logprobs_mode
        is_processed = (kind == PROCESSED) | (kind == PROCESSED_LOGITS)
        is_scaled = wants_logprobs & (kind == SCALED)

        def with_logprobs() -> Logprobs:
            def unscaled() -> Array:
                return jnp.where(is_processed[:, None, None], processed, logits)

            def scaled() -> Array:
                # What the cuts have removed is computed again: to keep it would take memory of every round.
                ruled = _apply_rules(logits, sampling, block, num_known, mask, mode)
                return jnp.where(is_scaled[:, None, None], scale_logits(ruled, sampling), unscaled())

            reported = jax.lax.cond(is_scaled.any(), scaled, unscaled)
            return compute_logprobs(reported, tokens, sampling, top)

        return tokens, jax.lax.cond(wants_logprobs.any(), with_logprobs, no_logprobs)

    is_general = mode != GREEDY if wants_logprobs is None else (mode != GREEDY) | wants_logprobs
    return jax.lax.cond(is_general.any(), general, greedy)
