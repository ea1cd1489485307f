"""Which of several drafters drafts alone, from ratios of speeds."""

from dflash_jax.engine.drafting_alone import COMPARED_RUNS, SEQUENCE_DISPATCHES, DraftingAlone

BOTH = {0, 1}


def sequences(alone: DraftingAlone, ratio: float, count: int, now: float = 0.0) -> list[int | None]:
    """What drafts in the first dispatch of sequences of 10 dispatches, each of 0.02 seconds."""
    chosen = []
    for _ in range(count):
        alone.begin_sequence(now)
        ran = []
        for _ in range(10):
            ran.append(alone.choose({0: ratio, 1: ratio - 0.2}, BOTH, now))
            now += 0.02
        assert len(set(ran)) == 1, "the contexts changed within a sequence"
        chosen.append(ran[0])
    return chosen


def test_the_better_drafter_is_alone_after_some_sequences_and_stays_near_equality():
    alone = DraftingAlone()
    first = sequences(alone, 1.06, 60)
    # The first ones: nothing is known, then the cost is measured.
    assert first[0] is None
    assert first[10] is None
    assert first[-20:] == [0] * 20
    assert sequences(alone, 0.98, 100, 100.0)[-20:] == [0] * 20
    left = sequences(alone, 0.9, 200, 1000.0)[-100:]
    assert left.count(None) > 90


def test_what_is_worse_alone_is_tried_for_a_fiftieth_of_the_time():
    chosen = sequences(DraftingAlone(), 0.9, 1000)
    assert 10 < chosen.count(0) < 30
    assert chosen[1:].index(0) <= COMPARED_RUNS


def test_a_long_sequence_counts_as_several():
    alone, chosen = DraftingAlone(), []
    alone.begin_sequence(0.0)
    for i in range(60 * SEQUENCE_DISPATCHES):
        chosen.append(alone.choose({0: 0.8, 1: 1.06}, BOTH, 0.02 * i))
    assert set(chosen[: SEQUENCE_DISPATCHES - 1]) == {None}
    assert set(chosen[-10 * SEQUENCE_DISPATCHES :]) == {1}


def test_without_rounds_of_a_drafter_alone_all_contexts_are_kept():
    alone = DraftingAlone()
    sequences(alone, 1.06, 60)
    alone.begin_sequence(100.0)
    assert alone.choose({}, set(), 100.0) is None
    assert alone.choose({0: 1.06}, {0}, 100.1) == 0
