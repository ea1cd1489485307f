"""Which of several drafters drafts alone, from ratios of speeds."""

import random

from dflash_jax.engine.drafting_alone import SEQUENCE_DISPATCHES, DraftingAlone

DISPATCH_S = 0.02


class Load:
    """Sequences of random lengths, one after the other; drafter 1 alone is 0.2 slower than drafter 0."""

    def __init__(self, mean_dispatches: float):
        self.alone, self._rng, self._mean, self._now = DraftingAlone(), random.Random(0), mean_dispatches, 0.0

    def run(self, ratio: float, count: int) -> list[tuple[int | None, float]]:
        """(what drafts alone, seconds) of ``count`` sequences; ``ratio``: of the speed of drafter 0 alone."""
        done = []
        for _ in range(count):
            chosen = self.alone.begin({0, 1}, self._now)
            dispatches = 1 + int(self._rng.expovariate(1 / self._mean))
            for _ in range(dispatches):
                self.alone.observe({0: ratio, 1: ratio - 0.2}, chosen, self._now)
                self._now += DISPATCH_S
            done.append((chosen, dispatches * DISPATCH_S))
        return done


def share(done: list[tuple[int | None, float]], chosen: int | None) -> float:
    return sum(seconds for each, seconds in done if each == chosen) / sum(seconds for _, seconds in done)


def test_the_better_drafter_is_alone_after_some_sequences_and_stays_near_equality():
    load = Load(10)
    assert load.run(1.06, 1)[0][0] is None
    load.run(1.06, 60)
    assert share(load.run(1.06, 1000), 0) > 0.95
    assert share(load.run(0.98, 1000), 0) > 0.95
    load.run(0.9, 200)
    assert share(load.run(0.9, 1000), None) > 0.95


def test_what_is_worse_is_tried_for_a_fiftieth_of_the_time_however_long_sequences_are():
    for mean in (1, 30, 500):
        load = Load(mean)
        assert 0.005 < share(load.run(0.9, 2000), 0) < 0.04, mean
        load.run(1.1, 2000)
        assert 0.005 < share(load.run(1.1, 2000), None) < 0.04, mean


def test_a_long_sequence_counts_as_several():
    alone = DraftingAlone()
    for i in range(60 * SEQUENCE_DISPATCHES):
        alone.observe({0: 0.8, 1: 1.06}, None, DISPATCH_S * i)
    assert alone.begin({0, 1}, 60.0) == 1


def test_only_what_is_available_drafts_alone():
    load = Load(10)
    load.run(1.06, 200)
    # At first there is no time for a trial.
    assert {load.alone.begin(each, 1.0) for each in (set(), {1}, {0})} == {None, 0}
    assert load.alone.begin({1}, 1.0) is None
