"""The life of a request, without a server."""

import asyncio

import pytest

from dflash_jax.server.errors import ClientGoneError
from dflash_jax.server.request_context import RequestContext, current, while_connected


async def disconnected() -> dict:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("is_answered", [False, True])
def test_work_ends_with_its_client_unless_the_answer_is_sent(is_answered):
    ends = []

    async def work():
        try:
            for _ in range(9):
                await asyncio.sleep(0)
            ends.append("done")
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def main():
        RequestContext(is_answered=is_answered).enter()
        await while_connected(disconnected, work())

    if is_answered:
        asyncio.run(main())
    else:
        with pytest.raises(ClientGoneError):
            asyncio.run(main())
    assert ends == ["done" if is_answered else "cancelled"]


def test_work_ends_with_its_waiter():
    ends = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(current().client)

    async def main():
        RequestContext(client="a").enter()
        waiter = asyncio.create_task(while_connected(asyncio.Event().wait, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)

    asyncio.run(main())
    assert ends == ["a"]
