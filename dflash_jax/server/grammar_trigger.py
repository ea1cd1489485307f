"""Masks of a text that is free but for the inputs of custom tools, each of which follows a grammar.

A call of such a tool begins with words that no other text has (`grammar_source.openings`). Before them every token may
come. From them on a matcher says what may, up to the end of the input. The module runs in the sequence's own process
(`grammar_worker`).
"""

from bisect import bisect_left
from collections.abc import Sequence

from llguidance import LLMatcher

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_walk import GrammarTokens, refusal


class Triggers:
    """The words that begin calls, and the masks of tokens that complete them.

    Args:
        tokens: The checkpoint's tokens.
        matcher: The grammar of a call of any of the tools, from its first word on.
        words: What the calls begin with.
    """

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher, words: Sequence[str]):
        self.tokens, self._matcher, self._words = tokens, matcher, [word.encode() for word in words]
        self._sorted = sorted((spelling, token) for token, spelling in enumerate(tokens.spellings))
        self._masks: dict[bytes, bytes] = {b"": tokens.anything}

    def beginning(self, text: bytes) -> bytes:
        """The longest end of a text that may become one of the words."""
        longest = max(map(len, self._words))
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(word.startswith(text[at:]) for word in self._words):
                return text[at:]
        return b""

    def begun(self, text: bytes) -> LLMatcher | None:
        """The matcher after a call that a text ends in; None where it ends in none."""
        places = [(at, word) for word in self._words if (at := text.find(word)) >= 0]
        return self._after(text[min(places)[0] :]) if places else None

    def _after(self, text: bytes) -> LLMatcher | None:
        matcher, ids = self._matcher.deep_copy(), self.tokens.ids(text)
        return matcher if matcher.try_consume_tokens(ids) == len(ids) else None

    def mask(self, beginning: bytes) -> bytes:
        """The mask of the tokens that may come after a ``beginning`` of the words.

        A token that completes a word may spell what follows it, too: it must spell what the grammar lets in.
        """
        if beginning not in self._masks:
            rests = [word[len(beginning) :] for word in self._words if word.startswith(beginning)]
            completing = [token for rest in rests for token in self._tokens_from(rest)]
            mask = int.from_bytes(self.tokens.anything, "little")
            if completing and (matcher := self._after(beginning)) is not None:
                allowed = int.from_bytes(self.tokens.mask(matcher), "little")
                mask &= ~self.tokens.bits(completing) | allowed
            self._masks[beginning] = mask.to_bytes(self.tokens.mask_bytes, "little")
        return self._masks[beginning]

    def _tokens_from(self, text: bytes) -> list[int]:
        """The tokens whose spellings begin with a text."""
        tokens = []
        for spelling, token in self._sorted[bisect_left(self._sorted, (text, -1)) :]:
            if not spelling.startswith(text):
                break
            tokens.append(token)
        return tokens


class TriggeredWalk:
    """The state of a sequence, as `GrammarWalk`.

    Args:
        triggers: The words.
        thought: "open" where no call begins before the thought ends; otherwise calls may be anywhere.
    """

    def __init__(self, triggers: Triggers, thought: str = "none"):
        self._triggers, self._tokens = triggers, triggers.tokens
        # The end of the text that may become a word.
        self._beginning = b""
        # The matcher of the call that the text ends in, what the call began with, and its tokens after that.
        self._matcher: LLMatcher | None = None
        self._opening, self._consumed = b"", list[int]()
        # The last tokens of an open thought, None outside of one.
        self._thought: tuple[int, ...] | None = () if thought == "open" else None

    def take(self, tokens: Sequence[int]) -> None:
        """See `GrammarWalk`."""
        for token in tokens:
            self._step(token)

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """See `GrammarWalk`."""
        if not drafts:
            return [self._mask()]
        state = self._beginning, self._matcher, self._opening, self._consumed, self._thought
        self._consumed = [*self._consumed]
        masks, steps = [], 0
        try:
            for draft in drafts:
                masks.append(self._mask())
                if not masks[-1][draft // 8] >> draft % 8 & 1:
                    return masks
                is_same = self._matcher is not None and self._matcher is state[1]
                self._step(draft)
                steps += is_same
            return [*masks, self._mask()]
        except InputError:
            # A limit is reached, which is no error yet: the draft may never be drawn.
            return [*masks, bytes(self._tokens.mask_bytes)]
        finally:
            self._beginning, self._matcher, self._opening, self._consumed, self._thought = state
            if self._matcher is not None and (self._matcher.is_error() or not self._matcher.rollback(steps)):
                self._matcher = self._triggers.begun(self._opening)
                assert self._matcher is not None, "a call that begins once begins again"
                self._matcher.try_consume_tokens(self._consumed)

    def _mask(self) -> bytes:
        if self._matcher is not None:
            return self._tokens.mask(self._matcher)
        return self._triggers.mask(self._beginning)

    def _step(self, token: int) -> None:
        if self._thought is not None:
            self._thought = (*self._thought, token)[-len(self._tokens.close_ids) :]
            if self._thought == self._tokens.close_ids:
                self._thought = None
            return
        spelling = self._tokens.spellings[token]
        if self._matcher is None:
            text = self._beginning + spelling
            self._matcher = self._triggers.begun(text)
            self._opening, self._consumed = text, []
            self._beginning = b"" if self._matcher is not None else self._triggers.beginning(text)
        elif self._matcher.try_consume_tokens([token]):
            self._consumed.append(token)
        else:
            raise refusal(self._matcher, token)
        if self._matcher is not None and self._matcher.is_accepting():
            # The input has ended.
            self._matcher, self._beginning = None, self._triggers.beginning(spelling)
