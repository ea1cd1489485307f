"""Clients share a capacity by turns, and one cannot keep the others out."""

import asyncio

import pytest

from dflash_jax.server.capacity import FairCapacity
from dflash_jax.server.errors import ApiError
from dflash_jax.server.request_scope import begin_client


class Requests:
    """Requests of clients that take from a capacity; ``order`` has those that got something."""

    def __init__(self, capacity: FairCapacity):
        self.capacity, self.order, self.shares = capacity, [], {}

    async def _take(self, client, name, count):
        begin_client(client)
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
        assert requests.capacity.used == 10
        await requests.end("all")
        assert requests.order == ["first", "all", "small"]
        await asyncio.gather(*tasks)

    run(test, 10, "memory")


def test_clients_take_turns():
    async def test(requests):
        await requests.ask("a", "a1")
        tasks = [
            await requests.ask(*each) for each in (("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2"))
        ]
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


def test_few_wait_and_half_of_them_are_of_one_client():
    async def test(requests):
        await requests.ask("a", "a0")
        waiting = [await requests.ask("a", "a1"), await requests.ask("a", "a2")]
        with pytest.raises(ApiError, match="2 requests of this client wait for the lift: try again later") as error:
            await (await requests.ask("a", "a3"))
        assert error.value.status_code == 429
        waiting += [await requests.ask("b", "b1"), await requests.ask("c", "c1")]
        with pytest.raises(ApiError, match="4 requests wait for the lift: try again later") as error:
            await (await requests.ask("d", "d1"))
        assert error.value.status_code == 503
        for _ in waiting:
            await requests.end(requests.order[-1])
        assert sorted(requests.order) == ["a0", "a1", "a2", "b1", "c1"]
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
        await requests.ask("a", "a0", 6)
        waiting, behind = await requests.ask("b", "b0", 10), await requests.ask("c", "c0", 3)
        assert requests.order == ["a0"]
        waiting.cancel()
        await settled()
        assert requests.order == ["a0", "c0"]
        # Granted and cancelled before it goes on.
        granted = await requests.ask("d", "d0", 10)
        requests.shares["c0"].release()
        requests.shares["a0"].release()
        granted.cancel()
        await asyncio.gather(waiting, behind, granted, return_exceptions=True)
        assert (requests.order, requests.capacity.used) == (["a0", "c0"], 0)
        await requests.ask("a", "a1", 10)
        assert requests.order[-1] == "a1"

    run(test, 10, "memory")


def test_a_share_is_returned_in_parts_and_once():
    async def test(requests):
        await requests.ask("a", "a0", 8)
        share = requests.shares["a0"]
        share.keep(5)
        share.keep(7)
        assert requests.capacity.used == 5
        with share:
            pass
        share.release()
        assert requests.capacity.used == 0

    run(test, 10, "memory")
