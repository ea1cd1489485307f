"""What a drafter is: the interface that the decoding loop calls.

Dimension letters: B sequences, T tokens of a block or of an extension, V vocabulary, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.argument_checks import wrong
from dflash_jax.ops.cache import Bounds

# `Drafter` has a KVCache for each layer. Other drafters may hold any arrays whose first dimension is the slots.
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

    def bounds(self, start: Int[Array, " B"], size: int) -> Bounds:
        """The window as bounds of attention.

        Args:
            start: Tokens of the context, int [B].
            size: T, queries of each sequence.

        Returns:
            The bounds of all queries.
        """
        first = jnp.broadcast_to(jnp.asarray(self.first).reshape(-1, 1), (len(start), size))
        recent = sinks = jnp.zeros_like(start)
        if self.size is not None:
            recent, sinks = start - self.size, jnp.broadcast_to(jnp.asarray(self.sinks), start.shape)
        return Bounds(first, recent, sinks)


NO_WINDOW = DraftWindow()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextTokens:
    """Verified tokens that join a drafter's context.

    Attributes:
        tokens: Token ids, int [B, T].
        embeddings: What the target read for them: their embeddings or, at an image's place, the image's, [B, T, H].
        features: Outputs of the tapped layers before any norm, [B, T, taps, H]; None without taps.
        positions: Positions in the caches, int [B, T], ascending by one.
        rotary: Rotary positions, int [B, T] or [3, B, T] (time, height, width).
        valid: Which of them join, bool [B, T]: the first ones of each sequence, or none.
    """

    tokens: Int[Array, "B T"]
    embeddings: Float[Array, "B T H"]
    features: Float[Array, "B T taps H"] | None
    positions: Int[Array, "B T"]
    rotary: Int[Array, "B T"] | Int[Array, "3 B T"]
    valid: Bool[Array, "B T"]


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens.

    Attributes:
        tokens: For the positions after the last known token, int [B, T - 1].
        parents: For drafters that propose trees; None for a chain.
        scores: The drafter's estimate of each draft's probability, given that those before it are right, float32
            [B, T - 1]; None without one.
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
        candidates: ``candidates(logits, positions, k, ids=None)`` → the `selector.Candidates` of each place: the k
            tokens that ``draw`` compares last.
        scored_draw: ``draw`` with a second result, the drafts' scores as in `Proposal`, float32 [B, T - 1]; None where
            no program reads them. A wrapper that replaces ``draw`` sets this to None.
    """

    embed: Callable[..., Array]
    logits: Callable[..., Array]
    draw: Callable[..., Array]
    candidates: Callable[..., Any]
    scored_draw: Callable[..., tuple[Array, Array | None]] | None = None

    def draw_drafts(
        self, logits: Float[Array, "B drafts V"], positions: Int[Array, "B drafts"], ids: Int[Array, " V"] | None = None
    ) -> tuple[Int[Array, "B drafts"], Float[Array, "B drafts"] | None]:
        """``draw``, and the drafts' scores where somebody reads them."""
        if self.scored_draw is None:
            return self.draw(logits, positions, ids), None
        return self.scored_draw(logits, positions, ids)


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

    def extend(self, cache: DraftCache, new: ContextTokens) -> DraftCache:
        """Adds verified tokens to the cache.

        Args:
            cache: The cache.
            new: The tokens. A token may come again, at its position and with the same values.

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


def check_complete(drafter: Any) -> None:
    """Raises InputError for what has a method ``propose`` and not all of `Drafting`."""
    missing = [name for name in vars(Drafting) if not (name.startswith("_") or hasattr(drafter, name))]
    if isinstance(drafter, type) and hasattr(drafter, "propose"):
        raise wrong("draft", drafter, f"an object: {drafter.__name__}(...)")
    if missing and hasattr(drafter, "propose"):
        raise wrong("draft", drafter, f"a drafter, which has {', '.join(missing)} too (see `Drafting`)")


@dataclass(frozen=True)
class DrafterWrapper:
    """Delegates `Drafting` to another drafter; a subclass overrides what it changes, usually `propose`.

    It has the inner drafter's ``config``, if any: its block size, its passes and the acceptance on record.

    A subclass is a frozen dataclass under `jax.tree_util.register_dataclass`, so that it passes through jit.

    Attributes:
        drafter: The inner drafter, with its parameters.
    """

    drafter: Drafting

    @property
    def config(self) -> Any:
        """The inner drafter's; None where it has none."""
        return getattr(self.drafter, "config", None)

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

    def extend(self, cache: DraftCache, new: ContextTokens) -> DraftCache:
        """As `Drafting.extend`."""
        return self.drafter.extend(cache, new)

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafters:
    """Several drafters of one target as one: the contexts of all are kept, and one of them proposes.

    Attributes:
        drafters: The drafters.
        proposing: Index of the one that proposes.
        extending: Indices of those whose contexts `extend` extends; None for all.
    """

    drafters: tuple[Drafting, ...]
    proposing: int = field(default=0, metadata={"static": True})
    extending: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    @property
    def extended(self) -> tuple[int, ...]:
        """Indices of the drafters whose contexts `extend` extends."""
        return tuple(range(len(self.drafters))) if self.extending is None else self.extending

    @property
    def taps(self) -> tuple[int, ...]:
        """As `Drafting.taps`: those of all drafters whose contexts are extended, each once."""
        return tuple(sorted({tap for i in self.extended for tap in self.drafters[i].taps}))

    def init_cache(self, slots: int, capacity: int, dtype: DTypeLike, window: DraftWindow = NO_WINDOW) -> DraftCache:
        """As `Drafting.init_cache`: a cache for each drafter."""
        return tuple(drafter.init_cache(slots, capacity, dtype, window) for drafter in self.drafters)

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """As `Drafting.cache_specs`."""
        return tuple(drafter.cache_specs(part) for drafter, part in zip(self.drafters, cache, strict=True))

    def extend(self, cache: DraftCache, new: ContextTokens) -> DraftCache:
        """As `Drafting.extend`: the caches of all drafters that are `extending` get the tokens."""
        return tuple(
            drafter.extend(part, replace(new, features=features_of(drafter.taps, new.features, self.taps)))
            if i in self.extended
            else part
            for i, (drafter, part) in enumerate(zip(self.drafters, cache, strict=True))
        )

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
        """As `Drafting.propose`, by the drafter that proposes."""
        i = self.proposing
        return self.drafters[i].propose(cache[i], last, start, block_sizes, size, heads, window)


