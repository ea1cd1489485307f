"""Whatever clients do, nothing of theirs stays."""

import asyncio
import contextlib
import gc
import os
import weakref
from collections import Counter

import httpx
import pytest

from tests.server.conftest import wait_until
from tests.server.test_robust import HI

ENDLESS = {"max_tokens": 400, "ignore_eos": True, "stream": True}
REQUESTS = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
    ("/v1/completions", {"prompt": 5.5}),
    ("/v1/completions", {"prompt": "x", **ENDLESS}),
    ("/v1/completions", {"prompt": "x", "n": 3, **ENDLESS}),
    ("/v1/chat/completions", {"messages": HI, "regex": "[a-z]{300}", **ENDLESS}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 4, "store": False}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4, "model": "default"}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4}}),
]


async def attack(url: str, rounds: int) -> Counter:
    """Statuses of all requests, half of whose clients leave: at once, or with the answer's first bytes."""
    seen, room = Counter(), asyncio.Semaphore(32)

    async def one(client: httpx.AsyncClient, i: int) -> None:
        path, body = REQUESTS[i % len(REQUESTS)]
        async with room, client.stream("POST", path, json=body) as answer:
            seen[answer.status_code] += 1
            if i // len(REQUESTS) % 2:
                async for _ in answer.aiter_raw():
                    break
            elif not body.get("stream"):
                await answer.aread()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client, i) for i in range(rounds * len(REQUESTS))))
    return seen


@pytest.fixture
def sequences(quiet, monkeypatch):
    """The server's sequences that are not garbage."""
    kept = weakref.WeakSet()

    def new_sequence(*args, _real=quiet.serving.llm.new_sequence, **options):
        sequence = _real(*args, **options)
        kept.add(sequence)
        return sequence

    monkeypatch.setattr(quiet.serving.llm, "new_sequence", new_sequence)
    return kept


def test_connections_that_stay_open_keep_no_sequences(quiet, sequences):
    with contextlib.ExitStack() as connections:
        for _ in range(12):
            client = connections.enter_context(httpx.Client(base_url=quiet.url, timeout=120))
            body = {"prompt": "x", "max_tokens": 4, "n": 4, "regex": "[a-z]{9}"}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert quiet.idle()
        gc.collect()
        assert len(sequences) <= 8


def test_clients_that_leave_take_everything_with_them(quiet, sequences):
    serving = quiet.serving

    def held() -> tuple[int, ...]:
        """Files but those of workers that are kept, requests, bytes of bodies, sequences that follow a grammar."""
        kept = len(serving.templates._idle) + len(quiet.host.grammar._pool._live)
        sequences = sum(grammar.users for grammar in quiet.host.grammar._cache.values())
        return len(os.listdir("/proc/self/fd")) - kept, serving.in_flight, serving.bodies.nbytes, sequences

    asyncio.run(attack(quiet.url, 2))
    assert quiet.idle()
    assert wait_until(lambda: held()[1:] == (0, 0, 0))
    files = held()[0]
    seen = asyncio.run(attack(quiet.url, 20))
    assert set(seen) == {200, 400}
    assert quiet.idle()
    assert wait_until(lambda: held()[0] <= files and held()[1:] == (0, 0, 0), 60), (files, held())
    assert quiet.host.engine.open_requests == 0
    # Of 200 and more: variables of the engine's thread keep the latest ones until it has others.
    gc.collect()
    assert len(sequences) <= 8
