"""Rows under way as data: `DecodeState`, what is compiled in beside it, and rows in and out of a larger state."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from dflash_jax.decoding.sampling import TABLES, Logprobs, SamplingRows
from dflash_jax.models.cache import Cache, init_cache
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import NO_WINDOW, Drafting, DraftWindow
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import DeltaState, KVCache
from dflash_jax.ops.gated_delta import works_in_place
from dflash_jax.parallel.sharding import DATA, spec
from dflash_jax.sampling_params import MAX_STOPS


@dataclass(frozen=True)
class Settings:
    """What is compiled in. ``window``: tokens a round feeds the target; ``top_logprobs``: -1 for none; ``drafting``:
    False leaves the drafter and its context alone."""

    window: int = 16
    aligned: bool = False
    top_logprobs: int = -1
    draft_window: DraftWindow = NO_WINDOW
    drafting: bool = True


PLAIN_SETTINGS = Settings()
# Past any position.
NO_BOUND = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """B rows under way. int32 unless said otherwise.

    tokens [B, L]; length [B]: tokens known; base [B]: tokens in the target's caches; prompt_length [B]; limit [B]: the
    length at which the row ends; rope_delta [B]: rotary position minus cache position, of what follows an image; done
    bool [B]; width [B]: tokens a round may yield (1: plain decoding); stops [B,
    MAX_STOPS], padded with -1; draft_window, draft_sinks [B]: the drafter sees the last and the first so many positions
    only; draft_start [B]: the first position of its context (what came before went by without it); target, draft:
    caches; rounds [B]; accepted [B, L]: tokens that each round yielded; logprobs: `Logprobs` [B, L] or None. The last
    prompt token is the first one that a round is fed: prefill leaves it out.

    A state may stand for some ``rows`` [B] of a larger one (`take_rows`): caches, the tables of sampling and logprobs
    are then the larger one's, but for recurrent memory that was copied.
    """

    tokens: jax.Array
    length: jax.Array
    base: jax.Array
    prompt_length: jax.Array
    limit: jax.Array
    rope_delta: jax.Array
    done: jax.Array
    width: jax.Array
    stops: jax.Array
    draft_window: jax.Array
    draft_sinks: jax.Array
    draft_start: jax.Array
    target: Cache
    draft: tuple
    sampling: SamplingRows
    rounds: jax.Array
    accepted: jax.Array
    logprobs: Logprobs | None = None
    rows: jax.Array | None = None


def empty_state(
    target: Decoder, drafter: Drafting | None, rows: int, capacity: int, settings: Settings = PLAIN_SETTINGS
) -> DecodeState:
    """``rows`` idle rows of ``capacity`` positions each."""
    dtype, vocab, top = target.dtype, target.config.vocab_size, settings.top_logprobs
    # Every leaf an array of its own: the state is donated.
    zeros = {
        f: jnp.zeros((rows,), jnp.int32) for f in ("length", "base", "prompt_length", "limit", "rope_delta", "rounds")
    }
    seen = settings.draft_window
    return DecodeState(
        **zeros,
        tokens=jnp.zeros((rows, capacity), jnp.int32),
        done=jnp.ones((rows,), bool),
        width=jnp.ones((rows,), jnp.int32),
        stops=jnp.full((rows, MAX_STOPS), -1, jnp.int32),
        draft_window=jnp.full((rows,), NO_BOUND if seen.size is None else seen.size, jnp.int32),
        draft_sinks=jnp.full((rows,), seen.sinks, jnp.int32),
        draft_start=jnp.zeros((rows,), jnp.int32),
        target=init_cache(target.config, rows, capacity, dtype),
        draft=drafter.init_cache(rows, capacity, dtype, settings.draft_window) if drafter is not None else (),
        sampling=SamplingRows.greedy(rows, vocab, target.vocab, target.backend),
        accepted=jnp.zeros((rows, capacity), jnp.int32),
        logprobs=Logprobs.zeros((rows, capacity), top) if top >= 0 else None,
    )


def state_specs(target: Decoder, drafter: Drafting | None, state: DecodeState) -> DecodeState:
    """PartitionSpecs in the shape of ``state``: rows over ``data``, caches as their layers' heads, [B, V] as the
    vocabulary."""
    specs = jax.tree.map(lambda _: spec(DATA), state)
    wide = {f: spec(DATA, target.vocab) for f in TABLES}
    return replace(
        specs,
        target=target.cache_specs(state.target),
        draft=drafter.cache_specs(state.draft) if state.draft else (),
        sampling=replace(specs.sampling, **wide),
    )


def _is_held(x) -> bool:
    """Whether its rows are read and written in place."""
    return isinstance(x, KVCache | DeltaState | SamplingRows)


def take_rows(backend: Backend, state: DecodeState, rows, window: int = 1) -> DecodeState:
    """The rows int [b] of a state, as one of b rows over its caches, or over a copy of their recurrent memory where no
    kernel takes a ``window`` of so many tokens. Those past its end are idle."""
    own = jnp.minimum(rows, state.length.shape[0] - 1)

    def take(x):
        if not _is_held(x):
            return x[own]
        if isinstance(x, SamplingRows):
            return x.take(rows)
        mine = replace(x, rows=rows)
        return mine if isinstance(x, KVCache) or works_in_place(backend, mine, window) else mine.copied()

    taken = jax.tree.map(take, replace(state, logprobs=None), is_leaf=_is_held)
    return replace(taken, logprobs=state.logprobs, rows=rows, done=taken.done | (rows >= state.length.shape[0]))


def put_rows(state: DecodeState, taken: DecodeState) -> DecodeState:
    """``state`` with the rows that `take_rows` gave, and were worked on."""

    def put(old, new):
        if not _is_held(old):
            return old.at[taken.rows].set(new, mode="drop")
        if isinstance(old, SamplingRows):
            return old.put(new)
        held = new if new.rows is not None else replace(old, rows=taken.rows).put(new)
        return replace(held, rows=None)

    bare = replace(state, logprobs=None), replace(taken, logprobs=None, rows=None)
    after = jax.tree.map(put, *bare, is_leaf=_is_held)
    return replace(after, logprobs=taken.logprobs)
