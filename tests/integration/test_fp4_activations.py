"""Activations in FP4: no drafted text differs from plain decoding's, and what has no weights for them is refused."""

import jax
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.frontend.compare import divergence
from dflash_jax.ops.weights import PackedWeight, is_nvfp4, is_weight


@pytest.mark.parametrize("is_reproducible", [False, True], ids=["as it comes", "reproducible"])
def test_drafted_text_is_plain_text(is_reproducible):
    llm = LLM(quantize="nvfp4", activations="fp4", reproducible=is_reproducible, max_len=128, slots=2)
    weights = [w for w in jax.tree.leaves(llm.target, is_leaf=is_weight) if is_weight(w) and is_nvfp4(w)]
    assert weights
    # The C++ kernel of experts rounds no activations; its products of one weight take rounded ones.
    assert not any(isinstance(layer.ffn.gate_up[...], PackedWeight) for layer in llm.target.layers)
    for params in (SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.8, seed=3)):
        plain, drafted = (llm.generate(["def f(", "import os\n"], params, block_size=n) for n in (1, 4))
        for a, b in zip(plain, drafted, strict=True):
            parting = divergence(llm, a.prompt_ids, a.token_ids, b.token_ids, params)
            assert parting is None or (parting.is_tie and not is_reproducible)
        assert max(n for each in drafted for n in each.acceptance_lengths) > 1


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_target_without_nvfp4_is_refused(quantize):
    with pytest.raises(InputError, match="activations 'fp4': no weight of the target is in NVFP4"):
        LLM(quantize=quantize, activations="fp4", max_len=64)
