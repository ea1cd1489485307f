"""Predicted costs of rounds: what must hold for any pair, and two pairs that were measured."""

import json
import time

import jax.numpy as jnp
import pytest

from dflash_jax.cli.ops import backend_for
from dflash_jax.engine import round_costs
from dflash_jax.engine.config import NO_DRAFTER, Speculation, speculations_of
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.round_costs import (
    KNOWN_ERROR,
    KNOWN_PROCESSES,
    RECORD_ERROR,
    CostRecord,
    Platform,
    RoundCosts,
    platform_named,
)
from dflash_jax.parallel.sharding import Layout
from dflash_jax.planner import abstract_pair, read_shapes
from tests import tiny


@pytest.fixture(scope="module")
def pair():
    target = tiny.target("da", moe="")
    return target, tiny.drafter(target)


def test_each_draft_of_an_mtp_head_is_a_pass_over_one_token_a_sequence(pair):
    target, head = pair[0], tiny.head(pair[0])
    costs, plain = RoundCosts(target, [head], Platform(1e9, 0.0)), RoundCosts(target, [], Platform(1e9, 0.0))
    first, four, eight = (costs(1, Speculation(n)) - plain(1, Speculation(n, None)) for n in (2, 4, 8))
    assert first > 0
    assert four == pytest.approx(3 * first)
    assert eight == pytest.approx(7 * first)


def test_extensions_of_contexts_read_fc_and_keys_and_values_and_no_experts():
    """float32: of the head, whose layer has experts, and of the drafter, which has two layers and two taps."""
    target, platform, plain = tiny.target("da", moe="1"), Platform(1e9, 0.0), Speculation(1)
    drafters = [tiny.drafter(target), tiny.head(target)]
    contexts = [4 * (36 * 2 * 36 + 2 * 2 * (2 * 10 * 36)), 4 * (36 * 2 * 36 + 2 * (2 * 20 * 36))]
    both = RoundCosts(target, drafters, platform)
    for i, drafter in enumerate(drafters):
        alone = RoundCosts(target, [drafter], platform)
        # A step of an extension takes four tokens of plain rounds, and 16 of others.
        assert alone(2, plain) - alone(2, NO_DRAFTER) == pytest.approx(contexts[i] / 4)
        assert both(2, Speculation(8, i)) - alone(2, Speculation(8)) == pytest.approx(contexts[1 - i] / 2)
    assert both(2, plain) - both(2, NO_DRAFTER) == pytest.approx(sum(contexts) / 4)
    for i in (0, 1):
        # Of those of other drafters, one that drafts alone extends none.
        assert both(1, Speculation(8, i)) - both(1, Speculation(8, i, True)) == pytest.approx(contexts[1 - i] / 2)
        assert both(1, Speculation(1, i, True)) - both(1, NO_DRAFTER) == pytest.approx(contexts[i] / 4)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_costs_grow_with_batch_and_block_size(pair, platform):
    costs = RoundCosts(pair[0], pair[1:], platform_named(platform))
    without, plain, four, sixteen = NO_DRAFTER, Speculation(1), Speculation(4), Speculation(16)
    for small, large in ((without, plain), (plain, four), (four, sixteen)):
        assert 0 < costs(1, small) <= costs(1, large)
    assert 0 < costs(1, four) <= costs(8, four)
    assert 0 < costs(4, plain) <= costs(8, plain)


def test_without_a_drafter_a_round_is_a_pass_of_the_target(pair):
    platform = Platform(10.0, 0.0)
    alone = RoundCosts(pair[0], [], platform)(2, NO_DRAFTER)
    assert alone == RoundCosts(pair[0], pair[1:], platform)(2, NO_DRAFTER)


def test_a_pass_that_reads_for_longer_than_it_computes_costs_its_bytes(pair):
    costs, plain = RoundCosts(pair[0], [], Platform(1e9, 0.0)), Speculation(1)
    assert costs(1, plain) == costs(8, plain)
    computing = RoundCosts(pair[0], [], Platform(1e-6, 0.0))
    assert computing(8, plain) == pytest.approx(8 * computing(1, plain))


def test_qwen_on_an_h200_is_as_measured():
    """decode-h200-qwen3.6-35b-a3b-triton.md: 2.85 ms plain (batch 32: 15.1), 10.7 in rounds of 16; -mtp.md: 6.6."""
    target, drafter = "configs/hf/Qwen3.6-35B-A3B.json", "configs/hf/Qwen3.6-35B-A3B-DFlash.json"

    def costs_of(draft: str) -> RoundCosts:
        backend = backend_for("h200", "auto")
        pair = abstract_pair(read_shapes(target, draft), Layout(), jnp.bfloat16, None, backend)
        return RoundCosts(pair[0], pair[1:], platform_named("gpu"))

    costs = costs_of(drafter)
    plain = costs(1, Speculation(1))
    assert costs(1, Speculation(16)) / plain == pytest.approx(10.7 / 2.85, rel=0.1)
    assert costs_of(target)(1, Speculation(4)) / plain == pytest.approx(6.6 / 2.85, rel=0.2)
    assert costs(32, Speculation(1)) / plain == pytest.approx(15.1 / 2.85, rel=0.1)
    # A drafter without a record drafts at once.
    assert DraftLengthPolicy(speculations_of((8, 16)), costs).why_plain(1) is None


ROUNDS = speculations_of((4, 8, 16), (8,))
MEASURED = {(1, NO_DRAFTER): 0.001, (1, Speculation(4)): 0.002, (4, Speculation(8, 1, True)): 0.01}


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(round_costs, "RECORD_DAYS", 7)


