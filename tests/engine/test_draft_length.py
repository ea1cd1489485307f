"""The choice of a block size, against rounds of known cost and acceptance."""

import random
from itertools import accumulate
from operator import mul, sub
from statistics import median

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.widths import BINS, GREATEST_LOGIT, LEAST_LOGIT, LENGTH_BOUNDS, LENGTHS, choose_widths
from dflash_jax.engine.acceptance import Acceptance, Acceptances, Calibration, DrafterRecord, odds_ratio
from dflash_jax.engine.config import NO_DRAFTER, Speculation, speculations_of
from dflash_jax.engine.draft_length import KNOWN_ROUNDS, PATIENCE, PLAIN_DISPATCHES, WHOLE_EVERY_S, DraftLengthPolicy
from dflash_jax.engine.round_costs import KNOWN_ERROR, RECORD_ERROR, CostRecord
from dflash_jax.models.families.dflash import equal_rates

PLAIN, EIGHT, SIXTEEN = Speculation(1), Speculation(8), Speculation(16)
ROUNDS = speculations_of((8, 16))


def expected_tokens(rate, block_size: int) -> float:
    """Of a round; ``rate``: of acceptance at all places, or one for each."""
    rates = [rate] * (block_size - 1) if isinstance(rate, float) else rate[: block_size - 1]
    return 1 + sum(accumulate(rates, mul))


def yielded(rng: random.Random, rate, block_size: int) -> int:
    n = 1
    while n < block_size and rng.random() < (rate if isinstance(rate, float) else rate[n - 1]):
        n += 1
    return n


def record(rate: float, block_size: int = 16) -> list[float]:
    """Of a drafter whose drafts are accepted at this rate at all places."""
    return [rate**i for i in range(1, block_size)]


def on_record(costs: dict[Speculation, float]) -> CostRecord:
    """Costs that an earlier process has measured, of one sequence."""
    record = CostRecord(None)
    record.load = lambda: {(1, spec): seconds for spec, seconds in costs.items()}
    return record


def simulate(costs: dict[Speculation, float], rate, batch_size: int, seconds: float, **options):
    """(tokens per second, seconds at each spec) of a batch; ``rate``: of acceptance, by the time and the drafter."""
    policy, rng, now = DraftLengthPolicy(tuple(costs), **options), random.Random(0), 0.0
    acceptances, tokens, spent = [Acceptances() for _ in range(batch_size)], 0, dict.fromkeys(costs, 0.0)
    while now < seconds:
        spec = policy.choose(batch_size, acceptances)
        rounds = max(1, int(0.02 / costs[spec]))
        for _ in range(rounds):
            for a in acceptances:
                n = yielded(rng, rate(now, spec.drafter), spec.block_size)
                tokens += n
                policy.observe_rounds(a, [n], spec.block_size, spec.drafter)
        took = rounds * costs[spec] * rng.uniform(0.9, 1.1)
        policy.observe_seconds(batch_size, spec, took / rounds, rounds)
        now += took
        spent[spec] += took
    return tokens / now, spent


ACCELERATOR = {NO_DRAFTER: 0.0019, PLAIN: 0.002, EIGHT: 0.0028, SIXTEEN: 0.0034}
LOADED = {NO_DRAFTER: 0.0036, PLAIN: 0.004, EIGHT: 0.018, SIXTEEN: 0.033}
CPU = {NO_DRAFTER: 0.0003, PLAIN: 0.0004, EIGHT: 0.0048, SIXTEEN: 0.0061}


@pytest.mark.parametrize("costs", [ACCELERATOR, LOADED, CPU], ids=["accelerator", "loaded", "cpu"])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("predict", [lambda n, b: 1.0, lambda n, spec: 1.0 + spec.block_size], ids=["flat", "steep"])
def test_choices_are_near_the_best_fixed_block_size(costs, rate, predict):
    """Whatever is predicted."""
    measured, _ = simulate(costs, lambda now, _: rate, 4, 30.0, predict=predict)
    best = max(4 * expected_tokens(rate, w.block_size) / costs[w] for w in costs)
    assert measured > (0.96 if costs is not ACCELERATOR else 0.94) * best


def test_the_drafter_is_off_only_where_it_cannot_pay():
    assert simulate(CPU, lambda now, _: 0.9, 4, 10.0)[1][NO_DRAFTER] > 9.5
    assert simulate(ACCELERATOR, lambda now, _: 0.6, 4, 10.0)[1][NO_DRAFTER] == 0


def test_acceptance_is_measured_again_at_intervals():
    """A text that is hard for a minute and then easy."""
    _, spent = simulate(LOADED, lambda now, _: 0.1 if now < 60 else 0.97, 4, 120.0)
    assert spent[NO_DRAFTER] > 50
    assert spent[EIGHT] + spent[SIXTEEN] > 35


def test_a_drafter_that_is_off_is_used_again_when_the_load_falls():
    policy = DraftLengthPolicy(ROUNDS)
    for batch_size, costs in ((1, ACCELERATOR), (32, CPU)):
        for spec in ROUNDS[1:]:
            for _ in range(3):
                policy.observe_seconds(batch_size, spec, costs[spec])
    easy = [Acceptances({0: Acceptance(30.0, 1.0)})]
    assert policy.choose(32, easy * 32) == NO_DRAFTER
    assert policy.choose(1, easy) == SIXTEEN
    assert policy.choose(32, easy * 32, (EIGHT, SIXTEEN)) in (EIGHT, SIXTEEN)


