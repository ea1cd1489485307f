"""How many tokens to draft, and with which drafter: the choice that `block_size="auto"` makes for each dispatch.

The choice is made among what rounds are compiled for, a block size and a drafter each (`Speculation`). A block of size
b is the draft length b - 1 plus the target's own token. The policy takes what has the most expected tokens per second,

    sum over sequences of (1 + p_1 + p_1 p_2 + … + p_1 p_2 … p_(b - 1)) / seconds of such a round at this batch size,

where p_i is the probability that the sequence accepts draft i of a block where it accepted those before it.

At first the p_i follow from the acceptance on record for the drafter (`engine.acceptance`), and the seconds from the
measurements on record for the device and the models (`engine.round_costs`); both are then measured, with the drafter's
part and the update of contexts included. Seconds that are not measured are predicted; a prediction decides what is
tried first, and chooses only where nothing could be measured for a while. Plain decoding comes first, also where its
seconds on record, which may be too high, do not make it the fastest.

A round says little about the acceptance of other drafters, and plain decoding (b = 1) nothing about any: for at most a
fiftieth of the time, other rounds are tried where they could be faster. A compiled round that is not measured is tried
at once, and so is the first one that drafts a single sequence; others after a while, since they are waited for.

Contexts cost time, too, and can be left out; they start anew where they are wanted again. Plain decoding runs without
drafters (`NO_DRAFTER`) where contexts take more time than trials may, or where no draft could pay off even at the best
recent acceptance. At long intervals the contexts are kept up for a while nevertheless, to measure acceptance again. Of
several drafters, one drafts alone where that is faster and all programs are compiled (`engine.drafting_alone`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import log
from statistics import fmean
from types import MappingProxyType

import numpy as np

from dflash_jax.engine.acceptance import USUAL_RATE, Acceptance, Acceptances, DrafterRecord, odds_ratio
from dflash_jax.engine.config import NO_DRAFTER, Speculation
from dflash_jax.engine.drafting_alone import DraftingAlone
from dflash_jax.engine.round_costs import NO_RECORD, CostRecord

# Weight of a new measurement of seconds in their moving average, where it is longer and where it is shorter: what runs
# beside the engine makes rounds longer, never shorter, and to start and to read a short dispatch takes more of each of
# its rounds. The average is thus near the least, as is the warm-up's measurement of rounds that are not in use.
LONGER_WEIGHT, SHORTER_WEIGHT = 0.05, 0.5
# Runs of a program of which the last is a measurement: the first is slower.
MEASURED_RUNS = 2
# Dispatches to measure a cost, at most: beside prefill nothing can be measured. Then predicted costs decide.
PLAIN_DISPATCHES = 16
# Acceptance assumed of a block size that is not in use, share of the time for trying others, and the rounds and the
# seconds of a trial, at least.
OPTIMISTIC_RATE, TRIAL_SHARE, TRIAL_ROUNDS, TRIAL_S = 0.95, 0.02, 2, 0.02
# How many times too high a predicted cost may be, and a measured one, which may be of a bad moment; seconds of decoding
# after which a block size is tried even where its cost makes it hopeless.
PREDICTION_ERROR, MEASUREMENT_ERROR, RETRY_S = 5.0, 2.0, 60.0
# Before another block size is compiled: seconds of decoding at least, and compilations that these seconds are worth.
PATIENCE_S, PATIENCE = 2.0, 5.0
# Rounds of a drafter before its record is known well, and the share of the time to learn it, or plain decoding's cost.
KNOWN_ROUNDS, LEARNING_SHARE = 80, 0.1
# Seconds of decoding between two dispatches of a drafter that verify all drafts, so that its rates of acceptance stay
# known. A drafter that is only tried has its trials further apart: rates that are too low do not keep it out of use.
WHOLE_EVERY_S = 4.0
# Weight of a new measurement of rounds that verify all drafts.
WHOLE_WEIGHT = 0.2
# Without drafters: seconds of decoding between two measurements of acceptance, and of these, seconds of keeping up
# contexts and of drafting.
PROBE_EVERY_S, PROBE_CONTEXT_S, PROBE_DRAFT_S = 25.0, 0.5, 0.25


class DraftLengthPolicy:
    """Chooses block sizes and drafters by cost and acceptance.

    Args:
        speculations: What rounds may be compiled for, as `speculations_of` orders it.
        predict: The cost of a round in any unit, by batch size and `Speculation`; by default the same for all.
        rates: The acceptance on record for each drafter, as `DrafterRecord` takes it; by default every draft is
            accepted at the usual rate.
        record: Costs that earlier processes measured.
        saved: What drafts that are not verified save, in the unit of ``predict``, by the places of a pass and the
            tokens that are verified of them.

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
        record: CostRecord = NO_RECORD,
        saved: Callable[[int, float], float] = lambda places, verified: 0.0,
    ):
        self.speculations, self._predict, self._record = tuple(speculations), predict, record
        self._saved = saved
        self.seconds = {key: s for key, s in record.load().items() if key[1] in self.speculations}
        drafters = sorted({each.drafter for each in speculations if each.drafter is not None and each.block_size > 1})
        places = max(each.block_size for each in speculations) - 1
        self.drafters = {i: DrafterRecord(rates.get(i, [USUAL_RATE]), places) for i in drafters}
        # Seconds of rounds so far, their value when a speculation was last in use, and when one was last compiled.
        self._spent = self._explored = 0.0
        self._tried: dict[Speculation, float] = {}
        # By (batch size, speculation): runs here, the error of a measured cost, and seconds at its last measurement.
        self._runs: Counter[tuple[int, Speculation]] = Counter()
        self._errors = {key: record.error(key) for key in self.seconds}
        self._measured: dict[tuple[int, Speculation], float] = {}
        # Dispatches to measure a cost, by batch size and speculation (None: the first, plain one).
        self._guesses: Counter[tuple[int, Speculation | None]] = Counter()
        self._alone = DraftingAlone()
        # Of each drafter: seconds so far at its last dispatch that verified all drafts.
        self._whole: dict[int, float] = {}
        # Moving average of the seconds of rounds that verified all drafts, by (batch size, speculation).
        self._whole_seconds: dict[tuple[int, Speculation], float] = {}
        # The shortest of the recent measurements.
        self._least = {key: value / MEASUREMENT_ERROR for key, value in self.seconds.items()}

    def observe_seconds(
        self, batch_size: int, speculation: Speculation, seconds: float, rounds: int = 1, is_whole: bool = True
    ) -> None:
        """Adds a measurement: ``rounds`` rounds took ``seconds`` each; ``is_whole``: and verified all drafts."""
        key, seconds = (batch_size, speculation), max(seconds, 1e-6)
        self._runs[key] += 1
        self._spent += seconds * rounds
        # What was measured long ago counts no more, nor does what is on record.
        is_recent = self._runs[key] > MEASURED_RUNS and self._spent - self._measured[key] <= RETRY_S
        self._measured[key] = self._spent
        old = self.seconds.get(key, seconds)
        if self._runs[key] < MEASURED_RUNS:
            self.seconds[key] = min(seconds, old)
            return
        if is_whole:
            old_whole = self._whole_seconds.get(key, seconds)
            self._whole_seconds[key] = old_whole + WHOLE_WEIGHT * (seconds - old_whole)
        self._errors[key] = 1.0
        self._least[key] = min(seconds, self._least[key]) if is_recent else seconds
        weight = (LONGER_WEIGHT if seconds > old else SHORTER_WEIGHT) if is_recent else 1.0
        self.seconds[key] = old + weight * (seconds - old)

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
        self._alone.spend(acceptances, len(yielded))
        if block_size == 1 or drafter is None or not yielded:
            return
        acceptance, record = acceptances.setdefault(drafter, Acceptance()), self.drafters[drafter]
        length_ratio = record.length_ratio(acceptances.length)
        for count in yielded:
            acceptance.observe(record.usual[count - 1] / length_ratio, count < block_size)
            record.follow(odds_ratio(drafter, acceptances))
        if acceptances.alone in (None, drafter):
            # Otherwise its context lacks the prompt.
            record.observe(yielded, block_size, acceptances.length)

    def observe_outcomes(self, drafter: int, outcomes: np.ndarray, rounds: int) -> None:
        """Adds the sum of `count_outcomes`, int [2, LENGTHS, drafts, BINS], of ``rounds`` rounds of one sequence."""
        self.drafters[drafter].calibration.observe(outcomes, rounds)

    def widths(
        self, count: int, batch_size: int, speculation: Speculation, lengths: Sequence[int] = (0,)
    ) -> tuple[np.ndarray, float]:
        """How the rounds of ``count`` sequences choose their widths, as `choose_widths` takes it: rates, and the price.

        The price is 0, so that all drafts are verified, until the drafter is known, and every `WHOLE_EVERY_S`;
        ``lengths``: tokens of the sequences.
        """
        assert speculation.drafter is not None, "plain decoding has no drafts"
        drafter, record = speculation.drafter, self.drafters[speculation.drafter]
        rates = record.calibration.rates(speculation.block_size - 1)
        if record.rounds < KNOWN_ROUNDS or self._spent - self._whole.get(drafter, 0.0) > WHOLE_EVERY_S:
            self._whole[drafter] = self._spent
            return rates, 0.0
        # Predictions are compared with what is measured of plain rounds, which verify all of their tokens.
        plain = [s for s in self.speculations if s.block_size == 1 and (batch_size, s) in self.seconds]
        known = plain[0] if plain else speculation
        scale, places = (
            self.estimate(batch_size, known) / self._predict(batch_size, known),
            batch_size * speculation.block_size,
        )
        # All drafts together cannot save more than what rounds that verify them take longer than plain ones.
        whole, all_saved = self._whole_seconds.get((batch_size, speculation)), self._saved(places, count)
        if plain and whole is not None and all_saved > 0:
            scale = min(scale, max(whole - self.seconds[batch_size, known], 0.0) / all_saved)
        # Of a sequence, the drafts that are accepted are verified at least.
        tokens = self._tokens(speculation, lambda record: fmean(map(record.length_ratio, lengths)))
        now = count * min(tokens, speculation.block_size - 1)
        seconds = scale * (self._saved(places, now) - self._saved(places, now + count)) / count
        return rates, seconds * count * tokens / self.estimate(batch_size, speculation)

    def keep(self) -> None:
        """Keeps the measured costs for later processes."""
        self._record.save({key: self.seconds[key] for key, error in tuple(self._errors.items()) if error == 1})

    def is_measured(self, batch_size: int, speculation: Speculation) -> bool:
        """Whether the cost of a round is measured, in this process or on record."""
        return (batch_size, speculation) in self._errors

    def error(self, batch_size: int, speculation: Speculation) -> float:
        """How many times too high the cost of a round may be; 1 where this process has measured it."""
        return self._errors.get((batch_size, speculation), PREDICTION_ERROR)

    def least_cost(self, batch_size: int, speculation: Speculation) -> float | None:
        """The shortest of the recent measurements of a round, in seconds; None where there is none."""
        return self._least.get((batch_size, speculation))

    def cost(self, batch_size: int, speculation: Speculation) -> float | None:
        """Seconds of a round: measured, or predicted from a measured one.

        That is the round with all contexts in place of one, or else the one of the nearest predicted cost.

        Returns:
            None where no round was measured.
        """
        key = batch_size, speculation
        if key in self.seconds or not self.seconds:
            return self.seconds.get(key)
        # Other threads read costs, too.
        ratios = {known: self._predict(*key) / self._predict(*known) for known in tuple(self.seconds)}
        nearest = batch_size, speculation.with_all
        if nearest not in ratios:
            nearest = min(ratios, key=lambda known: abs(log(ratios[known])))
        return ratios[nearest] * self.seconds[nearest]

    def estimate(self, batch_size: int, speculation: Speculation) -> float:
        """The `cost`; while nothing is measured, the predicted one, in another unit."""
        return self.cost(batch_size, speculation) or self._predict(batch_size, speculation)

    def _tokens(self, speculation: Speculation, ratio: Callable[[DrafterRecord], float] = lambda record: 1.0) -> float:
        """Expected tokens per round of a sequence; ``ratio``: its odds ratio, from what is known of the drafter."""
        if speculation.drafter is None or speculation.block_size == 1:
            return 1.0
        record = self.drafters[speculation.drafter]
        return float(record.expected_tokens([ratio(record)])[speculation.block_size - 1])

    def _cannot_pay(self, costs: dict[Speculation, float]) -> bool:
        """Whether no drafting round is faster than plain decoding even at the best recent acceptance."""
        plain = min(cost for each, cost in costs.items() if each.block_size == 1)
        drafting = {each: self._tokens(each, lambda record: record.best_ratio) for each in costs if each.block_size > 1}
        return all(tokens * plain < costs[each] for each, tokens in drafting.items())

    def favoured_draft(self, batch_size: int) -> Speculation:
        """The drafting round with the most expected tokens per second; a plain one where none is compiled."""
        drafting = [s for s in self.speculations if s.block_size > 1 and not s.is_alone]
        speeds = {each: self._tokens(each) / self.estimate(batch_size, each) for each in drafting}
        return max(speeds, key=speeds.__getitem__, default=Speculation(1))

    def why_plain(self, batch_size: int) -> str | None:
        """Why a batch of new sequences is decoded plainly: a sentence; None where it drafts."""
        speculation = self.favoured_draft(batch_size)
        plain = [each for each in self.speculations if each.block_size == 1 and not each.is_alone]
        costs = {each: self.estimate(batch_size, each) for each in (*plain, speculation)}
        ratio, tokens = costs[speculation] / min(costs[each] for each in plain), self._tokens(speculation)
        if speculation.block_size == 1 or tokens > ratio:
            return None
        measured = {each for each in costs if (batch_size, each) in self.seconds}
        how = "takes" if speculation in measured and measured & {*plain} else "is predicted to take"
        return (
            f"a round of {speculation.block_size} {how} {ratio:.1f} times as long as one of plain decoding, "
            f"and yields about {tokens:.1f} tokens"
        )

    def _drafts_alone(self, rounds: "_Rounds", acceptances: Sequence[Acceptances]) -> int | None:
        """The drafter whose context is the only one; None where those of all are kept."""
        kept = [each for each in rounds.compiled if not each.is_alone and each != NO_DRAFTER]
        alone = [each for each in rounds.compiled if each.is_alone]
        # Whatever there is must be allowed and compiled: the best of a part says little of the best of all.
        is_free = len(acceptances) == 1 and bool(alone) and rounds.is_complete
        if is_free:
            best = max(map(rounds.speed, kept))
            rivals = {each.drafter for each in kept if each.block_size > 1 and rounds.optimistic(each) > best}
            if all(record.rounds >= KNOWN_ROUNDS for drafter, record in self.drafters.items() if drafter in rivals):
                speeds = {d: max(rounds.speed(each) for each in alone if each.drafter == d) for d in self.drafters}
                self._alone.compare({drafter: speed / best for drafter, speed in speeds.items()})
        for sequence in acceptances:
            if is_free and not sequence.has_begun:
                self._alone.begin(sequence)
            sequence.has_begun = True
        drafter = acceptances[0].alone if len(acceptances) == 1 else None
        return drafter if any(each.drafter == drafter for each in alone) else None

    def choose(
        self,
        batch_size: int,
        acceptances: Sequence[Acceptances],
        allowed: Sequence[Speculation] | None = None,
        is_compiled: Callable[[int, Speculation], bool] = lambda batch_size, speculation: True,
        compile_s: float = 0.0,
    ) -> Speculation:
        """How the rounds of a dispatch speculate.

        Args:
            batch_size: Compiled batch size.
            acceptances: Those of the sequences of the batch.
            allowed: What to choose from, in the order of `speculations`, NO_DRAFTER among them where plain decoding may
                leave the drafters out; None: all.
            is_compiled: Whether (batch size, speculation) is compiled.
            compile_s: Seconds that the last program took to compile, or to load where it was kept on disk.

        Returns:
            One of ``allowed``.
        """
        allowed = self.speculations if allowed is None else allowed
        rounds, waited = _Rounds(self, batch_size, acceptances, allowed, is_compiled), self._spent - self._explored
        is_patient = waited > max(PATIENCE_S, PATIENCE * compile_s)
        alone = self._drafts_alone(rounds, acceptances)
        choices = [s for s in allowed if s == NO_DRAFTER or (s.drafter == alone if s.is_alone else alone is None)]
        plain = [each for each in choices if each.block_size == 1]
        drafting = [each for each in choices if each.block_size > 1]
        if not drafting:
            # Nothing else, or drafters alone only.
            return plain[0] if plain else allowed[0]

        # Plain decoding that is compiled, with contexts where they are not dear, so that drafting can resume.
        is_dear = rounds.are_contexts_dear(plain)
        usable = [s for s in plain if s in rounds.compiled or is_patient] or plain
        plain_candidate = [s for s in usable if (s == NO_DRAFTER) == is_dear][:1] or usable[:1]
        leaves_out = is_dear and plain_candidate == [NO_DRAFTER]
        candidates = plain_candidate + drafting
        # What a drafter takes alone follows from what it takes with all contexts.
        known = [each for each in candidates if rounds.is_measured(each) or rounds.is_measured(each.with_all)]
        ready = [each for each in known if each in rounds.compiled] or known
        if not ready and self._guesses[batch_size, None] < PLAIN_DISPATCHES:
            self._guesses[batch_size, None] += 1
            return candidates[0]
        ready = ready or [each for each in candidates if each in rounds.compiled] or candidates
        best = max(ready, key=rounds.speed)
        self._tried[best] = self._spent
        is_first, least, load_s = not rounds.compiled, rounds.speed(best), max(TRIAL_S, compile_s)
        idle_s = {s: self._spent - self._tried.get(s, 0.0) for s in candidates}
        others = [s for s in candidates if s != best and (rounds.optimistic(s) > least or idle_s[s] > RETRY_S)]
        unmeasured = [each for each in others if each in rounds.compiled and not rounds.is_measured(each)]
        if len(acceptances) == 1 and not any(each in rounds.compiled or rounds.is_measured(each) for each in drafting):
            unmeasured = [max(drafting, key=rounds.speed)]
        # What seems faster is loaded once it would have saved the time that this takes. Plain decoding, with which
        # drafting is compared, is measured in each process where it may be faster: as the first program, or soon.
        gains = {s: rounds.speed(s) / least - 1 for s in known if s not in rounds.compiled and s != best}
        reference = next((s for s in plain if is_first or rounds.is_measured(s) or rounds.speed(s) > least), best)
        if reference != best and rounds.may_be_faster(reference, best):
            gains[reference] = LEARNING_SHARE
        begun = [s for s, gain in gains.items() if gain > 0 and (is_first or self._guesses[batch_size, s])]
        unmeasured += begun + [s for s, gain in gains.items() if gain * waited > load_s]
        unmeasured = [each for each in unmeasured if self._guesses[batch_size, each] < PLAIN_DISPATCHES]
        if unmeasured and any(map(rounds.is_measured, plain if best.block_size == 1 else [best])):
            trial = max(unmeasured, key=rounds.optimistic)
            self._guesses[batch_size, trial] += 1
            self._explored = self._explored if trial in rounds.compiled else self._spent
            return trial
        is_hopeless = leaves_out or (NO_DRAFTER in plain and self._cannot_pay({s: rounds.costs[s] for s in choices}))
        if best.block_size == 1 and is_hopeless:
            probing = self._spent % PROBE_EVERY_S - (PROBE_EVERY_S - PROBE_CONTEXT_S - PROBE_DRAFT_S)
            if probing < 0:
                return NO_DRAFTER
            doubted = [s for s in drafting if rounds.is_measured(s) and rounds.may_be_faster(s, best)]
            drafting = doubted or [s for s in drafting if s in rounds.compiled] or drafting
            return plain[-1] if probing < PROBE_CONTEXT_S else max(drafting, key=rounds.optimistic)

        def is_due(speculation: Speculation) -> bool:
            if speculation not in rounds.compiled:
                return is_patient
            idle, share, drafter = idle_s[speculation], TRIAL_SHARE / len(others), speculation.drafter
            if drafter in self.drafters and drafter != best.drafter and self.drafters[drafter].rounds < KNOWN_ROUNDS:
                idle, share = min(idle_s[each] for each in others if each.drafter == drafter), LEARNING_SHARE
            return share * idle > max(TRIAL_ROUNDS * rounds.costs[speculation], TRIAL_S)

        choice = max(filter(is_due, others), key=rounds.optimistic, default=best)
        self._tried[choice] = self._spent
        self._explored = self._explored if choice in (best, *rounds.compiled) else self._spent
        return choice


