"""How drafted text is marked on stdout: green, in brackets, or not at all."""

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class DraftMarks:
    """The marks around drafted text.

    Attributes:
        start: The mark before the text.
        end: The mark after it.
        legend: What a reader sees as the mark; empty where nothing is marked.
    """

    start: str
    end: str
    legend: str

    def marked(self, segments: list[tuple[str, bool]]) -> str:
        """The text of (text, whether it was drafted), with marks."""
        return "".join(f"{self.start}{text}{self.end}" if is_draft else text for text, is_draft in segments)


GREEN, BRACKETS = DraftMarks("\033[32m", "\033[0m", "green"), DraftMarks("[", "]", "[brackets]")
NONE = DraftMarks("", "", "")


def draft_marks() -> DraftMarks:
    """The marks for this process's stdout.

    NO_COLOR (no-color.org) gives brackets. FORCE_COLOR (force-color.org) gives green text in a pipe, too; otherwise a
    pipe has no marks. A terminal without colours (TERM=dumb) gets brackets.
    """
    if os.environ.get("NO_COLOR"):
        return BRACKETS
    if os.environ.get("FORCE_COLOR"):
        return GREEN
    if sys.stdout is None or not sys.stdout.isatty():
        return NONE
    return BRACKETS if os.environ.get("TERM") == "dumb" else GREEN
