import asyncio

import pytest

from dflash_jax.frontend.concurrency import gather_or_cancel


def test_results_are_in_order():
    async def work(turns, value):
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert asyncio.run(gather_or_cancel([work(3, "a"), work(1, "b")])) == ["a", "b"]


def test_the_first_exception_ends_the_rest_before_it_is_raised():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("first")

    async def main():
        with pytest.raises(ValueError, match="first"):
            await gather_or_cancel([wait(), fail(), wait()])
        assert ended == [True, True]

    asyncio.run(main())
