"""Clients share a capacity by turns, and one cannot keep the others out."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_context import RequestContext


class Requests:
    """Requests of clients that take from a capacity; ``order`` has those that got something."""

    def __init__(self, capacity: FairCapacity):
        self.capacity, self.order, self.shares = capacity, [], {}

    async def _take(self, client, name, count):
        RequestContext(client=client).enter()
        share = await self.capacity.take(count)
        self.order.append(name)
        self.shares[name] = share

    async def ask(self, client: str, name: str, count: int = 1) -> asyncio.Task:
        task = asyncio.create_task(self._take(client, name, count))
        await settled()
        return task

    async def end(self, name: str) -> None:
        self.shares.pop(name).release()
        await settled()


async def settled():
    for _ in range(3):
        await asyncio.sleep(0)


def run(test, *arguments, **keywords):
    async def main():
        await test(Requests(FairCapacity(*arguments, **keywords)))

    asyncio.run(main())


def test_requests_of_a_client_are_served_in_order_and_small_ones_do_not_overtake():
    async def test(requests):
        await requests.ask("a", "first", 4)
        tasks = [await requests.ask("a", "all", 20), await requests.ask("a", "small", 1)]
        assert requests.order == ["first"]
        await requests.end("first")
        assert requests.order == ["first", "all"]
        # More than half is counted as half.
        assert requests.capacity.used == 5
        await requests.end("all")
        assert requests.order == ["first", "all", "small"]
        await asyncio.gather(*tasks)

    run(test, 10, "memory")


def test_clients_take_turns():
    async def test(requests):
        await requests.ask("a", "a1")
        tasks = [await requests.ask(name[0], name) for name in ("a2", "a3", "b1", "c1", "b2")]
        for _ in tasks:
            await requests.end(requests.order[-1])
        assert requests.order == ["a1", "a2", "b1", "c1", "a3", "b2"]
        await asyncio.gather(*tasks)

    run(test, 1, "a worker")


def test_a_client_has_at_most_half_however_much_is_free():
    async def test(requests):
        tasks = [await requests.ask("a", f"a{i}") for i in range(4)]
        assert requests.order == ["a0", "a1"]
        await requests.ask("b", "b0")
        assert requests.order[-1] == "b0"
        await requests.end("b0")
        assert requests.order == ["a0", "a1", "b0"]
        await requests.end("a1")
        await requests.end("a0")
        assert requests.order == ["a0", "a1", "b0", "a2", "a3"]
        await asyncio.gather(*tasks)

    run(test, 3, "a worker")


def test_where_too_many_wait_the_client_with_most_loses_its_newest():
    async def test(requests):
        await requests.ask("a", "a0")
        tasks = {name: await requests.ask(name[0], name) for name in ("a1", "a2", "b1", "a3")}
        tasks["b2"] = await requests.ask("b", "b2")
        with pytest.raises(ApiError, match="4 requests wait for the lift: try again in 1s") as error:
            await tasks.pop("a3")
        assert error.value.status_code == 503
        # Of two with as many, one of them loses its own newest; a third client still gets in.
        tasks["c1"] = await requests.ask("c", "c1")
        await settled()
        refused = [name for name, task in tasks.items() if task.done()]
        assert refused in (["a2"], ["b2"])
        with pytest.raises(ApiError):
            await tasks.pop(refused[0])
        for _ in tasks:
            await requests.end(requests.order[-1])
        assert sorted(requests.order) == sorted(["a0", *tasks])
        await requests.end(requests.order[-1])
        assert requests.capacity.used == 0

    run(test, 1, "the lift", waiting=4)


def test_none_waits_where_none_may():
    async def test(requests):
        await requests.ask("a", "a0")
        with pytest.raises(ApiError) as error:
            await (await requests.ask("b", "b0"))
        assert error.value.status_code == 503
        await requests.end("a0")
        await requests.ask("b", "b1")
        assert requests.order == ["a0", "b1"]

    run(test, 1, "the lift", waiting=0)


def test_cancelled_requests_leave_nothing():
    async def test(requests):
        await requests.ask("a", "a0", 5)
        await requests.ask("e", "e0", 3)
        waiting, behind = await requests.ask("b", "b0", 5), await requests.ask("c", "c0", 2)
        assert requests.order == ["a0", "e0"]
        waiting.cancel()
        await settled()
        assert requests.order == ["a0", "e0", "c0"]
        # Granted and cancelled before it goes on.
        granted = await requests.ask("d", "d0", 5)
        for name in ("c0", "e0", "a0"):
            requests.shares[name].release()
        granted.cancel()
        await asyncio.gather(waiting, behind, granted, return_exceptions=True)
        assert (requests.order, requests.capacity.used) == (["a0", "e0", "c0"], 0)
        await requests.ask("a", "a1", 5)
        assert requests.order[-1] == "a1"

    run(test, 10, "memory")


def test_a_share_is_returned_once():
    async def test(requests):
        await requests.ask("a", "a0", 5)
        share = requests.shares["a0"]
        with share:
            pass
        share.release()
        assert requests.capacity.used == 0

    run(test, 10, "memory")


def test_what_is_taken_at_once_is_refused_where_it_does_not_fit():
    async def test(requests):
        capacity = requests.capacity
        RequestContext(client="a").enter()
        share = capacity.take_now(5)
        with pytest.raises(ApiError, match="this client's requests take too much of the memory") as error:
            capacity.take_now(1)
        assert error.value.status_code == 429
        RequestContext(client="b").enter()
        capacity.take_now(4)
        RequestContext(client="c").enter()
        with pytest.raises(ApiError, match="other requests take too much of the memory") as error:
            capacity.take_now(2)
        assert error.value.status_code == 503
        share.release()
        capacity.take_now(2)
        assert capacity.used == 6

    run(test, 10, "the memory")


def test_a_turn_lasts_as_long_as_its_thread():
    """A cancelled request's thread goes on, and nothing else runs meanwhile."""

    async def test(requests):
        capacity, began, end = requests.capacity, threading.Event(), threading.Event()

        def work():
            began.set()
            end.wait()

        with ThreadPoolExecutor(2) as executor:
            first = asyncio.create_task(capacity.run(executor, work))
            await asyncio.to_thread(began.wait)
            second = asyncio.create_task(capacity.run(executor, lambda: "second"))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            found = capacity.used, second.done()
            # Before the check, which else would wait for the thread.
            end.set()
            assert found == (1, False)
            assert await second == "second"
        while capacity.used:
            await asyncio.sleep(0)

    run(test, 1, "a worker")


def test_a_client_that_leaves_while_it_is_refused_takes_nothing_from_another():
    async def test(requests):
        held = [await requests.ask(name, name) for name in ("a", "b")]
        waiting = [await requests.ask("evil", f"evil {i}") for i in range(2)]
        waiting[-1].cancel()
        # In the same turn of the loop.
        RequestContext(client="victim").enter()
        share = asyncio.create_task(requests.capacity.take(1))
        await settled()
        for name in ("a", "b", "evil 0"):
            await requests.end(name)
        (await share).release()
        await asyncio.gather(*held, *waiting, return_exceptions=True)
        assert requests.capacity.used == 0
        assert not requests.capacity._waiting

    run(test, 2, "workers", waiting=2)
