"""Requests whose engines die: each has the answer that it has without that."""

import asyncio
from dataclasses import dataclass, field
from itertools import count

import pytest

from dflash_jax import LLM, SamplingParams, protocol
from dflash_jax.engine.service import AsyncEngine
from dflash_jax.frontend.sequence import Piece
from dflash_jax.server import prepare
from dflash_jax.server.serving import Serving
from tests.cluster.fleets import World, request
from tests.server.conftest import NAME, hosted


@dataclass
class Text:
    """What a client has got of a sequence."""

    pieces: list[Piece] = field(default_factory=list)
    matched: str | int | None = None
    scores: list[dict] = field(default_factory=list)

    @property
    def whole(self) -> Piece:
        first, *others = self.pieces
        return first.joined(*others)


async def texts(fleet, llm, params, n=1, prompt="def clamp(value, low, high):\n", **options) -> list[Text]:
    serving = Serving(llm, fleet, [NAME])
    with request():
        form = options.pop("form", None)
        if form is not None:
            await fleet.compile(form)
        ids = llm.encode(prompt) if isinstance(prompt, str) else prompt
        sequences = await prepare.sequences(serving, ids, params, n, form=form, **options)
        results = [Text() for _ in sequences]
        async for i, piece in serving.merged(sequences):
            results[i].pieces.append(piece)
        for sequence, result in zip(sequences, results, strict=True):
            assert sequence.token_ids == result.whole.token_ids
            assert sequence.request.times.finished >= sequence.request.times.submitted
            result.matched, result.scores = sequence.matched, sequence.request.prompt_entries
    return results


async def all_cuts(hosts, llm, case) -> tuple[list[Text], list[list[Text]]]:
    """The texts of a case without a cut, and with a cut at each of its records."""
    expected = await texts(World(hosts).fleet, llm, **case)
    broken = []
    for at in count():
        world = World(hosts)
        world.cuts = [at]
        result = await asyncio.wait_for(texts(world.fleet, llm, **case), 120)
        if not world.cut:
            return expected, broken
        broken.append(result)
    raise AssertionError


def test_fronts_tell_each_other_where_requests_are(hosts, llm):
    """Through the engines, which have them."""

    async def main():
        first, second = World(hosts), World(hosts)
        params = SamplingParams(max_tokens=4, temperature=0.0)
        await texts(first.fleet, llm, params, prompt=[7] * 100)
        chosen = [member.engine.name for member in first.members if member.has_submitted]
        for _ in range(4):
            await texts(second.fleet, llm, params, prompt=[7] * 120)
        assert [member.engine.name for member in second.members if member.has_submitted] == chosen

    asyncio.run(main())


FORM = protocol.Form("regex", '"[ab]{3,9}-[0-9]{2,5}"', "regex")
CASES = {
    "greedy": {"params": SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)},
    "four": {"params": SamplingParams(max_tokens=80, temperature=1.0, seed=7, ignore_eos=True), "n": 4},
    "penalties": {
        "params": SamplingParams(max_tokens=70, seed=3, temperature=0.8, frequency_penalty=0.7, repetition_penalty=1.1)
    },
    "logprobs": {"params": SamplingParams(max_tokens=60, temperature=0.0, logprobs=2, prompt_logprobs=1)},
    "stop": {"params": SamplingParams(max_tokens=60, temperature=0.0, stop=["list of the clampting"], min_tokens=30)},
    "grammar": {"params": SamplingParams(max_tokens=30, temperature=1.0, seed=5), "form": FORM},
    "thought": {
        "params": SamplingParams(max_tokens=40, temperature=1.0, seed=1),
        "thought": "open",
        "budget": 9,
    },
    "drafts": {
        "params": SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True),
        "records_drafts": True,
        "block_size": 8,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_the_same_wherever_its_engine_dies(hosts, llm, name):
    expected, broken = asyncio.run(all_cuts(hosts, llm, CASES[name]))
    assert len(broken) >= 4
    for result in broken:
        for got, right in zip(result, expected, strict=True):
            whole, unbroken = got.whole, right.whole
            assert (whole.text, whole.token_ids) == (unbroken.text, unbroken.token_ids)
            assert (whole.ends, whole.starts) == (unbroken.ends, unbroken.starts)
            assert (whole.finish_reason, got.matched) == (unbroken.finish_reason, right.matched)
            assert sum(whole.acceptance_lengths) == len(whole.token_ids)
            assert (name == "stop") <= (whole.finish_reason == "stop")
            if unbroken.logprobs is not None:
                assert [entry["token_id"] for entry in whole.logprobs] == whole.token_ids
                assert [entry["logprob"] for entry in whole.logprobs] == pytest.approx(
                    [entry["logprob"] for entry in unbroken.logprobs], abs=1e-4
                )
            assert [entry["token_id"] for entry in got.scores] == [entry["token_id"] for entry in right.scores]
            if unbroken.proposals is not None:
                assert whole.acceptance_lengths == unbroken.acceptance_lengths
                assert whole.proposals == unbroken.proposals


@pytest.mark.long
def test_a_reproducible_text_is_the_same_to_the_bit():
    llm = LLM(slots=2, block_size=4, reproducible=True, dtype="bfloat16")
    hosts = {name: hosted(llm, AsyncEngine(llm.new_engine(llm.programs, 2, 512)).start(), NAME) for name in "ab"}
    case = {"params": SamplingParams(max_tokens=40, temperature=1.0, seed=3, logprobs=1, ignore_eos=True), "n": 2}
    try:
        expected, broken = asyncio.run(all_cuts(hosts, llm, case))
    finally:
        for host in hosts.values():
            host.stop_workers()
            host.engine.stop()
    assert len(broken) >= 4
    for result in broken:
        for got, right in zip(result, expected, strict=True):
            assert (got.whole.token_ids, got.whole.logprobs) == (right.whole.token_ids, right.whole.logprobs)
