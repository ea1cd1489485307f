"""Keywords of `LLM`: errors name the one that the caller gave."""

import re

import numpy as np
import pytest

from dflash_jax import LLM, InputError
from dflash_jax.frontend.keywords import DEFAULTS, with_other_names
from dflash_jax.frontend.llm_config import LLMConfig
from tests.odd_values import HUGE, Unprintable


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_model_len": 10**9}, "max_model_len is 1000000000: it must be 2 to 8192"),
        ({"context_length": 1}, "context_length is 1: it must be 2 to 8192"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be 1 to 256"),
        ({"max_running_requests": HUGE}, "max_running_requests is an integer of 16610 bits: it must be 1 to 256"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization is 2: it must be above 0"),
        ({"mem_fraction": 2}, "mem_fraction is 2: it must be above 0"),
        ({"tp_size": 0}, "tp_size is 0: it must be 1 to 1048576"),
        ({"data_parallel_size": HUGE}, "data_parallel_size is an integer of 16610 bits: it must be 1 to"),
        ({"mesh": "tensor=" + "9" * 4000}, "mesh axis tensor has size '99999"),
        ({"model": "a\0b"}, "model is 'a\\x00b': it must be text without NUL"),
        (
            {"max_block_size": 10**9},
            "max_block_size is 1000000000: it must be at most 16, the drafter's own block size",
        ),
        ({"block_size": 10**9}, "block size 1000000000: it must be 1 to 16 (the drafter's own), or auto"),
        ({"spec_tokens": 10**9}, "spec_tokens + 1 is 1000000001: it must be at most 16"),
        ({"speculative_num_draft_tokens": 17}, "speculative_num_draft_tokens is 17: it must be at most 16"),
        (
            {"speculative_config": {"num_speculative_tokens": 10**9}},
            "speculative_config: num_speculative_tokens + 1 is 1000000001: it must be at most 16, the drafter's own",
        ),
        (
            {"speculative_config": {"num_speculative_tokens": -1}},
            "speculative_config: num_speculative_tokens is -1: it must be 0 or more",
        ),
        ({"hf_overrides": {1: 2}}, "hf_overrides is {1: 2}: it must be a dict whose keys are strings"),
        ({"speculative_num_steps": 3}, "speculative_num_steps is 3: DFlash drafts a block in one step"),
        ({"draft": "mtp", "draft_revision": "v1"}, "draft_revision is 'v1': there is no repo"),
        (
            {"speculative_config": {"method": "mtp", "model": None}},
            "speculative_config: model is None",
        ),
        (
            {"speculative_config": {"method": "ngram"}},
            "speculative_config: its method is 'ngram': it must be dflash or",
        ),
        ({"speculative_config": {"revision": "main"}}, "speculative_config: revision is 'main': there is no repo"),
        ({"speculative_draft_model_revision": "v1"}, "speculative_draft_model_revision is 'v1': there is no repo"),
        ({"dtype": "half"}, "dtype is 'half': it must be one of auto, float32, bfloat16"),
        ({"prefix_bytes": HUGE}, "prefix_bytes is an integer of 16610 bits: it must be 0 (none) to"),
        ({"hf_overrides": Unprintable()}, "hf_overrides is <Unprintable instance at"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs is {5: 1}: it must be a dict whose keys are strings"),
        ({"override_generation_config": {5: 1}}, "sampling default 5: it must be one of temperature"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_error_names_the_keyword_that_the_caller_gave(keywords, message):
    with pytest.raises(InputError, match="^" + re.escape(message)):
        LLM(**keywords)


@pytest.mark.parametrize(
    ("keywords", "block"),
    [
        ({"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}, 4),
        ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}, 4),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, None),
        ({"spec_method": "qwen3_5_mtp", "spec_tokens": 2}, 3),
    ],
)
def test_names_of_vllm_and_sglang_for_the_mtp_head(keywords, block):
    settings = with_other_names(keywords)[0]
    assert (settings["draft"], settings["max_block_size"]) == ("mtp", block)


def test_values_of_numpy_are_those_of_python():
    keywords = {"enable_prefix_caching": np.bool_(False), "enforce_eager": np.bool_(True), "seed": np.int64(3)}
    keywords |= {"max_num_seqs": np.int64(4), "enable_lora": np.bool_(False), "spec_tokens": np.int64(7)}
    keywords |= {"speculative_config": {"draft_tensor_parallel_size": np.int64(1)}}
    own = {name: keywords.pop(name, value) for name, value in DEFAULTS.items()} | {"reproducible": np.bool_(True)}
    config = LLMConfig(**with_other_names(own | keywords)[0])
    assert config == LLMConfig(prefix_bytes=0, seed=3, slots=4, max_block_size=8, reproducible=True)
    assert (type(config.seed), type(config.reproducible)) == (int, bool)


@pytest.mark.parametrize("keyword", ["hf_overrides", "json_model_override_args"])
def test_overrides_of_the_config_are_read_as_the_config_is(keyword):
    assert LLM(None, None, **{keyword: {"max_position_embeddings": 4096}}).max_len == 4096
    for overrides, says in (
        ({"rope_parameters": {"factr": 2}}, "target/config.json: rope_parameters.factr is 2: the key is not known"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': it changes the numbers"),
    ):
        with pytest.raises(InputError, match=says):
            LLM(**{keyword: overrides})
    # The bundled target's MTP head is read with them, its drafter is not.
    with pytest.raises(InputError, match="mtp_num_hidden_layers is 2"):
        LLM(None, "mtp", **{keyword: {"mtp_num_hidden_layers": 2}})
    assert LLM(**{keyword: {"mtp_num_hidden_layers": 2}}).drafter is not None
