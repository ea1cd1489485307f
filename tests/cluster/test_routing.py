import asyncio

import pytest

from dflash_jax.cluster.routing import LOOKS, Replicas, session_of


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

    def load(self, name, count):
        """Gives a replica ``count`` requests."""
        for _ in range(count):
            next(each for each in self.all if each.name == name).attempts.add(object())


@pytest.mark.parametrize(
    "body", [b'{"model": "m", "messages": [1, 2]}', b'{"prompt":[1, 2]}', b'{"input" : [1, 2]}', b'{"text": [1, 2]}']
)
def test_session_is_the_beginning_of_the_prompt(body):
    assert session_of({}, body).startswith((b" [1, 2]", b"[1, 2]"))


def test_session_of_a_long_prompt_does_not_depend_on_its_end():
    beginning = b'{"prompt": "' + b"a" * 600
    assert session_of({}, beginning + b'b"}') == session_of({}, beginning + b'c"}')
    assert session_of({b"x-session-id": b"me"}, beginning) == b"me"
    assert session_of({}, b"{}") == b""


def test_session_keeps_its_replica_until_that_has_too_many_requests():
    fleet = Fleet("a", "b", "c")
    first = fleet.choose(b"session")
    assert {fleet.choose(b"session") for _ in range(9)} == {first}
    assert len({fleet.choose(b"session %d" % i).name for i in range(30)}) == 3
    fleet.load(first.name, 9)
    assert fleet.choose(b"session") is not first


def test_session_keeps_its_replica_when_another_one_leaves():
    fleet = Fleet("a", "b", "c")
    chosen = {i: fleet.choose(b"session %d" % i).name for i in range(30)}
    fleet.leave("b")
    assert all(fleet.choose(b"session %d" % i).name == name for i, name in chosen.items() if name != "b")
    assert all(fleet.choose(b"session %d" % i).name != "b" for i in chosen)


def test_request_without_a_prompt_goes_to_the_replica_with_the_fewest():
    fleet = Fleet("a", "b")
    fleet.load("a", 2)
    fleet.load("b", 1)
    assert fleet.choose(b"").name == "b"


def test_tried_replica_is_chosen_only_where_there_is_no_other():
    fleet = Fleet("a", "b")
    a, b = fleet.all
    assert fleet.choose(b"s", [a]) is b
    assert fleet.choose(b"s", [b]) is a
    assert fleet.choose(b"s", [a, b]) in (a, b)


def test_lost_replica_ends_its_attempts_and_may_join_again():
    async def check():
        fleet = Fleet("a")
        (replica,) = fleet.all
        task = asyncio.ensure_future(asyncio.Event().wait())
        replica.attempts.add(task)
        fleet.results["a"] = ConnectionRefusedError("nothing listens")
        await fleet._check(replica)
        assert fleet.all == []
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = asyncio.ensure_future(fleet.wait(b"", (), 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        fleet.join("a", "http://a")
        assert (await waiting).name == "a"

    asyncio.run(check())


def test_replica_is_lost_behind_several_looks_without_an_answer():
    async def check():
        fleet = Fleet("a")
        (replica,) = fleet.all
        fleet.results["a"] = OSError("no answer")
        for _ in range(LOOKS - 1):
            await fleet._check(replica)
        fleet.results["a"] = True
        await fleet._check(replica)
        fleet.results["a"] = OSError("no answer")
        for _ in range(LOOKS - 1):
            await fleet._check(replica)
        assert fleet.all == [replica]
        await fleet._check(replica)
        assert fleet.all == []

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
        assert await Fleet().wait(b"", (), 0.01) is None

    asyncio.run(check())
