"""Masks that are late, refused or impossible, on a runner without a model."""

import numpy as np
import pytest

from dflash_jax.engine.masking import NO_DRAFT, Masking, RoundOfMasks
from dflash_jax.engine.request import ReadyMasks
from dflash_jax.errors import EngineError, InputError
from tests.engine.mock_runner import engine, expected, request, run


class Counting(ReadyMasks):
    """Allows one token at each place: 3, 4, 5, …; answers only when it is asked ``patience`` times."""

    def __init__(self, patience: int = 0):
        self.patience, self.asked, self.refused, self.is_closed = patience, [], 0, False
        self.taken: list[int] = []
        # Whether the caller waited for an answer.
        self.was_awaited = False

    def take(self, tokens):
        self.taken += tokens

    def ask(self, drafts):
        self.asked.append(list(drafts))
        self._left = self.patience

    def answer(self, timeout_s):
        self.was_awaited |= timeout_s > 0
        if self._left:
            self._left -= 1
            self.refused += 1
            return None
        masks = np.zeros((len(self.asked[-1]) + 1, 2), np.uint32)
        masks[:, 0] = 1 << (3 + len(self.taken))
        return masks

    def close(self):
        self.is_closed = True


def test_a_late_mask_delays_its_own_request_only():
    e = engine(slots=2)
    masks = Counting(patience=6)
    e.submit(late := request([9, 9], 5, mask=masks, block_size=1))
    e.submit(other := request([9, 8], 40))
    while not other.finish_reason:
        e.step()
    # Rounds in which the other took part alone: without waiting, each has several tokens.
    assert other.tokens == expected([9, 8], 40)
    assert len(late.tokens) < 5
    run(e)
    assert late.tokens == masks.taken == [3, 4, 5, 6, 7]
    assert masks.refused == 5 * 6
    # Asked once for each round, however late the answer.
    assert len(masks.asked) == 5
    assert masks.is_closed


def test_masks_that_are_asked_for_are_taken_after_a_sleep():
    e = engine(slots=2)
    masks = Counting(patience=6)
    e.submit(kept := request([9, 9], 5, mask=masks, block_size=1))
    e.submit(other := request([9, 8], 40))
    while not masks.refused:
        e.step()
    assert masks._left
    e.is_paused = True
    e.release_caches()
    run(e)
    e.restore_caches()
    e.is_paused = False
    run(e)
    assert kept.tokens == masks.taken == [3, 4, 5, 6, 7]
    assert other.tokens == expected([9, 8], 40)
    # Not again: an answer to the first time would be taken for the second one's.
    assert len(masks.asked) == 5


def round_of(*masks, wait_s: float = 60.0) -> RoundOfMasks:
    """A round that was asked for; None is a request without masks."""
    one = RoundOfMasks(Masking(2, False, None), [request([9, 9], 5, mask=mask) for mask in masks], wait_s)
    one.ask(np.full((len(masks), 4), 9))
    return one


@pytest.mark.parametrize("other", [None, Counting()], ids=["without masks", "with its mask"])
def test_a_verified_round_waits_for_no_mask_where_another_slot_can_go_on(other):
    late = Counting(patience=10**6)
    _, is_late = round_of(late, other).answer(lambda: True)
    assert is_late.tolist() == [True, False]
    assert not late.was_awaited


def test_a_mask_that_comes_while_the_device_verifies_is_in_time():
    looks, slow = iter([False, False, True]), Counting(patience=3)
    masks, is_late = round_of(slow, None, Counting()).answer(lambda: next(looks))
    assert not is_late.any()
    assert [m[0, 0] for m in masks] == [8, 0xFFFFFFFF, 8]


def test_where_no_slot_can_go_on_a_round_waits_for_the_first_mask():
    first, never = Counting(patience=20), Counting(patience=10**6)
    assert round_of(never, first).answer(lambda: True)[1].tolist() == [True, False]
    assert round_of(first, wait_s=0.0).answer(lambda: True)[1].tolist() == [True]


def test_a_prompt_does_not_wait_for_a_mask():
    e = engine(slots=2)
    e.submit(late := request([9, 9], 5, mask=Counting(), block_size=1))
    while not late.tokens:
        e.step()
    late.mask.patience = 10**6
    e.submit(other := request([9] * 400, 1, block_size=1))
    while not other.finish_reason:
        e.step()
        assert other.tokens or not late.mask.was_awaited
    e.abort(late)


@pytest.mark.parametrize("beside", [None, Counting(patience=10**6)], ids=["alone", "beside a late one"])
def test_a_mask_that_fails_while_it_is_waited_for_ends_its_request(beside):
    """Neither slot can go on, so that the round waits; the one that fails must not be asked again."""
    answers = [None, None, None]

    def answer(_):
        if answers:
            return answers.pop()
        raise RuntimeError("a fault")

    bad = request([9, 9], 5, mask=Counting())
    bad.mask.answer = answer
    masking = Masking(2, False, lambda r, e: (setattr(r, "finish_reason", "error"), masking.forget(r)))
    others = [request([9, 9], 5, mask=beside)] if beside else []
    one = RoundOfMasks(masking, [bad, *others], 0.05)
    one.ask(np.full((1 + len(others), 4), 9))
    _, is_out = one.answer(lambda: True)
    assert bad.finish_reason == "error"
    assert is_out.all()


