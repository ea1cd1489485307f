import asyncio
import os
import subprocess
import sys

import pytest

from dflash_jax.cluster import routing
from dflash_jax.cluster.routing import COMMON, KNOWN, PIECE, PIECES, SAMPLE, Replica, Replicas, beginnings_of, session
from tests.helpers import load_script

script = load_script("cluster/routing.py")
# A token that opens a message.
OPEN = 10**6
SYSTEM = list(range(1000, 1300))


def fleet_of(*names) -> Replicas:
    fleet = Replicas()
    for name in names:
        fleet.join(Replica(name, is_open=True))
    return fleet


def named(fleet, name):
    return next(each for each in fleet.all if each.name == name)


def tokens(text) -> list[int]:
    """A token for each character."""
    return text if isinstance(text, list) else list(map(ord, text))


def prompt(*messages) -> list[int]:
    """Beginnings of a chat, whose answer begins with a message's opening token."""
    ids = [token for message in messages for token in (OPEN, 1, *tokens(message), 2)]
    return beginnings_of([*ids, OPEN, 1, 3], frozenset((OPEN,)))


def shared(first: list[int], second: list[int]) -> int:
    """How many beginnings two requests share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("question", ["1", "What is 1 + 1?", "x" * 3000])
@pytest.mark.parametrize("size", [0, 1, 17, 300])
def test_a_turn_shares_all_of_the_turn_before_and_more_than_other_conversations(question, size):
    system = SYSTEM[:size]
    one = prompt(system, question)
    two = prompt(system, question, "An answer.", "And more?")
    other = prompt(system, "2" + question, "An answer.", "And more?")
    # The end of a prompt is no beginning of the next one, and nor are a few tokens.
    assert shared(one, two) == len(one) - 1 or len(one) <= 1
    if len(one) > 1:
        assert shared(one, two) > shared(two, other)


def test_without_tokens_that_open_messages_pieces_are_of_one_size():
    ids = list(range(1000))
    one, two = beginnings_of(ids[:500]), beginnings_of(ids)
    assert shared(one, two) == 500 // PIECE
    assert beginnings_of([]) == []


def test_beginnings_are_the_same_in_every_process():
    code = "from dflash_jax.cluster.routing import beginnings_of, session; "
    code += "print(beginnings_of([*range(100)], frozenset((50,))), session('me'))"
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    }
    assert said == {f"{beginnings_of([*range(100)], frozenset((50,)))} {session('me')}\n".encode()}


def test_session_is_the_only_beginning_of_its_requests():
    assert session("me") == session("me")
    assert len(session("me")) == 1
    assert session("you") != session("me")


def test_session_stays_at_its_last_replica_however_often_it_had_to_leave():
    fleet = fleet_of(*(f"replica-{i}" for i in range(2 * COMMON)))
    for _ in range(COMMON + 1):
        fleet.count(fleet.choose(session("me")), 40)
    assert len({fleet.choose(session("me")) for _ in range(30)}) == 1


def test_long_prompt_is_looked_at_in_part():
    assert len(beginnings_of([7] * 10**6)) == PIECES
    assert len(beginnings_of([OPEN] * 10**6, frozenset((OPEN,)))) == PIECES - routing.USELESS


def test_conversation_keeps_its_replica_until_that_has_too_many_requests():
    fleet = fleet_of("a", "b", "c")
    first = fleet.choose(prompt(SYSTEM, "question"))
    for turn in range(1, 9):
        talk = ["question", *["answer", "next"] * turn]
        assert fleet.choose(prompt(SYSTEM, *talk)) is first
    fleet.count(first, 9)
    assert fleet.choose(prompt(SYSTEM, *talk)) is not first


def test_conversation_that_had_to_leave_its_replica_stays_at_the_next_one():
    fleet = fleet_of("a", "b", "c")
    first = fleet.choose(prompt(SYSTEM, "a question"))
    fleet.count(first, 9)
    second = fleet.choose(prompt(SYSTEM, "a question", "an answer", "the next one"))
    fleet.count(first, -9)
    assert fleet.choose(prompt(SYSTEM, "a question", "an answer", "the next one", "yes", "so?")) is second is not first


def test_conversation_keeps_its_replica_when_another_one_leaves_and_when_its_own_comes_back():
    fleet = fleet_of("a", "b", "c")
    talks = [prompt([i, *SYSTEM], "question") for i in range(30)]
    chosen = [fleet.choose(talk).name for talk in talks]
    fleet.set_open(named(fleet, "b"), False)
    again = [fleet.choose(talk).name for talk in talks]
    assert [name for name in again if name == "b"] == []
    assert all(new == old for new, old in zip(again, chosen, strict=True) if old != "b")
    lost = named(fleet, again[0])
    fleet.remove(lost)
    fleet.join(Replica(lost.name, is_open=True))
    assert fleet.choose(talks[0]).name == lost.name


def test_conversations_with_a_common_beginning_go_where_there_are_fewest_requests():
    names = [f"replica-{i}" for i in range(2 * COMMON)]
    fleet = fleet_of(*names)
    for i in range(3 * len(names)):
        fleet.count(fleet.choose(prompt(SYSTEM, f"{i} is the question")), 1)
    assert {each.requests for each in fleet.all} == {3}


@pytest.mark.parametrize("seed", [0, 1])
def test_turns_find_their_replica_under_load_and_none_has_more_than_its_bound(seed):
    outcome = script.simulated(seed)
    assert outcome.returned / outcome.turns >= 0.8
    assert outcome.most <= 1


def test_choice_among_a_thousand_replicas_looks_at_few_of_them():
    looks = []

    class Counted(Replica):
        @property
        def requests(self):
            looks.append(self)
            return 0

    fleet = Replicas()
    for i in range(1000):
        fleet.join(Counted(f"replica-{i}", is_open=True))
    for turns in range(9):
        looks.clear()
        fleet.choose(prompt(SYSTEM, *["question", "answer"] * turns))
        assert 0 < len(looks) <= SAMPLE + COMMON


def test_known_beginnings_are_bounded_and_the_oldest_are_forgotten(monkeypatch):
    assert KNOWN < 10**6
    monkeypatch.setattr(routing, "KNOWN", 200)
    fleet = fleet_of("a", "b")
    talk = prompt(SYSTEM[:100], "question")
    first = fleet.choose(talk)
    for i in range(1000):
        assert fleet.choose(talk) is first
        fleet.choose(prompt([i, *SYSTEM], "question"))
    assert len(fleet._names) == 200
    for i in range(100):
        fleet.choose(prompt([i, 5, *SYSTEM], "question"))
    assert list(fleet._known(talk)) == []


def test_conversations_with_nothing_in_common_go_where_there_are_fewest_requests():
    fleet = fleet_of("a", "b")
    for i in range(20):
        replica = fleet.choose(prompt([i, *SYSTEM], "question" * 20))
        assert replica.requests == min(each.requests for each in fleet.all)
        fleet.count(replica, 1)


def test_request_without_a_prompt_goes_to_the_replica_with_the_fewest():
    fleet = fleet_of("a", "b")
    fleet.count(named(fleet, "a"), 2)
    fleet.count(named(fleet, "b"), 1)
    assert fleet.choose([]).name == "b"


def test_requests_of_other_fronts_count():
    fleet = fleet_of("a", "b")
    a, b = fleet.all
    fleet.count(a, 3)
    fleet.observe(a, 3)
    fleet.observe(b, 5)
    assert (a.requests, b.requests) == (3, 5)
    assert fleet.choose([]) is a
    fleet.count(b, 2)
    fleet.observe(b, 2)
    assert b.requests == 2
    fleet.observe(b, 7)
    fleet.remove(b)
    # What ends meanwhile is not counted twice.
    fleet.count(b, -2)
    assert (b.requests, fleet._requests) == (0, 3)


def test_tried_replica_is_chosen_only_where_there_is_no_other():
    fleet = fleet_of("a", "b")
    (a, b), talk = fleet.all, prompt(SYSTEM, "question")
    first = fleet.choose(talk)
    other = b if first is a else a
    assert fleet.choose(talk, [first]) is other
    assert fleet.choose(talk, [other]) is first
    assert fleet.choose(talk, [a, b]) in (a, b)


def test_request_waits_for_a_replica():
    async def check():
        fleet = fleet_of()
        assert await fleet.wait([], (), 0.01) is None
        assert not fleet.has_begun
        waiting = asyncio.ensure_future(fleet.wait([], (), 60))
        fleet.join(Replica("a"))
        await asyncio.sleep(0)
        assert not waiting.done()
        fleet.set_open(named(fleet, "a"), True)
        assert (await waiting).name == "a"
        assert fleet.has_begun

    asyncio.run(check())
