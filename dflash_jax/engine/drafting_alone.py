"""Whether one of several drafters drafts alone, without the contexts of the others, which take time in every round.

The choice is made for whole sequences: a context that was left out starts anew where it is wanted again, without the
prompt. What speaks for a drafter is the speed of its rounds alone over that of the best rounds with all contexts, as
`DraftLengthPolicy` estimates both before each dispatch. The average of a sequence counts once, since the drafters that
suit different texts differ.
"""

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

# The average ratio of speeds at first, and the weight of a sequence. The prior keeps all contexts for some sequences.
FIRST_RATIO, SEQUENCE_WEIGHT = 0.95, 0.05
# Dispatches that count as a sequence, for sequences that are longer.
SEQUENCE_DISPATCHES = 50
# How much the ratio of the drafter that drafts alone counts more: near 1 its contexts would come and go.
STAYING = 0.05
# Dispatches of drafters alone until their cost is known well, and the share of the time that is for trials then.
COMPARED_RUNS, TRIAL_SHARE = 8, 0.02


class DraftingAlone:
    """Which contexts sequences have.

    Attributes:
        drafter: The drafter that drafts alone in the current sequence; None where the contexts of all are kept.
    """

    def __init__(self):
        self.drafter: int | None = None
        # The drafter that is better alone, apart from trials.
        self._better: int | None = None
        # By drafter: the average ratio of speeds, and the ratios of the current sequence.
        self._ratios: dict[int, float] = {}
        self._compared: defaultdict[int, list[float]] = defaultdict(list)
        # Seconds of decoding when the sequence began, and when a drafter drafted alone; dispatches of the latter.
        self._began = self._tried = 0.0
        self._runs = 0

    def begin_sequence(self, now: float) -> None:
        """Chooses for the next sequence; ``now``: seconds of decoding so far."""
        for drafter, compared in self._compared.items():
            old = self._ratios.get(drafter, FIRST_RATIO)
            self._ratios[drafter] = old + SEQUENCE_WEIGHT * (fmean(compared) - old)
        self._compared.clear()
        took, self._began = now - self._began, now
        if not self._ratios:
            return
        ratios = {drafter: ratio + STAYING * (drafter == self._better) for drafter, ratio in self._ratios.items()}
        best = max(ratios, key=ratios.__getitem__)
        self._better = best if ratios[best] > 1.0 else None
        is_trial = self._runs < COMPARED_RUNS or TRIAL_SHARE * (now - self._tried) > took
        self.drafter = best if is_trial else self._better

    def choose(self, ratios: Mapping[int, float], able: set[int | None], now: float) -> int | None:
        """Chooses for a dispatch.

        Args:
            ratios: By drafter, the speed of its rounds alone over that of the best rounds with all contexts.
            able: The drafters that can draft alone.
            now: Seconds of decoding so far.

        Returns:
            The drafter that drafts alone; None where the contexts of all are kept.
        """
        for drafter, ratio in ratios.items():
            self._compared[drafter].append(ratio)
        if max(map(len, self._compared.values()), default=0) >= SEQUENCE_DISPATCHES:
            self.begin_sequence(now)
        if self.drafter not in able:
            return None
        self._runs, self._tried = self._runs + 1, now
        return self.drafter
