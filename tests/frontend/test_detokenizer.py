"""Detokenising as tokens arrive, and stop strings."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.errors import InputError
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.tokenizer import Tokenizer

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
    # AxisSharding anywhere, inside a character, too.
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


# Where tokens begin.

PIECES = ["a", "é", "日本", "🎉", "👩‍👩‍👧", "\ufffd", "\n\n", " return", "x" * 3]


def begins(tokenizer, ids, **options) -> tuple[list[int], str]:
    detokenizer = Detokenizer(tokenizer, **options)
    starts = [detokenizer.push(i) for i in ids]
    detokenizer.finish()
    return starts, detokenizer.text


@settings(max_examples=150, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.integers(0, 3), st.integers(0, 3))
def test_the_texts_between_where_tokens_begin_are_the_text(tokenizer, text, first, last):
    """Also where the text begins or ends inside a character."""
    ids = tokenizer.encode(text)
    ids = ids[min(first, len(ids)) : len(ids) - min(last, len(ids))]
    starts, shown = begins(tokenizer, ids)
    assert starts == sorted(starts)
    assert not ids or starts[0] == 0
    assert "".join(shown[a:b] for a, b in pairwise([*starts, len(shown)])) == shown
    if first == last == 0 and "\ufffd" not in text:
        # Against bytes: a token begins at the character that its first byte belongs to.
        at = 0
        for token, start in zip(ids, starts, strict=True):
            assert start == len(text.encode()[: at + 1].decode(errors="ignore")) - (_ends_a_character(text, at))
            at += len(tokenizer.token_bytes(token))


def _ends_a_character(text: str, at: int) -> int:
    """Whether the byte at ``at`` is the last one of its character."""
    raw = text.encode()
    return int(at + 1 == len(raw) or raw[at + 1] & 0xC0 != 0x80)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(0, 511), max_size=24), st.booleans())
def test_any_tokens_begin_somewhere_in_the_text(tokenizer, ids, skip):
    starts, shown = begins(tokenizer, ids, skip_special_tokens=skip)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(shown) for start in starts)
    assert shown == tokenizer.decode(ids, skip)


def test_tokens_of_a_vocabulary_that_falls_back_to_bytes():
    """Each byte decodes to a replacement character of its own, until the character is whole."""

    class Bytes:
        def decode(self, ids, skip_special_tokens=True):
            raw = bytes(ids)
            try:
                return raw.decode()
            except UnicodeDecodeError as e:
                return raw[: e.start].decode() + "\ufffd" * (len(raw) - e.start)

    raw = "a日🎉b".encode()
    starts, text = begins(Bytes(), list(raw))
    assert text == "a日🎉b"
    assert starts == [0, 1, 1, 1, 2, 2, 2, 2, 3]


def test_special_tokens_are_text_where_they_are_not_skipped(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    assert feed(Detokenizer(tokenizer), ids)[-1] == "ab"
    assert begins(tokenizer, ids, skip_special_tokens=False) == ([0, 1, 11], "a<|im_end|>b")


# Regular expressions that end a text.


@pytest.mark.parametrize(
    ("expression", "include", "text"),
    [
        ("r[a-z]+n ", False, "def naïve(x):\n    "),
        ("r[a-z]+n ", True, "def naïve(x):\n    return "),
        # The earliest end, not the longest match.
        ("r[a-z]+", True, "def naïve(x):\n    re"),
        ("\\n\\s+", True, "def naïve(x):\n "),
        ("[^\\x00-\\x{ffff}]", False, TEXT.split("🎉")[0]),
        ("^x", False, TEXT),
        ("never|neither", False, TEXT),
    ],
)
def test_text_ends_at_a_regular_expression(tokenizer, expression, include, text):
    detokenizer = Detokenizer(tokenizer, stop_regex=[expression], include_stop=include)
    seen = feed(detokenizer, tokenizer.encode(TEXT))
    assert seen[-1] == text
    assert detokenizer.stop == (None if text == TEXT else expression)
    assert all(text.startswith(s) for s in seen)


@settings(max_examples=60, derandomize=True)
@given(st.text("ab\n", max_size=400), st.sampled_from(["ab+a", "a{3}|b{4}", "(?:ab){2}\n", "a[^a]*\n", "b\\n+"]))
def test_a_match_ends_as_if_the_text_came_by_characters(tokenizer, text, expression):
    """Against Python's expressions, for matches that are short."""
    ends = [m for e in range(len(text) + 1) if (m := re.search(expression, text[:e]))]
    shown = begins(tokenizer, tokenizer.encode(text), stop_regex=[expression], include_stop=True)[1]
    assert shown == (text[: ends[0].end()] if ends else text)
    cut = begins(tokenizer, tokenizer.encode(text), stop_regex=[expression])[1]
    if ends and ends[0].end() - ends[0].start() <= 64:
        assert cut == text[: ends[0].start()]


def test_a_long_match_ends_the_text_where_it_was_shown_up_to(tokenizer):
    text = "<" + "x" * 200 + ">" + "y" * 9
    shown = begins(tokenizer, tokenizer.encode(text), stop_regex=["<x*>"])[1]
    assert shown == text[: len(shown)]
    assert 201 - 64 - 16 <= len(shown) <= 201 - 64
    assert begins(tokenizer, tokenizer.encode("<" + "x" * 300 + ">"), stop_regex=["<x*>"])[1].endswith("x>")


@pytest.mark.parametrize(
    ("expression", "message"),
    [("(", "missing"), ("(?=a)", "invalid perl"), ("\\pL{1,200}", "too large"), ("a*", "empty text")],
)
def test_expressions_that_are_refused(tokenizer, expression, message):
    with pytest.raises(InputError, match=f"stop_regex.*{message}"):
        Detokenizer(tokenizer, stop_regex=[expression])


def test_a_program_of_many_steps_is_refused(tokenizer):
    with pytest.raises(InputError, match="instructions"):
        Detokenizer(tokenizer, stop_regex=["(?:[a-z]{0,30} ){20}X"])
    with pytest.raises(InputError, match="instructions"):
        Detokenizer(tokenizer, stop_regex=["(a?){100}a{100}X"] * 2)


def test_stops_in_the_first_tokens_do_not_count(tokenizer):
    ids = tokenizer.encode("ab ab ab")
    upto = len(tokenizer.encode("ab"))
    for options in ({"stops": ["b"]}, {"stop_regex": ["b"]}):
        assert begins(tokenizer, ids, **options)[1] == "a"
        assert begins(tokenizer, ids, **options, min_tokens=upto)[1] == "ab a"
