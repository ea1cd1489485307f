"""The drafter's training pass: many anchors of a row at once, each with its block, under the masks of decoding.

Source: arXiv 2602.06036, section 4. Letters beyond `models.parts`: A anchors of a row, W slots of a block. A row holds
one document or several; ``starts`` int [B, T] says where that of each token begins.
"""

import jax
import jax.numpy as jnp

from dflash_jax.models.drafter import Drafter, DraftLayer
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops.attention import through_gate
from dflash_jax.ops.interval_attention import interval_attention


def sample_anchors(key, loss_mask, starts, count: int):
    """``count`` tokens of each row that may be learned from, as may the next one of their document; drawn without
    replacement, in ascending order.

    loss_mask bool [B, T] → anchors int32 [B, A], and valid bool [B, A] (False where a row has fewer than A).
    """
    after = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1))) & (jnp.roll(starts, -1, 1) == starts)
    order = jnp.where(loss_mask & after, jax.random.uniform(key, loss_mask.shape), -1.0)
    score, anchors = jax.lax.top_k(order, count)
    # What is not valid goes last, so that the attention's work is in order.
    anchors = jnp.sort(jnp.where(score >= 0, anchors, loss_mask.shape[1]), axis=1)
    valid = anchors < loss_mask.shape[1]
    return jnp.where(valid, anchors, loss_mask.shape[1] - 1).astype(jnp.int32), valid


def at(values, places):
    """values [B, T, …] at places [B, A, …] of their rows."""
    return jax.vmap(lambda row, i: row[i])(values, places)


def _attend(layer: DraftLayer, h, keys, values, anchors, first, positions):
    """Attention of blocks h [B, A, W, H] over their own slots and the context keys, values [B, T, K, D] before their
    anchor; ``first`` [B, A]: where their document begins, ``positions`` [B, A, W]: in their document."""
    b, a, w, hidden = h.shape
    mixer, spec, rows = layer.mixer, layer.spec.attention, b * a
    flat, angles = h.reshape(rows, w, hidden), rope_angles(positions.reshape(rows, w), layer.spec.attention.rope)
    q, k, v, both = mixer.inputs(flat, angles)
    heads, repeat, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
    q = q.reshape(b, a, w, heads, repeat, d) * d**-0.5
    k, v = k.reshape(b, a, w, heads, d), v.reshape(b, a, w, heads, d)
    low = jnp.broadcast_to(first[..., None], (b, a, w))
    if layer.spec.window is not None:
        low = jnp.maximum(low, anchors[..., None] + jnp.arange(w) - layer.spec.window + 1)
    high = jnp.broadcast_to(anchors[..., None], (b, a, w))
    wide = (b, a * w, heads, repeat, d)
    far, far_sum = interval_attention(q.reshape(wide), keys, values, low.reshape(b, -1), high.reshape(b, -1))
    scores = jnp.einsum("bawkrd,bavkd->bawkrv", q, k, preferred_element_type=jnp.float32)
    own = layer.block_mask(jnp.full((1,), w), w)[0]
    scores = jnp.where(own[:, None, None], scores, -jnp.inf)
    near_sum, far_sum = jax.nn.logsumexp(scores, axis=-1), far_sum.reshape(scores.shape[:-1])
    near = jnp.einsum("bawkrv,bavkd->bawkrd", jax.nn.softmax(scores, -1).astype(v.dtype), v)
    # Two softmaxes are one, weighted by their sums.
    share = jax.nn.sigmoid(far_sum - near_sum)[..., None]
    y = (far.reshape(near.shape) * share + near * (1 - share)).astype(h.dtype)
    return mixer.output(through_gate(y.reshape(rows, w, spec.num_heads, d), both)).reshape(h.shape)


def block_states(drafter: Drafter, features, embedded, anchors, starts=None):
    """Hidden states [B, A, W, H] after the final norm, equal to what `Drafter.block` computes for each anchor on its
    own.

    features [B, T, taps, H] of whole rows; embedded [B, A, W, H]: each anchor's ``[token, MASK, …]``; anchors [B, A].
    """
    b, a, w, _ = embedded.shape
    t = features.shape[1]
    starts = jnp.zeros((b, t), jnp.int32) if starts is None else starts
    context = drafter.context_keys_values(features, jnp.arange(t) - starts)
    first = at(starts, anchors)
    positions = (anchors - first)[..., None] + jnp.arange(w)
    x = embedded
    for layer, (keys, values) in zip(drafter.layers, context, strict=True):
        x = x + _attend(layer, layer.input_norm(x), keys, values, anchors, first, positions)
        x = x + layer.ffn(layer.post_norm(x).reshape(b, a * w, -1)).reshape(x.shape)
    return drafter.norm(x)
