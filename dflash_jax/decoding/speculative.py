"""The speculative loop: propose → verify → decide → commit, pure functions over one frozen state, inside one
while_loop.

Every function takes modules and a `DecodeState` and runs under the caller's own ``jax.jit``. Plain decoding is the
same loop with a block of one and no drafter.

The window. A round feeds the target a window of W tokens from position ``base`` on: the tokens known there (normally
one, the last), then drafts. Everything before ``base`` is in the caches.

Aligned windows (``Settings.aligned``, the reproducible mode). Then ``base`` moves in whole windows only: tokens
verified since are fed again, in the same place of the same window, until it is full. What the target computes for a
position then depends on the tokens before it alone, not on how many drafts were accepted along the way, so that the
same bits come out with any drafter and with none.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from dflash_jax.decoding.sampling import PLAIN, Logprobs, draw, logprobs, special_rows
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafting, DraftWindow, TargetHeads
from dflash_jax.parallel.sharding import DATA, spec

# Plain rounds between two extensions of the drafter's context.
PLAIN_ROUNDS = 32
# Positions that it is then extended by at a time.
EXTENSION = 4


def verified_specs(target: Decoder, drafter: Drafting | None) -> tuple:
    """PartitionSpecs in the shape of what `verify` returns."""
    return spec(DATA, None, target.vocab), None if drafter is None else spec(DATA), target.record_specs()


def _rows(state: DecodeState):
    return jnp.arange(state.tokens.shape[0])[:, None]


def _window(state: DecodeState, size: int):
    """int [B, size]: the token buffer from base on; past its end, whatever."""
    places = jnp.minimum(state.base[:, None] + jnp.arange(size), state.tokens.shape[1] - 1)
    return jnp.take_along_axis(state.tokens, places, axis=1)


def _rotary(state: DecodeState, size: int):
    """int [B, size]: rotary positions of the window."""
    return (state.base + state.rope_delta)[:, None] + jnp.arange(size)[None]


def prefill_chunk(target: Decoder, drafter: Drafting | None, state: DecodeState, size: int, n=None) -> DecodeState:
    """Feeds the next ``size`` (static) prompt tokens of every row that has some left, or n [B] ≤ size of them; never
    the last one. Without a drafter its context begins behind them."""
    left = jnp.maximum(state.prompt_length - 1 - state.base, 0)
    n = jnp.minimum(left, size if n is None else n)
    tokens = _window(state, size)
    taps = drafter.taps if drafter is not None else ()
    _, features, caches = target.extend(tokens, state.target, state.base, n, taps, _rotary(state, size))
    draft = state.draft
    if drafter is not None:
        steps = jnp.arange(size)[None]
        draft = drafter.extend(draft, features, tokens, state.base[:, None] + steps, steps < n[:, None])
    state = replace(state, target=caches, draft=draft, base=state.base + n)
    return state if drafter is not None else _without_draft(state, n > 0)


def score_chunk(target: Decoder, state: DecodeState, size: int, n, top: int):
    """`prefill_chunk` without a drafter, and raw `Logprobs` [B, size] of the tokens behind those that it feeds."""
    n = jnp.minimum(jnp.maximum(state.prompt_length - 1 - state.base, 0), n)
    hidden, _, caches = target.extend(_window(state, size), state.target, state.base, n, (), _rotary(state, size))
    logits, following = target.logits(hidden), _window(replace(state, base=state.base + 1), size)
    own = state.sampling
    raw = replace(own, processed_logprobs=jnp.zeros_like(own.processed_logprobs))
    found = logprobs(logits, logits, following, raw, top)
    return _without_draft(replace(state, target=caches, base=state.base + n), n > 0), found


def _without_draft(state: DecodeState, moved) -> DecodeState:
    """The drafter knows nothing of what rows that ``moved`` have behind them."""
    return replace(state, draft_start=jnp.where(moved, state.base, state.draft_start))


def _append(state: DecodeState, samples, first, offered, found: Logprobs | None) -> DecodeState:
    """Appends samples[first : first + offered] of each row, up to a stop, the limit, or a sample that is no token
    (`sampling.checked`); updates counts, logprobs and ``done``.

    samples [B, W] and what was ``found`` of them; first, offered [B]. Leaves caches, base, rounds and accepted alone.
    """
    width = samples.shape[1]
    order = jnp.arange(width)[None] - first[:, None]
    offered = jnp.minimum(offered, state.limit - state.length)
    inside = (order >= 0) & (order < offered[:, None])
    stop = inside & ((samples[..., None] == state.stops[:, None]).any(-1) | (samples < 0))
    # Everything up to and with the first stop.
    taken = inside & (jnp.cumsum(stop, axis=1) - stop == 0)
    count = taken.sum(1)
    places = jnp.where(taken, state.length[:, None] + order, state.tokens.shape[1])
    rows = _rows(state)
    length = state.length + count
    record = state.logprobs
    if record is not None:
        held = rows if state.rows is None else state.rows[:, None]
        record = jax.tree.map(lambda old, x: old.at[held, places].set(x, mode="drop"), record, found)
    return replace(
        state,
        tokens=state.tokens.at[rows, places].set(samples, mode="drop"),
        length=length,
        done=state.done | (stop & taken).any(1) | (length >= state.limit),
        sampling=state.sampling.counting(samples, taken),
        logprobs=record,
    )


def _special(state: DecodeState, special):
    """int [B]: `special_rows` of the live rows; worked out where None is given."""
    return jnp.where(state.done, PLAIN, special_rows(state.sampling) if special is None else special)


def propose(target: Decoder, drafter: Drafting, state: DecodeState, settings: Settings, special=None):
    """The window int [B, W] with drafts behind the known tokens. ``special``, here and below: `special_rows`, where it
    is known already."""
    size = settings.window
    known = state.length - state.base
    special = _special(state, special)

    def draws(logits, positions, ids=None):
        # Whatever a drafter's logits are, it drafts a token.
        return jnp.maximum(draw(logits, state.sampling, positions, special, ids=ids)[0], 0)

    start = jnp.where(state.done, 0, state.length - 1)
    last = jnp.take_along_axis(state.tokens, start[:, None], axis=1)[:, 0]
    borrowed = TargetHeads(target.embed_tokens, target.logits, draws)
    seen = DraftWindow(state.draft_window, state.draft_sinks, state.draft_start)
    proposal = drafter.propose(state.draft, last, start, state.width, size, borrowed, seen)
    # The first draft follows the last known token: place `known` of the window.
    places = jnp.arange(size)[None] - known[:, None]
    drafts = jnp.take_along_axis(proposal.tokens, jnp.clip(places, 0, size - 2), axis=1)
    return jnp.where(places < 0, _window(state, size), drafts)


def window_of(target: Decoder, drafter: Drafting | None, state: DecodeState, settings: Settings, special=None):
    """What a round feeds the target, int [B, W]: drafts where there is room for them and someone to make them."""
    if drafter is not None and settings.window > 1:
        return propose(target, drafter, state, settings, special)
    return _window(state, settings.window)


def verify(target: Decoder, state: DecodeState, block, taps: tuple[int, ...] = ()):
    """One pass over the window: (logits float32 [B, W, V], features, record). Rows that are done take no part."""
    n = jnp.where(state.done, 0, jnp.minimum(state.length - state.base + state.width - 1, block.shape[1]))
    hidden, features, record = target.verify(block, state.target, state.base, n, taps, _rotary(state, block.shape[1]))
    return target.logits(hidden), features, record


def decide(state: DecodeState, block, logits, mask=None, special=None) -> DecodeState:
    """Draws at every place of the window, accepts drafts while they equal the draws, and appends them with the draw
    behind."""
    size = block.shape[1]
    known = state.length - state.base
    positions = state.base[:, None] + 1 + jnp.arange(size)[None]
    special, wanted, top = _special(state, special), None, 0
    if state.logprobs is not None:
        wanted, top = state.sampling.wants_logprobs & ~state.done, state.logprobs.ids.shape[-1]
    samples, found = draw(logits, state.sampling, positions, special, block, known, mask, wanted, top)
    place = jnp.arange(size)[None]
    is_draft = (place >= known[:, None]) & (place < (known + state.width - 1)[:, None])
    agrees = jnp.concatenate([jnp.ones_like(known)[:, None] > 0, samples[:, :-1] == block[:, 1:]], axis=1)
    # Known tokens count as agreeing, so that the run of agreement ends at the first wrong draft.
    run = jnp.cumprod((agrees & is_draft) | (place < known[:, None]), axis=1).sum(1)
    offered = jnp.where(state.done, 0, run - known + 1)
    after = _append(state, samples, known - 1, offered, found)
    yielded = after.length - state.length
    slot = jnp.where(yielded > 0, state.rounds, state.accepted.shape[1])
    return replace(
        after,
        accepted=state.accepted.at[jnp.arange(len(slot)), slot].set(yielded, mode="drop"),
        rounds=state.rounds + (yielded > 0),
    )


def commit(
    target: Decoder,
    drafter: Drafting | None,
    before: DecodeState,
    after: DecodeState,
    block,
    features,
    record,
    settings,
):
    """Writes what was accepted between ``before`` and ``after`` into the caches."""
    size = block.shape[1]
    yielded = after.length - before.length
    n = jnp.where(after.length - before.base > size, size, 0) if settings.aligned else yielded
    caches = target.commit(before.target, record, before.base, n)
    draft = before.draft
    if drafter is not None:
        steps = jnp.arange(size)[None]
        keep = (steps < (after.length - 1 - before.base)[:, None]) & (yielded > 0)[:, None]
        draft = drafter.extend(draft, features, block, before.base[:, None] + steps, keep)
    after = replace(after, target=caches, draft=draft, base=before.base + n)
    return after if drafter is not None else _without_draft(after, n > 0)


def decode_round(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    settings: Settings = PLAIN_SETTINGS,
    mask=None,
    special=None,
):
    """One round: every live row gains 1 to ``width`` tokens. ``mask`` as in `sampling.process`, [B, W, ceil(V /
    32)]."""
    block = window_of(target, drafter, state, settings, special)
    logits, features, record = verify(target, state, block, drafter.taps if drafter is not None else ())
    after = decide(state, block, logits, mask, special)
    return commit(target, drafter, state, after, block, features, record, settings)


def decode(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    rounds,
    new_tokens=None,
    settings: Settings = PLAIN_SETTINGS,
) -> DecodeState:
    """Rounds on the device until every row is done, ``rounds`` have run, or a row has gained about ``new_tokens``.

    ``rounds`` and ``new_tokens`` are runtime data; with ``new_tokens`` no row gains more than that, but for the first
    round, which may be wider.
    """
    taps = drafter.taps if drafter is not None else ()
    # Plain rounds leave the drafter's context to one extension at the end: it would cost each of them its own products.
    later = drafter is not None and settings.window == 1
    held = None
    if later:
        rounds = jnp.minimum(rounds, PLAIN_ROUNDS)
        held = jnp.zeros((len(state.length), PLAIN_ROUNDS, len(taps), target.config.hidden_size), target.dtype)
    before, special = state, special_rows(state.sampling)

    def more(carry):
        i, state, _ = carry
        gained = (state.length - before.length).max()
        room = True if new_tokens is None else gained + settings.window <= new_tokens
        return (i < rounds) & ~state.done.all() & (room | (i == 0))

    def body(carry):
        i, state, held = carry
        if not later:
            return i + 1, decode_round(target, drafter, state, settings, None, special), held
        block = _window(state, 1)
        logits, features, record = verify(target, state, block, taps)
        after = decide(state, block, logits, None, special)
        held = jax.lax.dynamic_update_slice_in_dim(held, features.astype(held.dtype), i, axis=1)
        return i + 1, commit(target, None, state, after, block, features, record, settings), held

    _, state, held = jax.lax.while_loop(more, body, (jnp.int32(0), state, held))
    if not later:
        return state

    def extend(i, draft):
        base, size = before.base + i * EXTENSION, EXTENSION
        features = jax.lax.dynamic_slice_in_dim(held, i * size, size, axis=1)
        positions, tokens = base[:, None] + jnp.arange(size)[None], _window(replace(state, base=base), size)
        return drafter.extend(draft, features, tokens, positions, positions < state.base[:, None])

    gained = (state.base - before.base).max()
    state = replace(state, draft_start=before.draft_start)
    return replace(state, draft=jax.lax.fori_loop(0, (gained + EXTENSION - 1) // EXTENSION, extend, state.draft))
