"""The choice of a block size, against rounds of known cost and acceptance."""

import random

import pytest

from dflash_jax.engine.draft_length import NO_DRAFTER, Acceptance, DraftLengthPolicy, expected_tokens, rate_of

BLOCK_SIZES = (1, 8, 16)


def yielded(rng: random.Random, rate: float, block_size: int) -> int:
    n = 1
    while n < block_size and rng.random() < rate:
        n += 1
    return n


def simulate(costs: dict[int, float], rate, batch_size: int, seconds: float, **options):
    """(tokens per second, seconds at each block size) of a batch; ``rate``: of acceptance, by the time."""
    policy, rng, now = DraftLengthPolicy(BLOCK_SIZES, **options), random.Random(0), 0.0
    acceptances, tokens, spent = [Acceptance() for _ in range(batch_size)], 0, dict.fromkeys(costs, 0.0)
    while now < seconds:
        block_size = policy.choose(batch_size, acceptances)
        rounds = max(1, int(0.02 / costs[block_size]))
        for _ in range(rounds):
            for a in acceptances:
                n = yielded(rng, rate(now), max(block_size, 1))
                tokens += n
                policy.observe_round(a, n, block_size)
        took = rounds * costs[block_size] * rng.uniform(0.9, 1.1)
        policy.observe_seconds(batch_size, block_size, took / rounds, rounds)
        now += took
        spent[block_size] += took
    return tokens / now, spent


ACCELERATOR = {NO_DRAFTER: 0.0019, 1: 0.002, 8: 0.0028, 16: 0.0034}
LOADED = {NO_DRAFTER: 0.0036, 1: 0.004, 8: 0.018, 16: 0.033}
CPU = {NO_DRAFTER: 0.0003, 1: 0.0004, 8: 0.0048, 16: 0.0061}


@pytest.mark.parametrize("costs", [ACCELERATOR, LOADED, CPU], ids=["accelerator", "loaded", "cpu"])
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("predict", [lambda n, b: 1.0, lambda n, b: 1.0 + b], ids=["flat", "steep"])
def test_choices_are_near_the_best_fixed_block_size(costs, rate, predict):
    """Whatever is predicted."""
    found, _ = simulate(costs, lambda now: rate, 4, 30.0, predict=predict)
    best = max(4 * expected_tokens(rate, w) / costs[w] for w in costs)
    assert found > (0.96 if costs is not ACCELERATOR else 0.94) * best


def test_the_drafter_is_off_only_where_it_cannot_pay():
    assert simulate(CPU, lambda now: 0.9, 4, 10.0)[1][NO_DRAFTER] > 9.5
    assert simulate(ACCELERATOR, lambda now: 0.6, 4, 10.0)[1][NO_DRAFTER] == 0


def test_acceptance_is_measured_again_at_intervals():
    """A text that is hard for a minute and then easy."""
    _, spent = simulate(LOADED, lambda now: 0.1 if now < 60 else 0.97, 4, 120.0)
    assert spent[NO_DRAFTER] > 50
    assert spent[8] + spent[16] > 35


def test_a_drafter_that_is_off_is_used_again_when_the_load_falls():
    policy = DraftLengthPolicy(BLOCK_SIZES)
    for batch_size, costs in ((1, ACCELERATOR), (32, CPU)):
        for block_size in BLOCK_SIZES:
            for _ in range(3):
                policy.observe_seconds(batch_size, block_size, costs[block_size])
    easy = [Acceptance(30.0, 1.0)]
    assert policy.choose(32, easy * 32) == NO_DRAFTER
    assert policy.choose(1, easy) == 16
    assert policy.choose(32, easy * 32, (8, 16)) in (8, 16)


def test_follows_a_text_that_becomes_easy_and_hard_again():
    costs = {NO_DRAFTER: 0.0019, 1: 0.002, 8: 0.006, 16: 0.008}
    found, spent = simulate(costs, lambda now: 0.97 if 20 < now < 40 else 0.1, 1, 60.0)
    assert spent[16] > 15
    assert spent[NO_DRAFTER] + spent[1] > 30
    assert found > 0.9 * (40 / costs[1] + 20 * expected_tokens(0.97, 16) / costs[16]) / 60


def test_block_sizes_that_cannot_win_are_not_tried():
    """Not even a perfect drafter makes up for these costs."""
    costs = CPU | {16: 0.0075}
    _, spent = simulate(costs, lambda now: 0.9, 1, 20.0, predict=lambda n, b: costs[b])
    assert spent[8] + spent[16] < 0.2


def test_block_sizes_that_are_not_compiled_wait():
    policy, acceptances = DraftLengthPolicy(BLOCK_SIZES), [Acceptance()]
    compiled = {(1, 1)}

    def choose():
        return policy.choose(1, acceptances, (1, 8), lambda *key: key in compiled, patience=3.0)

    for _ in range(29):
        assert choose() == 1
        policy.observe_seconds(1, 1, 0.1)
    policy.observe_seconds(1, 1, 0.3)
    assert choose() == 8


