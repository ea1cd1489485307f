"""Logits → processed distribution → token. All options are runtime data, per row; the draw needs no state.

The noise of a draw is a function of (seed, absolute position, token id) alone. So the token drawn from a given
distribution at a given position is the same whether it was drafted or not, at any width, in any batch; and a drafter
that draws with the same noise agrees with the target more often than one that drafts greedily.
"""

from dataclasses import dataclass, field, fields, replace

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.ops.argmax import argmax
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.sampling_noise import gumbel_noise
from dflash_jax.parallel.sharding import WHOLE, AxisSharding
from dflash_jax.sampling_params import MAX_LOGPROBS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """Sampling options of B rows: [B], or [B, V] for bias and counts.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, repetition 1, frequency 0 and presence 0 are off. The counts
    are of the tokens known so far: repetition looks at prompt and output, frequency and presence at the output only.
    logprob_ids int [B, MAX_LOGPROBS]: tokens whose log-probabilities are recorded beside the likeliest ones, padded
    with -1. ``vocab`` (static): how V is cut over devices, here and in all logits. ``backend`` (static): where draws
    run. ``rows`` int [B]: the options are of these rows of larger tables [all rows, V], which are read and written in
    place; indices past the end are padding.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    frequency: jax.Array
    presence: jax.Array
    seed: jax.Array
    wants_logprobs: jax.Array
    processed_logprobs: jax.Array
    logprob_ids: jax.Array
    logit_bias: jax.Array
    prompt_counts: jax.Array
    output_counts: jax.Array
    rows: jax.Array | None = None
    vocab: AxisSharding = field(default=WHOLE, metadata={"static": True})
    backend: Backend = field(default=XLA, metadata={"static": True})

    @classmethod
    def greedy(cls, rows: int, vocab: int, cut: AxisSharding = WHOLE, backend: Backend | None = None) -> "SamplingRows":
        def full(value, dtype=np.float32):
            return jnp.asarray(np.full((rows,), value, dtype))

        return cls(
            temperature=full(0),
            top_k=full(0, np.int32),
            top_p=full(1),
            min_p=full(0),
            repetition=full(1),
            frequency=full(0),
            presence=full(0),
            seed=full(0, np.uint32),
            wants_logprobs=full(True, bool),
            processed_logprobs=full(False, bool),
            logprob_ids=jnp.full((rows, MAX_LOGPROBS), -1, jnp.int32),
            logit_bias=jnp.zeros((rows, vocab)),
            prompt_counts=jnp.zeros((rows, vocab), jnp.int32),
            output_counts=jnp.zeros((rows, vocab), jnp.int32),
            vocab=cut,
            backend=backend or Backend.detect(),
        )

    def argmax(self, logits):
        """(token, its logit) of the largest logits [..., V], V cut over ``vocab``: int [...] and float32 [...]."""
        return self.vocab.argmax(logits, lambda x: argmax(self.backend, x))

    def of_tokens(self, ids) -> "SamplingRows":
        """For logits of the tokens ``ids`` int [N] only; the vocabulary must not be cut."""
        own = self.lines()[:, None]
        return replace(self, rows=None, **{name: getattr(self, name)[own, ids] for name in TABLES})

    def lines(self) -> jax.Array:
        """int [B]: where each row's part of the tables is."""
        return jnp.arange(len(self.seed)) if self.rows is None else jnp.minimum(self.rows, len(self.logit_bias) - 1)

    def table(self, name: str) -> jax.Array:
        """logit_bias, prompt_counts or output_counts of the rows themselves, [B, V]."""
        held = getattr(self, name)
        return held if self.rows is None else held[self.lines()]

    def counting(self, tokens, taken) -> "SamplingRows":
        """With those of the ``tokens`` int [B, T] that were ``taken`` bool [B, T] in the counts of outputs."""
        size = self.output_counts.shape[1]
        own, mine = self.vocab.own(tokens, size)
        lines = jnp.arange(len(tokens)) if self.rows is None else self.rows
        at = lines[:, None], jnp.where(taken & mine, own, size)
        return replace(self, output_counts=self.output_counts.at[at].add(1, mode="drop"))

    def take(self, rows) -> "SamplingRows":
        """The rows int [b], over the same tables."""
        own = jnp.minimum(rows, len(self.seed) - 1)
        return replace(self, rows=rows, **{name: getattr(self, name)[own] for name in OPTIONS})

    def put(self, taken: "SamplingRows") -> "SamplingRows":
        """With what `take` gave, and was worked on."""
        options = {name: getattr(self, name).at[taken.rows].set(getattr(taken, name), mode="drop") for name in OPTIONS}
        return replace(taken, rows=None, **options)

    def with_tables(self, *values) -> "SamplingRows":
        """With these rows' logit_bias, prompt_counts and output_counts, [B, V] each, written into the tables."""
        new = dict(zip(TABLES, values, strict=True))
        if self.rows is not None:
            new = {name: getattr(self, name).at[self.rows].set(x, mode="drop") for name, x in new.items()}
        return replace(self, **new)


