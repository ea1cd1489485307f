"""How wide to draft: the choice that `block_size="auto"` makes for each dispatch.

The rule: of the compiled widths, take the one with the most tokens expected per second,

    sum over rows of (1 + p + p² + … + p^(width - 1)) / seconds of a round at this width and number of rows,

p being a row's own rate of accepted drafts of late, and seconds what such rounds took of late, the drafter's part and
the upkeep of its context included. A width of 1 is plain decoding, which tells nothing about p: so now and then, for
at most a fiftieth of the time, a drafting round is tried where a good drafter could win.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Weight of a new measurement of seconds.
NEW = 0.25
# What a round leaves of the count of earlier ones, and how many rounds all earlier requests weigh for a new one.
MEMORY, PRIOR = 0.9, 2.0
# Acceptance of a drafter that is as good as one can hope for, and the time that finding out may take.
HOPE, TRIAL = 0.95, 0.02


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


class WidthPolicy:
    """``widths``: those that are compiled, ascending, from 1."""

    def __init__(self, widths: Sequence[int]):
        self.widths = tuple(widths)
        self.seconds: dict[tuple[int, int], float] = {}
        # Of all requests together, slower to forget.
        self.overall = Acceptance(14.0, 6.0)
        self.tried = self.spent = 0.0

    def observe_seconds(self, rows: int, width: int, seconds: float) -> None:
        """A round of ``rows`` compiled rows took so long."""
        seconds = max(seconds, 1e-6)
        old = self.seconds.get((rows, width), seconds)
        self.seconds[rows, width] = old + NEW * (seconds - old)
        self.spent += seconds

    def observe_round(self, own: Acceptance, yielded: int, width: int) -> None:
        if width > 1:
            own.observe(yielded, width)
            self.overall.accepted = 0.995 * self.overall.accepted + yielded - 1
            self.overall.rejected = 0.995 * self.overall.rejected + (yielded < width)

    def prior(self) -> float:
        return self.overall.accepted / (self.overall.accepted + self.overall.rejected)

    def cost(self, rows: int, width: int) -> float | None:
        """Seconds of a round: measured at this number of rows, or at the nearest one; None: never at this width."""
        known = [n for n, w in self.seconds if w == width]
        return self.seconds[min(known, key=lambda n: abs(n - rows)), width] if known else None

    def choose(self, rows: int, own: Sequence[Acceptance], least: int = 1) -> int:
        """The width for a dispatch of ``rows`` compiled rows, ``own`` of them live; ``least``: what a row insists
        on."""
        allowed = [w for w in self.widths if w >= least]
        unknown = [w for w in allowed if self.cost(rows, w) is None]
        if unknown:
            return unknown[-1]
        prior = self.prior()
        rates = [a.rate(prior) for a in own]

        def worth(width: int, rates) -> float:
            return sum(expected_tokens(r, width) for r in rates) / self.cost(rows, width)

        best = max(allowed, key=lambda w: worth(w, rates))
        drafting = [w for w in allowed if w > 1]
        if best == 1 and drafting and self.spent - self.tried > 0:
            trial = max(drafting, key=lambda w: worth(w, [HOPE] * len(rates)))
            due = TRIAL * (self.spent - self.tried) > 2 * self.cost(rows, trial)
            if due and worth(trial, [HOPE] * len(rates)) > worth(1, rates):
                self.tried = self.spent
                return trial
        return best
