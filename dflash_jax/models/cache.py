"""What a row remembers: keys and values of attention layers, the state of recurrent ones; and attention over it.

A cache is read by a forward pass and written afterwards, by `KVCache.write` and `replay`, with the count of tokens
that turned out to be valid. Prefill, plain decoding and verification are the same two steps, and a rejected draft was
never written.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from dflash_jax.ops import backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.parallel.sharding import DATA, AxisSharding, spec

# Context is read in pieces of this many positions, as many as the longest live row needs; capacities are multiples of
# it. Off the CPU a turn of the loop costs about 25 microseconds whatever it reads (H200), as much as reading 50 MB:
# pieces are larger there, and at most so many.
CONTEXT_CHUNK = 256
WIDE_CHUNK, MOST_CHUNKS = 2048, 16
_MASKED = -1e30


def round_capacity(positions: int) -> int:
    """The smallest buffer length of at least ``positions`` that the context loop can walk."""
    if positions <= CONTEXT_CHUNK:
        return max(positions, 1)
    return -(-positions // CONTEXT_CHUNK) * CONTEXT_CHUNK


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, [B, K, S, D]. Linear: slot = position. Ring: the first ``sinks`` positions stay, later ones go
    round.

    A ring remembers the last S - sinks positions, whatever the length of the context. ``rows`` int [b]: the cache
    stands for these of its B rows, which are read and written where they lie; None: for all.
    """

    k: jax.Array
    v: jax.Array
    rows: jax.Array | None = None
    sinks: int = field(default=0, metadata={"static": True})
    ring: bool = field(default=False, metadata={"static": True})

    @classmethod
    def create(
        cls, rows: int, heads: int, head_dim: int, capacity: int, dtype, window: int | None = None, sinks: int = 0
    ):
        """``window``: how many last positions must be remembered; None, or one the capacity covers, gives a linear
        cache."""
        ring = window is not None and sinks + window < capacity
        size = round_capacity(sinks + window if ring else capacity)
        ring = ring and size < capacity
        shape = (rows, heads, size if ring else round_capacity(capacity), head_dim)
        # Two arrays, not one twice: the state that holds them is donated.
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), None, sinks if ring else 0, ring)

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    def specs(self, heads: AxisSharding) -> "KVCache":
        return replace(self, k=spec(DATA, heads), v=spec(DATA, heads))

    def slots(self, positions):
        if not self.ring:
            return positions
        return jnp.where(
            positions < self.sinks, positions, self.sinks + (positions - self.sinks) % (self.capacity - self.sinks)
        )

    def positions(self, slots, length):
        """The position held by each slot [s] when positions 0 … length-1 were written, [B, s]; negative: none."""
        if not self.ring:
            return jnp.where(slots < length[:, None], slots, -1)
        size = self.capacity - self.sinks
        last = length[:, None] - 1 - self.sinks
        offset = slots - self.sinks
        turned = last - (last - offset) % size
        return jnp.where(
            offset < 0,
            jnp.where(slots < length[:, None], slots, -1),
            jnp.where((turned >= 0) & (last >= 0), turned + self.sinks, -1),
        )

    def write(self, k, v, positions, keep) -> "KVCache":
        """Stores k, v [B, T, K, D] at ``positions`` [B, T] (ascending) where ``keep`` [B, T]; the rest leaves no
        trace."""
        if self.ring:
            # Of several tokens for one slot only the newest may land: scatter order is undefined.
            last = jnp.max(jnp.where(keep, positions, -1), axis=1, keepdims=True)
            keep = keep & ((positions < self.sinks) | (positions > last - (self.capacity - self.sinks)))
        slots = jnp.where(keep, self.slots(positions), self.capacity)
        rows = jnp.arange(k.shape[0], dtype=jnp.int32) if self.rows is None else self.rows
        forms = {"default": put}
        if backend.are_wanted():
            from dflash_jax.ops.kernels.triton import attention as triton_attention

            if triton_attention.writes(k):
                forms["cuda"] = triton_attention.write_triton
        held = jax.lax.platform_dependent(self.k, self.v, k, v, rows, slots, **forms)
        return replace(self, k=held[0], v=held[1])

    def read(self, start, size: int):
        """k and v [b, K, size, D] of slots ``start`` onwards."""

        def get(buffer):
            if self.rows is None:
                return jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=2)
            shape = (1, buffer.shape[1], size, buffer.shape[3])
            return jax.vmap(lambda row: jax.lax.dynamic_slice(buffer, (row, 0, start, 0), shape)[0])(self.rows)

        return get(self.k), get(self.v)


