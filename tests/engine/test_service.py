"""The engine on its thread, under asyncio."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest

from dflash_jax.engine import service
from dflash_jax.engine.request import ReadyMasks
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.errors import EngineError, InputError, QueueFullError, UnavailableError
from tests.engine.mock_runner import engine, expected, next_token, request


async def collect(running: AsyncEngine, wanted) -> list[int]:
    return [t async for event in running.submit(wanted) for t in event.tokens]


# More tokens than any test waits for.
ENDLESS = 10**6


def slow(**options):
    """An engine whose texts do not end, at a pace that can be watched."""
    e = engine(capacity=2 * ENDLESS, **options)
    e.runner.pause, e.runner.ends = 0.002, False
    return e


def text(prompt, new: int) -> list[int]:
    """What `slow` gives."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(main) -> None:
    """To its end, and no thread left."""
    before = threading.enumerate()
    asyncio.run(asyncio.wait_for(main, 600))
    assert not [t for t in threading.enumerate() if t.name == "engine" and t not in before]


def test_300_concurrent_requests_each_get_their_tokens():
    async def main():
        async with AsyncEngine(engine(slots=4)) as running:
            wanted = [request([1 + i % 40, 2 + i % 7], 20) for i in range(300)]
            found = await asyncio.gather(*(collect(running, r) for r in wanted))
            assert found == [expected(r.prompt, 20) for r in wanted]

    run(main())


async def take(batches, tokens: list[int]) -> None:
    """Adds the tokens of all that is left."""
    async for events in batches:
        tokens += [t for event in events for t in event.tokens]


def test_a_slow_consumer_gets_what_has_come_since_at_once(monkeypatch):
    monkeypatch.setattr(service, "MOST_EVENTS", 8)

    async def main():
        async with AsyncEngine(engine(slots=1)) as running:
            running.engine.runner.ends = False
            batches = running.submit_batched(request([7], 3000))
            found = [await anext(batches)]
            while running.open_requests:
                await asyncio.sleep(0)
            found += [events async for events in batches]
            assert max(map(len, found)) == 8
            assert [t for events in found for event in events for t in event.tokens] == text([7], 3000)

    run(main())


def test_an_error_comes_after_the_events_before_it():
    async def main():
        running = AsyncEngine(slow(slots=1)).start()
        batches = running.submit_batched(request([7], ENDLESS))
        first, wanted = await anext(batches), running.engine._scheduler.requests[0]
        while len(wanted.tokens) < 100:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(running.stop)
        tokens = [t for event in first for t in event.tokens]
        with pytest.raises(UnavailableError, match="stopped"):
            await take(batches, tokens)
        assert tokens == wanted.tokens

    run(main())


def test_who_stops_listening_frees_the_slot():
    async def main():
        e = slow(slots=1)
        async with AsyncEngine(e) as running:
            for cancel in (False, True):
                events = running.submit(first := request([3], ENDLESS))
                await anext(events)
                if cancel:
                    task = asyncio.create_task(collect(running, second := request([4], ENDLESS)))
                    await asyncio.sleep(0.01)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    assert second.finish_reason in (None, "abort")
                await events.aclose()
                assert await collect(running, request([5], 9)) == text([5], 9)
                assert first.finish_reason == "abort"
        assert e.running == e.waiting == 0

    run(main())


def test_a_failure_reaches_everyone_and_restart_helps():
    async def main():
        e = slow(slots=2)
        async with AsyncEngine(e) as running:
            wanted = [request([i + 1], ENDLESS) for i in range(5)]
            tasks = [asyncio.create_task(anext_error(running, r)) for r in wanted]
            while e.running + e.waiting < 5:
                await asyncio.sleep(0.001)
            e.runner.fail = True
            errors = await asyncio.gather(*tasks)
            assert all("out of memory" in str(error) for error in errors)
            with pytest.raises(EngineError, match="out of memory"):
                await collect(running, request([1], 2))
            e.runner.fail = False
            running.restart()
            while e.failure:
                await asyncio.sleep(0.01)
            assert await collect(running, request([5], 9)) == text([5], 9)

    async def anext_error(running, wanted):
        async for event in running.submit(wanted):
            if event.error:
                return event.error
        return "no error"

    run(main())


def test_it_restarts_by_itself_as_often_as_it_may():
    async def main():
        e, failures = slow(slots=2), []
        async with AsyncEngine(e, restarts=1, on_failure=lambda: failures.append(e.failure)) as running:
            for attempt in range(2):
                # The device fails while three requests are with the engine, one of them waiting.
                e.runner.fail = False
                wanted = [request([i + 1], ENDLESS) for i in range(3)]
                streams = [running.submit(r) for r in wanted]
                assert (await anext(streams[0])).tokens
                tasks = [asyncio.create_task(anext_error(events)) for events in streams]
                while e.running + e.waiting < 3:
                    await asyncio.sleep(0.001)
                e.runner.fail = True
                assert all("out of memory" in str(error) for error in await asyncio.gather(*tasks))
                if attempt == 0:
                    while e.failure:
                        await asyncio.sleep(0.001)
                    assert not failures
            while not failures:
                await asyncio.sleep(0.001)
            with pytest.raises(UnavailableError, match="out of memory"):
                await collect(running, request([1], 2))
        assert failures == ["RuntimeError: out of memory"]

    async def anext_error(events):
        async for event in events:
            if event.error:
                return event.error
        return "no error"

    run(main())


