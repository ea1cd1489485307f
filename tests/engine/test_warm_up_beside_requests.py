"""Programs that are compiled beside requests: only those that may run do, and every request gets its tokens."""

import random
from dataclasses import replace

import pytest

from dflash_jax.engine import model_runner
from dflash_jax.engine.config import BATCH_SIZES, NO_DRAFTER, Speculation, speculations_of
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.request import Request
from dflash_jax.engine.warm_up import WarmUp
from tests import tiny
from tests.engine import mock_runner
from tests.engine.load import engine_for, some_requests
from tests.engine.mock_runner import END, expected, request
from tests.helpers import in_a_thread

PREFILL_SIZES, ROUNDS = (4, 16), speculations_of((8, 16))
FIRST = {("prefill", 1, 4, False), ("decode", 1, NO_DRAFTER)}
NAMES = [
    *(("prefill", n, size, kind) for n in (1, 4) for size in PREFILL_SIZES for kind in (True, False)),
    *((kind, n, b) for kind in ("decode", "masked") for n in BATCH_SIZES[:3] for b in ROUNDS),
    ("prefix",),
    ("score",),
]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seed", range(30))
def test_requests_get_their_tokens_with_any_allowed_programs(seed, shards):
    """The mock runner refuses programs that are not allowed."""
    rng = random.Random(seed)
    engine = mock_runner.engine(
        slots=4 * shards, seed=seed, shards=shards, prefix_bytes=10_000, prefill_batch_tokens=16
    )
    names = rng.sample(NAMES, len(NAMES))
    engine.runner.allowed = FIRST | set(names[: rng.randrange(4)])
    head = [rng.randrange(1, 50) for _ in range(30)]
    waiting = [
        request(head[: rng.randrange(30)] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))], 12)
        for _ in range(20)
    ]
    for r in waiting:
        r.block_size = rng.choice(["auto", "auto", 1, 4, 16])
    tokens = {r: [] for r in waiting}
    left = list(waiting)
    while left or engine.has_work:
        if left and rng.random() < 0.3:
            engine.submit(left.pop())
        if names and rng.random() < 0.2:
            engine.runner.allowed.add(names.pop())
        for event in engine.step():
            tokens[event.request] += event.tokens
    for r, found in tokens.items():
        assert [t for t in found if t != END] == [t for t in expected(r.prompt, 12) if t != END]


def test_sequences_take_turns_where_a_batch_for_all_is_slower():
    engine = mock_runner.engine(slots=4)
    scheduler, proportional = engine._scheduler, DraftLengthPolicy(ROUNDS, lambda n, spec: n * spec.block_size)
    scheduler._policy = proportional
    requests = [request([1, 2]) for _ in range(3)]
    for slot, r in enumerate(requests):
        r.slot = slot
        scheduler.add(r)
    engine.runner.allowed = {("decode", 1, NO_DRAFTER), ("decode", 32, NO_DRAFTER)}
    assert scheduler.batch([]) == requests[:1]
    assert scheduler.batch([]) == requests[1:2]
    # A device that reads its weights for one sequence as for many.
    scheduler._policy = DraftLengthPolicy(ROUNDS)
    assert set(scheduler.batch([])) == set(requests)
    engine.runner.allowed.add(("decode", 4, NO_DRAFTER))
    scheduler._policy = proportional
    assert set(scheduler.batch([])) == set(requests)


class FakeMask:
    def close(self):
        pass


def masked(slot: int):
    r = request([1, 2])
    r.slot, r.mask = slot, object()
    return r


def test_requests_with_and_without_masks_take_turns_until_rounds_for_all_are_compiled():
    scheduler = mock_runner.engine(slots=8)._scheduler
    plain, with_mask = [request([1, 2]) for _ in range(5)], [masked(6), masked(7)]
    for slot, r in enumerate(plain):
        r.slot = slot
    for r in plain[:3] + with_mask + plain[3:]:
        scheduler.add(r)
    scheduler._runner.allowed = {("decode", 8, NO_DRAFTER), ("masked", 1, Speculation(1))}
    batches = [scheduler.batch([]) for _ in range(3)]
    assert set(batches[0]) == set(plain)
    assert batches[1:] == [with_mask[:1], with_mask[1:]]
    scheduler._runner.allowed.add(("masked", 8, Speculation(1)))
    assert set(scheduler.batch([])) == {*plain, *with_mask}


@pytest.mark.parametrize("kind", ["masked", "score"])
def test_requests_whose_program_cannot_be_compiled_end_with_an_error(kind):
    engine = mock_runner.engine(slots=2)
    engine.runner.allowed = set(FIRST)
    waits = request([1, 2, 3]) if kind == "masked" else request([1, 2, 3], prompt_logprobs=0)
    if kind == "masked":
        waits.mask = FakeMask()
    other = request([4, 5, 6])
    engine.submit(waits)
    engine.submit(other)
    for _ in range(50):
        engine.step()
    assert waits.finish_reason is None
    assert other.finish_reason is not None
    engine.runner.failed.add(kind)
    events = mock_runner.run(engine)
    assert [(e.request, e.finish_reason) for e in events] == [(waits, "error")]
    assert "cannot be compiled" in str(events[0].error)


@pytest.fixture(scope="module")
def programs():
    target = tiny.target("da", moe="")
    with pytest.MonkeyPatch.context() as patch:
        # Each is traced, and compiled, for every width.
        patch.setattr(model_runner, "BATCH_SIZES", (1, 4))
        yield Executables(target, tiny.drafter(target))


def answers(engine, count: int = 12) -> list[list[int]]:
    requests = [Request(**wanted) for wanted in some_requests(7, count, tiny.VOCAB)]
    for r in requests:
        engine.submit(r)
    while engine.has_work:
        engine.step()
    assert engine.failure is None
    return [r.tokens for r in requests]


def test_first_programs_answer_and_others_follow_beside_requests(programs):
    engine = engine_for(programs, slots=4)
    warm = WarmUp(engine)
    warm.first()
    before = programs.count
    assert 0 < warm.compiled < warm.total
    found = answers(engine)
    assert programs.count == before
    in_a_thread(warm.others)
    assert warm.compiled == warm.total
    assert found == answers(engine)
    after = programs.count
    assert after > before
    assert found == answers(engine, 12)
    assert programs.count == after
    # Plain decoding comes first, and is measured in dispatches without prefill.
    while max(spec.block_size for _, spec in engine.statistics.dispatches) == 1:
        assert found == answers(engine, 12)


def test_a_program_that_cannot_be_compiled_is_left_out(programs, caplog, monkeypatch):
    monkeypatch.setattr(programs, "compiled", {})
    engine = engine_for(programs, slots=4)
    warm = WarmUp(engine)
    warm.first()
    expected_tokens = answers(engine)

    def fail(lowered):
        raise RuntimeError("no memory")

    monkeypatch.setattr(programs, "compile", fail)
    in_a_thread(warm.others)
    assert (warm.compiled, warm.failed) == (4, warm.total - 4)
    assert "cannot be compiled" in caplog.text
    assert answers(engine) == expected_tokens


def test_reproducible_engines_compile_everything_first(programs):
    engine = engine_for(programs, slots=1)
    engine.config = replace(engine.config, adaptive=False)
    warm = WarmUp(engine)
    assert not warm._tasks.others
    assert warm.total == len(warm._tasks.first)


def test_stop_ends_the_others_early(programs):
    engine = engine_for(programs, slots=4)
    warm = WarmUp(engine)
    warm.first()
    warm.stop()
    in_a_thread(warm.others)
    assert warm.compiled == 4
