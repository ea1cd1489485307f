"""From prompts to sequences: texts too long to fit, max_tokens of None, and bars that a caller makes."""

import json
import shutil

import pytest
from tqdm import tqdm

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer

LONGEST = Tokenizer(TINY / "target").longest_token
MAX_LEN = 64
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.fixture(scope="module")
def llm():
    return LLM(draft=None, slots=2, max_len=MAX_LEN)


@pytest.mark.parametrize("text", ["x" * (LONGEST * MAX_LEN + 1), "é" * 10_000_000])
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(text, llm, monkeypatch):
    def encode(text, special):
        raise AssertionError("tokenised")

    monkeypatch.setattr(llm.tokenizer, "_encode", encode)
    most = f"{len(text)} characters: at most {MAX_LEN} tokens fit, which have {LONGEST * MAX_LEN} characters at most"
    calls = [(lambda: llm.generate(text), r"prompts\[0\]"), (lambda: llm.stream(text), "prompt")]
    calls += [(lambda: llm.check({"prompt": text}), r"prompts\[0\]")]
    calls += [(lambda: llm.new_sequence(text, SamplingParams()), "prompt")]
    for call, name in calls:
        with pytest.raises(InputError, match=f"^{name} has {most}"):
            call()
    with pytest.raises(InputError, match=r"^the text of messages has \d+ characters: at most 64 tokens fit"):
        llm.chat([{"role": "user", "content": text}])


def test_a_text_of_long_tokens_fits(llm):
    special = max(llm.tokenizer.transformers_tokenizer.all_special_tokens, key=len)
    text = special * (MAX_LEN - 1)
    assert len(llm.encode(text)) == MAX_LEN - 1 < len(text) <= LONGEST * MAX_LEN
    llm.check(text, SamplingParams(max_tokens=1))


def test_a_long_text_is_encoded_where_it_need_not_fit(llm):
    assert len(llm.encode("x " * 5000)) > MAX_LEN
    llm.check({"prompt": "x " * 5000, "prompt_token_ids": [5]}, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, BYTES]}},
        {"vocabulary": "x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_longest_token_is_unknown_where_a_tokenizer_drops_text(change, tmp_path):
    directory = shutil.copytree(TINY / "target", tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors"))
    given = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    character = change.get("vocabulary")
    if character is not None:
        vocabulary, merges = given["model"]["vocab"], given["model"]["merges"]
        given["model"]["vocab"] = {token: i for token, i in vocabulary.items() if character not in token}
        given["model"]["merges"] = [pair for pair in merges if character not in "".join(pair)]
    else:
        given |= change
    (directory / "tokenizer.json").write_text(json.dumps(given), encoding="utf-8")
    assert Tokenizer(directory).longest_token is None


def test_max_tokens_of_none_is_as_many_as_fit(llm):
    params = SamplingParams(max_tokens=None, ignore_eos=True, n=2)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert [len(each.token_ids) for each in output.outputs] == [MAX_LEN - 3] * 2
    assert (output.finish_reason, params.max_tokens) == ("length", None)
    assert llm.new_sequence([5] * 9, SamplingParams(max_tokens=None)).request.need == MAX_LEN
    with pytest.raises(InputError, match=f"{MAX_LEN} prompt tokens and 1 new ones are {MAX_LEN + 1}"):
        llm.generate([[5] * MAX_LEN], params)
    with pytest.raises(InputError, match=f"3 prompt tokens and {MAX_LEN} new ones are {MAX_LEN + 3}"):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, min_tokens=MAX_LEN))


@pytest.mark.parametrize("name", ["use_tqdm", "progress"])
def test_a_bar_that_the_caller_makes_counts_the_prompts(name, llm):
    bars, counts = [], []

    def make(**options):
        bars.append(tqdm(**options, disable=True))
        bars[-1].update = lambda n=1: counts.append(n)
        bars[-1].close = lambda: counts.append("closed")
        return bars[-1]

    llm.generate(["a", "b"], SamplingParams(max_tokens=1), **{name: make})
    assert counts == [1, 1, "closed"]
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), **{name: make})
    assert (len(bars), counts[3:]) == (2, [1, "closed"])
