"""scripts/bench/draft_ranks.py against decoding."""

from itertools import pairwise

import numpy as np
import pytest

from dflash_jax import LLM, SamplingParams
from tests.helpers import load_script
from tools.bundled_pair import without_selector

SIZE = 8


@pytest.fixture(scope="module")
def draft_ranks():
    return load_script("bench/draft_ranks.py")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_leading_first_ranks_are_the_drafts_that_decoding_accepts(draft_ranks, temperature, tmp_path):
    llm = LLM(draft=without_selector(tmp_path / "draft"))
    prompts = [
        llm.encode(text)[:12] for text in ("def clamp(value, low, high):\n", "import os\nimport sys\n\n\nclass A")
    ]
    texts = draft_ranks.texts_of(llm, prompts, 64, temperature)
    anchors = np.array([[14, 20, 31, 45], [12, 25, 40, 50]])
    found = draft_ranks.ranks(llm, texts, anchors, SIZE, has_noise=temperature > 0)
    accepted = np.cumprod(found == 1, axis=-1).sum(-1)
    for row, block in np.ndindex(anchors.shape):
        known = texts.tokens[row, : anchors[row, block] + 1].tolist()
        params = SamplingParams(temperature=temperature, seed=row, max_tokens=SIZE, ignore_eos=True)
        (completion,) = llm.generate([known], params, block_size=SIZE)
        assert completion.acceptance_lengths[0] == 1 + accepted[row, block]
    assert 0 < accepted.sum() < accepted.size * (SIZE - 1)
    shares = draft_ranks.shares(found)
    assert shares[0][0] == (found[..., 0] == 1).mean()
    assert shares[-1][0] == pytest.approx(accepted.mean())
    assert all(a <= b for line in shares for a, b in pairwise(line))
    assert draft_ranks.table({"T": shares}).count("\n") == 2 + SIZE