def test_follows_a_text_that_becomes_easy_and_hard_again():
    costs = {NO_DRAFTER: 0.0019, PLAIN: 0.002, EIGHT: 0.006, SIXTEEN: 0.008}
    measured, spent = simulate(costs, lambda now, _: 0.97 if 20 < now < 40 else 0.1, 1, 60.0)
    assert spent[SIXTEEN] > 15
    assert spent[NO_DRAFTER] + spent[PLAIN] > 30
    assert measured > 0.9 * (40 / costs[PLAIN] + 20 * expected_tokens(0.97, 16) / costs[SIXTEEN]) / 60


def test_block_sizes_that_cannot_win_are_not_tried():
    """Not even a perfect drafter makes up for these costs."""
    costs = CPU | {SIXTEEN: 0.0075}
    _, spent = simulate(costs, lambda now, _: 0.9, 1, 20.0, predict=lambda n, b: costs[b])
    assert spent[EIGHT] + spent[SIXTEEN] < 0.2


@pytest.mark.parametrize(("eight", "sixteen", "first"), [(1.5, 1.6, EIGHT), (9.0, 20.0, EIGHT), (3.0, 3.0, SIXTEEN)])
def test_plain_decoding_comes_first_then_one_block_size_at_once_and_others_wait(eight, sixteen, first):
    """Whatever is predicted."""
    costs = {PLAIN: 1.0, EIGHT: eight, SIXTEEN: sixteen}
    policy, acceptances, compiled, used = DraftLengthPolicy(ROUNDS, lambda n, b: costs[b]), [Acceptances()], set(), []
    while len(compiled) < 3:
        spec = policy.choose(1, acceptances, (PLAIN, EIGHT, SIXTEEN), lambda *key: key in compiled, compile_s=0.6)
        compiled.add((1, spec))
        used.append(spec)
        policy.observe_seconds(1, spec, 0.1)
    assert used[:4] == [PLAIN, PLAIN, first, first]
    assert 30 < len(used) < 36


def test_the_first_choice_follows_what_is_on_record():
    def first(rate, costs):
        policy = DraftLengthPolicy(ROUNDS, rates={0: record(rate)}, record=on_record(costs))
        return policy.choose(1, [Acceptances()])

    assert first(0.9, ACCELERATOR) == SIXTEEN
    # Contexts that take less than trials may are kept up.
    assert first(0.2, ACCELERATOR) == NO_DRAFTER
    assert first(0.2, ACCELERATOR | {NO_DRAFTER: 0.00198}) == PLAIN
    # Drafting has to be faster than plain decoding without them, too.
    assert first(0.6, ACCELERATOR | {EIGHT: 0.0047, SIXTEEN: 0.1}) == NO_DRAFTER
    assert first(0.6, ACCELERATOR | {EIGHT: 0.0043, SIXTEEN: 0.1}) == EIGHT
    assert first(0.6, ACCELERATOR | {SIXTEEN: 0.006}) == EIGHT
    assert first(0.7, CPU) == NO_DRAFTER


def test_costs_that_are_not_measured_follow_the_nearest_measured_one():
    policy = DraftLengthPolicy(ROUNDS, lambda n, spec: n * spec.block_size)
    assert policy.cost(1, EIGHT) is None
    policy.observe_seconds(1, PLAIN, 0.1)
    assert policy.cost(1, EIGHT) == pytest.approx(0.8)
    policy.observe_seconds(4, EIGHT, 1.6)
    assert policy.cost(4, EIGHT) == 1.6
    assert policy.cost(2, EIGHT) == pytest.approx(0.8)
    assert policy.cost(1, NO_DRAFTER) == pytest.approx(0.1)


def test_why_plain_names_the_costs_where_plain_decoding_is_chosen():
    policy = DraftLengthPolicy(ROUNDS, lambda n, b: CPU[b], {0: record(0.7)})
    assert policy.favoured_draft(1) == EIGHT
    assert policy.why_plain(1) == (
        "a round of 8 is predicted to take 16.0 times as long as one of plain decoding, and yields about 3.1 tokens"
    )
    for spec, seconds in CPU.items():
        policy.observe_seconds(1, spec, seconds)
    assert policy.why_plain(1) == (
        "a round of 8 takes 16.0 times as long as one of plain decoding, and yields about 3.1 tokens"
    )
    assert DraftLengthPolicy(ROUNDS, lambda n, b: ACCELERATOR[b], {0: record(0.7)}).why_plain(1) is None
    assert DraftLengthPolicy((PLAIN,)).why_plain(1) is None


def test_choices_are_among_those_allowed():
    policy = DraftLengthPolicy(ROUNDS)
    for spec, seconds in CPU.items():
        for _ in range(2):
            policy.observe_seconds(2, spec, seconds)
    assert policy.choose(2, [Acceptances()] * 2) == NO_DRAFTER
    assert policy.choose(2, [Acceptances()] * 2, (EIGHT, SIXTEEN)) in (EIGHT, SIXTEEN)
    assert policy.choose(2, [Acceptances()] * 2, (SIXTEEN,)) == SIXTEEN


def test_recent_acceptance_counts_most():
    policy, acceptances = DraftLengthPolicy(ROUNDS, rates={0: record(0.7)}), Acceptances()
    policy.observe_rounds(acceptances, [8] * 50, 8, 0)
    assert odds_ratio(0, acceptances) > 2
    policy.observe_rounds(acceptances, [1] * 40, 8, 0)
    assert odds_ratio(0, acceptances) < 0.75


