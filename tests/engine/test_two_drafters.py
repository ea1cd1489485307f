"""A DFlash drafter and an MTP head at once: the text of each request alone, and both contexts whichever one drafts.

With masks: tests/integration/test_bundled_drafters.py; on a mesh: tests/mesh/cases.py.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding import speculative
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.state import Settings, map_caches
from dflash_jax.engine import model_runner
from dflash_jax.engine.config import NO_DRAFTER, EngineConfig, Speculation, speculations_of
from dflash_jax.engine.dispatch import Dispatch, round_settings
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import plan_memory
from dflash_jax.engine.request import Request
from dflash_jax.engine.slots import Slots
from dflash_jax.engine.warm_up_tasks import AllAllowed
from dflash_jax.models.drafter import DraftVocabulary
from dflash_jax.models.drafting import proposing, together
from dflash_jax.ops import cache
from dflash_jax.sampling_params import SamplingParams
from tests import tiny
from tests.engine import mock_runner
from tests.engine.load import CAPACITY, MARKER, alone, engine_for, some_requests, under_load
from tests.mtp_context import assert_contexts
from tests.tiny import VOCAB
from tools.token_runs import Remembering

SPECULATIONS = speculations_of((8,), (4,))
ALONE = Speculation(1, 0, is_alone=True)
DRAFTING = [spec for spec in SPECULATIONS if spec.block_size > 1 and not spec.is_alone]
PARAMS = SamplingParams(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, frequency_penalty=0.0,
    presence_penalty=0.0, seed=0, max_tokens=6,
)  # fmt: skip
propose = jax.jit(speculative.propose, static_argnames="settings")


@pytest.fixture(scope="module")
def case():
    """(target, drafter, head, requests, each alone, programs with both, each right half the time).

    Each drafts from a shortlist of its own.
    """
    target = tiny.target("da", moe="1")
    drafter, head, wanted = tiny.drafter(target), tiny.head(target), some_requests(0, 16, VOCAB)
    for first, each in enumerate((drafter, head)):
        shortlist = jnp.arange(first, VOCAB, 2)
        each.vocabulary = DraftVocabulary(shortlist, target.head_rows(shortlist), target.backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (4,))
        expected = alone(engine_for(Executables(target, None), (1,), slots=4, prefix_bytes=0), wanted)
        known = [request for request, _ in expected]
        both = [
            Remembering.of(each, known, wide=8, capacity=CAPACITY, seed=i) for i, each in enumerate([drafter, head])
        ]
        yield target, drafter, head, wanted, expected, Executables(target, together(both))


def test_under_load_texts_are_those_alone_and_both_contexts_are_complete(case, monkeypatch):
    """Any round at any time, those without one or all drafters too; requests are swapped to the host and back."""
    target, drafter, head, wanted, expected, programs = case
    monkeypatch.setattr(cache, "PAGE_SIZE", 16)
    # Else there is one sequence at a time where a drafter is left out.
    monkeypatch.setattr(Speculation, "may_run", lambda self, batch_size: True)
    # Requests are admitted without regard to the pages that they will need.
    monkeypatch.setattr(Slots, "_need", lambda self, request: self.pages.need(1))
    engine = engine_for(programs, slots=4, speculations=SPECULATIONS, pages=(9, 9))
    rng, used = random.Random(0), Counter()

    def choose(batch_size, acceptances, allowed=SPECULATIONS, *_) -> Speculation:
        """One that was used the least."""
        spec = min(allowed, key=lambda each: (used[each], rng.random()))
        used[spec] += 1
        return spec

    engine.policy.choose = choose
    under_load(engine, target, wanted, expected, 60, seed=1)
    assert {spec for _, spec in engine.statistics.dispatches} == {*SPECULATIONS}
    assert engine.statistics.cached_tokens > 0
    assert (swaps := engine.statistics.preemptions) > 0
    assert max(yielded for _, _, yielded in engine.statistics.rounds) > 4, "no long draft was accepted"
    # Nothing comes behind this one, so that its slot has its pages still.
    engine.policy.choose = lambda *_: SPECULATIONS[-1]
    swapped = Request(**wanted[max(range(len(wanted)), key=lambda i: len(expected[i][0].tokens))])
    engine.submit(swapped)
    while not swapped.tokens:
        engine.step()
    engine._slots.swap_out(swapped)
    # Else it may find its pages as it left them.
    stale = map_caches(lambda each: replace(each, v=jnp.full_like(each.v, 9.0)), engine.runner.state)
    engine.runner.state = stale
    # One dispatch without the head, whose context then starts behind it. Dispatches have two rounds.
    rounds, engine.policy.cost = iter([ALONE]), lambda *_: 1.0
    engine.policy.choose = lambda *_: next(rounds, SPECULATIONS[-1])
    while engine.has_work:
        engine.step()
    assert engine.statistics.preemptions > swaps
    state = jax.device_get(engine.runner.state)
    assert 0 == state.draft_start[swapped.slot, 0] < state.draft_start[swapped.slot, 1]
    assert all(swapped.slot in rows for rows in assert_contexts(target, (drafter, head), state))


@pytest.mark.parametrize("drafting", [0, 1])
def test_a_prompt_from_the_prefix_cache_has_both_contexts(case, drafting, monkeypatch):
    """Of several prefixes, computed while one of both drafted."""
    target, drafter, head, _, _, programs = case
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (1,))
    engine = engine_for(programs, slots=1, speculations=SPECULATIONS)
    engine.policy.choose = lambda *_: next(s for s in DRAFTING if s.drafter == drafting)
    part = [MARKER, *range(2, 20)]
    for prompt in ([*part, *part, *part], [*part, *part, *part[:9]]):
        engine.submit(Request(prompt, PARAMS))
        while engine.has_work:
            engine.step()
        state = jax.device_get(engine.runner.state)
        assert state.draft_start.tolist() == [[0, 0]]
        assert assert_contexts(target, (drafter, head), state) == [[0], [0]]
    assert engine.statistics.cached_tokens == 2 * len(part)
    assert {spec.drafter for _, spec in engine.statistics.dispatches} == {drafting}


def test_a_drafter_reads_nothing_before_the_start_of_its_context(case):
    """Of each drafter, what is in its caches is spoiled; of the second, all of it is before the start."""
    target, drafter, head, *_ = case
    both, settings = together([drafter, head]), Settings(block_size=8)
    state = init_state(target, both, [[2, 3, 4, 7], [5, 6, 8]], 20, settings=settings, sampling=tiny.sampling(2))
    state = tiny.fast.prefill(target, both, state)
    state = replace(state, draft_start=state.draft_start.at[:, 1].set(state.num_cached))
    spoiled = map_caches(lambda each: replace(each, v=jnp.full_like(each.v, 9.0)), state.draft)
    for i, is_read in enumerate((True, False)):
        other = tuple(spoiled[j] if j == i else draft for j, draft in enumerate(state.draft))
        states = state, replace(state, draft=other)
        drafts = [np.asarray(propose(target, proposing(both, i), each, settings)) for each in states]
        assert (drafts[0] != drafts[1]).any() == is_read


def test_contexts_that_a_round_with_masks_leaves_out_start_behind_it(case, monkeypatch):
    *_, programs = case
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (1,))
    runner = engine_for(programs, slots=1, speculations=SPECULATIONS).runner
    for speculation, starts in ((Speculation(1), [0, 0]), (NO_DRAFTER, [4, 4])):
        runner.admit(0, Request([2, 3, 4, 5], PARAMS))
        runner.wait(runner.prefill([0], [3], 16))
        runner.decode_masked(Dispatch((0,), (1,), 1, speculation, 1), AllAllowed(runner.mask_words))
        assert runner.state.draft_start.tolist() == [starts]


class Blocks(AllAllowed):
    """Remembers the blocks of its rounds."""

    def __init__(self, words: int):
        super().__init__(words)
        self.asked: list[list] = []

    def ask(self, blocks):
        self.asked.append(blocks.tolist())
        return super().ask(blocks)


@pytest.mark.parametrize("change", ["none", "pages", "another request", "another dispatch"])
def test_a_proposal_for_the_next_round_is_taken_where_slots_are_as_they_were(case, monkeypatch, change):
    *_, programs = case
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (1,))
    engine = engine_for(programs, slots=1, speculations=SPECULATIONS)
    runner, speculation = engine.runner, engine.config.masked_speculations[-1]
    dispatch, masks = Dispatch((0,), (4,), 1, speculation, 1), Blocks(runner.mask_words)
    assert engine.pages.cover(0, 3, CAPACITY)
    engine.pages.send()
    runner.admit(0, Request([2, 3, 4, 5], PARAMS))
    runner.prefill([0], [3], 16)
    runner.decode_masked(dispatch, masks)
    runner.propose_next(dispatch)
    if change == "pages":
        runner.set_tables(*(table.copy() for table in engine.pages._tables))
    elif change == "another request":
        runner.admit(0, Request([6, 5, 4], PARAMS))
        runner.prefill([0], [2], 16)
    elif change == "another dispatch":
        dispatch = replace(dispatch, block_sizes=(2,))
    expected = runner.read_blocks(runner.propose(dispatch)).tolist()
    proposed = []
    monkeypatch.setattr(
        runner, "propose", lambda each: proposed.append(each) or model_runner.ModelRunner.propose(runner, each)
    )
    runner.decode_masked(dispatch, masks)
    assert masks.asked[1] == expected
    assert proposed == [dispatch] * (change.startswith("another"))


def test_each_drafter_drafts_from_its_own_shortlist(case):
    target, drafter, head, *_ = case
    both = together([drafter, head])
    settings = Settings(block_size=8)
    state = init_state(target, both, [[2, 3, 4], [5], [6, 7]], 20, settings=settings, sampling=tiny.sampling(3))
    state = tiny.fast.prefill(target, both, state)
    drafted = [np.asarray(propose(target, proposing(both, i), state, settings))[:, 1:] % 2 for i in (0, 1)]
    assert not drafted[0].any()
    assert drafted[1].all()


def kept_bytes(programs, state, settings) -> int:
    """What the loop of a decode program carries beside the state and its count of rounds, in bytes."""
    target, drafter = programs.pair
    drafter = proposing(drafter, settings.drafter, settings.is_alone)
    decode = partial(speculative.decode, target, drafter, rounds=8, settings=settings)
    loop = next(eqn for eqn in jax.make_jaxpr(decode)(state).eqns if eqn.primitive.name == "while")
    carried = Counter((v.aval.shape, v.aval.dtype) for v in loop.outvars)
    carried -= Counter([((), jnp.dtype(jnp.int32)), *((x.shape, x.dtype) for x in jax.tree.leaves(state))])
    return sum(count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in carried.items())


@pytest.mark.parametrize(
    ("drafters", "speculations"),
    [("both", SPECULATIONS), ("drafter", speculations_of((8,))), ("none", speculations_of())],
)
def test_planned_memory_has_the_features_that_a_dispatch_keeps(case, drafters, speculations):
    target, drafter, *_, both = case
    programs = {"both": both, "drafter": Executables(target, drafter), "none": Executables(target, None)}[drafters]
    settings, config = Settings(1, top_logprobs=5), EngineConfig(speculations)
    state = programs.abstract_state(4, CAPACITY, settings, (1, 1))
    kept = max(kept_bytes(programs, state, round_settings(settings, each)) for each in speculations)
    assert (kept > 0) == (drafters != "none")
    few, many = (plan_memory(programs, slots, CAPACITY, settings, config, 1.0).workspace for slots in (2, 4))
    logits = 12 * config.largest_block * VOCAB
    assert many - few == 2 * logits + kept // 2


def test_a_block_size_that_is_asked_for_is_drafted_by_either():
    engine = mock_runner.engine(speculations=SPECULATIONS)
    scheduler, request, asked = engine._scheduler, mock_runner.request([2, 3]), []
    request.slot = 0
    scheduler.add(request)

    def choose(batch_size, acceptances, allowed, *_):
        asked.append({str(spec) for spec in allowed})
        return allowed[0]

    engine.policy.choose = choose
    for block_size in (3, 4, 8):
        request.block_size = block_size
        assert scheduler.plan([request]).block_sizes == (block_size,)
    # The smallest of each that is large enough; of one there is no choice.
    assert asked == [{"8", "4:1"}] * 2
    request.block_size = 1
    assert scheduler.plan([request]).speculation == NO_DRAFTER
