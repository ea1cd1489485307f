"""How many drafts of a round are verified: those that are worth more than their verification costs.

A drafter says how likely each of its drafts is, which `engine.acceptance.Calibration` turns into rates of acceptance.
The product of the rates up to a draft is its chance to be accepted, its *survival*. The price of a verified token is
the number of tokens that decoding yields in the time that it takes. A draft whose survival is below the price slows
decoding down. The text is the same whatever is verified.

Dimension letters: B sequences, D drafts of a block.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Scores are distinguished by their log-odds, in as many intervals between these bounds.
BINS, LEAST_LOGIT, GREATEST_LOGIT = 16, -4.0, 6.0
# The price for sequences of a fixed block size, which verify all of their drafts.
ALL = -1.0
# What a draft of these is worth, more than any price.
_DEMANDED = 1e3


def bins_of(scores: Float[Array, "B D"]) -> Int[Array, "B D"]:
    """The interval of each score, a probability; scores that are not finite are in the lowest."""
    logits = jnp.log(scores) - jnp.log1p(-scores)
    place = (logits - LEAST_LOGIT) * (BINS / (GREATEST_LOGIT - LEAST_LOGIT))
    return jnp.clip(jnp.where(jnp.isnan(place), 0.0, place), 0, BINS - 1).astype(jnp.int32)


def choose_widths(
    bins: Int[Array, "B D"],
    rates: Float[Array, "D bins"],
    prices: Float[Array, " B"],
    block_sizes: Int[Array, " B"],
    is_live: Bool[Array, " B"],
    compiled: Sequence[int],
) -> tuple[Int[Array, " B"], Int[Array, ""]]:
    """How many tokens of its block each sequence verifies, and with which of the compiled widths.

    With several compiled widths, a token costs what a place of the chosen one costs, and sequences fill it. With one,
    the price is that of a token that is verified in it, and the other places cost nothing.

    Args:
        bins: From `bins_of`.
        rates: The rate of acceptance of each place and interval, given that the drafts before are accepted.
        prices: The price of a verified token; `ALL` verifies all drafts. Those of the sequences that are not `ALL` are
            the same.
        block_sizes: Tokens that each sequence may verify.
        is_live: Sequences that decode.
        compiled: The compiled widths, ascending, of which the last has all drafts.

    Returns:
        Widths int [B], 1 to ``block_sizes``: the last known token and the drafts that are verified after it; and the
        index of the compiled width.
    """
    survival = jnp.cumprod(rates[jnp.arange(rates.shape[0])[None], bins], axis=1)
    demands = (prices < 0)[:, None]
    if len(compiled) == 1:
        wanted = 1 + (survival >= prices[:, None]).sum(1)
        return jnp.minimum(wanted, block_sizes), jnp.int32(0)
    is_in_use = is_live[:, None] & (jnp.arange(bins.shape[1])[None] < (block_sizes - 1)[:, None])
    worth = jnp.where(is_in_use, jnp.where(demands, _DEMANDED, survival), 0.0).sum(0)
    gains = worth - jnp.maximum(prices.max(), 0.0) * len(prices)
    ends = jnp.array([width - 1 for width in compiled])
    index = jnp.argmax(jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])[ends])
    return jnp.minimum(ends[index] + 1, block_sizes), index


def count_outcomes(
    bins: Int[Array, "B D"],
    widths: Int[Array, " B"],
    yielded: Int[Array, " B"],
    has_ended: Bool[Array, " B"],
) -> Int[Array, "2 D bins"]:
    """What a round says about the rates: verified drafts whose predecessors were accepted, and the accepted ones.

    Args:
        bins: From `bins_of`.
        widths: From `choose_widths`.
        yielded: Tokens that the round yielded, int [B]; 0 for a sequence that took no part.
        has_ended: Sequences that ended in this round: the draft after their last token counts as not verified.

    Returns:
        int32 [2, D, bins]: the number of those drafts, and of the accepted ones among them.
    """
    place, accepted = jnp.arange(bins.shape[1])[None], (yielded - 1)[:, None]
    is_accepted = place < accepted
    is_reached = is_accepted | ((place == accepted) & (place < (widths - 1)[:, None]) & ~has_ended[:, None])
    one_hot = jax.nn.one_hot(bins, BINS, dtype=jnp.int32)
    return jnp.stack([(one_hot * each[..., None]).sum(0) for each in (is_reached, is_accepted)])
