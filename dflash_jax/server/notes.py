"""What a client should know about an answer beside its body: headers ``X-Dflash-Note``, one for each.

A request's handlers call `note`; the application adds the headers when the answer begins.
"""

import logging
from contextvars import ContextVar

log = logging.getLogger("dflash_jax.server")

HEADER = b"x-dflash-note"
# Most notes of an answer, and most characters of one.
MOST, LONGEST = 8, 300
# Most different notes that are logged: they hold what clients sent.
MOST_LOGGED = 256
_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_logged: set[str] = set()


def begin() -> list[str]:
    """Collects the notes of the request at hand from here on, in the list that comes back."""
    notes: list[str] = []
    _notes.set(notes)
    return notes


def note(text: str) -> None:
    """Tells the client ``text``, and the log once."""
    text = text.encode("ascii", "backslashreplace").decode()
    text = "".join(c if c.isprintable() else " " for c in text)[:LONGEST]
    notes = _notes.get()
    if notes is not None and len(notes) < MOST and text not in notes:
        notes.append(text)
    if text not in _logged and len(_logged) < MOST_LOGGED:
        _logged.add(text)
        log.warning("%s", text)


def headers(notes: list[str]) -> list[tuple[bytes, bytes]]:
    return [(HEADER, text.encode("ascii")) for text in notes]
