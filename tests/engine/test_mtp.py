"""An MTP head in the engine: the text of each request alone, and a context that one pass gives, whatever runs."""

import jax
import pytest

from dflash_jax.engine import model_runner
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.request import Request
from dflash_jax.sampling_params import SamplingParams
from tests import tiny
from tests.engine.load import CAPACITY, MARKER, alone, engine_for, run_last, some_requests, under_load
from tests.mtp_context import assert_context, rows_with_context
from tests.tiny import VOCAB
from tools.token_runs import Remembering


@pytest.fixture(scope="module")
def case():
    """(target, head, requests, each alone, programs with a drafter that is right half the time over the head)."""
    target = tiny.target("da", moe="1")
    head, wanted = tiny.head(target), some_requests(0, 16, VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (4,))
        expected = alone(engine_for(Executables(target, None), (1,), slots=4, prefix_bytes=0), wanted)
        drafter = Remembering.of(head, [request for request, _ in expected], wide=4, capacity=CAPACITY)
        yield target, head, wanted, expected, Executables(target, drafter)


def test_under_load_texts_are_those_alone_and_contexts_those_of_one_pass(case):
    target, head, wanted, expected, programs = case
    engine = engine_for(programs, (1, 2, 4), slots=4)
    under_load(engine, target, wanted, expected, 60, seed=1)
    assert engine.statistics.cached_tokens > 0
    assert max(yielded for _, _, yielded in engine.statistics.rounds) > 1, "no draft was accepted"
    # Else a busy machine, which measures the rounds, may leave the head out.
    engine.policy.choose = lambda *_: engine.config.speculations[-1]
    run_last(engine, wanted[:4])
    state = jax.device_get(engine.runner.state)
    assert_context(target, head, state, rows_with_context(state))
    assert rows_with_context(state)


def test_a_prompt_from_the_prefix_cache_has_the_context_of_one_pass(case, monkeypatch):
    """Of several prefixes, whose borders lie between a feature and the token behind it."""
    target, head, _, _, programs = case
    monkeypatch.setattr(model_runner, "BATCH_SIZES", (1,))
    engine = engine_for(programs, (1, 2, 4), slots=1)
    options = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    options |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": 6}
    part = [MARKER, *range(2, 20)]
    for prompt in ([*part, *part, *part], [*part, *part, *part[:9]]):
        engine.submit(Request(prompt, SamplingParams(**options), block_size=4))
        while engine.has_work:
            engine.step()
        state = jax.device_get(engine.runner.state)
        assert rows_with_context(state) == [0]
        assert state.draft_start.tolist() == [[0]]
        assert_context(target, head, state, [0])
    assert engine.statistics.cached_tokens == 2 * len(part)
