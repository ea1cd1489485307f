"""The configuration behind the keywords of `LLM`."""

import inspect
from dataclasses import FrozenInstanceError, fields

import jax
import pytest

from dflash_jax import LLM, InputError
from dflash_jax.frontend import llm_config
from dflash_jax.frontend.llm_config import LLMConfig


def test_fields_are_the_keywords_of_the_llm():
    keywords = {name: p.default for name, p in inspect.signature(LLM).parameters.items() if name != "other_names"}
    assert {field.name: field.default for field in fields(LLMConfig)} == keywords
    documented = LLMConfig.__doc__.partition("Attributes:")[2]
    assert all(f"\n    {name}: " in documented for name in keywords)


def test_llm_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        LLMConfig().slots = 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "main"}, "revision is 'main': there is no repo that it could be of"),
        ({"target": "a/b", "draft_revision": "main"}, "draft_revision is 'main': there is no repo"),
        ({"draft": []}, r"draft is \[\]: it must be a list of different drafters: directories, repo ids, \"mtp\", obj"),
        ({"draft": ["mtp", "mtp"]}, r"draft is \['mtp', 'mtp'\]: it must be a list of different"),
        ({"draft": ["auto", "mtp"]}, r"draft is \['auto', 'mtp'\]: it must be"),
        ({"draft": ["mtp", 3]}, r"draft is \['mtp', 3\]: it must be"),
        ({"draft": ["mtp", "a\0b"]}, "draft is 'a.*': it must be text without NUL"),
        ({"draft": ["mtp", "a"], "reproducible": True}, "one drafter where reproducible is set"),
        ({"draft": ["a/b", "c/d"], "draft_revision": "v1"}, "draft_revision is 'v1': there are several repos"),
        ({"dtype": "float8"}, "dtype is 'float8': it must be one of auto, float32, bfloat16"),
        ({"draft_window_size": 0}, "draft_window_size is 0: it must be 1 to 1000000000"),
        ({"draft_sink_size": -1}, "draft_sink_size is -1: it must be 0 or more"),
        ({"draft_sink_size": 2}, "draft_sink_size is 2 without a draft_window_size"),
        ({"max_block_size": 0}, "max_block_size is 0: it must be 1 or more"),
        ({"slots": 0}, "slots is 0: it must be 1 to 256"),
        ({"slots": 257}, "slots is 257: it must be 1 to 256"),
        ({"prefix_bytes": -1}, "prefix_bytes is -1: it must be 0"),
        ({"prefix_host_bytes": -1}, "prefix_host_bytes is -1: it must be 0"),
        (
            {"prefix_bytes": 0, "prefix_host_bytes": 5},
            "prefix_host_bytes is 5: it must be 0, since prefix_bytes is 0: no prefix is kept",
        ),
        ({"swap_space": -1}, "swap_space is -1: it must be 0"),
        ({"swap_space": float("nan")}, "swap_space is nan: it must be"),
        ({"mem_fraction": 0.0}, "mem_fraction is 0.0: it must be above 0 and at most 1"),
        ({"mem_fraction": 1.5}, "mem_fraction is 1.5"),
        ({"mesh": "rows=2"}, "mesh axis 'rows' is not known"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size is 0: it must be 1 or more"),
        (
            {"decode_context_parallel_size": 4, "mesh": "data=8"},
            "decode_context_parallel_size is 4: it must be at most 1, the devices of mesh data=8,expert=1,tensor=1",
        ),
    ],
)
def test_wrong_values_are_refused_without_a_file_read(options, message):
    with pytest.raises(InputError, match=message):
        LLMConfig(**options)


def test_a_revision_is_of_the_one_repo_among_several_drafters():
    assert LLMConfig(draft=["mtp", "a/b"], draft_revision="v1").drafts == ("mtp", "a/b")


def test_positions_and_blocks_are_bounded_by_the_models():
    assert LLMConfig().positions(512) == LLMConfig(max_len=512).positions(512) == 512
    for wrong in (1, 513):
        with pytest.raises(InputError, match=f"max_len is {wrong}: it must be 2 to 512, the model's positions"):
            LLMConfig(max_len=wrong).positions(512)
    assert LLMConfig().largest_block(16) == LLMConfig(max_block_size=16).largest_block(16) == 16
    assert LLMConfig(max_block_size=4).largest_block(16) == 4
    assert LLMConfig(max_block_size=1).largest_block(1) == 1
    with pytest.raises(InputError, match="max_block_size is 17: it must be at most 16, the drafter's own block size"):
        LLMConfig(max_block_size=17).largest_block(16)
    with pytest.raises(InputError, match="max_block_size is 2: it must be at most 1, since there is no drafter"):
        LLMConfig(max_block_size=2).largest_block(1)


def test_the_host_tier_is_a_quarter_of_what_is_free_where_devices_have_memory_of_their_own(monkeypatch):
    free = 2**30 + 5
    assert LLMConfig().prefix_host_budget(free) == 0
    assert LLMConfig(prefix_host_bytes=7).prefix_host_budget(free) == 7
    monkeypatch.setattr(llm_config, "has_pinned_memory", lambda: True)
    assert LLMConfig().prefix_host_budget(free) == 2**28 + 1
    assert LLMConfig(prefix_bytes=0).prefix_host_budget(free) == 0
    assert LLMConfig(prefix_host_bytes=0).prefix_host_budget(free) == 0


def test_the_swap_space_is_in_gib_and_by_default_a_quarter_of_what_is_free():
    assert LLMConfig(swap_space=1.5).swap_budget(7) == 3 * 2**29
    assert LLMConfig(swap_space=0).swap_budget(2**40) == 0
    assert LLMConfig().swap_budget(2**30) == 2**28 // jax.local_device_count()


def test_an_llm_has_the_values_of_its_keywords():
    llm = LLM(slots=3, max_len=200, block_size=4, max_block_size=8, prefix_bytes=10)
    assert (llm.slots, llm.max_len, llm.block_size, llm.largest_block, llm.prefix_bytes) == (3, 200, 4, 8, 10)
    assert llm.engine is None


def test_what_makes_other_programs_is_shared(tmp_path):
    """Of lists of tokens what they have, not where they are."""
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    paths = [tmp_path / "a.json", tmp_path / "b.json", drafter / "draft_tokens.json"]
    for path, text in zip(paths, ("[1]", "[1, 2]", "[1]"), strict=True):
        path.write_text(text)
    options = [
        {},
        {"reproducible": True},
        {"draft_tokens": "none"},
        {"draft_tokens": str(paths[0])},
        {"draft_tokens": paths[1]},
        {"draft_tokens": tmp_path / "not there"},
    ]
    shared = [LLMConfig(draft="a/b", **each).shared() for each in options]
    assert len({tuple(each.items()) for each in shared}) == len(options)
    assert shared[3] == LLMConfig(draft="a/b", draft_tokens=paths[2]).shared() == LLMConfig(draft=drafter).shared()
