"""Where two continuations part: found, measured, and told from a tie."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.frontend.compare import (
    cut_distances,
    divergence,
    first_difference,
    measure_drafting,
    median_run,
    penalised,
    why_plain,
)
from dflash_jax.frontend.outputs import Completion, Timings
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from tools.equality import processed_reference

V = 40
CUTS = {
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "none": {},
}
PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": {3: 1.5}}
PROMPT, OUTPUT = [1, 2, 3, 3], [5, 5, 2]


def filled(**options) -> SamplingParams:
    return SamplingDefaults().fill(SamplingParams(**{"temperature": 0.7, **options}))


def reference(logits, params):
    bias = np.zeros(V)
    for token, value in params.logit_bias.items():
        bias[token] = value
    options = {
        "logit_bias": bias,
        "prompt_counts": np.bincount(PROMPT, minlength=V),
        "output_counts": np.bincount(OUTPUT, minlength=V),
        "repetition": params.repetition_penalty,
        "frequency": params.frequency_penalty,
        "presence": params.presence_penalty,
    }
    return processed_reference(logits, {**options, **{k: getattr(params, k) for k in ("temperature", *CUTS["all"])}})


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["plain", "penalised"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_distances_are_those_of_the_definitions(cuts, penalties):
    for seed in range(20):
        logits = 2 * np.random.default_rng(seed).standard_normal(V)
        params = filled(**cuts, **penalties)
        adjusted = penalised(logits, params, PROMPT, OUTPUT)
        greedy, _ = reference(logits, replace(params, temperature=0.0))
        np.testing.assert_allclose(adjusted, greedy)
        distances = cut_distances(adjusted, params)
        assert (distances > 0).all()
        np.testing.assert_allclose(distances.min(), reference(logits, params)[1])


def test_a_token_just_beyond_each_cut_is_near_it():
    weights = np.array([0.5, 0.3, 0.1999999, 0.0000001])
    logits = np.log(weights)
    for cut in ({"top_p": 0.8}, {"min_p": 0.3999999}):
        distances = cut_distances(logits, filled(temperature=1.0, **cut))
        assert distances[2] < 1e-6
        assert distances[3] > 0.1
    near = cut_distances(np.array([2.0, 1.0, 1.0 - 1e-6, -3.0]), filled(temperature=1.0, top_k=2))
    assert near[2] < 1e-5
    assert near[3] > 1


def test_first_difference_is_the_first_unequal_position():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.fixture(scope="module")
def llm():
    return LLM()


@pytest.mark.parametrize(
    "params",
    [SamplingParams(max_tokens=8), SamplingParams(temperature=0.8, seed=1, top_k=3, max_tokens=8, **PENALTIES)],
    ids=["greedy", "sampled"],
)
def test_a_wrong_token_is_no_tie(llm, params):
    (right,) = llm.generate(["def f("], params, block_size=1)
    assert divergence(llm, right.prompt_ids, right.token_ids, right.token_ids, params) is None
    wrong = list(right.token_ids)
    wrong[4] = (wrong[4] + 7) % llm.config.vocab_size
    parting = divergence(llm, right.prompt_ids, right.token_ids, wrong, params)
    assert (parting.at, parting.expected, parting.actual) == (4, right.token_ids[4], wrong[4])
    assert not parting.is_tie
    shorter = divergence(llm, right.prompt_ids, right.token_ids, right.token_ids[:-1], params)
    assert shorter.at == 7
    assert not shorter.is_tie


def test_the_margin_is_the_targets_own(llm):
    """The likeliest token's log-probability minus the second one's."""
    params = SamplingParams(max_tokens=6, logprobs=2)
    (right,) = llm.generate(["import os\n"], params, block_size=1)
    first, second = sorted(right.logprobs[3]["top"].items(), key=lambda item: -item[1])
    wrong = [*right.token_ids[:3], second[0], 0, 0]
    parting = divergence(llm, right.prompt_ids, right.token_ids, wrong, params)
    assert parting.margin == pytest.approx(first[1] - second[1], abs=1e-4)


def completion_of(seconds: float) -> Completion:
    return Completion([1], [2, 3], None, "length", [1, 1], None, Timings(0, 0, 0, 0, seconds, 0))


@pytest.mark.parametrize(("seconds", "median"), [([3.0, 1.0, 2.0], 2.0), ([5.0], 5.0), ([4.0, 1.0], 4.0)])
def test_the_median_run_is_a_run_of_those(seconds, median):
    (completion,) = median_run([[completion_of(s)] for s in seconds])
    assert completion.timings.decode_s == median


def test_the_median_run_is_one_run_for_all_prompts():
    # Each prompt has its median seconds in another run; spans of different runs do not overlap.
    runs = [[completion_of(s) for s in seconds] for seconds in ([2.0, 1.0, 9.0], [3.0, 2.0, 1.0], [1.0, 3.0, 5.0])]
    assert median_run(runs) is runs[2]


class Recorded:
    """An LLM whose runs take given seconds."""

    block_size, drafting_block_size, largest_block = "auto", 8, 16

    def __init__(self, seconds: dict[int, list[float]]):
        self.seconds, self.sizes, self.seeds = seconds, [], set()

    def pieces(self, prompt, params, block_size):
        self.sizes.append(block_size)
        self.seeds.add(params.seed)
        yield "a piece"
        yield completion_of(self.seconds[block_size].pop(0))


def test_drafting_is_measured_warm_alternately_and_by_the_median():
    # The first run of each side, which compiles, does not count.
    llm, seen = Recorded({8: [99.0, 1.0, 4.0, 2.0], 1: [99.0, 3.0, 3.0, 8.0]}), []
    (measured,) = measure_drafting(llm, ["x"], SamplingParams(temperature=1.0), watch=lambda *seen_: seen.append(seen_))
    assert llm.sizes == [8, 1] * 4
    assert seen == [(size == 8, i // 2, "a piece") for i, size in enumerate(llm.sizes)]
    assert (measured.block_size, measured.speedup) == (8, 1.5)
    assert (measured.drafted.timings.decode_s, measured.plain.timings.decode_s) == (2.0, 3.0)
    # Sides with random seeds would have different texts.
    assert llm.seeds == {0}


def test_a_fixed_block_size_is_the_one_that_is_measured():
    llm = Recorded({4: [1.0] * 4, 1: [1.0] * 4})
    llm.block_size = 4
    assert measure_drafting(llm, ["x"], SamplingParams())[0].block_size == 4


@pytest.mark.parametrize(
    ("block_size", "predicted", "drafted_s", "reason"),
    [
        ("auto", "is predicted to take 9.0 times as long", 4.0, "drafting at block size 8 is 0.75 times as fast"),
        # A prediction that the measured rates contradict, and "auto" that drafts.
        ("auto", "is predicted to take 9.0 times as long", 2.0, None),
        ("auto", None, 4.0, None),
        (8, "is predicted to take 9.0 times as long", 4.0, None),
    ],
)
def test_the_reason_for_plain_decoding_comes_from_the_measured_rates(block_size, predicted, drafted_s, reason):
    llm = Recorded({8: [99.0, *[drafted_s] * 6], 1: [99.0, *[3.0] * 6]})
    llm.block_size, llm.why_plain = block_size, lambda: predicted
    comparisons = measure_drafting(llm, ["x"], SamplingParams())
    assert why_plain(llm, comparisons) == reason
