"""Log-probabilities of drawn tokens, of prompts and of given continuations, against a teacher-forced pass."""

from dataclasses import replace
from random import Random

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.models.layers import with_backend
from dflash_jax.ops.backend import Backend
from dflash_jax.sampling_params import LOGPROBS_MODES
from tools.equality import forward, processed_reference

TEMPERATURES = (0.0, 0.7, 1.0, 1.3)
CUTS = {"top_k": 12, "top_p": 0.9, "min_p": 0.01}
UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
RULES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": {9: 2.0, 72: -1.5}}
PROMPTS = ["def main(", "import os\nimport", "class Parser:\n    def __init__(self", "x = ["]
NAMED = (5, 300)


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", slots=8, max_len=512)


def teacher_forced(llm, texts: list[list[int]]) -> np.ndarray:
    """Logits float64 [B, T, V] of whole texts, in one pass without caches."""
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, ids in zip(tokens, texts, strict=True):
        row[: len(ids)] = ids
    return np.asarray(forward(with_backend(llm.target, Backend.xla()), jnp.asarray(tokens))[0], np.float64)


def expected_values(logits, params: SamplingParams, prompt, output) -> tuple[np.ndarray, float]:
    """What is reported at one position, float64 [V], and the distance of the nearest token from a cut."""
    source, _, what = params.logprobs_mode.partition("_")
    margin = np.inf
    if source != "raw":
        vocab = len(logits)
        bias = np.zeros(vocab)
        bias[list(params.logit_bias)] = list(params.logit_bias.values())
        cuts = UNCUT if source == "scaled" else {name: getattr(params, name) for name in CUTS}
        options = cuts | {
            "temperature": params.temperature,
            "repetition": params.repetition_penalty,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "logit_bias": bias,
            "prompt_counts": np.bincount(prompt, minlength=vocab),
            "output_counts": np.bincount(output, minlength=vocab),
        }
        logits, margin = processed_reference(logits, options)
    return (log_softmax(logits) if what == "logprobs" else logits), margin


