"""How wide to draft: the choice that `block_size="auto"` makes for each dispatch.

The rule: of the compiled widths, take the one with the most tokens expected per second,

    sum over rows of (1 + p + p² + … + p^(width - 1)) / seconds of a round at this width and number of rows,

p being a row's own rate of accepted drafts of late, and seconds what such rounds took of late, the drafter's part and
the upkeep of its context included. A width of 1 is plain decoding, which tells nothing about p: so now and then, for
at most a fiftieth of the time, another width is tried where it could win.

Where none could win, even at the best acceptance that rows had of late, plain decoding leaves the drafter alone
altogether: the width is 0, and the drafter's context, should it be asked again, begins there. Now and then it is kept
up all the same for a while, so that acceptance can be looked at again.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Weight of a new measurement of seconds.
NEW = 0.25
# What a round leaves of the count of earlier ones, and how many rounds all earlier requests weigh for a new one.
MEMORY, PRIOR = 0.9, 2.0
# Acceptance of a drafter that is as good as one can hope for, and the time that finding out may take.
HOPE, TRIAL, TRIAL_ROUNDS = 0.95, 0.02, 2
# The best acceptance of late, before any is known: a mean of 8 tokens a round of 16. How fast it follows a row that is
# better, and one that is not.
BEST, RISE, FALL = 0.9, 0.5, 0.02
# How often, in seconds of decoding, acceptance is looked at again: so long the drafter is kept up, then it drafts.
LOOK_EVERY_S, KEEP_S, DRAFT_S = 25.0, 0.5, 0.25
# The width of plain decoding without the drafter.
ALONE = 0


@dataclass
class Acceptance:
    """Drafts accepted, and rounds that a wrong draft ended, counted with fading memory."""

    accepted: float = 0.0
    rejected: float = 0.0

    def observe(self, yielded: int, width: int) -> None:
        """A round of ``width`` that brought ``yielded`` tokens."""
        self.accepted = MEMORY * self.accepted + yielded - 1
        self.rejected = MEMORY * self.rejected + (yielded < width)

    def rate(self, prior: float) -> float:
        accepted, rejected = self.accepted + PRIOR * prior, self.rejected + PRIOR * (1 - prior)
        return min(accepted / (accepted + rejected), 0.999)


def expected_tokens(rate: float, width: int) -> float:
    """Of a round."""
    return (1 - rate**width) / (1 - rate)


class DraftLengthPolicy:
    """``widths``: those that may be compiled, ascending, from 1. ``first``: which to begin with where nothing is known,
    "narrow" or "wide"."""

    def __init__(self, widths: Sequence[int], first: str = "wide"):
        self.widths, self.first = tuple(widths), first
        self.seconds: dict[tuple[int, int], float] = {}
        # Of all requests together, slower to forget.
        self.overall = Acceptance(14.0, 6.0)
        self.best_rate = BEST
        # Seconds of rounds so far; those at the last trial.
        self.spent = self.tried = 0.0
        self._runs: Counter = Counter()

    def observe_seconds(self, rows: int, width: int, seconds: float, rounds: int = 1) -> None:
        """``rounds`` rounds of ``rows`` compiled rows took ``seconds`` each."""
        key, seconds = (rows, width), max(seconds, 1e-6)
        self._runs[key] += 1
        self.spent += seconds * rounds
        # The first run of a program is slower than it will be.
        old = self.seconds.get(key, seconds) if self._runs[key] > 2 else seconds
        self.seconds[key] = old + NEW * (seconds - old)

    def observe_round(self, own: Acceptance, yielded: int, width: int) -> None:
        if width > 1:
            own.observe(yielded, width)
            self.overall.accepted = 0.995 * self.overall.accepted + yielded - 1
            self.overall.rejected = 0.995 * self.overall.rejected + (yielded < width)
            over = own.rate(self.prior()) - self.best_rate
            self.best_rate += (RISE if over > 0 else FALL) * over

    def prior(self) -> float:
        return self.overall.accepted / (self.overall.accepted + self.overall.rejected)

    def cost(self, rows: int, width: int) -> float | None:
        """Seconds of a round: measured at this number of rows, or at the nearest one; None: never at this width."""
        known = [n for n, w in self.seconds if w == width]
        return self.seconds[min(known, key=lambda n: abs(n - rows)), width] if known else None

    def _is_hopeless(self, rows: int) -> bool:
        """Whether no width could pay, at the best acceptance of late."""
        drafting = [w for w in self.widths if w > 1]
        known = [n for n, w in self.seconds if w == 1 and all((n, d) in self.seconds for d in drafting)]
        if not known or not drafting:
            return False
        at = min(known, key=lambda n: abs(n - rows))
        plain = min(self.seconds[at, 1], self.seconds.get((at, ALONE), float("inf")))
        return all(expected_tokens(self.best_rate, w) * plain < self.seconds[at, w] for w in drafting)

    def choose(
        self,
        rows: int,
        own: Sequence[Acceptance],
        least: int = 1,
        is_compiled: Callable[[int, int], bool] = lambda rows, width: True,
        patience: float = 0.0,
    ) -> int:
        """The width, or ALONE, for a dispatch of ``rows`` compiled rows, ``own`` of them live; ``least``: what a row
        insists on.

        What is compiled is tried twice before it is judged; the rest once decoding has taken ``patience`` seconds since
        the last trial, as long as compiling takes, say.
        """
        allowed = [w for w in self.widths if w >= least]
        order = allowed if self.first == "narrow" else allowed[::-1]
        new = [w for w in order if self._runs[rows, w] < 2]
        known = [w for w in allowed if self.cost(rows, w) is not None]
        if ready := [w for w in new if is_compiled(rows, w)]:
            return ready[0]
        if not known:
            return order[0]
        if new and self.spent - self.tried > patience:
            self.tried = self.spent
            return new[0]
        prior = self.prior()
        rates = [a.rate(prior) for a in own]

        def worth(width: int, rates) -> float:
            return sum(expected_tokens(r, width) for r in rates) / self.cost(rows, width)

        def hope(width: int) -> float:
            """What it would be worth with a good drafter, or, plain, if its cost had halved since."""
            return worth(width, [max(r, HOPE) for r in rates]) if width > 1 else 2 * worth(1, rates)

        best = max(known, key=lambda w: worth(w, rates))
        if best == 1 and self._is_hopeless(rows):
            looking = self.spent % LOOK_EVERY_S - (LOOK_EVERY_S - KEEP_S - DRAFT_S)
            if looking < 0:
                return ALONE
            return best if looking < KEEP_S else max((w for w in known if w > 1), key=hope)
        others = [w for w in known if w != best and hope(w) > worth(best, rates)]
        others = [w for w in others if TRIAL * (self.spent - self.tried) > TRIAL_ROUNDS * self.cost(rows, w)]
        if others:
            self.tried = self.spent
            return max(others, key=hope)
        return best
