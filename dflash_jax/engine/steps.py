"""The steps: what compiled programs compute, each a function of both models, a decode state and small arguments.

``slots`` int32 [B] are the slots of the state that take part, on a mesh those of each data shard in turn, numbered
within the shard; indices past a shard's last slot are padding. ``block_sizes`` int32 [B] are the tokens that a round
may yield for each of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from dflash_jax.decoding import batch_init, prefix_snapshot, speculative
from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.prefill import MediaChunk, prefill_chunk, score_chunk
from dflash_jax.decoding.sampling import Logprobs, add_noise, process_logits
from dflash_jax.decoding.state import PLAIN_SETTINGS, DecodeState, Settings, put_slots, state_specs, take_slots
from dflash_jax.models.cache import Record
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting, extended_contexts, proposing
from dflash_jax.parallel.sharding import DATA

T = TypeVar("T")
Pair = tuple[Decoder, Drafting | None]
# PartitionSpecs of an argument or a result, or ``specs(pair, PartitionSpecs of the state, static arguments)``.
Specs = PartitionSpec | Callable[[Pair, DecodeState, dict[str, Any]], Any]

BATCH, REPLICATED = PartitionSpec(DATA), PartitionSpec()
# New tokens of a sequence that a dispatch of several rounds reports at most; a single round may report a whole block.
REPORT_SIZE = 256

# Logits [B, T, V], features [B, T, taps, H] or None, and the record of `speculative.verify`.
Verified = tuple[Float[Array, "B T V"], Float[Array, "B T taps H"] | None, Record]


@dataclass(frozen=True, eq=False)
class Step:
    """A function that is compiled for the mesh.

    Attributes:
        name: Identifies it among the steps of an engine.
        function: ``function(target, drafter, state, *args, **static)``; every device gets its parts of the arrays.
        args: Specs of each argument.
        result: Specs of the result.
        changes: Whether the function returns (state, result). The state that it gets is donated then: its buffers must
            not be used afterwards. Otherwise it returns the result alone.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Specs, ...]
    result: Specs = REPLICATED
    changes: bool = True


def step(*args: Specs, result: Specs = REPLICATED, changes: bool = True) -> Callable[[Callable[..., Any]], Step]:
    """Makes a `Step` of a function; arguments as its attributes."""
    return lambda function: Step(function.__name__, function, args, result, changes)


def state_step(function: Callable[..., Any], *args: Specs, result: Specs | None = None) -> Step:
    """A `Step` of a function of the state alone, which returns the state, or what ``result`` has the specs of."""

    def run(target: Decoder, drafter: Drafting | None, state: DecodeState, *values: Any, **static: Any) -> Any:
        returned = function(state, *values, **static)
        return (returned, ()) if result is None else returned

    changes = result is None
    return Step(function.__name__, run, args, REPLICATED if result is None else result, changes)


