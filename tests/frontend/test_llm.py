"""The library's front on the bundled pair."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.decoding.state import RECORDED
from dflash_jax.engine import steps
from dflash_jax.engine.config import speculations_of
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.frontend.compare import divergence
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.models.families.reading import LIMITS

PROMPTS = ["def main(", "import os\nimport", "class Parser:\n    def __init__(self", "x"]
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=3, max_tokens=40
)


@pytest.fixture(scope="module")
def llm():
    return LLM()


def assert_same(llm, mine, plain, params):
    parting = divergence(llm, mine.prompt_ids, plain.token_ids, mine.token_ids, params)
    assert parting is None or parting.is_tie, parting


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=48), SAMPLED], ids=["greedy", "sampled"])
def test_the_drafter_changes_nothing_but_the_rounds(llm, params):
    plain = llm.generate(PROMPTS, params, block_size=1)
    for block in (16, 5, 2):
        for mine, expected in zip(llm.generate(PROMPTS, params, block_size=block), plain, strict=True):
            assert_same(llm, mine, expected, params)
            assert sum(mine.acceptance_lengths) == len(mine.token_ids)
            assert max(mine.acceptance_lengths, default=1) <= block
    assert all(set(c.acceptance_lengths) <= {1} for c in plain)
    drafted = llm.generate(PROMPTS, params, block_size=16)
    assert sum(len(c.acceptance_lengths) for c in drafted) < sum(len(c.token_ids) for c in plain)


def test_alone_or_in_a_batch(llm):
    together = llm.generate(PROMPTS, SAMPLED)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate([prompt], SAMPLED)
        assert_same(llm, alone, expected, SAMPLED)


def test_stream_gives_the_text_of_generate(llm):
    (whole,) = llm.generate([PROMPTS[0]], SAMPLED)
    pieces = list(llm.stream(PROMPTS[0], SAMPLED))
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1


def test_reproducible_is_equal_to_the_bit_in_bfloat16():
    llm = LLM(dtype="bfloat16", reproducible=True, slots=2, block_size=4)
    # Few tokens: each round on a CPU makes float32 of all weights.
    params = replace(SAMPLED, logprobs=2, max_tokens=6)
    plain, drafted = (llm.generate(PROMPTS[:2], params, block_size=block) for block in (1, 3))
    for mine, expected in zip(drafted, plain, strict=True):
        assert mine.token_ids == expected.token_ids
        assert mine.logprobs == expected.logprobs


def test_auto_always_drafts_with_the_largest_block_where_runs_are_reproducible():
    llm = LLM(reproducible=True)
    # What costs and acceptance favour is another block size.
    assert llm._policy().favoured_draft(1).block_size < llm.drafting_block_size == llm.largest_block
    llm._policy = lambda: DraftLengthPolicy(speculations_of((16,)), lambda batch_size, spec: 1 + spec.block_size)
    assert llm._policy().why_plain(1) is not None
    assert llm.why_plain() is None


def test_stop_string_and_stop_id(llm):
    (whole,) = llm.generate(["def main("], SamplingParams(max_tokens=48))
    cut = whole.text[10:14]
    (stopped,) = llm.generate(["def main("], SamplingParams(max_tokens=48, stop=cut))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(cut)]
    assert sum(stopped.acceptance_lengths) == len(stopped.token_ids)
    token = whole.token_ids[7]
    (ended,) = llm.generate(["def main("], SamplingParams(max_tokens=48, stop_token_ids=[token]))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert ended.finish_reason == "stop"


def test_logprobs_of_raw_and_processed_distribution(llm):
    for mode in ("raw", "processed"):
        params = replace(SAMPLED, logprobs=3, logprobs_mode=mode, max_tokens=12)
        (mine,), (plain,) = llm.generate(["x = "], params), llm.generate(["x = "], params, block_size=1)
        assert len(mine.logprobs) == len(mine.token_ids)
        for a, b, token in zip(mine.logprobs, plain.logprobs, mine.token_ids, strict=True):
            assert a["token_id"] == b["token_id"] == token
            np.testing.assert_allclose(a["logprob"], b["logprob"], atol=1e-4)
            assert len(a["top"]) == 3
            assert max(a["top"].values()) >= a["logprob"] - 1e-6


def test_log_probabilities_behind_more_positions_than_a_slot_keeps(llm):
    """The most likely token at each position is the greedy one, and no other position's."""
    assert max(steps.REPORT_SIZE, LIMITS["block_size"]) <= RECORDED
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=RECORDED + 90, ignore_eos=True)
    (out,) = llm.generate(["def main("], params, block_size=4)
    assert len(out.token_ids) == RECORDED + 90
    assert [max(entry["top"], key=entry["top"].get) for entry in out.logprobs] == out.token_ids
    assert [entry["logprob"] for entry in out.logprobs] == [max(entry["top"].values()) for entry in out.logprobs]


