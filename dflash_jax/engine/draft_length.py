"""How many tokens to draft: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among compiled block sizes; a block of size b is the draft length b - 1 plus the target's own token.
The policy takes the block size with the most expected tokens per second,

    sum over sequences of (1 + p + p² + … + p^(b - 1)) / seconds of a round at this block and batch size,

where p is the sequence's recent rate of accepted drafts. At first p is the rate on record for the drafter, and the
seconds are predicted (`engine.round_costs`); both are then measured, with the drafter's part and the update of its
context included. A block of size 1 is plain decoding, which says nothing about p: from time to time, for at most a
fiftieth of the time, another block size is tried where it could be faster. A compiled block size whose prediction may
be too high is tried at once; one that is not compiled is tried after a while, since its compilation is waited for.

Where no draft could pay off even at the best recent acceptance, plain decoding runs without the drafter (block size
`NO_DRAFTER`); its context then starts anew where drafting resumes. At long intervals the context is kept up for a
while nevertheless, so that acceptance can be measured again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log

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
# How fast the best recent acceptance follows a sequence that is better, and one that is worse.
RISE, FALL = 0.5, 0.02
# Without the drafter: seconds of decoding between two measurements of acceptance, and of these, seconds of keeping up
# the drafter's context and of drafting.
PROBE_EVERY_S, PROBE_CONTEXT_S, PROBE_DRAFT_S = 25.0, 0.5, 0.25
# The block size of plain decoding without the drafter.
NO_DRAFTER = 0


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
    """Chooses block sizes by cost and acceptance.

    Args:
        block_sizes: Block sizes that may be compiled, ascending, from 1.
        predict: The cost of a round in any unit, by batch size and block size; by default the same for all.
        rate: The acceptance rate on record for the drafter.

    Attributes:
        block_sizes: As given.
        seconds: Moving average of the seconds of a round, by (batch size, block size).
        overall: Acceptance of all requests together.
        best_rate: The best recent acceptance rate of a sequence.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        predict: Callable[[int, int], float] = lambda batch_size, block_size: 1.0,
        rate: float = USUAL_RATE,
    ):
        self.block_sizes, self._predict = tuple(block_sizes), predict
        self.seconds: dict[tuple[int, int], float] = {}
        self.overall = Acceptance(RECORD_ROUNDS * rate / (1 - rate), RECORD_ROUNDS)
        # Some texts are easier than the mean: half of the rejections on record.
        self.best_rate = (1 + rate) / 2
        # Seconds of rounds so far, their value when a block size was last in use, and when one was last compiled.
        self._spent = self._explored = 0.0
        self._tried: dict[int, float] = {}
        self._runs: Counter = Counter()
        # By (batch size, block size): seconds of all rounds at its last measurement.
        self._measured: dict[tuple[int, int], float] = {}

    def observe_seconds(self, batch_size: int, block_size: int, seconds: float, rounds: int = 1) -> None:
        """Adds a measurement: ``rounds`` rounds took ``seconds`` each."""
        key, seconds = (batch_size, block_size), max(seconds, 1e-6)
        self._runs[key] += 1
        self._spent += seconds * rounds
        # The first run of a program is slower than later ones, and what was measured long ago counts no more.
        is_recent = self._runs[key] > 2 and self._spent - self._measured.get(key, 0.0) <= RETRY_S
        self._measured[key] = self._spent
        old = self.seconds.get(key, seconds) if is_recent else seconds
        self.seconds[key] = old + SECONDS_WEIGHT * (seconds - old)

    def observe_round(self, acceptance: Acceptance, yielded: int, block_size: int) -> None:
        """Adds a round of the sequence with this ``acceptance``."""
        if block_size > 1:
            acceptance.observe(yielded, block_size)
            self.overall.observe(yielded, block_size, OVERALL_DECAY)
            gain = acceptance.rate(self.prior()) - self.best_rate
            self.best_rate += (RISE if gain > 0 else FALL) * gain

    def prior(self) -> float:
        """The acceptance rate of all requests together."""
        return self.overall.accepted / (self.overall.accepted + self.overall.rejected)

    def cost(self, batch_size: int, block_size: int) -> float | None:
        """Seconds of a round: measured, or predicted from the measured round of the nearest predicted cost.

        Returns:
            None where no round was measured.
        """
        key = batch_size, block_size
        if key in self.seconds or not self.seconds:
            return self.seconds.get(key)
        # Other threads read costs, too.
        ratios = {known: self._predict(*key) / self._predict(*known) for known in tuple(self.seconds)}
        nearest = min(ratios, key=lambda known: abs(log(ratios[known])))
        return ratios[nearest] * self.seconds[nearest]

    def estimate(self, batch_size: int, block_size: int) -> float:
        """The `cost`; while nothing is measured, the predicted one, in another unit."""
        return self.cost(batch_size, block_size) or self._predict(batch_size, block_size)

    def _costs(self, batch_size: int, block_sizes: Sequence[int]) -> dict[int, float]:
        return {b: self.estimate(batch_size, b) for b in block_sizes}

    def _cannot_pay(self, costs: dict[int, float]) -> bool:
        """Whether no drafting block size is faster than plain decoding even at the best recent acceptance."""
        plain = min(cost for b, cost in costs.items() if b <= 1)
        return all(expected_tokens(self.best_rate, b) * plain < cost for b, cost in costs.items() if b > 1)

    def favoured_draft(self, batch_size: int) -> int:
        """The block size greater than 1 with the most expected tokens per second; 1 where none is compiled."""
        costs, rate = self._costs(batch_size, [b for b in self.block_sizes if b > 1]), self.prior()
        return max(costs, key=lambda b: expected_tokens(rate, b) / costs[b], default=1)

    def why_plain(self, batch_size: int) -> str | None:
        """Why a batch of new sequences is decoded plainly: a sentence; None where it drafts."""
        block_size = self.favoured_draft(batch_size)
        costs = self._costs(batch_size, (NO_DRAFTER, 1, block_size))
        ratio, tokens = costs[block_size] / min(costs[NO_DRAFTER], costs[1]), expected_tokens(self.prior(), block_size)
        if block_size == 1 or tokens > ratio:
            return None
        is_plain_measured = (batch_size, 1) in self.seconds or (batch_size, NO_DRAFTER) in self.seconds
        is_measured = is_plain_measured and (batch_size, block_size) in self.seconds
        how = "takes" if is_measured else "is predicted to take"
        return (
            f"a round of {block_size} {how} {ratio:.1f} times as long as one of plain decoding, "
            f"and yields about {tokens:.1f} tokens"
        )

    def choose(
        self,
        batch_size: int,
        acceptances: Sequence[Acceptance],
        allowed: Sequence[int] | None = None,
        is_compiled: Callable[[int, int], bool] = lambda batch_size, block_size: True,
        patience: float = 0.0,
    ) -> int:
        """The block size of a dispatch.

        Args:
            batch_size: Compiled batch size.
            acceptances: Those of the sequences of the batch.
            allowed: Block sizes to choose from, NO_DRAFTER among them where plain decoding may leave the drafter out;
                None: all, with NO_DRAFTER where there is a drafter.
            is_compiled: Whether (batch size, block size) is compiled.
            patience: A block size that is not compiled is tried after as many seconds of decoding since the last
                trial; the time of several compilations, say.

        Returns:
            One of ``allowed``.
        """
        if allowed is None:
            allowed = (NO_DRAFTER, *self.block_sizes) if self.block_sizes[-1] > 1 else self.block_sizes
        costs = self._costs(batch_size, allowed)
        plain, drafting = [b for b in allowed if b <= 1], [b for b in allowed if b > 1]
        if not drafting:
            return min(plain)
        prior, is_patient = self.prior(), self._spent - self._explored > patience
        rates = [a.rate(prior) for a in acceptances]

        def compiled(block_size: int) -> bool:
            return is_compiled(batch_size, block_size)

        def is_measured(block_size: int) -> bool:
            return self._runs[batch_size, block_size] >= 2

        def speed(block_size: int) -> float:
            """Expected tokens per second."""
            return sum(expected_tokens(r, max(block_size, 1)) for r in rates) / costs[block_size]

        def optimistic(block_size: int) -> float:
            """`speed` with a good drafter, or of plain decoding with half the cost; predictions may be too high."""
            if block_size <= 1:
                result = 2 * speed(block_size)
            else:
                result = sum(expected_tokens(max(r, OPTIMISTIC_RATE), block_size) for r in rates) / costs[block_size]
            return result if is_measured(block_size) else PREDICTION_ERROR * result

        # Plain decoding that keeps up the drafter's context, so that drafting can resume, or that which is compiled.
        plain_candidate = plain and max(plain, key=lambda b: (compiled(b) or is_patient, b))
        candidates = [plain_candidate, *drafting] if plain else drafting
        ready = [b for b in candidates if compiled(b)]
        best = max(ready or candidates, key=speed)
        self._tried[best] = self._spent

        def idle_s(block_size: int) -> float:
            return self._spent - self._tried.get(block_size, 0.0)

        others = [b for b in candidates if b != best and (optimistic(b) > speed(best) or idle_s(b) > RETRY_S)]
        unmeasured = [b for b in others if compiled(b) and not is_measured(b)]
        if unmeasured and any(is_measured(b) for b in (plain if best <= 1 else [best])):
            return max(unmeasured, key=optimistic)
        if best <= 1 and NO_DRAFTER in allowed and self._cannot_pay(costs):
            probing = self._spent % PROBE_EVERY_S - (PROBE_EVERY_S - PROBE_CONTEXT_S - PROBE_DRAFT_S)
            if probing < 0:
                return NO_DRAFTER
            return max(plain) if probing < PROBE_CONTEXT_S else max(drafting, key=optimistic)
        share = TRIAL_SHARE / max(len(others), 1)
        trials = [
            b
            for b in others
            if (compiled(b) and share * idle_s(b) > max(TRIAL_ROUNDS * costs[b], TRIAL_S))
            or (not compiled(b) and is_patient)
        ]
        if not trials:
            return best
        choice = max(trials, key=optimistic)
        self._tried[choice] = self._spent
        if not compiled(choice):
            self._explored = self._spent
        return choice
