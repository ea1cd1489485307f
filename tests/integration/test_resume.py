"""A request that goes on behind the tokens of an earlier run gives the tokens of an unbroken run."""

import pytest

from dflash_jax import LLM, SamplingParams
from dflash_jax.engine import model_runner
from dflash_jax.engine.request import ReadyMasks, Request
from dflash_jax.engine.token_rules import Rules, TokenRules, packed

PROMPT = "def clamp(value, low, high):\n    "
NEW = 8
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True),
    "sampled": SamplingParams(
        temperature=1.0,
        top_p=0.9,
        seed=5,
        repetition_penalty=1.2,
        frequency_penalty=0.7,
        presence_penalty=0.3,
        max_tokens=NEW,
        ignore_eos=True,
    ),
}


class EvenThenOdd(ReadyMasks):
    """Allows ids by turns: the mask depends on the number of all tokens before."""

    def __init__(self, vocab: int):
        self._vocab, self.count = vocab, 0

    def take(self, tokens):
        self.count += len(tokens)

    def masks(self, drafts):
        places = range(self.count, self.count + len(drafts) + 1)
        return packed([range(place % 2, self._vocab, 2) for place in places], self._vocab)


@pytest.fixture(scope="module", params=["float32", "reproducible"])
def engine(request):
    reproducible = request.param == "reproducible"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (1,))
        llm = LLM(slots=2, block_size=4, reproducible=reproducible, dtype="bfloat16" if reproducible else None)
        yield llm, llm.new_engine(llm.programs, 2, 256, prefill_sizes=(16,), masks=True)


def run(engine, params: SamplingParams, known=(), mask=None) -> Request:
    llm, running = engine
    sequence = llm.new_sequence(PROMPT, params, mask=mask)
    sequence.request.tokens += known
    running.submit(sequence.request)
    while running.has_work:
        running.step()
    return sequence.request


@pytest.mark.parametrize("name", PARAMS)
def test_request_with_known_tokens_gives_the_rest_of_the_unbroken_run(engine, name):
    whole = run(engine, PARAMS[name])
    assert len(whole.tokens) == NEW
    for count in (1, 3 if name == "greedy" else 5, NEW - 1):
        resumed = run(engine, PARAMS[name], whole.tokens[:count])
        assert resumed.tokens == whole.tokens, count
        assert resumed.finish_reason == "length"


# Masks are the host's, which has no dtype.
@pytest.mark.parametrize("engine", ["float32", pytest.param("reproducible", marks=pytest.mark.long)], indirect=True)
def test_masks_of_a_resumed_request_see_the_known_tokens(engine):
    vocab = engine[0].config.vocab_size
    whole = run(engine, PARAMS["sampled"], mask=EvenThenOdd(vocab))
    assert [token % 2 for token in whole.tokens[:4]] == [0, 1, 0, 1]
    for count in (1, NEW - 3):
        assert run(engine, PARAMS["sampled"], whole.tokens[:count], EvenThenOdd(vocab)).tokens == whole.tokens, count


@pytest.mark.parametrize("engine", ["float32"], indirect=True)
def test_masks_that_are_over_behind_known_tokens_are_closed_at_once(engine):
    closed = []

    class Closing(TokenRules):
        def close(self):
            closed.append(True)

    llm, running = engine
    request = llm.new_sequence(PROMPT, PARAMS["greedy"]).request
    request.mask, request.tokens = Closing(Rules(min_tokens=3), llm.config.vocab_size), [5, 6, 7]
    running.submit(request)
    assert closed == [True]
    assert request.mask is None
    running.abort(request)
    while running.has_work:
        running.step()
