"""Are two runs' tokens equal, and where they part, was it a tie?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from dflash_jax.llm import LLM, PREFILL_CHUNKS
from dflash_jax.params import SamplingParams
from dflash_jax.sampling import gumbel_noise, process

# In float32 a draw whose two best candidates are closer than this may go either way with the order of a sum.
TIE = 1e-4


@dataclass(frozen=True)
class Divergence:
    """The first place where two continuations differ: the two tokens, and by how much the first one was preferred (in
    the units of the logits that are compared; 0 where a cut of top-k, top-p or min-p decided by less)."""

    at: int
    expected: int
    found: int
    margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin < TIE


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index at which two token lists differ; None where they are equal."""
    for i, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return i
    return None if len(expected) == len(found) else min(len(expected), len(found))


def divergence(llm: LLM, prompt: list[int], expected: list[int], found: list[int], params: SamplingParams):
    """The `Divergence` of two continuations of a prompt, or None. The margin is the target's own, by prefill of the
    shared part."""
    at = first_difference(expected, found)
    if at is None:
        return None
    if at >= min(len(expected), len(found)):
        return Divergence(at, -1, -1, float("inf"))
    raw, processed, scores = _draw(llm, prompt, expected[:at], params)
    a, b = expected[at], found[at]
    margin = abs(float(scores[a] - scores[b]))
    if not np.isfinite(margin):
        margin = _cut_margin(raw, processed, a if np.isneginf(processed[a]) else b, params)
    return Divergence(at, a, b, margin)


def _draw(llm: LLM, prompt: list[int], shared: list[int], params: SamplingParams):
    """Raw logits, processed logits and what is maximised, float [V], for the token behind prompt + shared."""
    whole = prompt + shared
    (row,) = llm._rows([whole], replace(params, max_tokens=1))
    settings = llm._settings([row], 1)
    state = llm._start([row], settings, 1)
    left = len(whole)
    while left > 0:
        state = llm.programs.prefill_chunk(state, PREFILL_CHUNKS[-1], False)
        left -= PREFILL_CHUNKS[-1]
    vocab = llm.config.vocab_size
    sampling = replace(
        state.sampling,
        prompt_counts=jnp.asarray(np.bincount(prompt, minlength=vocab)[None], jnp.int32),
        output_counts=jnp.asarray(np.bincount(np.array(shared, int), minlength=vocab)[None], jnp.int32),
    )
    raw = llm.target.logits(state.hidden[:, None])
    processed = process(raw, sampling)
    scores = processed
    if row.params.temperature > 0:
        scores = processed + gumbel_noise(sampling.seed, jnp.full((1, 1), len(whole)), vocab)
    return tuple(np.asarray(x[0, 0], np.float64) for x in (raw, processed, scores))


def _cut_margin(raw, processed, token: int, params: SamplingParams) -> float:
    """How far ``token`` was from surviving the cuts: in logits, or in probability mass for top-p."""
    kept = np.isfinite(processed)
    scale = params.temperature or 1.0
    distance = (raw[kept].min() - raw[token]) / scale
    weights = np.exp((raw - raw.max()) / scale)
    above = weights[raw > raw[token]].sum() / weights.sum()
    return float(min(distance, abs(above - params.top_p) if params.top_p else np.inf))
