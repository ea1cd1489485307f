"""Rules on tokens against a direct reading of what they say, and rules beside other masks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.engine.request import ReadyMasks
from dflash_jax.engine.token_rules import CombinedMasks, Rules, ThinkingBudget, TokenRules, packed
from tests.engine.mock_runner import engine, request, run

VOCAB, STOPS, OPEN, CLOSE = 40, (0, 33), (5,), (6,)
tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


def allowed(mask: np.ndarray) -> set[int]:
    return {i for i in range(VOCAB) if int(mask[i // 32]) >> i % 32 & 1}


def contains(text: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(text[i : i + len(word)]) == word for i in range(len(text)))


@st.composite
def rules(draw) -> Rules:
    only = draw(st.none() | st.sets(tokens, min_size=8).map(lambda ids: tuple(sorted(ids | {7, 8}))))
    return Rules(draw(st.integers(0, 6)), STOPS, draw(words), only)


@settings(max_examples=60)
@given(rules(), st.randoms(use_true_random=False))
def test_a_text_that_the_masks_allow_keeps_the_rules(rules, random):
    masks, text = TokenRules(rules, VOCAB), []
    for _ in range(12):
        may = allowed(masks.masks([])[0])
        for token in range(VOCAB):
            longer = [*text, token]
            right = rules.allowed is None or token in rules.allowed
            right &= not any(contains(longer, word) for word in rules.bad_words)
            right &= token not in STOPS or len(text) >= rules.min_tokens
            assert (token in may) == right, (text, token)
        if not may:
            return
        text.append(random.choice(sorted(may)))
        masks.take(text[-1:])


@settings(max_examples=60)
@given(
    rules(), st.none() | st.integers(0, 4), st.booleans(), st.lists(st.lists(st.integers(1, 7), max_size=5), max_size=5)
)
def test_masks_along_drafts_are_those_of_one_token_after_the_other(rules, budget, is_open, blocks):
    if budget is not None:
        rules = Rules(rules.min_tokens, STOPS, rules.bad_words, None, ThinkingBudget(budget, OPEN, (6, 7), is_open))
    fast, slow = TokenRules(rules, VOCAB), TokenRules(rules, VOCAB)
    for block in blocks:
        along = fast.masks(block)
        assert along.dtype == np.uint32
        assert along.shape == (len(block) + 1, 2)
        for i, token in enumerate([*block, None]):
            np.testing.assert_array_equal(along[i], slow.masks([])[0])
            if token is not None:
                slow.take([token])
        fast.take(block)
        assert fast.is_over == slow.is_over


@pytest.mark.parametrize("close", [(6,), (6, 7), (6, 6, 7)])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_thought_ends_where_its_budget_does(close, is_open, tokens):
    masks = TokenRules(Rules(budget=ThinkingBudget(tokens, OPEN, close, is_open)), VOCAB)
    if not is_open:
        assert len(allowed(masks.masks([])[0])) == VOCAB
        masks.take(OPEN)
    for _ in range(tokens):
        assert len(allowed(masks.masks([])[0])) == VOCAB
        assert not masks.is_over
        masks.take([9])
    for token in close:
        assert allowed(masks.masks([])[0]) == {token}
        masks.take([token])
    assert masks.is_over
    assert len(allowed(masks.masks([])[0])) == VOCAB


def test_a_thought_that_ends_by_itself_is_left_alone():
    masks = TokenRules(Rules(budget=ThinkingBudget(3, OPEN, (6, 7), True)), VOCAB)
    masks.take([9, 9, 6])
    # Two tokens of thought, and a tag that has begun.
    assert len(allowed(masks.masks([])[0])) == VOCAB
    masks.take([9])
    # The tag was none: four tokens are thought.
    assert allowed(masks.masks([])[0]) == {6}
    masks = TokenRules(Rules(budget=ThinkingBudget(2, OPEN, (6, 7), True)), VOCAB)
    masks.take([9, 9, 6])
    assert allowed(masks.masks([])[0]) == {7}


BLANK, CALL_END = 3, 8


@settings(max_examples=200)
@given(
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 4),
    st.lists(st.sampled_from([*STOPS, *OPEN, *CLOSE, BLANK, CALL_END, 9]), max_size=8),
)
def test_a_text_that_needs_an_answer_does_not_end_before_it(is_open, needs_answer, budget, text):
    """A thought, its tags and blanks are none; the end of a call in a thought is one."""
    given = ThinkingBudget(budget, OPEN, CLOSE, is_open, (BLANK,), True, needs_answer, (CALL_END,))
    masks, thought, is_answered = TokenRules(Rules(stop_ids=STOPS, budget=given), VOCAB), is_open, False
    is_first, rest = not is_open, None if budget is None else budget
    for token in text:
        may = allowed(masks.masks([])[0])
        is_forced = thought and rest == 0
        can_end = is_answered or not (thought or needs_answer)
        assert bool(may & set(STOPS)) == (can_end and not is_forced)
        assert may - set(STOPS) == (set(CLOSE) if is_forced else set(range(VOCAB)) - set(STOPS))
        token = CLOSE[0] if is_forced else token
        if thought:
            is_answered |= token == CALL_END
            rest = rest and rest - 1
            thought = token not in CLOSE
        elif is_first and token in OPEN:
            thought = True
        else:
            # What follows the beginning may be a closing tag, which is none.
            is_answered |= token != BLANK and (is_first or token not in CLOSE)
            is_first &= token == BLANK
        is_first &= not thought
        masks.take([token])
    assert not masks.is_over or (not thought and (is_answered or not needs_answer))


def test_a_text_that_does_not_begin_with_a_thought_has_none():
    masks = TokenRules(Rules(budget=ThinkingBudget(0, (5, 4), CLOSE, False)), VOCAB)
    masks.take([5])
    assert not masks.is_over
    masks.take([9])
    assert masks.is_over
    masks.take([5, 4, 9])
    assert len(allowed(masks.masks([])[0])) == VOCAB


class Late(ReadyMasks):
    """Allows token 4 and more at the second call only."""

    def __init__(self):
        self.calls, self.is_closed = 0, False

    def take(self, tokens):
        pass

    def masks(self, drafts):
        return packed([range(4, VOCAB)] * (len(drafts) + 1), VOCAB)

    def answer(self, timeout_s):
        self.calls += 1
        return None if self.calls % 2 else super().answer(timeout_s)

    def close(self):
        self.is_closed = True


def test_combined_masks_allow_what_all_allow_and_wait_for_the_late_one():
    late = Late()
    both = CombinedMasks([TokenRules(Rules(allowed=(2, 3, 4, 5)), VOCAB), late])
    both.ask([9])
    assert both.answer(0.0) is None
    answer = both.answer(0.0)
    assert answer.shape == (2, 2)
    assert allowed(answer[0]) == {4, 5}
    assert not both.is_over
    both.close()
    assert late.is_closed


def test_a_mask_that_is_over_leaves_its_request_and_the_next_dispatch_has_many_rounds():
    e = engine(slots=1)
    e.runner.ends = False
    e.submit(r := request([9, 9], 60, mask=TokenRules(Rules(min_tokens=4, stop_ids=(0,)), 64), block_size=1))
    run(e)
    dispatches = [entry[1].rounds for entry in e.runner.log if entry[0] == "decode"]
    assert len(r.tokens) == 60
    assert r.mask is None
    assert dispatches[:4] == [1] * 4
    assert max(dispatches[4:]) > 1


def test_blank_tokens_may_stand_before_a_thought():
    masks = TokenRules(Rules(budget=ThinkingBudget(1, (5, 4), CLOSE, False, (9,))), VOCAB)
    masks.take([9, 9, 5, 4, 9])
    assert allowed(masks.masks([])[0]) == {6}
    masks = TokenRules(Rules(budget=ThinkingBudget(1, (5, 4), CLOSE, False, (9,))), VOCAB)
    masks.take([9, 5, 9])
    assert masks.is_over
