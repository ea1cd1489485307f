"""The choice of a width, against rounds of known cost and acceptance."""

import random

import pytest

from dflash_jax.engine.draft_length import ALONE, Acceptance, DraftLengthPolicy, expected_tokens

WIDTHS = (1, 8, 16)


def yielded(rng: random.Random, rate: float, width: int) -> int:
    n = 1
    while n < width and rng.random() < rate:
        n += 1
    return n


def simulate(costs: dict[int, float], rate, rows: int, seconds: float, **options):
    """(tokens per second, seconds at each width) of ``rows`` rows; ``rate``: of acceptance, by the time."""
    policy, rng, now = DraftLengthPolicy(WIDTHS, **options), random.Random(0), 0.0
    own, tokens, spent = [Acceptance() for _ in range(rows)], 0, dict.fromkeys(costs, 0.0)
    while now < seconds:
        width = policy.choose(rows, own)
        rounds = max(1, int(0.02 / costs[width]))
        for _ in range(rounds):
            for a in own:
                n = yielded(rng, rate(now), max(width, 1))
                tokens += n
                policy.observe_round(a, n, width)
        took = rounds * costs[width] * rng.uniform(0.9, 1.1)
        policy.observe_seconds(rows, width, took / rounds, rounds)
        now += took
        spent[width] += took
    return tokens / now, spent


ACCELERATOR = {ALONE: 0.0019, 1: 0.002, 8: 0.0028, 16: 0.0034}
LOADED = {ALONE: 0.0036, 1: 0.004, 8: 0.018, 16: 0.033}
CPU = {ALONE: 0.0003, 1: 0.0004, 8: 0.0048, 16: 0.0061}


@pytest.mark.parametrize("costs", [ACCELERATOR, LOADED, CPU], ids=["accelerator", "loaded", "cpu"])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("first", ["narrow", "wide"])
def test_near_the_best_fixed_width(costs, rate, first):
    found, _ = simulate(costs, lambda now: rate, 4, 30.0, first=first)
    best = max(4 * expected_tokens(rate, w) / costs[w] for w in costs)
    assert found > (0.96 if costs is not ACCELERATOR else 0.94) * best


def test_the_drafter_is_left_alone_only_where_it_could_not_pay():
    assert simulate(CPU, lambda now: 0.9, 4, 10.0)[1][ALONE] > 9.5
    assert simulate(ACCELERATOR, lambda now: 0.6, 4, 10.0)[1][ALONE] == 0


def test_acceptance_is_looked_at_again_now_and_then():
    """A text that is hard for a minute and then easy."""
    _, spent = simulate(LOADED, lambda now: 0.1 if now < 60 else 0.97, 4, 120.0)
    assert spent[ALONE] > 50
    assert spent[8] + spent[16] > 35


def test_a_drafter_that_was_left_alone_is_taken_up_again_when_the_load_falls():
    policy = DraftLengthPolicy(WIDTHS)
    for rows, costs in ((1, ACCELERATOR), (32, CPU)):
        for width in WIDTHS:
            for _ in range(3):
                policy.observe_seconds(rows, width, costs[width])
    easy = [Acceptance(30.0, 1.0)]
    assert policy.choose(32, easy * 32) == ALONE
    assert policy.choose(1, easy) == 16
    assert policy.choose(32, easy * 32, least=8) in (8, 16)


def test_follows_a_text_that_becomes_easy_and_hard_again():
    costs = {ALONE: 0.0019, 1: 0.002, 8: 0.006, 16: 0.008}
    found, spent = simulate(costs, lambda now: 0.97 if 20 < now < 40 else 0.1, 1, 60.0)
    assert spent[16] > 15
    assert spent[ALONE] + spent[1] > 30
    assert found > 0.9 * (40 / costs[1] + 20 * expected_tokens(0.97, 16) / costs[16]) / 60


def test_what_cannot_win_is_not_tried():
    """Not even a perfect drafter makes up for these costs."""
    _, spent = simulate(CPU | {16: 0.0075}, lambda now: 0.9, 1, 20.0, first="narrow")
    assert spent[8] + spent[16] < 0.2


def test_what_is_not_compiled_waits():
    policy, own = DraftLengthPolicy(WIDTHS, "narrow"), [Acceptance()]
    compiled = {(1, 1)}

    def choose():
        return policy.choose(1, own, is_compiled=lambda *key: key in compiled, patience=3.0)

    for _ in range(29):
        assert choose() == 1
        policy.observe_seconds(1, 1, 0.1)
    policy.observe_seconds(1, 1, 0.3)
    assert choose() == 8


def test_a_row_that_insists():
    policy = DraftLengthPolicy(WIDTHS)
    for width, seconds in CPU.items():
        for _ in range(2):
            policy.observe_seconds(2, width, seconds)
    assert policy.choose(2, [Acceptance()] * 2) == ALONE
    assert policy.choose(2, [Acceptance()] * 2, least=5) in (8, 16)
    assert policy.choose(2, [Acceptance()] * 2, least=9) == 16


def test_acceptance_of_late_counts():
    a = Acceptance()
    for _ in range(50):
        a.observe(8, 8)
    assert a.rate(0.5) > 0.95
    for _ in range(30):
        a.observe(1, 8)
    assert a.rate(0.5) < 0.3