@pytest.mark.parametrize("patience", [2.0, 20.0])
def test_a_block_size_that_is_not_compiled_is_measured_in_time(patience):
    """The prediction for it is four times too high; trials of compiled sizes must not put it off."""
    costs = {NO_DRAFTER: 0.0019, PLAIN: 0.002, EIGHT: 0.006, SIXTEEN: 0.004}
    policy, rng, now = (
        DraftLengthPolicy(ROUNDS, lambda n, b: costs[b] * (4 if b == SIXTEEN else 1)),
        random.Random(0),
        0.0,
    )
    compiled, spent, acceptances = set(), dict.fromkeys(costs, 0.0), [Acceptances()]
    while now < 20 * patience:
        block_size = policy.choose(1, acceptances, None, lambda n, b: b in compiled, patience / PATIENCE)
        compiled.add(block_size)
        n = yielded(rng, 0.9, block_size.block_size)
        policy.observe_rounds(acceptances[0], [n], block_size.block_size, 0)
        policy.observe_seconds(1, block_size, costs[block_size])
        now += costs[block_size]
        spent[block_size] += costs[block_size]
    assert spent[SIXTEEN] > 0.5 * now


def test_a_cost_that_was_measured_in_a_bad_moment_is_measured_again():
    costs = dict(ACCELERATOR)
    policy = DraftLengthPolicy(ROUNDS, lambda n, b: costs[b])
    for block_size in costs:
        for _ in range(4):
            policy.observe_seconds(1, block_size, costs[block_size] * (50 if block_size == SIXTEEN else 1))
    rng, acceptances, now, used = random.Random(0), [Acceptances()], 0.0, []
    while now < 200:
        block_size = policy.choose(1, acceptances)
        used.append(block_size)
        rounds = max(1, int(0.02 / costs[block_size]))
        for _ in range(rounds):
            policy.observe_rounds(acceptances[0], [yielded(rng, 0.9, block_size.block_size)], block_size.block_size, 0)
        policy.observe_seconds(1, block_size, costs[block_size], rounds)
        now += rounds * costs[block_size]
    assert used[:100].count(SIXTEEN) == 0
    assert used[-100:].count(SIXTEEN) > 90


# A DFlash drafter, whose long drafts cost little, and a head, of which each draft is a step.
ONE_EACH = ACCELERATOR | {Speculation(b, 1): 0.002 + 0.0002 * b for b in (2, 4, 6, 8)}


def both(context: float) -> dict[Speculation, float]:
    """Costs with both drafters, where the context of the other one takes the share ``context`` of a round."""
    costs = {}
    for spec in speculations_of((8, 16), (2, 4, 6, 8)):
        one = ONE_EACH[PLAIN if spec == Speculation(1, 1, True) else spec._replace(is_alone=False)]
        costs[spec] = one if spec.is_alone or spec == NO_DRAFTER else one * (1 + context)
    return costs


def only(drafter: int) -> dict[Speculation, float]:
    return {spec: seconds for spec, seconds in ONE_EACH.items() if spec.block_size == 1 or spec.drafter == drafter}


def answers(costs, texts, count: int, **options):
    """(tokens per second, seconds at each spec) of ``count`` answers of 300 tokens, one after the other.

    ``texts``: the rates of acceptance with both drafters in each kind of text, which take turns.
    """
    policy, rng, now, tokens = DraftLengthPolicy(tuple(costs), **options), random.Random(0), 0.0, 0
    spent = dict.fromkeys(costs, 0.0)
    for answer in range(count):
        rates, acceptances, end = texts[answer % len(texts)], [Acceptances()], tokens + 300
        while tokens < end:
            spec = policy.choose(1, acceptances)
            rounds = max(1, int(0.02 / costs[spec]))
            for _ in range(rounds):
                n = yielded(rng, rates[spec.drafter or 0], spec.block_size)
                policy.observe_rounds(acceptances[0], [n], spec.block_size, spec.drafter)
                tokens += n
            took = rounds * costs[spec] * rng.uniform(0.95, 1.05)
            policy.observe_seconds(1, spec, took / rounds, rounds)
            now += took
            spent[spec] += took
    return tokens / now, spent


def alone_share(spent, drafter: int) -> float:
    return sum(s for spec, s in spent.items() if spec.is_alone and spec.drafter == drafter) / sum(spent.values())


@pytest.mark.parametrize("rates", [(0.9, 0.6), (0.6, 0.95), (0.8, 0.8), (0.3, 0.3)])
@pytest.mark.parametrize("known", [{}, {0: 0.9, 1: 0.5}, {0: 0.5, 1: 0.9}], ids=["none", "first", "second"])
def test_two_drafters_are_as_fast_as_the_better_of_both(rates, known):
    """Whatever is on record; also where contexts take time, which is then saved."""
    on_record = {"rates": {drafter: record(rate) for drafter, rate in known.items()}}
    best = max(answers(only(drafter), [rates], 60, **on_record)[0] for drafter in (0, 1))
    assert answers(both(0.08), [rates], 100, **on_record)[0] > 0.95 * best


def test_a_drafter_drafts_alone_where_the_other_one_does_not_pay_for_its_context():
    for rates, better in (((0.9, 0.6), 0), ((0.6, 0.95), 1)):
        measured, spent = answers(both(0.08), [rates], 200)
        assert alone_share(spent, better) > 0.8
        kept = {spec: seconds for spec, seconds in both(0.08).items() if not spec.is_alone}
        assert measured > 1.05 * answers(kept, [rates], 200)[0]


