"""What a row remembers of a prefix, taken out of the state and put into another row: the device's part of prefix reuse.

A *segment* is keys and values of some positions, of every layer that keeps them by position. A *snapshot* is the rest:
recurrent and convolution states, rings, and where the drafter's context begins, as they stand behind a prefix. Both are
copies, the same on all data shards.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dflash_jax.decoding.state import DecodeState
from dflash_jax.ops.cache import KVCache
from dflash_jax.parallel.sharding import DATA


def _is_cache(x) -> bool:
    return isinstance(x, KVCache)


def _is_linear(x) -> bool:
    return isinstance(x, KVCache) and not x.ring


def _split(state: DecodeState):
    """(caches by position, everything else that is remembered): lists in one order, whatever their layers."""
    held = jax.tree.leaves((state.target, state.draft), is_leaf=_is_cache)
    return [c for c in held if _is_linear(c)], [c for c in held if not _is_linear(c)]


def _join(state: DecodeState, linear: list, rest: list) -> DecodeState:
    held, structure = jax.tree.flatten((state.target, state.draft), is_leaf=_is_cache)
    sources = {True: iter(linear), False: iter(rest)}
    target, draft = jax.tree.unflatten(structure, [next(sources[_is_linear(c)]) for c in held])
    return replace(state, target=target, draft=draft)


def _taken(buffers, rows, take: Callable):
    """``take(buffer)`` of each array of ``buffers``, from the data shard that has the row; the others' is past their
    end."""

    if jax.lax.axis_size(DATA) == 1:
        return jax.tree.map(take, buffers)

    def one(buffer):
        found = take(buffer)
        return jax.lax.psum(jnp.where(rows[0] < buffer.shape[0], found, jnp.zeros_like(found)), DATA)

    return jax.tree.map(one, buffers)


def save(state: DecodeState, rows, start, size: int):
    """Segment of ``size`` (static) positions from ``start`` of the row: pairs of [K, size, D]."""
    linear, _ = _split(state)

    def take(buffer):
        # Past the buffer's end there is nothing to save: what is read there is cut off when it is put back.
        places = jnp.minimum(start + jnp.arange(size), buffer.shape[2] - 1)
        return buffer[jnp.minimum(rows[0], buffer.shape[0] - 1)][:, places]

    return _taken([(c.k, c.v) for c in linear], rows, take)


def load(state: DecodeState, rows, start, segment) -> DecodeState:
    linear, rest = _split(state)

    def put(buffer, new):
        places = start + jnp.arange(new.shape[1])
        return buffer.at[rows[0], :, places].set(new.swapaxes(0, 1), mode="drop")

    loaded = [replace(c, k=put(c.k, k), v=put(c.v, v)) for c, (k, v) in zip(linear, segment, strict=True)]
    return _join(state, loaded, rest)


def snapshot(state: DecodeState, rows):
    _, rest = _split(state)
    held = [*(jax.tree.leaves(c) for c in rest), [state.draft_start]]
    return _taken(held, rows, lambda x: x[jnp.minimum(rows[0], x.shape[0] - 1)])


def restore(state: DecodeState, rows, length, snapshot) -> DecodeState:
    """The row's recurrent memory and rings as in ``snapshot``, with ``length`` tokens behind it."""
    linear, rest = _split(state)
    *snapshot, [first] = snapshot

    def put(old, new):
        leaves, structure = jax.tree.flatten(old)
        return jax.tree.unflatten(
            structure, [x.at[rows[0]].set(y, mode="drop") for x, y in zip(leaves, new, strict=True)]
        )

    restored = [put(old, new) for old, new in zip(rest, snapshot, strict=True)]
    places = {"base": length, "draft_start": first}
    moved = {name: getattr(state, name).at[rows[0]].set(to, mode="drop") for name, to in places.items()}
    return replace(_join(state, linear, restored), **moved)


def _without_rows(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec[1:])


def segment_specs(specs: DecodeState):
    """PartitionSpecs of a segment, from those of the state."""
    linear, _ = _split(specs)
    return [(_without_rows(c.k), _without_rows(c.v)) for c in linear]


def snapshot_specs(specs: DecodeState):
    _, rest = _split(specs)
    is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
    return [*([_without_rows(s) for s in jax.tree.leaves(c, **is_spec)] for c in rest), [PartitionSpec()]]
