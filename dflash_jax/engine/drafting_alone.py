"""Whether one of several drafters drafts alone, without the contexts of the others, which take time in every round.

The choice is made once for each sequence, when it begins: a context that was left out would start anew later, without
the prompt. The criterion is the speed of a drafter's rounds alone over that of the best rounds with all contexts, as
`DraftLengthPolicy` estimates both before each dispatch. Sequences, not dispatches, count alike in its average, since
different texts suit different drafters. The other choice is tried in a small share of the rounds, so that both speeds
stay known: a drafter alone, to measure its cost, or all contexts, to measure the acceptance of the other drafters.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import fmean

from dflash_jax.engine.acceptance import Acceptances

# The average ratio of speeds at first, and the weight of a sequence. The prior keeps all contexts for some sequences.
FIRST_RATIO, SEQUENCE_WEIGHT = 0.95, 0.05
# Dispatches that count as a sequence, for sequences that are longer.
SEQUENCE_DISPATCHES = 50
# How much the ratio of the better drafter counts more, so that the choice does not change all the time.
STAYING = 0.05
# Rounds of a drafter alone until their cost is known well, and the share of the rounds that is for trials then.
COMPARED_ROUNDS, TRIAL_SHARE = 80, 0.02
# The least average ratio of a drafter whose cost alone is not known: it may be the better one.
NEAR = 0.9


class DraftingAlone:
    """Chooses the contexts of sequences."""

    def __init__(self):
        # The drafter that is better alone; None where all contexts are better.
        self._better: int | None = None
        # By drafter: the average ratio of speeds, and ratios that do not count there yet.
        self._ratios: dict[int, float] = {}
        self._compared: defaultdict[int, list[float]] = defaultdict(list)
        # Rounds of sequences that had the choice: all, those of trials, and those of each drafter alone.
        self._rounds = self._trial_rounds = 0
        self._alone_rounds: Counter[int | None] = Counter()

    def _count(self) -> None:
        for drafter, compared in self._compared.items():
            old = self._ratios.get(drafter, FIRST_RATIO)
            self._ratios[drafter] = old + SEQUENCE_WEIGHT * (fmean(compared) - old)
        self._compared.clear()

    def begin(self, sequence: Acceptances) -> None:
        """Chooses for a sequence that begins: sets its ``alone`` and ``is_trial``."""
        self._count()
        ratios = {drafter: ratio + STAYING * (drafter == self._better) for drafter, ratio in self._ratios.items()}
        best = max(ratios, key=ratios.__getitem__, default=None)
        self._better = best if best is not None and ratios[best] > 1.0 else None
        sequence.alone = self._better
        unknown = [d for d, ratio in ratios.items() if ratio > NEAR and self._alone_rounds[d] < COMPARED_ROUNDS]
        if unknown:
            sequence.alone = max(unknown, key=ratios.__getitem__)
        elif self._trial_rounds < TRIAL_SHARE * self._rounds:
            sequence.alone = best if self._better is None else None
        sequence.is_trial = sequence.alone != self._better

    def compare(self, ratios: Mapping[int, float]) -> None:
        """Adds the estimates before a dispatch: by drafter, its speed alone over the best with all contexts."""
        for drafter, ratio in ratios.items():
            self._compared[drafter].append(ratio)
        if max(map(len, self._compared.values()), default=0) >= SEQUENCE_DISPATCHES:
            self._count()

    def spend(self, sequence: Acceptances, rounds: int) -> None:
        """Adds rounds of a sequence; only those of sequences that had the choice count."""
        if sequence.is_trial is not None:
            self._rounds += rounds
            self._trial_rounds += rounds * sequence.is_trial
            self._alone_rounds[sequence.alone] += rounds
