"""The state of a batch between rounds: `DecodeState`, its compile-time settings, and access to some of its slots.

Dimension letters: B sequences of the batch, L token positions of the buffer, T tokens of this call, V vocabulary.
"""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from dflash_jax.decoding.sampling import Logprobs
from dflash_jax.decoding.sampling_state import TABLES, SamplingState
from dflash_jax.models.cache import Cache, init_cache
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import NO_WINDOW, DraftCache, Drafting, DraftWindow, num_drafters
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import DeltaState, KVCache
from dflash_jax.ops.empty_cache import unwritten
from dflash_jax.ops.gated_delta import works_in_place
from dflash_jax.parallel.sharding import DATA, spec
from dflash_jax.sampling_params import MAX_STOPS


@dataclass(frozen=True)
class Settings:
    """What is compiled into a decoding step.

    Attributes:
        block_size: Tokens of each sequence that a round feeds the target: known tokens, then drafts.
        aligned: Whether blocks start at multiples of ``block_size`` (the reproducible mode; see `speculative`).
        top_logprobs: Most likely tokens whose log-probabilities are recorded at each position; -1 records none at all.
        draft_window: The part of the context that the drafter sees.
        drafter: Which drafter proposes, of several; None leaves all of them and their caches out.
        is_alone: Whether the caches of the other drafters are left out.
        has_widths: Whether drafts that are not worth their verification are not verified (see `decoding.widths`).
    """

    block_size: int = 16
    aligned: bool = False
    top_logprobs: int = -1
    draft_window: DraftWindow = NO_WINDOW
    drafter: int | None = 0
    is_alone: bool = False
    has_widths: bool = False


PLAIN_SETTINGS = Settings()
# Larger than any position.
NO_BOUND = 2**30
# Positions of a sequence whose log-probabilities are kept (R). A dispatch yields no more tokens: REPORT_SIZE, or the
# largest block that a checkpoint may have.
RECORDED = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """A batch of B sequences. Integers are int32.

    The last prompt token is the first one that a round feeds the target: prefill leaves it out.

    A state may stand for some slots of a larger one (`take_slots`). Caches, sampling tables and log-probabilities are
    then those of the larger state, except recurrent states that were copied.

    Attributes:
        tokens: Token ids, [B, L].
        length: Known tokens, [B].
        num_cached: Tokens in the target's caches, [B].
        prompt_length: Known tokens when the sequence began, [B].
        limit: Length at which the sequence ends, [B].
        rope_delta: Rotary position minus cache position of tokens that follow an image, [B].
        done: Whether the sequence has ended, or the slot is idle, bool [B].
        block_sizes: Tokens that a round may yield, at most ``Settings.block_size``, [B]; 1 is plain decoding.
        stops: Stop token ids, [B, MAX_STOPS], padded with -1.
        draft_window: Number of last positions that the drafter sees, [B].
        draft_sinks: Number of first positions that it sees beside them, [B].
        draft_start: First position of the context of each drafter, [B, drafters]; one column without any. Earlier
            tokens were processed without it.
        target: Caches of the target.
        draft: Caches of the drafter; () without one.
        sampling: Sampling options and token counts.
        rounds: Rounds so far, [B].
        yielded: Tokens that each round yielded, [B, L].
        verified: Tokens that it might have yielded: the drafts that were verified and one, [B, L].
        logprobs: Log-probabilities at the last positions, [B, R], those of position p at p % R: what a dispatch adds is
            read before the next one. None where they are not recorded.
        slots: Slots of the larger state, [B]; indices past its end are padding. None: this is the larger state.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    num_cached: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    rope_delta: Int[Array, " B"]
    done: Bool[Array, " B"]
    block_sizes: Int[Array, " B"]
    stops: Int[Array, "B stops"]
    draft_window: Int[Array, " B"]
    draft_sinks: Int[Array, " B"]
    draft_start: Int[Array, "B drafters"]
    target: Cache
    draft: DraftCache
    sampling: SamplingState
    rounds: Int[Array, " B"]
    yielded: Int[Array, "B L"]
    verified: Int[Array, "B L"]
    logprobs: Logprobs | None = None
    slots: Int[Array, " B"] | None = None

    @property
    def num_uncached(self) -> Int[Array, " B"]:
        """Known tokens that are not in the target's caches: normally one, the last."""
        return self.length - self.num_cached

    def uncached_tokens(self, size: int) -> Int[Array, "B size"]:
        """The token buffer from ``num_cached`` on, int [B, size]; arbitrary past its end."""
        places = jnp.minimum(self.num_cached[:, None] + jnp.arange(size), self.tokens.shape[1] - 1)
        return jnp.take_along_axis(self.tokens, places, axis=1)

    def rotary_positions(self, size: int) -> Int[Array, "B size"]:
        """Rotary positions of ``size`` tokens from ``num_cached`` on, int [B, size]."""
        return (self.num_cached + self.rope_delta)[:, None] + jnp.arange(size)[None]

    def restart_draft_contexts(self, before: "DecodeState", extended: Sequence[int]) -> "DecodeState":
        """Starts contexts of drafters at ``num_cached``: those whose caches lack the tokens since ``before``.

        Args:
            before: An earlier state of the same sequences.
            extended: The drafters whose caches have these tokens.

        Returns:
            The state. A context starts where it did if its sequence has no such tokens.
        """
        left_out = jnp.array([i not in extended for i in range(self.draft_start.shape[1])])
        lacks = (self.num_cached > before.num_cached)[:, None] & left_out
        return replace(self, draft_start=jnp.where(lacks, self.num_cached[:, None], self.draft_start))


