"""Token counts of streams, against their definitions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine.request import Times
from dflash_jax.server.answers import Totals, usage

ROUNDS = st.lists(st.integers(1, 5), max_size=3)


def sequence(prompt: int):
    request = SimpleNamespace(prompt=[1] * prompt, cached=0, times=Times(1.0, 2.0))
    return SimpleNamespace(request=request, num_tokens=0, yielded=[], drafts=0, draft_tokens=0, preparation={})


def grow(row, i: int, rounds: list[int], ends: bool) -> None:
    row.yielded += rounds
    row.num_tokens += sum(rounds)
    row.drafts += len(rounds)
    row.draft_tokens += 7 * len(rounds)
    row.request.cached = i
    if rounds:
        row.request.times = replace(row.request.times, prefilled=3.0 + i, first_token=4.0 + i)
    if ends:
        row.request.times = replace(row.request.times, finished=9.0 + i)


def counted(rows, choices: int) -> dict:
    """By their definitions, of all sequences and all rounds."""
    prompt, tokens = sum(len(r.request.prompt) for r in rows[::choices]), sum(r.num_tokens for r in rows)
    accepted = sum(n - 1 for r in rows for n in r.yielded)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "reasoning_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": sum(r.request.cached for r in rows[::choices])},
        "completion_tokens_details": {
            "reasoning_tokens": 3,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(r.draft_tokens for r in rows) - accepted,
            "draft_rounds": sum(r.drafts for r in rows),
        },
    }


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(0, 5), ROUNDS, st.booleans())))
def test_running_totals_are_the_sums(choices, pieces):
    rows = [sequence(10 + i) for i in range(6 // choices * choices)]
    totals = Totals(rows, choices)
    for i, rounds, ends in pieces:
        i %= len(rows)
        grow(rows[i], i, rounds, ends)
        totals.take(i)
        begun = [r.request.times for r in rows if r.request.times.first_token == r.request.times.first_token]
        found = totals.timings(20.0, 0.5)
        if begun:
            last = max(20.0 if t.finished != t.finished else t.finished for t in begun)
            assert found["decode_s"] == last - min(t.ready for t in begun)
            assert found["prefill_s"] == begun[0].first_token - begun[0].admitted
            tokens = found["tokens_per_s"] * max(found["decode_s"], 1e-9)
            assert tokens == pytest.approx(sum(r.num_tokens for r in rows))
        else:
            assert found["decode_s"] == 0.0
    # What the prefix cache had of a prompt counts from the first piece of one of its choices.
    seen = {i % len(rows) - i % len(rows) % choices for i, *_ in pieces}
    for i in set(range(0, len(rows), choices)) - seen:
        rows[i].request.cached = 0
    assert totals.usage(3) == counted(rows, choices) == usage(rows, choices, 3)
    nothing = Totals(rows, choices, is_new=False)
    nothing.take(0)
    assert nothing.usage()["completion_tokens"] == 0


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
    totals = Totals(rows, 2)
    for i in (5, 1999, 5):
        looked_at.clear()
        totals.take(i)
        totals.usage()
        totals.timings(1.0)
        assert len(looked_at) < 8
