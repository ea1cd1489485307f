"""The data that operations read and write between passes: caches of attention, and the state of recurrent layers.

A forward pass reads a cache and returns a record of its tokens' updates; afterwards `cache_write.write` and
`gated_delta.replay` write the updates of valid tokens. Prefill, plain decoding and verification are the same two steps,
and a rejected draft is never written.

Dimension letters: B batch, rows those of a cache or state (B of them take part), T tokens of this call, S cached
positions, K KV heads, D head size, G key heads of Gated DeltaNet, R value heads on each, C channels of the convolution
on each.
"""

# jax's own annotations are partial: members such as jnp.where have unknown parameter types.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.parallel.sharding import UNSHARDED, AxisSharding

# The dtype of keys and values in FP8, its largest and its least normal number, and the number of its mantissa bits.
FP8, LARGEST_FP8, LEAST_FP8, FP8_MANTISSA = jnp.float8_e4m3fn, 448.0, 2.0**-6, 3
# Positions of a page: at most, and at least. Pages of short sequences are smaller, and always a power of two.
PAGE_SIZE, SMALLEST_PAGE = 256, 64


def page_size(capacity: int) -> int:
    """Positions of a page where a sequence has at most ``capacity`` positions."""
    return min(PAGE_SIZE, max(SMALLEST_PAGE, 1 << (capacity - 1).bit_length()))


def pages_of(positions: int, capacity: int) -> int:
    """Pages that ``positions`` take where a sequence has at most ``capacity`` positions."""
    return -(-positions // page_size(capacity))


def window_pages(window: int, sinks: int, ahead: int, capacity: int) -> int:
    """Pages that a sequence needs at most in a cache with a window.

    Args:
        window: Last positions that are read.
        sinks: First positions that are read.
        ahead: Positions that may be written before pages that the window has left are given up.
        capacity: Positions of a sequence at most.
    """
    size = page_size(capacity)
    # The first and the last page of the window may be partly filled.
    return min(pages_of(capacity, capacity), -(-sinks // size) + -(-window // size) + 1 + -(-ahead // size))


def rounded(x: Float[Array, "B T K D"], scale: Float[Array, " K"]) -> Float[Array, "B T K D"]:
    """Keys or values in FP8: x divided by the scale of its head and rounded to float8_e4m3fn, as vLLM does.

    What is too large becomes the largest number. The numbers are rounded before they are converted, since XLA converts
    through float16 on some devices, which rounds twice, and may drop a conversion there and back.
    """
    y = jnp.clip(x.astype(jnp.float32) / scale[:, None], -LARGEST_FP8, LARGEST_FP8)
    step = LEAST_FP8 * 2.0**-FP8_MANTISSA
    small = jnp.round(y / step) * step
    y = jnp.where(jnp.abs(y) < LEAST_FP8, small, jax.lax.reduce_precision(y, 8, FP8_MANTISSA))
    return y.astype(FP8)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, in pages of P positions (paged attention, arXiv 2309.06180).

    Attributes:
        k: Keys, [pages, K, P, D], in the model's dtype or in `FP8`.
        v: Values, likewise.
        table: The pages of each sequence, int32 [rows, n]: positions i P … (i + 1) P - 1 are in page ``table[row, i]``.
            An index past the last page is no page: what is written there is dropped, and it must not be read.
        rows: int32 [B], the rows of the table that operations read and write; indices past the last row are padding.
            None: all rows.
        window: The last positions of a context that are read at most, beside the first ``sinks``: pages between them
            may be given up. None: all are read.
        sinks: See ``window``.
        positions: How the positions of a page are divided over devices. The arrays of a step are a device's part, in
            which positions are numbered as `local` says.
    """

    k: Float[Array, "pages K P D"]
    v: Float[Array, "pages K P D"]
    table: Int[Array, "rows n"]
    rows: Int[Array, " B"] | None = None
    window: int | None = field(default=None, metadata={"static": True})
    sinks: int = field(default=0, metadata={"static": True})
    positions: AxisSharding = field(default=UNSHARDED, metadata={"static": True})

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
        positions: AxisSharding = UNSHARDED,
    ) -> "KVCache":
        """A cache of zeros in which each sequence has all the pages that it can need.

        Args:
            rows: Sequences.
            heads: K.
            head_dim: D.
            capacity: Positions of each.
            dtype: Dtype of keys and values.
            window: As in the class.
            sinks: As in the class.
            positions: As in the class.

        Returns:
            The cache, undivided.
        """
        n = pages_of(capacity, capacity)
        shape = (rows * n, heads, page_size(capacity), head_dim)
        table = jnp.arange(rows * n, dtype=jnp.int32).reshape(rows, n)
        # Two arrays, not one array twice: both are donated with the state.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), table, None, window, sinks, positions)

    def with_pool(self, pages: int, shards: int = 1) -> "KVCache":
        """An empty cache of ``pages`` pages in each of ``shards`` parts, of which no sequence has any."""
        k, v = (jnp.zeros((pages * shards, *x.shape[1:]), x.dtype) for x in (self.k, self.v))
        return replace(self, k=k, v=v, table=jnp.full_like(self.table, pages))

    @property
    def page_size(self) -> int:
        """Positions P of a page, on a device."""
        return self.k.shape[2]

    @property
    def capacity(self) -> int:
        """Positions of a sequence at most, on a device."""
        return self.table.shape[1] * self.page_size

    def local(self, positions: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """How many positions before each of ``positions`` this device has: where it has a position, its number here."""
        if not self.positions.axes:
            return positions
        size = self.page_size
        page = size * self.positions.size()
        inside = jnp.clip(positions % page - self.positions.index() * size, 0, size)
        return positions // page * size + inside

    def places(self, positions: Int[Array, "*B"]) -> Int[Array, "*B"]:
        """`local` of the positions that this device has, and an index past its last for others."""
        if not self.positions.axes:
            return positions
        local = self.local(positions)
        return jnp.where(self.local(positions + 1) > local, local, self.capacity)

    def row_indices(self) -> Int[Array, " B"]:
        """The rows that operations read and write, int32 [B]."""
        return jnp.arange(len(self.table), dtype=jnp.int32) if self.rows is None else self.rows

    def pages(self, indices: Int[Array, "B m"]) -> Int[Array, "B m"]:
        """The pages at ``indices`` of the sequences that take part; a row past the end stands for the last one."""
        rows = jnp.minimum(self.row_indices(), len(self.table) - 1)
        return self.table.at[rows[:, None], indices].get(mode="fill", fill_value=len(self.k))

    def read(self, indices: Int[Array, "B m"]) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
        """Keys and values of m pages of each sequence, S = m P; arbitrary where there is no page."""
        pages = self.pages(indices)

        def get(buffer: Array) -> Array:
            x = buffer.at[pages].get(mode="clip").swapaxes(1, 2)
            return x.reshape(*x.shape[:2], -1, x.shape[-1])

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

    def skipped(self, page: int) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
        """The pages of ``page`` positions that no token sees, apart from those at the end of the context.

        Returns:
            The first such page, and their number, int32 [B] each.
        """
        lowest = self.first.min(1)
        first = jnp.where(lowest < self.sinks, -(-self.sinks // page), 0)
        return first, jnp.maximum(jnp.maximum(lowest, self.recent) // page - first, 0)

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
        k: Keys, [B, T, K, D], in the cache's dtype.
        v: Values, likewise.
    """

    k: Float[Array, "B T K D"]
    v: Float[Array, "B T K D"]
