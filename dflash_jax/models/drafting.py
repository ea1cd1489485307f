"""What a drafter is: the interface that the decoding loop calls.

Dimension letters: B sequences, T tokens of a block or of an extension, V vocabulary, H hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

# One entry a layer; `Drafter` has a KVCache each. Other drafters may hold any arrays.
DraftCache = tuple[Any, ...]


@dataclass(frozen=True)
class DraftWindow:
    """The part of the context that a drafter sees: the last positions before the block, and the first ones.

    Each field is a number for all sequences, or int [B].

    Attributes:
        size: Number of last positions; None is all.
        sinks: Number of first positions.
        first: First position that the drafter's cache has; earlier ones are not seen.
    """

    size: int | Int[Array, " B"] | None = None
    sinks: int | Int[Array, " B"] = 0
    first: int | Int[Array, " B"] = 0


NO_WINDOW = DraftWindow()


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Attributes:
        tokens: For the positions after the last known token, int [B, T - 1].
        parents: For drafters that propose trees; None for a chain.
        scores: For drafters that propose candidates; None for a chain.
    """

    tokens: Int[Array, "B drafts"]
    parents: jax.Array | None = None
    scores: jax.Array | None = None


@dataclass(frozen=True)
class TargetHeads:
    """The target's embedding and head, for drafters without one, and how a draft is drawn from logits.

    Attributes:
        embed: Token ids int [B, T] → embeddings [B, T, H].
        logits: Hidden states [..., H] after the final norm → logits float32 [..., V].
        draw: ``draw(logits [B, T - 1, V], positions [B, T - 1], ids=None)`` → tokens int [B, T - 1]. ``ids`` int [V]:
            the tokens of the logits, where they are not the whole vocabulary.
    """

    embed: Callable[..., Array]
    logits: Callable[..., Array]
    draw: Callable[..., Array]


@runtime_checkable
class Drafting(Protocol):
    """The interface of a drafter to the speculative loop."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs the drafter reads."""
        ...

    def init_cache(self, slots: int, capacity: int, dtype: DTypeLike, window: DraftWindow) -> DraftCache:
        """An empty cache for ``slots`` sequences of ``capacity`` positions.

        Args:
            slots: B.
            capacity: Positions of each sequence.
            dtype: Dtype of floating-point arrays.
            window: The part of the context that the drafter will see.

        Returns:
            A tuple of arrays or caches, which the loop carries.
        """
        ...

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """PartitionSpecs in the shape of ``cache``, for meshes."""
        ...

    def extend(
        self,
        cache: DraftCache,
        features: Float[Array, "B T taps H"] | None,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> DraftCache:
        """Adds verified tokens to the cache.

        Args:
            cache: The cache.
            features: Outputs of the tapped layers, [B, T, taps, H]; None without taps.
            tokens: int [B, T].
            positions: Their positions, int [B, T].
            valid: Which of them to add, bool [B, T].

        Returns:
            The cache.
        """
        ...

    def propose(
        self,
        cache: DraftCache,
        last: Int[Array, " B"],
        start: Int[Array, " B"],
        block_sizes: Int[Array, " B"],
        size: int,
        heads: TargetHeads,
        window: DraftWindow,
    ) -> Proposal:
        """Drafts the tokens after the last known one.

        Args:
            cache: The cache; it holds positions before ``start``.
            last: The last known token, int [B].
            start: Its position, int [B].
            block_sizes: Tokens of the block in use, int [B], at most ``size``. Later drafts are not read.
            size: T, the compiled block size (static): the last known token and T - 1 drafts.
            heads: The target's embedding and head.
            window: The part of the context that the drafter sees.

        Returns:
            T - 1 drafts.
        """
        ...


@dataclass(frozen=True)
class DrafterWrapper:
    """Delegates `Drafting` to another drafter; a subclass overrides what it changes, usually `propose`.

    A subclass is a frozen dataclass under `jax.tree_util.register_dataclass`, so that it passes through jit.

    Attributes:
        drafter: The inner drafter, with its parameters.
    """

    drafter: Drafting

    @property
    def taps(self) -> tuple[int, ...]:
        """As `Drafting.taps`."""
        return self.drafter.taps

    def init_cache(self, slots: int, capacity: int, dtype: DTypeLike, window: DraftWindow = NO_WINDOW) -> DraftCache:
        """As `Drafting.init_cache`."""
        return self.drafter.init_cache(slots, capacity, dtype, window)

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """As `Drafting.cache_specs`."""
        return self.drafter.cache_specs(cache)

    def extend(
        self,
        cache: DraftCache,
        features: Float[Array, "B T taps H"] | None,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        valid: Bool[Array, "B T"],
    ) -> DraftCache:
        """As `Drafting.extend`."""
        return self.drafter.extend(cache, features, tokens, positions, valid)

    def propose(
        self,
        cache: DraftCache,
        last: Int[Array, " B"],
        start: Int[Array, " B"],
        block_sizes: Int[Array, " B"],
        size: int,
        heads: TargetHeads,
        window: DraftWindow,
    ) -> Proposal:
        """As `Drafting.propose`."""
        return self.drafter.propose(cache, last, start, block_sizes, size, heads, window)
