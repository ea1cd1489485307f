"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion transformer that reads the target's hidden features.

It fills a block ``[last token, MASK, …]`` in one pass. In each layer the keys and values of the context come from the
target's features, not from the drafter's own stream; only the block itself runs through queries, output projection and
MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.config import DraftConfig, DraftLayerSpec
from dflash_jax.models.layers import Attention, Mlp, RMSNorm, normal
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops import attention
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import Bounds, KVCache
from dflash_jax.ops.linear import project
from dflash_jax.parallel.sharding import ONE_DEVICE, AxisSharding, Layout

DraftCache = tuple  # one KVCache per drafter layer


@dataclass(frozen=True)
class DraftWindow:
    """Bounds the context a drafter sees to the last ``size`` positions before the block and the first ``sinks``; of
    these, to those from ``first`` on, which are the ones that its caches have.

    Numbers for all rows, or int [B] each.
    """

    size: int | jax.Array | None = None
    sinks: int | jax.Array = 0
    first: int | jax.Array = 0


NO_WINDOW = DraftWindow()


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens int [B, W - 1] for the positions behind the last known token.

    ``parents`` and ``scores`` are for drafters that propose trees or candidates; a chain leaves them None.
    """

    tokens: jax.Array
    parents: jax.Array | None = None
    scores: jax.Array | None = None


class Drafting(Protocol):
    """What the speculative loop asks of any drafter."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    def init_cache(self, rows: int, capacity: int, dtype, window: DraftWindow) -> DraftCache: ...

    def cache_specs(self, cache: DraftCache) -> DraftCache: ...

    def extend(self, cache: DraftCache, features, tokens, positions, keep) -> DraftCache: ...

    def propose(
        self, cache: DraftCache, last, start, width, slots: int, borrowed: "TargetHeads", window: DraftWindow
    ) -> Proposal: ...


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
        return self.drafter.taps

    def init_cache(self, rows: int, capacity: int, dtype, window: DraftWindow = NO_WINDOW) -> DraftCache:
        return self.drafter.init_cache(rows, capacity, dtype, window)

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        return self.drafter.cache_specs(cache)

    def extend(self, cache: DraftCache, features, tokens, positions, keep) -> DraftCache:
        return self.drafter.extend(cache, features, tokens, positions, keep)

    def propose(
        self, cache: DraftCache, last, start, width, slots: int, borrowed: "TargetHeads", window: DraftWindow
    ) -> Proposal:
        return self.drafter.propose(cache, last, start, width, slots, borrowed, window)


@dataclass(frozen=True)
class TargetHeads:
    """What a drafter without embedding and head takes from the target, and how a draft is chosen from logits.

    ``choose(logits [B, W - 1, V], positions [B, W - 1], ids=None) → int [B, W - 1]``; ``ids`` int [V]: the tokens that
    the logits are of.
    """

    embed: Callable
    logits: Callable
    choose: Callable


class DraftVocabulary(nnx.Module):
    """The only tokens that are drafted: ``ids`` int32 [N], ascending, and the target's rows ``head`` [N, H] for them.

    What is rare is hardly ever drafted right, and a head over all tokens is much of what a drafter reads (as FR-Spec
    does, arXiv 2502.14856).
    """

    def __init__(self, ids, head, backend: Backend):
        self.ids, self.head, self.backend = nnx.Param(ids), nnx.Param(head), backend

    def matrices(self) -> dict[str, int]:
        return {"head": 1}

    def logits(self, hidden):
        """[..., H] after the final norm → float32 [..., N]."""
        return project(self.backend, hidden, self.head[...], dtype=jnp.float32)


class DraftLayer(nnx.Module):
    """A layer of the drafter: attention over context and block, and an MLP."""

    def __init__(
        self,
        spec: DraftLayerSpec,
        config: DraftConfig,
        rngs: nnx.Rngs | None,
        dtype,
        layout: Layout,
        backend: Backend,
    ):
        self.spec = spec
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.mixer = Attention(spec.attention, config.hidden_size, config.norm_eps, 0.0, rngs, dtype, layout, backend)
        self.ffn = Mlp(spec.intermediate_size, config.hidden_size, rngs, dtype, layout, backend)

    def block_mask(self, width, slots: int):
        """bool [B, slots, slots] or [slots, slots]: which block slots see one another; ``width`` [B] live slots a
        row."""
        query, key = jnp.arange(slots)[:, None], jnp.arange(slots)[None]
        mask = key <= query if self.spec.causal else jnp.ones((slots, slots), bool)
        if self.spec.window is not None:
            mask = mask & (jnp.abs(query - key) < self.spec.window)
        # A slot past the width still sees itself, so that its softmax is defined.
        return mask & ((key < width[:, None, None]) | (key == query))

    def bounds(self, positions, start, window: DraftWindow) -> Bounds:
        """What the queries at ``positions`` [B, T] see of a context of ``start`` [B] tokens."""
        first = jnp.broadcast_to(jnp.asarray(window.first).reshape(-1, 1), positions.shape)
        if self.spec.window is not None:
            first = jnp.maximum(first, positions - self.spec.window + 1)
        recent = sinks = jnp.zeros_like(start)
        if window.size is not None:
            recent, sinks = start - window.size, jnp.broadcast_to(jnp.asarray(window.sinks), start.shape)
        return Bounds(first, recent, sinks)

    def __call__(self, x, mask, angles, cache: KVCache | None, start, bounds: Bounds):
        h, own = self.input_norm.deferred(x), angles[self.spec.attention.rope]
        x, _, _ = self.mixer(h, own, mask, cache, start, bounds, residual=x)
        return self.ffn(self.post_norm.deferred(x), x)


