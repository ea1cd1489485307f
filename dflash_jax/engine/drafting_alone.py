"""Whether one of several drafters drafts alone, without the contexts of the others, which take time in every round.

The choice is made once for each sequence, when it begins: a context that was left out would start anew later, without
the prompt. The criterion is the speed of a drafter's rounds alone over that of the best rounds with all contexts, as
`DraftLengthPolicy` estimates both before each dispatch. A sequence counts once in its average, since different texts
suit different drafters. What is not the better choice is tried for a small share of the time, so that both speeds stay
known: a drafter alone, to measure its cost, or all contexts, to measure the acceptance of the other drafters.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

# The average ratio of speeds at first, and the weight of a sequence. The prior keeps all contexts for some sequences.
FIRST_RATIO, SEQUENCE_WEIGHT = 0.95, 0.05
# Dispatches that count as a sequence, for sequences that are longer.
SEQUENCE_DISPATCHES = 50
# How much the ratio of the better drafter counts more, so that the choice does not change all the time.
STAYING = 0.05
# Dispatches of drafters alone until their cost is known well, and the share of the time that is for trials then.
COMPARED_RUNS, TRIAL_SHARE = 8, 0.02


class DraftingAlone:
    """Chooses the contexts of sequences that decode by themselves."""

    def __init__(self):
        # The drafter that is better alone; None where all contexts are better.
        self._better: int | None = None
        # By drafter: the average ratio of speeds, and ratios that do not count there yet.
        self._ratios: dict[int, float] = {}
        self._compared: defaultdict[int, list[float]] = defaultdict(list)
        # Dispatches of drafters alone; seconds of trials; the last dispatch's start, and whether it was of a trial.
        self._runs, self._trial_s = 0, 0.0
        self._started, self._was_trial = 0.0, False

    def _count(self) -> None:
        for drafter, compared in self._compared.items():
            old = self._ratios.get(drafter, FIRST_RATIO)
            self._ratios[drafter] = old + SEQUENCE_WEIGHT * (fmean(compared) - old)
        self._compared.clear()

    def begin(self, available: set[int], now: float) -> int | None:
        """Chooses for a sequence that begins.

        Args:
            available: The drafters that can draft alone.
            now: Seconds of decoding so far.

        Returns:
            The drafter that drafts alone; None where the contexts of all are kept.
        """
        self._count()
        ratios = {d: ratio + STAYING * (d == self._better) for d, ratio in self._ratios.items() if d in available}
        if not ratios:
            return None
        best = max(ratios, key=ratios.__getitem__)
        self._better = best if ratios[best] > 1.0 else None
        if self._runs < COMPARED_RUNS:
            return best
        if self._trial_s > TRIAL_SHARE * now:
            return self._better
        return best if self._better is None else None

    def observe(self, ratios: Mapping[int, float], alone: int | None, now: float) -> None:
        """Adds a dispatch that starts.

        Args:
            ratios: By drafter, the speed of its rounds alone over that of the best rounds with all contexts.
            alone: What `begin` returned for the sequence.
            now: Seconds of decoding so far.
        """
        if self._was_trial:
            self._trial_s += now - self._started
        self._started, self._was_trial = now, alone != self._better
        self._runs += alone is not None
        for drafter, ratio in ratios.items():
            self._compared[drafter].append(ratio)
        if max(map(len, self._compared.values()), default=0) >= SEQUENCE_DISPATCHES:
            self._count()
