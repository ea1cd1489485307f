"""vLLM's names: every row of the tables on the page for its users."""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from tqdm import tqdm

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.frontend.keywords import with_other_names
from dflash_jax.frontend.llm_config import TINY, LLMConfig

PAGE = (Path(__file__).parents[2] / "docs" / "vllm_and_sglang.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[tuple[str, str]]:
    """The cells of the table under a heading line, without the marks of code."""
    lines = PAGE[PAGE.index(heading) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split(" | ")) for line in table]


SAME, REFUSED = rows("| vLLM | here |"), rows("| vLLM | what to do |")
NAMES = {
    "SamplingParams": SamplingParams,
    "partial": partial,
    "tqdm": tqdm,
    "DIR": str(TINY / "target"),
    "DRAFT": str(TINY / "draft"),
}


def configuration(*given, **keywords) -> LLMConfig:
    """What `LLM` makes of its arguments, without loading anything."""
    names = [field.name for field in fields(LLMConfig)]
    config, _ = with_other_names(dict(zip(names, given, strict=False)) | keywords)
    # A drafter's revision is of a repo; the bundled drafter is a directory, which is checked when it is read.
    return LLMConfig(**config | {"dtype": None if config["dtype"] == "auto" else config["dtype"]})


@pytest.fixture(scope="module")
def names():
    llm = LLM()
    params = SamplingParams(max_tokens=6, logprobs=2, seed=3, temperature=1.0)
    (output,) = llm.generate("def area(", params)
    messages = [{"role": "user", "content": "Write the function `f`: Add one."}]
    return NAMES | {"LLM": configuration, "llm": llm, "params": params, "messages": messages, "output": output}


def comparable(value):
    is_answer = isinstance(value, list) and hasattr(value[0], "token_ids")
    return [(each.prompt_ids, each.token_ids, each.text) for each in value] if is_answer else value


@pytest.mark.parametrize(("vllm", "here"), SAME, ids=[row[0][:60] for row in SAME])
def test_a_row_of_the_table_gives_the_same_in_both_forms(vllm, here, names):
    assert comparable(eval(vllm, names)) == comparable(eval(here, names))


@pytest.mark.parametrize(("vllm", "advice"), REFUSED, ids=[row[0][:60] for row in REFUSED])
def test_what_is_refused_says_what_to_do(vllm, advice):
    with pytest.raises(InputError, match=re.escape(advice)):
        eval(vllm, NAMES | {"LLM": configuration})


def test_the_tables_have_their_rows():
    assert (len(SAME), len(REFUSED)) == (49, 7)


def test_an_llm_takes_other_names_and_draws_the_same_seeds_again():
    options = {"model": TINY / "target", "speculative_config": {"model": str(TINY / "draft")}, "max_model_len": 256}
    params = SamplingParams(temperature=1.0, max_tokens=8)
    texts = [[c.text for c in LLM(**options, seed=4).generate(["def ", "def "], params)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_only_calls_that_run_take_seeds_of_the_llm(monkeypatch):
    llm, params = LLM(draft=None, max_len=256, seed=4), SamplingParams(temperature=1.0, max_tokens=8)
    expected = [[c.text for c in llm.generate(["def ", "def "], params)], "".join(llm.stream("def ", params))]
    llm = LLM(draft=None, max_len=256, seed=4)
    llm.check(["def ", "def "], params)
    for prompts, wrong in ((["def ", ""], params), (["def ", "def "], [params, SamplingParams(max_tokens=300)])):
        with pytest.raises(InputError):
            llm.generate(prompts, wrong)
    with monkeypatch.context() as patch:
        patch.setattr("dflash_jax.frontend.llm.plan_memory", Mock(side_effect=InputError("too little memory")))
        with pytest.raises(InputError, match="memory"):
            llm.generate(["def ", "def "], params)
    first = [c.text for c in llm.generate(["def ", "def "], params)]
    with pytest.raises(InputError):
        llm.stream("", params)
    assert [first, "".join(llm.stream("def ", params))] == expected


def test_a_sequence_is_one_continuation(names):
    for wrong, message in ((SamplingParams(n=2), "^n is 2: "), ({"temperature": 1}, "^params is {'temperature': 1}: ")):
        with pytest.raises(InputError, match=message):
            names["llm"].new_sequence("def ", wrong)


def test_n_continuations_have_the_seeds_from_the_first_on_and_share_the_prefill(names):
    llm, prompt = names["llm"], "def f(a, b):\n    return a + b\n" * 8
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=2**32 - 1, n=3, logprobs=1)
    (output,) = llm.generate(prompt, params)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for each, seed in zip(output.outputs, (2**32 - 1, 0, 1), strict=True):
        (alone,) = llm.generate(prompt, SamplingParams(temperature=1.0, max_tokens=8, seed=seed))
        assert each.token_ids == alone.token_ids
        assert len(each.logprobs) == len(each.token_ids)
    assert output.token_ids == output.outputs[0].token_ids
    ((_, sequences),) = llm._sequences(prompt * 2, params)
    assert len(list(llm._finished([sequences]))) == 3
    assert all(s.request.cached for s in sequences[1:])


def test_stop_reason_is_what_the_request_named(names):
    llm = names["llm"]
    (free,) = llm.generate("def main(", SamplingParams(max_tokens=24))
    for name, value in (("stop", free.text[6:9]), ("stop_token_ids", [free.token_ids[7]])):
        (stopped,) = llm.generate("def main(", SamplingParams(max_tokens=24, **{name: value}))
        assert stopped.stop_reason == (value if name == "stop" else value[0])
    assert free.stop_reason is None