@pytest.mark.parametrize("block_size", [1, 8], ids=["plain", "drafted"])
@pytest.mark.parametrize("rules", [{}, CUTS, CUTS | RULES], ids=["bare", "cuts", "rules"])
def test_every_mode_reports_what_a_teacher_forced_pass_gives(llm, rules, block_size):
    options = {"max_tokens": 10, "ignore_eos": True, "logprobs": 3, "logprob_token_ids": NAMED}
    bare = UNCUT | {"repetition_penalty": 1.0}
    kinds = [(mode, temperature) for mode in LOGPROBS_MODES for temperature in TEMPERATURES]
    params = [
        SamplingParams(temperature=temperature, seed=i, logprobs_mode=mode, **options | bare | rules)
        for i, (mode, temperature) in enumerate(kinds)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    found, checked = llm.generate(prompts, params, block_size=block_size), 0
    logits = teacher_forced(llm, [c.prompt_ids + c.token_ids for c in found])
    for row, completion, each in zip(logits, found, params, strict=True):
        prompt = completion.prompt_ids
        assert len(completion.logprobs) == len(completion.token_ids) == 10
        for i, entry in enumerate(completion.logprobs):
            values, margin = expected_values(row[len(prompt) + i - 1], each, prompt, completion.token_ids[:i])
            if margin < 1e-3:
                # What is cut is not decided.
                continue
            checked += 1
            assert entry["token_id"] == completion.token_ids[i]
            reported = {entry["token_id"]: entry["logprob"], **entry["top"], **entry["named"]}
            assert set(entry["named"]) == set(NAMED)
            np.testing.assert_allclose(list(reported.values()), values[list(reported)], atol=1e-4)
            np.testing.assert_allclose(list(entry["top"].values()), np.sort(values)[-3:][::-1], atol=1e-4)
    assert checked > 150
    if block_size > 1:
        assert max(n for c in found for n in c.acceptance_lengths) > 1


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_prompts_have_raw_log_probabilities_in_the_form_of_vllm(llm, mode):
    """Also in two choices, and longer than a chunk."""
    prompts = [*PROMPTS, (PROMPTS[2] + "):\n        ") * 12]
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=4, prompt_logprobs=2, logprobs_mode=mode, n=2, repetition_penalty=1.3
    )
    found = llm.generate(prompts, params)
    logits = teacher_forced(llm, [c.prompt_ids for c in found])
    values = logits if mode == "raw_logits" else log_softmax(logits, axis=-1)
    assert len(found[-1].prompt_ids) > 2 * 64
    for row, completion in zip(values, found, strict=True):
        assert completion.prompt_logprobs[0] is None
        assert len(completion.prompt_logprobs) == len(completion.prompt_ids)
        assert completion.logprobs is None
        for i, entry in enumerate(completion.prompt_logprobs[1:]):
            token = completion.prompt_ids[i + 1]
            assert next(iter(entry)) == token
            assert {e.rank for e in entry.values()} - {None} == {1, 2}
            np.testing.assert_allclose([e.logprob for e in entry.values()], row[i, list(entry)], atol=1e-4)
            assert entry[token].decoded_token == llm.tokenizer.token_bytes(token).decode(errors="replace")
    (none,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1))
    assert none.prompt_logprobs is None
    (one,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert one.prompt_logprobs == [None]


@pytest.mark.parametrize("mode", ["raw", "processed", "scaled_logprobs"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_scores_are_those_of_a_teacher_forced_pass(llm, mode, temperature):
    """By the temperature, but for raw ones, in any batch, at lengths around a chunk; without cuts and penalties."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, n).tolist() for n in (1, 1, 5, 40, 63, 64, 65, 100, 7)]
    texts = [rng.integers(0, 512, n).tolist() for n in (1, 63, 64, 24, 1, 1, 2, 150, 0)]
    params = SamplingParams(temperature=temperature, logprobs_mode=mode, seed=3, **CUTS | RULES)
    found = llm.score(prompts, texts, params)
    divisor = temperature if mode != "raw" and temperature > 0 else 1.0
    values = log_softmax(teacher_forced(llm, [p + t for p, t in zip(prompts, texts, strict=True)]) / divisor, axis=-1)
    for prompt, text, row, scores in zip(prompts, texts, values, found, strict=True):
        assert all(isinstance(each, float) for each in scores)
        expected = row[np.arange(len(prompt) - 1, len(prompt) + len(text) - 1), text]
        assert len(scores) == len(text)
        np.testing.assert_allclose(scores, expected, atol=1e-4)
    (alone,) = llm.score([prompts[3]], [texts[3]], params)
    np.testing.assert_allclose(alone, found[3], atol=1e-5)
    beside = llm.score(prompts[3:5], texts[3:5], [params, replace(params, logprobs_mode="raw")])
    np.testing.assert_allclose(beside[0], alone, atol=1e-5)
    np.testing.assert_allclose(beside[1], llm.score([prompts[4]], [texts[4]])[0], atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 8], ids=["plain", "drafted"])
def test_a_sampler_reports_what_scoring_its_text_gives(llm, block_size):
    """A policy gradient's ratio is 1 on the weights that have drawn, with the drafter and without."""
    params = SamplingParams(
        temperature=0.7, seed=11, max_tokens=24, logprobs=0, logprobs_mode="scaled_logprobs", **UNCUT
    )
    drawn = llm.generate(PROMPTS, replace(params, n=2), block_size=block_size)
    prompts = [c.prompt_ids for c in drawn for _ in c.outputs]
    texts = [output.token_ids for c in drawn for output in c.outputs]
    reported = [
        [top[t].logprob for top, t in zip(o.logprobs, o.token_ids, strict=True)] for c in drawn for o in c.outputs
    ]
    for scores, expected in zip(llm.score(prompts, texts, params), reported, strict=True):
        np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_scoring_draws_nothing_and_takes_no_seed(llm, monkeypatch):
    monkeypatch.setattr(llm, "_seeds", Random(5))
    before = llm._seeds.getstate()
    text = "def f(x):\n    return"
    (as_text,) = llm.score("def f(x):", "\n    return")
    tokens = llm.engine.statistics.new_tokens
    assert llm.score(["def f(x):"], [llm.tokenizer.encode_plain("\n    return")]) == [as_text]
    assert llm.score(np.array(llm.encode("def f(x):")), np.array(llm.encode(text)[5:]))[0]
    assert llm.score(["x", "y"], [np.array([]), ()]) == [[], []]
    assert llm.score([], []) == []
    # Zero where another engine has taken its place.
    assert llm.engine.statistics.new_tokens in (0, tokens)
    whole = llm.encode("x") * llm.max_len
    assert len(llm.score([whole[:10]], [whole[10:]])[0]) == llm.max_len - 10
    assert llm._seeds.getstate() == before
    assert not llm.engine.has_work


def test_bad_continuations_are_refused(llm):
    ids = llm.encode("x")
    for call, named in [
        (lambda: llm.score(["a", "b"], ["c"]), "1 continuations for 2 prompts"),
        (lambda: llm.score("a", []), "0 continuations for 1 prompts"),
        (lambda: llm.score(["a"], [[10**30]]), "prompt id"),
        (lambda: llm.score(["a"], [[10**5000]]), "an integer of 16610 bits is out of vocabulary"),
        (lambda: llm.score(["a"], [[-1]]), "prompt id -1"),
        (lambda: llm.score(["a"], [[1.5]]), r"continuations\[0\] is \[1.5\]"),
        (lambda: llm.score(["a"], [None]), r"continuations\[0\] is None"),
        (lambda: llm.score(["a"], [{}]), r"prompt|continuations\[0\]"),
        (lambda: llm.score(["a"], ["\ud800"]), r"continuations\[0\] is .*UTF-8"),
        (lambda: llm.score(["a"], 5), "continuations is 5"),
        (lambda: llm.score(7, ["a"]), "prompts is 7"),
        (lambda: llm.score([[]], [[1]]), "a prompt is empty"),
        (lambda: llm.score(["a"], [ids * llm.max_len]), f"at most {llm.max_len} fit"),
        (lambda: llm.score(["a"], ["b"], SamplingParams(logprobs_mode="raw_logits")), "logprobs_mode is raw_logits"),
        (lambda: llm.score(["a"], ["b"], [SamplingParams()] * 2), "2 SamplingParams for 1 prompts"),
        (lambda: llm.score(["a"], ["b"], 0.7), "params is 0.7"),
        (lambda: llm.score(["a"], ["b"], temperature=0.7), "temperature"),
        (
            lambda: llm.generate(["a"], SamplingParams(prompt_logprobs=21)),
            "prompt_logprobs is 21: it must be at most 20",
        ),
        (
            lambda: llm.generate(["a"], SamplingParams(prompt_logprobs=10**5000)),
            "prompt_logprobs is an integer of 16610",
        ),
    ]:
        with pytest.raises(InputError, match=named):
            call()


def test_without_new_tokens_a_prompt_is_only_read(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs=2, stop="x", n=2)
    read, longer = llm.generate(PROMPTS[:2], params), llm.generate(PROMPTS[:2], replace(params, max_tokens=3))
    for mine, other in zip(read, longer, strict=True):
        assert (mine.token_ids, mine.text, mine.finish_reason, mine.logprobs) == ([], "", "length", [])
        assert mine.prompt_logprobs == other.prompt_logprobs
        assert [output.token_ids for output in mine.outputs] == [[], []]
        assert mine.acceptance_lengths == []
    pieces = list(llm.pieces(PROMPTS[0], SamplingParams(max_tokens=0)))
    assert pieces[-1].finish_reason == "length"
    assert list(llm.stream(PROMPTS[0], SamplingParams(max_tokens=0))) == []