def test_a_batch_keeps_every_rows_own_options(llm):
    params = [SamplingParams(max_tokens=5), replace(SAMPLED, max_tokens=17), SamplingParams(max_tokens=1, logprobs=1)]
    outs = llm.generate(PROMPTS[:3], params)
    for prompt, wanted, out in zip(PROMPTS, params, outs, strict=False):
        (alone,) = llm.generate([prompt], wanted)
        assert_same(llm, out, alone, wanted)
        assert (out.logprobs is None) == (wanted.logprobs is None)
        assert len(out.token_ids) <= wanted.max_tokens


def test_ids_and_text_are_the_same_prompt(llm):
    ids = llm.encode(PROMPTS[0])
    params = SamplingParams(max_tokens=8)
    assert llm.generate([ids], params)[0].token_ids == llm.generate([PROMPTS[0]], params)[0].token_ids


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "Write the function `f`: Add one."}]
    off, on = llm.encode_chat(messages, thinking=False), llm.encode_chat(messages, thinking=True)
    assert llm.tokenizer.render_chat(messages, False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert llm.tokenizer.render_chat(messages, True).endswith("<|im_start|>assistant\n<think>\n")
    assert off != on
    assert llm.chat(messages, SamplingParams(max_tokens=4), thinking=False)[0].prompt_ids == off


def test_few_programs_and_none_for_another_request(llm):
    llm.generate(["a b c"], SAMPLED)
    before = llm.programs.count
    llm.generate(
        ["something else"], replace(SAMPLED, temperature=0.1, top_k=3, seed=9, presence_penalty=0.3, max_tokens=30)
    )
    assert llm.programs.count == before


def test_defaults_of_a_checkpoint(tmp_path):
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [4, 5]}'
    )
    defaults = SamplingDefaults.read(tmp_path)
    filled = defaults.fill(SamplingParams(top_k=7))
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (0.6, 7, 0.95, 0.0)
    assert defaults.stops(filled) == [4, 5]
    assert defaults.stops(SamplingParams(ignore_eos=True, stop_token_ids=[9])) == [9]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "-0.1"),
        ({"temperature": float("nan")}, "nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample is False and temperature is 0.7"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        (
            {"logprobs_mode": "cooked"},
            "logprobs_mode is 'cooked': it must be one of raw_logprobs, processed_logprobs, sc",
        ),
        ({"logprobs_mode": True}, "logprobs_mode is True"),
        ({"logprobs_mode": 10**5000}, "logprobs_mode is an integer of 16610 bits"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"logprobs": -1}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"stop": ""}, "empty"),
    ],
)
def test_bad_sampling_params_are_refused_by_name(options, named):
    with pytest.raises(InputError, match=named):
        SamplingParams(**options)


def test_bad_prompts_are_refused(llm):
    for call, named in [
        (lambda: llm.generate([[1, 99999]]), "99999"),
        (lambda: llm.generate([[]]), "empty"),
        (lambda: llm.generate(["x"], SamplingParams(max_tokens=8192)), "8193"),
        (lambda: llm.generate(["x"], SamplingParams(logit_bias={5000: 1.0})), "5000"),
        (lambda: llm.generate(["x"], block_size=17), "17"),
        (lambda: llm.generate(["x"], block_size=0), "0"),
        (lambda: llm.generate(5), "prompts is 5: it must be a string, token ids"),
        (lambda: LLM(block_size=99), "99"),
        (lambda: LLM(dtype="float8"), "float8"),
        (lambda: LLM(draft_window_size=0), "0"),
        (lambda: LLM(max_len=100000), "100000"),
    ]:
        with pytest.raises(InputError, match=named):
            call()


def test_a_block_wider_than_a_dispatch_reports_still_moves_on(monkeypatch):
    """Else the host would ask for rounds for ever."""
    monkeypatch.setattr(steps, "REPORT_SIZE", 4)
    params = SamplingParams(max_tokens=24)
    small = LLM()
    (found,) = small.generate(PROMPTS[:1], params)
    (expected,) = small.generate(PROMPTS[:1], params, block_size=1)
    assert_same(small, found, expected, params)