TABLES = ("logit_bias", "prompt_counts", "output_counts")
OPTIONS = tuple(f.name for f in fields(SamplingRows) if f.name not in (*TABLES, "rows", "vocab", "backend"))


def _ordered(x):
    """float32 → int32 with the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # -0.0 is the number 0.0. Told by its bits: a comparison with 0 would take denormals for it.
    bits = jnp.where(bits == -(2**31), 0, bits)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_threshold(values, enough):
    """The largest threshold t [..., 1] (in `_ordered` keys) for which ``enough(values >= t)`` holds; found by
    bisection.

    ``enough(kept bool [..., V]) → bool [..., 1]`` must hold for lower thresholds wherever it holds for higher ones.
    Exact, and without a sort of the vocabulary: 32 comparisons.
    """
    keys = _ordered(values)
    low = jnp.full((*values.shape[:-1], 1), -(2**31), jnp.int32)
    high = jnp.full_like(low, 2**31 - 1)

    def halve(_, bounds):
        low, high = bounds
        # The mean rounded up, without overflow.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        fits = enough(keys >= middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (low, high))
    return keys >= low


def penalise(logits, rows: SamplingRows, block=None, known=None):
    """Logit bias and penalties: float32 [B, T, V] → the same shape.

    ``block`` int [B, T] are the tokens fed at these T places, of which the first ``known`` [B] are in the counts
    already: place i is penalised for what the prefix up to i really holds, unverified drafts included.
    """
    bias, prompt, output = (rows.table(name)[:, None] for name in TABLES)
    if block is not None:
        place = jnp.arange(block.shape[1])
        # What is not of this device's part is outside of the one-hot's range.
        own, _ = rows.vocab.own(block, logits.shape[-1])
        fresh = jax.nn.one_hot(own, logits.shape[-1], dtype=jnp.int32) * (place[None] >= known[:, None])[..., None]
        output = output + jnp.cumsum(fresh, axis=1)
    logits = logits + bias
    repetition = rows.repetition[:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((prompt > 0) | (output > 0), repeated, logits)
    logits = logits - rows.frequency[:, None, None] * output
    return logits - rows.presence[:, None, None] * (output > 0)


def _filter(logits, rows: SamplingRows):
    """Temperature, top-k, top-p, min-p, in this order; what is cut becomes -inf. Ties at a cut stay."""
    greedy = (rows.temperature <= 0)[:, None, None]
    logits = logits / jnp.where(greedy, 1.0, rows.temperature[:, None, None])
    over = rows.vocab

    def cut(logits):
        # Off is more than there are: then nothing reaches it, and the threshold is the lowest.
        k = jnp.where(rows.top_k > 0, rows.top_k, jnp.iinfo(jnp.int32).max)[:, None, None]
        kept = _largest_threshold(logits, lambda m: over.sum(m.sum(-1, keepdims=True)) >= k)
        # A greedy row stays whole, whatever its neighbours ask for.
        logits = jnp.where(kept | greedy, logits, -jnp.inf)
        weights = jnp.exp(logits - over.max(logits.max(-1, keepdims=True)))

        def total(x):
            return over.sum(x.sum(-1, keepdims=True))

        # The likeliest weighs 1. A product that underflows to 0 would be reached without it.
        mass = jnp.maximum(rows.top_p, jnp.finfo(jnp.float32).tiny)[:, None, None] * total(weights)
        kept = _largest_threshold(weights, lambda m: total(jnp.where(m, weights, 0.0)) >= mass)
        # At top_p 1 the rounding of a sum must not cut the tail.
        kept = kept | (rows.top_p >= 1)[:, None, None]
        kept = kept & (weights >= rows.min_p[:, None, None]) & (logits > -jnp.inf)
        return jnp.where(kept | greedy, logits, -jnp.inf)

    cutting = ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)) & (rows.temperature > 0)
    return jax.lax.cond(cutting.any(), cut, lambda x: x, logits)


def _unpack_mask(mask):
    """uint32 [B, T, ceil(V / 32)], bit i of word w for token 32 w + i → bool [B, T, V rounded up]."""
    bits = (mask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*mask.shape[:-1], -1).astype(bool)


def _allowed(logits, rows: SamplingRows, mask):
    """Logits [B, T, V] with -inf for what the ``mask`` of `process` forbids."""
    if mask is None:
        return logits
    allowed, size = _unpack_mask(mask), logits.shape[-1]
    allowed = jax.lax.dynamic_slice_in_dim(allowed, rows.vocab.index() * size, size, axis=-1)
    return jnp.where(allowed, logits, -jnp.inf)


def process(logits, rows: SamplingRows, block=None, known=None, mask=None, special=None):
    """Raw logits float32 [B, T, V] → logits of the distribution that is drawn from (greedy rows: whose arg-max is
    taken).

    ``block`` and ``known`` as in `penalise`; ``mask``: packed bits of the allowed tokens, uint32 [B, T, ceil(V / 32)];
    ``special``: `special_rows`, where it is known.
    """
    penalised = (special_rows(rows) if special is None else special) == PENALISED
    logits = jax.lax.cond(penalised.any(), lambda x: penalise(x, rows, block, known), lambda x: x, logits)
    logits = _allowed(logits, rows, mask)
    return jax.lax.cond((rows.temperature > 0).any(), lambda x: _filter(x, rows), lambda x: x, logits)


def perturbed(processed, rows: SamplingRows, positions, ids=None):
    """Processed logits [B, T, V], of all tokens or of ``ids`` [V], with the noise of absolute ``positions`` [B, T]
    (greedy rows: none): the largest is the token."""
    if ids is None:
        ids = rows.vocab.index() * processed.shape[-1] + jnp.arange(processed.shape[-1])
    noise = gumbel_noise(rows.backend, rows.seed, positions, ids)
    return processed + jnp.where((rows.temperature > 0)[:, None, None], noise, 0.0)


# In place of a token: the model's logits are NaN or infinite; the request's own mask, penalties or bias leave nothing
# that may be drawn. Neither is the padding of stops or of drafts, -1.
NOT_FINITE, NOTHING_ALLOWED = -2, -3


def checked(tokens, largest, wrong):
    """int32 ``tokens``, with ``wrong`` (NOT_FINITE or NOTHING_ALLOWED) for those whose logit, the ``largest``, is no
    number."""
    return jnp.where(jnp.isfinite(largest), tokens, wrong).astype(jnp.int32)


def choose(processed, rows: SamplingRows, positions, ids=None):
    """Processed logits [B, T, V] → places of the chosen in V, int32 [B, T], for absolute ``positions`` [B, T]: token
    ids, but where there are ``ids``, as in `perturbed`; `checked`."""

    def draw(logits):
        return rows.argmax(perturbed(logits, rows, positions, ids))

    return checked(*jax.lax.cond((rows.temperature > 0).any(), draw, rows.argmax, processed), NOTHING_ALLOWED)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities in nats: of the chosen token, ``chosen`` [..., T]; of the n likeliest tokens, ``ids`` and
    ``values`` [..., T, n]; and of the tokens that the request names, ``named`` [..., T, MAX_LOGPROBS]."""

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array
    named: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...], top: int) -> "Logprobs":
        """For positions of that ``shape``."""
        best = (*shape, top)
        return cls(jnp.zeros(shape), jnp.zeros(best, jnp.int32), jnp.zeros(best), jnp.zeros((*shape, MAX_LOGPROBS)))

    def of_row(self, row: int, count: int) -> "Logprobs":
        """Of the first ``count`` positions of one row."""
        return jax.tree.map(lambda x: x[row, :count], self)