class Drafter(nnx.Module):
    """DFlash drafter; implements `Drafting`. Parameters only: the context's keys and values are the caller's."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype=jnp.float32,
        layout: Layout = ONE_DEVICE,
        backend: Backend | None = None,
    ):
        self.config, self.features = config, layout.wide(config.hidden_size)
        self.backend = backend or Backend.detect()
        self.fc = normal(rngs, (config.hidden_size, len(config.target_layer_ids), config.hidden_size), dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.layers = nnx.List([DraftLayer(spec, config, rngs, dtype, layout, self.backend) for spec in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.vocabulary: DraftVocabulary | None = nnx.data(None)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"fc": (self.features,)}

    def matrices(self) -> dict[str, int]:
        return {"fc": 2}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def init_cache(self, rows: int, capacity: int, dtype, window: DraftWindow = NO_WINDOW) -> DraftCache:
        """Rings where a window bounds what a layer can see; their bytes do not grow with ``capacity``."""

        def layer(spec: DraftLayerSpec):
            bounds = [w for w in (spec.window, window.size) if w is not None]
            attention = spec.attention
            return KVCache.create(
                rows,
                attention.num_kv_heads,
                attention.head_dim,
                capacity,
                dtype,
                window=min(bounds) if bounds else None,
                sinks=window.sinks if window.size is not None else 0,
            )

        return tuple(layer(spec) for spec in self.config.layers)

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """PartitionSpecs in the shape of ``cache``."""
        return tuple(layer.mixer.cache_specs(c) for layer, c in zip(self.layers, cache, strict=True))

    def context(self, features):
        """Tapped features [B, T, taps, H] → the context stream H_t [B, T, H] that every layer's keys and values
        read."""
        joined = project(self.backend, features.astype(self.fc[...].dtype), self.fc[...], 2)
        return self.hidden_norm(self.features.gather(joined, -1))

    def _angles(self, positions):
        return {spec.attention.rope: rope_angles(positions, spec.attention.rope) for spec in self.config.layers}

    def context_keys_values(self, features, positions):
        """(k, v) [B, T, K, D] of every layer for context tokens at ``positions`` [B, T]."""
        context, angles = self.context(features), self._angles(positions)
        return [layer.mixer.keys_values(context, angles[layer.spec.attention.rope]) for layer in self.layers]

    def extend(self, cache: DraftCache, features, tokens, positions, keep) -> DraftCache:
        """Adds verified tokens to the context: features [B, T, taps, H] at ``positions`` [B, T] where ``keep`` [B, T].

        ``tokens`` [B, T] are for drafters that embed the context, which this one does not.
        """
        pairs = self.context_keys_values(features, positions)
        return tuple(
            attention.write(self.backend, c, k, v, positions, keep) for c, (k, v) in zip(cache, pairs, strict=True)
        )

    def block(self, embedded, cache: DraftCache, start, width, window: DraftWindow = NO_WINDOW):
        """Hidden states [B, W, H], after the final norm, of an embedded block [B, W, H] whose first slot is position
        start [B]."""
        slots = embedded.shape[1]
        positions = start[:, None] + jnp.arange(slots)[None]
        angles = self._angles(positions)
        x = embedded
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            bounds = layer.bounds(positions, start, window)
            x = layer(x, layer.block_mask(width, slots), angles, layer_cache, start, bounds)
        return self.norm(x)

    def propose(
        self, cache: DraftCache, last, start, width, slots: int, borrowed: TargetHeads, window: DraftWindow = NO_WINDOW
    ):
        """Drafts for the positions behind ``last`` [B], the token at position start [B]; the caches hold positions <
        start.

        ``slots`` (static) is the compiled block, ``width`` [B] ≤ slots the part in use; what stands past it is
        meaningless.
        """
        masks = jnp.full((last.shape[0], slots - 1), self.config.mask_token_id, last.dtype)
        hidden = self.block(
            borrowed.embed(jnp.concatenate([last[:, None], masks], axis=1)), cache, start, width, window
        )
        positions = start[:, None] + 1 + jnp.arange(slots - 1)[None]
        if self.vocabulary is None:
            return Proposal(borrowed.choose(borrowed.logits(hidden[:, 1:]), positions))
        return Proposal(borrowed.choose(self.vocabulary.logits(hidden[:, 1:]), positions, self.vocabulary.ids[...]))


def abstract_drafter(
    config: DraftConfig, dtype=jnp.float32, layout: Layout = ONE_DEVICE, backend: Backend = XLA
) -> Drafter:
    """The module with shapes for arrays; see `decoder.abstract_decoder`."""
    return Drafter(config, rngs=None, dtype=dtype, layout=layout, backend=backend)
