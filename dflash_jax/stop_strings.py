"""Search for what ends a text: stop strings, and regular expressions that run in linear time."""

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
        end: Index behind its last character.
        matched: The stop string, or the expression.
    """

    start: int
    end: int
    matched: str


class StopFinder:
    """Finds the first stop in text that grows.

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
        self._strings = tuple(strings)
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
        for string in self._strings:
            if (start := text.find(string, max(0, at + 1 - len(string)))) >= 0:
                stops.append(Stop(start, start + len(string), string))
        begin = max(floor, at - REGEX_WINDOW)
        # The character before it decides about ^ and \b.
        window = max(0, begin - 1)
        for expression, compiled in self._expressions:
            if (span := _earliest(compiled, text[window:], at - window, begin - window)) is not None:
                stops.append(Stop(window + span[0], window + span[1], expression))
        return min(stops, key=lambda stop: (stop.start, stop.end), default=None)

    def held_back(self, text: str) -> int:
        """Characters at the end of ``text`` that may be the beginning of a stop."""
        lengths = ((s, n) for s in self._strings for n in range(1, min(len(s), len(text) + 1)))
        longest = max((n for s, n in lengths if text.endswith(s[:n])), default=0)
        return max(longest, REGEX_HELD) if self._expressions else longest


def _earliest(compiled: Any, text: str, at: int, start: int) -> tuple[int, int] | None:
    """(start, end) of the match with the earliest end behind ``at`` that begins at ``start`` or later."""
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
    try:
        import re2
    except ImportError:
        raise InputError("stop_regex needs google-re2: pip install google-re2") from None
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
