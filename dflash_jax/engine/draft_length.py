"""How many tokens to draft, and with which drafter: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among compiled rounds, each a block size and a drafter (`RoundSpec`); a block of size b is the draft
length b - 1 plus the target's own token. The policy takes the round with the most expected tokens per second,

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

from dflash_jax.engine.config import NO_DRAFTER, RoundSpec

# Weight of a new measurement of seconds in their moving average.
SECONDS_WEIGHT = 0.25
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
        rounds: What may be compiled, as `round_specs` orders it.
        predict: The cost of a round in any unit, by batch size and `RoundSpec`; by default the same for all.
        rates: The acceptance rate on record for each drafter; by default the usual one.

    Attributes:
        rounds: As given.
        seconds: Moving average of the seconds of a round, by (batch size, `RoundSpec`).
        drafters: What is known of each drafter.
    """

    def __init__(
        self,
        rounds: Sequence[RoundSpec],
        predict: Callable[[int, RoundSpec], float] = lambda batch_size, spec: 1.0,
        rates: Mapping[int, float] = MappingProxyType({}),
    ):
        self.rounds, self._predict = tuple(rounds), predict
        self.seconds: dict[tuple[int, RoundSpec], float] = {}
        drafters = sorted({spec.drafter for spec in rounds if spec.drafter is not None})
        self.drafters = {i: DrafterRecord.of_rate(rates.get(i, USUAL_RATE)) for i in drafters}
        # Seconds of rounds so far, their value when a round was last in use, and when one was last compiled.
        self._spent = self._explored = 0.0
        self._tried: dict[RoundSpec, float] = {}
        self._runs: Counter = Counter()
        # By (batch size, rounds): seconds of all rounds at its last measurement.
        self._measured: dict[tuple[int, RoundSpec], float] = {}

    def observe_seconds(self, batch_size: int, spec: RoundSpec, seconds: float, rounds: int = 1) -> None:
        """Adds a measurement: ``rounds`` rounds took ``seconds`` each."""
        key, seconds = (batch_size, spec), max(seconds, 1e-6)
        self._runs[key] += 1
        self._spent += seconds * rounds
        # The first run of a program is slower than later ones, and what was measured long ago counts no more.
        is_recent = self._runs[key] > 2 and self._spent - self._measured.get(key, 0.0) <= RETRY_S
        self._measured[key] = self._spent
        old = self.seconds.get(key, seconds) if is_recent else seconds
        self.seconds[key] = old + SECONDS_WEIGHT * (seconds - old)

    def observe_round(self, acceptances: Acceptances, yielded: int, spec: RoundSpec) -> None:
        """Adds a round of the sequence with these ``acceptances``."""
        if spec.block_size > 1 and spec.drafter is not None:
            acceptance, drafter = acceptances.setdefault(spec.drafter, Acceptance()), self.drafters[spec.drafter]
            acceptance.observe(yielded, spec.block_size)
            drafter.overall.observe(yielded, spec.block_size, OVERALL_DECAY)
            gain = acceptance.rate(drafter.prior) - drafter.best_rate
            drafter.best_rate += (RISE if gain > 0 else FALL) * gain

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

    def cost(self, batch_size: int, spec: RoundSpec) -> float | None:
        """Seconds of a round: measured, or predicted from the measured round of the nearest predicted cost.

        Returns:
            None where no round was measured.
        """
        key = batch_size, spec
        if key in self.seconds or not self.seconds:
            return self.seconds.get(key)
        # Other threads read costs, too.
        ratios = {known: self._predict(*key) / self._predict(*known) for known in tuple(self.seconds)}
        nearest = min(ratios, key=lambda known: abs(log(ratios[known])))
        return ratios[nearest] * self.seconds[nearest]

    def estimate(self, batch_size: int, spec: RoundSpec) -> float:
        """The `cost`; while nothing is measured, the predicted one, in another unit."""
        return self.cost(batch_size, spec) or self._predict(batch_size, spec)

    def _costs(self, batch_size: int, rounds: Sequence[RoundSpec]) -> dict[RoundSpec, float]:
        return {spec: self.estimate(batch_size, spec) for spec in rounds}

    def _tokens(self, spec: RoundSpec, rate: Callable[[DrafterRecord], float]) -> float:
        """Expected tokens per round; ``rate``: the acceptance rate, from what is known of the drafter."""
        return 1.0 if spec.drafter is None else expected_tokens(rate(self.drafters[spec.drafter]), spec.block_size)

    def _cannot_pay(self, costs: dict[RoundSpec, float]) -> bool:
        """Whether no drafting round is faster than plain decoding even at the best recent acceptance."""
        plain = min(cost for spec, cost in costs.items() if spec.block_size == 1)
        return all(
            self._tokens(spec, lambda drafter: drafter.best_rate) * plain < cost
            for spec, cost in costs.items()
            if spec.block_size > 1
        )

    def favoured_draft(self, batch_size: int) -> RoundSpec:
        """The drafting round with the most expected tokens per second; a plain one where none is compiled."""
        costs = self._costs(batch_size, [spec for spec in self.rounds if spec.block_size > 1])

        def speed(spec: RoundSpec) -> float:
            return self._tokens(spec, lambda drafter: drafter.prior) / costs[spec]

        return max(costs, key=speed, default=RoundSpec(1))

    def why_plain(self, batch_size: int) -> str | None:
        """Why a batch of new sequences is decoded plainly: a sentence; None where it drafts."""
        spec = self.favoured_draft(batch_size)
        plain = [each for each in self.rounds if each.block_size == 1]
        costs = self._costs(batch_size, (*plain, spec))
        ratio = costs[spec] / min(costs[each] for each in plain)
        tokens = self._tokens(spec, lambda drafter: drafter.prior)
        if spec.block_size == 1 or tokens > ratio:
            return None
        is_plain_measured = any((batch_size, each) in self.seconds for each in plain)
        is_measured = is_plain_measured and (batch_size, spec) in self.seconds
        how = "takes" if is_measured else "is predicted to take"
        return (
            f"a round of {spec.block_size} {how} {ratio:.1f} times as long as one of plain decoding, "
            f"and yields about {tokens:.1f} tokens"
        )

    def choose(
        self,
        batch_size: int,
        acceptances: Sequence[Mapping[int, Acceptance]],
        allowed: Sequence[RoundSpec] | None = None,
        is_compiled: Callable[[int, RoundSpec], bool] = lambda batch_size, spec: True,
        patience: float = 0.0,
    ) -> RoundSpec:
        """The rounds of a dispatch.

        Args:
            batch_size: Compiled batch size.
            acceptances: Those of the sequences of the batch.
            allowed: Rounds to choose from, in the order of `rounds`, NO_DRAFTER among them where plain decoding may
                leave the drafters out; None: all.
            is_compiled: Whether (batch size, rounds) is compiled.
            patience: What is not compiled is tried after as many seconds of decoding since the last trial; the time of
                several compilations, say.

        Returns:
            One of ``allowed``.
        """
        allowed = self.rounds if allowed is None else allowed
        costs = self._costs(batch_size, allowed)
        plain = [spec for spec in allowed if spec.block_size == 1]
        drafting = [spec for spec in allowed if spec.block_size > 1]
        if not drafting:
            return plain[0]
        is_patient = self._spent - self._explored > patience
        rates = {drafter: [self._rate(drafter, each) for each in acceptances] for drafter in self.drafters}

        def compiled(spec: RoundSpec) -> bool:
            return is_compiled(batch_size, spec)

        def is_measured(spec: RoundSpec) -> bool:
            return self._runs[batch_size, spec] >= 2

        def tokens(spec: RoundSpec, least: float = 0.0) -> float:
            """Expected tokens of all sequences per round, at rates of at least ``least``."""
            if spec.drafter is None or spec.block_size == 1:
                return float(len(acceptances))
            return sum(expected_tokens(max(rate, least), spec.block_size) for rate in rates[spec.drafter])

        def speed(spec: RoundSpec) -> float:
            """Expected tokens per second."""
            return tokens(spec) / costs[spec]

        def optimistic(spec: RoundSpec) -> float:
            """`speed` with a good drafter, or of plain decoding with half the cost; predictions may be too high."""
            result = 2 * speed(spec) if spec.block_size == 1 else tokens(spec, OPTIMISTIC_RATE) / costs[spec]
            return result if is_measured(spec) else PREDICTION_ERROR * result

        # Plain decoding that keeps up the drafters' contexts, so that drafting can resume, or that which is compiled.
        plain_candidate = plain and max(plain, key=lambda spec: (compiled(spec) or is_patient, spec != NO_DRAFTER))
        candidates = [plain_candidate, *drafting] if plain else drafting
        ready = [spec for spec in candidates if compiled(spec)]
        best = max(ready or candidates, key=speed)
        self._tried[best] = self._spent

        def idle_s(spec: RoundSpec) -> float:
            return self._spent - self._tried.get(spec, 0.0)

        others = [s for s in candidates if s != best and (optimistic(s) > speed(best) or idle_s(s) > RETRY_S)]
        unmeasured = [spec for spec in others if compiled(spec) and not is_measured(spec)]
        if unmeasured and any(is_measured(spec) for spec in (plain if best.block_size == 1 else [best])):
            return max(unmeasured, key=optimistic)
        if best.block_size == 1 and NO_DRAFTER in allowed and self._cannot_pay(costs):
            probing = self._spent % PROBE_EVERY_S - (PROBE_EVERY_S - PROBE_CONTEXT_S - PROBE_DRAFT_S)
            if probing < 0:
                return NO_DRAFTER
            return plain[-1] if probing < PROBE_CONTEXT_S else max(drafting, key=optimistic)
        share = TRIAL_SHARE / max(len(others), 1)
        trials = [
            spec
            for spec in others
            if (compiled(spec) and share * idle_s(spec) > max(TRIAL_ROUNDS * costs[spec], TRIAL_S))
            or (not compiled(spec) and is_patient)
        ]
        if not trials:
            return best
        choice = max(trials, key=optimistic)
        self._tried[choice] = self._spent
        if not compiled(choice):
            self._explored = self._spent
        return choice