def test_the_first_choice_follows_the_record_and_the_predicted_costs():
    def first(rate, costs):
        return DraftLengthPolicy(BLOCK_SIZES, lambda n, b: costs[b], rate).choose(1, [Acceptance()])

    assert first(0.9, ACCELERATOR) == 16
    assert first(0.2, ACCELERATOR) == 1
    assert first(0.6, ACCELERATOR | {16: 0.006}) == 8
    assert first(0.7, CPU) == NO_DRAFTER


def test_costs_that_are_not_measured_follow_the_nearest_measured_one():
    policy = DraftLengthPolicy(BLOCK_SIZES, lambda n, b: n * max(b, 1))
    assert policy.cost(1, 8) is None
    policy.observe_seconds(1, 1, 0.1)
    assert policy.cost(1, 8) == pytest.approx(0.8)
    policy.observe_seconds(4, 8, 1.6)
    assert policy.cost(4, 8) == 1.6
    assert policy.cost(2, 8) == pytest.approx(0.8)
    assert policy.cost(1, NO_DRAFTER) == pytest.approx(0.1)


def test_why_plain_names_the_costs_where_plain_decoding_is_chosen():
    policy = DraftLengthPolicy(BLOCK_SIZES, lambda n, b: CPU[b], 0.7)
    assert policy.favoured_draft(1) == 8
    assert policy.why_plain(1) == (
        "a round of 8 is predicted to take 16.0 times as long as one of plain decoding, and yields about 3.1 tokens"
    )
    for block_size, seconds in CPU.items():
        policy.observe_seconds(1, block_size, seconds)
    assert policy.why_plain(1) == (
        "a round of 8 takes 16.0 times as long as one of plain decoding, and yields about 3.1 tokens"
    )
    assert DraftLengthPolicy(BLOCK_SIZES, lambda n, b: ACCELERATOR[b], 0.7).why_plain(1) is None
    assert DraftLengthPolicy((1,)).why_plain(1) is None


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_a_rate_follows_from_the_acceptance_length(rate, block_size):
    assert rate_of(expected_tokens(rate, block_size), block_size) == pytest.approx(rate, abs=1e-3)
    assert rate_of(block_size, block_size) > 0.99


def test_choices_are_among_those_allowed():
    policy = DraftLengthPolicy(BLOCK_SIZES)
    for block_size, seconds in CPU.items():
        for _ in range(2):
            policy.observe_seconds(2, block_size, seconds)
    assert policy.choose(2, [Acceptance()] * 2) == NO_DRAFTER
    assert policy.choose(2, [Acceptance()] * 2, (8, 16)) in (8, 16)
    assert policy.choose(2, [Acceptance()] * 2, (16,)) == 16


def test_recent_acceptance_counts_most():
    a = Acceptance()
    for _ in range(50):
        a.observe(8, 8)
    assert a.rate(0.5) > 0.95
    for _ in range(30):
        a.observe(1, 8)
    assert a.rate(0.5) < 0.3


@pytest.mark.parametrize("patience", [2.0, 20.0])
def test_a_block_size_that_is_not_compiled_is_found_in_time(patience):
    """The prediction for it is four times too high; trials of compiled sizes must not put it off."""
    costs = {NO_DRAFTER: 0.0019, 1: 0.002, 8: 0.006, 16: 0.004}
    policy, rng, now = (
        DraftLengthPolicy(BLOCK_SIZES, lambda n, b: costs[b] * (4 if b == 16 else 1)),
        random.Random(0),
        0.0,
    )
    compiled, spent, acceptances = set(), dict.fromkeys(costs, 0.0), [Acceptance()]
    while now < 20 * patience:
        block_size = policy.choose(1, acceptances, None, lambda n, b: b in compiled, patience)
        compiled.add(block_size)
        n = yielded(rng, 0.9, max(block_size, 1))
        policy.observe_round(acceptances[0], n, block_size)
        policy.observe_seconds(1, block_size, costs[block_size])
        now += costs[block_size]
        spent[block_size] += costs[block_size]
    assert spent[16] > 0.5 * now


def test_a_cost_that_was_measured_in_a_bad_moment_is_measured_again():
    costs = dict(ACCELERATOR)
    policy = DraftLengthPolicy(BLOCK_SIZES, lambda n, b: costs[b])
    for block_size in costs:
        for _ in range(4):
            policy.observe_seconds(1, block_size, costs[block_size] * (50 if block_size == 16 else 1))
    rng, acceptances, now, used = random.Random(0), [Acceptance()], 0.0, []
    while now < 200:
        block_size = policy.choose(1, acceptances)
        used.append(block_size)
        rounds = max(1, int(0.02 / costs[block_size]))
        for _ in range(rounds):
            policy.observe_round(acceptances[0], yielded(rng, 0.9, max(block_size, 1)), block_size)
        policy.observe_seconds(1, block_size, costs[block_size], rounds)
        now += rounds * costs[block_size]
    assert used[:100].count(16) == 0
    assert used[-100:].count(16) > 90
