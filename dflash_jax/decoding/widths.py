"""How many drafts of a round are verified: those that are worth more than their verification costs.

A drafter says how likely each of its drafts is, which `engine.acceptance.Calibration` turns into rates of acceptance.
The product of the rates up to a draft is its chance to be accepted, its *survival*. The price of a verified token is
the number of tokens that decoding yields in the time that it takes. A draft whose survival is below the price slows
decoding down: a mixture reads experts for it that no other token chooses. The text is the same whatever is verified.

Drafts are accepted less after contexts that are longer than what the drafter was trained on, whatever it says of them.
So each of a few lengths of context has rates of its own.

Dimension letters: B sequences, D drafts of a block.
"""

# Most functions of JAX have partial annotations.
# pyright: reportUnknownMemberType=false

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Scores are distinguished by their log-odds, in as many intervals between these bounds.
BINS, LEAST_LOGIT, GREATEST_LOGIT = 16, -4.0, 6.0
# Contexts are divided into classes by their length: the tokens at which each class but the first begins, and the number
# of classes.
LENGTH_BOUNDS = (2048, 8192, 32768, 131072)
LENGTHS = len(LENGTH_BOUNDS) + 1
# The score of drafts of drafters that give none.
USUAL_SCORE = 0.7


def bins_of(scores: Float[Array, "B D"]) -> Int[Array, "B D"]:
    """The interval of each score, a probability; scores that are not finite are in the lowest."""
    logits = jnp.log(scores) - jnp.log1p(-scores)
    place = (logits - LEAST_LOGIT) * (BINS / (GREATEST_LOGIT - LEAST_LOGIT))
    return jnp.clip(jnp.where(jnp.isnan(place), 0.0, place), 0, BINS - 1).astype(jnp.int32)


def lengths_of(tokens: Int[Array, " B"]) -> Int[Array, " B"]:
    """Which of the lengths contexts of so many tokens have, 0 to ``LENGTHS`` - 1."""
    return (tokens[:, None] >= jnp.asarray(LENGTH_BOUNDS)).sum(1)


def choose_widths(
    bins: Int[Array, "B D"],
    lengths: Int[Array, " B"],
    rates: Float[Array, "lengths D bins"],
    prices: Float[Array, " B"],
    block_sizes: Int[Array, " B"],
) -> Int[Array, " B"]:
    """How many tokens of its block each sequence verifies: the last known one and the drafts that are worth it.

    Args:
        bins: From `bins_of`.
        lengths: From `lengths_of`.
        rates: The rate of acceptance of each length, place and interval, given that the drafts before are accepted.
        prices: The price of a verified token; 0 verifies all drafts.
        block_sizes: Tokens that each sequence may verify.

    Returns:
        int [B], 1 to ``block_sizes``.
    """
    survival = jnp.cumprod(rates[lengths[:, None], jnp.arange(rates.shape[1])[None], bins], axis=1)
    return jnp.minimum(1 + (survival >= prices[:, None]).sum(1), block_sizes)


def count_outcomes(
    bins: Int[Array, "B D"],
    lengths: Int[Array, " B"],
    widths: Int[Array, " B"],
    yielded: Int[Array, " B"],
    has_ended: Bool[Array, " B"],
) -> Int[Array, "2 lengths D bins"]:
    """What a round says about the rates: verified drafts whose predecessors were accepted, and the accepted ones.

    Args:
        bins: From `bins_of`.
        lengths: From `lengths_of`.
        widths: From `choose_widths`.
        yielded: Tokens that the round yielded, int [B]; 0 for a sequence that took no part.
        has_ended: Sequences that ended in this round: the draft after their last token counts as not verified.

    Returns:
        int32 [2, lengths, D, bins]: the number of those drafts, and of the accepted ones among them.
    """
    place, accepted = jnp.arange(bins.shape[1])[None], (yielded - 1)[:, None]
    is_accepted = place < accepted
    is_reached = is_accepted | ((place == accepted) & (place < (widths - 1)[:, None]) & ~has_ended[:, None])
    one_hot, by_length = (jax.nn.one_hot(x, n, dtype=jnp.int32) for x, n in ((bins, BINS), (lengths, LENGTHS)))
    counted = jnp.stack([is_reached, is_accepted]).astype(jnp.int32)
    return jnp.einsum("xbd,bdn,bl->xldn", counted, one_hot, by_length)
