"""The speculative loop: propose → verify → decide → commit.

The parts are pure functions over one frozen state, and the loop is one while_loop. The drafter proposes as in DFlash
(arXiv 2602.06036). Verification accepts the drafts that equal the target's draws, so the text is the one that the
target alone gives. Drafter and target draw with the same Gumbel noise, which is the drafter-invariant speculative
decoding of Daliri et al. (arXiv 2408.07978). Every function takes modules and a `DecodeState` and runs under the
caller's ``jax.jit``. Plain decoding is the same loop with blocks of one token and no drafter.

Blocks. A round feeds the target a block of T tokens from position ``num_cached`` on: the known tokens from there
(normally one, the last), then drafts. Everything before ``num_cached`` is in the caches.

Aligned blocks (``Settings.aligned``, the reproducible mode). Then ``num_cached`` moves by whole blocks only. Tokens
that were verified since are fed again, at the same place of the same block, until the block is full. A block of known
tokens alone yields nothing, and is committed. So what the target
computes for a position depends on the tokens before it alone, not on how many drafts were accepted on the way, and the
bits are the same with any drafter and with none.

Dimension letters: B sequences, T tokens of a block, V vocabulary, H hidden size, L positions of the token buffer.
"""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding.sampling import Logprobs, best_candidates, draw, draw_drafts
from dflash_jax.decoding.sampling_state import GREEDY, sampling_mode
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings
from dflash_jax.decoding.widths import (
    BINS,
    LENGTHS,
    USUAL_SCORE,
    bins_of,
    choose_widths,
    count_outcomes,
    lengths_of,
)
from dflash_jax.models.cache import Record
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import (
    ContextTokens,
    DraftCache,
    Drafting,
    DraftWindow,
    TargetHeads,
    contexts_by_need,
    extended_contexts,
    features_of,
    proposer,
)
from dflash_jax.models.selector import Candidates
from dflash_jax.parallel.sharding import DATA, spec

# Plain rounds between two extensions of the drafter's cache.
PLAIN_ROUNDS = 32
# Positions of each step of such an extension.
EXTENSION_SIZE = 4
# The same of the caches of drafters that do not propose: tokens of a sequence, which are more than rounds.
DEFERRED_TOKENS, DEFERRED_SIZE = 64, 16


def verified_specs(target: Decoder, drafter: Drafting | None) -> tuple[PartitionSpec, PartitionSpec | None, Any]:
    """PartitionSpecs of what `verify` returns."""
    return spec(DATA, None, target.vocab), None if drafter is None else spec(DATA), target.record_specs()


def _append(
    state: DecodeState,
    samples: Int[Array, "B T"],
    first: Int[Array, " B"],
    count: Int[Array, " B"],
    logprobs: Logprobs | None,
) -> DecodeState:
    """Appends samples[first : first + count] of each sequence, up to a stop token, the limit or an invalid draw.

    Updates length, counts, ``logprobs`` (those of the samples, [B, T]) and ``done``; leaves caches, num_cached, rounds
    and ``yielded`` alone.
    """
    order = jnp.arange(samples.shape[1])[None] - first[:, None]
    count = jnp.minimum(count, state.limit - state.length)
    is_inside = (order >= 0) & (order < count[:, None])
    is_stop = is_inside & ((samples[..., None] == state.stops[:, None]).any(-1) | (samples < 0))
    # Everything up to and with the first stop.
    is_new = is_inside & (jnp.cumsum(is_stop, axis=1) - is_stop == 0)
    places = jnp.where(is_new, state.length[:, None] + order, state.tokens.shape[1])
    batch = jnp.arange(state.tokens.shape[0])[:, None]
    length = state.length + is_new.sum(1)
    record = state.logprobs
    if record is not None:
        slots, size = batch if state.slots is None else state.slots[:, None], record.chosen.shape[1]
        kept = jnp.where(is_new, places % size, size)
        record = jax.tree.map(lambda old, new: old.at[slots, kept].set(new, mode="drop"), record, logprobs)
    return replace(
        state,
        tokens=state.tokens.at[batch, places].set(samples, mode="drop"),
        length=length,
        done=state.done | (is_stop & is_new).any(1) | (length >= state.limit),
        sampling=state.sampling.count_output(samples, is_new),
        logprobs=record,
    )


