"""Detokenising as tokens arrive, and stop strings."""

import re
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import decoders, models

from dflash_jax import SamplingParams
from dflash_jax.engine.request import Event
from dflash_jax.errors import InputError
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.frontend.tokenizer import _BYTES, Tokenizer

BUNDLED = TINY / "target" / "tokenizer.json"
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


# Vocabularies of every kind, and any pieces of any tokens.

WORDS = ["▁", "▁▁", "▁a", "a", "b", "日", "é", "\ufffd", "<", "▁<", ".", "▁.", "##b", "b</w>"]
DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece("##", cleanup=True),
    "suffixes": decoders.BPEDecoder("</w>"),
    "none": None,
}
# Bytes that begin, continue and break characters.
HARD_BYTES = "é日🎉\ufffda".encode() + bytes([0xC0, 0xED, 0xA0, 0xF4, 0x90, 0xFF])


def vocabulary(kind: str) -> list[str]:
    """Tokens: special ones, words and names of special tokens that are text, and then the 256 bytes."""
    is_byte_level = kind.startswith("byte-level")
    characters = dict(zip(_BYTES.values(), _BYTES, strict=True))
    single = [characters[byte] if is_byte_level else f"<0x{byte:02X}>" for byte in range(256)]
    words = ["".join(characters[byte] for byte in word.encode()) for word in WORDS] if is_byte_level else WORDS
    return list(dict.fromkeys(["<unk>", "<s>", "</s>", *words, "<tool_x>", "née!", *single]))


