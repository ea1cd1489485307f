"""Which of several drafters drafts alone, from ratios of speeds."""

import random

from dflash_jax.engine.acceptance import Acceptances
from dflash_jax.engine.drafting_alone import SEQUENCE_DISPATCHES, DraftingAlone


class Load:
    """Sequences of random lengths, some of them at once; drafter 1 alone is 0.2 slower than drafter 0."""

    def __init__(self, mean_dispatches: float, at_once: int = 1):
        self.alone, self._rng, self._mean, self._at_once = DraftingAlone(), random.Random(0), mean_dispatches, at_once

    def run(self, ratio: float, count: int) -> list[tuple[int | None, int]]:
        """(what drafts alone, rounds) of ``count`` sequences; ``ratio``: of the speed of drafter 0 alone."""
        running, done = [], []
        while len(done) < count:
            if len(running) < self._at_once:
                running.append((Acceptances(), 1 + int(self._rng.expovariate(1 / self._mean))))
                self.alone.begin(running[-1][0])
            sequence, dispatches = running.pop(0)
            self.alone.compare({0: ratio, 1: ratio - 0.2})
            self.alone.spend(sequence, 10)
            done.append((sequence.alone, 10))
            if dispatches > 1:
                running.append((sequence, dispatches - 1))
        return done


def share(done: list[tuple[int | None, int]], chosen: int | None) -> float:
    return sum(rounds for each, rounds in done if each == chosen) / sum(rounds for _, rounds in done)


def test_the_better_drafter_is_alone_after_some_sequences_and_stays_near_equality():
    load = Load(10)
    assert load.run(1.06, 1)[0][0] is None
    load.run(1.06, 2000)
    assert share(load.run(1.06, 5000), 0) > 0.95
    assert share(load.run(0.98, 5000), 0) > 0.95
    load.run(0.9, 2000)
    assert share(load.run(0.9, 5000), None) > 0.95


def test_what_is_worse_is_tried_in_a_fiftieth_of_the_rounds_however_long_sequences_are():
    for mean, at_once in ((1, 1), (30, 1), (30, 4), (300, 1)):
        load = Load(mean, at_once)
        load.run(0.9, 5000)
        assert 0.005 < share(load.run(0.9, 30_000), 0) < 0.04, mean
        load.run(1.1, 5000)
        assert 0.005 < share(load.run(1.1, 30_000), None) < 0.04, mean


def test_sequences_without_the_choice_are_no_trials():
    """Those that decode with others all the time, for hours, neither pay for trials nor are they any."""
    for ratio, better, other in ((0.9, None, 0), (1.1, 0, None)):
        load, batched = Load(10), Acceptances()
        load.run(ratio, 3000)
        load.alone.spend(batched, 10_000_000)
        assert 0.005 < share(load.run(ratio, 10_000), other) < 0.04
        assert share(load.run(ratio, 1000), better) > 0.9


def test_a_long_sequence_counts_as_several():
    alone, sequence = DraftingAlone(), Acceptances()
    for _ in range(60 * SEQUENCE_DISPATCHES):
        alone.compare({0: 0.8, 1: 1.06})
    alone.begin(sequence)
    assert (sequence.alone, sequence.is_trial) == (1, False)
