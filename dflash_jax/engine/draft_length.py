"""How many tokens to draft: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among compiled block sizes; a block of size b is the draft length b - 1 plus the target's own token.
The policy takes the block size with the most expected tokens per second,

    sum over sequences of (1 + p + p² + … + p^(b - 1)) / seconds of a round at this block and batch size,

where p is the sequence's recent rate of accepted drafts, and the seconds are measured, with the drafter's part and the
update of its context included. A block of size 1 is plain decoding, which says nothing about p: from time to time, for
at most a fiftieth of the time, another block size is tried where it could be faster.

Where no draft could pay off even at the best recent acceptance, plain decoding runs without the drafter (block size
`NO_DRAFTER`); its context then starts anew where drafting resumes. At long intervals the context is kept up for a
while nevertheless, so that acceptance can be measured again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Weight of a new measurement of seconds in their moving average.
SECONDS_WEIGHT = 0.25
# Factor by which earlier rounds count less after each round; rounds that all earlier requests count for a new one.
DECAY, PRIOR_ROUNDS = 0.9, 2.0
# The same factor, of all requests together.
OVERALL_DECAY = 0.995
# Acceptance assumed of a block size that is not in use, share of the time for trying it, and rounds of a trial.
OPTIMISTIC_RATE, TRIAL_SHARE, TRIAL_ROUNDS = 0.95, 0.02, 2
# The best recent acceptance before any is measured (a mean of 8 tokens a round of 16), and how fast it follows a
# sequence that is better, and one that is worse.
INITIAL_BEST_RATE, RISE, FALL = 0.9, 0.5, 0.02
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


class DraftLengthPolicy:
    """Chooses block sizes by measured cost and acceptance.

    Args:
        block_sizes: Block sizes that may be compiled, ascending, from 1.
        first: Which to try first while nothing is measured: "smallest" or "largest".

    Attributes:
        seconds: Moving average of the seconds of a round, by (batch size, block size).
        overall: Acceptance of all requests together.
        best_rate: The best recent acceptance rate of a sequence.
    """

    def __init__(self, block_sizes: Sequence[int], first: str = "largest"):
        self.block_sizes, self.first = tuple(block_sizes), first
        self.seconds: dict[tuple[int, int], float] = {}
        self.overall = Acceptance(14.0, 6.0)
        self.best_rate = INITIAL_BEST_RATE
        # Seconds of rounds so far, and their value at the last trial.
        self._spent = self._tried = 0.0
        self._runs: Counter = Counter()

    def observe_seconds(self, batch_size: int, block_size: int, seconds: float, rounds: int = 1) -> None:
        """Adds a measurement: ``rounds`` rounds took ``seconds`` each."""
        key, seconds = (batch_size, block_size), max(seconds, 1e-6)
        self._runs[key] += 1
        self._spent += seconds * rounds
        # The first run of a program is slower than later ones.
        old = self.seconds.get(key, seconds) if self._runs[key] > 2 else seconds
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
        """Seconds of a round, measured at this batch size or the nearest one; None where none was measured."""
        measured = [n for n, block in self.seconds if block == block_size]
        return self.seconds[min(measured, key=lambda n: abs(n - batch_size)), block_size] if measured else None

    def _cannot_pay(self, batch_size: int) -> bool:
        """Whether no drafting block size is faster than plain decoding even at the best recent acceptance."""
        drafting = [b for b in self.block_sizes if b > 1]
        measured = [n for n, b in self.seconds if b == 1 and all((n, d) in self.seconds for d in drafting)]
        if not measured or not drafting:
            return False
        nearest = min(measured, key=lambda n: abs(n - batch_size))
        plain = min(self.seconds[nearest, 1], self.seconds.get((nearest, NO_DRAFTER), float("inf")))
        return all(expected_tokens(self.best_rate, b) * plain < self.seconds[nearest, b] for b in drafting)

    def choose(
        self,
        batch_size: int,
        acceptances: Sequence[Acceptance],
        minimum: int = 1,
        is_compiled: Callable[[int, int], bool] = lambda batch_size, block_size: True,
        patience: float = 0.0,
    ) -> int:
        """The block size of a dispatch.

        Block sizes that are compiled run twice before they are judged. The others are tried one by one, each after
        ``patience`` seconds of decoding since the last trial.

        Args:
            batch_size: Compiled batch size.
            acceptances: Those of the sequences of the batch.
            minimum: The largest block size that a sequence of the batch asks for itself.
            is_compiled: Whether (batch size, block size) is compiled.
            patience: Seconds; the time that a compilation takes, say.

        Returns:
            A block size, or NO_DRAFTER.
        """
        allowed = [b for b in self.block_sizes if b >= minimum]
        order = allowed if self.first == "smallest" else allowed[::-1]
        unmeasured = [b for b in order if self._runs[batch_size, b] < 2]
        costs = {b: cost for b in allowed if (cost := self.cost(batch_size, b)) is not None}
        measured = list(costs)
        if ready := [b for b in unmeasured if is_compiled(batch_size, b)]:
            return ready[0]
        if not measured:
            return order[0]
        if unmeasured and self._spent - self._tried > patience:
            self._tried = self._spent
            return unmeasured[0]
        prior = self.prior()
        rates = [a.rate(prior) for a in acceptances]

        def speed(block_size: int, rates) -> float:
            """Expected tokens per second."""
            return sum(expected_tokens(r, block_size) for r in rates) / costs[block_size]

        def optimistic(block_size: int) -> float:
            """`speed` with a good drafter; of plain decoding, with half the measured cost."""
            if block_size == 1:
                return 2 * speed(1, rates)
            return speed(block_size, [max(r, OPTIMISTIC_RATE) for r in rates])

        best = max(measured, key=lambda b: speed(b, rates))
        if best == 1 and self._cannot_pay(batch_size):
            probing = self._spent % PROBE_EVERY_S - (PROBE_EVERY_S - PROBE_CONTEXT_S - PROBE_DRAFT_S)
            if probing < 0:
                return NO_DRAFTER
            return best if probing < PROBE_CONTEXT_S else max((b for b in measured if b > 1), key=optimistic)
        others = [b for b in measured if b != best and optimistic(b) > speed(best, rates)]
        budget = TRIAL_SHARE * (self._spent - self._tried)
        others = [b for b in others if budget > TRIAL_ROUNDS * costs[b]]
        if others:
            self._tried = self._spent
            return max(others, key=optimistic)
        return best