def test_a_drafter_that_was_left_out_comes_back_where_it_becomes_the_better_one():
    before, after = (0.9, 0.6), (0.4, 0.9)
    _, spent = answers(both(0.08), [before] * 100 + [after] * 400, 500)
    _, since = answers(both(0.08), [before] * 100, 100)
    seconds = sum(spent.values()) - sum(since.values())
    assert alone_share(since, 0) > 0.5
    assert sum(spent[spec] - since[spec] for spec in spent if spec.drafter == 1) > 0.6 * seconds


def test_each_text_gets_the_drafter_that_drafts_it_better():
    """Of two kinds of text, each is easy for one drafter: neither drafts alone, though contexts take time."""
    texts = [(0.9, 0.6), (0.6, 0.95)]
    best = max(answers(only(drafter), texts, 60)[0] for drafter in (0, 1))
    assert answers(both(0.0), texts, 60)[0] > 1.1 * best
    measured, spent = answers(both(0.01), texts, 60)
    assert measured > 1.1 * best
    assert alone_share(spent, 0) + alone_share(spent, 1) < 0.3


def in_dispatches(policy, costs, acceptances, count: int, **options) -> list[Speculation]:
    """What ``count`` dispatches of five rounds of a sequence are, of which each yields two tokens at most."""
    specs = []
    for _ in range(count):
        specs.append(policy.choose(1, [acceptances], **options))
        policy.observe_rounds(acceptances, [min(2, specs[-1].block_size)] * 5, specs[-1].block_size, specs[-1].drafter)
        policy.observe_seconds(1, specs[-1], costs[specs[-1]], 5)
    return specs


def test_the_contexts_of_a_sequence_are_chosen_once():
    """Also where other sequences decode with it for a while; those that begin together keep all contexts."""
    costs = both(0.08)
    policy, rng, alone = DraftLengthPolicy(tuple(costs)), random.Random(0), 0
    for _ in range(300):
        first, second = Acceptances(), Acceptances()
        specs = in_dispatches(policy, costs, first, rng.randrange(1, 8))
        assert not policy.choose(2, [first, second], [spec for spec in costs if not spec.is_alone]).is_alone
        specs += in_dispatches(policy, costs, first, 3)
        kinds = {spec.is_alone for spec in specs if spec != NO_DRAFTER}
        assert len(kinds) == 1
        assert not any(spec.is_alone for spec in in_dispatches(policy, costs, second, 3))
        alone += kinds == {True}
    assert alone > 0


def test_a_drafter_drafts_alone_only_where_all_is_compiled():
    """The warm-up compiles one program after the other, while requests run."""
    costs = both(0.08)
    for missing in (None, *(spec for spec in costs if spec.block_size > 1)):
        policy, used = DraftLengthPolicy(tuple(costs)), set()
        options = {"is_compiled": lambda n, spec, missing=missing: spec != missing, "compile_s": 1e9}
        for _ in range(60):
            used |= {*in_dispatches(policy, costs, Acceptances(), 8, **options)}
        assert any(spec.is_alone for spec in used) == (missing is None)
        assert any(spec.block_size > 1 for spec in used)


@pytest.mark.parametrize("alone", [None, 0, 1])
@pytest.mark.parametrize("allowed", [(Speculation(8, 1, True), EIGHT), (Speculation(8, 1, True),), (NO_DRAFTER, PLAIN)])
def test_whatever_is_allowed_one_of_it_is_chosen(alone, allowed):
    costs, sequence = both(0.08), Acceptances()
    policy, sequence.alone, sequence.has_begun = DraftLengthPolicy(tuple(costs)), alone, True
    assert {*in_dispatches(policy, costs, sequence, 20, allowed=allowed)} <= {*allowed}


def test_rounds_without_the_prompt_do_not_count_for_a_drafter():
    policy, sequence = DraftLengthPolicy(speculations_of((8,), (8,))), Acceptances()
    sequence.alone = 0
    before = list(policy.drafters[1].odds)
    policy.observe_rounds(sequence, [1] * 50, 8, 1)
    assert policy.drafters[1].odds == before
    policy.observe_rounds(sequence, [1] * 50, 8, 0)
    assert policy.drafters[0].odds[0] < before[0]


def test_sequences_of_a_dispatch_are_measured_alike_in_any_order():
    found = []
    for order in ((0, 1), (1, 0)):
        policy, sequences = DraftLengthPolicy(speculations_of((8,))), [Acceptances(), Acceptances()]
        for i in order:
            policy.observe_rounds(sequences[i], ([8, 8, 8], [1, 2])[i], 8, 0)
        found.append(sequences)
    assert found[0] == found[1]


# Drafts further ahead are accepted less.
FALLING = [0.92, 0.87, 0.8, 0.6, 0.5, *[0.3] * 10]
FLAT = ACCELERATOR | {Speculation(4): 0.0023}
STEEP = {NO_DRAFTER: 0.0019, PLAIN: 0.002, Speculation(4): 0.0041, EIGHT: 0.0055, SIXTEEN: 0.0085}
OF_EQUAL_LENGTH = list(equal_rates(expected_tokens(FALLING, 16), 16))


