"""The bundled target is an ordinary Hugging Face checkpoint: transformers loads it unchanged and computes the same."""

import os
from dataclasses import replace

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_jax import LLM, SamplingParams
from dflash_jax.frontend.llm_config import TINY
from tests.float64 import assert_near, in_both

TEXT = os.__doc__ + "\nimport os\n\ndef walk(top):\n    for name in os.listdir(top):\n        yield name\n"


def test_logits_on_real_text_equal_those_of_transformers():
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    ids = tokenizer(TEXT)["input_ids"]
    assert len(ids) > 300
    expected, _ = in_both(model, [ids])
    llm = LLM()
    assert llm.encode(TEXT) == ids
    logits = jax.jit(lambda target, ids: target.logits(target(ids)[0]))(llm.target, np.array([ids]))
    assert_near(np.asarray(logits), expected, "logits")


def test_greedy_text_equals_that_of_transformers():
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    llm, params = LLM(), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (out,) = llm.generate(["def main("], replace(params, logprobs=2))
    ids = torch.tensor([out.prompt_ids])
    expected = model.generate(ids, do_sample=False, max_new_tokens=40, min_new_tokens=40)[0, ids.shape[1] :].tolist()
    for i, (mine, theirs) in enumerate(zip(out.token_ids, expected, strict=True)):
        if mine != theirs:
            best, second = sorted(out.logprobs[i]["top"].values(), reverse=True)
            assert best - second < 1e-4, f"token {i}: {mine}, transformers has {theirs}"
            break
