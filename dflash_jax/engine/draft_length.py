"""How many tokens to draft, and with which drafter: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among what rounds are compiled for, a block size and a drafter each (`Speculation`). A block of size
b is the draft length b - 1 plus the target's own token. The policy takes what has the most expected tokens per second,

    sum over sequences of (1 + p + p² + … + p^(b - 1)) / seconds of such a round at this batch size,

where p is the rate at which the sequence recently accepted drafts of this drafter. At first p is the rate on record for
the drafter, and the seconds are predicted (`engine.round_costs`); both are then measured, with the drafter's part and
the update of all contexts included. A round says little about the p of other drafters, and plain decoding (b = 1)
nothing about any: from time to time, for at most a fiftieth of the time, other rounds are tried where they could be
faster. A compiled round whose prediction may be too high is tried at once; one that is not compiled is tried after a
while, since its compilation is waited for.

Where no draft could pay off even at the best recent acceptance, plain decoding runs without drafters (`NO_DRAFTER`);
their contexts then start anew where drafting resumes. At long intervals the contexts are kept up for a while
nevertheless, so that acceptance can be measured again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import log
from types import MappingProxyType

from dflash_jax.engine.config import NO_DRAFTER, Speculation

# Weight of a new measurement of seconds in their moving average, where it is longer and where it is shorter: what runs
# beside the engine makes rounds longer, never shorter.
LONGER_WEIGHT, SHORTER_WEIGHT = 0.25, 0.5
# Runs of a program of which the last is a measurement: the first is slower.
MEASURED_RUNS = 2
# Factor by which earlier rounds count less after each round; rounds that all earlier requests count for a new one.
DECAY, PRIOR_ROUNDS = 0.9, 2.0
# The same factor, of all requests together.
OVERALL_DECAY = 0.995
# Acceptance assumed of a block size that is not in use, share of the time for trying others, and the rounds and the
# seconds of a trial, at least.
OPTIMISTIC_RATE, TRIAL_SHARE, TRIAL_ROUNDS, TRIAL_S = 0.95, 0.02, 2, 0.02
# Seconds of decoding after which a block size is tried even where its cost makes it hopeless: that may have been
# measured in a bad moment.
RETRY_S = 60.0
# How many times too high a predicted cost may be.
PREDICTION_ERROR = 5.0
# The rate of a drafter without a record, and the rounds that the rate on record counts for.
USUAL_RATE, RECORD_ROUNDS = 0.7, 6.0
# What rounds with one drafter count for the rate of another one.
OTHERS_WEIGHT = 0.25
# How fast the best recent acceptance follows a sequence that is better, and one that is worse.
RISE, FALL = 0.5, 0.02
# Without the drafter: seconds of decoding between two measurements of acceptance, and of these, seconds of keeping up
# the drafter's context and of drafting.
PROBE_EVERY_S, PROBE_CONTEXT_S, PROBE_DRAFT_S = 25.0, 0.5, 0.25


@dataclass
class Acceptance:
    """Recent acceptance of drafts; older rounds count less.

    Attributes:
        accepted: Drafted tokens that were accepted.
        rejected: Rounds that a rejected draft ended.
    """

    accepted: float = 0.0
    rejected: float = 0.0

    def observe(self, yielded: int, block_size: int, decay: float = DECAY) -> None:
        """Adds a round of ``block_size`` that yielded ``yielded`` tokens."""
        self.accepted = decay * self.accepted + yielded - 1
        self.rejected = decay * self.rejected + (yielded < block_size)

    def rate(self, prior: float) -> float:
        """The probability that a draft is accepted; ``prior``: the rate before anything is observed."""
        accepted, rejected = self.accepted + PRIOR_ROUNDS * prior, self.rejected + PRIOR_ROUNDS * (1 - prior)
        return min(accepted / (accepted + rejected), 0.999)


# Acceptance of one sequence, by drafter.
Acceptances = MutableMapping[int, Acceptance]


@dataclass
class DrafterRecord:
    """What is known of a drafter.

    Attributes:
        overall: Acceptance of all requests together.
        best_rate: The best recent acceptance rate of a sequence.
    """

    overall: Acceptance
    best_rate: float

    @classmethod
    def of_rate(cls, rate: float) -> "DrafterRecord":
        """The record of a drafter whose acceptance rate is ``rate``."""
        # Some texts are easier than the mean: half of the rejections on record.
        return cls(Acceptance(RECORD_ROUNDS * rate / (1 - rate), RECORD_ROUNDS), (1 + rate) / 2)

    @property
    def prior(self) -> float:
        """The acceptance rate of all requests together."""
        return self.overall.accepted / (self.overall.accepted + self.overall.rejected)

    @property
    def odds(self) -> float:
        """The odds of `prior`, which are neither 0 nor infinite."""
        rate = min(max(self.prior, 0.001), 0.999)
        return rate / (1 - rate)


def expected_tokens(rate: float, block_size: int) -> float:
    """Expected tokens per round."""
    return (1 - rate**block_size) / (1 - rate)


def rate_of(acceptance_length: float, block_size: int) -> float:
    """The rate at which rounds of ``block_size`` yield ``acceptance_length`` tokens on average."""
    low, high = 0.0, 0.999
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, block_size) < acceptance_length else (low, middle)
    return low


class DraftLengthPolicy:
    """Chooses block sizes and drafters by cost and acceptance.

    Args:
        speculations: What rounds may be compiled for, as `speculations_of` orders it.
        predict: The cost of a round in any unit, by batch size and `Speculation`; by default the same for all.
        rates: The acceptance rate on record for each drafter; by default the usual one.

    Attributes:
        speculations: As given.
        seconds: Moving average of the seconds of a round, by (batch size, `Speculation`).
        drafters: What is known of each drafter.
    """

    def __init__(
        self,
        speculations: Sequence[Speculation],
        predict: Callable[[int, Speculation], float] = lambda batch_size, speculation: 1.0,
        rates: Mapping[int, float] = MappingProxyType({}),
    ):
        self.speculations, self._predict = tuple(speculations), predict
        self.seconds: dict[tuple[int, Speculation], float] = {}
        drafters = sorted({each.drafter for each in speculations if each.drafter is not None})
        self.drafters = {i: DrafterRecord.of_rate(rates.get(i, USUAL_RATE)) for i in drafters}
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

    def observe_round(self, acceptances: Acceptances, yielded: int, block_size: int, drafter: int | None) -> None:
        """Adds a round of the sequence with these ``acceptances``; ``block_size``: tokens that it might yield."""
        if block_size > 1 and drafter is not None:
            acceptance, record = acceptances.setdefault(drafter, Acceptance()), self.drafters[drafter]
            acceptance.observe(yielded, block_size)
            record.overall.observe(yielded, block_size, OVERALL_DECAY)
            gain = acceptance.rate(record.prior) - record.best_rate
            record.best_rate += (RISE if gain > 0 else FALL) * gain

    def _rate(self, drafter: int, acceptances: Mapping[int, Acceptance]) -> float:
        """The rate at which a sequence accepts drafts of a drafter.

        A text that is easy or hard for one drafter is so for others: their rounds count, too, with the odds of
        acceptance scaled by how the drafters compare on all requests.
        """
        total = Acceptance()
        for other, seen in acceptances.items():
            weight = 1.0 if other == drafter else OTHERS_WEIGHT
            total.accepted += weight * seen.accepted * self.drafters[drafter].odds / self.drafters[other].odds
            total.rejected += weight * seen.rejected
        return total.rate(self.drafters[drafter].prior)

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

    def _tokens(self, speculation: Speculation, rate: Callable[[DrafterRecord], float]) -> float:
        """Expected tokens per round; ``rate``: the acceptance rate, from what is known of the drafter."""
        if speculation.drafter is None:
            return 1.0
        return expected_tokens(rate(self.drafters[speculation.drafter]), speculation.block_size)

    def _cannot_pay(self, costs: dict[Speculation, float]) -> bool:
        """Whether no drafting round is faster than plain decoding even at the best recent acceptance."""
        plain = min(cost for each, cost in costs.items() if each.block_size == 1)
        return all(
            self._tokens(each, lambda drafter: drafter.best_rate) * plain < cost
            for each, cost in costs.items()
            if each.block_size > 1
        )

    def favoured_draft(self, batch_size: int) -> Speculation:
        """The drafting round with the most expected tokens per second; a plain one where none is compiled."""
        costs = self._costs(batch_size, [each for each in self.speculations if each.block_size > 1])

        def speed(speculation: Speculation) -> float:
            return self._tokens(speculation, lambda drafter: drafter.prior) / costs[speculation]

        return max(costs, key=speed, default=Speculation(1))

    def why_plain(self, batch_size: int) -> str | None:
        """Why a batch of new sequences is decoded plainly: a sentence; None where it drafts."""
        speculation = self.favoured_draft(batch_size)
        plain = [each for each in self.speculations if each.block_size == 1]
        costs = self._costs(batch_size, (*plain, speculation))
        ratio = costs[speculation] / min(costs[each] for each in plain)
        tokens = self._tokens(speculation, lambda drafter: drafter.prior)
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
        rates = {drafter: [self._rate(drafter, each) for each in acceptances] for drafter in self.drafters}

        def compiled(speculation: Speculation) -> bool:
            return is_compiled(batch_size, speculation)

        def is_measured(speculation: Speculation) -> bool:
            return self._runs[batch_size, speculation] >= MEASURED_RUNS

        def tokens(speculation: Speculation, least: float = 0.0) -> float:
            """Expected tokens of all sequences per round, at rates of at least ``least``."""
            if speculation.drafter is None or speculation.block_size == 1:
                return float(len(acceptances))
            return sum(expected_tokens(max(rate, least), speculation.block_size) for rate in rates[speculation.drafter])

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
