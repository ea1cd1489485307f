"""Token counts of streams, against their definitions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine.request import Times
from dflash_jax.engine.statistics import Rounds
from dflash_jax.server.answers import Totals, drafters, ended_totals

# Yields of blocks of 8.
ROUNDS = st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.integers(1, 8)), max_size=3)
PLACES = {"a": 7, "b": 8}


def sequence(prompt: int):
    request = SimpleNamespace(prompt=[1] * prompt, cached=0, times=Times(1.0, 2.0))
    return SimpleNamespace(request=request, rounds=Rounds(), preparation={})


def grow(row, i: int, rounds: list[tuple[str | None, int]], ends: bool) -> None:
    row.rounds.update((drafter, 7, n) if drafter else (None, 0, 1) for drafter, n in rounds)
    row.request.cached = i
    if rounds:
        row.request.times = replace(row.request.times, prefilled=3.0 + i, first_token=4.0 + i)
    if ends:
        row.request.times = replace(row.request.times, finished=9.0 + i)


def test_the_keys_of_drafters_are_those_of_the_front():
    """An engine of a cluster may have drafters that the front does not know, or longer drafts."""
    rounds = Rounds({("other", 3, 2): 5, ("known", 7, 4): 2, (None, 0, 1): 3})
    assert drafters(rounds, {"known": 3, "idle": 1}) == {
        "known": {
            "rounds": 2,
            "drafted_per_pos": {"0": 2, "1": 2, "2": 2},
            "accepted_per_pos": {"0": 2, "1": 2, "2": 2},
        },
        "idle": {"rounds": 0, "drafted_per_pos": {"0": 0}, "accepted_per_pos": {"0": 0}},
    }


def counted(rows, choices: int) -> dict:
    """By their definitions, of all sequences and all rounds."""
    rounds = [each for r in rows for each in r.rounds.elements()]
    prompt, tokens = sum(len(r.request.prompt) for r in rows[::choices]), sum(yielded for _, _, yielded in rounds)
    drafts, accepted = sum(drafted for _, drafted, _ in rounds), sum(yielded - 1 for _, _, yielded in rounds)

    def of(drafter: str, places: int) -> dict:
        own = [(drafted, yielded) for name, drafted, yielded in rounds if name == drafter]
        return {
            "rounds": len(own),
            "drafted_per_pos": {str(i): sum(drafted > i for drafted, _ in own) for i in range(places)},
            "accepted_per_pos": {str(i): sum(yielded - 1 > i for _, yielded in own) for i in range(places)},
        }

    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "reasoning_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": sum(r.request.cached for r in rows[::choices])},
        "completion_tokens_details": {
            "reasoning_tokens": 3,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafts - accepted,
            "draft_rounds": sum(drafted > 0 for _, drafted, _ in rounds),
        },
        "drafters": {drafter: of(drafter, places) for drafter, places in PLACES.items()},
    }


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), ROUNDS, st.booleans())))
def test_running_totals_are_the_sums(choices, pieces):
    rows = [sequence(10 + i) for i in range(6 // choices * choices)]
    totals = Totals(rows, choices, PLACES)
    for i, rounds, ends in pieces:
        i %= len(rows)
        grow(rows[i], i, rounds, ends)
        totals.take(i)
        begun = [r.request.times for r in rows if r.request.times.first_token == r.request.times.first_token]
        found = totals.timings(20.0, 0.5)
        assert found["draft_n"] == sum(r.rounds.draft_tokens for r in rows)
        assert found["draft_n_accepted"] == sum(r.rounds.accepted_tokens for r in rows)
        if begun:
            last = max(20.0 if t.finished != t.finished else t.finished for t in begun)
            assert found["decode_s"] == last - min(t.ready for t in begun)
            assert found["prefill_s"] == begun[0].first_token - begun[0].admitted
            tokens = found["tokens_per_s"] * max(found["decode_s"], 1e-9)
            assert tokens == pytest.approx(sum(r.rounds.tokens for r in rows))
        else:
            assert found["decode_s"] == 0.0
    # What the prefix cache had of a prompt counts from the first piece of one of its choices.
    seen = {i % len(rows) - i % len(rows) % choices for i, *_ in pieces}
    for i in set(range(0, len(rows), choices)) - seen:
        rows[i].request.cached = 0
    serving = SimpleNamespace(llm=SimpleNamespace(draft_places=PLACES))
    assert totals.usage(3) == counted(rows, choices) == ended_totals(serving, rows, choices).usage(3)


def test_a_piece_costs_the_same_however_many_sequences_there_are():
    looked_at = []

    class Rows(list):
        def __getitem__(self, i):
            if not isinstance(i, slice):
                looked_at.append(i)
            return super().__getitem__(i)

        def __iter__(self):
            raise AssertionError("all sequences are looked at")

    rows = Rows([sequence(3) for _ in range(2000)])
    totals = Totals(rows, 2, PLACES)
    for i in (5, 1999, 5):
        looked_at.clear()
        totals.take(i)
        totals.usage()
        totals.timings(1.0)
        assert len(looked_at) < 8
