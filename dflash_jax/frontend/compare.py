"""Are two runs' tokens equal, and where they part, was it a tie?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_jax.decoding.state import PLAIN_SETTINGS
from dflash_jax.engine.model_runner import Device
from dflash_jax.engine.options import PREFILL_SIZES
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.ops.cache import round_capacity
from dflash_jax.parallel.sharding import place
from dflash_jax.sampling_params import SamplingParams

# In float32 a draw whose two best candidates are closer than this may go either way with the order of a sum.
TIE = 1e-4


@dataclass(frozen=True)
class Divergence:
    """The first place where two continuations differ: the two tokens, and by how much the first one was preferred (in
    the units of the logits that are compared, or of a cut of top-k, top-p or min-p that was nearer)."""

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
    shared part; two experts at a router's cut are not looked at."""
    at = first_difference(expected, found)
    if at is None:
        return None
    if at >= min(len(expected), len(found)):
        return Divergence(at, -1, -1, float("inf"))
    (row,) = llm._rows([prompt + expected[:at]], replace(params, max_tokens=1))
    raw, scores = _draw(llm, row, prompt, expected[:at])
    a, b = expected[at], found[at]
    gap = abs(float(scores[a] - scores[b]))
    cuts = cut_distances(penalised(raw, row.request.params, prompt, expected[:at]), row.request.params)
    return Divergence(at, a, b, min(gap if np.isfinite(gap) else np.inf, float(cuts[a]), float(cuts[b])))


def _draw(llm: LLM, row: TextSequence, prompt: list[int], shared: list[int]):
    """Raw logits and what is maximised, float [V], for the token behind prompt + shared."""
    request, size = row.request, PREFILL_SIZES[0]
    settings = replace(PLAIN_SETTINGS, top_logprobs=0)
    data = llm.target.layout.data
    device = Device(llm.plain_programs, data, round_capacity(request.need), settings)
    device.admit(0, request)
    for start in range(0, len(request.prompt) - 1, size):
        device.prefill([0], [min(size, len(request.prompt) - 1 - start)], size)
    vocab, state = llm.config.vocab_size, device.state
    sampling = state.sampling
    for name, ids in (("prompt_counts", prompt), ("output_counts", shared)):
        old, new = getattr(sampling, name), np.zeros((data, vocab), np.int32)
        new[0] = np.bincount(np.array(ids, int), minlength=vocab)
        sampling = replace(sampling, **{name: place(new, old.sharding)})
    drawn = llm.plain_programs.draw(replace(state, sampling=sampling))
    return tuple(np.asarray(x[0], np.float64) for x in drawn)


def penalised(raw, params: SamplingParams, prompt: list[int], output: list[int]):
    """Raw logits [V] after logit bias and penalties, before temperature."""
    x = np.array(raw, np.float64)
    for token, value in params.logit_bias.items():
        x[token] += value
    seen = np.unique(np.array(prompt + output, int))
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    counts = np.bincount(np.array(output, int), minlength=len(x))
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def cut_distances(logits, params: SamplingParams):
    """How far each token [V] was from the other side of the nearest cut: in logits for top-k, in probability mass for
    top-p, in probability relative to the best for min-p. Infinite where no cut is near."""
    distances = np.full(len(logits), np.inf)
    if params.temperature == 0:
        return distances
    x = logits / params.temperature

    if 0 < params.top_k < len(x):
        last = np.sort(x)[-params.top_k]
        # The token that defines the cut is at distance 0 of it, and stays.
        distances = np.where(x == last, np.inf, np.abs(x - last))
        x = np.where(x >= last, x, -np.inf)
    weights = np.exp(x - x.max())
    if params.top_p < 1:
        order = np.argsort(weights)
        upto = np.concatenate([[0], np.cumsum(weights[order])])
        above = 1 - upto[np.searchsorted(weights[order], weights, side="right")] / upto[-1]
        distances = np.minimum(distances, np.where(weights < weights.max(), np.abs(above - params.top_p), np.inf))
        weights = np.where((above < params.top_p) | (weights == weights.max()), weights, 0)
    if params.min_p > 0:
        distances = np.minimum(distances, np.abs(weights - params.min_p))
    return distances
