"""Masks that depend on the generated tokens alone, without a grammar, and the combination of several masks."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from dflash_jax.engine.request import MaskProvider, ReadyMasks


@dataclass(frozen=True)
class ThinkingBudget:
    """A bound on the tokens of a thought, and what a text must have before its end.

    Attributes:
        tokens: Tokens between the opening and the closing tag, at most; None for any number.
        open_ids: Tokens of the tag that opens a thought.
        close_ids: Tokens of the tag that closes it. They are forced when the budget is used up.
        is_open: Whether the text begins inside a thought. Otherwise it may begin with ``open_ids``.
        blank_ids: Tokens that may stand before ``open_ids``, and are no answer.
        ends_thought: Whether no token that ends the text may come inside a thought.
        needs_answer: Whether none may come before a token that is neither blank nor of a thought.
        answer_ids: Tokens that are an answer inside a thought, too.
    """

    tokens: int | None
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    is_open: bool
    blank_ids: tuple[int, ...] = ()
    ends_thought: bool = False
    needs_answer: bool = False
    answer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rules:
    """The tokens that a request allows, by what it has generated.

    Attributes:
        min_tokens: Tokens before which none of ``stop_ids`` may come.
        stop_ids: Tokens that end the text.
        bad_words: Sequences of token ids, none of them empty, that the text must not contain.
        allowed: The only token ids that the text may contain; None for all.
        budget: The bound of the thought. While it closes the thought, no other rule applies.
    """

    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: tuple[int, ...] | None = None
    budget: ThinkingBudget | None = None

    @property
    def are_needed(self) -> bool:
        """Whether any token is ever forbidden."""
        return bool(self.min_tokens or self.bad_words or self.allowed is not None or self.budget)


@dataclass(frozen=True)
class _Progress:
    """The state of the rules.

    Attributes:
        count: Generated tokens.
        tail: The last of them, as many as a rule reads.
        thought: Tokens of the thought so far, None outside of a thought.
        opening: Tokens of the opening tag so far, None where a thought can no longer begin.
        is_answered: Whether the text has an answer.
    """

    count: int
    tail: tuple[int, ...]
    thought: int | None
    opening: int | None
    is_answered: bool = False


class TokenRules(ReadyMasks):
    """The `MaskProvider` of `Rules`.

    Args:
        rules: The rules.
        vocab: Tokens of the vocabulary.
    """

    def __init__(self, rules: Rules, vocab: int):
        budget = rules.budget
        self._rules, self._vocab = rules, vocab
        lengths = [len(word) - 1 for word in rules.bad_words]
        lengths += [len(budget.close_ids)] if budget else []
        # Bad words of several tokens, by the last token but one.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in rules.bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._tail_size = max(lengths, default=0)
        is_open = budget is not None and budget.is_open
        self._progress = _Progress(0, (), 0 if is_open else None, None if budget is None or is_open else 0)
        self._base = _everything(vocab) if rules.allowed is None else packed([rules.allowed], vocab)[0]
        _forbid(self._base, [word[0] for word in rules.bad_words if len(word) == 1])

    def take(self, tokens: Sequence[int]) -> None:
        """See `MaskProvider`."""
        self._progress = reduce(self._after, tokens, self._progress)

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Packed bits uint32 [drafts + 1, ceil(V / 32)]."""
        progress, masks = self._progress, []
        for draft in drafts:
            masks.append(self._mask(progress))
            progress = self._after(progress, draft)
        return np.stack([*masks, self._mask(progress)])

    @property
    def is_over(self) -> bool:
        """See `MaskProvider`."""
        rules, now = self._rules, self._progress
        is_thinking = now.thought is not None or now.opening is not None
        is_thinking |= rules.budget is not None and rules.budget.needs_answer and not now.is_answered
        return rules.allowed is None and not rules.bad_words and not is_thinking and now.count >= rules.min_tokens

    def _after(self, now: _Progress, token: int) -> _Progress:
        count, thought, opening = now.count + 1, now.thought, now.opening
        tail = (*now.tail, token)[-self._tail_size :] if self._tail_size else ()
        budget, is_answered = self._rules.budget, now.is_answered
        if budget is not None and thought is not None:
            is_answered |= token in budget.answer_ids
            is_closed = thought + 1 >= len(budget.close_ids) and tail[-len(budget.close_ids) :] == budget.close_ids
            thought = None if is_closed else thought + 1
        elif budget is not None and opening is not None:
            if token == budget.open_ids[opening]:
                opening += 1
                if opening == len(budget.open_ids):
                    thought, opening = 0, None
            elif opening or token not in budget.blank_ids:
                opening, is_answered = None, True
        elif budget is not None:
            # A thought is closed twice, too.
            is_answered |= token not in budget.blank_ids and (token,) != budget.close_ids
        return _Progress(count, tail, thought, opening, is_answered)

    def _mask(self, now: _Progress) -> np.ndarray:
        """Packed bits of the tokens that may come next."""
        forced = self._forced(now)
        if forced is not None:
            return packed([[forced]], self._vocab)[0]
        mask = self._base.copy()
        if now.count < self._rules.min_tokens or self._must_go_on(now):
            _forbid(mask, self._rules.stop_ids)
        words = self._bad_words.get(now.tail[-1], ()) if now.tail else ()
        _forbid(mask, [word[-1] for word in words if now.tail[-len(word) + 1 :] == word[:-1]])
        return mask

    def _must_go_on(self, now: _Progress) -> bool:
        """Whether the text cannot end for want of an answer."""
        budget = self._rules.budget
        if budget is None or now.is_answered:
            return False
        return budget.needs_answer if now.thought is None else budget.ends_thought

    def _forced(self, now: _Progress) -> int | None:
        """The next token of the closing tag when the budget is used up, else None.

        The thought may end with the first tokens of the tag already.
        """
        budget = self._rules.budget
        if budget is None or budget.tokens is None or now.thought is None:
            return None
        close = budget.close_ids
        thought = now.tail[len(now.tail) - min(now.thought, len(now.tail)) :]
        longest = min(len(close) - 1, len(thought))
        begun = next(n for n in range(longest, -1, -1) if thought[len(thought) - n :] == close[:n])
        return close[begun] if now.thought - begun >= budget.tokens else None