@pytest.mark.parametrize(("costs", "scale"), [(FLAT, 0.8), (STEEP, 1.0)], ids=["flat", "steep"])
@pytest.mark.parametrize("known", [{}, {0: OF_EQUAL_LENGTH}, {0: list(accumulate(FALLING, mul))}])
def test_acceptance_that_falls_with_the_place(costs, scale, known):
    """Whatever is on record, the block size in use becomes the best one, where one rate for all places misleads."""
    costs = {spec: costs[spec] for spec in speculations_of((4, 8, 16))}
    rates = [scale * rate for rate in FALLING]
    best = max(costs, key=lambda spec: expected_tokens(rates, spec.block_size) / costs[spec])
    measured, spent = simulate(costs, lambda now, _: rates, 2, 20.0, rates=known)
    assert measured > 0.97 * 2 * expected_tokens(rates, best.block_size) / costs[best]
    assert spent[best] > 0.85 * sum(spent.values())


def test_a_record_by_place_is_right_from_the_first_round():
    """From the acceptance length alone, blocks of 4 look slower than plain decoding."""
    costs = {NO_DRAFTER: 0.0019, PLAIN: 0.002, Speculation(4): 0.0056, EIGHT: 0.009, SIXTEEN: 0.014}
    by_place = list(accumulate(FALLING, mul))

    def first(rates) -> Speculation:
        policy = DraftLengthPolicy(speculations_of((4, 8, 16)), rates={0: rates}, record=on_record(costs))
        return policy.choose(1, [Acceptances()])

    assert first(by_place) == Speculation(4)
    assert first(OF_EQUAL_LENGTH) == NO_DRAFTER
    expected = DrafterRecord(by_place, 15).expected_tokens([1.0, 1.0])
    for block_size in (1, 4, 8, 16):
        assert expected[block_size - 1] == pytest.approx(2 * expected_tokens(FALLING, block_size), rel=0.03)


def test_odds_by_place_and_odds_ratios_follow_the_rounds():
    """Texts of three kinds, whose odds are multiples of the usual ones at all places alike."""
    usual, rng = [4.0, 2.0, 1.0], random.Random(0)
    policy, ratios = DraftLengthPolicy(speculations_of((4,))), {0.5: [], 1.0: [], 2.0: []}
    for _ in range(100):
        for ratio, measured in ratios.items():
            rates, acceptances = [ratio * odds / (1 + ratio * odds) for odds in usual], Acceptances()
            policy.observe_rounds(acceptances, [yielded(rng, rates, 4) for _ in range(60)], 4, 0)
            measured.append(odds_ratio(0, acceptances))
    # Of the last 500 rounds the mean has a standard deviation of 12 %.
    assert policy.drafters[0].odds == pytest.approx(usual, rel=0.4)
    hard, middle, easy = (median(ratios[each]) for each in ratios)
    assert hard < 0.8 < middle < 1.25 < easy


def test_places_that_were_not_reached_are_as_those_before():
    record = DrafterRecord([0.7], 7)
    assert record.odds == pytest.approx([0.7 / 0.3] * 7)
    for _ in range(50):
        record.observe([2] * 10, 4)
    assert record.odds[0] > 50
    assert record.odds[1] < 0.1
    assert record.odds[2:] == pytest.approx([record.odds[1]] * 5)


def test_one_lucky_draft_of_a_useless_drafter_says_little_of_another():
    policy, acceptances = DraftLengthPolicy(speculations_of((8,), (8,))), Acceptances()
    policy.observe_rounds(Acceptances(), [1] * 1000, 8, 0)
    policy.observe_rounds(acceptances, [2], 8, 0)
    assert odds_ratio(1, acceptances) < 2


def test_rounds_with_one_drafter_say_a_little_of_another_one():
    """Beside what is usual for each drafter."""
    hard, easy = {0: Acceptance(1.0, 10.0)}, {0: Acceptance(50.0, 1.0)}
    assert odds_ratio(1, {}) == 1
    assert odds_ratio(0, hard) < odds_ratio(1, hard) < 1
    assert 1 < odds_ratio(1, easy) < odds_ratio(0, easy)
    # Rounds as on the average text change nothing.
    assert odds_ratio(1, {0: Acceptance(4.0, 4.0)}) == 1


def test_what_was_measured_in_a_bad_moment_is_tried_again_soon():
    """One long measurement among good ones must not rule a block size out for a minute."""
    costs, policy = {PLAIN: 1e-3, EIGHT: 2e-3}, DraftLengthPolicy((PLAIN, EIGHT))
    for spec, seconds in costs.items():
        for _ in range(4):
            policy.observe_seconds(1, spec, seconds)
    acceptances, now = [Acceptances({0: Acceptance(50.0, 5.0)})], 0.0
    assert policy.choose(1, acceptances) == EIGHT
    for _ in range(8):
        policy.observe_seconds(1, EIGHT, 20e-3)
    assert policy.choose(1, acceptances) == PLAIN
    chosen = []
    while now < 10:
        chosen.append(policy.choose(1, acceptances))
        policy.observe_seconds(1, chosen[-1], costs[chosen[-1]], 20)
        now += 20 * costs[chosen[-1]]
    assert chosen[-1] == EIGHT


def test_short_dispatches_make_rounds_hardly_dearer():
    """To start a dispatch takes as long as some rounds; what is measured in long ones alone must not look faster."""
    policy = DraftLengthPolicy(ROUNDS)
    for _ in range(50):
        for seconds, rounds in ((1.1e-3, 8), (1.1e-3, 8), (1.1e-3, 8), (1e-3, 32)):
            policy.observe_seconds(1, EIGHT, seconds, rounds)
    assert 1e-3 < policy.seconds[1, EIGHT] < 1.04e-3


