"""How many tokens to draft, and with which drafter: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among what rounds are compiled for, a block size and a drafter each (`Speculation`). A block of size
b is the draft length b - 1 plus the target's own token. The policy takes what has the most expected tokens per second,

    sum over sequences of (1 + p_1 + p_1 p_2 + … + p_1 p_2 … p_(b - 1)) / seconds of such a round at this batch size,

where p_i is the probability that the sequence accepts draft i of a block where it accepted those before it. Drafts
further ahead are accepted less, the more so where one pass drafts them all, so a drafter has a record by place
(`DrafterRecord`): the odds o_i of acceptance in the rounds of all requests. A sequence is easier or harder than these
in all places alike, by the odds ratio r:

    p_i / (1 - p_i) = r o_i,    r = (usual rejections + c) / (rejections + c),

where the usual rejections are those that o_i expects among as many accepted drafts, the sum of 1 / o_i over them (the
Mantel-Haenszel estimate), recent rounds count most, and c draws r of a new sequence to 1.

At first the o_i follow from the acceptance on record for the drafter, and the seconds are predicted
(`engine.round_costs`); both are then measured, with the drafter's part and the update of all contexts included. A round
says little about the r of other drafters, and plain decoding (b = 1) nothing about any: from time to time, for at most
a fiftieth of the time, other rounds are tried where they could be faster. A compiled round whose prediction may be too
high is tried at once; one that is not compiled is tried after a while, since its compilation is waited for.

Where no draft could pay off even at the best recent acceptance, plain decoding runs without drafters (`NO_DRAFTER`);
their contexts then start anew where drafting resumes. At long intervals the contexts are kept up for a while
nevertheless, so that acceptance can be measured again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from types import MappingProxyType

import numpy as np

from dflash_jax.engine.config import NO_DRAFTER, Speculation

# Weight of a new measurement of seconds in their moving average, where it is longer and where it is shorter: what runs
# beside the engine makes rounds longer, never shorter, and to start and to read a short dispatch takes more of each of
# its rounds. The average is thus near the least, as is the warm-up's measurement of rounds that are not in use.
LONGER_WEIGHT, SHORTER_WEIGHT = 0.05, 0.5
# Runs of a program of which the last is a measurement: the first is slower.
MEASURED_RUNS = 2
# Factor by which earlier rounds count less after each round, of a sequence and of all requests together.
DECAY, OVERALL_DECAY = 0.95, 0.998
# Rejections that the record of all requests counts for in a sequence's odds ratio.
PRIOR_REJECTIONS = 8.0
# Rounds that the odds at a place count for at the next one.
PLACE_ROUNDS = 4.0
# The least and the greatest odds at a place: one draft that is accepted against all odds must not make a text easy.
ODDS = 0.05, 1e3
# Acceptance assumed of a block size that is not in use, share of the time for trying others, and the rounds and the
# seconds of a trial, at least.
OPTIMISTIC_RATE, TRIAL_SHARE, TRIAL_ROUNDS, TRIAL_S = 0.95, 0.02, 2, 0.02
# Seconds of decoding after which a block size is tried even where its cost makes it hopeless: that may have been
# measured in a bad moment.
RETRY_S = 60.0
# How many times too high a predicted cost may be.
PREDICTION_ERROR = 5.0
# The rate at which drafts of a drafter without a record are accepted, and the rounds that a record counts for.
USUAL_RATE, RECORD_ROUNDS = 0.7, 40.0
# The best recent odds ratio at first: some texts are easier than those on record.
EASY_RATIO = 2.0
# What rounds with one drafter count for the rate of another one.
OTHERS_WEIGHT = 0.25
# How fast the best recent odds ratio follows a sequence that is better, and one that is worse.
RISE, FALL = 0.5, 0.02
# Without the drafter: seconds of decoding between two measurements of acceptance, and of these, seconds of keeping up
# the drafter's context and of drafting.
PROBE_EVERY_S, PROBE_CONTEXT_S, PROBE_DRAFT_S = 25.0, 0.5, 0.25


@dataclass
class Acceptance:
    """Recent rejections of a sequence's drafts; older rounds count less.

    Attributes:
        usual: Rejections that are usual among as many accepted drafts.
        rejected: Rounds that a rejected draft ended.
    """

    usual: float = 0.0
    rejected: float = 0.0

    def observe(self, usual: float, is_rejected: bool) -> None:
        """Adds a round with ``usual`` rejections usual among its accepted drafts."""
        self.usual = DECAY * self.usual + usual
        self.rejected = DECAY * self.rejected + is_rejected


# Acceptance of one sequence, by drafter.
Acceptances = MutableMapping[int, Acceptance]


class DrafterRecord:
    """How a drafter's drafts were accepted in the rounds of all requests, by their place in the block.

    Args:
        rates: Of the rounds on record, the share that accepted draft 1, draft 2, …, none greater than the one before
            it. At places past them, drafts are accepted as often as at the last of them.
        places: Drafts of the largest block.

    Attributes:
        odds: The odds of acceptance at each place, of drafts where those before were accepted.
        usual: Rejections that are usual among the first n accepted drafts of a round, by n.
        best_ratio: The best recent odds ratio of a sequence.
    """

    def __init__(self, rates: Sequence[float], places: int):
        reached = (1.0, *rates)
        # By place: drafts that were accepted, and rounds that a rejected draft ended.
        self._accepted = [RECORD_ROUNDS * rate for rate in rates[:places]] + [0.0] * (places - len(rates))
        self._rejected = [RECORD_ROUNDS * (a - b) for a, b in pairwise(reached)][:places]
        self._rejected += [0.0] * (places - len(self._rejected))
        self.best_ratio = EASY_RATIO
        self._update()

    def observe(self, yielded: Sequence[int], block_size: int) -> None:
        """Adds rounds of ``block_size`` that yielded ``yielded`` tokens."""
        decay = OVERALL_DECAY ** len(yielded)
        self._accepted, self._rejected = [decay * a for a in self._accepted], [decay * r for r in self._rejected]
        for count in yielded:
            for place in range(count - 1):
                self._accepted[place] += 1
            if count < block_size:
                self._rejected[count - 1] += 1
        self._update()

    def _update(self) -> None:
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
        # Whole lists: other threads read them.
        self.odds, self.usual = by_place, usual

    def expected_tokens(self, ratios: Sequence[float], least: float = 0.0) -> np.ndarray:
        """Expected tokens of a round.

        Args:
            ratios: The odds ratio of each sequence.
            least: The probability with which each draft is accepted at least.

        Returns:
            float64 [places + 1]: tokens of all sequences together, with blocks of 1, 2, … up to the largest.
        """
        odds = np.multiply.outer(ratios, self.odds)
        reached = np.maximum(odds / (1 + odds), least).cumprod(axis=1).sum(axis=0)
        return np.concatenate([[0.0], reached.cumsum()]) + len(ratios)


class DraftLengthPolicy:
    """Chooses block sizes and drafters by cost and acceptance.

    Args:
        speculations: What rounds may be compiled for, as `speculations_of` orders it.
        predict: The cost of a round in any unit, by batch size and `Speculation`; by default the same for all.
        rates: The acceptance on record for each drafter, as `DrafterRecord` takes it; by default every draft is
            accepted at the usual rate.

    Attributes:
        speculations: As given.
        seconds: Moving average of the seconds of a round, by (batch size, `Speculation`).
        drafters: What is known of each drafter.
    """

    def __init__(
        self,
        speculations: Sequence[Speculation],
        predict: Callable[[int, Speculation], float] = lambda batch_size, speculation: 1.0,
        rates: Mapping[int, Sequence[float]] = MappingProxyType({}),
    ):
        self.speculations, self._predict = tuple(speculations), predict
        self.seconds: dict[tuple[int, Speculation], float] = {}
        drafters = sorted({each.drafter for each in speculations if each.drafter is not None and each.block_size > 1})
        places = max(each.block_size for each in speculations) - 1
        self.drafters = {i: DrafterRecord(rates.get(i, [USUAL_RATE]), places) for i in drafters}
        # Seconds of rounds so far, their value when a speculation was last in use, and when one was last compiled.
        self._spent = self._explored = 0.0
        self._tried: dict[Speculation, float] = {}
        self._runs: Counter = Counter()
        # By (batch size, speculation): seconds of all rounds at its last measurement.
        self._measured: dict[tuple[int, Speculation], float] = {}
        # The shortest of the recent measurements.
        self._least: dict[tuple[int, Speculation], float] = {}

    def observe_seconds(self, batch_size: int, speculation: Speculation, seconds: float, rounds: int = 1) -> None:
        """Adds a measurement: ``rounds`` rounds took ``seconds`` each."""
        key, seconds = (batch_size, speculation), max(seconds, 1e-6)
        self._runs[key] += 1
        self._spent += seconds * rounds
        # What was measured long ago counts no more.
        is_recent = self._spent - self._measured.get(key, 0.0) <= RETRY_S
        self._least[key] = min(seconds, self._least.get(key, seconds)) if is_recent else seconds
        is_recent = is_recent and self._runs[key] > MEASURED_RUNS
        self._measured[key] = self._spent
        old = self.seconds.get(key, seconds) if is_recent else seconds
        self.seconds[key] = old + (LONGER_WEIGHT if seconds > old else SHORTER_WEIGHT) * (seconds - old)

    def observe_rounds(
        self, acceptances: Acceptances, yielded: Sequence[int], block_size: int, drafter: int | None
    ) -> None:
        """Adds rounds of one sequence.

        Args:
            acceptances: Those of the sequence.
            yielded: Tokens that each round yielded.
            block_size: Tokens that it might yield.
            drafter: The drafter of the rounds.
        """
        if block_size == 1 or drafter is None or not yielded:
            return
        acceptance, record = acceptances.setdefault(drafter, Acceptance()), self.drafters[drafter]
        for count in yielded:
            acceptance.observe(record.usual[count - 1], count < block_size)
            gain = self.odds_ratio(drafter, acceptances) - record.best_ratio
            record.best_ratio += (RISE if gain > 0 else FALL) * gain
        record.observe(yielded, block_size)

    def odds_ratio(self, drafter: int, acceptances: Mapping[int, Acceptance]) -> float:
        """The odds that a sequence accepts a draft of a drafter over the odds of all requests.

        A text that is easy or hard for one drafter is so for others: their rounds count, too.
        """
        usual = rejected = PRIOR_REJECTIONS
        for other, seen in acceptances.items():
            weight = 1.0 if other == drafter else OTHERS_WEIGHT
            usual, rejected = usual + weight * seen.usual, rejected + weight * seen.rejected
        return usual / rejected

    def cost(self, batch_size: int, speculation: Speculation) -> float | None:
        """Seconds of a round: measured, or predicted from the measured round of the nearest predicted cost.

        Returns:
            None where no round was measured.
        """
        key = batch_size, speculation
        if key in self.seconds or not self.seconds:
            return self.seconds.get(key)
        # Other threads read costs, too.
        ratios = {known: self._predict(*key) / self._predict(*known) for known in tuple(self.seconds)}
        nearest = min(ratios, key=lambda known: abs(log(ratios[known])))
        return ratios[nearest] * self.seconds[nearest]

    def estimate(self, batch_size: int, speculation: Speculation) -> float:
        """The `cost`; while nothing is measured, the predicted one, in another unit."""
        return self.cost(batch_size, speculation) or self._predict(batch_size, speculation)

    def _costs(self, batch_size: int, speculations: Sequence[Speculation]) -> dict[Speculation, float]:
        return {each: self.estimate(batch_size, each) for each in speculations}

    def _tokens(self, speculation: Speculation, ratio: Callable[[DrafterRecord], float] = lambda record: 1.0) -> float:
        """Expected tokens per round of a sequence; ``ratio``: its odds ratio, from what is known of the drafter."""
        if speculation.drafter is None or speculation.block_size == 1:
            return 1.0
        record = self.drafters[speculation.drafter]
        return float(record.expected_tokens([ratio(record)])[speculation.block_size - 1])

    def _cannot_pay(self, costs: dict[Speculation, float]) -> bool:
        """Whether no drafting round is faster than plain decoding even at the best recent acceptance."""
        plain = min(cost for each, cost in costs.items() if each.block_size == 1)
        return all(
            self._tokens(each, lambda record: record.best_ratio) * plain < cost
            for each, cost in costs.items()
            if each.block_size > 1
        )

    def favoured_draft(self, batch_size: int) -> Speculation:
        """The drafting round with the most expected tokens per second; a plain one where none is compiled."""
        costs = self._costs(batch_size, [each for each in self.speculations if each.block_size > 1])

        def speed(speculation: Speculation) -> float:
            return self._tokens(speculation) / costs[speculation]

        return max(costs, key=speed, default=Speculation(1))

    def why_plain(self, batch_size: int) -> str | None:
        """Why a batch of new sequences is decoded plainly: a sentence; None where it drafts."""
        speculation = self.favoured_draft(batch_size)
        plain = [each for each in self.speculations if each.block_size == 1]
        costs = self._costs(batch_size, (*plain, speculation))
        ratio = costs[speculation] / min(costs[each] for each in plain)
        tokens = self._tokens(speculation)
        if speculation.block_size == 1 or tokens > ratio:
            return None
        is_plain_measured = any((batch_size, each) in self.seconds for each in plain)
        is_measured = is_plain_measured and (batch_size, speculation) in self.seconds
        how = "takes" if is_measured else "is predicted to take"
        return (
            f"a round of {speculation.block_size} {how} {ratio:.1f} times as long as one of plain decoding, "
            f"and yields about {tokens:.1f} tokens"
        )

    def choose(
        self,
        batch_size: int,
        acceptances: Sequence[Mapping[int, Acceptance]],
        allowed: Sequence[Speculation] | None = None,
        is_compiled: Callable[[int, Speculation], bool] = lambda batch_size, speculation: True,
        patience: float = 0.0,
    ) -> Speculation:
        """How the rounds of a dispatch speculate.

        Args:
            batch_size: Compiled batch size.
            acceptances: Those of the sequences of the batch.
            allowed: What to choose from, in the order of `speculations`, NO_DRAFTER among them where plain decoding may
                leave the drafters out; None: all.
            is_compiled: Whether (batch size, speculation) is compiled.
            patience: What is not compiled is tried after as many seconds of decoding since the last trial; the time of
                several compilations, say.

        Returns:
            One of ``allowed``.
        """
        allowed = self.speculations if allowed is None else allowed
        costs = self._costs(batch_size, allowed)
        plain = [each for each in allowed if each.block_size == 1]
        drafting = [each for each in allowed if each.block_size > 1]
        if not drafting:
            return plain[0]
        is_patient = self._spent - self._explored > patience
        ratios = {drafter: [self.odds_ratio(drafter, each) for each in acceptances] for drafter in self.drafters}
        expected = {
            least: {drafter: self.drafters[drafter].expected_tokens(ratios[drafter], least) for drafter in ratios}
            for least in (0.0, OPTIMISTIC_RATE)
        }

        def compiled(speculation: Speculation) -> bool:
            return is_compiled(batch_size, speculation)

        def is_measured(speculation: Speculation) -> bool:
            return self._runs[batch_size, speculation] >= MEASURED_RUNS

        def tokens(speculation: Speculation, least: float = 0.0) -> float:
            """Expected tokens of all sequences per round; ``least``: as in `DrafterRecord.expected_tokens`."""
            if speculation.drafter is None or speculation.block_size == 1:
                return float(len(acceptances))
            return float(expected[least][speculation.drafter][speculation.block_size - 1])

        def speed(speculation: Speculation) -> float:
            """Expected tokens per second."""
            return tokens(speculation) / costs[speculation]

        def optimistic(speculation: Speculation) -> float:
            """`speed` with a good drafter and in a good moment, or of plain decoding with half the cost.

            Predictions may be too high.
            """
            cost = self._least.get((batch_size, speculation), costs[speculation])
            result = (
                2 * speed(speculation) if speculation.block_size == 1 else tokens(speculation, OPTIMISTIC_RATE) / cost
            )
            return result if is_measured(speculation) else PREDICTION_ERROR * result

        # Plain decoding that keeps up the drafters' contexts, so that drafting can resume, or that which is compiled.
        plain_candidate = plain and max(plain, key=lambda each: (compiled(each) or is_patient, each != NO_DRAFTER))
        candidates = [plain_candidate, *drafting] if plain else drafting
        ready = [each for each in candidates if compiled(each)]
        best = max(ready or candidates, key=speed)
        self._tried[best] = self._spent

        def idle_s(speculation: Speculation) -> float:
            return self._spent - self._tried.get(speculation, 0.0)

        others = [s for s in candidates if s != best and (optimistic(s) > speed(best) or idle_s(s) > RETRY_S)]
        unmeasured = [each for each in others if compiled(each) and not is_measured(each)]
        if unmeasured and any(is_measured(each) for each in (plain if best.block_size == 1 else [best])):
            return max(unmeasured, key=optimistic)
        if best.block_size == 1 and NO_DRAFTER in allowed and self._cannot_pay(costs):
            probing = self._spent % PROBE_EVERY_S - (PROBE_EVERY_S - PROBE_CONTEXT_S - PROBE_DRAFT_S)
            if probing < 0:
                return NO_DRAFTER
            return plain[-1] if probing < PROBE_CONTEXT_S else max(drafting, key=optimistic)
        share = TRIAL_SHARE / max(len(others), 1)
        trials = [
            each
            for each in others
            if (compiled(each) and share * idle_s(each) > max(TRIAL_ROUNDS * costs[each], TRIAL_S))
            or (not compiled(each) and is_patient)
        ]
        if not trials:
            return best
        choice = max(trials, key=optimistic)
        self._tried[choice] = self._spent
        if not compiled(choice):
            self._explored = self._spent
        return choice
