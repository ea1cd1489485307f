"""Notes to the client about an answer, in headers ``X-Dflash-Note``, one for each note.

The handlers of a request call `note`; the application adds the headers when the answer begins.
"""

import logging
from contextvars import ContextVar

log = logging.getLogger("dflash_jax.server")

HEADER = b"x-dflash-note"
# Most notes of an answer, and most characters of a note.
MOST, LONGEST = 8, 300
# Most different notes that are logged, since clients influence their text.
MOST_LOGGED = 256
_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_logged: set[str] = set()


def begin() -> list[str]:
    """Starts to collect the notes of the current request.

    Returns:
        The list in which they are collected.
    """
    notes: list[str] = []
    _notes.set(notes)
    return notes


def note(text: str) -> None:
    """Adds a note to the current answer, and logs it once."""
    text = text.encode("ascii", "backslashreplace").decode()
    text = "".join(c if c.isprintable() else " " for c in text)[:LONGEST]
    notes = _notes.get()
    if notes is not None and len(notes) < MOST and text not in notes:
        notes.append(text)
    if text not in _logged and len(_logged) < MOST_LOGGED:
        _logged.add(text)
        log.warning("%s", text)


def headers(notes: list[str]) -> list[tuple[bytes, bytes]]:
    """Headers of an answer."""
    return [(HEADER, text.encode("ascii")) for text in notes]
