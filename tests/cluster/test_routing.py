import asyncio
import contextlib
import json

import pytest

from dflash_jax.cluster import routing
from dflash_jax.cluster.routing import COMMON, KNOWN, LOOKS, PIECES, SAMPLE, Replicas, beginnings_of
from tests.helpers import load_script

script = load_script("cluster/routing.py")
SYSTEM = "You are kind. " * 150


class Fleet(Replicas):
    """Replicas whose looks a test decides: by name, True, False or an exception."""

    def __init__(self, *names):
        super().__init__(self.look_at)
        self.results = dict.fromkeys(names, True)
        for name in names:
            self.join(name, f"http://{name}")

    async def look_at(self, replica):
        if isinstance(result := self.results[replica.name], Exception):
            raise result
        return result

    def named(self, name):
        return next(each for each in self.all if each.name == name)

    def load(self, name, count):
        """Gives a replica ``count`` requests."""
        for _ in range(count):
            self.begin(self.named(name), object())


def prompt(*messages: str, **fields) -> list[int]:
    """Beginnings of a chat."""
    roles = ["system", *["user", "assistant"] * len(messages)]
    turns = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
    return beginnings_of({}, json.dumps({"model": "m", "seed": 1, "messages": turns, **fields}).encode())


def shared(first: list[int], second: list[int]) -> int:
    """How many beginnings two requests share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("name", ["messages", "prompt", "input", "input_ids", "text"])
def test_fields_before_the_prompt_are_not_part_of_its_beginnings(name):
    def of(seed):
        return beginnings_of({}, json.dumps({"seed": seed, name: ["one", "two", "three" * 50, 4]}).encode())

    assert of(1) == of(2) != []


@pytest.mark.parametrize("question", ["What is 1 + 1?", "x" * 3000, 'a "quoted" text,\n and 漢字'])
def test_a_turn_shares_all_of_the_turn_before_and_more_than_other_conversations(question):
    one = prompt(SYSTEM, question)
    two = prompt(SYSTEM, question, "An answer.", "And more?")
    other = prompt(SYSTEM, "Why?" + question, "An answer.", "And more?")
    assert shared(one, two) > shared(two, other) > 10
    # What follows the prompt differs.
    assert len(one) - shared(one, two) <= 1


def test_session_is_the_only_beginning_of_its_requests():
    (first,), (second,) = (beginnings_of({b"x-session-id": b"me"}, body) for body in (b"{}", b'{"prompt": "x"}'))
    assert first == second
    assert beginnings_of({b"x-session-id": b"you"}, b"{}") != [first]
    assert beginnings_of({}, b"") == []


def test_session_stays_at_its_last_replica_however_often_it_had_to_leave():
    fleet = Fleet(*(f"replica-{i}" for i in range(2 * COMMON)))
    session = beginnings_of({b"x-session-id": b"me"}, b"")
    for _ in range(COMMON + 1):
        fleet.load(fleet.choose(session).name, 40)
    assert len({fleet.choose(session) for _ in range(30)}) == 1


def test_large_body_is_looked_at_in_part():
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    assert len(beginnings_of({}, body)) == PIECES
    assert beginnings_of({}, b'"' * 10_000_000) != []


def test_conversation_keeps_its_replica_until_that_has_too_many_requests():
    fleet = Fleet("a", "b", "c")
    first = fleet.choose(prompt(SYSTEM, "question"))
    for turn in range(1, 9):
        talk = ["question", *["answer", "next"] * turn]
        assert fleet.choose(prompt(SYSTEM, *talk)) is first
    fleet.load(first.name, 9)
    assert fleet.choose(prompt(SYSTEM, *talk)) is not first


def test_conversation_that_had_to_leave_its_replica_stays_at_the_next_one():
    fleet = Fleet("a", "b", "c")
    first = fleet.choose(prompt(SYSTEM, "a question"))
    tasks = [object() for _ in range(9)]
    for task in tasks:
        fleet.begin(first, task)
    second = fleet.choose(prompt(SYSTEM, "a question", "an answer", "the next one"))
    for task in tasks:
        fleet.end(first, task)
        fleet.end(first, task)
    assert fleet.choose(prompt(SYSTEM, "a question", "an answer", "the next one", "yes", "so?")) is second is not first


def test_conversation_keeps_its_replica_when_another_one_leaves_and_when_its_own_comes_back():
    fleet = Fleet("a", "b", "c")
    talks = [prompt(f"{i} {SYSTEM}", "question") for i in range(30)]
    chosen = [fleet.choose(talk).name for talk in talks]
    fleet.leave("b")
    again = [fleet.choose(talk).name for talk in talks]
    assert [name for name in again if name == "b"] == []
    assert all(new == old for new, old in zip(again, chosen, strict=True) if old != "b")
    lost = fleet.named(again[0])
    fleet.lose(lost, "the test")
    fleet.join(lost.name, lost.url)
    assert fleet.choose(talks[0]).name == lost.name


def test_conversations_with_a_common_beginning_go_where_there_are_fewest_requests():
    names = [f"replica-{i}" for i in range(2 * COMMON)]
    fleet = Fleet(*names)
    for i in range(3 * len(names)):
        replica = fleet.choose(prompt(SYSTEM, f"question {i}"))
        fleet.begin(replica, object())
    assert {len(each.attempts) for each in fleet.all} == {3}


@pytest.mark.parametrize("seed", [0, 1])
def test_turns_find_their_replica_under_load_and_none_has_more_than_its_bound(seed):
    outcome = script.simulated(seed)
    assert outcome.returned / outcome.turns >= 0.8
    assert outcome.most <= 1


def test_choice_among_a_thousand_replicas_looks_at_few_of_them():
    looks = []

    class Counted(set):
        def __len__(self):
            looks.append(self)
            return super().__len__()

    fleet = Fleet(*(f"replica-{i}" for i in range(1000)))
    for replica in fleet.all:
        replica.attempts = Counted()
    for turns in range(9):
        looks.clear()
        fleet.choose(prompt(SYSTEM, *["question", "answer"] * turns))
        assert 0 < len(looks) <= SAMPLE + COMMON


def test_known_beginnings_are_bounded_and_the_oldest_are_forgotten(monkeypatch):
    assert KNOWN < 10**6
    monkeypatch.setattr(routing, "KNOWN", 200)
    fleet = Fleet("a", "b")
    talk = prompt("The first system prompt " * 9, "question")
    first = fleet.choose(talk)
    for i in range(1000):
        assert fleet.choose(talk) is first
        fleet.choose(prompt(f"{i} {SYSTEM}", "question"))
    assert len(fleet._beginnings._names) == 200
    for i in range(100):
        fleet.choose(prompt(f"{i} other {SYSTEM}", "question"))
    assert list(fleet._beginnings.known(talk)) == []


def test_conversations_with_nothing_in_common_go_where_there_are_fewest_requests():
    """Not to the replica that had the same names of JSON's fields."""
    fleet = Fleet("a", "b")
    for i in range(20):
        replica = fleet.choose(prompt(f"{i} {SYSTEM}", "question" * 20))
        assert len(replica.attempts) == min(len(each.attempts) for each in fleet.all)
        fleet.begin(replica, object())


