"""Delivery of events to the receivers of their requests."""

import asyncio
import threading

from dflash_jax.engine.request import Event
from dflash_jax.engine.router import EventRouter
from dflash_jax.errors import EngineError
from tests.engine.mock_runner import request


def test_each_event_goes_to_its_own_receiver():
    router, first, second, unknown = EventRouter(), request([1]), request([2]), request([3])
    inboxes = {first: [], second: []}
    for r, inbox in inboxes.items():
        router.add(r, inbox.append)
    events = [Event(r, [i], [1]) for i, r in enumerate((second, first, unknown, second))]
    router.send((event.request, event) for event in events)
    assert inboxes == {first: [events[1]], second: [events[0], events[3]]}
    assert router.remove(first)
    assert not router.remove(first)
    error = EngineError("the engine was stopped")
    router.send_all(error)
    assert inboxes == {first: [events[1]], second: [events[0], events[3], error]}


def test_a_loop_gets_all_its_messages_in_one_call_and_in_its_own_thread():
    router, requests, received = EventRouter(), [request([i + 1]) for i in range(3)], []

    async def main():
        loop, calls = asyncio.get_running_loop(), []
        real, done = loop.call_soon_threadsafe, asyncio.Event()
        loop.call_soon_threadsafe = lambda *args: calls.append(args) or real(*args)

        def receive(message):
            received.append((message, threading.current_thread()))
            if len(received) == 3:
                done.set()

        for r in requests:
            router.add(r, receive, loop)
        thread = threading.Thread(target=router.send, args=([(r, Event(r, [], [])) for r in requests],))
        thread.start()
        await done.wait()
        thread.join()
        assert len(calls) == 1

    asyncio.run(main())
    assert [message.request for message, _ in received] == requests
    assert {thread for _, thread in received} == {threading.current_thread()}


def test_a_closed_loop_does_not_keep_others_from_their_messages():
    router, gone, here, received = EventRouter(), request([1]), request([2]), []
    loop = asyncio.new_event_loop()
    router.add(gone, received.append, loop)
    router.add(here, received.append)
    loop.close()
    router.send_all(error := EngineError("a fault"))
    assert received == [error]