def features_of(
    wanted: tuple[int, ...], features: Float[Array, "B T taps H"] | None, taps: tuple[int, ...]
) -> Float[Array, "B T wanted H"] | None:
    """Of the features of ``taps``, those of the taps ``wanted``; None for none."""
    if features is None or not wanted:
        return None
    if wanted == taps:
        return features
    return jnp.stack([features[:, :, taps.index(tap)] for tap in wanted], axis=2)


def contexts_by_need(drafter: Drafting | None) -> tuple[Drafting | None, Drafting | None]:
    """``drafter`` with the context that its next proposal reads, and with the others, each None where there is none."""
    if not isinstance(drafter, Drafters):
        return drafter, None
    others = tuple(i for i in drafter.extended if i != drafter.proposing)
    return replace(drafter, extending=(drafter.proposing,)), replace(drafter, extending=others) if others else None


def together(drafters: Sequence[Drafting]) -> Drafting | None:
    """The drafters of one target as one; None for none."""
    return Drafters(tuple(drafters)) if len(drafters) > 1 else next(iter(drafters), None)


def proposing(drafter: Drafting | None, index: int | None, is_alone: bool = False) -> Drafting | None:
    """``drafter`` with one of several as the one that proposes.

    Args:
        drafter: The drafter, or several of them as one.
        index: Which of them proposes; None for none.
        is_alone: Whether its context is the only one that is extended.

    Returns:
        None where ``index`` is None.
    """
    if index is None or not isinstance(drafter, Drafters):
        return None if index is None else drafter
    return replace(drafter, proposing=index, extending=(index,) if is_alone else None)


def proposer(drafter: Drafting) -> int:
    """The index of the one that proposes: 0 where there are not several."""
    return drafter.proposing if isinstance(drafter, Drafters) else 0


def num_drafters(drafter: Drafting | None) -> int:
    """The number of drafters that ``drafter`` is."""
    return len(drafter.drafters) if isinstance(drafter, Drafters) else int(drafter is not None)


def extended_contexts(drafter: Drafting | None) -> tuple[int, ...]:
    """The indices of the drafters whose contexts ``drafter`` extends."""
    if isinstance(drafter, Drafters):
        return drafter.extended
    return () if drafter is None else (0,)