class Programs(ABC):
    """The programs of one pair of models: `Executables` runs them, `AheadOfTime` only compiles them.

    Args:
        target: The model that verifies.
        drafter: The model that drafts, or None.

    Attributes:
        pair: (target, drafter).
        compile_s: Seconds of all compilations.
        last_compile_s: Seconds of the last one.
    """

    def __init__(self, target: Decoder, drafter: Drafting | None):
        self.pair: Pair = (target, drafter)
        self.compile_s = self.last_compile_s = 0.0

    @abstractmethod
    def run(self, step: Step, state: DecodeState, *args: Any, **static: Any) -> Any:
        """Runs a step.

        Args:
            step: The step.
            state: The decoding state.
            *args: Arrays, or trees of arrays. The program is compiled for their shapes.
            **static: What is compiled in.

        Returns:
            What the step's function returns.
        """

    @abstractmethod
    def empty(self, slots: int, capacity: int, settings: Settings, pages: tuple[int, int] | None = None) -> DecodeState:
        """An `empty_state` of ``slots`` slots with ``capacity`` positions each, on the mesh."""

    @abstractmethod
    def read(self, x: jax.Array) -> np.ndarray:
        """``x`` on the host."""

    @property
    def config(self):
        """The target's `ModelConfig`."""
        return self.pair[0].config

    @property
    def data(self) -> int:
        """Shards of the mesh's data axis."""
        return self.pair[0].layout.data

    def state_specs(self, state: DecodeState) -> DecodeState:
        """PartitionSpecs of a state's arrays."""
        return state_specs(*self.pair, state)

    def specs(self, step: Step, state: DecodeState, static: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """PartitionSpecs of a step's arguments and of its result, as prefixes of their trees."""

        def of(specs: Specs) -> Any:
            return specs if isinstance(specs, PartitionSpec) else specs(self.pair, self.state_specs(state), static)

        return tuple(of(specs) for specs in step.args), of(step.result)


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
        verified: As in `DecodeState`, for each round, int32 [B, C].
        outcomes: As `decode_by_widths` returns them, of each data shard, int32 [shards, 2, lengths, drafts, bins];
            or None.
    """

    tokens: Int[Array, "B C"]
    count: Int[Array, " B"]
    yielded: Int[Array, "B C"]
    rounds: Int[Array, " B"]
    done: Bool[Array, " B"]
    logprobs: Logprobs | None
    verified: Int[Array, "B C"]
    outcomes: Int[Array, "shards 2 lengths drafts bins"] | None = None


def report(
    before: DecodeState, after: DecodeState, size: int, outcomes: Int[Array, "2 lengths drafts bins"] | None = None
) -> Report:
    """What dispatches did between two states, with at most ``size`` new tokens of a sequence (C, static)."""

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
        since(after.verified, before.rounds),
        None if outcomes is None else outcomes[None],
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


@step(BATCH, BATCH, BATCH)
def prefill(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    n: Int[Array, " B"],
    media: MediaChunk | None,
    *,
    size: int,
    drafting: bool,
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Runs a chunk of the slots' prompts: the state, and int32 [B] the tokens that are in their caches then.

    ``n`` int32 [B] are the tokens of each slot's chunk, at most ``size``; ``drafting`` says whether the drafter's
    caches get them, too.
    """
    drafter = drafter if drafting else None
    part = prefill_chunk(target, drafter, take_slots(target.backend, state, slots), size, n, media)
    return put_slots(state, part), gather_batch(part.num_cached)


@step(BATCH, BATCH, BATCH)
def score(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    n: Int[Array, " B"],
    media: MediaChunk | None,
    *,
    size: int,
    top: int,
) -> tuple[DecodeState, Logprobs]:
    """`prefill` of the target alone: the state, and `Logprobs` [B, size] of the token after each one.

    They have the ``top`` likeliest tokens, too.
    """
    part, logprobs = score_chunk(target, take_slots(target.backend, state, slots), size, n, top, media)
    return put_slots(state, part), gather_batch(logprobs)


@step(BATCH, BATCH, REPLICATED, REPLICATED, BATCH)
def decode(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    rounds: Int[Array, ""],
    rates: Float[Array, "lengths drafts bins"] | None = None,
    prices: Float[Array, " B"] | None = None,
    *,
    settings: Settings,
) -> tuple[DecodeState, Report]:
    """Runs up to ``rounds`` rounds of `speculative.decode_by_widths`, with its arguments: the state, and a report."""
    drafter = proposing(drafter, settings.drafter, settings.is_alone)
    before = _take(target, state, slots, block_sizes, settings.block_size)
    after, outcomes = speculative.decode_by_widths(
        target, drafter, before, rounds, REPORT_SIZE, settings, rates, prices
    )
    result = report(before, after, max(REPORT_SIZE, settings.block_size), outcomes)
    return _put(state, after, slots), gather_batch(result)


@step(BATCH, BATCH, changes=False)
def propose(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    *,
    settings: Settings,
) -> Int[Array, "B T"]:
    """First part of a round with masks: int32 [B, T], the last known token and the drafts after it."""
    drafter = proposing(drafter, settings.drafter)
    part = _take(target, state, slots, block_sizes)
    return gather_batch(speculative.next_block(target, drafter, part, settings))


def _verified_specs(pair: Pair, state: DecodeState, static: dict[str, Any]) -> Any:
    target, drafter = pair
    return speculative.verified_specs(target, drafter if static["drafting"] else None)


@step(BATCH, BATCH, BATCH, result=_verified_specs, changes=False)
def verify(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    block: Int[Array, "B T"],
    *,
    drafting: bool,
) -> Verified:
    """Second part of a round with masks: the target's pass over ``block`` int32 [B, T], as `finish` takes it.

    ``drafting`` says whether the drafter's caches will get the tokens, too. Which of several drafters proposes does not
    matter: there is one program for all.
    """
    part = _take(target, state, slots, block_sizes)
    return speculative.verify(target, part, block, drafter.taps if drafting and drafter is not None else ())


@step(BATCH, BATCH, BATCH, BATCH, _verified_specs)
def finish(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    slots: Int[Array, " B"],
    block_sizes: Int[Array, " B"],
    block: Int[Array, "B T"],
    mask: UInt32[Array, "B T words"],
    verified: Verified,
    *,
    aligned: bool,
    drafting: bool,
) -> tuple[DecodeState, Report]:
    """Third part of a round with masks: draws tokens and commits them. Returns the state, and a report.

    ``mask`` are packed bits of the allowed tokens, uint32 [B, T, ceil(V / 32)]; ``aligned`` is as in `Settings`;
    ``block``, ``drafting`` and ``verified`` are as in `verify`, and what it returned.
    """
    before, (logits, features, record) = _take(target, state, slots, block_sizes), verified
    decided = speculative.decide(before, block, logits, mask)
    drafter = drafter if drafting else None
    after = speculative.commit(target, drafter, before, decided, block, features, record, aligned)
    after = after.restart_draft_contexts(before, extended_contexts(drafter))
    result = report(before, after, block.shape[1])
    return _put(state, after, slots), gather_batch(result)


@step(changes=False)
def next_token_scores(
    target: Decoder, drafter: Drafting | None, state: DecodeState
) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
    """For the token after each slot's last: raw logits, and the values whose maximum is drawn, float32 [B, V] each."""
    settings = replace(PLAIN_SETTINGS, block_size=1)
    raw, _, _ = speculative.verify(target, state, speculative.next_block(target, None, state, settings))
    scores = add_noise(process_logits(raw, state.sampling), state.sampling, state.length[:, None])
    return gather_batch((target.vocab.gather(raw[:, 0], -1), target.vocab.gather(scores[:, 0], -1)))


@step(BATCH, REPLICATED)
def admit(
    target: Decoder, drafter: Drafting | None, state: DecodeState, slots: Int[Array, "1"], admission: Admission
) -> tuple[DecodeState, tuple[()]]:
    """`batch_init.admit`; the result is ()."""
    return batch_init.admit(target, state, slots, admission), ()


def _segment_specs(pair: Pair, state: DecodeState, static: dict[str, Any]) -> Any:
    return prefix_snapshot.segment_specs(state, static["is_windowed"])


def _snapshot_specs(pair: Pair, state: DecodeState, static: dict[str, Any]) -> Any:
    return prefix_snapshot.snapshot_specs(state)


set_tables = state_step(prefix_snapshot.set_tables, BATCH, BATCH)
save = state_step(prefix_snapshot.save, BATCH, result=_segment_specs)
load = state_step(prefix_snapshot.load, BATCH, _segment_specs)
snapshot = state_step(prefix_snapshot.snapshot, BATCH, result=_snapshot_specs)
restore = state_step(prefix_snapshot.restore, BATCH, REPLICATED, _snapshot_specs)