def _pooled(cache: KVCache, shards: int, pages: tuple[int, int] | None) -> KVCache:
    """An empty cache of `empty_state`."""
    if pages is not None:
        return cache.with_pool(pages[cache.window is not None], shards)
    # Each data shard numbers its own pages.
    return replace(cache, table=cache.table % (len(cache.k) // shards))


def is_kv_cache(x: Any) -> TypeGuard[KVCache]:
    """Whether ``x`` is a `KVCache`."""
    return isinstance(x, KVCache)


def map_caches(function: Callable[[KVCache], Any], tree: Any) -> Any:
    """``tree`` with ``function(cache)`` in place of each `KVCache`."""
    return jax.tree.map(lambda x: function(x) if is_kv_cache(x) else x, tree, is_leaf=is_kv_cache)


def num_pages(state: DecodeState) -> tuple[int, int]:
    """Pages of all data shards in ``state``, arrays or shapes: of caches that keep all positions, and with a window."""
    counts = {False: 0, True: 0}
    for cache in jax.tree.leaves((state.target, state.draft), is_leaf=is_kv_cache):
        if is_kv_cache(cache):
            counts[cache.window is not None] = cache.k.shape[0]
    return counts[False], counts[True]


def empty_state(
    target: Decoder,
    drafter: Drafting | None,
    slots: int,
    capacity: int,
    settings: Settings = PLAIN_SETTINGS,
    pages: tuple[int, int] | None = None,
) -> DecodeState:
    """A state of idle slots.

    Args:
        target: The target.
        drafter: The drafter; None decodes without one.
        slots: B.
        capacity: L, positions of each slot.
        settings: Its ``draft_window`` and ``top_logprobs`` determine shapes.
        pages: Pages of a data shard, in caches that keep all positions and in those with a window. Then no slot has a
            page, until `prefix_snapshot.set_tables`. None: each slot has all that it can need.

    Returns:
        The state. Every leaf is a separate array, so that the state may be donated.
    """
    dtype, vocab, top = target.dtype, target.config.vocab_size, settings.top_logprobs
    names = ("length", "num_cached", "prompt_length", "limit", "rope_delta", "rounds")
    zeros = {name: jnp.zeros((slots,), jnp.int32) for name in names}
    window = settings.draft_window
    caches = (
        init_cache(target.config, slots, capacity, dtype, target.layout, target.kv_dtype),
        drafter.init_cache(slots, capacity, dtype, window) if drafter is not None else (),
    )
    caches = map_caches(lambda cache: _pooled(cache, target.layout.data, pages), caches)
    # A call of a kernel is not divided over devices.
    target_caches, draft_caches = unwritten(target.backend, caches) if target.layout.devices == 1 else caches
    return DecodeState(
        **zeros,
        tokens=jnp.zeros((slots, capacity), jnp.int32),
        done=jnp.ones((slots,), bool),
        block_sizes=jnp.ones((slots,), jnp.int32),
        stops=jnp.full((slots, MAX_STOPS), -1, jnp.int32),
        draft_window=jnp.full((slots,), NO_BOUND if window.size is None else window.size, jnp.int32),
        draft_sinks=jnp.full((slots,), window.sinks, jnp.int32),
        draft_start=jnp.zeros((slots, max(1, num_drafters(drafter))), jnp.int32),
        target=target_caches,
        draft=draft_caches,
        sampling=SamplingState.greedy(slots, vocab, target.vocab, target.backend),
        yielded=jnp.zeros((slots, capacity), jnp.int32),
        verified=jnp.zeros((slots, capacity), jnp.int32),
        logprobs=Logprobs.zeros((slots, min(capacity, RECORDED)), top) if top >= 0 else None,
    )


def state_specs(target: Decoder, drafter: Drafting | None, state: DecodeState) -> DecodeState:
    """PartitionSpecs of a state.

    Args:
        target: The target.
        drafter: The drafter, or None.
        state: The state, or its shapes.

    Returns:
        ``state`` with a PartitionSpec for each array: slots over the data axis, caches as the heads of their layers,
        [B, V] as the vocabulary.
    """
    specs = jax.tree.map(lambda _: spec(DATA), state)
    tables = {name: spec(DATA, target.vocab) for name in TABLES}
    return replace(
        specs,
        target=target.cache_specs(state.target),
        draft=drafter.cache_specs(state.draft) if drafter is not None and state.draft else (),
        sampling=replace(specs.sampling, **tables),
    )


def _is_in_place(x: Any) -> TypeGuard[KVCache | DeltaState | SamplingState]:
    """Whether slots of ``x`` are read and written in place."""
    return isinstance(x, KVCache | DeltaState | SamplingState)


def take_slots(backend: Backend, state: DecodeState, slots: Int[Array, " b"], block_size: int = 1) -> DecodeState:
    """A state of some slots, over the caches of the whole state.

    Args:
        backend: Where operations run.
        state: The whole state.
        slots: Their indices. Indices past the end are padding and give idle sequences.
        block_size: Tokens of each pass of a loop over rounds; 1 for a step of one pass, which never needs the copy.
            Recurrent states are copied where no kernel takes that many tokens in place.

    Returns:
        A state of b sequences; `put_slots` writes it back.
    """
    inside = jnp.minimum(slots, state.length.shape[0] - 1)

    def take(x: Any) -> Any:
        if not _is_in_place(x):
            return x[inside]
        if isinstance(x, SamplingState):
            return x.take(slots)
        part = replace(x, rows=slots)
        return part if isinstance(part, KVCache) or works_in_place(backend, part, block_size) else part.copied()

    part = jax.tree.map(take, replace(state, logprobs=None), is_leaf=_is_in_place)
    return replace(part, logprobs=state.logprobs, slots=slots, done=part.done | (slots >= state.length.shape[0]))


def put_slots(state: DecodeState, part: DecodeState) -> DecodeState:
    """The whole state after a step on some of its slots.

    Args:
        state: The whole state before the step.
        part: What `take_slots` gave, after the step.

    Returns:
        The whole state.
    """

    def put(old: Any, new: Any) -> Any:
        if not _is_in_place(old):
            return old.at[part.slots].set(new, mode="drop")
        if isinstance(old, SamplingState):
            return old.put(new)
        if isinstance(old, DeltaState) and new.rows is None:
            # The recurrent states were copied.
            return replace(replace(old, rows=part.slots).put(new), rows=None)
        return replace(new, rows=None)

    bare = replace(state, logprobs=None), replace(part, logprobs=None, slots=None)
    after = jax.tree.map(put, *bare, is_leaf=_is_in_place)
    return replace(after, logprobs=part.logprobs)
