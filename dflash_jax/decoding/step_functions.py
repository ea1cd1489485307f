"""What the compiled programs compute: functions of both models, a decode state and small arguments.

``slots`` int [B] are the slots of the state that take part; indices past its end are padding. ``block_sizes`` int [B]
are the tokens that a round may yield for each of them. Functions that return a state return it first.
"""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding import batch_init, prefix_snapshot, speculative
from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk, prefill_chunk, score_chunk
from dflash_jax.decoding.prefix_snapshot import Segment, Snapshot
from dflash_jax.decoding.sampling import Logprobs, add_noise, process_logits
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings, put_slots, take_slots
from dflash_jax.models.cache import Record
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting, extended_contexts, proposing
from dflash_jax.parallel.sharding import DATA

T = TypeVar("T")

# New tokens of a sequence that a dispatch of several rounds reports at most; a single round may report a whole block.
REPORT_SIZE = 256

# Logits [B, T, V], features [B, T, taps, H] or None, and the record of `speculative.verify`.
Verified = tuple[Float[Array, "B T V"], Float[Array, "B T taps H"] | None, Record]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """What a dispatch did, small enough to read back every time.

    Attributes:
        tokens: New tokens, int32 [B, C]. The last may be a code of `sampling`, NOT_FINITE or NOTHING_ALLOWED.
        count: Number of new tokens, int32 [B].
        yielded: Tokens that each round yielded, int32 [B, C].
        rounds: Number of rounds that yielded tokens, int32 [B].
        done: Whether the sequence has ended, bool [B].
        logprobs: `Logprobs` [B, C] of the new tokens, or None.
    """

    tokens: Int[Array, "B C"]
    count: Int[Array, " B"]
    yielded: Int[Array, "B C"]
    rounds: Int[Array, " B"]
    done: Bool[Array, " B"]
    logprobs: Logprobs | None


def report(before: DecodeState, after: DecodeState, size: int) -> Report:
    """The difference between two states.

    Args:
        before: The state before a dispatch.
        after: The state after it.
        size: C, the new tokens of a sequence at most (static).

    Returns:
        The report.
    """

    def places(start: Int[Array, " B"]) -> Int[Array, "B C"]:
        return jnp.minimum(start[:, None] + jnp.arange(size), after.tokens.shape[1] - 1)

    def since(buffer: Int[Array, "B L"], start: Int[Array, " B"]) -> Int[Array, "B C"]:
        return jnp.take_along_axis(buffer, places(start), axis=1)

    slots = jnp.arange(len(after.length)) if after.slots is None else after.slots
    kept = 1 if after.logprobs is None else after.logprobs.chosen.shape[1]
    return Report(
        since(after.tokens, before.length),
        after.length - before.length,
        since(after.yielded, before.rounds),
        after.rounds - before.rounds,
        after.done,
        jax.tree.map(lambda x: x[slots[:, None], places(before.length) % kept], after.logprobs),
    )


def gather_batch(tree: T) -> T:
    """The sequences of all data shards, on every device, so that any host can read them."""
    if jax.lax.axis_size(DATA) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.all_gather(x, DATA, tiled=True), tree)


def _take(
    target: Decoder, state: DecodeState, slots: Int[Array, " B"], block_sizes: Int[Array, " B"], size: int = 1
) -> DecodeState:
    """`take_slots` with the block sizes of a dispatch."""
    return replace(take_slots(target.backend, state, slots, size), block_sizes=block_sizes)


def _put(state: DecodeState, part: DecodeState, slots: Int[Array, " B"]) -> DecodeState:
    """`put_slots` with the block sizes of the whole state."""
    return put_slots(state, replace(part, block_sizes=state.block_sizes[slots]))


def prefill(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    n: Int[Array, " B"],
    media: MediaChunk | None = None,
    *,
    size: int,
    drafting: bool = True,
) -> tuple[DecodeState, Int[Array, " B"]]:
    """`prefill_chunk` of some slots.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The whole state.
        slots: Its slots that take part.
        n: Tokens at most, int [B].
        media: Images and videos of the chunk.
        size: Tokens of the pass.
        drafting: Whether the drafter's cache gets the tokens too.

    Returns:
        The state, and the slots' ``num_cached``, int [B].
    """
    drafter = drafter if drafting else None
    part = prefill_chunk(target, drafter, take_slots(target.backend, state, slots), size, n, media)
    return put_slots(state, part), gather_batch(part.num_cached)


def score(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    n: Int[Array, " B"],
    media: MediaChunk | None = None,
    *,
    size: int,
    top: int,
) -> tuple[DecodeState, Logprobs]:
    """`score_chunk` of some slots.

    Args:
        target: The target.
        drafter: Not used.
        state: The whole state.
        slots: Its slots that take part.
        n: Tokens at most, int [B].
        media: Images and videos of the chunk.
        size: Tokens of the pass.
        top: Most likely tokens at each position.

    Returns:
        The state, and `Logprobs` [B, size].
    """
    part, logprobs = score_chunk(target, take_slots(target.backend, state, slots), size, n, top, media)
    return put_slots(state, part), gather_batch(logprobs)