def test_request_without_a_prompt_goes_to_the_replica_with_the_fewest():
    fleet = Fleet("a", "b")
    fleet.load("a", 2)
    fleet.load("b", 1)
    assert fleet.choose([]).name == "b"


def test_tried_replica_is_chosen_only_where_there_is_no_other():
    fleet = Fleet("a", "b")
    (a, b), talk = fleet.all, prompt(SYSTEM, "question")
    first = fleet.choose(talk)
    other = b if first is a else a
    assert fleet.choose(talk, [first]) is other
    assert fleet.choose(talk, [other]) is first
    assert fleet.choose(talk, [a, b]) in (a, b)


def test_lost_replica_ends_its_attempts_and_may_join_again():
    async def check():
        fleet = Fleet("a")
        (replica,) = fleet.all
        task = asyncio.ensure_future(asyncio.Event().wait())
        fleet.begin(replica, task)
        fleet.results["a"] = ConnectionRefusedError("nothing listens")
        await fleet._check(replica)
        assert fleet.all == []
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = asyncio.ensure_future(fleet.wait([], (), 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        fleet.join("a", "http://a")
        assert (await waiting).name == "a"

    asyncio.run(check())


def test_replica_gets_no_requests_after_a_look_without_an_answer_and_is_lost_after_several():
    async def check():
        fleet = Fleet("a", "b")
        replica = fleet.named("a")
        for misses in (LOOKS - 1, LOOKS):
            fleet.results["a"] = OSError("no answer")
            for _ in range(misses):
                await fleet._check(replica)
                assert [each.name for each in fleet.open] == ["b"]
            assert (replica in fleet.all) == (misses < LOOKS)
            fleet.results["a"] = True
            await fleet._check(replica)
        assert [each.name for each in fleet.open] == ["b"]

    asyncio.run(check())


def test_replica_that_does_not_answer_delays_no_look_at_another(monkeypatch):
    monkeypatch.setattr(routing, "LOOK_S", 0)

    async def check():
        fleet, looks, has_looked = Fleet("a", "b"), {"a": 0, "b": 0}, asyncio.Event()

        async def look(replica):
            looks[replica.name] += 1
            if replica.name == "a":
                await asyncio.Event().wait()
            if looks["b"] == 9:
                has_looked.set()
            return True

        fleet._look = look
        watching = asyncio.ensure_future(fleet.watch())
        async with asyncio.timeout(60):
            await has_looked.wait()
        assert looks["a"] == 1
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(check())


def test_replica_that_is_not_ready_gets_no_requests_until_it_is():
    async def check():
        fleet = Fleet("a", "b")
        fleet.results["a"] = False
        for replica in fleet.all:
            await fleet._check(replica)
        assert [replica.name for replica in fleet.open] == ["b"]
        fleet.results["a"] = True
        await fleet._check(fleet.all[0])
        assert [replica.name for replica in fleet.open] == ["a", "b"]
        assert await Fleet().wait([], (), 0.01) is None

    asyncio.run(check())
