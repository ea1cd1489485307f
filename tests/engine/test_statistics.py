"""Counts of rounds, against their definitions, and those of events against the engine's."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine.config import EngineConfig, speculations_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.statistics import Rounds
from dflash_jax.sampling_params import SamplingParams
from tools.mock_runner import FakeClock, MockRunner

# What a round yields beyond its drafts is left out: no block has so many.
ROUND = st.builds(
    lambda drafter, drafted, yielded: (drafter, drafted, min(yielded, drafted + 1)),
    *(st.sampled_from("ab"), st.integers(0, 15), st.integers(1, 16)),
)


@given(st.lists(ROUND, max_size=40), st.integers(0, 20))
def test_numbers_by_place_and_drafter_are_those_of_the_rounds(rounds, least):
    counts = Rounds(rounds)
    assert counts.total() == len(rounds)
    assert counts.drafts == sum(drafted > 0 for _, drafted, _ in rounds)
    assert counts.tokens == sum(yielded for _, _, yielded in rounds)
    histogram = counts.histogram(least)
    assert len(histogram) > least
    assert histogram == [sum(yielded == n + 1 for _, _, yielded in rounds) for n in range(len(histogram))]
    drafted, accepted = counts.by_place(least)
    assert len(drafted) == len(accepted) >= least
    assert drafted == [sum(count > i for _, count, _ in rounds) for i in range(len(drafted))]
    assert accepted == [sum(yielded - 1 > i for _, _, yielded in rounds) for i in range(len(accepted))]
    # Each round has one token that was not drafted.
    assert sum(accepted) == counts.accepted_tokens == counts.tokens - len(rounds)
    assert sum(drafted) == counts.draft_tokens
    # A dispatch with drafts may have rounds of width 1.
    drafting = [each for each in rounds if each[1]]
    expected = {name: Rounds(each for each in drafting if each[0] == name) for name in "abc"}
    assert counts.by_drafter("abc") == expected
    assert counts.copy() == counts
    assert isinstance(counts.copy(), Rounds)


def test_what_plain_rounds_yield_needs_no_drafts():
    event = Event(Request([1], SamplingParams(max_tokens=2)), [5, 6], [1, 1])
    assert list(event.rounds) == [(None, 0, 1)] * 2


def test_events_of_two_drafters_sum_up_to_the_engines_counts():
    """Requests have widths of their own, end anywhere in a round, and stop within one."""
    rng, config = Random(0), EngineConfig(speculations=speculations_of((4, 8), (2, 6)), drafters=("one", "two"))
    engine = Engine(MockRunner(8, 256, clock=FakeClock(), tokens=5), config)
    assert config.draft_places == {"one": 7, "two": 5}
    engine.policy.choose = lambda batch_size, acceptances, allowed, *_: rng.choice(allowed)
    for i in range(60):
        params = SamplingParams(max_tokens=rng.randint(1, 60), seed=i, ignore_eos=True)
        stop = rng.choice([None, 3, 20])
        request = Request([1, 2], params, block_size=rng.choice(["auto", "auto", 1, 3, 8]))
        request.monitor = stop and (lambda tokens, n=stop: n if len(tokens) > n else None)
        engine.submit(request)
    events = []
    while engine.has_work:
        events += engine.step()
    counts = engine.statistics.rounds
    assert Rounds(each for event in events for each in event.rounds) == counts
    assert all(Rounds(event.rounds).tokens == len(event.tokens) for event in events)
    assert counts.tokens == engine.statistics.new_tokens == sum(len(event.tokens) for event in events)
    widths = {name: {drafted for _, drafted, _ in of} for name, of in counts.by_drafter().items()}
    assert {name: max(each) for name, each in widths.items()} == config.draft_places
    assert min(map(len, widths.values())) > 1
