"""Search for what ends a text: stop strings, and regular expressions that run in linear time."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.errors import InputError

# Characters before new text in which a match may begin, and characters that are held back for a match.
REGEX_WINDOW, REGEX_HELD = 256, 64
# Instructions of all compiled expressions of a request. RE2 needs at most this many steps for each byte of a window,
# on the engine's thread, where the search must not delay other requests.
_MOST_INSTRUCTIONS = 256
_MOST_MEMORY = 2**18


@dataclass(frozen=True)
class Stop:
    """A match that ends a text.

    Attributes:
        start: Index of its first character.
        end: Index after its last character.
        matched: The stop string, or the expression.
    """

    start: int
    end: int
    matched: str


class StopStrings:
    """Follows a text through the stop strings, character by character, as Aho and Corasick's automaton does.

    What a character costs depends neither on the number of strings nor on their lengths. A state is the longest end of
    the text that begins a stop string. States and steps are made when a text first comes to them, so that strings which
    no text resembles cost nothing.

    Args:
        strings: The stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]):
        self._whole = frozenset(strings)
        self._strings = sorted(self._whole)
        self._longest = max(map(len, self._strings), default=0)
        # The state after a state and a character. Of each state: characters of the longest stop string that ends
        # there, and of the longest end that a stop string may go on from.
        self._steps: dict[tuple[str, str], str] = {}
        self._states: dict[str, tuple[int, int]] = {"": (0, 0)}
        # The state, and characters of the text before it.
        self._state, self._at = "", 0

    def first(self, text: str, at: int) -> tuple[int, int] | None:
        """(start, end) of the match that begins first of those that end after ``at``, the shortest of them."""
        self._follow(text, at)
        return self._follow(text, len(text))

    def held_back(self, text: str) -> int:
        """Characters at the end of ``text`` that a stop string begins with and goes on after."""
        self._follow(text, len(text))
        return self._states[self._state][1]

    def _follow(self, text: str, end: int) -> tuple[int, int] | None:
        """Goes to the first ``end`` characters of ``text``.

        Returns:
            (start, end) of the first and shortest match on the way; None where there is none.
        """
        if self._at > end:
            # Back, as far as a string reaches before it.
            self._state, self._at = "", max(0, end - self._longest)
        state, steps, states, found = self._state, self._steps, self._states, None
        for place, character in enumerate(text[self._at : end], self._at + 1):
            key = state, character
            if key not in steps:
                steps[key] = self._add(state + character)
            state = steps[key]
            if length := states[state][0]:
                span = place - length, place
                found = span if found is None else min(found, span)
        self._state, self._at = state, end
        return found

    def _add(self, text: str) -> str:
        """The state of a text that is a state and a character, known from now on."""
        while text not in self._whole and not self._goes_on(text):
            text = text[1:]
        if text not in self._states:
            ended = max((len(string) for string in self._strings if text.endswith(string)), default=0)
            held = text
            while not self._goes_on(held):
                held = held[1:]
            self._states[text] = ended, len(held)
        return text

    def _goes_on(self, text: str) -> bool:
        """Whether a stop string begins with ``text`` and is longer."""
        place = bisect_right(self._strings, text)
        return place < len(self._strings) and self._strings[place].startswith(text)


class StopFinder:
    """Finds the first stop in one text that grows.

    A match of an expression is found if it begins at most `REGEX_WINDOW` characters before the text that completes it.
    Of its matches the one that ends first counts, as if the text came character by character. Of several stops that
    one piece of text completes, the one that begins first counts.

    Args:
        strings: Stop strings.
        expressions: Regular expressions.

    Raises:
        InputError: RE2 cannot compile an expression, or only to a large program.
    """

    def __init__(self, strings: Sequence[str], expressions: Sequence[str]):
        self._strings = StopStrings(strings) if strings else None
        self._expressions = [(each, _compiled(each)) for each in expressions]
        size = sum(compiled.programsize + compiled.reverseprogramsize for _, compiled in self._expressions)
        if size > 2 * _MOST_INSTRUCTIONS:
            raise InputError(
                f"stop_regex compiles to {size} instructions: at most {2 * _MOST_INSTRUCTIONS} are possible"
            )

    def __bool__(self) -> bool:
        return bool(self._strings or self._expressions)

    def first(self, text: str, at: int, floor: int = 0) -> Stop | None:
        """Finds the first stop in the new part of a text.

        Args:
            text: The whole text.
            at: Characters that were searched before.
            floor: Matches of expressions begin here or later.
        """
        stops = []
        if self._strings is not None and (span := self._strings.first(text, at)) is not None:
            stops.append(Stop(*span, text[slice(*span)]))
        begin = max(floor, at - REGEX_WINDOW)
        # The character before it decides about ^ and \b.
        window = max(0, begin - 1)
        for expression, compiled in self._expressions:
            if (span := _earliest(compiled, text[window:], at - window, begin - window)) is not None:
                stops.append(Stop(window + span[0], window + span[1], expression))
        return min(stops, key=lambda stop: (stop.start, stop.end), default=None)

    def held_back(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a stop."""
        longest = 0 if self._strings is None else self._strings.held_back(text)
        return max(longest, REGEX_HELD) if self._expressions else longest


def _earliest(compiled: Any, text: str, at: int, start: int) -> tuple[int, int] | None:
    """(start, end) of the match with the earliest end after ``at`` that begins at ``start`` or later."""
    if compiled.search(text, start) is None:
        return None
    # Bisects for the shortest text with a match. The text before ``at`` has none.
    low, high = at, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        if compiled.search(text[:middle], start) is None:
            low = middle
        else:
            high = middle
    match = compiled.search(text[:high], start)
    return match.span() if match is not None else None


def _compiled(expression: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MOST_MEMORY
    try:
        compiled = re2.compile(expression, options)
    except (re2.error, UnicodeEncodeError) as e:
        reason = e.args[0].decode(errors="replace") if isinstance(e.args[0], bytes) else str(e)
        raise InputError(f"stop_regex {expression[:100]!r}: {reason}") from None
    if compiled.search("") is not None:
        raise InputError(f"stop_regex {expression[:100]!r} matches the empty text: it must match a character at least")
    return compiled
