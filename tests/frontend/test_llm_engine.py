"""The library on the engine: many prompts, streams side by side, and what is left behind."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tqdm import tqdm

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.engine import model_runner
from dflash_jax.engine.round_costs import NO_RECORD
from dflash_jax.errors import EngineError
from dflash_jax.frontend import generation
from dflash_jax.frontend.compare import divergence
from dflash_jax.frontend.sequence import Piece
from dflash_jax.frontend.sync_engine import SyncEngine

PARAMS = SamplingParams(temperature=0.8, top_k=50, seed=3, max_tokens=24)


@pytest.fixture(scope="module", autouse=True)
def few_batch_sizes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (1, 4, 32))
        yield


@pytest.fixture(scope="module")
def llm(few_batch_sizes):
    return LLM(slots=4, block_size=8)


def same(llm, found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        parting = divergence(llm, a.prompt_ids, b.token_ids, a.token_ids, PARAMS)
        assert parting is None or parting.is_tie


def test_many_prompts_use_the_slots(llm, capsys):
    prompts = [f"def function_{i % 10}(" for i in range(40)]
    found = llm.generate(prompts, PARAMS, progress=True)
    assert "40/40" in capsys.readouterr().err
    assert llm.engine.runner.slots == 4
    assert max(batch for batch, _ in llm.engine.statistics.dispatches) == 4
    same(llm, found, found[:10] * 4)
    assert [c.prompt_ids for c in found] == [llm.encode(p) for p in prompts]
    (alone,) = llm.generate([prompts[7]], PARAMS)
    same(llm, [found[7]], [alone])


def test_streams_side_by_side(llm):
    expected = [llm.generate([p], PARAMS)[0].text for p in ("def a(", "import ")]
    streams = [llm.stream(p, PARAMS) for p in ("def a(", "import ")]
    texts = ["", ""]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            piece = next(stream, None) if stream else None
            if piece is None:
                streams[i] = None
            else:
                texts[i] += piece
    assert texts == expected


def test_a_longer_prompt_beside_a_running_one(llm):
    running = llm.pieces("x = ", PARAMS)
    next(running)
    long = list(range(20, 60)) * 12
    (found,) = llm.generate([long], PARAMS)
    *_, first = running
    (alone,) = llm.generate(["x = "], PARAMS)
    same(llm, [first], [alone])
    (again,) = llm.generate([long], PARAMS)
    same(llm, [found], [again])
    assert again.cached_tokens == len(long) - 1


def test_an_abandoned_stream_frees_its_slot(llm):
    pieces = llm.pieces("def f(", replace(PARAMS, max_tokens=200))
    assert len(list(islice(pieces, 2))) == 2
    pieces.close()
    assert llm.engine.running == 0


def test_after_an_interruption_it_goes_on(llm, monkeypatch):
    (expected,) = llm.generate(["def g("], PARAMS)
    beside = llm.pieces("x = ", PARAMS)
    assert isinstance(next(beside), Piece)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["def g("], PARAMS)
    with pytest.raises(EngineError, match="interrupted"):
        list(beside)
    (found,) = llm.generate(["def g("], PARAMS)
    same(llm, [found], [expected])


def test_a_prompt_that_fails_between_two_results_raises(llm, monkeypatch):
    """The engine may run while the caller has the second prompt's result; the first then ends unseen."""
    submitted, submit = [], SyncEngine.submit

    def remember(self, sequences, programs):
        submitted.extend(sequences)
        submit(self, sequences, programs)

    class Bar(tqdm):
        def update(self, n=1):
            if (request := submitted[0].request).finish_reason is None:
                llm.engine.abort(request)
                llm.engine.step()
                submitted[0].fail(EngineError("the first failed"))

    monkeypatch.setattr(SyncEngine, "submit", remember)
    monkeypatch.setattr(generation, "tqdm", Bar)
    lengths = [replace(PARAMS, max_tokens=n) for n in (200, 1)]
    with pytest.raises(EngineError, match="the first failed"):
        llm.generate(["def f(", "import "], lengths)
    assert llm.engine.running == 0


def test_chats_share_their_beginning(llm):
    system = {"role": "system", "content": "You write short functions and nothing else, in the style of the library."}
    ask = [[system, {"role": "user", "content": f"Write the function `f{i}`."}] for i in range(3)]
    found = llm.chat(ask, PARAMS)
    assert all(c.cached_tokens > 16 for c in found[1:])
    plain = LLM(prefix_bytes=0).chat(ask, PARAMS, block_size=1)
    assert all(c.cached_tokens == 0 for c in plain)
    same(llm, found, plain)


def test_auto_is_the_default_and_changes_nothing(llm):
    auto = LLM()
    assert auto.block_size == "auto"
    same(llm, auto.generate(["def h("], PARAMS), llm.generate(["def h("], PARAMS))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"prefix_bytes": -1}, "prefix_bytes is -1"),
        ({"mem_fraction": 0.0}, "mem_fraction is 0.0"),
        ({"block_size": "wide"}, "block_size is 'wide'"),
    ],
)
def test_bad_options_of_llm_are_refused_by_name(options, named):
    with pytest.raises(InputError, match=named):
        LLM(**options)


def test_memory_that_is_not_there():
    small = LLM(mem_fraction=1e-6)
    with pytest.raises(InputError, match=r"1 slots of at most 256 positions do not fit"):
        small.generate(["x"], PARAMS)


def test_an_engine_has_no_positions_that_no_request_can_have():
    """A power of two that the request fits in, but not more than the most that a request may have."""

    def capacity(max_len: int, need: int) -> int:
        made = []

        def new_engine(programs, slots, capacity, policy):
            made.append(capacity)
            return SimpleNamespace(policy=None, submit=lambda request: None)

        maker = SimpleNamespace(slots=4, max_len=max_len, compile_s=0.0, new_engine=new_engine)
        sequence = Mock(request=Mock(need=need))
        SyncEngine(maker).submit([sequence], Mock(data=1))
        return made[0]

    assert [capacity(40_960, need) for need in (200, 300, 33_000, 40_960)] == [256, 512, 40_960, 40_960]
    assert capacity(100, 90) == 256


def test_step_without_a_submitted_sequence_is_an_engine_error(llm):
    with pytest.raises(EngineError, match="no engine: submit first"):
        SyncEngine(llm).step()


def test_costs_on_record_depend_on_kernels_and_activations_and_not_on_reasons(llm, monkeypatch):
    """A reason may name a file that has another name in the next process."""
    identities = []
    monkeypatch.setattr("dflash_jax.frontend.llm.CostRecord", lambda _, *of: identities.append(repr(of)) or NO_RECORD)
    for reason in ("/tmp/a: error", "/tmp/b: error", None):
        monkeypatch.setattr(llm, "backend", replace(llm.backend, no_cpp=reason))
        llm._new_policy(llm.programs)
    monkeypatch.setattr(llm, "backend", replace(llm.backend, fp4_activations=True))
    llm._new_policy(llm.programs)
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3