def put(k_held, v_held, k, v, rows, slots) -> tuple:
    """k, v [B, T, K, D] into k_held, v_held [all rows, K, S, D], at ``slots`` [B, T] of ``rows`` [B]; what is past an
    end is left out."""

    def one(held, new):
        return held.at[rows[:, None], :, slots].set(new.astype(held.dtype), mode="drop")

    return one(k_held, k), one(v_held, v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bounds:
    """What new tokens see of the context, int32: positions from ``first`` [B, T] on that are not before ``recent`` [B],
    or are before ``sinks`` [B]."""

    first: jax.Array
    recent: jax.Array
    sinks: jax.Array

    @classmethod
    def none(cls, rows: int, tokens: int) -> "Bounds":
        zero = jnp.zeros(rows, jnp.int32)
        return cls(jnp.zeros((rows, tokens), jnp.int32), zero, zero)

    def admit(self, held):
        """bool [B, T, s] for context positions held [B, 1, s]."""
        recent, sinks = self.recent[:, None, None], self.sinks[:, None, None]
        return (held >= self.first[..., None]) & ((held >= recent) | (held < sinks))


def through_gate(y, both):
    """Attended values y [B, T, N, D], gated by the second half of ``both`` [B, T, N, 2, D], the queries' projection;
    None: not gated."""
    return y if both is None else y * jax.nn.sigmoid(both[..., 1, :])


def attend(q, k, v, own_mask, cache: KVCache | None, length, bounds: Bounds | None = None, both=None):
    """Softmax attention of T new tokens over the cached context and over one another; float32 inside.

    q [B, T, N, D]; k, v [B, T, K, D] of the new tokens themselves; ``own_mask`` bool, broadcastable to [B, T, T],
    every row with at least its own key; None: each sees itself and those before it. ``length`` [B]: valid context
    positions; no more is read than the longest has. ``bounds`` restrict the context further. Returns [B, T, N, D],
    through `through_gate`.
    """

    def in_pieces(q, k, v, own_mask, cache, length, bounds, both, size: int):
        return through_gate(attend_in_pieces(q, k, v, own_mask, cache, length, bounds, size), both)

    if cache is None:
        return in_pieces(q, k, v, own_mask, None, length, bounds, both, CONTEXT_CHUNK)
    wide = max(WIDE_CHUNK, round_capacity(-(-cache.capacity // MOST_CHUNKS)))
    forms = {"cpu": partial(in_pieces, size=CONTEXT_CHUNK), "default": partial(in_pieces, size=wide)}
    if backend.are_wanted():
        from dflash_jax.ops.kernels.triton import attention as triton_attention

        if triton_attention.fits(q):
            forms["cuda"] = triton_attention.attend_triton
            bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    if cpu.attends(q, cache) and backend.for_cpu():

        def in_cpp(*args):
            return through_gate(cpu.attend(*args[:-1]), args[-1])

        forms["cpu"] = in_cpp
        bounds = Bounds.none(*q.shape[:2]) if bounds is None else bounds
    return jax.lax.platform_dependent(q, k, v, own_mask, cache, length, bounds, both, **forms)


def attend_in_pieces(q, k, v, own_mask, cache: KVCache | None, length, bounds: Bounds | None, size: int):
    """`attend`, with ``size`` positions of the context at a time."""
    b, t, n, d = q.shape
    heads = k.shape[2]
    q = q.reshape(b, t, heads, n // heads, d)

    def fold(carry, q, k, v, mask):
        """Adds keys k, v [B, K, s, D] under mask [B, T, s] to the running softmax."""
        best, total, acc = carry
        scores = jnp.einsum("btkrd,bksd->bkrts", q, k, preferred_element_type=jnp.float32) * d**-0.5
        scores = jnp.where(mask[:, None, None], scores, _MASKED)
        new_best = jnp.maximum(best, scores.max(-1))
        weights = jnp.exp(scores - new_best[..., None])
        scale = jnp.exp(best - new_best)
        mixed = jnp.einsum("bkrts,bksd->bkrtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_best, total * scale + weights.sum(-1), acc * scale[..., None] + mixed

    shape = (b, heads, n // heads, t)
    carry = (jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, d), jnp.float32))
    own = jnp.broadcast_to(jnp.tril(jnp.ones((t, t), bool)) if own_mask is None else own_mask, (b, t, t))
    carry = fold(carry, q, k.swapaxes(1, 2), v.swapaxes(1, 2), own)
    if cache is not None:
        capacity = cache.capacity
        size = min(size, capacity)

        def chunk(i, carry):
            # The last piece begins early where the capacity is no multiple, and what was read counts once.
            start = jnp.minimum(i * size, capacity - size)
            slots = start + jnp.arange(size)
            keys, values = cache.read(start, size)
            held = jnp.where(slots >= i * size, cache.positions(slots, length), -1)[:, None, :]
            mask = jnp.broadcast_to(held >= 0, (b, t, size))
            # Weight zero is not enough: 0 · NaN would bring a slot's last user back.
            values = jnp.where((held >= 0)[:, 0, None, :, None], values, 0)
            if bounds is not None:
                mask = mask & bounds.admit(held)
            return fold(carry, q, keys, values, mask)

        if size == capacity:
            carry = chunk(0, carry)
        else:
            used = jnp.minimum(jnp.max(length), capacity)
            carry = jax.lax.fori_loop(0, (used + size - 1) // size, chunk, carry)
    _, total, acc = carry
    y = acc / total[..., None]
    return jnp.moveaxis(y, 3, 1).reshape(b, t, n, d).astype(q.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """State of a Gated DeltaNet layer: ``recurrent`` float32 [B, G, R, Dk, Dv] (G key heads, R value heads on each)
    and the last convolution inputs ``conv`` [B, kernel - 1, G, C]. ``rows`` as in `KVCache`."""

    recurrent: jax.Array
    conv: jax.Array
    rows: jax.Array | None = None

    def specs(self, heads: AxisSharding) -> "DeltaState":
        return DeltaState(spec(DATA, heads), spec(DATA, None, heads))

    def is_kept_in_place(self, tokens: int) -> bool:
        """Whether a loop over so many tokens at a time reads and writes rows where they lie, by kernels; else it is
        given a copy of them."""
        if backend.are_wanted():
            from dflash_jax.ops.kernels.triton import delta as triton_delta

            return triton_delta.fits(tokens, self)
        return cpu.mixes(self) and backend.for_cpu()

    def taken(self) -> "DeltaState":
        """A copy of the rows that it stands for."""
        if self.rows is None:
            return self
        own = jnp.minimum(self.rows, self.recurrent.shape[0] - 1)
        return DeltaState(self.recurrent[own], self.conv[own])

    def put(self, new: "DeltaState") -> "DeltaState":
        """With ``new`` for the rows that it stands for."""
        return DeltaState(self.placed(self.recurrent, new.recurrent), self.placed(self.conv, new.conv), self.rows)

    def placed(self, held, new):
        """``new`` [b, …] where this state's rows are in ``held`` [all rows, …]."""
        return new if self.rows is None else held.at[self.rows].set(new, mode="drop")

    def cleared(self) -> "DeltaState":
        return self.put(jax.tree.map(jnp.zeros_like, self.taken()))

    def all_rows(self) -> jax.Array:
        """int32 [b]: what ``rows`` says."""
        return jnp.arange(self.recurrent.shape[0], dtype=jnp.int32) if self.rows is None else self.rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRecord:
    """What T tokens would do to a `DeltaState`: k [B, T, G, Dk], delta [B, T, G, R, Dv], log_decay [B, T, G, R]
    (float32) and the convolution inputs conv [B, T, G, C]. Token j depends on tokens before it only, so any prefix may
    be kept."""

    k: jax.Array
    delta: jax.Array
    log_decay: jax.Array
    conv: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVRecord:
    """Keys and values of T tokens, [B, T, K, D]."""

    k: jax.Array
    v: jax.Array


def replay(state: DeltaState, record: DeltaRecord, n) -> DeltaState:
    """The state after the first n [B] recorded tokens, 0 ≤ n ≤ T: S·e^{c_n} + Σ_{j<n} e^{c_n - c_j} k_j ⊗ δ_j, c =
    cumsum(g)."""
    forms = {"default": lambda state, *rest: state.put(replay_plain(state.taken(), *rest))}
    if backend.are_wanted():
        from dflash_jax.ops.kernels.triton import delta as triton_delta

        if triton_delta.fits(record.k.shape[1], state):
            forms["cuda"] = lambda *args: DeltaState(*triton_delta.replay_triton(*args), state.rows)
    if cpu.mixes(state) and backend.for_cpu():
        forms["cpu"] = lambda *args: DeltaState(*cpu.replay(*args), state.rows)
    return jax.lax.platform_dependent(state, record, n, **forms)


def replay_plain(state: DeltaState, record: DeltaRecord, n) -> DeltaState:
    """`replay` by XLA, of a state that stands for all of its rows."""
    t = record.k.shape[1]
    kept = jnp.arange(t)[None] < n[:, None]
    decay = jnp.where(kept[..., None, None], record.log_decay, 0.0)
    # Summed from the end: a difference of two sums would be off by the roundings of the larger one.
    after = jax.lax.cumsum(jnp.pad(decay, [(0, 0), (0, 1), (0, 0), (0, 0)]), axis=1, reverse=True)
    total, rest = after[:, 0], after[:, 1:]
    # Selected, never multiplied by zero: what was not kept may hold anything.
    delta = jnp.where(kept[..., None, None, None], record.delta * jnp.exp(rest)[..., None], 0.0)
    k = jnp.where(kept[..., None, None], record.k, 0.0)
    added = jnp.einsum("btgk,btgrv->bgrkv", k, delta)
    recurrent = state.recurrent * jnp.exp(total)[..., None, None] + added
    return DeltaState(recurrent, last_inputs(state.conv, record.conv, n))


def last_inputs(conv, fresh, n):
    """The last inputs of the convolution, as ``conv`` [B, kernel - 1, G, C] has them, after the first n [B] of the
    ``fresh`` [B, T, G, C]."""
    window = jnp.concatenate([conv, fresh.astype(conv.dtype)], axis=1)
    taken = n[:, None] + jnp.arange(conv.shape[1])[None]
    return jnp.take_along_axis(window, taken[..., None, None], axis=1)


def commit_layer(cache, record, start, n):
    """One layer's cache after the first n [B] recorded tokens, which stand at positions start [B] onwards. A layer that
    was given n brings its state, which is already that."""
    if isinstance(record, DeltaState):
        return record
    if isinstance(cache, DeltaState):
        return replay(cache, record, n)
    steps = jnp.arange(record.k.shape[1])[None]
    return cache.write(record.k, record.v, start[:, None] + steps, steps < n[:, None])