@pytest.mark.usefixtures("kept")
def test_costs_of_one_process_are_those_that_the_next_one_begins_with(tmp_path):
    CostRecord(tmp_path, "models", (1, 2)).save(MEASURED)
    assert CostRecord(tmp_path, "models", (1, 2)).load() == MEASURED
    assert CostRecord(tmp_path, "models", (1, 3)).load() == {}
    policy = DraftLengthPolicy(ROUNDS, record=CostRecord(tmp_path, "models", (1, 2)))
    assert policy.seconds == MEASURED
    assert policy.is_measured(1, Speculation(4))
    for _ in range(3):
        policy.observe_seconds(1, Speculation(4), 0.004)
        policy.observe_seconds(1, Speculation(16), 0.02)
    policy.observe_seconds(2, NO_DRAFTER, 0.001)
    policy.keep()
    # What ran once is no measurement, and what is longer counts half.
    found = CostRecord(tmp_path, "models", (1, 2)).load()
    assert policy.seconds[1, Speculation(4)] == 0.004
    assert found == {**MEASURED, (1, Speculation(4)): pytest.approx(0.003), (1, Speculation(16)): 0.02}


@pytest.mark.usefixtures("kept")
def test_a_cost_is_known_that_several_processes_measured(tmp_path, monkeypatch):
    """However often each of them writes it, for a day; a shorter one holds at once, and a longer one counts half."""
    key, measured = (1, NO_DRAFTER), [0.002, 0.001, 0.0014, 0.0012]
    kept, known = [], []
    for seconds in measured:
        record = CostRecord(tmp_path)
        record.load()
        known.append(record.error(key) == KNOWN_ERROR)
        for _ in range(3):
            record.save({key: seconds})
        kept.append(CostRecord(tmp_path).load()[key])
    assert known == [i >= KNOWN_PROCESSES for i in range(4)]
    assert kept == pytest.approx([0.002, 0.001, 0.0012, 0.0012])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86_400)
    record = CostRecord(tmp_path)
    record.load()
    assert record.error(key) == RECORD_ERROR
    record.save({key: 0.0012})
    record.load()
    assert record.error(key) == KNOWN_ERROR


@pytest.mark.usefixtures("kept")
def test_costs_are_written_where_they_changed_and_forgotten_after_a_week(tmp_path, monkeypatch):
    record = CostRecord(tmp_path)
    record.save(MEASURED)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_ino
    record.save({key: 1.05 * seconds for key, seconds in MEASURED.items()})
    assert path.stat().st_ino == before
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5 * 86_400)
    record.save({(1, NO_DRAFTER): 0.003})
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    assert CostRecord(tmp_path).load() == {(1, NO_DRAFTER): 0.003}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"{}",
        b"3",
        b"[[[[",
        b"[" * 10**6,
        b"[1, null, [], [1, 2, 3], [1, 4, 0, false, NaN, 1e9, 1], [1, 4, 0, false, 1e999, 1e9, 1]]",
        b"[[1, 4, 0, false, 1"
        + b"0" * 400
        + b", 1e9, 1], [1, 4, 0, false, 1, 1"
        + b"0" * 400
        + b", 1], [0, 4, 0, false, 1, 1e9, 1], [1, 4, 0, false, 1, 1e9, null]]",
        b'[[1, 4, 0, false, -1, 0, 1], ["1", 4, 0, false, 1, 0, 1]]',
        b"[[1, 4, 0, false, 1, 1e99, 1], [1, 4, [], false, 1, 0, 1]]",
    ],
)
def test_a_file_that_is_no_record_has_no_costs_and_is_replaced(tmp_path, content):
    CostRecord(tmp_path).save(MEASURED)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    record = CostRecord(tmp_path)
    assert record.load() == {}
    record.save(MEASURED)
    assert CostRecord(tmp_path).load() == MEASURED


def test_costs_that_cannot_be_kept_are_left_out(tmp_path):
    for directory in (None, tmp_path / "absent", tmp_path / "file"):
        (tmp_path / "file").touch()
        record = CostRecord(directory)
        record.save(MEASURED)
        assert CostRecord(directory).load() == {}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "directory").mkdir()
    CostRecord(tmp_path / "directory").save(MEASURED)
    assert json.loads(next((tmp_path / "directory").iterdir()).read_text())


@pytest.mark.usefixtures("kept")
def test_costs_that_are_measured_again_are_renewed_and_those_of_other_drafters_are_left_out(tmp_path, monkeypatch):
    CostRecord(tmp_path).save({**MEASURED, (1, Speculation(4, 7)): 1.0})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 5 * 86_400)
    policy = DraftLengthPolicy(ROUNDS, record=CostRecord(tmp_path))
    assert policy.seconds == MEASURED
    for _ in range(3):
        policy.observe_seconds(1, Speculation(4), 0.002)
    assert policy.least_cost(1, Speculation(4)) == 0.002
    policy.keep()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86_400)
    assert CostRecord(tmp_path).load() == {(1, Speculation(4)): 0.002}


def test_a_verified_draft_costs_its_experts():
    """float32: in blocks of 4 of a sequence; beside a batch that chooses all experts, only their arithmetic."""
    target = tiny.target("da", moe="01")
    costs = RoundCosts(target, [tiny.drafter(target)], Platform(1e9, 0.0))
    passes = [costs(1, Speculation(n, None)) for n in (1, 2, 3, 4)]
    assert [costs.saved(4, n) for n in (1, 2, 3, 4)] == pytest.approx([passes[3] - each for each in passes])
    assert costs.saved(4 * 4096, 4096) == 0
    assert RoundCosts(target, [], Platform(1e-3, 0.0)).saved(4 * 4096, 4096) > 0
    dense = tiny.target("da", moe="")
    assert RoundCosts(dense, [], Platform(1e-3, 0.0)).saved(4, 1) == 0
