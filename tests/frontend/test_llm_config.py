"""The configuration behind the keywords of `LLM`."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

from dflash_jax import LLM, InputError
from dflash_jax.frontend.llm_config import LLMConfig


def test_fields_are_the_keywords_of_the_llm():
    keywords = {name: p.default for name, p in inspect.signature(LLM).parameters.items() if name != "other_names"}
    assert {field.name: field.default for field in fields(LLMConfig)} == keywords
    documented = LLMConfig.__doc__.partition("Attributes:")[2]
    assert all(f"\n        {name}: " in documented for name in keywords)


def test_llm_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        LLMConfig().slots = 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "main"}, "revision main: there is no repo that it could be of"),
        ({"target": "a/b", "draft_revision": "main"}, "draft_revision main: there is no repo"),
        ({"dtype": "float8"}, "dtype 'float8': it must be one of float32, bfloat16"),
        ({"draft_window_size": 0}, "draft window size 0: it must be 1 or more"),
        ({"draft_sink_size": -1}, "draft sink size -1: it must be 0 or more"),
        ({"draft_sink_size": 2}, "draft sink size 2 without a draft window size"),
        ({"max_block_size": 0}, "max block size 0: it must be 1 or more"),
        ({"slots": 0}, "slots 0: it must be 1 to 256"),
        ({"slots": 257}, "slots 257: it must be 1 to 256"),
        ({"prefix_bytes": -1}, "prefix_bytes -1: it must be 0"),
        ({"mem_fraction": 0.0}, "mem_fraction 0.0: it must be above 0 and at most 1"),
        ({"mem_fraction": 1.5}, "mem_fraction 1.5"),
        ({"mesh": "rows=2"}, "mesh axis 'rows' is not known"),
    ],
)
def test_wrong_values_are_refused_without_a_file_read(options, message):
    with pytest.raises(InputError, match=message):
        LLMConfig(**options)


def test_positions_and_blocks_are_bounded_by_the_models():
    assert LLMConfig().positions(512) == LLMConfig(max_len=512).positions(512) == 512
    for wrong in (1, 513):
        with pytest.raises(InputError, match=f"max_len {wrong}: it must be 2 to 512, the model's positions"):
            LLMConfig(max_len=wrong).positions(512)
    assert LLMConfig().largest_block(16) == LLMConfig(max_block_size=32).largest_block(16) == 16
    assert LLMConfig(max_block_size=4).largest_block(16) == 4


def test_an_llm_of_a_configuration_has_its_values():
    llm = LLM.from_config(LLMConfig(slots=3, max_len=200, block_size=4, max_block_size=8, prefix_bytes=10))
    assert (llm.slots, llm.max_len, llm.block_size, llm.largest_block, llm.prefix_bytes) == (3, 200, 4, 8, 10)
    assert llm.engine is None
