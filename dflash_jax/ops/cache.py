"""What operations read and write between passes: keys and values of attention, the state of recurrent layers.

A forward pass reads a cache and returns a record of what its tokens would write; afterwards `attention.write` and
`gated_delta.replay` write the tokens that turned out to be valid. Prefill, plain decoding and verification are the same
two steps, and a rejected draft is never written.

Dimension letters: B batch, T tokens of this call, S cached positions, K KV heads, D head size, G key heads of Gated
DeltaNet, R value heads on each, C channels of the convolution on each.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

# Context is read in pieces of this many positions; capacities are multiples of it.
CONTEXT_CHUNK = 256


def round_capacity(positions: int) -> int:
    """The smallest buffer length of at least ``positions`` that is read in whole pieces."""
    if positions <= CONTEXT_CHUNK:
        return max(positions, 1)
    return -(-positions // CONTEXT_CHUNK) * CONTEXT_CHUNK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer.

    A linear cache has position p at place p. A ring keeps the first ``sinks`` positions, and of later ones the last
    S - sinks, whatever the length of the context.

    Attributes:
        k: Keys, [B, K, S, D].
        v: Values, [B, K, S, D].
        rows: int [b]: the rows of the B that operations read and write, in place; indices from B on are padding.
            None: all rows.
        sinks: Positions of a ring that stay.
        ring: Whether it is a ring.
    """

    k: jax.Array
    v: jax.Array
    rows: jax.Array | None = None
    sinks: int = field(default=0, metadata={"static": True})
    ring: bool = field(default=False, metadata={"static": True})

    @classmethod
    def create(
        cls, rows: int, heads: int, head_dim: int, capacity: int, dtype, window: int | None = None, sinks: int = 0
    ) -> "KVCache":
        """Zeros for ``capacity`` positions. ``window``: how many last positions must be remembered; None, or one that
        the capacity covers, gives a linear cache."""
        ring = window is not None and sinks + window < capacity
        size = round_capacity(sinks + window if ring else capacity)
        ring = ring and size < capacity
        shape = (rows, heads, size if ring else round_capacity(capacity), head_dim)
        # Two arrays, not one twice: the state that holds them is donated.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), None, sinks if ring else 0, ring)

    @property
    def capacity(self) -> int:
        """S."""
        return self.k.shape[2]

    def row_indices(self) -> jax.Array:
        """int32 [b]: the rows that it stands for."""
        return jnp.arange(self.k.shape[0], dtype=jnp.int32) if self.rows is None else self.rows

    def places(self, positions):
        """The place of each position."""
        if not self.ring:
            return positions
        return jnp.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % (self.capacity - self.sinks)
        )

    def positions(self, places, length):
        """The position at each place [s] after positions 0 … length-1 were written, [B, s]; negative: none."""
        if not self.ring:
            return jnp.where(places < length[:, None], places, -1)
        size = self.capacity - self.sinks
        last = length[:, None] - 1 - self.sinks
        offset = places - self.sinks
        latest = last - (last - offset) % size
        return jnp.where(
            offset < 0,
            jnp.where(places < length[:, None], places, -1),
            jnp.where((latest >= 0) & (last >= 0), latest + self.sinks, -1),
        )

    def read(self, start, size: int):
        """k and v [b, K, size, D] of ``size`` places from ``start`` on."""

        def get(buffer):
            if self.rows is None:
                return jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=2)
            shape = (1, buffer.shape[1], size, buffer.shape[3])
            return jax.vmap(lambda row: jax.lax.dynamic_slice(buffer, (row, 0, start, 0), shape)[0])(self.rows)

        return get(self.k), get(self.v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounds:
    """The part of the context that new tokens see: positions from ``first`` on that are not before ``recent``, or are
    before ``sinks``.

    Attributes:
        first: int32 [B, T].
        recent: int32 [B].
        sinks: int32 [B].
    """

    first: jax.Array
    recent: jax.Array
    sinks: jax.Array

    @classmethod
    def none(cls, rows: int, tokens: int) -> "Bounds":
        """Bounds that exclude nothing."""
        zero = jnp.zeros(rows, jnp.int32)
        return cls(jnp.zeros((rows, tokens), jnp.int32), zero, zero)

    def admit(self, positions):
        """bool [B, T, s] for context positions [B, 1, s]."""
        recent, sinks = self.recent[:, None, None], self.sinks[:, None, None]
        return (positions >= self.first[..., None]) & ((positions >= recent) | (positions < sinks))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """State of a Gated DeltaNet layer.

    Attributes:
        recurrent: float32 [B, G, R, Dk, Dv].
        conv: The last inputs of the convolution, [B, kernel - 1, G, C].
        rows: As in `KVCache`.
    """

    recurrent: jax.Array
    conv: jax.Array
    rows: jax.Array | None = None

    def row_indices(self) -> jax.Array:
        """int32 [b]: the rows that it stands for."""
        return jnp.arange(self.recurrent.shape[0], dtype=jnp.int32) if self.rows is None else self.rows

    def copied(self) -> "DeltaState":
        """A copy of the rows that it stands for."""
        if self.rows is None:
            return self
        rows = jnp.minimum(self.rows, self.recurrent.shape[0] - 1)
        return DeltaState(self.recurrent[rows], self.conv[rows])

    def put(self, new: "DeltaState") -> "DeltaState":
        """With ``new`` in the rows that it stands for."""
        return DeltaState(self.placed(self.recurrent, new.recurrent), self.placed(self.conv, new.conv), self.rows)

    def placed(self, buffer, new):
        """``buffer`` [B, …] with ``new`` [b, …] in the rows that this state stands for."""
        return new if self.rows is None else buffer.at[self.rows].set(new, mode="drop")

    def cleared(self) -> "DeltaState":
        """With zeros in the rows that it stands for."""
        return self.put(jax.tree.map(jnp.zeros_like, self.copied()))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRecord:
    """What T tokens would do to a `DeltaState`. Token j depends on tokens before it alone, so that any prefix may be
    replayed.

    Attributes:
        k: Normalised keys, float32 [B, T, G, Dk].
        delta: Corrections of the delta rule, float32 [B, T, G, R, Dv].
        log_decay: float32 [B, T, G, R].
        conv: Inputs of the convolution, [B, T, G, C].
    """

    k: jax.Array
    delta: jax.Array
    log_decay: jax.Array
    conv: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRecord:
    """What T tokens would write to a `KVCache`.

    Attributes:
        k: Keys, [B, T, K, D].
        v: Values, [B, T, K, D].
    """

    k: jax.Array
    v: jax.Array
