"""Compares two runs: the tokens, where they differ first and whether that is a tie, and the seconds of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_jax.decoding.state import PLAIN_SETTINGS
from dflash_jax.engine.config import PREFILL_SIZES
from dflash_jax.engine.request import Request
from dflash_jax.frontend.llm import LLM
from dflash_jax.frontend.outputs import Completion
from dflash_jax.frontend.sequence import Piece
from dflash_jax.ops.cache import page_size, pages_of
from dflash_jax.sampling_params import SamplingParams

# In float32 the order of a sum decides a draw whose two best candidates are closer than this.
TIE = 1e-4
# Measured runs of each side.
REPEATS = 3
# Gets each new piece of text: (whether the run drafts, the number of the run, the piece). Run 0 is not measured.
Watch = Callable[[bool, int, Piece], None]


@dataclass(frozen=True)
class Divergence:
    """The first place where two continuations differ.

    Attributes:
        at: Index of the token.
        expected: The token of one run; -1 where that has ended.
        actual: The token of the other run; -1 where that has ended.
        margin: By how much one token was preferred: in the units of the logits that are compared, or of the cut of
            top-k, top-p or min-p where that was nearer.
    """

    at: int
    expected: int
    actual: int
    margin: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding may have decided."""
        return self.margin < TIE


@dataclass(frozen=True)
class SpeedComparison:
    """One prompt's continuation with the drafter and without it, each measured several times.

    Attributes:
        block_size: The block size of the drafted side.
        drafted: The completion of the drafted run with the median seconds of decoding; of several prompts, all
            completions are those of one run.
        plain: The same without the drafter.
    """

    block_size: int
    drafted: Completion
    plain: Completion

    @property
    def speedup(self) -> float:
        """Tokens a second with the drafter, relative to those without it."""
        return tokens_per_s(self.drafted) / tokens_per_s(self.plain)


def tokens_per_s(*completions: Completion) -> float:
    """New tokens a second of decoding."""
    return sum(len(c.token_ids) for c in completions) / max(sum(c.timings.decode_s for c in completions), 1e-9)


def measure_drafting(
    llm: LLM,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    is_batched: bool = False,
    watch: Watch | None = None,
) -> list[SpeedComparison]:
    """Continues prompts with the drafter and without it, and measures both when their programs are compiled.

    Each side runs once without measurement, then both run `REPEATS` times, one after the other: a change of the
    machine's speed meets both.

    Args:
        llm: A target with a drafter. The drafted side has its block size, or with "auto" its `drafting_block_size`:
            one block size, where "auto" may mix several.
        prompts: Text or token ids each.
        params: Those of both sides. A seed of None is replaced by 0.
        is_batched: Whether the prompts run together; else one after the other.
        watch: Sees the text of each run; needs prompts that run one after the other.

    Returns:
        One `SpeedComparison` for each prompt.
    """
    params = params if params.seed is not None else replace(params, seed=0)
    block_size = llm.drafting_block_size if llm.block_size == "auto" else llm.block_size

    def run(is_drafted: bool, number: int) -> list[Completion]:
        size = block_size if is_drafted else 1
        if is_batched:
            return llm.generate(prompts, params, size, progress=False)
        completions = []
        for prompt in prompts:
            for event in llm.pieces(prompt, params, size):
                if isinstance(event, Completion):
                    completions.append(event)
                elif watch is not None:
                    watch(is_drafted, number, event)
        return completions

    runs: dict[bool, list[list[Completion]]] = {True: [], False: []}
    for number in range(REPEATS + 1):
        for is_drafted, measured in runs.items():
            completions = run(is_drafted, number)
            measured += [completions] if number else []
    sides = map(median_run, runs.values())
    return [SpeedComparison(block_size, *pair) for pair in zip(*sides, strict=True)]