class DraftRecord(ReadyMasks):
    """A `MaskProvider` that allows every token and records the drafts of each round.

    A round with masks shows its drafts to the host, which other rounds do not.

    Args:
        vocab: Tokens of the vocabulary.

    Attributes:
        rounds: Drafts of the rounds that have yielded tokens, oldest first. The engine's thread appends; the reader of
            the request's events removes one entry for each round of an event.
    """

    def __init__(self, vocab: int):
        self._everything = _everything(vocab)
        self._drafts: Sequence[int] | None = None
        self.rounds: deque[list[int]] = deque()

    def take(self, tokens: Sequence[int]) -> None:
        """See `MaskProvider`."""
        if self._drafts is not None:
            # The tokens of an earlier run, which come first, have no drafts.
            self.rounds.append(list(self._drafts))

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Packed bits uint32 [drafts + 1, ceil(V / 32)]."""
        return np.broadcast_to(self._everything, (len(drafts) + 1, len(self._everything)))


class CombinedMasks:
    """A `MaskProvider` that allows the tokens that all of several providers allow."""

    def __init__(self, providers: Sequence[MaskProvider]):
        self._providers = list(providers)
        self._answers: list[np.ndarray | None] = []

    def take(self, tokens: Sequence[int]) -> None:
        """See `MaskProvider`."""
        for provider in self._providers:
            provider.take(tokens)

    def ask(self, drafts: Sequence[int]) -> None:
        """See `MaskProvider`."""
        self._answers = [None] * len(self._providers)
        for provider in self._providers:
            provider.ask(drafts)

    def answer(self, timeout_s: float) -> np.ndarray | None:
        """See `MaskProvider`; None until all providers have answered."""
        until = time.monotonic() + timeout_s
        for i, provider in enumerate(self._providers):
            if self._answers[i] is None:
                self._answers[i] = provider.answer(max(0.0, until - time.monotonic()))
        answers = [answer for answer in self._answers if answer is not None]
        return np.bitwise_and.reduce(answers) if len(answers) == len(self._answers) else None

    @property
    def is_over(self) -> bool:
        """Whether all providers are over."""
        return all(provider.is_over for provider in self._providers)

    def close(self) -> None:
        """Closes all providers."""
        for provider in self._providers:
            provider.close()


def packed(allowed: Sequence[Sequence[int]], vocab: int) -> np.ndarray:
    """Packs masks.

    Args:
        allowed: The allowed token ids of each mask.
        vocab: Tokens of the vocabulary.

    Returns:
        uint32 [masks, ceil(V / 32)]; bit i of word w is token 32 w + i.
    """
    bits = np.zeros((len(allowed), -(-vocab // 32) * 32), np.uint8)
    for mask, ids in zip(bits, allowed, strict=True):
        mask[np.fromiter(ids, np.int64)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view("<u4")


def _everything(vocab: int) -> np.ndarray:
    """The mask that allows all tokens: uint32 [ceil(V / 32)]."""
    bits = np.arange(-(-vocab // 32) * 32) < vocab
    return np.packbits(bits, bitorder="little").view("<u4")


def _forbid(mask: np.ndarray, ids: Sequence[int]) -> None:
    """Removes token ids from a packed mask."""
    for i in ids:
        mask[i // 32] &= np.uint32(~(1 << i % 32) & 0xFFFFFFFF)
