"""Sampling parameters: wrong values, NumPy's values, and numbers at their limits."""

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from tests.odd_values import HUGE, SURROGATE, refusal


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=None, slots=2, max_len=64)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1: it must be 0 or more"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1: it must be between 0 and max_tokens, which is 256"),
        (
            {"max_tokens": HUGE, "min_tokens": -1},
            "min_tokens is -1: it must be between 0 and max_tokens, which is an int",
        ),
        ({"num_return_sequences": HUGE}, "num_return_sequences is an integer of 16610 bits: it must be 1 to 1024"),
        ({"sampling_seed": -1}, "sampling_seed is -1: it must be between 0"),
        ({"temperature": 1e300}, "temperature is 1e+300: it must be 0 (greedy) to 1e+30"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300: it must be above 0"),
        ({"frequency_penalty": -1e300}, "frequency_penalty is -1e+300: it must be a number between -1e+30 and 1e+30"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf: it must be a number between"),
        ({"top_k": -2}, "top_k is -2: it must be 0 (off) or more"),
        ({"logit_bias": {5: HUGE}}, "logit_bias 5: an integer of 16610 bits: it must be a number between"),
        ({"bad_words": [SURROGATE]}, "bad_words is ['\\ud800']: it must be text that UTF-8 can hold"),
        ({"stop": SURROGATE}, "stop is ('\\ud800',): it must be text that UTF-8 can hold"),
        ({"stop_regex": SURROGATE}, "stop_regex is ('\\ud800',): it must be text that UTF-8 can hold"),
        ({"best_of": np.int64(2)}, "best_of is 2: that is not supported"),
        ({"do_sample": np.bool_(False), "temperature": np.float16(1)}, "do_sample is False and temperature is 1.0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_error_names_the_sampling_parameter_that_the_caller_gave(keywords, message):
    assert (refusal(lambda: SamplingParams(**keywords)) or "").startswith(message)


def test_values_of_numpy_are_those_of_python():
    params = {"best_of": np.int64(1), "detokenize": np.bool_(True), "do_sample": np.bool_(False), "n": np.int8(2)}
    params |= {
        "ignore_eos": np.bool_(True),
        "logits_processors": np.array([]),
        "logit_bias": {np.int64(5): np.float16(2)},
    }
    given = SamplingParams(**params)
    assert given == SamplingParams(temperature=0.0, n=2, ignore_eos=True, logit_bias={5: 2.0})
    assert type(given.logit_bias[5]) is float


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e30},
        {"temperature": 1.0, "top_p": 1e-300, "min_p": 1e-300},
        {"repetition_penalty": 1e30, "frequency_penalty": 1e30, "presence_penalty": -1e30, "logit_bias": {5: 1e30}},
        {"repetition_penalty": 1.1e-30, "temperature": 1e-5},
        {"temperature": np.float16(0.5), "logit_bias": {5: np.float16(-2)}},
    ],
)
def test_numbers_at_their_limits_give_text_without_a_warning(extreme, llm):
    params = SamplingParams(max_tokens=4, seed=1, logprobs=1, **extreme)
    outputs = []
    assert refusal(lambda: outputs.extend(llm.generate("def f(", params))) is None
    assert all(np.isfinite(entry["logprob"]) for entry in outputs[0].logprobs)
