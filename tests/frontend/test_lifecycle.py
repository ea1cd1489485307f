"""An LLM between generations: pauses, and sleep that gives the devices' memory back."""

import gc

import jax
import pytest

from dflash_jax import LLM, InputError, SamplingParams
from dflash_jax.errors import EngineError

PROMPT = "import os\nimport"
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    return LLM()


@pytest.fixture(scope="module")
def expected(llm):
    return llm.generate(PROMPT, GREEDY)[0].token_ids


@pytest.fixture(autouse=True)
def awake(llm):
    yield
    if llm.is_sleeping:
        llm.update_weights(llm.directory)
        llm.wake()
    llm.resume()


def bytes_in_use():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_a_kept_request_goes_on_after_a_pause(llm, expected):
    pieces = llm.pieces(PROMPT, GREEDY)
    next(pieces)
    llm.pause()
    assert llm.is_paused
    with pytest.raises(EngineError, match="paused"):
        llm.generate(PROMPT, GREEDY)
    llm.resume()
    assert list(pieces)[-1].token_ids == expected
    assert not llm.is_paused


@pytest.mark.parametrize(("mode", "reason", "is_whole"), [("wait", "length", True), ("abort", "abort", False)])
def test_other_pauses_end_requests(llm, expected, mode, reason, is_whole):
    pieces = llm.pieces(PROMPT, GREEDY)
    next(pieces)
    llm.pause(mode)
    completion = list(pieces)[-1]
    assert completion.finish_reason == reason
    assert completion.token_ids == expected[: len(completion.token_ids)]
    assert (len(completion.token_ids) == 48) == is_whole


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_all_memory_back(llm, expected, level):
    llm.generate(PROMPT * 30, GREEDY)
    awake = bytes_in_use()
    assert awake > llm.loaded_bytes
    before = awake
    llm.sleep(level)
    # The directories of what a test holds are no arrays: nothing of the model is left.
    assert bytes_in_use() <= before - llm.loaded_bytes
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((llm.target, llm.drafters, llm.programs.weights)))
    # Copies, which are no views of what JAX has.
    assert all(array.base is None for array in llm._on_host or ())
    assert llm.is_sleeping
    with pytest.raises(EngineError, match="paused"):
        llm.generate(PROMPT, GREEDY)
    with pytest.raises(EngineError):
        llm.resume()
    if level == 2:
        with pytest.raises(EngineError, match=r"dropped by sleep\(2\): update_weights"):
            llm.wake()
        llm.update_weights(llm.directory)
    llm.wake()
    assert not llm.is_paused
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected
    assert llm.generate(PROMPT, GREEDY, block_size=1)[0].token_ids == expected


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_kept_request_goes_on_after_sleep(llm, expected, level):
    pieces = llm.pieces(PROMPT, GREEDY)
    next(pieces)
    llm.sleep(level, mode="keep")
    if level == 2:
        llm.update_weights(llm.directory)
    llm.wake()
    assert list(pieces)[-1].token_ids == expected


def test_parts_are_brought_back_one_after_the_other(llm, expected):
    llm.sleep(1)
    llm.wake(["weights"])
    assert llm.is_sleeping
    llm.update_weights(llm.directory)
    llm.wake(["kv_cache"])
    assert not llm.is_sleeping
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_new_weights_wait_until_those_on_the_host_are_back(llm):
    llm.sleep(1)
    with pytest.raises(EngineError, match=r"wake\(\['weights'\]\)"):
        llm.update_weights(llm.directory)
    with pytest.raises(EngineError, match=r"wake\(\['weights'\]\)"):
        llm.read_weights(["lm_head.weight"])
    llm.wake()


def test_a_deeper_sleep_drops_what_is_on_the_host(llm, expected):
    llm.sleep(1)
    llm.sleep(2)
    llm.update_weights(llm.directory)
    llm.wake()
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("change", ["an update", "a sleep"])
def test_new_weights_that_were_made_before_a_change_are_refused(llm, change):
    new = llm.new_weights(llm.directory)
    if change == "an update":
        llm.update_weights(llm.directory)
    else:
        llm.sleep(1)
    version = llm.weight_version
    with pytest.raises(EngineError, match="have changed since"):
        llm.take_weights(new)
    assert llm.weight_version == version
    llm.wake()


def test_an_engine_that_was_replaced_takes_no_memory(llm):
    llm.generate(PROMPT, GREEDY)
    first = llm.engine
    llm.generate([PROMPT] * 8, SamplingParams(max_tokens=1), block_size=1)
    assert first is not llm.engine
    llm.sleep(1)
    llm.wake()
    assert first.is_closed
    assert first not in llm.engines


def test_a_part_of_the_weights_is_no_whole_after_they_were_dropped(llm):
    llm.sleep(2)
    with pytest.raises(InputError, match="partial is True"):
        llm.update_weights({}, partial=True)
    with pytest.raises(InputError, match="weights is None"):
        llm.update_weights(drafter=llm.loader.checkpoint.drafts[0])


def test_sleeping_twice_and_waking_twice_change_nothing(llm, expected):
    for _ in range(2):
        llm.sleep(1)
        llm.sleep(1)
        llm.wake()
        llm.wake()
    assert llm.generate(PROMPT, GREEDY)[0].token_ids == expected


def test_an_engine_of_the_caller_sleeps_too(llm):
    engine = llm.new_engine(llm.programs, 2, 64)
    llm.sleep(1)
    assert not engine.has_caches
    llm.wake()
    assert engine.has_caches
    assert not engine.is_paused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.pause("x"), "mode is 'x'"),
        (lambda llm: llm.sleep(3), "level is 3"),
        (lambda llm: llm.sleep(True), "level is True"),
        (lambda llm: llm.wake(["x"]), "tags is"),
        (lambda llm: llm.wake("weights"), "tags is 'weights'"),
        (lambda llm: llm.wake([["weights"]]), "tags is"),
        (lambda llm: llm.wake(3), "tags is 3"),
        (lambda llm: llm.pause(["keep"]), "mode is"),
    ],
)
def test_wrong_arguments_are_named(llm, call, message):
    with pytest.raises(InputError, match=message):
        call(llm)
    assert not llm.is_paused


def test_a_model_of_several_processes_is_not_paused_by_a_sleep_that_it_refuses(llm, monkeypatch):
    monkeypatch.setattr(llm, "_group", object())
    with pytest.raises(EngineError, match="several processes"):
        llm.sleep(1)
    assert not llm.is_paused


def test_memory_is_not_freed_while_the_llm_runs(llm):
    with pytest.raises(EngineError, match="not paused"):
        llm.release()
