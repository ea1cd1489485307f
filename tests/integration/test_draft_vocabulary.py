"""Drafting from a part of the vocabulary."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.load import load_drafter
from dflash_jax.cli import train
from dflash_jax.decoding.sampling import add_noise, draw, draw_drafts, process_logits
from dflash_jax.decoding.sampling_state import GREEDY, sampling_mode
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import TINY
from tests.tiny import VOCAB, sampling

PROMPTS = ["def read_config(path):\n", "import json\nfor line in file:\n    "]
PARAMS = [
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, ignore_eos=True, frequency_penalty=0.3, top_p=0.9),
]


def ids_file(directory, ids):
    path = directory / "ids.json"
    path.write_text(json.dumps(list(ids)))
    return path


def answers(llm, most_tokens: int = 60):
    params = [replace(p, max_tokens=most_tokens) for p in PARAMS]
    return [(c.token_ids, c.acceptance_lengths) for c in llm.generate(PROMPTS, params, block_size=8)]


@pytest.fixture(scope="module")
def whole():
    return answers(LLM(draft_tokens=None))


def test_a_draw_of_some_is_one_of_all_without_the_others():
    """Under penalties, bias, filters and noise, which are all by token."""
    rng, size, n = np.random.default_rng(0), VOCAB, 6
    rows = sampling(
        n,
        temperature=[0, 0, 0.8, 1.0, 1.5, 1.0],
        top_k=[0, 0, 5, 0, 0, 0],
        top_p=[1, 1, 1, 0.8, 1, 1],
        repetition=[1, 1.5, 1, 1, 1.2, 1],
        frequency=[0, 0.5, 0, 0, 0, 0.9],
        seed=list(range(n)),
        logit_bias=rng.normal(0, 3, (n, size)) * (np.arange(n) % 2)[:, None],
    )
    rows = replace(rows, output_counts=jnp.asarray(rng.integers(0, 3, (n, size)), jnp.int32))
    logits, ids = jnp.asarray(rng.normal(0, 2, (n, 4, size)), jnp.float32), jnp.asarray([3, 4, 9, 20, 33, 50, 51, 60])
    positions = jnp.arange(4) + 7 * jnp.arange(n)[:, None]
    listed = jnp.isin(jnp.arange(size), ids)
    for special in (sampling_mode(rows), jnp.full(n, GREEDY)):
        expected, _ = draw(jnp.where(listed, logits, -jnp.inf), rows, positions, special)
        got, scores = draw_drafts(logits[..., ids], rows, positions, special, ids, has_scores=True)
        np.testing.assert_array_equal(got, expected)
        compared = logits[..., ids]
        if (special != GREEDY).any():
            options = rows.for_tokens(ids)
            compared = add_noise(process_logits(compared, options, mode=special), options, positions, ids)
        np.testing.assert_allclose(scores, jax.nn.softmax(compared, axis=-1).max(-1), rtol=1e-5)
        assert len(set(got.ravel().tolist())) > 3


def test_a_list_of_all_tokens_drafts_what_none_does(whole, tmp_path):
    shuffled = np.random.default_rng(0).permutation(512).tolist()
    assert answers(LLM(draft_tokens=ids_file(tmp_path, shuffled))) == whole


# bfloat16 is slow on a CPU, and a list does not depend on it.
EIGHT_BITS = {"quantize": "int8", "reproducible": True}


@pytest.mark.parametrize(
    "options", [{}, EIGHT_BITS, pytest.param(EIGHT_BITS | {"dtype": "bfloat16"}, marks=pytest.mark.long)]
)
def test_only_what_is_listed_is_drafted_and_the_tokens_stay(options, whole, tmp_path):
    often = Counter(t for ids, _ in whole for t in ids)
    listed = [t for t, _ in often.most_common(len(often) // 3)]
    got = answers(LLM(draft_tokens=ids_file(tmp_path, listed), **options), most_tokens=24 if options else 60)
    right = answers(LLM(draft_tokens=None, **options), most_tokens=24) if options else whole
    assert [ids for ids, _ in got] == [ids for ids, _ in right]

    def drafts(answers):
        """Of each round all but the last token."""
        for ids, lengths in answers:
            ends = np.cumsum(lengths)
            assert ends[-1] == len(ids)
            yield from (t for end, n in zip(ends, lengths, strict=True) for t in ids[end - n : end - 1])

    drafted, right_drafts = list(drafts(got)), list(drafts(right))
    # A third of the tokens that occur, the commonest, drafts at least two thirds of what the full vocabulary drafts.
    assert 3 * len(drafted) >= 2 * len(right_drafts)
    assert set(drafted) <= set(listed)
    assert not set(right_drafts) <= set(listed)


def test_the_drafters_own_list_is_taken_unless_told_otherwise(tmp_path):
    draft = shutil.copytree(TINY / "draft", tmp_path / "draft")
    (draft / "draft_tokens.json").write_text(json.dumps([5, 3, 5, 9]))
    assert LLM(TINY / "target", draft).drafter.vocabulary.ids[...].tolist() == [3, 5, 9]
    assert LLM(TINY / "target", draft, draft_tokens="none").drafter.vocabulary is None
    # Of several drafters each has its own, and a list that is given is that of all.
    for name, expected in (("auto", [[3, 5, 9], None]), (draft / "draft_tokens.json", [[3, 5, 9], [3, 5, 9]])):
        several = LLM(TINY / "target", [draft, "mtp"], draft_tokens=name).drafters
        lists = [drafter.vocabulary for drafter in several]
        assert [None if each is None else each.ids[...].tolist() for each in lists] == expected
    # Another drafter in its place drafts from the same list.
    llm = LLM(TINY / "target", draft)
    for other in (load_drafter(TINY / "draft"), LLM().drafter, llm.drafter):
        assert llm.with_drafter(other).drafter.vocabulary is llm.drafter.vocabulary
    assert LLM().with_drafter(llm.drafter).drafter.vocabulary is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "cannot be read"),
        ("{}", "not a JSON list of token ids"),
        ("[", "not a JSON list of token ids"),
        ("[]", "not a JSON list of token ids"),
        ("[1, 2.5]", "not a JSON list of token ids"),
        ("[true]", "not a JSON list of token ids"),
        ("[1, 512]", "id 512 is out of vocabulary: ids are 0 to 511"),
        ("[-1]", "id -1 is out of vocabulary"),
    ],
)
def test_a_bad_list_is_named(text, named, tmp_path):
    path = tmp_path / "ids.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=named):
        LLM(draft_tokens=path)


def test_a_list_without_a_drafter_is_refused():
    with pytest.raises(InputError, match="there is no drafter"):
        LLM(TINY / "target", None, draft_tokens="ids.json")


def test_the_tokens_that_answers_use_most(tmp_path, capsys):
    answer, other = [7] * 5 + [300, 8, 8, 300, 8, 8], [9, 9, 9]
    lines = [{"prompt_ids": [1] * 20, "response_ids": answer}, {"prompt_ids": [2, 3], "response_ids": other}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = ["--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "run")]
    assert train.main(["tokens", *asked, "--draft-vocabulary", "3"]) == 0
    path = tmp_path / "run" / "draft_tokens.json"
    assert json.loads(path.read_text()) == [7, 8, 9]
    assert f"3 tokens, 85.7% of the answers, are in {path}" in capsys.readouterr().err
    # Beside a drafter where one is.
    (tmp_path / "run" / "draft").mkdir()
    (tmp_path / "run" / "draft" / "config.json").write_text("{}")
    assert train.main(["tokens", *asked, "--draft-vocabulary", "2"]) == 0
    assert json.loads((tmp_path / "run" / "draft" / "draft_tokens.json").read_text()) == [7, 8]