def test_where_nothing_can_be_measured_predictions_decide_after_a_while():
    """As beside prompts that are prefilled in every step."""
    costs = {PLAIN: 1.0, EIGHT: 1.5}
    policy = DraftLengthPolicy((PLAIN, EIGHT), lambda n, spec: costs[spec])
    chosen = [policy.choose(4, [Acceptances()] * 4) for _ in range(PLAIN_DISPATCHES + 5)]
    assert chosen == [PLAIN] * PLAIN_DISPATCHES + [EIGHT] * 5
    assert policy.choose(1, [Acceptances()]) == PLAIN


def test_a_round_that_cannot_be_measured_is_not_tried_for_ever():
    policy = DraftLengthPolicy((PLAIN, EIGHT))
    for _ in range(2):
        policy.observe_seconds(1, PLAIN, 0.01)
    chosen = [policy.choose(1, [Acceptances()]) for _ in range(PLAIN_DISPATCHES + 5)]
    assert chosen == [EIGHT] * PLAIN_DISPATCHES + [PLAIN] * 5


# Costs of rounds as the bundled pair has them on two cores, and as a pair whose drafts pay.
SMALL = {NO_DRAFTER: 0.15e-3, PLAIN: 0.172e-3, Speculation(4): 0.365e-3, EIGHT: 0.7e-3, SIXTEEN: 1.2e-3}
PAYING = {NO_DRAFTER: 11e-3, PLAIN: 11.5e-3, Speculation(4): 17e-3, EIGHT: 28e-3, SIXTEEN: 50e-3}
LOAD_S = 0.015


def one_sequence(costs, rate: float, recorded, seconds: float) -> list[tuple[float, Speculation, int]]:
    """What a process does with ``recorded`` costs: (seconds since its start, rounds, tokens) of dispatches.

    Programs are loaded when they first run, and sequences have 384 tokens.
    """
    policy = DraftLengthPolicy(tuple(costs), lambda n, s: costs[s], {0: record(rate)}, record=on_record(recorded))
    rng, now, compiled, done, left, dispatches = random.Random(0), 0.0, set(), [], 0, []
    while now < seconds:
        if left <= 0:
            acceptances, left = Acceptances(), 384
        spec = policy.choose(1, [acceptances], None, lambda n, s: s in compiled, LOAD_S)
        rounds, began = max(2, min(32, int(0.02 / costs[spec]))), now
        counts = [yielded(rng, rate, spec.block_size) for _ in range(rounds)]
        now += rounds * costs[spec] * rng.uniform(1.0, 1.05) + LOAD_S * (spec not in compiled)
        compiled.add(spec)
        left -= sum(counts)
        dispatches.append((now, spec, sum(counts)))
        # Results are read after the next dispatch was started.
        done.append((spec, (now - began) / rounds, rounds, counts))
        if len(done) > 1:
            spec, took, rounds, counts = done.pop(0)
            policy.observe_seconds(1, spec, took, rounds)
            policy.observe_rounds(acceptances, counts, spec.block_size, spec.drafter)
    return dispatches


def speed_between(dispatches, start: float, end: float) -> float:
    """Tokens per second of the dispatches that ended between two times."""
    part = [(now, tokens) for now, _, tokens in dispatches if start < now < end]
    return sum(tokens for _, tokens in part[1:]) / (part[-1][0] - part[0][0])


@pytest.mark.parametrize("factor", [1 / RECORD_ERROR, 1.2, RECORD_ERROR])
@pytest.mark.parametrize("wrong", SMALL, ids=str)
@pytest.mark.parametrize(
    ("costs", "rate"), [(SMALL, 0.55), (SMALL, 0.7), (PAYING, 0.6)], ids=["plain", "near", "drafts"]
)
def test_a_wrong_cost_on_record_misleads_for_a_while_only(costs, rate, wrong, factor):
    """Plain decoding is not faster after half a second, nor anything else after some measurements of acceptance."""
    dispatches = one_sequence(costs, rate, costs | {wrong: factor * costs[wrong]}, 70.0)
    assert speed_between(dispatches, 0.5, 5.0) > 0.93 / costs[NO_DRAFTER]
    best = max(expected_tokens(rate, s.block_size) / costs[s] for s in costs)
    assert speed_between(dispatches, 60.0, 70.0) > 0.93 * best


def test_plain_decoding_comes_first_until_several_processes_have_measured_it():
    """Drafting seems faster by less than a cost on record may be wrong; then it is loaded when that would have paid."""
    loaded = on_record(PAYING)
    for error, first in ((RECORD_ERROR, NO_DRAFTER), (KNOWN_ERROR, Speculation(4))):
        loaded.error = lambda key, error=error: error
        policy = DraftLengthPolicy(tuple(PAYING), lambda n, s: PAYING[s], {0: record(0.6)}, loaded)
        compiled, used = set(), []
        for _ in range(60):
            used.append(policy.choose(1, [Acceptances()], None, lambda n, s, seen=compiled: s in seen, 0.1))
            compiled.add(used[-1])
            policy.observe_seconds(1, used[-1], PAYING[used[-1]])
        assert used[0] == first
        assert used[-1] == Speculation(4)
        assert compiled == {first, Speculation(4)}


def scores_of(bins):
    """The probabilities in the middle of the intervals."""
    step = (GREATEST_LOGIT - LEAST_LOGIT) / BINS
    return 1 / (1 + np.exp(-LEAST_LOGIT - step * (bins + 0.5)))


