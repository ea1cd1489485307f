"""The device's part of prefix reuse and of swapping: copies of pages, and of what a slot has beside them.

A *segment* is the contents of some pages. A *snapshot* is everything else that a slot has after a prefix: recurrent and
convolution states, and the first positions of the drafters' contexts. Both are copies, the same on all data shards.

Slots are given as int [1], for one slot, and pages as int [m]; each data shard is given its own, numbered within the
shard, and indices past its end in place of those of other shards. K is the KV heads of a layer, D its head size, P the
positions of a page.
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
from jaxtyping import Array, Int

from dflash_jax.decoding.state import DecodeState, is_kv_cache
from dflash_jax.ops.cache import KVCache
from dflash_jax.parallel.sharding import DATA

# (keys, values), [m, K, P, D] each, of every layer whose pages these are.
Segment = list[tuple[Array, Array]]
# The arrays of each cache without pages, without the slot dimension; the last entry is [draft_start].
Snapshot = list[list[Array]]


def _split(state: DecodeState) -> tuple[list[KVCache], list[Any]]:
    """(caches in pages, all other caches) of both models, each in layer order."""
    caches = jax.tree.leaves((state.target, state.draft), is_leaf=is_kv_cache)
    return [c for c in caches if is_kv_cache(c)], [c for c in caches if not is_kv_cache(c)]


def _join(state: DecodeState, paged: Sequence[KVCache], others: Sequence[Any]) -> DecodeState:
    """Undoes `_split`: ``state`` with these caches."""
    caches, structure = jax.tree.flatten((state.target, state.draft), is_leaf=is_kv_cache)
    sources = {True: iter(paged), False: iter(others)}
    target, draft = jax.tree.unflatten(structure, [next(sources[is_kv_cache(c)]) for c in caches])
    return replace(state, target=target, draft=draft)


def _from_owner(buffers: Any, indices: Int[Array, " m"]) -> Any:
    """Rows of each array of ``buffers``, each from the data shard that has it, on every data shard.

    On all other shards its index is past the end.
    """

    def one(buffer: Array) -> Array:
        part = buffer.at[indices].get(mode="clip")
        if jax.lax.axis_size(DATA) == 1:
            return part
        is_own = (indices < buffer.shape[0]).reshape(-1, *[1] * (buffer.ndim - 1))
        return jax.lax.psum(jnp.where(is_own, part, jnp.zeros_like(part)), DATA)

    return jax.tree.map(one, buffers)


def set_tables(state: DecodeState, table: Int[Array, "slots n"], windowed: Int[Array, "slots n"]) -> DecodeState:
    """Gives the slots pages.

    Args:
        state: The state.
        table: The pages of each slot in caches that keep all positions, as in `KVCache`.
        windowed: The same of caches with a window.

    Returns:
        The state.
    """
    paged, others = _split(state)
    changed = [replace(c, table=table if c.window is None else windowed) for c in paged]
    return _join(state, changed, others)


def save(state: DecodeState, pages: Int[Array, " m"], is_windowed: bool) -> Segment:
    """Copies pages out.

    Args:
        state: The state.
        pages: The pages.
        is_windowed: Whether they are those of caches with a window (static).

    Returns:
        The segment.
    """
    paged, _ = _split(state)
    return _from_owner([(c.k, c.v) for c in paged if (c.window is not None) == is_windowed], pages)


def load(state: DecodeState, pages: Int[Array, " m"], segment: Segment, is_windowed: bool) -> DecodeState:
    """Copies a segment into pages.

    Args:
        state: The state.
        pages: The pages. Those past the end are dropped.
        segment: What `save` gave.
        is_windowed: As in `save`.

    Returns:
        The state.
    """
    paged, others = _split(state)
    parts = iter(segment)

    def loaded(cache: KVCache) -> KVCache:
        if (cache.window is not None) != is_windowed:
            return cache
        k, v = next(parts)
        return replace(cache, k=cache.k.at[pages].set(k, mode="drop"), v=cache.v.at[pages].set(v, mode="drop"))

    return _join(state, [loaded(c) for c in paged], others)


def snapshot(state: DecodeState, slots: Int[Array, "1"]) -> Snapshot:
    """Copies a snapshot out of a slot, as it is after the tokens in its caches."""
    _, others = _split(state)
    arrays = [*(jax.tree.leaves(c) for c in others), [state.draft_start]]
    return jax.tree.map(lambda x: x[0], _from_owner(arrays, slots))


def restore(
    state: DecodeState, slots: Int[Array, "1"], length: int | Int[Array, ""], snapshot: Snapshot
) -> DecodeState:
    """Copies a snapshot into a slot.

    Args:
        state: The state.
        slots: The slot.
        length: Tokens of the prefix; the slot's ``num_cached``.
        snapshot: What `snapshot` gave.

    Returns:
        The state.
    """
    paged, others = _split(state)
    *arrays, [draft_start] = snapshot

    def put(old: Any, new: list[Array]) -> Any:
        leaves = [x.at[slots[0]].set(y, mode="drop") for x, y in zip(jax.tree.leaves(old), new, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(old), leaves)

    restored = [put(old, new) for old, new in zip(others, arrays, strict=True)]
    values = {"num_cached": length, "draft_start": draft_start}
    fields = {name: getattr(state, name).at[slots[0]].set(x, mode="drop") for name, x in values.items()}
    return replace(_join(state, paged, restored), **fields)


def _without_slots(spec: Any, *first: None) -> PartitionSpec:
    """The PartitionSpec of one slot of an array, after other dimensions."""
    return PartitionSpec(*first, *spec[1:])


def segment_specs(specs: DecodeState, is_windowed: bool) -> list[tuple[PartitionSpec, PartitionSpec]]:
    """PartitionSpecs of a segment, from those of the state."""
    paged, _ = _split(specs)
    chosen = [c for c in paged if (c.window is not None) == is_windowed]
    return [(_without_slots(c.k, None), _without_slots(c.v, None)) for c in chosen]


def snapshot_specs(specs: DecodeState) -> list[list[PartitionSpec]]:
    """PartitionSpecs of a snapshot, from those of the state."""
    _, others = _split(specs)

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    return [*([_without_slots(s) for s in jax.tree.leaves(c, is_leaf=is_spec)] for c in others), [PartitionSpec()]]
