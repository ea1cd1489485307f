"""Detokenising as tokens arrive, and stop strings."""

from itertools import pairwise

import pytest

from dflash_jax.llm import TINY
from dflash_jax.text import Detokenizer, Tokenizer

TEXT = "def naïve(x):\n    return '日本語 🎉' + x  # ünïcödé\n"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY / "target")


def feed(detokenizer, ids):
    seen = []
    for i in ids:
        detokenizer.push(i)
        seen.append(detokenizer.text)
    detokenizer.finish()
    return [*seen, detokenizer.text]


def test_streamed_text_equals_the_whole_and_never_holds_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    seen = feed(Detokenizer(tokenizer), ids)
    assert seen[-1] == TEXT == tokenizer.decode(ids)
    assert all("\ufffd" not in text for text in seen)
    assert all(b.startswith(a) for a, b in pairwise(seen))
    assert len(set(seen)) > 10


@pytest.mark.parametrize("stops", [[], ["return"], ["x  #"]])
@pytest.mark.parametrize("cut", range(1, 12))
def test_several_tokens_at_once_are_the_same_text(tokenizer, stops, cut):
    # Cut anywhere, inside a character, too.
    ids = tokenizer.encode(TEXT)[:-cut] if cut % 2 else tokenizer.encode(TEXT * 3)[cut:]
    parts, detokenizer = [ids[: 3 * cut], ids[3 * cut :]], Detokenizer(tokenizer, stops)
    for part in parts:
        detokenizer.push(*part)
    detokenizer.finish()
    assert detokenizer.text == feed(Detokenizer(tokenizer, stops), ids)[-1]


def test_a_broken_character_at_the_end_is_still_told(tokenizer):
    ids = tokenizer.encode("a🎉")
    assert feed(Detokenizer(tokenizer), ids[:-1])[-1] == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["return"], "def naïve(x):\n    "),
        (["('", "x)"], "def naïve("),
        (["never"], TEXT),
        (["🎉' + x  #"], TEXT.split("🎉")[0]),
    ],
)
def test_text_ends_before_the_first_stop_string(tokenizer, stops, text):
    detokenizer = Detokenizer(tokenizer, stops)
    seen = feed(detokenizer, tokenizer.encode(TEXT))
    assert seen[-1] == text
    assert detokenizer.stopped == (text != TEXT)
    # Nothing that a stop string takes back was ever shown.
    assert all(text.startswith(s) for s in seen)


def test_what_looks_like_a_stop_string_but_is_none_comes_at_the_end(tokenizer):
    assert feed(Detokenizer(tokenizer, ["abcdef"]), tokenizer.encode("xyz abc"))[-1] == "xyz abc"
