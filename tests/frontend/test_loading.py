"""What is read before the weights."""

import os
from pathlib import Path

from dflash_jax.frontend.llm_config import TINY, LLMConfig
from dflash_jax.frontend.loading import Checkpoint, _named


def test_names_of_drafters_differ_and_have_no_paths(tmp_path):
    """Of the machine: clients read them."""
    one, other, odd = (tmp_path / part for part in ("a/draft", "b/draft", os.fsdecode(b"c/\xff")))
    for path in (one, other, odd):
        path.mkdir(parents=True)
    drafts = [one, str(other), odd, "mtp", "z-lab/Qwen3-8B-DFlash-b16"]
    named = _named(drafts)
    assert list(named.values()) == drafts
    assert list(named) == ["draft", "draft-2", "?", "mtp", "z-lab/Qwen3-8B-DFlash-b16"]
    assert list(_named([Path(os.curdir)])) == [Path.cwd().name]
    (tmp_path / "link").symlink_to(one)
    assert list(_named([tmp_path / "link"])) == ["link"]


def test_drafters_that_nobody_names_have_names():
    assert Checkpoint.read(LLMConfig()).draft_names == ("bundled",)
    assert Checkpoint.read(LLMConfig(TINY / "target", TINY / "draft")).draft_names == ("draft",)
    assert Checkpoint.read(LLMConfig(draft=None)).draft_names == ()
