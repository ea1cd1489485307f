"""The multi-token prediction (MTP) head of a target as a drafter: one decoder layer that predicts the token after next.

With h_t the target's hidden state at position t after the final norm, and x_{t+1} the token after it:

    u_t = fc([norm_e(embed(x_{t+1})); norm_h(h_t)]),    z_t = norm(layer(u_t)),    logits of x_{t+2} = head(z_t)

The layer attends to all u before it, at the rotary position of h_t. Further drafts recur: the next step takes the draft
and z_t in the places of x_{t+1} and h_t. The formulas are those of DeepSeek-V3 (arXiv 2412.19437, section 2.2), the
reference implementation is vLLM's `Qwen3NextMultiTokenPredictor`.

The context is the keys and values of u alone, which need no attention; u_t is stored at position t + 1, that of its
token, and rotated as t. So an extension writes exactly the positions of its tokens, and the feature of its last token
is *pending*: it waits for the token after it. Keys and values of drafts are dropped after the round.

Dimension letters: B sequences, T tokens of an extension, H hidden size, K KV heads, D head size.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.models.decoder import DecoderLayer
from dflash_jax.models.drafter import DraftVocabulary
from dflash_jax.models.drafting import NO_WINDOW, ContextTokens, DraftCache, DraftWindow, Proposal, TargetHeads
from dflash_jax.models.layers import Attention, RMSNorm, normal
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.rope import CosSin, rope_angles
from dflash_jax.ops.attention import through_gate
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.cache import KVCache
from dflash_jax.ops.cache_write import write
from dflash_jax.ops.linear import project
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, AxisSharding, Layout, spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PendingFeature:
    """The feature of the last token of the context, whose next token is not known yet.

    Attributes:
        feature: The target's last layer's output before the final norm, [B, H].
        position: Position of its token, int32 [B].
        rotary: Rotary position of its token (time, height, width), int32 [B, 3].
    """

    feature: Float[Array, "B H"]
    position: Int[Array, " B"]
    rotary: Int[Array, "B 3"]


class Mtp(nnx.Module):
    """MTP head; implements `Drafting`. It holds parameters only; callers hold the cache.

    Attributes:
        config: Its configuration.
        features: How the hidden size is divided over devices in ``fc``.
        backend: Where operations run.
        final_norm: A copy of the target's final norm.
        embed_norm: Norm of the tokens' embeddings.
        hidden_norm: Norm of the hidden states.
        fc: Projection of embedding and hidden state to the layer's input, [H, 2, H].
        layers: The one layer.
        norm: Norm of its output.
        vocabulary: The tokens that are drafted; None for all.
    """

    def __init__(
        self,
        config: MtpConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike = jnp.float32,
        layout: Layout = ONE_DEVICE,
        backend: Backend | None = None,
    ):
        target, hidden = config.target, config.hidden_size
        self.config, self.features = config, layout.wide(hidden)
        self.backend = backend or Backend.detect()

        def norm() -> RMSNorm:
            return RMSNorm(hidden, target.norm_eps, target.norm_offset, rngs, dtype)

        self.final_norm, self.embed_norm, self.hidden_norm = norm(), norm(), norm()
        self.fc = normal(rngs, (hidden, 2, hidden), dtype)
        self.layers = nnx.List([DecoderLayer(s, target, rngs, dtype, layout, self.backend) for s in config.layers])
        self.norm = norm()
        self.vocabulary: DraftVocabulary | None = nnx.data(None)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        return {"fc": (self.features,)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"fc": 2}

    @property
    def taps(self) -> tuple[int, ...]:
        """As `Drafting.taps`: the target's last layer."""
        return (len(self.config.target.layers) - 1,)

    @property
    def _mixer(self) -> Attention:
        mixer = self.layers[0].mixer
        assert isinstance(mixer, Attention)
        return mixer

    def init_cache(self, slots: int, capacity: int, dtype: DTypeLike, window: DraftWindow = NO_WINDOW) -> DraftCache:
        """As `Drafting.init_cache`: a `KVCache`, with a window where it is bounded, and a `PendingFeature`."""
        size, sinks, mixer, positions = window.size, window.sinks, self._mixer.spec, self._mixer.positions
        kv_dtype = self._mixer.kv_dtype(dtype)
        assert not isinstance(size, jax.Array)
        assert not isinstance(sinks, jax.Array)
        sinks = 0 if size is None else sinks
        context = KVCache.create(slots, mixer.num_kv_heads, mixer.head_dim, capacity, kv_dtype, size, sinks, positions)
        feature = jnp.zeros((slots, self.config.hidden_size), dtype)
        return context, PendingFeature(feature, jnp.zeros((slots,), jnp.int32), jnp.zeros((slots, 3), jnp.int32))

    def cache_specs(self, cache: DraftCache) -> DraftCache:
        """As `Drafting.cache_specs`."""
        context, pending = cache
        return self._mixer.cache_specs(context), jax.tree.map(lambda _: spec(DATA), pending)

    def _angles(self, rotary: Int[Array, "3 B T"]) -> CosSin:
        return rope_angles(rotary, self._mixer.spec.rope)

    def inputs(self, hidden: Float[Array, "B T H"], embeddings: Float[Array, "B T H"]) -> Float[Array, "B T H"]:
        """The layer's input u.

        Args:
            hidden: Hidden states after the final norm, or z of the step before, [B, T, H].
            embeddings: Those of the tokens after them, [B, T, H].

        Returns:
            [B, T, H].
        """
        dtype = self.norm.weight[...].dtype
        parts = (self.embed_norm(embeddings.astype(dtype)), self.hidden_norm(hidden.astype(dtype)))
        return self.features.gather(project(self.backend, jnp.stack(parts, axis=-2), self.fc[...], 2), -1)

    def extend(self, cache: DraftCache, new: ContextTokens) -> DraftCache:
        """As `Drafting.extend`.

        The first token has no keys and values where the feature before it is not pending: at position 0, where a
        context begins, and where it came before.
        """
        context, pending = cache
        assert new.features is not None
        size = new.positions.shape[1]
        features = jnp.concatenate([pending.feature[:, None], new.features[:, :, 0].astype(pending.feature.dtype)], 1)
        rotary = jnp.broadcast_to(new.rotary, (3, *new.positions.shape))
        rotary = jnp.concatenate([jnp.moveaxis(pending.rotary, 0, 1)[..., None], rotary], axis=2)
        u = self.inputs(self.final_norm(features[:, :size]), new.embeddings)
        h = self.layers[0].input_norm.deferred(u)
        k, v = self._mixer.as_cached(*self._mixer.keys_values(h, self._angles(rotary[..., :size])))
        follows = pending.position[:, None] + 1 == new.positions
        is_first = jnp.arange(size)[None] == 0
        context = write(self.backend, context, k, v, new.positions, new.valid & (follows | ~is_first))
        # Place n of ``features`` is that of the n-th token; place 0 keeps what is pending.
        n = new.valid.sum(1)
        batch = jnp.arange(len(n))
        position = jnp.where(n > 0, new.positions[:, 0] + n - 1, pending.position)
        return context, PendingFeature(features[batch, n], position, jnp.moveaxis(rotary, 0, 1)[batch, :, n])

    def _step(
        self,
        hidden: Float[Array, "B 1 H"],
        embeddings: Float[Array, "B 1 H"],
        rotary: Int[Array, "3 B 1"],
        valid: Bool[Array, "B 1"],
        block: list[tuple[Array, Array]],
        context: KVCache,
        start: Int[Array, " B"],
        window: DraftWindow,
    ) -> Float[Array, "B 1 H"]:
        """One step of the recurrence: z [B, 1, H]. Appends its keys and values, [B, 1, K, D] each, to ``block``."""
        layer, mixer = self.layers[0], self._mixer
        u = self.inputs(hidden, embeddings)
        q, k, v, gates = mixer.inputs(layer.input_norm.deferred(u), self._angles(rotary))
        block.append(mixer.as_cached(k, v))
        keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(*block, strict=True))
        # As many queries as keys, of which the last sees all keys.
        q = jnp.broadcast_to(q, (q.shape[0], len(block), *q.shape[2:]))
        bounds = window.bounds(start, len(block))
        y = mixer.attend(q, keys, values, None, context, start, bounds)[:, -1:]
        return self.norm(layer.feed_forward(mixer.output(through_gate(y, gates), u), valid))

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
        """As `Drafting.propose`: one step a draft, at most as many as the head's own block size has."""
        context, pending = cache
        is_known = (pending.position + 1 == start) & (start > jnp.asarray(window.first))
        # The context's first token has no keys and values.
        window = replace(window, first=jnp.asarray(window.first) + 1)
        hidden = jnp.where(is_known[:, None], self.final_norm(pending.feature), 0)[:, None]
        # Of an image's last token the largest row counts on.
        rotary, later = jnp.moveaxis(pending.rotary, 0, 1)[..., None], pending.rotary.max(1)[None, :, None]
        token, drawn, block = last[:, None], [], []
        for i in range(min(size, self.config.block_size) - 1):
            position = rotary if i == 0 else jnp.broadcast_to(later + i, rotary.shape)
            valid = (block_sizes > i + 1)[:, None]
            hidden = self._step(hidden, heads.embed(token), position, valid, block, context, start, window)
            places = start[:, None] + 1 + i
            if self.vocabulary is None:
                drawn.append(heads.draw_drafts(heads.logits(hidden), places))
            else:
                drawn.append(heads.draw_drafts(self.vocabulary.logits(hidden), places, self.vocabulary.ids[...]))
            token = drawn[-1][0]

        def joined(*parts: Array) -> Array:
            return jnp.pad(jnp.concatenate(parts, axis=1), ((0, 0), (0, size - 1 - len(parts))))

        tokens, scores = jax.tree.map(joined, *drawn)
        return Proposal(tokens, scores=scores)
