"""The drafter's training pass: many anchors of a sequence at once, each with its block, under the masks of decoding.

Source: arXiv 2602.06036, section 4. Letters beyond `models.parts`: A anchors of a sequence, W slots of a block.
"""

import jax
import jax.numpy as jnp

from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import NO_WINDOW, Drafter, DraftLayer
from dflash_jax.models.rope import rope_angles

# Decay of the slots' weights by block size.
GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def sample_anchors(key, loss_mask, count: int):
    """``count`` positions i of each sequence with loss_mask[i] and loss_mask[i + 1], drawn without replacement.

    loss_mask bool [B, T] → anchors int32 [B, A] and valid bool [B, A] (False where a sequence has fewer than A).
    """
    fit = loss_mask & jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
    order = jnp.where(fit, jax.random.uniform(key, fit.shape), -1.0)
    score, anchors = jax.lax.top_k(order, count)
    return anchors.astype(jnp.int32), score >= 0


def _attend(layer: DraftLayer, h, keys, values, anchors, positions):
    """Attention of blocks h [B, A, W, H] over their own slots and the context keys, values [B, T, K, D] before their
    anchor."""
    b, a, w, hidden = h.shape
    mixer, t, rows = layer.mixer, keys.shape[1], b * a
    flat, angles = h.reshape(rows, w, hidden), rope_angles(positions, layer.spec.attention.rope)
    q, gate = mixer.queries(flat, angles)
    k, v = mixer.keys_values(flat, angles)
    spec = layer.spec.attention
    heads, repeat, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
    q = q.reshape(b, a, w, heads, repeat, d) * d**-0.5
    k, v = k.reshape(b, a, w, heads, d), v.reshape(b, a, w, heads, d)
    far = jnp.einsum("bawkrd,btkd->bakrwt", q, keys, preferred_element_type=jnp.float32)
    near = jnp.einsum("bawkrd,bavkd->bakrwv", q, k, preferred_element_type=jnp.float32)
    sees = layer.sees_context(jnp.arange(t)[None, None], positions, anchors.reshape(rows), NO_WINDOW)
    own = layer.block_mask(jnp.full((1,), w), w)[0]
    far = jnp.where(jnp.broadcast_to(sees, (rows, w, t)).reshape(b, a, 1, 1, w, t), far, -jnp.inf)
    near = jnp.where(own, near, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1).astype(h.dtype)
    y = jnp.einsum("bakrwt,btkd->bawkrd", weights[..., :t], values)
    y = y + jnp.einsum("bakrwv,bavkd->bawkrd", weights[..., t:], v)
    return mixer.output(y.reshape(rows, w, spec.num_heads, d), gate).reshape(h.shape)


def block_states(drafter: Drafter, features, embedded, anchors):
    """Hidden states [B, A, W, H] after the final norm, equal to what `Drafter.block` computes for each anchor on its
    own.

    features [B, T, taps, H] of whole sequences; embedded [B, A, W, H]: each anchor's ``[token, MASK, …]``; anchors [B,
    A].
    """
    b, a, w, _ = embedded.shape
    t = features.shape[1]
    context = drafter.context_keys_values(features, jnp.broadcast_to(jnp.arange(t), (b, t)))
    positions = anchors.reshape(b * a, 1) + jnp.arange(w)
    x = embedded
    for layer, (keys, values) in zip(drafter.layers, context, strict=True):
        x = x + _attend(layer, layer.input_norm(x), keys, values, anchors, positions)
        x = x + layer.ffn(layer.post_norm(x).reshape(b, a * w, -1)).reshape(x.shape)
    return drafter.norm(x)


def draft_loss(
    drafter: Drafter,
    target: Decoder,
    tokens,
    loss_mask,
    key,
    anchors: int,
    slots: int | None = None,
    soft: bool = False,
):
    """Decayed cross-entropy: slot k of a block against the token at anchor + k, weight exp(-(k - 1) / gamma).

    tokens int [B, T]; loss_mask bool [B, T]: which tokens may be learned from. Labels outside the sequence or the mask
    weigh 0; the sum is divided by the sum of all weights. ``slots``: the blocks' width, by default the drafter's own.
    ``soft``: against the target's whole distribution of that token (forward KL, up to a constant), which says more
    than one draw from it.
    """
    w = slots or drafter.config.block_size
    hidden, features = target(tokens, drafter.taps)
    features = jax.lax.stop_gradient(features)
    where, valid = sample_anchors(key, loss_mask, anchors)

    def at(values, places):
        """values [B, T, …] at places [B, A, …] of their rows."""
        return jax.vmap(lambda row, i: row[i])(values, places)

    block = jnp.full((*where.shape, w), drafter.config.mask_token_id, tokens.dtype).at[..., 0].set(at(tokens, where))
    states = block_states(drafter, features, target.embed_tokens(block), where)
    places = where[..., None] + jnp.arange(1, w)
    inside = places < tokens.shape[1]
    places = jnp.minimum(places, tokens.shape[1] - 1)
    learned = inside & at(loss_mask, places) & valid[..., None]
    gamma = GAMMA.get(w, w / 2.3)
    weights = jnp.where(learned, jnp.exp(-jnp.arange(w - 1) / gamma), 0.0)
    logits = target.logits(states[:, :, 1:])
    if soft:
        teacher = jax.lax.stop_gradient(jax.nn.softmax(target.logits(hidden), axis=-1))
        liked = jnp.sum(at(teacher, places - 1) * logits, axis=-1)
    else:
        liked = jnp.take_along_axis(logits, at(tokens, places)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - liked
    return jnp.sum(losses * weights) / jnp.maximum(weights.sum(), 1e-6)