@pytest.mark.parametrize("error", [InputError("the form cannot be kept"), RuntimeError("a fault")])
@pytest.mark.parametrize("where", ["take", "ask", "answer", "waiting"])
def test_a_mask_that_fails_ends_its_own_request_with_its_error(where, error):
    e, masks, answers = engine(slots=2), Counting(), [None, None]

    def fail(*_):
        if where == "waiting" and answers:
            return answers.pop()
        raise error

    setattr(masks, "answer" if where == "waiting" else where, fail)
    e.submit(bad := request([9, 9], 5, mask=masks, block_size=1))
    e.submit(other := request([9, 8], 40))
    events = run(e)
    told = [event for event in events if event.request is bad]
    assert [event.finish_reason for event in told] == ["error"]
    if isinstance(error, InputError):
        assert told[0].error is error
    else:
        assert isinstance(told[0].error, EngineError)
    assert other.tokens == expected([9, 8], 40)
    assert masks.is_closed
    assert e.free_slots == 2


def test_events_of_a_round_are_made_when_the_next_one_is_verified():
    """Masks first: a text that ends there leaves the round that is verified."""
    e, order, masks = engine(slots=2), [], Counting()

    def monitor(tokens):
        order.append("monitor")
        return None if len(masks.taken) < 3 else 1

    for name in ("take", "ask"):
        monkeyed = getattr(masks, name)
        setattr(masks, name, lambda x, name=name, call=monkeyed: (order.append(name), call(x)))
    e.submit(r := request([9, 9], 9, mask=masks, block_size=1, monitor=monitor))
    e.submit(other := request([9, 8], 9, mask=Counting(), block_size=1))
    run(e)
    assert order == ["ask", "take", "ask", "monitor", "take", "ask", "monitor", "take", "ask", "monitor"]
    assert r.tokens == [3, 4, 5]
    assert other.tokens == list(range(3, 12))
    assert e.free_slots == 2


@pytest.mark.parametrize("ending", ["abort", "failure"])
def test_a_mask_is_closed_however_its_request_ends(ending):
    e, masks = engine(slots=2), Counting(patience=10**6)
    e.submit(r := request([9, 9], 5, mask=masks))
    e.step()
    e.step()
    if ending == "abort":
        e.abort(r)
    else:
        e.runner.fail = True
        e.submit(request([9, 8, 7], 5))
        while not e.failure:
            e.step()
    assert masks.is_closed


@pytest.mark.parametrize(
    ("drafted", "verified"),
    [([9, 21, 22, 23], [9, 11, 12, 13]), ([9, 21], [9, 11]), ([9, *range(5)], [9, 11, 12, 13, NO_DRAFT, NO_DRAFT])],
)
def test_a_round_is_verified_with_the_drafts_that_its_masks_are_for(drafted, verified):
    masking, masks = Masking(2, False, None), Counting(patience=2)
    r, block = request([9, 9], 5, mask=masks), np.array([[9, 11, 12, 13]])
    first = RoundOfMasks(masking, [r], wait_s=0.0)
    np.testing.assert_array_equal(first.ask(block), block)
    assert first.answer(lambda: True)[1].tolist() == [True]
    again = RoundOfMasks(masking, [r])
    np.testing.assert_array_equal(again.ask(np.array([drafted])), [verified])
    answer, late = again.answer(lambda: True)
    assert late.tolist() == [False]
    assert (answer[0, : min(4, len(drafted)), 0] == 8).all()
    assert len(masks.asked) == 1


def test_in_aligned_blocks_masks_begin_behind_the_known_tokens():
    masking, masks = Masking(2, True, None), Counting()
    r = request([9, 9], 50, mask=masks)
    for known in (1, 3, 4, 5, 8):
        r.tokens = [3] * (known - 1)
        masks.taken = list(r.tokens)
        place = (known - 1) % 4
        block = np.array([[20, 21, 22, 23]])
        one = RoundOfMasks(masking, [r])
        np.testing.assert_array_equal(one.ask(block), block)
        assert masks.asked[-1] == block[0, place + 1 :].tolist()
        answer, _ = one.answer(lambda: True)
        assert (answer[0, :place] == 0xFFFFFFFF).all()
        assert (answer[0, place:, 0] == 1 << (3 + len(r.tokens))).all()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("stop_at", [2, 5, None])
def test_tokens_before_an_impossible_one_count(block_size, stop_at):
    """However many tokens a dispatch brings: a stop string among them ends the text, and a stream has them all."""
    e, seen = engine(slots=1), []
    e.runner.no_token_behind = 5

    def monitor(tokens):
        for i, token in enumerate(tokens):
            seen.append(token)
            if len(seen) == stop_at:
                return i + 1
        return None

    e.submit(r := request([9, 9], 40, monitor=monitor, block_size=block_size))
    events = run(e)
    right = expected([9, 9], 5)[:stop_at]
    assert r.tokens == [token for event in events for token in event.tokens] == right
    assert sum(n for event in events for n in event.yielded) == len(right)
    if stop_at is None:
        assert r.finish_reason == "error"
        assert "leave no token after 5 new ones" in str(events[-1].error)
    else:
        assert r.finish_reason == "stop"
    assert e.free_slots == 1