def decode(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    rounds: Int[Array, ""],
    *,
    settings: Settings,
) -> tuple[DecodeState, Report]:
    """`speculative.decode` of some slots.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The whole state.
        slots: Its slots that take part.
        block_sizes: Tokens that a round may yield, int [B].
        rounds: Rounds at most.
        settings: What is compiled in.

    Returns:
        The state, and a report.
    """
    drafter = proposing(drafter, settings.drafter, settings.is_alone)
    before = _take(target, state, slots, block_sizes, settings.block_size)
    after = speculative.decode(target, drafter, before, rounds, REPORT_SIZE, settings)
    result = report(before, after, max(REPORT_SIZE, settings.block_size))
    return _put(state, after, slots), gather_batch(result)


def propose(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    *,
    settings: Settings,
) -> Int[Array, "B T"]:
    """`speculative.next_block` of some slots, int [B, T]. Arguments as in `decode`."""
    drafter = proposing(drafter, settings.drafter)
    part = _take(target, state, slots, block_sizes)
    return gather_batch(speculative.next_block(target, drafter, part, settings))


def verify(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    block: Int[Array, "B T"],
    *,
    drafting: bool = True,
) -> Verified:
    """`speculative.verify` of some slots.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The whole state.
        slots: Its slots that take part.
        block_sizes: Tokens that the round may yield, int [B].
        block: What is verified, int [B, T].
        drafting: Whether the drafter's cache will get the tokens too. Which of several drafters proposes does not
            matter.

    Returns:
        What `finish` takes.
    """
    part = _take(target, state, slots, block_sizes)
    return speculative.verify(target, part, block, drafter.taps if drafting and drafter is not None else ())


def finish(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    block: Int[Array, "B T"],
    mask: UInt32[Array, "B T words"] | None,
    verified: Verified,
    *,
    aligned: bool = False,
    drafting: bool = True,
) -> tuple[DecodeState, Report]:
    """The second half of a round, after `verify`: decides and commits.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The whole state.
        slots: Its slots that take part.
        block_sizes: Tokens that the round may yield, int [B].
        block: What was verified, int [B, T].
        mask: Allowed tokens, as in `speculative.decide`.
        verified: What `verify` returned.
        aligned: As in `Settings`.
        drafting: As in `verify`.

    Returns:
        The state, and a report.
    """
    before, (logits, features, record) = _take(target, state, slots, block_sizes), verified
    decided = speculative.decide(before, block, logits, mask)
    drafter = drafter if drafting else None
    after = speculative.commit(target, drafter, before, decided, block, features, record, aligned)
    after = after.restart_draft_contexts(before, extended_contexts(drafter))
    result = report(before, after, block.shape[1])
    return _put(state, after, slots), gather_batch(result)


def next_token_scores(
    target: Decoder, drafter: Drafting | None, state: DecodeState
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """Scores of the token after the last known one, for comparisons.

    Args:
        target: The target.
        drafter: Not used.
        state: The whole state.

    Returns:
        Raw logits, and the processed logits with noise whose largest is drawn, float32 [B, V] each.
    """
    settings = replace(PLAIN_SETTINGS, block_size=1)
    raw, _, _ = speculative.verify(target, state, speculative.next_block(target, None, state, settings))
    scores = add_noise(process_logits(raw, state.sampling), state.sampling, state.length[:, None])
    return gather_batch((target.vocab.gather(raw[:, 0], -1), target.vocab.gather(scores[:, 0], -1)))


def admit(
    target: Decoder, drafter: Drafting | None, state: DecodeState, slots: Int[Array, "1"], admission: Admission
) -> tuple[DecodeState, tuple[()]]:
    """`batch_init.admit`; the result is ()."""
    return batch_init.admit(target, state, slots, admission), ()


def set_tables(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    table: Int[Array, "slots n"],
    windowed: Int[Array, "slots n"],
) -> tuple[DecodeState, tuple[()]]:
    """`prefix_snapshot.set_tables`; the result is ()."""
    return prefix_snapshot.set_tables(state, table, windowed), ()


def save(
    target: Decoder, drafter: Drafting | None, state: DecodeState, pages: Int[Array, " m"], *, is_windowed: bool
) -> Segment:
    """`prefix_snapshot.save`."""
    return prefix_snapshot.save(state, pages, is_windowed)


def load(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    pages: Int[Array, " m"],
    segment: Segment,
    *,
    is_windowed: bool,
) -> tuple[DecodeState, tuple[()]]:
    """`prefix_snapshot.load`; the result is ()."""
    return prefix_snapshot.load(state, pages, segment, is_windowed), ()


def snapshot(target: Decoder, drafter: Drafting | None, state: DecodeState, slots: Int[Array, "1"]) -> Snapshot:
    """`prefix_snapshot.snapshot`."""
    return prefix_snapshot.snapshot(state, slots)


def restore(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, "1"],
    length: Int[Array, ""],
    snapshot: Snapshot,
) -> tuple[DecodeState, tuple[()]]:
    """`prefix_snapshot.restore`; the result is ()."""
    return prefix_snapshot.restore(state, slots, length, snapshot), ()
