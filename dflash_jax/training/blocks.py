"""The drafter's training pass: many blocks of a row at once, under the attention masks of decoding.

Source: arXiv 2602.06036, section 4. Letters beyond `models.layers`: A anchors of a row, W slots of a block. A row holds
one document or several; ``starts`` int [B, T] is the index of the first token of each token's document.
"""

from functools import partial

import jax
import jax.numpy as jnp

from dflash_jax.models.drafter import Drafter, DraftLayer
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops.attention import through_gate
from dflash_jax.ops.interval_attention import interval_attention


def sample_anchors(key, loss_mask, starts, count: int):
    """Draws the tokens at which blocks begin, without replacement, from those whose successor can be learned.

    Args:
        key: A JAX random key.
        loss_mask: Tokens that may be learned from, bool [B, T].
        starts: First token of each token's document, int [B, T].
        count: Anchors of a row, A.

    Returns:
        Anchors int32 [B, A], ascending, and bool [B, A], False for padding in a row with fewer than A candidates.
    """
    after = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1))) & (jnp.roll(starts, -1, 1) == starts)
    order = jnp.where(loss_mask & after, jax.random.uniform(key, loss_mask.shape), -1.0)
    score, anchors = jax.lax.top_k(order, count)
    # Padding sorts last: the attention kernel needs ascending anchors.
    anchors = jnp.sort(jnp.where(score >= 0, anchors, loss_mask.shape[1]), axis=1)
    valid = anchors < loss_mask.shape[1]
    return jnp.where(valid, anchors, loss_mask.shape[1] - 1).astype(jnp.int32), valid


def at(values, places):
    """Gathers ``values`` [B, T, …] at ``places`` [B, A, …], row by row."""
    return jax.vmap(lambda row, i: row[i])(values, places)


def _attend(layer: DraftLayer, h, keys, values, anchors, first, positions):
    """Attention of blocks over their own slots and the context before their anchor.

    Args:
        layer: The drafter's layer.
        h: Normed hidden states [B, A, W, H].
        keys: Keys of the context [B, T, K, D].
        values: Values of the context [B, T, K, D].
        anchors: First token of each block [B, A].
        first: First token of each anchor's document [B, A].
        positions: Positions within the document [B, A, W].
    """
    b, a, w, hidden = h.shape
    mixer, spec, rows = layer.mixer, layer.spec.attention, b * a
    flat, angles = h.reshape(rows, w, hidden), rope_angles(positions.reshape(rows, w), layer.spec.attention.rope)
    q, k, v, gate = mixer.inputs(flat, angles)
    heads, repeat, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
    q = q.reshape(b, a, w, heads, repeat, d) * d**-0.5
    k, v = k.reshape(b, a, w, heads, d), v.reshape(b, a, w, heads, d)
    low = jnp.broadcast_to(first[..., None], (b, a, w))
    if layer.spec.window is not None:
        low = jnp.maximum(low, anchors[..., None] + jnp.arange(w) - layer.spec.window + 1)
    high = jnp.broadcast_to(anchors[..., None], (b, a, w))
    shape = (b, a * w, heads, repeat, d)
    context, context_sum = interval_attention(q.reshape(shape), keys, values, low.reshape(b, -1), high.reshape(b, -1))
    scores = jnp.einsum("bawkrd,bavkd->bawkrv", q, k, preferred_element_type=jnp.float32)
    visible = layer.block_mask(jnp.full((1,), w), w)[0]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    block_sum, context_sum = jax.nn.logsumexp(scores, axis=-1), context_sum.reshape(scores.shape[:-1])
    block = jnp.einsum("bawkrv,bavkd->bawkrd", jax.nn.softmax(scores, -1).astype(v.dtype), v)
    # The softmax over both parts is the two softmaxes, weighted by their sums of exponentials.
    share = jax.nn.sigmoid(context_sum - block_sum)[..., None]
    y = (context.reshape(block.shape) * share + block * (1 - share)).astype(h.dtype)
    return mixer.output(through_gate(y.reshape(rows, w, spec.num_heads, d), gate)).reshape(h.shape)


def block_states(drafter: Drafter, features, embedded, anchors, starts=None):
    """Hidden states of all blocks after the final norm, equal to `Drafter.block` on each anchor alone.

    Args:
        drafter: The drafter.
        features: The target's features of whole rows [B, T, taps, H].
        embedded: Embedded blocks ``[token, MASK, …]`` [B, A, W, H].
        anchors: First token of each block, int [B, A].
        starts: First token of each token's document, int [B, T]; None: a row is one document.

    Returns:
        [B, A, W, H].
    """
    b, a, w, _ = embedded.shape
    t = features.shape[1]
    starts = jnp.zeros((b, t), jnp.int32) if starts is None else starts
    context = drafter.context_keys_values(features, jnp.arange(t) - starts)
    first = at(starts, anchors)
    positions = (anchors - first)[..., None] + jnp.arange(w)
    x = embedded * jnp.asarray(drafter.config.embedding_scale, embedded.dtype)
    for layer, (keys, values) in zip(drafter.layers, context, strict=True):
        attend = partial(_attend, layer, keys=keys, values=values, anchors=anchors, first=first, positions=positions)
        x = layer.separately(x, attend, lambda h, ffn=layer.ffn: ffn(h.reshape(b, a * w, -1)).reshape(h.shape))
    return drafter.norm(x)