def _live_mode(state: DecodeState, mode: Int[Array, " B"] | None) -> Int[Array, " B"]:
    """`sampling_mode` of the sequences, GREEDY for those that are done; computed where ``mode`` is None."""
    return jnp.where(state.done, GREEDY, sampling_mode(state.sampling) if mode is None else mode)


def propose(
    target: Decoder,
    drafter: Drafting,
    state: DecodeState,
    settings: Settings,
    mode: Int[Array, " B"] | None = None,
) -> Int[Array, "B T"]:
    """Drafts tokens after the known ones.

    Args:
        target: The target, whose embedding and head the drafter uses.
        drafter: The drafter.
        state: The state.
        settings: Its ``block_size`` is T.
        mode: `sampling_mode` of the sequences, int [B]; None computes it.

    Returns:
        The block, int [B, T]: known tokens, then drafts.
    """
    return propose_scored(target, drafter, state, settings, mode)[0]


def propose_scored(
    target: Decoder,
    drafter: Drafting,
    state: DecodeState,
    settings: Settings,
    mode: Int[Array, " B"] | None,
) -> tuple[Int[Array, "B T"], Float[Array, "B drafts"] | None]:
    """`propose`, with the scores of the drafts after the last known token.

    Args:
        target: As of `propose`.
        drafter: As of `propose`.
        state: As of `propose`.
        settings: As of `propose`.
        mode: As of `propose`.

    Returns:
        The block, and `Proposal.scores`; None for these where ``settings`` has no widths, or the drafter no scores.
    """
    size, has_scores = settings.block_size, settings.has_widths
    mode = _live_mode(state, mode)

    def scored_draw(
        logits: Float[Array, "B drafts N"], positions: Int[Array, "B drafts"], ids: Int[Array, " N"] | None = None
    ) -> tuple[Int[Array, "B drafts"], Float[Array, "B drafts"] | None]:
        return draw_drafts(logits, state.sampling, positions, mode, ids, has_scores)

    def candidates(
        logits: Float[Array, "B drafts N"],
        positions: Int[Array, "B drafts"],
        count: int,
        ids: Int[Array, " N"] | None = None,
    ) -> Candidates:
        return best_candidates(logits, state.sampling, positions, mode, count, ids)

    start = jnp.where(state.done, 0, state.length - 1)
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)[:, 0]
    heads = TargetHeads(
        target.embed_tokens,
        target.logits,
        lambda *args, **kwargs: scored_draw(*args, **kwargs)[0],
        candidates,
        scored_draw if has_scores else None,
    )
    window = DraftWindow(state.draft_window, state.draft_sinks, state.draft_start[:, proposer(drafter)])
    proposal = drafter.propose(state.draft, last, start, state.block_sizes, size, heads, window)
    # The first draft follows the last known token, at place num_uncached of the block.
    places = jnp.arange(size)[None] - state.num_uncached[:, None]
    drafts = jnp.take_along_axis(proposal.tokens, jnp.clip(places, 0, size - 2), axis=1)
    return jnp.where(places < 0, state.uncached_tokens(size), drafts), proposal.scores if has_scores else None


def next_block(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    settings: Settings,
    mode: Int[Array, " B"] | None = None,
) -> Int[Array, "B T"]:
    """The block of a round: `propose`, or known tokens alone without a drafter or without room for drafts.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The state.
        settings: Its ``block_size`` is T.
        mode: As in `propose`.

    Returns:
        int [B, T].
    """
    if drafter is not None and settings.block_size > 1:
        return propose(target, drafter, state, settings, mode)
    return state.uncached_tokens(settings.block_size)


def verify(
    target: Decoder, state: DecodeState, block: Int[Array, "B T"], taps: Sequence[int] = ()
) -> tuple[Float[Array, "B T V"], Float[Array, "B T taps H"] | None, Record]:
    """One pass of the target over the block. Writes nothing.

    Args:
        target: The target.
        state: The state; sequences that are done take no part.
        block: What `next_block` gave, int [B, T].
        taps: Layers whose outputs the drafter reads.

    Returns:
        Logits float32 [B, T, V], features [B, T, taps, H] (None without taps), and the record that `commit` writes.
    """
    n = jnp.where(state.done, 0, jnp.minimum(state.num_uncached + state.block_sizes - 1, block.shape[1]))
    positions = state.rotary_positions(block.shape[1])
    hidden, features, record = target.verify(block, state.target, state.num_cached, n, tuple(taps), positions)
    return target.logits(hidden), features, record


