"""Masks in the reproducible mode, whose blocks begin at multiples of the block size."""

import pytest

from dflash_jax import LLM, SamplingParams

MESSAGES = [{"role": "user", "content": "Write the function `clamp`: Limit a value to a range."}]


@pytest.fixture(scope="module")
def both():
    options = {"slots": 2, "max_len": 512}
    return LLM(**options), LLM(**options, reproducible=True)


@pytest.mark.parametrize("words", [["clamp(self"], ["is enough"], [", r, r"]])
def test_drafts_of_a_block_that_has_begun_have_their_own_masks(both, words):
    """A round that ends inside of a block leaves tokens that are known at the beginning of the next one."""
    plain, reproducible = both
    prompt, params = plain.encode_chat(MESSAGES), SamplingParams(temperature=0, max_tokens=60, bad_words=words)
    (wanted,), (found,) = plain.generate([prompt], params, block_size=1), reproducible.generate([prompt], params)
    assert max(found.acceptance_lengths) > 1
    assert any(n % reproducible.largest_block for n in found.acceptance_lengths)
    assert found.token_ids == wanted.token_ids
