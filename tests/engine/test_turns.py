"""Clients take turns: in the queue, in slots, in prefill and in the places of a full queue."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.engine import slots as slots_module
from dflash_jax.engine.request import Times
from dflash_jax.engine.turns import KEPT_ACCOUNTS, Turns
from dflash_jax.errors import QueueFullError
from tests.engine.mock_runner import engine, expected, request, run


def admitted(e) -> list:
    return [entry[2] for entry in e.runner.log if entry[0] == "admit"]


def submit(e, *requests) -> None:
    for r in requests:
        e.submit(r)


def test_a_second_client_is_next_however_many_one_has_sent():
    e = engine(slots=1)
    many = [request(range(1, 30), 5, client="a") for _ in range(20)]
    submit(e, *many)
    e.step()
    one = request([1, 2], 3, client="b")
    e.submit(one)
    run(e)
    assert admitted(e)[:3] == [many[0], one, many[1]]
    assert all(r.tokens == expected(r.prompt, 5) for r in many)


def test_clients_get_tokens_in_equal_parts_and_one_client_by_priority_and_arrival():
    e = engine(slots=1, trusts_priority=False)
    large = [request(range(1, 61), 5, client="large") for _ in range(4)]
    small = [request([i + 1, 2], 5, client="small", priority=-i) for i in range(40)]
    submit(e, *large, *small)
    run(e)
    order = admitted(e)
    # 60 tokens of a prompt and 5 new ones count as much as 6 prompts of 2 with 5 new ones.
    places = [order.index(r) for r in large]
    assert places[0] == 0
    assert all(5 <= b - a <= 8 for a, b in pairwise(places))
    assert [r for r in order if r.client == "small"] == small[::-1]


def test_an_idle_client_saves_nothing_up():
    turns = Turns()
    turns.begin("idle")
    turns.end("idle")
    turns.begin("busy")
    turns.spend("busy", 1000)
    turns.begin("idle")
    assert turns.served("idle") == 1000
    turns.spend("idle", 50)
    turns.end("idle")
    turns.begin("idle")
    # Nor does it forget what it had more than others.
    assert turns.served("idle") == 1050


def test_accounts_of_idle_clients_are_bounded_and_the_oldest_go_first():
    turns = Turns()
    turns.begin("busy")
    for i in range(KEPT_ACCOUNTS + 10):
        turns.begin(i)
        turns.spend(i, 5)
        turns.end(i)
    assert len(turns._served) == KEPT_ACCOUNTS + 1
    turns.begin(KEPT_ACCOUNTS + 9)
    assert turns.served(KEPT_ACCOUNTS + 9) == 5
    turns.begin(0)
    assert turns.served(0) == 0
    for client in ("busy", 0, KEPT_ACCOUNTS + 9):
        turns.end(client)
    # When all are idle, all are equal again.
    turns.begin(KEPT_ACCOUNTS + 9)
    assert turns.served(KEPT_ACCOUNTS + 9) == 0


@pytest.mark.parametrize("is_trusted", [True, False])
def test_priority_counts_across_clients_only_where_it_is_trusted(is_trusted):
    e = engine(slots=1, trusts_priority=is_trusted)
    first = request([1, 2], 3, client="a", priority=-9)
    pushing = [request(range(1, 40), 3, client="a", priority=-9) for _ in range(3)]
    modest = request([1, 2], 3, client="b")
    submit(e, first, *pushing, modest)
    run(e)
    assert admitted(e).index(modest) == (4 if is_trusted else 1)


def test_a_prompt_of_a_second_client_is_prefilled_after_one_chunk_of_the_first():
    e = engine(slots=8, max_num_batched_tokens=16)
    many = [request(range(i, 400 + i), 3, client="a") for i in range(1, 7)]
    submit(e, *many)
    for _ in range(3):
        e.step()
    ones = [request(range(20 + i, 31 + i), 3, client="b") for i in range(2)]
    submit(e, *ones)
    for n in (0, 1, 1, 2):
        e.step()
        assert sum(r.prefilled > 0 for r in ones) == n
    run(e)
    assert all(r.tokens == expected(r.prompt, 3) for r in (*many, *ones))


def slots_of(e) -> dict:
    held = {}
    for r in e._slots._by_slot.values():
        held[r.client] = held.get(r.client, 0) + 1
    return held


@pytest.mark.parametrize(
    ("options", "taken"),
    [({"recomputes_exactly": True, "swap_bytes": 0}, 2), ({}, 2), ({"swap_bytes": 0}, 0)],
    ids=["computed again", "copied", "no memory"],
)
def test_a_client_that_waits_gets_a_slot_of_the_one_with_most(options, taken, monkeypatch):
    """By computing tokens again where that is exact, or by a copy where the host has memory; texts stay the same."""
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    e = engine(slots=4, **options)
    e.runner.ends = False
    many = [request([i + 1, 7], 300, client="a") for i in range(6)]
    submit(e, *many)
    for _ in range(3):
        e.step()
    others = [request([50 + i, 7], 30, client="b") for i in range(3)]
    submit(e, *others)
    for _ in range(4):
        e.step()
    assert slots_of(e).get("b", 0) == taken
    run(e)
    for r in (*many, *others):
        assert r.tokens == expected(r.prompt, r.params.max_tokens, False)
    assert e.statistics.preemptions == taken
    is_copied = [entry[0] for entry in e.runner.log].count("restore")
    assert is_copied == (0 if "recomputes_exactly" in options else taken)


def test_no_slot_is_taken_from_a_client_that_has_its_share(monkeypatch):
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    e = engine(slots=3, recomputes_exactly=True)
    submit(e, *(request([i + 1, 7], 50, client="abc"[i % 3]) for i in range(9)))
    run(e)
    assert e.statistics.preemptions == 0


def test_a_full_queue_has_room_for_each_clients_share():
    e = engine(slots=2, max_queue=6)
    submit(e, *(request([1, 2], client="a") for _ in range(8)))
    with pytest.raises(QueueFullError, match=r"6 requests are waiting: 6 may"):
        e.submit(request([1, 2], client="a"))
    submit(e, *(request([1, 2], client="b") for _ in range(4)))
    with pytest.raises(QueueFullError, match=r"10 requests .*: 6 may; this client has 4 of 12, and its share is 4"):
        e.submit(request([1, 2], client="b"))
    submit(
        e, *(request([1, 2], client="c") for _ in range(2)), request([1, 2], client="d"), request([1, 2], client="d")
    )
    with pytest.raises(QueueFullError):
        e.submit(request([1, 2], client="e"))
    run(e)


# What these continue does not end before 239 tokens.
LONG = [[i + 1, 7] for i in (2, 12, 13, 14, 16)]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_no_slot_is_given_up_that_would_go_back_to_its_request(is_trusted, monkeypatch):
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    e = engine(slots=4, recomputes_exactly=True, trusts_priority=is_trusted)
    if is_trusted:
        late = request(LONG[4], 10, client="b", priority=5)
    else:
        # A client that was served more than the other.
        first = request([1, 2], 3, client="b")
        submit(e, request(LONG[4], 239, client="c"), first)
        e._turns.spend("b", 10_000)
        while first.finish_reason is None:
            e.step()
        late = request(LONG[4], 10, client="b")
    many = [request(prompt, 239, client="a") for prompt in LONG[: 4 if is_trusted else 3]]
    submit(e, *many)
    for _ in range(3):
        e.step()
    e.submit(late)
    for _ in range(4):
        e.step()
    assert any(r.finish_reason is None for r in many)
    assert e.statistics.preemptions == 0
    run(e)
    assert all(r.tokens == expected(r.prompt, r.params.max_tokens) for r in (*many, late))


def test_no_slot_is_given_up_for_a_prompt_whose_pages_do_not_fit(monkeypatch):
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    e = engine(slots=4, recomputes_exactly=True, pages=280)
    many = [request(prompt, 239, client="a") for prompt in LONG[:4]]
    submit(e, *many)
    for _ in range(3):
        e.step()
    e.submit(request(range(1, 1100), 3, client="b"))
    for _ in range(3):
        e.step()
    assert any(r.finish_reason is None for r in many)
    assert e.statistics.preemptions == 0
    run(e)


def test_a_stream_of_new_clients_does_not_keep_a_long_prompt_out():
    e = engine(slots=8, max_num_batched_tokens=16)
    long = request(range(1, 200), 3, client="a")
    e.submit(long)
    for i in range(60):
        e.submit(request(range(1 + i, 16 + i), 1, client=i))
        e.step()
    # An eighth of the chunks, as many as there are slots.
    assert long.prefilled >= 16 * 60 / 8 - 16
    run(e)


def test_a_step_of_many_chunks_gives_them_by_turns():
    e = engine(slots=8, max_num_batched_tokens=64, trusts_priority=False)
    many = [request(range(i, 150 + i), 3, client="a") for i in range(1, 7)]
    one = request(range(30, 180), 3, client="b")
    submit(e, *many, one)
    e.step()
    assert one.prefilled == 32
    run(e)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 9)), max_size=40), st.integers(0, 15))
def test_every_request_ends_whatever_clients_send_and_abort(sent, seed):
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
        check_ends(sent, seed, rng)


def check_ends(sent, seed: int, rng: random.Random) -> None:
    options = {"recomputes_exactly": seed % 4 > 1, "swap_bytes": 200 if seed % 8 > 3 else None}
    e = engine(slots=2, trusts_priority=bool(seed % 2), pages=12, **options)
    requests = [request(range(1, 1 + 3 * n), n, client=client, priority=priority) for client, priority, n in sent]
    for r in requests:
        e.submit(r)
        if rng.random() < 0.2:
            e.abort(rng.choice(requests[: requests.index(r) + 1]))
        if rng.random() < 0.5:
            e.step()
    run(e)
    assert all(r.finish_reason for r in requests)
    assert all(r.tokens == expected(r.prompt, r.params.max_tokens) for r in requests if r.finish_reason != "abort")
    assert not e._turns.active
    assert not len(e._waiting)


def test_what_is_still_prefilled_is_not_copied_out(monkeypatch):
    """A request that goes on after tokens has some before its prompt is in the caches."""
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    e = engine(slots=2, prefill_sizes=(4,), max_num_batched_tokens=4, max_decode_batch=1)
    e.runner.ends = False
    many = [request([1, 7], 300, client="a"), request(range(1, 200), 60, client="a")]
    many[1].tokens[:] = expected(many[1].prompt, 20, False)
    submit(e, *many)
    for _ in range(4):
        e.step()
    one = request([3, 7], 5, client="b")
    e.submit(one)
    run(e)
    assert e.failure is None
    assert all(r.tokens == expected(r.prompt, r.params.max_tokens, False) for r in (*many, one))


def test_a_host_without_memory_is_not_asked_again_in_each_step(monkeypatch):
    e = engine(slots=2)
    e.runner.ends, e.runner.has_memory = False, False
    many = [request([i, 7], 400, client="a") for i in (1, 2)]
    submit(e, *many)
    while not all(r.tokens for r in many):
        e.step()
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 1e6)
    e._slots.waiting.push(one := request([3, 7], 5, client="b"))
    one.times = Times(submitted=-1e9)
    e._live[one] = None
    e._turns.begin(one.client)
    copies, swap_out = [], e.pages.swap_out
    monkeypatch.setattr(e.pages, "swap_out", lambda *args: copies.append(args) or swap_out(*args))
    run(e)
    assert len(copies) == 1
    assert all(r.tokens == expected(r.prompt, r.params.max_tokens, False) for r in (*many, one))


def test_a_slot_that_is_free_when_all_results_are_read_is_taken(monkeypatch):
    """A dispatch under way may end a request: then no other one gives up its slot."""
    monkeypatch.setattr(slots_module, "SLOT_WAIT_S", 0.0)
    copied = 0
    for seed in range(40):
        rng = random.Random(seed)
        e = engine(slots=rng.choice([2, 3, 4]), prefill_sizes=(4, 16), max_num_batched_tokens=64)
        requests = [
            request(range(1, rng.randrange(2, 20)), rng.randrange(5, 150), client=rng.choice("aaabcd"))
            for _ in range(20)
        ]
        free, copy_out = [], e._slots.copy_out
        e._slots.copy_out = lambda r, e=e, free=free, copy_out=copy_out: free.append(len(e._slots.free)) or copy_out(r)
        for r in requests:
            e.submit(r)
            while rng.random() < 0.7:
                e.step()
        run(e)
        assert not any(free)
        copied += len(free)
        assert all(r.tokens == expected(r.prompt, r.params.max_tokens) for r in requests)
    assert copied
