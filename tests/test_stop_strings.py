"""Stop strings in text that grows, against their definition."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.stop_strings import StopFinder, StopStrings

WORDS = st.text("ab", min_size=1, max_size=6)
ADVERSARIES = {
    "one letter, then another": ["a" * (255 - i) + "b" for i in range(16)],
    "another among one letter": ["a" * i + "b" + "a" * (255 - i) for i in range(0, 256, 16)],
    "ends of each other": ["a" * i + "b" for i in range(16)],
    "beginnings of each other": ["a" * (256 - i) for i in range(16)],
}


def first(stops, text: str, at: int):
    """(start, end) of the first of all matches that end after ``at``, the shortest of them."""
    spans = [(end - len(stop), end) for stop in stops for end in range(at + 1, len(text) + 1)]
    return min((span for span in spans if span[0] >= 0 and text[slice(*span)] in stops), default=None)


def held_back(stops, text: str) -> int:
    """The longest end of a text with which a stop string begins, and goes on."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@given(st.lists(WORDS, min_size=1, max_size=5), st.lists(st.tuples(st.text("abc", max_size=5), st.booleans())))
def test_stops_of_text_in_pieces_are_those_of_their_definition(stops, pieces):
    """Matches in a part of the pieces are asked for, as where the first tokens may not end the text."""
    finder, text = StopFinder(stops, ()), ""
    for piece, is_searched in pieces:
        at, text = len(text), text + piece
        if is_searched:
            found = finder.first(text, at)
            assert (found and (found.start, found.end)) == first(stops, text, at)
            assert found is None or found.matched == text[found.start : found.end]
        assert finder.held_back(text) == held_back(stops, text)


@given(st.lists(WORDS, min_size=1, max_size=5), st.text("ab", max_size=20), st.integers(0, 20))
def test_a_place_before_the_known_text_may_be_asked_for(stops, text, at):
    finder = StopFinder(stops, ())
    assert finder.held_back(text) == held_back(stops, text)
    found = finder.first(text, min(at, len(text)))
    assert (found and (found.start, found.end)) == first(stops, text, min(at, len(text)))


def test_a_character_costs_the_same_however_many_and_long_the_strings_are(monkeypatch):
    """Looks at the strings, of which each takes the same time, are counted in place of seconds."""
    looks, real = 0, StopStrings._goes_on

    def goes_on(*args):
        nonlocal looks
        looks += 1
        return real(*args)

    monkeypatch.setattr(StopStrings, "_goes_on", goes_on)
    for stops in ADVERSARIES.values():
        for text in ("a" * 2000, ("a" * 250 + "c") * 8, ("a" * 100 + "b") * 20, "".join(stops)):
            looks, followed = 0, StopStrings(stops)
            for at in range(len(text)):
                followed.first(text[: at + 1], at)
                followed.held_back(text[: at + 1])
            assert looks <= 6 * len(text)
            assert len(followed._steps) <= len(text)