def make_tokenizer(kind: str, directory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """A vocabulary of that kind: as read from a file, and as the library has it."""
    model = models.BPE({t: i for i, t in enumerate(vocabulary(kind))}, [], byte_fallback=True, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.add_special_tokens(["<s>", "</s>"])
    fast.add_tokens([tokenizers.AddedToken(name, special=False) for name in ("<tool_x>", "née!")])
    if (decoder := DECODERS[kind]) is not None:
        fast.decoder = decoder
    fast.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory), fast


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer of each kind, and the bundled one."""
    each = {kind: make_tokenizer(kind, tmp_path_factory.mktemp("tokenizer")) for kind in DECODERS}
    return each | {"bundled": (Tokenizer(TINY / "target"), tokenizers.Tokenizer.from_file(str(BUNDLED)))}


def check_pieces(tokenizer, fast, ids: list[int], sizes: list[int], skip: bool) -> None:
    """Whatever the pieces, nothing shown is taken back, all is the library's text, and tokens begin in their order."""
    whole = fast.decode(ids, skip_special_tokens=skip)
    detokenizer, starts, at = Detokenizer(tokenizer, skip_special_tokens=skip), [], 0
    for size in sizes:
        starts.append(detokenizer.push(*ids[at : at + size]))
        at += size
        assert whole.startswith(detokenizer.text), (ids, sizes)
    detokenizer.finish()
    assert detokenizer.text == whole == tokenizer.decode(ids, skip), (ids, sizes)
    assert starts == sorted(starts)
    assert all(0 <= start <= len(whole) for start in starts)


@pytest.mark.parametrize("kind", [*DECODERS, "bundled"])
def test_pieces_of_random_tokens_give_the_whole_text(made, kind):
    tokenizer, fast = made[kind]
    rng, size = np.random.default_rng(0), fast.get_vocab_size()
    if kind == "bundled":
        spelled = {tokenizer.token_bytes(i): i for i in range(size)}
        hard = [spelled[bytes([byte])] for byte in HARD_BYTES]
    else:
        hard = [size - 256 + byte for byte in HARD_BYTES] if "byte-level" not in kind else list(range(size - 256, size))
    for _ in range(15_000 if kind == "bundled" else 1_500):
        count = int(rng.integers(1, 20))
        # A few ids are past the end of the vocabulary, as a model's padding is.
        ids = np.where(rng.random(count) < 0.5, rng.choice(hard, count), rng.integers(0, size + 2, count)).tolist()
        sizes = [1] * count if rng.random() < 0.5 else [int(n) for n in rng.multinomial(count, [0.2] * 5)]
        check_pieces(tokenizer, fast, ids, sizes, bool(rng.integers(2)))


@settings(max_examples=200, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from([*DECODERS, "bundled"]), st.booleans())
def test_pieces_of_any_tokens_give_the_whole_text(made, data, kind, skip):
    tokenizer, fast = made[kind]
    ids = data.draw(st.lists(st.integers(0, fast.get_vocab_size()), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    check_pieces(tokenizer, fast, ids, [b - a for a, b in pairwise([0, *cuts, len(ids)])], skip)


@pytest.mark.parametrize("kind", [*DECODERS, "bundled"])
def test_each_of_several_tokens_has_the_place_that_it_has_alone(made, kind):
    tokenizer, fast = made[kind]
    rng, size = np.random.default_rng(1), fast.get_vocab_size()
    plain = [i for i in range(size) if tokenizer.token_bytes(i).isascii()]
    for _ in range(500):
        # Runs of ASCII, after tokens of any bytes, which may begin a character.
        ids = np.where(rng.random(24) < 0.8, rng.choice(plain, 24), rng.integers(0, size, 24)).tolist()
        options = {"skip_special_tokens": bool(rng.integers(2))}
        text, at = tokenizer.decode(ids, **options), int(rng.integers(24))
        options["stops"] = [text[at : at + 2]] if text[at : at + 2] and rng.random() < 0.5 else []
        together, alone = Detokenizer(tokenizer, **options), Detokenizer(tokenizer, **options)
        for first in range(0, 24, 4):
            starts, ends = [], []
            for token in ids[first : first + 4]:
                starts.append(alone.push(token))
                ends.append(len(alone.text))
                if alone.stopped:
                    break
            assert together.push_each(ids[first : first + 4]) == (starts, ends)
            assert (together.text, together.end, together.stopped) == (alone.text, alone.end, alone.stopped)
            if alone.stopped:
                break


def test_replacement_characters_that_are_text_lose_nothing(tokenizer):
    text = "\ufffd" * 5 + "漢字"
    assert feed(Detokenizer(tokenizer), tokenizer.encode(text))[-1] == text
    long = "\ufffd" * 300
    seen = feed(Detokenizer(tokenizer), tokenizer.encode(long))
    # They are characters as others are: none waits for what follows.
    assert seen[-1] == long
    assert len(set(seen)) > 250


def test_bytes_of_a_vocabulary_that_falls_back_to_them_wait_for_the_end_of_their_run(made):
    tokenizer, fast = made["llama"]
    first = fast.get_vocab_size() - 256
    run = [first + byte for byte in "日🎉".encode()]
    a, b = (fast.token_to_id(name) for name in ("▁a", "b"))
    starts, text = begins(tokenizer, [a, *run, b])
    assert text == "a日🎉b"
    assert starts == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    # The last byte makes all of its run invalid, as in the library.
    assert begins(tokenizer, [a, *run, first + 0xFF])[1] == "a" + "\ufffd" * 8


@pytest.mark.parametrize(
    ("kind", "name"), [("llama", "\ufffd"), ("llama", "<0xEF>"), ("byte-level in a sequence", "ï"), ("bundled", "ï")]
)
def test_each_token_takes_a_bounded_number_of_decodings(made, kind, name, monkeypatch):
    """However many tokens came before, also where none of them completes a character."""
    tokenizer, fast = made[kind]
    ids, plain, decoded = [fast.token_to_id(name)] * 4000, tokenizer.decode, []

    def decode(ids, skip):
        decoded.append(len(ids))
        return plain(ids, skip)

    monkeypatch.setattr(tokenizer, "decode", decode)
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(*ids[:2000])
    for token in ids[2000:]:
        detokenizer.push(token)
    detokenizer.finish()
    assert sum(decoded) <= 40 * len(ids)
    assert detokenizer.text == plain(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma", "bundled"])
def test_bytes_of_tokens_are_those_of_grammars_and_together_the_text(made, kind):
    tokenizer, fast = made[kind]
    # Byte 255, which is in no UTF-8, marks special tokens in grammars.
    ids = [i for i in range(fast.get_vocab_size()) if b"\xff" not in tokenizer.token_bytes(i)]
    grammar = LLTokenizer(fast.to_str())
    assert [tokenizer.token_bytes(i) for i in ids] == [grammar.decode_bytes([i]) for i in ids]
    rng = np.random.default_rng(1)
    # Runs of fallback bytes have a rule of their own where they are no UTF-8.
    shown = [i for i in ids if not tokenizer.is_special(i) and tokenizer.fallback_byte(i) is None]
    for _ in range(300):
        tokens = rng.choice(shown, 8).tolist()
        spelled = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
        assert begins(tokenizer, tokens)[1] == (spelled.removeprefix(" ") if kind == "llama" else spelled)


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


@pytest.mark.parametrize("streamed", [True, False])
def test_only_pieces_need_the_places_of_tokens(tokenizer, streamed):
    sequence = TextSequence([1], SamplingParams(stop=["never there"]), [], tokenizer, streamed=streamed)
    ids = tokenizer.encode_plain(TEXT)
    for token in ids:
        sequence.request.monitor([token])
    assert len(sequence._watched) == (len(ids) if streamed else 0)
    sequence.request.tokens += ids
    if not streamed:
        sequence.take(Event(sequence.request, ids, [1] * len(ids), finish_reason="length"))
        assert sequence.text.text == TEXT
