"""The device's part of prefix reuse: what a slot holds of a prefix, copied out of the state and into another slot.

A *segment* is the keys and values of some positions, of every layer that stores them by position. A *snapshot* is
everything else after a prefix: recurrent and convolution states, ring caches, and the first position of the drafter's
context. Both are copies, the same on all data shards.

Slots are given as int [1], for one slot. K is the KV heads of a layer, D its head size.
"""

# Most functions of JAX have partial annotations: results of jax.lax.cond, jax.tree.map and others are unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from dflash_jax.decoding.state import DecodeState
from dflash_jax.ops.cache import KVCache
from dflash_jax.parallel.sharding import DATA

# (keys, values), [K, size, D] each, of every layer that stores them by position.
Segment = list[tuple[Array, Array]]
# The arrays of each other cache, without the slot dimension; the last entry is [draft_start].
Snapshot = list[list[Array]]


def _is_kv_cache(x: Any) -> bool:
    return isinstance(x, KVCache)


def _is_linear(x: Any) -> TypeGuard[KVCache]:
    """Whether ``x`` stores position p at place p."""
    return isinstance(x, KVCache) and not x.ring


def _split(state: DecodeState) -> tuple[list[KVCache], list[Any]]:
    """(linear caches, all other caches) of both models, each in layer order."""
    caches = jax.tree.leaves((state.target, state.draft), is_leaf=_is_kv_cache)
    return [c for c in caches if _is_linear(c)], [c for c in caches if not _is_linear(c)]


def _join(state: DecodeState, linear: Sequence[KVCache], others: Sequence[Any]) -> DecodeState:
    """Undoes `_split`: ``state`` with these caches."""
    caches, structure = jax.tree.flatten((state.target, state.draft), is_leaf=_is_kv_cache)
    sources = {True: iter(linear), False: iter(others)}
    target, draft = jax.tree.unflatten(structure, [next(sources[_is_linear(c)]) for c in caches])
    return replace(state, target=target, draft=draft)


def _from_owner(buffers: Any, slots: Int[Array, "1"], take: Callable[[Array], Array]) -> Any:
    """``take(buffer)`` of each array of ``buffers``, from the data shard that has the slot, on every data shard.

    On all other shards the slot is past the end.
    """
    if jax.lax.axis_size(DATA) == 1:
        return jax.tree.map(take, buffers)

    def one(buffer: Array) -> Array:
        part = take(buffer)
        return jax.lax.psum(jnp.where(slots[0] < buffer.shape[0], part, jnp.zeros_like(part)), DATA)

    return jax.tree.map(one, buffers)


def save(state: DecodeState, slots: Int[Array, "1"], start: int | Int[Array, ""], size: int) -> Segment:
    """Copies a segment out of a slot.

    Args:
        state: The state.
        slots: The slot.
        start: First position.
        size: Positions (static).

    Returns:
        The segment.
    """
    linear, _ = _split(state)

    def take(buffer: Shaped[Array, "slots K S D"]) -> Shaped[Array, "K size D"]:
        # Positions past the buffer's end are not saved: `load` drops what is read for them.
        places = jnp.minimum(start + jnp.arange(size), buffer.shape[2] - 1)
        return buffer[jnp.minimum(slots[0], buffer.shape[0] - 1)][:, places]

    return _from_owner([(c.k, c.v) for c in linear], slots, take)


def load(state: DecodeState, slots: Int[Array, "1"], start: int | Int[Array, ""], segment: Segment) -> DecodeState:
    """Copies a segment into a slot.

    Args:
        state: The state.
        slots: The slot.
        start: First position.
        segment: What `save` gave.

    Returns:
        The state.
    """
    linear, others = _split(state)

    def put(buffer: Shaped[Array, "slots K S D"], new: Shaped[Array, "K size D"]) -> Shaped[Array, "slots K S D"]:
        places = start + jnp.arange(new.shape[1])
        return buffer.at[slots[0], :, places].set(new.swapaxes(0, 1), mode="drop")

    loaded = [replace(c, k=put(c.k, k), v=put(c.v, v)) for c, (k, v) in zip(linear, segment, strict=True)]
    return _join(state, loaded, others)


def snapshot(state: DecodeState, slots: Int[Array, "1"]) -> Snapshot:
    """Copies a snapshot out of a slot, as it is after the tokens in its caches."""
    _, others = _split(state)
    arrays = [*(jax.tree.leaves(c) for c in others), [state.draft_start]]
    return _from_owner(arrays, slots, lambda x: x[jnp.minimum(slots[0], x.shape[0] - 1)])


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
    linear, others = _split(state)
    *arrays, [draft_start] = snapshot

    def put(old: Any, new: list[Array]) -> Any:
        leaves = [x.at[slots[0]].set(y, mode="drop") for x, y in zip(jax.tree.leaves(old), new, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(old), leaves)

    restored = [put(old, new) for old, new in zip(others, arrays, strict=True)]
    values = {"num_cached": length, "draft_start": draft_start}
    fields = {name: getattr(state, name).at[slots[0]].set(x, mode="drop") for name, x in values.items()}
    return replace(_join(state, linear, restored), **fields)


def _without_slots(spec: Any) -> PartitionSpec:
    """The PartitionSpec of one slot of an array."""
    return PartitionSpec(*spec[1:])


def segment_specs(specs: DecodeState) -> list[tuple[PartitionSpec, PartitionSpec]]:
    """PartitionSpecs of a segment, from those of the state."""
    linear, _ = _split(specs)
    return [(_without_slots(c.k), _without_slots(c.v)) for c in linear]


def snapshot_specs(specs: DecodeState) -> list[list[PartitionSpec]]:
    """PartitionSpecs of a snapshot, from those of the state."""
    _, others = _split(specs)

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    return [*([_without_slots(s) for s in jax.tree.leaves(c, is_leaf=is_spec)] for c in others), [PartitionSpec()]]
