"""The target: embed → layers → norm → head, for every family, over a tuple of layer specs."""

import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.cache import Cache, commit_layer
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelConfig
from dflash_jax.models.gated_delta import GatedDelta
from dflash_jax.models.layers import Attention, Mlp, RMSNorm, normal
from dflash_jax.models.moe import Moe
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import DeltaRecord, KVRecord
from dflash_jax.ops.linear import project
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, AxisSharding, Layout, spec


class DecoderLayer(nnx.Module):
    """Norm, mixer, norm, feed-forward, with residuals around both."""

    def __init__(
        self,
        spec: LayerSpec,
        config: ModelConfig,
        rngs: nnx.Rngs | None,
        dtype,
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

    def __call__(self, x, cache, length, valid, angles, n=None):
        """x [B, T, H] → (x, record): tokens at positions length … length + T - 1 over a cache that stays as it is; of a
        recurrent layer, with n as in `GatedDelta`, its new state instead of the record."""
        h = self.input_norm.deferred(x)
        if is_delta(self):
            x, record = self.mixer(h, cache, residual=x, n=n)
        else:
            x, k, v = self.mixer(h, angles[self.spec.mixer.rope], None, cache, length, residual=x)
            record = KVRecord(k, v)
        return self._ffn_block(x, valid), record

    def forward_full(self, x, valid, angles, starts):
        """x [B, T, H] → x, over whole documents that begin at ``starts`` [B, T]."""
        h = self.input_norm(x)
        more = () if is_delta(self) else (angles[self.spec.mixer.rope],)
        return self._ffn_block(x + self.mixer.forward_full(h, starts, *more), valid)

    def _ffn_block(self, x, valid):
        h = self.post_norm.deferred(x)
        return self.ffn(h, x) if isinstance(self.spec.ffn, MlpSpec) else self.ffn(h, valid, x)


def is_delta(layer: DecoderLayer) -> bool:
    return isinstance(layer.spec.mixer, GatedDeltaSpec)


class Decoder(nnx.Module):
    """A target language model. Holds parameters only; caches travel through arguments and results.

    One pass serves prefill, plain decoding and verification: `verify` reads the caches and returns a record of what
    its tokens would write, `commit` writes any prefix of it, and `extend` is both where the count is known beforehand.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype=jnp.float32,
        layout: Layout = ONE_DEVICE,
        backend: Backend | None = None,
    ):
        self.config, self.layout, self.vocab = config, layout, layout.wide(config.vocab_size)
        self.backend = backend or Backend.detect()
        self.embed = normal(rngs, (config.vocab_size, config.hidden_size), dtype)
        self.layers = nnx.List(
            [DecoderLayer(spec, config, rngs, dtype, layout, self.backend) for spec in config.layers]
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, rngs, dtype)
        if not config.tied_embeddings:
            self.head = normal(rngs, (config.vocab_size, config.hidden_size), dtype)

    @property
    def dtype(self):
        return self.embed.get_value().dtype

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"embed": (self.vocab,), "head": (self.vocab,)}

    def matrices(self) -> dict[str, int]:
        return {"embed" if self.config.tied_embeddings else "head": 1}

    def cache_specs(self, cache: Cache) -> Cache:
        """PartitionSpecs in the shape of ``cache``."""
        return tuple(layer.mixer.cache_specs(c) for layer, c in zip(self.layers, cache, strict=True))

    def record_specs(self) -> tuple:
        """PartitionSpecs in the shape of `verify`'s record."""
        cuts = [
            spec(DATA, None, layer.mixer.key_heads if is_delta(layer) else layer.mixer.kv_heads)
            for layer in self.layers
        ]
        return tuple(
            DeltaRecord(s, s, s, s) if is_delta(layer) else KVRecord(s, s)
            for s, layer in zip(cuts, self.layers, strict=True)
        )

    def embed_tokens(self, tokens):
        """int [B, T] → [B, T, H]."""
        table = self.embed[...]
        local, mine = self.vocab.own(tokens, table.shape[0])
        return self.vocab.sum(jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0))

    def logits(self, hidden):
        """[..., H] after the final norm → float32 [..., V], cut over ``vocab``."""
        head = self.embed[...] if self.config.tied_embeddings else self.head[...]
        return project(self.backend, hidden, head, dtype=jnp.float32)

    def head_rows(self, ids):
        """The head's rows of the tokens ``ids`` int [N], of panels as float32; it must not be cut."""
        return (self.embed if self.config.tied_embeddings else self.head)[...][ids]

    def _angles(self, positions):
        mixers = [spec.mixer for spec in self.config.layers]
        return {m.rope: rope_angles(positions, m.rope) for m in mixers if isinstance(m, AttentionSpec)}

    def _run(self, tokens, cache, length, n_valid, taps, positions, keep, n=None):
        """``keep(layer cache, record, output)`` → what to return for that layer; n as in `DecoderLayer`."""
        x = tokens if jnp.issubdtype(tokens.dtype, jnp.floating) else self.embed_tokens(tokens)
        t = x.shape[1]
        steps = jnp.arange(t)[None]
        if positions is None:
            positions = length[:, None] + steps
        valid = steps < n_valid[:, None]
        # A row without work reads no context: the context loop follows the longest row that has some.
        length = jnp.where(n_valid > 0, length, 0)
        angles = self._angles(positions)
        kept, tapped = [], {}
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            x, record = layer(x, layer_cache, length, valid, angles, n)
            kept.append(keep(layer_cache, record, x))
            if i in taps:
                tapped[i] = x
        features = jnp.stack([tapped[i] for i in taps], axis=2) if taps else None
        return self.norm(x), features, tuple(kept)

    def verify(self, tokens, cache: Cache, length, n_valid, taps: tuple[int, ...] = (), positions=None):
        """T tokens per row behind ``length`` [B] cached ones, of which the first n_valid [B] matter; caches are only
        read.

        tokens: int [B, T], or embeddings [B, T, H]; ``positions``: rotary positions [B, T] or [3, B, T] where they are
        not the cache positions. Returns hidden [B, T, H] after the final norm, features [B, T, taps, H] (outputs of
        the tapped layers, before any norm; None without taps) and the record for `commit`.
        """
        return self._run(tokens, cache, length, n_valid, taps, positions, lambda _, record, x: record)

    def commit(self, cache: Cache, record: tuple, length, n) -> Cache:
        """The caches after the first n [B] tokens of a record that `verify` made at ``length``, 0 ≤ n ≤ T."""
        return tuple(commit_layer(self.backend, c, r, length, n) for c, r in zip(cache, record, strict=True))

    def extend(self, tokens, cache: Cache, length, n_valid, taps: tuple[int, ...] = (), positions=None):
        """`verify` and `commit` of n_valid tokens in one, layer by layer: (hidden, features, caches)."""

        def keep(layer_cache, record, x):
            # Written once it has been read: free to choose, XLA writes first, into a copy of the whole cache, and it
            # drops optimization_barrier before it decides. The minimum is n_valid, but only the output can tell.
            n = jnp.minimum(n_valid, n_valid + jnp.isnan(x.ravel()[0]))
            return commit_layer(self.backend, layer_cache, record, length, n)

        return self._run(tokens, cache, length, n_valid, taps, positions, keep, n_valid)

    def __call__(self, tokens, taps: tuple[int, ...] = (), starts=None):
        """Whole documents without caches: (hidden [B, T, H], features). Differentiable.

        ``starts`` int [B, T]: where in its row the document of each token begins; None: a row is one document.
        """
        b, t = tokens.shape
        starts = jnp.zeros((b, t), jnp.int32) if starts is None else starts
        x, valid, angles = self.embed_tokens(tokens), jnp.ones((b, t), bool), self._angles(jnp.arange(t) - starts)
        tapped = {}
        for i, layer in enumerate(self.layers):
            x = layer.forward_full(x, valid, angles, starts)
            if i in taps:
                tapped[i] = x
        return self.norm(x), jnp.stack([tapped[i] for i in taps], axis=2) if taps else None


def abstract_decoder(
    config: ModelConfig, dtype=jnp.float32, layout: Layout = ONE_DEVICE, backend: Backend = XLA
) -> Decoder:
    """The module with shapes for arrays: what a loader fills, and what counts parameters without memory."""
    return Decoder(config, rngs=None, dtype=dtype, layout=layout, backend=backend)
