"""Incremental decoding of tokens: whole characters only, up to a stop string.

The tokens of a text, in whatever pieces they come, give what the tokenizer decodes all of them to.
"""

import codecs
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.stop_strings import StopFinder

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
            stop string or match, or after it with ``include_stop``, and no longer grows. The beginning of a match that
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
        self._decoder = (_ByteDecoder if tokenizer.is_byte_level else _ContextDecoder)(tokenizer, skip_special_tokens)
        self._stops, self._include_stop, self._min_tokens = StopFinder(stops, stop_regex), include_stop, min_tokens
        # Tokens, their text as far as it is final, and where the last of them begins.
        self._count, self._raw, self._start = 0, "", 0
        # Characters of the first min_tokens.
        self._floor = 0
        self.text = ""
        self.stopped = False
        self.stop: str | None = None

    @property
    def end(self) -> int:
        """Where the next character begins, in characters of the text without regard to stops."""
        return len(self._raw) + self._decoder.pending

    def push(self, *tokens: int) -> int:
        """Adds tokens. Several in one call give the same text as one by one, at less cost.

        Returns:
            Where the tokens begin, in characters of the text without regard to stops. A token that continues a
            character begins where the character does.
        """
        if self.stopped:
            return self._start
        self._count += len(tokens)
        text, begin = self._decoder.push(tokens)
        self._start = max(self._start, len(self._raw) + begin)
        if text:
            self._settle(text)
        return self._start

    def push_each(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Adds tokens, up to one that ends the text.

        Returns:
            Where each of them begins, as `push` says, and where ``text`` ends after each.
        """
        lengths = None if self._stops or self.stopped else self._decoder.lengths(tokens)
        if lengths is not None:
            places = list(accumulate(lengths, initial=len(self._raw)))
            self.push(*tokens)
            return places[:-1], places[1:]
        starts, ends = [], []
        for token in tokens:
            starts.append(self.push(token))
            ends.append(len(self.text))
            if self.stopped:
                break
        return starts, ends

    def finish(self) -> None:
        """Ends the text: no tokens follow, so characters held back are part of it."""
        if not self.stopped:
            self._settle(self._decoder.finish())
            if not self.stopped:
                self.text = self._raw

    def _settle(self, text: str) -> None:
        searched = len(self._raw)
        self._raw += text
        stop = None
        if self._count <= self._min_tokens:
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


class _ByteDecoder:
    """Decodes tokens that are bytes of UTF-8.

    What is no UTF-8 becomes replacement characters, as many as the tokenizers library writes: one for each longest
    beginning of a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._bytes = tokenizer.shown_bytes if skip_special_tokens else tokenizer.all_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> int:
        """Characters that have begun and are not complete: 0 or 1."""
        return int(bool(self._utf8.getstate()[0]))

    def push(self, tokens: Iterable[int]) -> tuple[str, int]:
        """The text that tokens complete, and where in it they begin."""
        raw = b"".join(map(self._bytes.__getitem__, tokens))
        if not raw:
            return "", 0
        first = self._utf8.decode(raw[:1])
        # The first byte is of the last character so far.
        begin = len(first) - 1 + self.pending
        return first + self._utf8.decode(raw[1:]), begin

    def lengths(self, tokens: Sequence[int]) -> list[int] | None:
        """Characters of each token, where all are ASCII, and no character has begun; None otherwise."""
        texts = list(map(self._bytes.__getitem__, tokens))
        return list(map(len, texts)) if b"".join(texts).isascii() and not self.pending else None

    def finish(self) -> str:
        """The text of what waits."""
        return self._utf8.decode(b"", final=True)


class _ContextDecoder:
    """Decodes tokens of other vocabularies: new ones after the last ones, which decide about a first space."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # The last tokens with final text, that text, tokens after them that wait, and what these decode to so far.
        self._context, self._before = list[int](), ""
        self._waiting, self._text = list[int](), ""
        # Characters that the bytes at the end have begun; 0 where the last token is none.
        self._begun = 0

    @property
    def pending(self) -> int:
        """Characters that have begun and are not complete."""
        return self._begun or len(self._text)

    def push(self, tokens: Iterable[int]) -> tuple[str, int]:
        """The text that tokens complete, and where in it they begin."""
        tokenizer, text, begins = self._tokenizer, "", [0]
        shown = [t for t in tokens if tokenizer.token(t) and not (self._skip and tokenizer.is_special(t))]
        for is_byte, group in groupby(shown, lambda token: tokenizer.fallback_byte(token) is not None):
            piece, begin = (self._push_bytes if is_byte else self._push_others)(list(group))
            begins.append(len(text) + begin)
            text += piece
        return text, begins[1 if shown else 0]

    def lengths(self, tokens: Sequence[int]) -> None:
        """None: a token's characters follow from those around it."""

    def _push_bytes(self, tokens: list[int]) -> tuple[str, int]:
        """Bytes wait for the end of their run, since all of it decides whether they are UTF-8."""
        bytes_ = [self._tokenizer.fallback_byte(token) or 0 for token in tokens]
        is_head = [byte & 0xC0 != 0x80 for byte in bytes_]
        begin = max(0, self._begun + is_head[0] - 1)
        self._begun = max(1, self._begun + sum(is_head))
        self._waiting += tokens
        return "", begin

    def _push_others(self, tokens: list[int]) -> tuple[str, int]:
        text = self.finish() if self._begun else ""
        waited = len(self._waiting)
        self._waiting += tokens
        # The more tokens wait, the rarer they are decoded, so that many cost no more than few.
        if waited and len(self._waiting) % (1 << max(0, len(self._waiting).bit_length() - 5)):
            return text, len(text)
        now = self._decoded()
        begin = len(text) + _begin(self._text, now)
        self._text = now
        if self._tokenizer.has_byte_fallback or not now.endswith(_INCOMPLETE):
            text += self.finish()
        return text, begin

    def finish(self) -> str:
        """The text of what waits."""
        if text := self._decoded():
            self._context, self._waiting = self._waiting, []
            self._before = self._tokenizer.decode(self._context, self._skip)
        self._text, self._begun = "", 0
        return text

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._context + self._waiting, self._skip)[len(self._before) :]


def _begin(pending: str, now: str) -> int:
    """Where in ``now`` the tokens begin that were added to those of ``pending``."""
    added = now[len(pending) :]
    if now.startswith(pending):
        return len(pending) if added and added[0] != _INCOMPLETE else len(pending.rstrip(_INCOMPLETE))
    return next((i for i, (a, b) in enumerate(zip(pending, now, strict=False)) if a != b), len(now))
