"""The data that operations read and write between passes: caches of attention, and the state of recurrent layers.

A forward pass reads a cache and returns a record of its tokens' updates; afterwards `attention.write` and
`gated_delta.replay` write the updates of valid tokens. Prefill, plain decoding and verification are the same two steps,
and a rejected draft is never written.

Dimension letters: B batch, rows those of a cache or state (B of them take part), T tokens of this call, S cached
positions, K KV heads, D head size, G key heads of Gated DeltaNet, R value heads on each, C channels of the convolution
on each.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# Context is read in pieces of this many positions; larger capacities are multiples of it.
CONTEXT_CHUNK = 256


def round_capacity(positions: int) -> int:
    """``positions``, rounded up to a multiple of `CONTEXT_CHUNK` where they exceed it; at least 1."""
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
        k: Keys, [rows, K, S, D].
        v: Values, [rows, K, S, D].
        rows: int32 [B], the rows that operations read and write, in place; indices past the last row are padding.
            None: all rows.
        sinks: The first positions of a ring, which stay.
        ring: Whether it is a ring.
    """

    k: Float[Array, "rows K S D"]
    v: Float[Array, "rows K S D"]
    rows: Int[Array, " B"] | None = None
    sinks: int = field(default=0, metadata={"static": True})
    ring: bool = field(default=False, metadata={"static": True})

    @classmethod
    def create(
        cls,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: DTypeLike,
        window: int | None = None,
        sinks: int = 0,
    ) -> "KVCache":
        """A cache of zeros.

        Args:
            rows: Rows of the cache.
            heads: K.
            head_dim: D.
            capacity: Positions that it must have room for.
            dtype: Dtype of keys and values.
            window: Last positions that are read. None, or a window (rounded up, with sinks) that covers the capacity,
                gives a linear cache.
            sinks: First positions that are read besides the window.

        Returns:
            The cache.
        """
        ring_size = capacity if window is None else round_capacity(sinks + window)
        ring = ring_size < capacity
        shape = (rows, heads, ring_size if ring else round_capacity(capacity), head_dim)
        # Two arrays, not one array twice: both are donated with the state.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), None, sinks if ring else 0, ring)

    @property
    def capacity(self) -> int:
        """Cached positions S."""
        return self.k.shape[2]

    def row_indices(self) -> Int[Array, " B"]:
        """The rows that operations read and write, int32 [B]."""
        return jnp.arange(self.k.shape[0], dtype=jnp.int32) if self.rows is None else self.rows

    def places(self, positions: Int[Array, "..."]) -> Int[Array, "..."]:
        """The place in the buffers of each position."""
        if not self.ring:
            return positions
        return jnp.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % (self.capacity - self.sinks)
        )

    def positions(self, places: Int[Array, " s"], length: Int[Array, " B"]) -> Int[Array, "B s"]:
        """The position at each place after positions 0 … length-1 were written; negative: none."""
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

    def read(
        self, start: Int[Array, ""] | int, size: int
    ) -> tuple[Float[Array, "B K size D"], Float[Array, "B K size D"]]:
        """Keys and values of ``size`` places from ``start`` on."""

        def get(buffer: Array) -> Array:
            if self.rows is None:
                return jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=2)
            shape = (1, buffer.shape[1], size, buffer.shape[3])

            def row_slice(row: Array) -> Array:
                return jax.lax.dynamic_slice(buffer, (row, 0, start, 0), shape)[0]

            return jax.vmap(row_slice)(self.rows)

        return get(self.k), get(self.v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounds:
    """The part of the context that new tokens see.

    A position p is seen if p ≥ first, and p ≥ recent or p < sinks.

    Attributes:
        first: int32 [B, T], the first visible position of each token.
        recent: int32 [B], where the window of recent positions begins.
        sinks: int32 [B], how many first positions stay visible.
    """

    first: Int[Array, "B T"]
    recent: Int[Array, " B"]
    sinks: Int[Array, " B"]

    @classmethod
    def none(cls, rows: int, tokens: int) -> "Bounds":
        """Bounds that exclude nothing."""
        zero = jnp.zeros(rows, jnp.int32)
        return cls(jnp.zeros((rows, tokens), jnp.int32), zero, zero)

    def admit(self, positions: Int[Array, "B 1 s"]) -> Bool[Array, "B T s"]:
        """Whether each token sees each context position."""
        recent, sinks = self.recent[:, None, None], self.sinks[:, None, None]
        return (positions >= self.first[..., None]) & ((positions >= recent) | (positions < sinks))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """State of a Gated DeltaNet layer.

    Attributes:
        recurrent: float32 [rows, G, R, Dk, Dv].
        conv_inputs: The last inputs of the convolution, [rows, W, G, C] with W = kernel - 1.
        rows: As in `KVCache`.
    """

    recurrent: Float[Array, "rows G R Dk Dv"]
    conv_inputs: Float[Array, "rows W G C"]
    rows: Int[Array, " B"] | None = None

    def row_indices(self) -> Int[Array, " B"]:
        """The rows that operations read and write, int32 [B]."""
        return jnp.arange(self.recurrent.shape[0], dtype=jnp.int32) if self.rows is None else self.rows

    def copied(self) -> "DeltaState":
        """A state of B rows: a copy of those that ``rows`` selects."""
        if self.rows is None:
            return self
        rows = jnp.minimum(self.rows, self.recurrent.shape[0] - 1)
        return DeltaState(self.recurrent[rows], self.conv_inputs[rows])

    def put(self, new: "DeltaState") -> "DeltaState":
        """This state with the B rows of ``new`` in those that ``rows`` selects."""
        return DeltaState(
            self.placed(self.recurrent, new.recurrent), self.placed(self.conv_inputs, new.conv_inputs), self.rows
        )

    def placed(self, buffer: Float[Array, " rows *dims"], new: Float[Array, " B *dims"]) -> Float[Array, " rows *dims"]:
        """``buffer`` with ``new`` in the rows that ``rows`` selects."""
        return new if self.rows is None else buffer.at[self.rows].set(new, mode="drop")

    def cleared(self) -> "DeltaState":
        """This state with zeros in the rows that ``rows`` selects."""
        state = self.copied()
        return self.put(DeltaState(jnp.zeros_like(state.recurrent), jnp.zeros_like(state.conv_inputs)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRecord:
    """The updates of a `DeltaState` by T tokens.

    The update of token j depends on earlier tokens alone, so that any prefix can be replayed.

    Attributes:
        k: Normalised keys, float32 [B, T, G, Dk].
        delta: Corrections of the delta rule, float32 [B, T, G, R, Dv].
        log_decay: Logarithms of the decays, float32 [B, T, G, R].
        conv_inputs: Inputs of the convolution, [B, T, G, C].
    """

    k: Float[Array, "B T G Dk"]
    delta: Float[Array, "B T G R Dv"]
    log_decay: Float[Array, "B T G R"]
    conv_inputs: Float[Array, "B T G C"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRecord:
    """The keys and values of T tokens, which a commit writes to a `KVCache`.

    Attributes:
        k: Keys, [B, T, K, D].
        v: Values, [B, T, K, D].
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