def logprobs(raw, processed, tokens, rows: SamplingRows, top: int) -> Logprobs:
    """Log-probabilities in nats of the drawn tokens, the ``top`` likeliest tokens and the rows' ``logprob_ids``. They
    are of the raw distribution, or of the processed one in rows that ask for it."""
    logits = jnp.where(rows.processed_logprobs[:, None, None], processed, raw)
    over = rows.vocab
    shifted = logits - over.max(logits.max(-1, keepdims=True))
    values = shifted - jnp.log(over.sum(jnp.exp(shifted).sum(-1, keepdims=True)))
    own, mine = over.own(tokens[..., None], logits.shape[-1])
    chosen = jnp.take_along_axis(values, jnp.where(mine, own, 0), axis=-1)
    chosen = over.sum(jnp.where(mine, chosen, 0.0))[..., 0]
    best, ids = over.top_k(values, top)
    own, mine = over.own(jnp.maximum(rows.logprob_ids, 0)[:, None], logits.shape[-1])
    named = jnp.take_along_axis(values, jnp.where(mine, own, 0), axis=-1)
    return Logprobs(chosen, ids.astype(jnp.int32), best, over.sum(jnp.where(mine, named, 0.0)))


# What `special_rows` tells of a row.
PLAIN, DRAWN, PENALISED = range(3)