def median_run(runs: Sequence[Sequence[Completion]]) -> Sequence[Completion]:
    """The run with the median seconds of decoding of all its prompts; of an even number the slower one."""
    return sorted(runs, key=lambda run: sum(c.timings.decode_s for c in run))[len(runs) // 2]


def why_plain(llm: LLM, comparisons: Sequence[SpeedComparison]) -> str | None:
    """Why "auto" decodes plainly, from measured rates.

    Args:
        llm: That of the comparisons.
        comparisons: What `measure_drafting` returned.

    Returns:
        A sentence; None where "auto" drafts, where a fixed block size is used, or where drafting was measured to be
        at least as fast.
    """
    if llm.block_size != "auto" or llm.why_plain() is None:
        return None
    factor = tokens_per_s(*(c.drafted for c in comparisons)) / tokens_per_s(*(c.plain for c in comparisons))
    return None if factor >= 1 else f"drafting at block size {comparisons[0].block_size} is {factor:.2f} times as fast"


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int | None:
    """The first index at which two lists of tokens differ; None where they are equal."""
    for i, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            return i
    return None if len(expected) == len(actual) else min(len(expected), len(actual))


def divergence(llm: LLM, prompt: list[int], expected: list[int], actual: list[int], params: SamplingParams):
    """Compares two continuations of a prompt.

    Args:
        llm: Computes the margin, by prefill of the shared part. A tie of two experts of a router does not count.
        prompt: Token ids.
        expected: New tokens of one run.
        actual: New tokens of the other run.
        params: Those of both runs.

    Returns:
        A `Divergence`, or None where the tokens are equal.
    """
    at = first_difference(expected, actual)
    if at is None:
        return None
    if at >= min(len(expected), len(actual)):
        return Divergence(at, -1, -1, float("inf"))
    request = llm.new_sequence(prompt, replace(params, max_tokens=at + 1)).request
    request.tokens, request.resumed = expected[:at], at
    raw, scores = _next_token_scores(llm, request)
    a, b = expected[at], actual[at]
    gap = abs(float(scores[a] - scores[b]))
    cuts = cut_distances(penalised(raw, request.params, prompt, expected[:at]), request.params)
    return Divergence(at, a, b, min(gap if np.isfinite(gap) else np.inf, float(cuts[a]), float(cuts[b])))


def _next_token_scores(llm: LLM, request: Request):
    """For the token after a request's context: raw logits, and the values whose maximum is drawn, float [V]."""
    size, length = PREFILL_SIZES[0], len(request.context)
    settings = replace(PLAIN_SETTINGS, top_logprobs=0)
    # In whole pages: requests of about one length share the programs.
    capacity = pages_of(request.need, request.need) * page_size(request.need)
    runner = llm.new_runner(llm.plain_programs, llm.target.layout.data, capacity, settings)
    runner.admit(0, request)
    for start in range(0, length - 1, size):
        runner.prefill([0], [min(size, length - 1 - start)], size)
    return tuple(np.asarray(x[0], np.float64) for x in runner.next_token_scores())


def penalised(raw, params: SamplingParams, prompt: list[int], output: list[int]):
    """Raw logits [V] after logit bias and penalties, before temperature."""
    x = np.array(raw, np.float64)
    for token, value in params.logit_bias.items():
        x[token] += value
    seen = np.unique(np.array(prompt + output, int))
    penalty = params.repetition_penalty or 1.0
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    counts = np.bincount(np.array(output, int), minlength=len(x))
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def cut_distances(logits, params: SamplingParams):
    """Distance of each token from the nearest cut of top-k, top-p or min-p.

    Args:
        logits: float [V].
        params: With no None among the sampling options.

    Returns:
        float [V]: in logits for top-k, in probability mass for top-p, in probability relative to the best for min-p;
        infinite without a cut.
    """
    distances = np.full(len(logits), np.inf)
    if not params.temperature:
        return distances
    top_k, min_p = params.top_k or 0, params.min_p or 0.0
    top_p = 1.0 if params.top_p is None else params.top_p
    x = logits / params.temperature
    if 0 < top_k < len(x):
        last = np.sort(x)[-top_k]
        # The token that defines the cut is at distance 0, but is never cut off.
        distances = np.where(x == last, np.inf, np.abs(x - last))
        x = np.where(x >= last, x, -np.inf)
    weights = np.exp(x - x.max())
    if top_p < 1:
        order = np.argsort(weights)
        upto = np.concatenate([[0], np.cumsum(weights[order])])
        above = 1 - upto[np.searchsorted(weights[order], weights, side="right")] / upto[-1]
        distances = np.minimum(distances, np.where(weights < weights.max(), np.abs(above - top_p), np.inf))
        weights = np.where((above < top_p) | (weights == weights.max()), weights, 0)
    if min_p > 0:
        distances = np.minimum(distances, np.abs(weights - min_p))
    return distances
