"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion transformer that reads the target's hidden features.

DFlash2 adds convolutions within the block and a selector of drafts, DSpark (arXiv 2607.05147) a Markov head, which is a
selector too, and a head for the drafts' probabilities.

It fills a block ``[last token, MASK, …]`` in one pass. In each layer the keys and values of the context are projections
of the target's features, not of the drafter's hidden states. Queries, output projection and MLP see the block alone.

Dimension letters: B sequences, T tokens of a block or of an extension, V vocabulary, H hidden size, K KV heads, D head
size.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.config import ConvSpec, DraftConfig, DraftLayerSpec
from dflash_jax.models.drafting import NO_WINDOW, ContextTokens, DraftCache, DraftWindow, Proposal, TargetHeads
from dflash_jax.models.layers import Attention, Mlp, RMSNorm, constant, look_up, normal, parameter
from dflash_jax.models.rope import Angles, rope_angles
from dflash_jax.models.selector import Selector
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.block_convolution import block_convolution, convolve
from dflash_jax.ops.cache import Bounds, KVCache
from dflash_jax.ops.cache_write import write
from dflash_jax.ops.linear import logits, project
from dflash_jax.ops.weights import QuantizedWeight, Weight
from dflash_jax.parallel.sharding import ONE_DEVICE, UNSHARDED, AxisSharding, Layout


class DraftVocabulary(nnx.Module):
    """A subset of the vocabulary that is drafted from.

    Rare tokens are seldom drafted correctly, and a head over all tokens is much of what a drafter reads (as in
    FR-Spec, arXiv 2502.14856).

    Attributes:
        ids: Token ids, int32 [N], ascending.
        head: The rows of the head for them, [N, H], in few bits where the head is.
        backend: Where operations run.
    """

    def __init__(self, ids: Int[Array, " N"], head: Weight, backend: Backend):
        self.ids, self.head, self.backend = nnx.Param(ids), nnx.Param(head), backend

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"head": 1}

    def logits(self, hidden: Float[Array, "*B H"]) -> Float[Array, "*B N"]:
        """Hidden states [..., H] after the final norm → float32 [..., N]."""
        return logits(self.backend, hidden, self.head[...])