def special_rows(rows: SamplingRows):
    """int32 [B]: PLAIN where the draw is an arg-max of the logits, DRAWN where it is random, PENALISED where the logits
    are biased or penalised before. It reads all of the bias: to be known once, not every round.

    The same on all devices that share a row, though each has its part of the bias: `draw` branches on it, and there are
    collectives in its branches.
    """
    biased = rows.vocab.max((rows.table("logit_bias") != 0).any(-1).astype(jnp.int32)) > 0
    penalised = (rows.repetition != 1) | (rows.frequency != 0) | (rows.presence != 0)
    return jnp.where(biased | penalised, PENALISED, jnp.where(rows.temperature > 0, DRAWN, PLAIN))


def draw(
    logits,
    rows: SamplingRows,
    positions,
    special,
    block=None,
    known=None,
    mask=None,
    wanted=None,
    top: int = 0,
    ids=None,
) -> tuple[jax.Array, Logprobs | None]:
    """Raw logits float32 [B, T, V] → tokens int32 [B, T] for absolute ``positions`` [B, T], and `Logprobs` with the
    ``top`` likeliest: zeros where no row wants any, None without ``wanted``.

    ``special`` int [B]: `special_rows`, PLAIN for those that do not count; ``wanted`` bool [B]: rows whose
    log-probabilities do. Without either this is one conditional around an arg-max. No logits come out of it: what comes
    out is written, even by a branch that returns what it was given. ``block``, ``known`` and ``mask`` as in `process`.
    ``ids`` int [V], ascending: logits are of these tokens only; then nothing but logits, rows, positions and special
    may be given. Tokens are `checked`, but where there are ``ids``.
    """

    def nothing():
        return Logprobs.zeros(positions.shape, top)

    def largest():
        tokens, value = rows.argmax(_allowed(logits, rows, mask))
        nothing_left = mask is not None and value == -jnp.inf
        tokens = checked(tokens, value, jnp.where(nothing_left, NOTHING_ALLOWED, NOT_FINITE))
        return tokens, None if wanted is None else nothing()

    def drawn():
        own = rows if ids is None else rows.of_tokens(ids)
        processed = process(logits, own, block, known, mask, special)
        tokens = choose(processed, own, positions, ids)
        if ids is None:
            # The raw logits too: a filter may cut a NaN out.
            tokens = jnp.where(jnp.isfinite(rows.argmax(logits)[1]), tokens, NOT_FINITE)
        if wanted is None:
            return tokens, None
        return tokens, jax.lax.cond(wanted.any(), lambda: logprobs(logits, processed, tokens, rows, top), nothing)

    more = special != PLAIN if wanted is None else (special != PLAIN) | wanted
    tokens, found = jax.lax.cond(more.any(), drawn, largest)
    return tokens if ids is None else ids[tokens], found
