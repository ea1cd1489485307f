"""The target: embed → layers → norm → head, for every family, over a tuple of layer specs.

Dimension letters: B sequences, T tokens of this call, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.cache import Cache, Record, commit
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelConfig
from dflash_jax.models.gated_delta import GatedDelta
from dflash_jax.models.layers import Attention, Mlp, RMSNorm, look_up, normal
from dflash_jax.models.moe import Moe
from dflash_jax.models.rope import Angles, rope_angles
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import DeltaRecord, DeltaState, KVCache, KVRecord
from dflash_jax.ops.linear import logits
from dflash_jax.ops.weights import QuantizedWeight, Weight
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, AxisSharding, Layout, spec

# Chooses what a pass returns for a layer: (cache, record, output) → entry.
KeepEntry = Callable[[KVCache | DeltaState, Any, Array], Any]


class DecoderLayer(nnx.Module):
    """Norm, mixer, norm, feed-forward, with residuals around both.

    Attributes:
        spec: Its configuration.
        input_norm: Norm before the mixer.
        post_norm: Norm before the feed-forward part.
        mixer: Attention or Gated DeltaNet.
        ffn: An MLP or a mixture of experts.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: ModelConfig,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout,
        backend: Backend,
    ):
        self.spec = spec
        hidden, eps, offset = config.hidden_size, config.norm_eps, config.norm_offset
        self.input_norm = RMSNorm(hidden, eps, offset, rngs, dtype)
        self.post_norm = RMSNorm(hidden, eps, offset, rngs, dtype)
        if isinstance(spec.mixer, GatedDeltaSpec):
            self.mixer = GatedDelta(spec.mixer, hidden, eps, rngs, dtype, layout, backend)
        else:
            self.mixer = Attention(spec.mixer, hidden, eps, offset, rngs, dtype, layout, backend)
        if isinstance(spec.ffn, MlpSpec):
            self.ffn = Mlp(spec.ffn.intermediate_size, hidden, rngs, dtype, layout, backend)
        else:
            self.ffn = Moe(spec.ffn, hidden, rngs, dtype, layout, backend)

    def __call__(
        self,
        x: Float[Array, "B T H"],
        cache: KVCache | DeltaState,
        length: Int[Array, " B"],
        valid: Bool[Array, "B T"],
        angles: Angles,
        n: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T H"], KVRecord | DeltaRecord | DeltaState]:
        """One pass of tokens over a cache, which is only read.

        Args:
            x: Hidden states, [B, T, H].
            cache: The layer's cache.
            length: Cached tokens, int [B]; the tokens are at positions length … length + T - 1.
            valid: Which tokens count, bool [B, T].
            angles: Rotary angles of the tokens.
            n: As in `GatedDelta`.

        Returns:
            [B, T, H], and the record. A recurrent layer that is given ``n`` returns its new state instead of a record.
        """
        h = self.input_norm.deferred(x)
        if isinstance(self.mixer, GatedDelta):
            assert isinstance(cache, DeltaState)
            x, record = self.mixer(h, cache, residual=x, n=n)
        else:
            assert isinstance(cache, KVCache)
            x, k, v = self.mixer(h, angles[self.mixer.spec.rope], None, cache, length, residual=x)
            record = KVRecord(k, v)
        return self.feed_forward(x, valid), record

    def forward_full(
        self,
        x: Float[Array, "B T H"],
        valid: Bool[Array, "B T"],
        angles: Angles,
        starts: Int[Array, "B T"],
    ) -> Float[Array, "B T H"]:
        """One pass over whole documents, without a cache.

        Args:
            x: Hidden states, [B, T, H].
            valid: Which tokens count, bool [B, T].
            angles: Rotary angles of the tokens.
            starts: First token of each token's document, int [B, T].

        Returns:
            [B, T, H].
        """
        h = self.input_norm(x)
        if isinstance(self.mixer, GatedDelta):
            return self.feed_forward(x + self.mixer.forward_full(h, starts), valid)
        return self.feed_forward(x + self.mixer.forward_full(h, starts, angles[self.mixer.spec.rope]), valid)

    def feed_forward(self, x: Float[Array, "B T H"], valid: Bool[Array, "B T"]) -> Float[Array, "B T H"]:
        """The second half of the layer: norm, feed-forward part and residual, [B, T, H] → [B, T, H]."""
        h = self.post_norm.deferred(x)
        return self.ffn(h, x) if isinstance(self.ffn, Mlp) else self.ffn(h, valid, x)


def is_delta(layer: DecoderLayer) -> bool:
    """Whether the layer is a Gated DeltaNet."""
    return isinstance(layer.spec.mixer, GatedDeltaSpec)


class Decoder(nnx.Module):
    """A target language model. It holds parameters only; caches travel through arguments and results.

    One pass serves prefill, plain decoding and verification: `verify` reads the caches and returns a record of what
    its tokens would write, `commit` writes any prefix of the record, and `extend` does both where the number of tokens
    is known beforehand.

    Attributes:
        config: Its configuration.
        layout: How it is divided over devices.
        vocab: How the vocabulary is divided.
        backend: Where operations run.
        embed: Embeddings, [V, H].
        layers: The layers.
        norm: Final norm.
        head: [V, H]; absent with tied embeddings.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike = jnp.float32,
        layout: Layout = ONE_DEVICE,
        backend: Backend | None = None,
    ):
        self.config, self.layout, self.vocab = config, layout, layout.wide(config.vocab_size)
        self.backend = backend or Backend.detect()
        for layer in config.layers:
            if isinstance(layer.mixer, AttentionSpec):
                layout.check_positions(layer.mixer.num_heads, layer.mixer.num_kv_heads)
        self.embed = normal(rngs, (config.vocab_size, config.hidden_size), dtype)
        self.layers = nnx.List(
            [DecoderLayer(spec, config, rngs, dtype, layout, self.backend) for spec in config.layers]
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, rngs, dtype)
        if not config.tied_embeddings:
            self.head = normal(rngs, (config.vocab_size, config.hidden_size), dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the embeddings and activations."""
        return self.embed.get_value().dtype

    @property
    def kv_dtype(self) -> DTypeLike:
        """Dtype of cached keys and values."""
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        return mixers[0].kv_dtype(self.dtype) if mixers else self.dtype

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        return {"embed": (self.vocab,), "head": (self.vocab,)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"embed" if self.config.tied_embeddings else "head": 1}

    def cache_specs(self, cache: Cache) -> Cache:
        """PartitionSpecs in the shape of ``cache``."""

        def of_layer(layer: DecoderLayer, cache: Any) -> Any:
            return layer.mixer.cache_specs(cache)

        return tuple(of_layer(layer, c) for layer, c in zip(self.layers, cache, strict=True))

    def record_specs(self) -> tuple[Any, ...]:
        """PartitionSpecs in the shape of the record of `verify`."""

        def of_layer(layer: DecoderLayer) -> Any:
            if isinstance(layer.mixer, GatedDelta):
                specs: list[Any] = [spec(DATA, None, layer.mixer.key_heads)] * 4
                return DeltaRecord(*specs)
            specs = [spec(DATA, None, layer.mixer.kv_heads)] * 2
            return KVRecord(*specs)

        return tuple(of_layer(layer) for layer in self.layers)

    def embed_tokens(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """Token ids int [B, T] → embeddings [B, T, H]."""
        return look_up(self.embed[...], tokens, self.vocab)

    def _embedded(self, tokens: Int[Array, "B T"] | Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """The tokens' embeddings, which may be given in their place."""
        return tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else self.embed_tokens(tokens)

    def logits(self, hidden: Float[Array, "*B H"]) -> Float[Array, "*B V"]:
        """Hidden states [..., H] after the final norm → logits float32 [..., V], divided as ``vocab``."""
        return logits(self.backend, hidden, self.head_weight)

    @property
    def head_weight(self) -> Weight:
        """The head, or the embedding that is the head, [V, H]."""
        return self.embed[...] if self.config.tied_embeddings else self.head[...]

    def head_rows(self, ids: Int[Array, " N"]) -> Array | QuantizedWeight:
        """The head's rows of the tokens ``ids`` int [N], in few bits where the head is; else float32 where packed."""
        return look_up(self.head_weight, ids[None], self.vocab)[0]

    def _angles(self, positions: Int[Array, "B T"] | Int[Array, "3 B T"]) -> Angles:
        """Rotary angles of the positions, for each `RopeSpec` of the layers."""
        mixers = [spec.mixer for spec in self.config.layers]
        return {m.rope: rope_angles(positions, m.rope) for m in mixers if isinstance(m, AttentionSpec)}

    def _run(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T H"],
        cache: Cache,
        length: Int[Array, " B"],
        n_valid: Int[Array, " B"],
        taps: Sequence[int],
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None,
        entry: KeepEntry,
        n: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T taps H"] | None, tuple[Any, ...]]:
        """The pass of `verify` and `extend`; ``entry`` makes each layer's part of the result."""
        x = self._embedded(tokens)
        t = x.shape[1]
        steps = jnp.arange(t)[None]
        if positions is None:
            positions = length[:, None] + steps
        valid = steps < n_valid[:, None]
        # A sequence without valid tokens reads no context: the loop over the context is as long as the longest one.
        length = jnp.where(n_valid > 0, length, 0)
        angles = self._angles(positions)
        entries, tapped = [], {}
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            x, record = layer(x, layer_cache, length, valid, angles, n)
            entries.append(entry(layer_cache, record, x))
            if i in taps:
                tapped[i] = x
        features = jnp.stack([tapped[i] for i in taps], axis=2) if taps else None
        return self.norm(x), features, tuple(entries)

    def verify(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T H"],
        cache: Cache,
        length: Int[Array, " B"],
        n_valid: Int[Array, " B"],
        taps: Sequence[int] = (),
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T taps H"] | None, Record]:
        """One pass of new tokens over caches, which are only read.

        Args:
            tokens: Token ids int [B, T], or embeddings [B, T, H].
            cache: The caches.
            length: Cached tokens, int [B]; the new ones follow them.
            n_valid: Number of tokens that count, int [B].
            taps: Layers whose outputs are returned.
            positions: Rotary positions, int [B, T] or [3, B, T] (time, height, width), where they are not the cache
                positions.

        Returns:
            Hidden states [B, T, H] after the final norm; features [B, T, taps, H], the outputs of the tapped layers
            before any norm (None without taps); and the record for `commit`.
        """
        return self._run(tokens, cache, length, n_valid, taps, positions, lambda _, record, x: record)

    def commit(self, cache: Cache, record: Record, length: Int[Array, " B"], n: Int[Array, " B"]) -> Cache:
        """Writes recorded tokens to the caches.

        Args:
            cache: The caches that `verify` read.
            record: Its record.
            length: Its ``length``, int [B].
            n: Tokens to write, int [B], 0 ≤ n ≤ T.

        Returns:
            The caches with the first n tokens of the record.
        """
        return commit(self.backend, cache, record, length, n)

    def extend(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T H"],
        cache: Cache,
        length: Int[Array, " B"],
        n_valid: Int[Array, " B"],
        taps: Sequence[int] = (),
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T taps H"] | None, Cache]:
        """`verify` and `commit` of n_valid tokens in one, layer by layer. Arguments as in `verify`.

        Returns:
            Hidden states and features as of `verify`, and the caches.
        """

        def commit_layer(layer_cache: Any, record: Any, x: Array) -> Any:
            # The cache must be written after it has been read. Without a dependency XLA writes first, into a copy of
            # the whole cache, and it drops optimization_barrier before it decides. The minimum is n_valid, but XLA
            # cannot see that without the output x.
            n = jnp.minimum(n_valid, n_valid + jnp.isnan(x.ravel()[0]))
            return commit(self.backend, (layer_cache,), (record,), length, n)[0]

        return self._run(tokens, cache, length, n_valid, taps, positions, commit_layer, n_valid)

    def __call__(
        self,
        tokens: Int[Array, "B T"] | Float[Array, "B T H"],
        taps: Sequence[int] = (),
        starts: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | Int[Array, "3 B T"] | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "B T taps H"] | None]:
        """One pass over whole documents, without caches. Differentiable.

        Args:
            tokens: Token ids int [B, T], or embeddings [B, T, H].
            taps: Layers whose outputs are returned.
            starts: First token of each token's document, int [B, T]; None: each sequence is one document.
            positions: Rotary positions, as in `verify`, where they are not those within the document.

        Returns:
            Hidden states and features as of `verify`.
        """
        x = self._embedded(tokens)
        b, t, _ = x.shape
        starts = jnp.zeros((b, t), jnp.int32) if starts is None else starts
        positions = jnp.arange(t) - starts if positions is None else positions
        valid, angles = jnp.ones((b, t), bool), self._angles(positions)
        tapped = {}
        for i, layer in enumerate(self.layers):
            x = layer.forward_full(x, valid, angles, starts)
            if i in taps:
                tapped[i] = x
        return self.norm(x), jnp.stack([tapped[i] for i in taps], axis=2) if taps else None


def abstract_decoder(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, layout: Layout = ONE_DEVICE, backend: Backend = XLA
) -> Decoder:
    """A target with shapes in place of arrays, for loaders to fill and for plans to count without memory."""
    return Decoder(config, rngs=None, dtype=dtype, layout=layout, backend=backend)