class _Rounds:
    """What rounds of a batch are expected to yield.

    Args:
        policy: The policy.
        batch_size: Compiled batch size.
        acceptances: Those of the sequences of the batch.
        allowed: The kinds of rounds.
        is_compiled: Whether (batch size, speculation) is compiled.

    Attributes:
        costs: Seconds of a round, as `DraftLengthPolicy.estimate` gives them.
        compiled: Those of ``allowed`` that are compiled, in their order.
        is_complete: Whether these are all that there are for the batch size.
    """

    def __init__(
        self,
        policy: DraftLengthPolicy,
        batch_size: int,
        acceptances: Sequence[Acceptances],
        allowed: Sequence[Speculation],
        is_compiled: Callable[[int, Speculation], bool],
    ):
        self._policy, self._batch_size, self._count = policy, batch_size, len(acceptances)
        self.costs = {each: policy.estimate(batch_size, each) for each in allowed}
        # Contexts only add time.
        if NO_DRAFTER in self.costs and policy.error(batch_size, NO_DRAFTER) > 1:
            self.costs[NO_DRAFTER] = min(cost for each, cost in self.costs.items() if each.block_size == 1)
        self.compiled = [each for each in allowed if is_compiled(batch_size, each)]
        self.is_complete = {each for each in policy.speculations if each.may_run(batch_size)} <= {*self.compiled}
        ratios = {
            drafter: [odds_ratio(drafter, each) * record.length_ratio(each.length) for each in acceptances]
            for drafter, record in policy.drafters.items()
        }
        # By the least acceptance of a draft, and by drafter.
        self._expected = {
            least: {drafter: policy.drafters[drafter].expected_tokens(ratios[drafter], least) for drafter in ratios}
            for least in (0.0, OPTIMISTIC_RATE)
        }

    def is_measured(self, speculation: Speculation) -> bool:
        """As `DraftLengthPolicy.is_measured`."""
        return self._policy.is_measured(self._batch_size, speculation)

    def _tokens(self, speculation: Speculation, least: float = 0.0) -> float:
        """Expected tokens of all sequences per round; ``least``: as in `DrafterRecord.expected_tokens`."""
        if speculation.drafter is None or speculation.block_size == 1:
            return float(self._count)
        return float(self._expected[least][speculation.drafter][speculation.block_size - 1])

    def may_be_faster(self, speculation: Speculation, best: Speculation) -> bool:
        """Whether the cost of a round, not measured in this process, may be too high by what ``best`` is faster."""
        error = self._policy.error(self._batch_size, speculation)
        return error > 1 and error * self.speed(speculation) > self.speed(best)

    def are_contexts_dear(self, plain: Sequence[Speculation]) -> bool:
        """Whether plain decoding that keeps up contexts takes longer than trials may, by measurement."""
        others = [self.costs[each] for each in plain if each != NO_DRAFTER and self.is_measured(each)]
        is_known = NO_DRAFTER in plain and self.is_measured(NO_DRAFTER) and others
        return bool(is_known) and self.costs[NO_DRAFTER] * (1 + TRIAL_SHARE) < min(others)

    def speed(self, speculation: Speculation) -> float:
        """Expected tokens per second."""
        return self._tokens(speculation) / self.costs[speculation]

    def optimistic(self, speculation: Speculation) -> float:
        """`speed` with a good drafter and in a good moment, or of plain decoding with half the cost."""
        if speculation.block_size == 1:
            result = MEASUREMENT_ERROR * self.speed(speculation)
        else:
            cost = self._policy.least_cost(self._batch_size, speculation) or self.costs[speculation]
            result = self._tokens(speculation, OPTIMISTIC_RATE) / cost
        return result if self.is_measured(speculation) else PREDICTION_ERROR * result
