"""The training pass of an MTP head: all steps of the recurrence at every token of a row, with the true tokens.

Source: FastMTP (arXiv 2509.18362). A step attends to the same step of earlier tokens; in decoding, a later step attends
to the first step of the context. Rotary positions stay those of the hidden state's token.
"""

import jax
import jax.numpy as jnp

from dflash_jax.models.config import AttentionSpec
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.rope import rope_angles
from dflash_jax.training.blocks import at


def step_states(head: Mtp, features, embed, tokens, anchors, starts, steps: int):
    """Hidden states of the steps after each anchor: step k predicts the token k after it.

    Args:
        head: The MTP head. Its copy of the target's final norm gets no gradient.
        features: Outputs of the target's last layer [B, T, 1, H].
        embed: The target's embedding, token ids → [..., H].
        tokens: Token ids int [B, T].
        anchors: Last known tokens int [B, A], none the first of its document.
        starts: First token of each token's document, int [B, T].
        steps: K.

    Returns:
        [B, A, K, H], after the head's last norm.
    """
    (layer,), size = head.layers, tokens.shape[1]
    positions, valid = jnp.arange(size) - starts, jnp.ones(tokens.shape, bool)
    (spec,) = head.config.layers
    assert isinstance(spec.mixer, AttentionSpec)
    angles = {spec.mixer.rope: rope_angles(positions, spec.mixer.rope)}
    z, result = jax.lax.stop_gradient(head.final_norm(features[:, :, 0])), []
    for step in range(1, steps + 1):
        # Tokens after the row's end come from its beginning, and are not learned.
        u = head.inputs(z, embed(jnp.roll(tokens, -step, axis=1)))
        z = head.norm(layer.forward_full(u, valid, angles, starts))
        result.append(at(z, jnp.maximum(anchors - 1, 0)))
    return jnp.stack(result, axis=2)


def can_begin(anchors, starts):
    """Whether there is a hidden state before each anchor int [B, A]: it is not the first token of its document."""
    return anchors > at(starts, anchors)
