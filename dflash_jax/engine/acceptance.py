"""How drafts are accepted: the records from which `engine.draft_length` chooses.

Drafts further ahead are accepted less, the more so where one pass drafts them all, so a drafter has a record by place
(`DrafterRecord`): the odds o_i with which the rounds of all requests accepted draft i of a block where they accepted
those before it. A sequence is easier or harder than these in all places alike, by the odds ratio r: it accepts draft i
with the probability p_i,

    p_i / (1 - p_i) = r o_i,    r = (usual rejections + c) / (rejections + c),

where the usual rejections are the number that the o_i predict for the accepted drafts, the sum of 1 / o_i over them
(the Mantel-Haenszel estimate), recent rounds count most, and c draws r of a new sequence to 1.

Drafts after a context that is longer than what a drafter was trained on are accepted less. Each of a few lengths of
context (`LENGTH_BOUNDS`) has an odds ratio to the next shorter one, which follows in the same way from the rounds of
all sequences of that length; the shortest length has the o_i. The r of a sequence is relative to its length: as its
context grows, a sequence follows what others have shown there, and the o_i do not fall where contexts are long.

At first the o_i follow from the rates in the drafter's config, and all lengths are alike.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from dflash_jax.decoding.widths import BINS, GREATEST_LOGIT, LEAST_LOGIT, LENGTH_BOUNDS, LENGTHS

# Factor by which earlier rounds count less after each round, of a sequence and of all requests together.
DECAY, OVERALL_DECAY = 0.95, 0.998
# Weight, in rejections, of all requests' acceptance in a sequence's odds ratio.
PRIOR_REJECTIONS = 8.0
# Weight, in rejections, of the next shorter length's acceptance in a length's odds ratio.
LENGTH_REJECTIONS = 2.0
# Weight, in rounds, of one place's odds at the next.
PLACE_ROUNDS = 4.0
# The least and the greatest odds at a place, so that one unlikely acceptance does not make a text easy.
ODDS = 0.05, 1e3
# The assumed rate of acceptance of a drafter without known rates, and the weight of known rates in rounds.
USUAL_RATE, RECORD_ROUNDS = 0.7, 40.0
# The initial best recent odds ratio: some texts are easier than those of the known rates.
EASY_RATIO = 2.0
# Weight of rounds with one drafter in the odds ratio of another one.
OTHERS_WEIGHT = 0.25
# Weights, in drafts, of a score as it is in the rate of its interval, and of all places' rates in one place's.
SCORE_DRAFTS, ALL_PLACES_DRAFTS = 8.0, 4.0
# How fast the best recent odds ratio follows a sequence that is better, and one that is worse.
RISE, FALL = 0.5, 0.02


@dataclass
class Acceptance:
    """Recent rejections of the drafts of a sequence, or of a length of context; older rounds count less.

    Attributes:
        usual: The usual number of rejections for the accepted drafts.
        rejected: Rounds that a rejected draft ended.
    """

    usual: float = 0.0
    rejected: float = 0.0

    def observe(self, usual: float, is_rejected: bool, decay: float = DECAY) -> None:
        """Adds a round; ``usual``: the usual number of rejections for its accepted drafts."""
        self.usual = decay * self.usual + usual
        self.rejected = decay * self.rejected + is_rejected


class Acceptances(dict[int, Acceptance]):
    """Acceptance of one sequence, by drafter.

    Attributes:
        length: Tokens of the sequence.
        has_begun: Whether the sequence has had a dispatch.
        alone: The drafter that drafts alone (`engine.drafting_alone`); None where the contexts of all are kept.
        is_trial: Whether that drafter, or keeping all contexts, is on trial; None where there was no choice.
    """

    length: int = 0
    has_begun: bool = False
    alone: int | None = None
    is_trial: bool | None = None


def odds_ratio(drafter: int, acceptances: Mapping[int, Acceptance]) -> float:
    """The odds that a sequence accepts a draft of a drafter over the odds of all requests of its length.

    A text that is easy or hard for one drafter is easy or hard for others, so their rounds count, too.
    """
    usual = rejected = PRIOR_REJECTIONS
    for other, seen in acceptances.items():
        weight = 1.0 if other == drafter else OTHERS_WEIGHT
        usual, rejected = usual + weight * seen.usual, rejected + weight * seen.rejected
    return usual / rejected


class Calibration:
    """At which rate drafts of a score are accepted, by the rounds of all requests.

    A drafter's score is meant to be the draft's probability, but few are calibrated, and a draft is accepted where it
    equals one draw. The rate of an interval of scores is that of all places, with the score itself as prior; the odds
    of a place are proportional to these. Each length of context has rates, with those of the next shorter one as prior.

    Args:
        places: Drafts of the largest block.
    """

    def __init__(self, places: int):
        # Drafts that were verified after accepted ones, and the accepted ones, by length, place and interval.
        self._reached, self._accepted = np.zeros((2, LENGTHS, places, BINS))
        step = (GREATEST_LOGIT - LEAST_LOGIT) / BINS
        self._prior = 1 / (1 + np.exp(-LEAST_LOGIT - step * (np.arange(BINS) + 0.5)))

    def observe(self, outcomes: np.ndarray, rounds: int) -> None:
        """Adds the sum of `count_outcomes`, int [2, LENGTHS, drafts, BINS], of ``rounds`` rounds."""
        reached = outcomes[0].sum((1, 2))
        # Rounds are of the lengths whose drafts were verified.
        decay = OVERALL_DECAY ** (rounds * reached / max(reached.sum(), 1))
        counts = decay[:, None, None] * np.stack([self._reached, self._accepted])
        counts[:, :, : outcomes.shape[2]] += outcomes
        self._reached, self._accepted = counts

    def rates(self, drafts: int) -> np.ndarray:
        """The rates of the first ``drafts`` places, float32 [LENGTHS, drafts, BINS], as `choose_widths` takes them."""
        weight, shared, ratio, rates = ALL_PLACES_DRAFTS, self._prior, np.ones(self._reached.shape[1]), []
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            shared = (accepted.sum(0) + SCORE_DRAFTS * shared) / (reached.sum(0) + SCORE_DRAFTS)
            rate = _rate(np.multiply.outer(ratio, shared / (1 - shared)))
            taken, expected = accepted.sum(1), (reached * rate).sum(1)
            lost, expected_lost = reached.sum(1) - taken, (reached * (1 - rate)).sum(1)
            ratio = ratio * (taken + weight) * (expected_lost + weight) / ((expected + weight) * (lost + weight))
            rates.append(_rate(np.multiply.outer(ratio, shared / (1 - shared))))
        return np.stack(rates)[:, :drafts].astype(np.float32)


def _rate(odds: np.ndarray) -> np.ndarray:
    return odds / (1 + odds)


class DrafterRecord:
    """How a drafter's drafts were accepted in the rounds of all requests, by their place in the block.

    Args:
        rates: Shares of known rounds that accepted draft 1, draft 2, …, none greater than the one before it. Later
            drafts are assumed to be accepted as often as the last of these.
        places: Drafts of the largest block.

    Attributes:
        usual: The usual number of rejections for n accepted drafts of a round, by n, as of the last reading of
            ``odds``, so that all sequences of a dispatch are compared with the same numbers.
        best_ratio: The best recent odds ratio of a sequence.
        rounds: Number of observed rounds.
        calibration: What its scores are worth.
    """

    def __init__(self, rates: Sequence[float], places: int):
        reached = (1.0, *rates)
        # Numbers of accepted drafts, and of rounds that a rejected draft ended, by place.
        self._accepted = [RECORD_ROUNDS * rate for rate in rates[:places]] + [0.0] * (places - len(rates))
        self._rejected = [RECORD_ROUNDS * (a - b) for a, b in pairwise(reached)][:places]
        self._rejected += [0.0] * (places - len(self._rejected))
        # Of each length but the shortest, relative to the next shorter one; and the products.
        self._lengths = [Acceptance() for _ in LENGTH_BOUNDS]
        self._length_ratios = [1.0] * LENGTHS
        self.best_ratio, self.rounds = EASY_RATIO, 0
        self.calibration = Calibration(places)
        self._update()

    def length_ratio(self, length: int) -> float:
        """The odds of acceptance in contexts of so many tokens, over those in the shortest."""
        return self._length_ratios[bisect_right(LENGTH_BOUNDS, length)]

    def observe(self, yielded: Sequence[int], block_size: int, length: int = 0) -> None:
        """Adds rounds of ``block_size`` that yielded ``yielded`` tokens after ``length`` others."""
        self.rounds += len(yielded)
        place, weight = bisect_right(LENGTH_BOUNDS, length), self.length_ratio(length)
        if place:
            shorter, lengths = self._length_ratios[place - 1], self._lengths[place - 1]
            for count in yielded:
                lengths.observe(self.usual[count - 1] / shorter, count < block_size, OVERALL_DECAY)
            ratios = [(x.usual + LENGTH_REJECTIONS) / (x.rejected + LENGTH_REJECTIONS) for x in self._lengths]
            # Replaced as a whole, since other threads read it.
            self._length_ratios = [1.0, *accumulate(ratios, mul)]
        decay = OVERALL_DECAY ** len(yielded)
        self._accepted, self._rejected = [decay * a for a in self._accepted], [decay * r for r in self._rejected]
        for count in yielded:
            for place in range(count - 1):
                self._accepted[place] += 1
            if count < block_size:
                # A rejection that the length makes likelier says less of the shortest.
                self._rejected[count - 1] += weight
        self._is_current = False

    def follow(self, ratio: float) -> None:
        """Draws the best recent odds ratio to that of a sequence after a round."""
        self.best_ratio += (RISE if ratio > self.best_ratio else FALL) * (ratio - self.best_ratio)

    @property
    def odds(self) -> list[float]:
        """The odds of acceptance at each place, given that the drafts before it were accepted."""
        if not self._is_current:
            self._update()
        return self._odds

    def _update(self) -> None:
        # Set first, so that a round that another thread adds meanwhile counts at the next reading.
        self._is_current = True
        least, greatest = ODDS
        # The first place has none before it.
        odds = self._accepted[0] / max(self._rejected[0], 1 / greatest)
        by_place, usual = [], [0.0]
        for accepted, rejected in zip(self._accepted, self._rejected, strict=True):
            rate = odds / (1 + odds)
            odds = (accepted + PLACE_ROUNDS * rate) / (rejected + PLACE_ROUNDS * (1 - rate))
            odds = min(max(odds, least), greatest)
            by_place.append(odds)
            usual.append(usual[-1] + 1 / odds)
        # Lists are replaced as a whole, since other threads read them.
        self._odds, self.usual = by_place, usual

    def expected_tokens(self, ratios: Sequence[float], least: float = 0.0) -> np.ndarray:
        """Expected tokens of a round.

        Args:
            ratios: The odds ratio of each sequence.
            least: A lower bound of each draft's probability of acceptance.

        Returns:
            float64 [places + 1]: tokens of all sequences together, with blocks of 1, 2, … up to the largest.
        """
        odds = np.multiply.outer(ratios, self.odds)
        reached = np.maximum(odds / (1 + odds), least).cumprod(axis=1).sum(axis=0)
        return np.concatenate([[0.0], reached.cumsum()]) + len(ratios)