class BlockConvolution(nnx.Module):
    """DFlash2's convolutions around a sublayer: each place of a block reads itself and the places before it.

    The coefficients of both convolutions, before and after the sublayer, are projections of the sublayer's input; a
    group of channels shares one, beside a coefficient of each channel that is the same for all places.

    Attributes:
        backend: Where operations run.
        base: Coefficients of all places, [2, taps, H].
        projection: Projection of the input to the others, [2, taps, H / group, H].
    """

    def __init__(
        self,
        spec: ConvSpec,
        hidden: int,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        backend: Backend,
    ):
        self.backend = backend
        # The identity at first: a drafter that gets convolutions drafts as before.
        shape = (2, spec.taps, hidden)
        self.base = parameter(rngs, shape, dtype, lambda _: jnp.zeros(shape).at[:, 0].set(1.0))
        self.projection = constant(rngs, (2, spec.taps, hidden // spec.group, hidden), dtype, 0.0)

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"projection": 1}

    def around(
        self, x: Float[Array, "*B W H"], norm: RMSNorm, sublayer: Callable[[Array], Array]
    ) -> Float[Array, "*B W H"]:
        """X plus the sublayer's output, with both convolutions.

        Args:
            x: Hidden states, [..., W, H].
            norm: The norm before the sublayer.
            sublayer: Attention or the MLP, [..., W, H] → [..., W, H].

        Returns:
            [..., W, H].
        """
        before, after = self.base[...]
        convolved, own = block_convolution(self.backend, norm.deferred(x), self.projection[...], before)
        return x + convolve(sublayer(convolved), after, own)


class DraftLayer(nnx.Module):
    """A layer of the drafter: attention over context and block, and an MLP.

    Attributes:
        spec: Its configuration.
        input_norm: Norm before attention.
        post_norm: Norm before the MLP.
        mixer: Attention.
        ffn: The MLP.
        attention_conv: Convolutions around attention; absent without them.
        mlp_conv: Convolutions around the MLP.
    """

    def __init__(
        self,
        spec: DraftLayerSpec,
        config: DraftConfig,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout,
        backend: Backend,
    ):
        self.spec = spec
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.mixer = Attention(spec.attention, config.hidden_size, config.norm_eps, 0.0, rngs, dtype, layout, backend)
        self.ffn = Mlp(spec.intermediate_size, config.hidden_size, rngs, dtype, layout, backend)
        self.has_conv = config.conv is not None
        if config.conv is not None:
            self.attention_conv = BlockConvolution(config.conv, config.hidden_size, rngs, dtype, backend)
            self.mlp_conv = BlockConvolution(config.conv, config.hidden_size, rngs, dtype, backend)

    def block_mask(self, block_sizes: Int[Array, " B"], size: int) -> Bool[Array, "B T T"]:
        """Which places of a block see one another.

        Args:
            block_sizes: Places in use, int [B].
            size: T, places of the block.

        Returns:
            bool [B, T, T], query before key.
        """
        query, key = jnp.arange(size)[:, None], jnp.arange(size)[None]
        mask = key <= query if self.spec.causal else jnp.ones((size, size), bool)
        if self.spec.window is not None:
            mask = mask & (jnp.abs(query - key) < self.spec.window)
        # An unused place sees itself, so that its softmax is defined.
        return mask & ((key < block_sizes[:, None, None]) | (key == query))

    def bounds(self, positions: Int[Array, "B T"], start: Int[Array, " B"], window: DraftWindow) -> Bounds:
        """The part of the context that queries see.

        Args:
            positions: Positions of the queries, int [B, T].
            start: Tokens of the context, int [B].
            window: The drafter's window.

        Returns:
            The bounds.
        """
        bounds = window.bounds(start, positions.shape[1])
        if self.spec.window is None:
            return bounds
        return replace(bounds, first=jnp.maximum(bounds.first, positions - self.spec.window + 1))

    def __call__(
        self,
        x: Float[Array, "B T H"],
        mask: Bool[Array, "B T T"],
        angles: Angles,
        cache: KVCache | None,
        start: Int[Array, " B"],
        bounds: Bounds,
    ) -> Float[Array, "B T H"]:
        """One block.

        Args:
            x: Hidden states, [B, T, H].
            mask: From `block_mask`.
            angles: `RopeSpec` → cos and sin of the positions.
            cache: Keys and values of the context.
            start: Tokens of the context, int [B].
            bounds: From `bounds`.

        Returns:
            [B, T, H].
        """
        angle = angles[self.spec.attention.rope]
        if not self.has_conv:
            h = self.input_norm.deferred(x)
            x, _, _ = self.mixer(h, angle, mask, cache, start, bounds, residual=x)
            return self.ffn(self.post_norm.deferred(x), x)
        return self.separately(x, lambda h: self.mixer(h, angle, mask, cache, start, bounds)[0], self.ffn)

    def separately(
        self, x: Float[Array, "*B W H"], attend: Callable[[Array], Array], ffn: Callable[[Array], Array]
    ) -> Float[Array, "*B W H"]:
        """The layer from its parts, with nothing fused: norms, convolutions and sums around both sublayers.

        Args:
            x: Hidden states of blocks, [..., W, H].
            attend: Attention, [..., W, H] → [..., W, H].
            ffn: The MLP, likewise.

        Returns:
            [..., W, H].
        """
        if not self.has_conv:
            x = x + attend(self.input_norm(x))
            return x + ffn(self.post_norm(x))
        x = self.attention_conv.around(x, self.input_norm, attend)
        return self.mlp_conv.around(x, self.post_norm, ffn)


class Drafter(nnx.Module):
    """DFlash drafter; implements `Drafting`. It holds parameters only; callers hold the cache.

    Attributes:
        config: Its configuration.
        features: How the hidden size is divided over devices in ``fc``.
        vocab: How the vocabulary is divided in ``embed`` and ``head``.
        backend: Where operations run.
        fc: Projection of the tapped features to the context, [H, taps, H].
        hidden_norm: Norm of the context.
        layers: The layers.
        norm: Final norm.
        embed: Its own embeddings, [V, H]; absent where it uses the target's.
        head: Its own head, [V, H], or of the tokens ``head_ids`` only, [N, H]; absent where it uses the target's.
        head_ids: The tokens of its head, int32 [N], ascending; absent where these are all.
        mask: Embedding of the places of the drafts, [H]; absent where that is the mask token's.
        selector: What chooses drafts from candidates; absent where each place takes its own best token.
        confidence: Weights of the drafts' probabilities, [1, H] or, with the token before each, [1, H + R]; absent
            without such a head.
        confidence_bias: [1].
        vocabulary: The tokens that are drafted; None for all that its own head has. A reduced head that is not its own
            is one of these, with rows of the target's.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike = jnp.float32,
        layout: Layout = ONE_DEVICE,
        backend: Backend | None = None,
    ):
        self.config, self.features = config, layout.wide(config.hidden_size)
        self.vocab = layout.wide(config.vocab_size)
        self.backend = backend or Backend.detect()
        self.fc = normal(rngs, (config.hidden_size, len(config.target_layer_ids), config.hidden_size), dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        self.layers = nnx.List([DraftLayer(spec, config, rngs, dtype, layout, self.backend) for spec in config.layers])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, 0.0, rngs, dtype)
        hidden, vocab, drafted = config.hidden_size, config.vocab_size, config.draft_vocab_size
        if config.own_embedding:
            self.embed = normal(rngs, (vocab, hidden), dtype)
        if config.own_head:
            self.head = normal(rngs, (drafted or vocab, hidden), dtype)
        if drafted is not None:
            self.head_ids = parameter(rngs, (drafted,), jnp.int32, lambda _: jnp.arange(drafted))
        if config.own_mask:
            self.mask = normal(rngs, (hidden,), dtype)
        if config.selector is not None:
            spec = config.selector
            self.selector = Selector(spec, hidden, vocab, drafted or vocab, rngs, dtype, self.backend)
        if config.confidence is not None:
            rank = 0 if config.confidence == "state" or config.selector is None else config.selector.rank
            self.confidence = normal(rngs, (1, hidden + rank), dtype)
            self.confidence_bias = constant(rngs, (1,), dtype, 0.0)
        self.vocabulary: DraftVocabulary | None = nnx.data(None)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        # Draws from some tokens only need all of them.
        head = self.vocab if self.config.draft_vocab_size is None else UNSHARDED
        return {"fc": (self.features,), "embed": (self.vocab,), "head": (head,)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"fc": 2} | ({"head": 1} if self.config.own_head else {})

    @property
    def taps(self) -> tuple[int, ...]:
        """As `Drafting.taps`."""
        return self.config.target_layer_ids

    def init_cache(
        self, slots: int, capacity: int, dtype: DTypeLike, window: DraftWindow = NO_WINDOW
    ) -> tuple[KVCache, ...]:
        """As `Drafting.init_cache`.

        The cache of a layer that sees a bounded part of the context has a window.
        """
        size, sinks = window.size, window.sinks
        assert not isinstance(size, jax.Array)
        assert not isinstance(sinks, jax.Array)

        def cache(layer: DraftLayer) -> KVCache:
            spec = layer.spec
            bounds = [w for w in (spec.window, size) if w is not None]
            heads, dim, last = spec.attention.num_kv_heads, spec.attention.head_dim, min(bounds, default=None)
            first = 0 if size is None else sinks
            kv_dtype = layer.mixer.kv_dtype(dtype)
            return KVCache.create(slots, heads, dim, capacity, kv_dtype, last, first, layer.mixer.positions)

        return tuple(cache(layer) for layer in self.layers)

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """As `Drafting.cache_specs`."""
        return tuple(layer.mixer.cache_specs(c) for layer, c in zip(self.layers, cache, strict=True))

    def heads(self, target: TargetHeads) -> TargetHeads:
        """``target`` with the drafter's own embedding and head, where it has them, in place of the target's."""
        if self.config.own_embedding:
            target = replace(target, embed=lambda tokens: look_up(self.embed[...], tokens, self.vocab))
        if self.config.own_head:
            head = self.head_weight
            target = replace(target, logits=lambda hidden: logits(self.backend, hidden, head))
        return target

    @property
    def head_weight(self) -> Weight:
        """Its own head, [V, H] or [N, H]."""
        return self.head[...]

    def head_rows(self, ids: Int[Array, " N"]) -> Array | QuantizedWeight:
        """The own head's rows of the tokens ``ids``, as `Decoder.head_rows`."""
        vocab = self.vocab if self.config.draft_vocab_size is None else UNSHARDED
        return look_up(self.head_weight, self._rows(ids)[None], vocab)[0]

    def _rows(self, tokens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The rows of the tokens in the own head, and among the selector's successors."""
        if self.config.draft_vocab_size is None:
            return tokens
        return jnp.minimum(jnp.searchsorted(self.head_ids[...], tokens), self.config.draft_vocab_size - 1)

    def context(self, features: Float[Array, "B T taps H"]) -> Float[Array, "B T H"]:
        """The context that every layer's keys and values read.

        Args:
            features: Outputs of the tapped layers, [B, T, taps, H].

        Returns:
            [B, T, H].
        """
        joined = project(self.backend, features.astype(self.fc[...].dtype), self.fc[...], 2)
        return self.hidden_norm(self.features.gather(joined, -1))

    def _angles(self, positions: Int[Array, "B T"]) -> Angles:
        """`RopeSpec` → cos and sin of ``positions``, of every layer."""
        return {spec.attention.rope: rope_angles(positions, spec.attention.rope) for spec in self.config.layers}

    def context_keys_values(
        self, features: Float[Array, "B T taps H"], positions: Int[Array, "B T"]
    ) -> list[tuple[Float[Array, "B T K D"], Float[Array, "B T K D"]]]:
        """Keys and values of context tokens.

        Args:
            features: Outputs of the tapped layers, [B, T, taps, H].
            positions: int [B, T].

        Returns:
            (k, v) of every layer, [B, T, K, D] each.
        """
        context, angles = self.context(features), self._angles(positions)
        return [layer.mixer.keys_values(context, angles[layer.spec.attention.rope]) for layer in self.layers]

    def extend(self, cache: DraftCache, new: ContextTokens) -> DraftCache:
        """As `Drafting.extend`. Reads features, positions and ``valid``."""
        assert new.features is not None
        pairs = self.context_keys_values(new.features, new.positions)
        pairs = [layer.mixer.as_cached(*pair) for layer, pair in zip(self.layers, pairs, strict=True)]
        return tuple(
            write(self.backend, c, k, v, new.positions, new.valid) for c, (k, v) in zip(cache, pairs, strict=True)
        )

    def block(
        self,
        embedded: Float[Array, "B T H"],
        cache: DraftCache,
        start: Int[Array, " B"],
        block_sizes: Int[Array, " B"],
        window: DraftWindow = NO_WINDOW,
    ) -> Float[Array, "B T H"]:
        """Hidden states of a block.

        Args:
            embedded: Embeddings of its tokens, [B, T, H].
            cache: Keys and values of the positions before ``start``.
            start: Position of its first token, int [B].
            block_sizes: Places in use, int [B].
            window: The part of the context that is seen.

        Returns:
            [B, T, H], after the final norm.
        """
        size = embedded.shape[1]
        positions = start[:, None] + jnp.arange(size)[None]
        angles = self._angles(positions)
        x = embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            bounds = layer.bounds(positions, start, window)
            x = layer(x, layer.block_mask(block_sizes, size), angles, layer_cache, start, bounds)
        return self.norm(x)

    def propose(
        self,
        cache: DraftCache,
        last: Int[Array, " B"],
        start: Int[Array, " B"],
        block_sizes: Int[Array, " B"],
        size: int,
        heads: TargetHeads,
        window: DraftWindow = NO_WINDOW,
    ) -> Proposal:
        """As `Drafting.propose`."""
        heads, config = self.heads(heads), self.config
        hidden = self._draft_states(heads, cache, last, start, block_sizes, size, window)
        positions = start[:, None] + 1 + jnp.arange(hidden.shape[1])[None]
        if self.vocabulary is not None:
            logits, ids = self.vocabulary.logits(hidden), self.vocabulary.ids[...]
        else:
            assert config.own_head or config.draft_vocab_size is None, "a reduced head has the target's rows"
            logits, ids = heads.logits(hidden), None if config.draft_vocab_size is None else self.head_ids[...]
        logits = self.scaled(logits)
        if config.selector is None:
            tokens, scores = heads.draw_drafts(logits, positions, ids)
        else:
            candidates = heads.candidates(logits, positions, config.selector.top_k, ids)
            tokens, scores = self.selector.choose(hidden, last, candidates, self._rows(candidates.tokens))
        if config.confidence is not None:
            scores = self.probabilities(hidden, jnp.concatenate([last[:, None], tokens[:, :-1]], axis=1))
        # A shifted block has no more drafts than its trained size.
        missing = [(0, 0), (0, size - 1 - hidden.shape[1])]
        return Proposal(jnp.pad(tokens, missing), scores=None if scores is None else jnp.pad(scores, missing))

    def _draft_states(
        self,
        heads: TargetHeads,
        cache: DraftCache,
        last: Int[Array, " B"],
        start: Int[Array, " B"],
        block_sizes: Int[Array, " B"],
        size: int,
        window: DraftWindow,
    ) -> Float[Array, "B drafts H"]:
        """Final hidden states of the places that draft, ``size`` - 1 at most; arguments as of `propose`."""
        config = self.config
        # A shifted block of another size than the trained one drafts worse: its layers are bidirectional.
        width = config.block_size - 1 if config.is_shifted else size
        masks = jnp.full((last.shape[0], width - 1), config.mask_token_id, last.dtype)
        embedded = heads.embed(jnp.concatenate([last[:, None], masks], axis=1))
        if config.own_mask:
            embedded = embedded.at[:, 1:].set(self.mask[...].astype(embedded.dtype))
        if not config.is_shifted:
            return self.block(embedded, cache, start, block_sizes, window)[:, 1:]
        return self.block(embedded, cache, start, jnp.full_like(block_sizes, width), window)[:, : size - 1]

    def probabilities(self, hidden: Float[Array, "*B H"], before: Int[Array, "*B"]) -> Float[Array, "*B"]:
        """The drafts' probabilities, given that those before them are right.

        Args:
            hidden: Hidden states of their places after the final norm, [..., H].
            before: The tokens before them, int [...].

        Returns:
            float32 [...].
        """
        features = hidden.astype(jnp.float32)
        if self.config.confidence == "state and token":
            rows = self.selector.predecessor[...][before].astype(jnp.float32)
            features = jnp.concatenate([features, rows], axis=-1)
        logits = features @ self.confidence[0].astype(jnp.float32) + self.confidence_bias[0].astype(jnp.float32)
        return jax.nn.sigmoid(logits)

    def scaled(self, logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        """Logits float32 [..., V] of the head with the configuration's factor and cap."""
        config = self.config
        logits = logits if config.output_multiplier == 1 else logits * config.output_multiplier
        return logits if not config.logit_cap else config.logit_cap * jnp.tanh(logits / config.logit_cap)