def test_rates_are_the_scores_at_first_and_then_what_was_accepted():
    """Scores that are too low, the more so the further ahead, and one place that is never verified."""
    calibration, rng = Calibration(4), np.random.default_rng(0)
    scores = np.broadcast_to(scores_of(np.arange(BINS)), (LENGTHS, 4, BINS))
    np.testing.assert_allclose(calibration.rates(4), scores, rtol=1e-6)
    odds = scores_of(np.arange(BINS)) / (1 - scores_of(np.arange(BINS)))
    true = np.array([odds * factor / (1 + odds * factor) for factor in (6.0, 4.0, 2.0)])
    for _ in range(300):
        bins = rng.integers(4, 14, (50, 3))
        accepted = rng.random((50, 3)) < true[np.arange(3), bins]
        outcomes = np.zeros((2, LENGTHS, 3, BINS), int)
        np.add.at(outcomes[0, 0], (np.arange(3), bins), 1)
        np.add.at(outcomes[1, 0], (np.arange(3), bins), accepted)
        calibration.observe(outcomes, 1)
    rates, *longer = calibration.rates(3)
    assert rates.dtype == np.float32
    assert all(np.allclose(rates, each) for each in longer), "lengths that were not seen"
    assert np.abs(rates - true)[:, 4:14].max() < 0.06
    # Of scores that are not seen, the score itself remains the best guess, with the place's odds.
    assert np.abs(rates - true)[:, 14:].max() < 0.15
    # Places that were never verified have the rates of all places together.
    assert (np.diff(calibration.rates(4)[0, :, 8]) < 0)[:2].all()


def test_old_outcomes_count_less():
    calibration, all_accepted = Calibration(1), np.zeros((2, LENGTHS, 1, BINS), int)
    all_accepted[:, 0, 0, 8] = 100
    for accepted in (100, 0):
        all_accepted[1, 0, 0, 8] = accepted
        for _ in range(40):
            calibration.observe(all_accepted, 100)
    assert calibration.rates(1)[0, 0, 8] < 0.05


# Rounds of Qwen3.6-35B-A3B on an H200.
LONG_COSTS = {NO_DRAFTER: 0.00285, PLAIN: 0.0029, EIGHT: 0.0074, SIXTEEN: 0.0107}


def answered(policy, rng, prompt: int, new: int, rate) -> tuple[float, list[tuple[int, Speculation]]]:
    """(tokens per second, (tokens before it, speculation) of each round) of a sequence; ``rate``: by its length."""
    sequence, tokens, now, rounds = Acceptances(), prompt, 0.0, []
    while tokens < prompt + new:
        sequence.length = tokens
        spec = policy.choose(1, [sequence])
        count = max(2, int(0.02 / LONG_COSTS[spec]))
        for _ in range(count):
            rounds.append((tokens, spec))
            n = yielded(rng, rate(tokens), spec.block_size)
            policy.observe_rounds(sequence, [n], spec.block_size, spec.drafter)
            tokens += n
        policy.observe_seconds(1, spec, LONG_COSTS[spec] * rng.uniform(0.95, 1.05), count)
        now += count * LONG_COSTS[spec]
    return (tokens - prompt) / now, rounds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bound", LENGTH_BOUNDS[:3])
def test_acceptance_that_falls_with_the_context_is_followed_within_few_rounds(bound, seed):
    """By the first sequence that becomes so long, by all later ones from their first round, and not by short ones."""

    def rate(tokens):
        return 0.85 if tokens < bound else 0.15

    def drafted(rounds):
        return sum(spec.block_size > 1 for _, spec in rounds)

    policy, rng = DraftLengthPolicy(tuple(LONG_COSTS)), random.Random(seed)
    short = max(expected_tokens(0.85, s.block_size) / LONG_COSTS[s] for s in LONG_COSTS)
    for _ in range(2):
        answered(policy, rng, 200, 1000, rate)
    _, rounds = answered(policy, rng, bound - 1000, 3000, rate)
    before, after = ([each for each in rounds if (each[0] < bound) == is_before] for is_before in (True, False))
    assert drafted(before) > 0.9 * len(before)
    # And the rest of the dispatch in which the context became so long.
    assert drafted(after[:40]) <= 14
    for _ in range(3):
        speed, rounds = answered(policy, rng, 3 * bound, 1000, rate)
        assert speed > 0.93 / LONG_COSTS[NO_DRAFTER]
        # Trials are dispatches of two rounds.
        assert drafted(rounds[:40]) <= 4
        speed, rounds = answered(policy, rng, 200, 1000, rate)
        assert drafted(rounds) > 0.9 * len(rounds)
        assert speed > 0.85 * short


def test_long_contexts_alone_for_a_while_do_not_make_short_ones_look_hard():
    record, rng = DrafterRecord([0.7], 7), random.Random(0)
    for rounds, rate, length in ((300, 0.85, 100), (3000, 0.15, 20000)):
        for _ in range(rounds):
            record.observe([yielded(rng, rate, 8)], 8, length)
            assert record.odds
    short, long = record.odds[0], record.odds[0] * record.length_ratio(20000)
    assert 3 < short < 12
    assert 0.1 < long < 0.35


def test_where_contexts_of_all_lengths_draft_alike_lengths_change_nothing():
    policy, rng = DraftLengthPolicy(tuple(LONG_COSTS)), random.Random(0)
    best = max(expected_tokens(0.8, s.block_size) / LONG_COSTS[s] for s in LONG_COSTS)
    for prompt in (100, 5000, 20000, 60000, 200000, 100) * 2:
        speed, _ = answered(policy, rng, prompt, 2000, lambda tokens: 0.8)
        assert speed > 0.88 * best
    ratios = [policy.drafters[0].length_ratio(bound) for bound in LENGTH_BOUNDS]
    assert all(0.5 < ratio < 2 for ratio in ratios)


