"""Incremental decoding of tokens: whole characters only, up to a stop string."""

from collections.abc import Sequence

from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.stop_strings import StopFinder

# Tokens that may wait for the rest of a character, or that have no text.
LONGEST_WAIT = 16
# What an incomplete character decodes to.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes tokens incrementally and looks for stop strings.

    Args:
        tokenizer: Decodes tokens.
        stops: Stop strings.
        stop_regex: Regular expressions that end the text.
        skip_special_tokens: Whether special tokens are left out of the text.
        include_stop: Whether the text includes the stop string or match.
        min_tokens: Stops that end in the text of the first ``min_tokens`` tokens do not count.

    Attributes:
        text: The text so far, without characters that may belong to a stop string. Once ``stopped``, it ends before the
            stop string or match, or behind it with ``include_stop``, and no longer grows. The beginning of a match that
            is longer than the characters held back is part of the text.
        stopped: Whether a stop string or match was seen.
        stop: The stop string or the expression that ended the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        stop_regex: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ):
        self._tokenizer, self._stops = tokenizer, StopFinder(stops, stop_regex)
        self._skip_special_tokens, self._include_stop, self._min_tokens = skip_special_tokens, include_stop, min_tokens
        self._ids: list[int] = []
        # The text of tokens before _read is final; those from _from on are decoded again as context of later tokens.
        self._from, self._read = 0, 0
        # Final text, text of tokens that wait for the rest of a character, and where the last token begins.
        self._raw, self._pending, self._start = "", "", 0
        # Characters of the first min_tokens.
        self._floor = 0
        self.text = ""
        self.stopped = False
        self.stop: str | None = None

    @property
    def end(self) -> int:
        """Where the next character begins, in characters of the text without regard to stops."""
        return len(self._raw) + len(self._pending)

    def push(self, *tokens: int) -> int:
        """Adds tokens. Several in one call give the same text as one by one, at less cost.

        Returns:
            Where the tokens begin, in characters of the text without regard to stops. A token that continues a
            character begins where the character does.
        """
        if self.stopped:
            return self._start
        is_long = len(self._ids) - self._read >= LONGEST_WAIT
        self._ids += tokens
        before = self._decode(self._ids[self._from : self._read])
        now = self._decode(self._ids[self._from :])
        pending, self._pending = self._pending, now[len(before) :]
        self._start = max(self._start, len(self._raw) + _begin(pending, self._pending))
        # An incomplete character waits for its rest, for as many tokens as a character may have.
        if is_long or (len(now) > len(before) and not now.endswith(_INCOMPLETE)):
            self._from, self._read = self._read, len(self._ids)
            self._settle()
        return self._start

    def finish(self) -> None:
        """Ends the text: no tokens follow, so characters held back are part of it."""
        if not self.stopped:
            self._settle()
            if not self.stopped:
                self.text = self._raw

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _settle(self) -> None:
        searched = len(self._raw)
        self._raw, self._pending = self._raw + self._pending, ""
        stop = None
        if len(self._ids) <= self._min_tokens:
            self._floor = len(self._raw)
        elif self._stops:
            stop = self._stops.first(self._raw, searched, self._floor)
        if stop is not None:
            self.stopped, self.stop = True, stop.matched
            self.text = self._raw[: stop.end if self._include_stop else max(stop.start, len(self.text))]
        elif not self._stops or self._include_stop:
            self.text = self._raw
        else:
            self.text = self._raw[: max(len(self.text), len(self._raw) - self._stops.held_back(self._raw))]


def _begin(pending: str, now: str) -> int:
    """Where in ``now`` the tokens begin that were added to those of ``pending``."""
    added = now[len(pending) :]
    if now.startswith(pending):
        return len(pending) if added and added[0] != _INCOMPLETE else len(pending.rstrip(_INCOMPLETE))
    return next((i for i, (a, b) in enumerate(zip(pending, now, strict=False)) if a != b), len(now))
