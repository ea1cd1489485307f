"""Engines that die, are replaced, come and go under load: each request has the tokens that it has alone.

The engines have no model: each token follows from all tokens before it, and their runner asserts what they do.
"""

import asyncio
import random

import pytest

from dflash_jax import SamplingParams
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.server import prepare
from dflash_jax.server.serving import Serving
from tests.cluster.fleets import Member, World, request
from tests.engine import mock_runner
from tests.engine.mock_runner import END, VOCAB, expected
from tests.server.conftest import NAME, hosted

REQUESTS, CLIENTS = 200, 24


@pytest.fixture
def mocks(llm):
    """Hosts of three engines without a model."""
    engines = {name: mock_runner.engine(slots=4, seed=i, max_queue=64) for i, name in enumerate("abc")}
    hosts = {name: hosted(llm, AsyncEngine(engine).start(), NAME) for name, engine in engines.items()}
    yield hosts
    for host in hosts.values():
        host.stop_workers()
        host.engine.stop()
        assert host.engine.engine.free_slots == 4


async def client(serving, numbers, answers) -> None:
    """Sends requests one after the other, whose answers it adds."""
    for number in numbers:
        rng = random.Random(number)
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=0.0, stop_token_ids=[END], ignore_eos=True)
        with request():
            sequences = await prepare.sequences(serving, prompt, params, rng.choice([1, 1, 3]))
            tokens = [[] for _ in sequences]
            async for i, piece in serving.merged(sequences):
                tokens[i] += piece.token_ids
        answers.append((tokens, expected(prompt, params.max_tokens)))


async def load(world, llm, disturb) -> list:
    """The answers to all requests, and what they must be, while ``disturb`` runs again and again."""
    answers, numbers = [], iter(range(REQUESTS))
    serving = Serving(llm, world.fleet, [NAME])
    clients = [asyncio.ensure_future(client(serving, numbers, answers)) for _ in range(CLIENTS)]
    disturbing = asyncio.ensure_future(disturb(world, answers))
    await asyncio.wait_for(asyncio.gather(*clients), 300)
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    return answers


async def kill(world, answers):
    """One engine dies after some records, and no other takes its place."""
    world.replaces, world.cuts = False, [200]


async def kill_often(world, answers):
    """Engines die at random records, and others take their places."""
    rng = random.Random(3)
    world.cuts = [rng.randint(50, 80) for _ in range(6)]


async def come_and_go(world, answers):
    """Engines are drained one after the other, and others take their places."""
    while True:
        old = world.members.pop(0)
        before = len(answers)
        world.members.append(Member(world, f"{old.engine.name}'", old.host))
        world.fleet.set_leaving(old.engine, True)
        while old.engine.own or len(answers) < before + 5:
            await asyncio.sleep(0)
        old.kill()


@pytest.mark.parametrize("disturb", [kill, kill_often, come_and_go])
def test_no_request_is_lost_doubled_or_changed(mocks, llm, disturb):
    async def main():
        world = World(mocks)
        answers = await load(world, llm, disturb)
        got = [engine.own for engine in world.fleet.replicas.all]
        return world, answers, got

    world, answers, left = asyncio.run(main())
    assert len(answers) == REQUESTS
    assert [tokens for tokens, right in answers if any(each != right for each in tokens)] == []
    assert set(left) == {0}
    assert any(choice.losses for choice in world.choices) == (disturb is not come_and_go)
    assert world.cut == {kill: 1, kill_often: 6, come_and_go: 0}[disturb]