@pytest.mark.parametrize("seed", range(5))
def test_widths_follow_acceptance_that_falls_with_the_context_within_few_rounds(seed):
    """Scores that stay as they were: the drafter does not know that it drafts worse there."""
    calibration, rng = Calibration(7), np.random.default_rng(seed)
    sizes, price = jnp.full(1, 8), jnp.full(1, 0.3)

    def width(bins, length) -> int:
        rates = jnp.asarray(calibration.rates(7))
        return int(choose_widths(jnp.asarray(bins), jnp.full(1, length), rates, price, sizes)[0])

    def rounds(count, length, rate) -> list[int]:
        widths = []
        for _ in range(count):
            bins = rng.integers(8, 13, (1, 7))
            widths.append(width(bins, length))
            accepted = int((rng.random(7) < rate).cumprod().sum())
            outcomes = np.zeros((2, LENGTHS, 7, BINS), int)
            for place in range(min(accepted + 1, widths[-1] - 1)):
                outcomes[:, length, place, bins[0, place]] += [1, place < accepted]
            calibration.observe(outcomes, 1)
        return widths

    assert np.mean(rounds(300, 0, 0.85)[-50:]) > 6
    long = rounds(60, 2, 0.15)
    assert long[0] > 4
    assert np.mean(long[15:]) < 2.5
    # Longer ones are expected to be alike, shorter ones not.
    assert np.mean(rounds(10, 3, 0.15)) < 2.5
    assert np.mean(rounds(10, 0, 0.85)) > 6


def test_the_price_of_a_draft_is_what_its_experts_take_in_tokens():
    """1 ms of a token's experts, of rounds that yield 1 + 7 × 0.5 tokens or so in 20 ms."""
    costs = {PLAIN: 0.01, EIGHT: 0.02}
    policy = DraftLengthPolicy(tuple(costs), lambda n, s: 5 * costs[s], saved=lambda *key: 0.005 * sub(*key))
    acceptances = Acceptances()
    for spec, seconds in costs.items():
        for _ in range(3):
            policy.observe_seconds(1, spec, seconds)
    assert policy.widths(1, 1, EIGHT)[1] == 0, "a drafter that is not known"
    for _ in range(KNOWN_ROUNDS):
        policy.observe_rounds(acceptances, [4, 5], 8, 0)
    rates, price = policy.widths(1, 1, EIGHT)
    assert rates.shape == (LENGTHS, 7, BINS)
    expected = policy.drafters[0].expected_tokens([1.0])[7]
    assert price == pytest.approx(0.001 * expected / 0.02)
    # Eight sequences yield eight times as many tokens, in rounds that take ten times as long.
    for spec, seconds in {PLAIN: 0.01, EIGHT: 0.2}.items():
        for _ in range(3):
            policy.observe_seconds(8, spec, seconds)
    assert policy.widths(8, 8, EIGHT)[1] == pytest.approx(0.8 * price)
    assert policy.widths(5, 8, EIGHT)[1] == pytest.approx(0.5 * price), "those that there are count"


@pytest.mark.parametrize("error", [1.0, 3.0, 30.0])
def test_a_price_is_not_above_what_whole_rounds_take_longer(error):
    """Predictions that are too high; seven drafts and the drafter take 10 ms."""
    costs = {PLAIN: 0.01, EIGHT: 0.02}
    policy = DraftLengthPolicy(tuple(costs), lambda n, s: costs[s], saved=lambda *key: error * 0.001 * sub(*key))
    for _ in range(KNOWN_ROUNDS):
        policy.observe_rounds(Acceptances(), [4, 5], 8, 0)
    for spec, seconds in costs.items():
        for _ in range(3):
            policy.observe_seconds(1, spec, seconds)
    for _ in range(20):
        # Rounds of fewer drafts say nothing about all of them.
        policy.observe_seconds(1, EIGHT, 0.012, is_whole=False)
    price = policy.widths(1, 1, EIGHT)[1]
    tokens = policy.drafters[0].expected_tokens([1.0])[7] / policy.seconds[1, EIGHT]
    assert price == pytest.approx(min(error * 0.001, 0.01 / 7) * tokens)


def test_all_drafts_are_verified_now_and_then_also_by_a_drafter_that_is_only_tried():
    policy = DraftLengthPolicy((PLAIN, EIGHT), saved=lambda *key: 0.01 * sub(*key))
    for _ in range(KNOWN_ROUNDS):
        policy.observe_rounds(Acceptances(), [4, 5], 8, 0)

    def prices(seconds, tries_apart):
        """Of a dispatch of 20 ms in each ``tries_apart``; the others are plain."""
        result = []
        for i in range(round(50 * seconds)):
            if i % tries_apart == 0:
                result.append(policy.widths(1, 1, EIGHT)[1])
            policy.observe_seconds(1, PLAIN if i % tries_apart else EIGHT, 0.01, 2)
        return result

    assert prices(4.5 * WHOLE_EVERY_S, 1).count(0) == 4
    seldom = prices(10 * WHOLE_EVERY_S, 300)[1:]
    assert len(seldom) > 4
    assert {*seldom} == {0}


def test_without_experts_all_drafts_are_verified():
    policy = DraftLengthPolicy((PLAIN, EIGHT))
    for _ in range(KNOWN_ROUNDS):
        policy.observe_rounds(Acceptances(), [4, 5], 8, 0)
        policy.observe_seconds(1, EIGHT, 0.01)
    assert policy.widths(1, 1, EIGHT)[1] == 0