def decide(
    state: DecodeState,
    block: Int[Array, "B T"],
    logits: Float[Array, "B T V"],
    mask: UInt32[Array, "B T words"] | None = None,
    mode: Int[Array, " B"] | None = None,
) -> DecodeState:
    """Draws at every place of the block, and accepts drafts up to the first that differs from its draw.

    That draw is appended in place of the draft.

    Args:
        state: The state.
        block: What was verified, int [B, T].
        logits: The target's logits, float32 [B, T, V].
        mask: Allowed tokens, packed as in `sampling.process_logits`, uint32 [B, T, ceil(V / 32)].
        mode: `sampling_mode` of the sequences, int [B]; None computes it.

    Returns:
        The state with 1 to ``block_sizes`` more tokens a live sequence; its caches are as before.
    """
    size, num_known = block.shape[1], state.num_uncached
    positions = state.num_cached[:, None] + 1 + jnp.arange(size)[None]
    mode, wants_logprobs, top = _live_mode(state, mode), None, 0
    if state.logprobs is not None:
        wants_logprobs, top = state.sampling.wants_logprobs & ~state.done, state.logprobs.ids.shape[-1]
    samples, logprobs = draw(logits, state.sampling, positions, mode, block, num_known, mask, wants_logprobs, top)
    place = jnp.arange(size)[None]
    is_known = place < num_known[:, None]
    is_draft = ~is_known & (place < (num_known + state.block_sizes - 1)[:, None])
    first = jnp.ones_like(num_known, bool)[:, None]
    agrees = jnp.concatenate([first, samples[:, :-1] == block[:, 1:]], axis=1)
    # Known tokens count as agreeing, so that the run of agreement ends at the first wrong draft.
    run = jnp.cumprod((agrees & is_draft) | is_known, axis=1).sum(1)
    after = _append(state, samples, num_known - 1, jnp.where(state.done, 0, run - num_known + 1), logprobs)
    num_yielded = after.length - state.length
    place = jnp.where(num_yielded > 0, state.rounds, state.yielded.shape[1])
    at = jnp.arange(len(place)), place
    return replace(
        after,
        yielded=state.yielded.at[at].set(num_yielded, mode="drop"),
        verified=state.verified.at[at].set(state.block_sizes, mode="drop"),
        rounds=state.rounds + (num_yielded > 0),
    )


def commit(
    target: Decoder,
    drafter: Drafting | None,
    before: DecodeState,
    after: DecodeState,
    block: Int[Array, "B T"],
    features: Float[Array, "B T taps H"] | None,
    record: Record,
    aligned: bool = False,
) -> DecodeState:
    """Writes accepted tokens into the caches.

    Args:
        target: The target.
        drafter: The drafter; None writes the target's caches only.
        before: The state that was verified.
        after: What `decide` gave for it.
        block: What was verified, int [B, T].
        features: The features of the pass, [B, T, taps, H].
        record: The record of the pass.
        aligned: Whether only whole blocks are written, as `Settings.aligned` says.

    Returns:
        ``after`` with new caches. Contexts that do not have the tokens are `DecodeState.restart_draft_contexts`' part.
    """
    size = block.shape[1]
    num_yielded = after.length - before.length
    n = jnp.where(after.length - before.num_cached > size, size, 0) if aligned else num_yielded
    caches = target.commit(before.target, record, before.num_cached, n)
    draft = before.draft
    if drafter is not None:
        steps = jnp.arange(size)[None]
        valid = (steps < (after.length - 1 - before.num_cached)[:, None]) & ~before.done[:, None]
        positions, rotary = before.num_cached[:, None] + steps, before.rotary_positions(size)
        embeddings = target.embed_tokens(block)
        draft = drafter.extend(draft, ContextTokens(block, embeddings, features, positions, rotary, valid))
    return replace(after, target=caches, draft=draft, num_cached=before.num_cached + n)


def decode_round(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    settings: Settings = PLAIN_SETTINGS,
    mask: UInt32[Array, "B T words"] | None = None,
    mode: Int[Array, " B"] | None = None,
) -> DecodeState:
    """One round.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The state.
        settings: What is compiled in.
        mask: As in `decide`.
        mode: As in `decide`.

    Returns:
        The state, in which every live sequence has 1 to ``block_sizes`` more tokens.
    """
    block = next_block(target, drafter, state, settings, mode)
    logits, features, record = verify(target, state, block, drafter.taps if drafter is not None else ())
    after = decide(state, block, logits, mask, mode)
    after = commit(target, drafter, state, after, block, features, record, settings.aligned)
    return after.restart_draft_contexts(state, extended_contexts(drafter))


