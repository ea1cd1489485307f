"""New weights for the engines of a fleet, one after the other, while requests run."""

import asyncio

import numpy as np
import pytest
from safetensors.numpy import save

from dflash_jax import LLM, SamplingParams
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.server import prepare
from dflash_jax.server.errors import ApiError
from dflash_jax.server.serving import Serving
from tests.cluster.fleets import World, request
from tests.server.conftest import NAME, hosted, started

HEAD = "lm_head.weight"
PARAMS = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def own_hosts():
    """Two engines, each with a model of its own."""
    hosts = {name: hosted(llm, started(llm, prepared=False), NAME) for name in "ab" for llm in (LLM(slots=4),)}
    yield hosts
    for host in hosts.values():
        host.stop_workers()
        host.engine.stop()


async def sequence_of(serving, ids):
    with request():
        (sequence,) = await prepare.sequences(serving, ids, PARAMS, 1)
        await serving.run([sequence])
    return sequence


def test_an_update_loses_no_request_and_texts_say_which_weights_drew_them(own_hosts):
    directory = own_hosts["a"].llm.directory
    tensors = {HEAD: np.roll(np.array(TensorFiles(directory).read(HEAD)), 7, axis=0)}
    data = np.frombuffer(save(tensors), np.uint8)

    async def main():
        world = World(own_hosts)
        serving = Serving(own_hosts["a"].llm, world.fleet, [NAME])
        prompts = [[40 + i, 41, 42, 43] for i in range(8)]
        texts = [asyncio.ensure_future(sequence_of(serving, ids)) for ids in prompts]
        while not all(member.has_submitted for member in world.members):
            await asyncio.sleep(0)
        await world.fleet.manage("update", data, version="new")
        assert world.fleet.state.version == "new"
        sequences = await asyncio.gather(*texts)
        for sequence in sequences:
            spans = sequence.versions
            assert (sequence.num_tokens, sequence.request.finish_reason) == (400, "length")
            assert (spans[0].start, spans[-1].end) == (0, 400)
            assert [span.version for span in spans] in (["default"], ["default", "new"], ["new"])
        after = [await sequence_of(serving, prompts[0]) for _ in range(2)]
        assert {tuple(sequence.token_ids) for sequence in after} == {tuple(after[0].token_ids)}
        assert after[0].versions == [("new", 0, 400)]
        sums = await world.fleet.manage("checksums")
        assert sums == await own_hosts["b"].management.checksums()

        # One that an administrator of "b" alone has updated before: the next version is of both all the same.
        await own_hosts["b"].management.update(tensors=data)
        await world.fleet.manage("update", data)
        assert {host.llm.weight_version for host in own_hosts.values()} == {"2"}
        # An engine that began anew lacks the parts before.
        await world.fleet.manage("begin", selector="target")
        own_hosts["b"].management.__init__(own_hosts["b"].llm, own_hosts["b"].engine, own_hosts["b"].tell_state)
        with pytest.raises(ApiError, match=r"1 of 2 engines have done it.*begin it again"):
            await world.fleet.manage("give", data)
        assert {host.llm.weight_version for host in own_hosts.values()} == {"2"}

        # A pause that refuses requests at all engines.
        await world.fleet.manage("pause", mode="abort")
        assert (world.fleet.state.rest, world.fleet.state.refuses) == ("paused", True)
        with pytest.raises(Exception, match="the server is paused"):
            await sequence_of(serving, prompts[0])
        await world.fleet.manage("resume")
        assert (await sequence_of(serving, prompts[0])).token_ids == after[0].token_ids

    asyncio.run(asyncio.wait_for(main(), 300))