def test_refusals_come_before_any_event():
    async def main():
        running, gate = AsyncEngine(engine(slots=1, capacity=50, max_queue=2)), threading.Event()
        device = running.engine.runner

        def read(*args, original=device.read):
            gate.wait()
            return original(*args)

        device.read = read
        with pytest.raises(EngineError, match="not running"):
            await collect(running, request([1]))
        running.start()
        with pytest.raises(InputError, match="at most 50 fit"):
            await collect(running, request([1], 50))
        tasks = [asyncio.create_task(collect(running, request([i + 1], 40))) for i in range(12)]
        # None comes to its end before all have been asked.
        await asyncio.sleep(0)
        gate.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [x for x in done if isinstance(x, QueueFullError)]
        assert 0 < len(refused) <= 9
        assert all(isinstance(x, list) for x in done if x not in refused)
        await asyncio.to_thread(running.stop, 1.0)
        with pytest.raises(EngineError, match="not running"):
            await collect(running, request([1]))

    run(main())


def test_who_left_or_has_all_of_its_answer_takes_no_place():
    """Whatever the engine's thread is busy with, and however late an answer is read."""

    async def main():
        running, gate, is_held = AsyncEngine(engine(slots=1, max_queue=0)).start(), threading.Event(), threading.Event()
        device = running.engine.runner

        def read(*args, original=device.read):
            is_held.set()
            gate.wait()
            return original(*args)

        device.read = read
        left = running.submit(request([1], 40))
        reading = asyncio.ensure_future(anext(left))
        await asyncio.to_thread(is_held.wait)
        with pytest.raises(QueueFullError):
            await collect(running, request([2], 5))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await left.aclose()
        unread = running.submit(request([3], 5))
        reading = asyncio.ensure_future(anext(unread))
        await asyncio.sleep(0)
        gate.set()
        await reading
        while running.open_requests:
            await asyncio.sleep(0)
        # Its last event waits.
        assert await collect(running, request([4], 5)) == expected([4], 5)
        tokens = [*reading.result().tokens, *[t async for event in unread for t in event.tokens]]
        assert tokens == expected([3], 5)
        await asyncio.to_thread(running.stop)

    run(main())


def test_several_requests_have_places_all_or_none():
    async def main():
        running, messages = AsyncEngine(slow(slots=2, max_queue=3)).start(), []

        def begun(count):
            requests = [request([i + 1], ENDLESS) for i in range(count)]
            running.begin(requests, lambda request, message: messages.append(request))
            return requests

        with pytest.raises(InputError, match="6 sequences at once do not fit into 2 slots and 3 places in the queue"):
            begun(6)
        running.leave(begun(5))
        one = begun(1)
        with pytest.raises(QueueFullError):
            begun(5)
        four = begun(4)
        # Nothing is left of those that were refused.
        assert running.open_requests == 5
        running.leave(one)
        running.leave(four)
        assert running.open_requests == 0
        running.leave(begun(5))
        await asyncio.to_thread(running.stop)
        with pytest.raises(UnavailableError):
            begun(1)
        assert running.open_requests == 0

    run(main())


def test_stopping_lets_what_runs_end_within_its_limit():
    async def main():
        running = AsyncEngine(engine(slots=2)).start()
        short = asyncio.create_task(collect(running, request([7], 30)))
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(running.stop, 30.0)
        assert await short == expected([7], 30)
        running = AsyncEngine(slow(slots=2)).start()
        endless = asyncio.create_task(collect(running, request([7], ENDLESS)))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(running.stop)
        with pytest.raises(EngineError, match="stopped"):
            await endless

    run(main())


async def refused(running: AsyncEngine) -> None:
    """Returns when the engine takes no more requests."""
    with contextlib.suppress(UnavailableError):
        while True:
            # None of them is begun while the engine takes requests.
            running.check([request([7])])
            await asyncio.sleep(0.001)


class CountedMask(ReadyMasks):
    """Allows everything, and counts how often it is closed."""

    def __init__(self, words: int):
        self.words, self.closed = words, 0

    def take(self, tokens) -> None:
        pass

    def masks(self, drafts) -> np.ndarray:
        return np.full((len(drafts) + 1, self.words), 0xFFFFFFFF, np.uint32)

    def close(self) -> None:
        self.closed += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_masks_are_closed_when_the_thread_ends(is_stopped):
    """Of requests that run, that wait, that the engine does not know yet, and that come too late."""

    async def main():
        e = slow(slots=1, masks=True)
        running, gate, masks = AsyncEngine(e).start(), threading.Event(), []

        def wanted():
            masks.append(CountedMask(e.runner.mask_words))
            return replace(request([7], ENDLESS), mask=masks[-1])

        async def error_of(events) -> EngineError | None:
            try:
                async for _ in events:
                    has_begun.set()
            except EngineError as e:
                return e

        def end():
            gate.wait()
            if not is_stopped:
                raise KeyboardInterrupt

        has_begun = asyncio.Event()
        tasks = [asyncio.create_task(error_of(running.submit(wanted()))) for _ in range(2)]
        await has_begun.wait()
        assert not any(mask.closed for mask in masks)
        ending = asyncio.create_task(running.call(end))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(error_of(running.submit(wanted()))))
        late = running.submit(wanted())
        await asyncio.sleep(0)
        if is_stopped:
            stopping = asyncio.create_task(asyncio.to_thread(running.stop))
            await refused(running)
        gate.set()
        assert all(await asyncio.gather(*tasks))
        if is_stopped:
            await stopping
        assert await error_of(late)
        while running.is_alive:
            await asyncio.sleep(0.001)
        assert all(mask.closed for mask in masks)
        ending.cancel()

    run(main())