def _contexts(drafter: Drafting | None, block_size: int) -> tuple[Drafting | None, Drafting | None]:
    """``drafter`` with the contexts that each round of `decode` extends, and with those that it defers to its end."""
    return (None, drafter) if block_size == 1 else contexts_by_need(drafter)


def deferred_features(
    target: Decoder, drafter: Drafting | None, batch_size: int, block_size: int
) -> jax.ShapeDtypeStruct | None:
    """What `decode` keeps until its end, for contexts that none of its rounds reads.

    Args:
        target: The target.
        drafter: The drafter, or None.
        batch_size: B.
        block_size: As in `Settings`.

    Returns:
        Shape [B, places, taps, H] and dtype of the features; None where no context is deferred.
    """
    later = _contexts(drafter, block_size)[1]
    if later is None:
        return None
    places = PLAIN_ROUNDS
    if block_size > 1:
        places = max(DEFERRED_TOKENS, -(-block_size // DEFERRED_SIZE) * DEFERRED_SIZE)
    return jax.ShapeDtypeStruct((batch_size, places, len(later.taps), target.config.hidden_size), target.dtype)


def decode(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    rounds: int | Int[Array, ""],
    new_tokens: int | Int[Array, ""] | None = None,
    settings: Settings = PLAIN_SETTINGS,
) -> DecodeState:
    """Rounds on the device, in one while_loop.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The state.
        rounds: Rounds at most (runtime data). They end before deferred contexts have no more room.
        new_tokens: New tokens of a sequence at most, but for those of the first round (runtime data); None is no bound.
        settings: What is compiled in, without widths.

    Returns:
        The state when every sequence is done, after ``rounds``, or where another round could exceed ``new_tokens``. It
        has the log-probabilities of the last RECORDED positions.
    """
    return decode_by_widths(target, drafter, state, rounds, new_tokens, settings, None, None)[0]


def decode_by_widths(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    rounds: int | Int[Array, ""],
    new_tokens: int | Int[Array, ""] | None,
    settings: Settings,
    rates: Float[Array, "lengths drafts bins"] | None,
    prices: Float[Array, " B"] | None,
) -> tuple[DecodeState, Int[Array, "2 lengths drafts bins"] | None]:
    """`decode`, in which drafts that are not worth their verification are not verified.

    Args:
        target: As of `decode`.
        drafter: As of `decode`.
        state: As of `decode`.
        rounds: As of `decode`.
        new_tokens: As of `decode`.
        settings: What is compiled in; without widths, whole blocks are verified.
        rates: As of `choose_widths`; None without widths.
        prices: Likewise.

    Returns:
        The state, and the sum of `count_outcomes` of all rounds; None without widths.
    """
    taps, size = drafter.taps if drafter is not None else (), settings.block_size
    now, later = _contexts(drafter, size)
    deferred = _DeferredContexts(target, drafter, later, taps, state, size)
    before, mode = state, sampling_mode(state.sampling)

    def goes_on(carry: tuple[Array, DecodeState, Array | None, Array | None]) -> Array:
        i, state, *_ = carry
        num_gained = (state.length - before.length).max()
        has_room = True if new_tokens is None else num_gained + size <= new_tokens
        has_room = has_room & deferred.has_room(state, i)
        return (i < rounds) & ~state.done.all() & (has_room | (i == 0))

    def body(carry: tuple[Array, DecodeState, Array | None, Array | None]) -> tuple[Any, ...]:
        i, state, kept, outcomes = carry
        part, bins, lengths = state, None, None
        if settings.has_widths:
            assert drafter is not None, "widths without a drafter"
            assert rates is not None, "widths without rates of acceptance"
            assert prices is not None, "widths without prices"
            block, scores = propose_scored(target, drafter, state, settings, mode)
            bins = bins_of(jnp.full((len(block), size - 1), USUAL_SCORE) if scores is None else scores)
            lengths = lengths_of(state.length)
            part = replace(state, block_sizes=choose_widths(bins, lengths, rates, prices, state.block_sizes))
        else:
            block = next_block(target, drafter, state, settings, mode)
        logits, features, record = verify(target, part, block, taps)
        after = replace(decide(part, block, logits, None, mode), block_sizes=state.block_sizes)
        if bins is not None and lengths is not None and outcomes is not None:
            gained = after.length - state.length
            outcomes = outcomes + count_outcomes(bins, lengths, part.block_sizes, gained, after.done)
        kept = deferred.keep(kept, features, state, i)
        features = None if now is None else features_of(now.taps, features, taps)
        return i + 1, commit(target, now, state, after, block, features, record, settings.aligned), kept, outcomes

    none = jnp.zeros((2, LENGTHS, size - 1, BINS), jnp.int32) if settings.has_widths else None
    _, state, kept, outcomes = jax.lax.while_loop(goes_on, body, (jnp.int32(0), state, deferred.nothing(), none))
    return deferred.extend(state, kept).restart_draft_contexts(before, extended_contexts(drafter)), outcomes


class _DeferredContexts:
    """Contexts that no round of a `decode` call reads: they are extended at its end, which costs each round less.

    Args:
        target: The target.
        drafter: The drafter, or None.
        later: The drafter with these contexts; None for no context.
        taps: Layers whose features a round has.
        before: The state at the beginning.
        size: The block size.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafting | None,
        later: Drafting | None,
        taps: tuple[int, ...],
        before: DecodeState,
        size: int,
    ):
        self._target, self._later, self._taps, self._before, self._size = target, later, taps, before, size
        self._shape = deferred_features(target, drafter, before.tokens.shape[0], size)

    def nothing(self) -> Float[Array, "B places taps H"] | None:
        """Room for the features that the contexts will take; None where no context is deferred."""
        return None if self._shape is None else jnp.zeros(self._shape.shape, self._shape.dtype)

    def has_room(self, state: DecodeState, i: Int[Array, ""]) -> Bool[Array, ""] | bool:
        """Whether there is room for round ``i``."""
        if self._shape is None:
            return True
        if self._size == 1:
            return i < self._shape.shape[1]
        return (state.num_cached - self._before.num_cached).max() + self._size <= self._shape.shape[1]

    def keep(
        self,
        kept: Float[Array, "B places taps H"] | None,
        features: Float[Array, "B T taps H"] | None,
        state: DecodeState,
        i: Int[Array, ""],
    ) -> Float[Array, "B places taps H"] | None:
        """``kept`` with the features of round ``i`` of ``state``."""
        if kept is None or self._later is None:
            return kept
        new = features_of(self._later.taps, features, self._taps)
        if new is None:
            return kept
        if self._size == 1:
            return jax.lax.dynamic_update_slice_in_dim(kept, new.astype(kept.dtype), i, axis=1)
        # Those of rejected drafts are overwritten, or after the last token.
        steps = (state.num_cached - self._before.num_cached)[:, None] + jnp.arange(self._size)[None]
        return kept.at[jnp.arange(len(steps))[:, None], steps].set(new.astype(kept.dtype), mode="drop")

    def extend(self, state: DecodeState, kept: Float[Array, "B places taps H"] | None) -> DecodeState:
        """``state`` with the contexts extended by the tokens since the beginning."""
        if kept is None or self._later is None:
            return state
        size = EXTENSION_SIZE if self._size == 1 else DEFERRED_SIZE
        return _extend_draft(self._target, self._later, self._before, state, kept, size)


def _extend_draft(
    target: Decoder,
    drafter: Drafting,
    before: DecodeState,
    after: DecodeState,
    features: Float[Array, "B places taps H"],
    size: int,
) -> DecodeState:
    """``after`` with the tokens since ``before`` in the drafter's cache, in steps of ``size`` positions."""
    # All but the last known token are verified. Sequences that were done take no part.
    num_gained = jnp.where(before.done, 0, after.length - 1 - before.num_cached)

    def extend(i: Array, draft: DraftCache) -> DraftCache:
        start = before.num_cached + i * size
        chunk = jax.lax.dynamic_slice_in_dim(features, i * size, size, axis=1) if drafter.taps else None
        part = replace(after, num_cached=start)
        positions, tokens = start[:, None] + jnp.arange(size)[None], part.uncached_tokens(size)
        embeddings, rotary = target.embed_tokens(tokens), part.rotary_positions(size)
        valid = i * size + jnp.arange(size)[None] < num_gained[:, None]
        return drafter.extend(draft, ContextTokens(tokens, embeddings, chunk, positions, rotary, valid))

    chunks = (num_gained.max() + size - 1) // size
    draft = jax.lax.fori_loop(0, chunks, extend, after.draft)
    return replace(after, draft=draft)
