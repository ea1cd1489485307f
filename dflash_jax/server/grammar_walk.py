"""Masks of one sequence: a grammar, and the thought that may stand before it.

Masks are packed bits of the vocabulary, bit i of byte b for token 8 b + i. Runs in the grammar's own process
(`grammar_worker`), so it stays free of JAX and numpy.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from dflash_jax.errors import InputError
from dflash_jax.server.grammar_source import sources

# A row of the parser has an entry for each alternative: thousands of choices are fine, and take microseconds each.
# What costs more than a step may is left to the limits of the process.
_LIMITS = {"max_items_in_row": 50_000, "step_max_items": 1_000_000, "verbose_errors": False}

# Blank tokens between a thought and the answer; models write one or two.
MOST_BLANKS = 4


@dataclass(frozen=True)
class GrammarTokens:
    """A checkpoint's tokens as grammars see them.

    Attributes:
        file: The tokenizer.json.
        vocab: Size of the model's vocabulary.
        stop_ids: Tokens that end a text.
        open_ids: Tokens of the tag that opens a thought.
        close_ids: Tokens of the tag that closes it.
        blank_ids: Tokens that may stand between a thought and the answer.
    """

    file: str
    vocab: int
    stop_ids: tuple[int, ...]
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    blank_ids: tuple[int, ...]

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: whole words of 32 bits."""
        return 4 * -(-self.vocab // 32)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self.file, n_vocab=self.vocab, eos_token=list(self.stop_ids) or None)

    def load(self) -> None:
        """Reads the tokenizer's file, which takes a second for a large vocabulary."""
        _ = self._tokenizer

    def bits(self, ids: Sequence[int]) -> int:
        """A mask of these tokens, as a number of little-endian bytes."""
        return sum(1 << i for i in set(ids))

    @cached_property
    def anything(self) -> bytes:
        return ((1 << self.vocab) - 1).to_bytes(self.mask_bytes, "little")

    @cached_property
    def stops(self) -> bytes:
        return self.bits(self.stop_ids).to_bytes(self.mask_bytes, "little")

    def literal(self, text: str) -> list[str]:
        """A text in Lark: strings, and special tokens as "<[id]>"."""
        parts, plain = [], []
        for token in [*self._tokenizer.tokenize_str(text, parse_special=True), None]:
            is_special = token is not None and self._tokenizer.is_special_token(token)
            if token is not None and not is_special:
                plain.append(token)
                continue
            if plain:
                parts.append(json.dumps(self._tokenizer.decode_bytes(plain).decode()))
            parts, plain = parts + [f"<[{token}]>"] * is_special, []
        return parts

    def matcher(self, kind: str, value, field: str) -> tuple[LLMatcher, list[str]]:
        """(the matcher of a `Constraint`, what it does not enforce). Raises InputError for what cannot be understood,
        naming ``field``."""
        error = ""
        try:
            for source, notes in sources(kind, value, self.literal):
                matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**_LIMITS))
                if not matcher.is_error():
                    return matcher, notes + [_line(note) for note in matcher.get_grammar_warnings()]
                error = error or _line(matcher.get_error())
        except Exception as e:  # whatever a text from outside makes the library raise
            error = error or _line(e)
        raise InputError(f"{field}: {error}")

    def mask(self, matcher: LLMatcher) -> bytes:
        """What ``matcher`` allows next. Raises InputError where it has reached a limit of its own."""
        mask = matcher.compute_bitmask()[: self.mask_bytes]
        if matcher.is_error():
            raise InputError(f"the text's form cannot be kept any longer: {_line(matcher.get_error())}")
        # A grammar that has nothing more to say: the text ends here.
        return mask if mask.count(0) < len(mask) else self.stops


def _line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


class GrammarWalk:
    """Where a sequence stands in its grammar.

    ``thought``: "open" where the text begins inside one; the grammar then begins when that ends, also in the middle of
    a drafted block. "possible": where it may begin with one. "none": the grammar begins at once.
    """

    def __init__(self, tokens: GrammarTokens, matcher: LLMatcher, thought: str = "none"):
        self.tokens, self.matcher = tokens, matcher
        if thought == "possible" and len(tokens.open_ids) != 1:
            thought = "none"
        self._phase = {"open": "thought", "possible": "undecided", "none": "grammar"}[thought]
        # The end of the thought so far, as long as the closing tag's own tokens, and the blank tokens behind it.
        self._tail: tuple[int, ...] = ()
        # A matcher that has reached a limit is lost: the next one begins here, and consumes the same tokens.
        self._beginning, self._consumed = matcher.deep_copy(), []

    def take(self, tokens: Sequence[int]) -> None:
        """Goes past tokens that were drawn. Raises InputError for one that the grammar refuses."""
        for token in tokens:
            self._phase, self._tail, consumed = self._step(self._phase, self._tail, token)
            self._consumed += [token] * consumed

    def _step(self, phase: str, tail: tuple[int, ...], token: int) -> tuple[str, tuple[int, ...], int]:
        """The phase behind a token, and how many tokens (0 or 1) the grammar consumed."""
        if phase == "undecided" and (token,) == self.tokens.open_ids:
            return "thought", tail, 0
        if phase == "thought":
            tail = (*tail, token)[-len(self.tokens.close_ids) :]
            return ("between" if tail == self.tokens.close_ids else "thought"), tail, 0
        if phase == "between" and token in self._blank_ids(tail) and not self.matcher.validate_tokens([token]):
            return "between", (*tail, token), 0
        if phase == "over":
            return "over", tail, 0
        if not self.matcher.is_stopped() and self.matcher.try_consume_tokens([token]):
            return "grammar", tail, 1
        if self.matcher.is_error():
            raise InputError(f"the text's form cannot be kept any longer: {_line(self.matcher.get_error())}")
        if token not in self.tokens.stop_ids:
            raise InputError(f"the text's form cannot be kept: its grammar refuses token {token}")
        return "over", tail, 0

    def _blank_ids(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """Blank tokens that may come next between a thought and the answer."""
        return self.tokens.blank_ids if len(tail) < len(self.tokens.close_ids) + MOST_BLANKS else ()

    def _mask(self, phase: str, tail: tuple[int, ...]) -> bytes:
        if phase in ("thought", "over"):
            return self.tokens.anything
        allowed = self.tokens.mask(self.matcher)
        besides = {"between": self._blank_ids(tail), "undecided": self.tokens.open_ids[:1]}.get(phase)
        if besides is None:
            return allowed
        return (int.from_bytes(allowed, "little") | self.tokens.bits(besides)).to_bytes(len(allowed), "little")

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Masks behind what was taken, and behind each of the ``drafts`` up to the first that is forbidden, or behind
        which a limit is reached: there no token is allowed. A draft may never be drawn, so it is no error yet."""
        masks, phase, tail, consumed = [self._mask(self._phase, self._tail)], self._phase, self._tail, 0
        for draft in drafts:
            if not masks[-1][draft // 8] >> draft % 8 & 1:
                break
            try:
                phase, tail, more = self._step(phase, tail, draft)
                consumed += more
                masks.append(self._mask(phase, tail))
            except InputError:
                self.matcher = self._beginning.deep_copy()
                self.matcher.try_consume_tokens(self._consumed)
                return [*masks, bytes(self.tokens.mask_bytes)]
        self.matcher.rollback(consumed)
        return masks
