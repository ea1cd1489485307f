"""What an engine is made of: programs at warm-up, memory before the start, one read a dispatch."""

import logging
import re
from concurrent.futures import wait
from dataclasses import replace

import jax
import numpy as np
import pytest

from dflash_jax.decoding.state import Settings
from dflash_jax.engine import model_runner, steps
from dflash_jax.engine.ahead_of_time import AheadOfTime
from dflash_jax.engine.config import EngineConfig, speculations_of
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import Memory, device_memory, plan_memory
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import Request
from dflash_jax.engine.warm_up import warm_up
from dflash_jax.engine.warm_up_tasks import Tasks
from dflash_jax.errors import InputError
from tests import tiny
from tests.engine.load import CAPACITY, engine_for, some_requests


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "BATCH_SIZES", (1, 4))
        target = tiny.target("da", moe="")
        yield engine_for(Executables(target, tiny.drafter(target)), slots=4)


def test_everything_is_compiled_at_warm_up(engine, caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    found = warm_up(engine)
    assert set(found) == {
        "admit",
        "tables",
        *(f"copies of {size} pages{kind}" for size in (1, 8) for kind in ("", " with a window")),
        *(f"prefill {shape}{kind}" for shape in ("1 x 8", "4 x 8", "1 x 32") for kind in ("", " without drafter")),
        "score 32",
        "restore",
        *(f"decode {rows} x {width}" for rows in (1, 4) for width in (0, 1, 8)),
    }
    assert all(f"{name}: compiled in" in caplog.text for name in found)
    assert set(engine.policy.seconds) == {(rows, spec) for rows in (1, 4) for spec in engine.config.speculations}
    before = engine.runner.programs.count
    for wanted in some_requests(3, 40, tiny.VOCAB):
        engine.submit(Request(**wanted))
    while engine.has_work:
        engine.step()
    assert engine.runner.programs.count == before
    assert engine.statistics.requests["stop"] + engine.statistics.requests["length"] == 40


def test_what_the_next_turn_of_a_conversation_needs_is_compiled_first(engine):
    labels = [task.label for task in Tasks(engine).others]
    assert all(label.startswith("copies") for label in labels[: labels.index("restore")])


def test_a_decoding_step_reads_once(engine, monkeypatch):
    """Nothing but one read of the report makes the host wait for the device."""
    params = replace(some_requests(5, 1, tiny.VOCAB)[0]["params"], max_tokens=80, logprobs=2)
    requests = [Request([i + 2, 3], params) for i in range(3)]
    for request in requests:
        engine.submit(request)
    # From here on, steps have no prefill.
    while not all(request.tokens for request in requests):
        engine.step()
    reads, real = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(tree) or real(tree))
    monkeypatch.setattr(jax, "block_until_ready", None)
    monkeypatch.setattr(jax.Array, "__array__", None, raising=False)
    dispatches = sum(engine.statistics.dispatches.values())
    while engine.has_work:
        engine.step()
    assert len(reads) == sum(engine.statistics.dispatches.values()) - dispatches > 2
    assert engine.failure is None


def test_memory_is_planned_before_it_is_taken(engine):
    programs, settings = engine.runner.programs, Settings(1, top_logprobs=5)
    found = plan_memory(programs, 4, CAPACITY, settings, EngineConfig(speculations_of((8,)), prefix_bytes=1000), 1.0)
    runner = ModelRunner(programs, 4, CAPACITY, settings, found.counts)
    state = sum(x.nbytes for x in jax.tree.leaves(runner.state))
    assert (found.slots + found.pages, found.weights) == (state, sum(x.nbytes for x in programs.weights))
    assert found.all == state + found.weights + found.workspace + 1000


def test_what_does_not_fit_is_refused_with_advice(engine):
    with pytest.raises(
        InputError, match=r"4 slots of at most 96 positions do not fit: weights 0.00 GB.*; not one slot fits"
    ):
        plan_memory(engine.runner.programs, 4, CAPACITY, Settings(), EngineConfig(), 1e-12)
    # What is said to fit does, and one more does not.
    programs = engine.runner.programs
    plans = [plan_memory(programs, n, CAPACITY, Settings(), EngineConfig(), 1.0) for n in (1, 2, 9)]
    # Beside the pages of one request, which must fit.
    bare = [plan.all - plan.pages for plan in plans]
    fraction = (bare[1] + (bare[2] - bare[1]) / 2 + plans[0].pages) / device_memory()
    with pytest.raises(InputError) as told:
        plan_memory(programs, 9, CAPACITY, Settings(), EngineConfig(), fraction)
    most = int(re.search(r"(\d+) slots fit", str(told.value))[1])
    assert 2 <= most < 9
    plan_memory(programs, most, CAPACITY, Settings(), EngineConfig(), fraction)
    with pytest.raises(InputError):
        plan_memory(programs, most + 1, CAPACITY, Settings(), EngineConfig(), fraction)
    with pytest.raises(
        InputError, match=r"slots of at most 100000000 positions do not fit.* [1-9]\d* slots? fits?|not one"
    ):
        plan_memory(engine.runner.programs, 2**10, 10**8, Settings(), EngineConfig(), 0.5)


def test_memory_all_is_the_sum_without_the_limit_and_its_text_has_every_part():
    memory = Memory(10**9, 5 * 10**8, 2 * 10**9, 7 * 10**7, 3 * 10**8, 10**7, 4 * 10**9, (5, 0))
    assert memory.all == 3_880_000_000
    rest = "slots 2.00 GB, pages 0.07 GB, prefixes 0.30 GB, workspace 0.01 GB, limit 4.00 GB"
    assert str(memory) == f"weights 1.00 GB, vision 0.50 GB, {rest}"
    assert str(replace(memory, vision=0)) == f"weights 1.00 GB, {rest}"


def test_ahead_of_time_gives_shapes_and_leaves_the_programs_behind():
    target = tiny.target("da", moe="")
    programs, settings = Executables(target, None), Settings(1, top_logprobs=2)
    slots = np.arange(2, dtype=np.int32)
    arguments = slots, np.ones(2, np.int32), np.int32(3), None, None
    with AheadOfTime(programs, threads=1) as ahead:
        state = ahead.empty(2, CAPACITY, settings)
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
        after, report = ahead.run(steps.decode, state, *arguments, settings=settings)
        assert after is state
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(report))
        ahead.run(steps.decode, state, *arguments, settings=settings)
        assert [key[0] for key in ahead.pending] == ["decode"]
    assert [key[0] for key in programs.compiled] == ["decode"]
    real = programs.empty(2, CAPACITY, settings)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), real) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), state
    )
    _, found = programs.run(steps.decode, real, *arguments, settings=settings)
    assert programs.count == 2  # The state's and this one.
    assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in jax.tree.leaves(report)]


def test_a_compilation_that_fails_is_reported_at_the_end_of_the_block(monkeypatch):
    programs = Executables(tiny.target("a", moe=""), None)
    state = programs.abstract_state(1, CAPACITY, Settings())

    def fail(lowered):
        raise ZeroDivisionError

    monkeypatch.setattr(programs, "compile", fail)

    def ahead_of_time(background: bool):
        with AheadOfTime(programs, 1, background) as ahead:
            ahead.run(steps.snapshot, state, np.zeros(1, np.int32))
            (future,) = ahead.pending.values()
            # Else the end of the block in the background cancels what has not begun.
            wait([future])
        return future

    with pytest.raises(ZeroDivisionError):
        ahead_of_time(False)
    # In the background, the futures have the error.
    assert isinstance(ahead_of_time(True).exception(), ZeroDivisionError)
    assert programs.count == 0
