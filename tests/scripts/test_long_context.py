"""The measurement of long contexts: its prompts and figures, on an engine without a model whose clock is known."""

from dataclasses import replace

import pytest

from dflash_jax.benchmarking.store import read_record
from dflash_jax.errors import InputError
from dflash_jax.ops.cache import KVCache
from tests.engine import mock_runner
from tests.helpers import load_script

long_context = load_script("bench/long_context.py")
Case, Setup = long_context.Case, long_context.Setup

NEW, WINDOW = 20, 8
PLAIN, DRAFTED = Case(), Case(8, WINDOW)


@pytest.fixture(scope="module")
def setups():
    """Pages of four positions; the drafter's caches have a window."""
    plain = mock_runner.engine(1, 400)
    drafted = mock_runner.engine(1, 400, pages=(100, 10), window=(WINDOW, 0))
    return [Setup(PLAIN, plain, (3, 0), (0, 0)), Setup(DRAFTED, drafted, (3, 0), (0, 5))]


@pytest.fixture(scope="module")
def rows(setups):
    prompts = long_context.cuts([5 + i % 40 for i in range(400)], [40, 200], 2)
    params = mock_runner.request([1], NEW).params
    for setup in setups:
        setup.engine.runner.ends = False
    samples = long_context.measure(setups, prompts, params)
    return {(row["context"], row["case"]): row for row in long_context.rows_of(samples, setups, lambda *_: 1.0)}


def test_prompts_of_all_lengths_end_at_the_same_places():
    sets = long_context.cuts(range(100), [10, 60], 3)
    assert [s[60][0] for s in sets] == [0, 20, 40]
    assert [s[60][-1] for s in sets] == [s[10][-1] for s in sets] == [59, 79, 99]
    assert {n: len(prompt) for n, prompt in sets[0].items()} == {10: 10, 60: 60}
    with pytest.raises(InputError, match="have 100 tokens, and 101 are asked for"):
        long_context.cuts(range(100), [101], 1)


def test_cases_are_plain_decoding_every_window_and_smaller_chunks():
    names = [str(case) for case in long_context.cases_of(8, [256, 1024], [64])]
    windows = ["blocks of 8", "blocks of 8, window of 1,024", "blocks of 8, window of 256"]
    assert names == ["plain", *windows, "plain, chunks of 64"]


def test_bytes_of_a_page_count_keys_and_values_of_both_kinds_of_caches():
    full, windowed = KVCache.create(1, 3, 16, 512, "float32"), KVCache.create(1, 2, 8, 512, "bfloat16", window=300)
    assert long_context.page_bytes(((full, full), windowed)) == (2 * 2 * 256 * 3 * 16 * 4, 2 * 256 * 2 * 8 * 2)
    assert long_context.page_bytes(()) == (0, 0)


def test_seconds_are_those_of_the_engines_clock(rows):
    """A chunk takes as many microseconds as it has tokens, and a round of one token a millisecond."""
    for length in (40, 200):
        row = rows[length, "plain"]
        assert row["prefill_s"] == pytest.approx(1e-6 * length, rel=0.6)
        assert row["prefill_tokens_per_s"] == pytest.approx(length / row["prefill_s"])
        assert row["decode_tokens_per_s"] == pytest.approx(1000, rel=0.1)
        assert row["acceptance_length"] == row["times_plain"] == 1


def test_drafted_rounds_yield_several_tokens_and_the_same_text(rows):
    for length in (40, 200):
        row = rows[length, str(DRAFTED)]
        assert row["acceptance_length"] > 2
        assert row["times_plain"] > 2
        assert (row["equal"], row["prompts"], row["partings"]) == (2, 2, [])


def test_keys_and_values_of_the_drafter_follow_the_window_and_those_of_the_target_the_context(rows):
    """The window of 8 positions has three pages at most, and a dispatch writes some more before pages are given up."""
    short, long = rows[40, str(DRAFTED)], rows[200, str(DRAFTED)]
    assert (short["target_kv_bytes"], long["target_kv_bytes"]) == (3 * 60 // 4, 3 * 220 // 4)
    assert short["draft_kv_bytes"] == long["draft_kv_bytes"] <= 5 * 10
    assert rows[200, "plain"]["draft_kv_bytes"] == 0


def test_tokens_that_differ_are_told_with_the_targets_margin(setups):
    sample = long_context.Sample(1.0, 2.0, 0.1, [1, 2, 3, 4], 4, (1, 0))
    other = replace(sample, tokens=[1, 2, 9, 9], rounds=2, pages=(1, 1))
    samples = {(40, PLAIN): [sample, sample], (40, DRAFTED): [sample, other]}
    asked = []

    def margin_at(*where):
        asked.append(where)
        return 1e-6

    row = long_context.rows_of(samples, setups, margin_at)[1]
    assert asked == [(40, 1, [1, 2, 3, 4], 2)]
    assert row["partings"] == [{"prompt": 1, "at": 2, "margin": 1e-6}]
    assert long_context.equality(row) == "1 of 2, others part at ties"
    row["partings"][0]["margin"] = 0.25
    assert long_context.equality(row) == "1 of 2, NOT a tie: 0.25"


def test_the_tables_have_a_line_for_every_row_and_pool(rows, setups):
    text = long_context.tables(list(rows.values()), long_context.pools_of(setups))
    assert text.count("\n| 40 | ") == text.count("\n| 200 | ") == 2
    assert "\n| blocks of 8, window of 8 | 0.00 | 0.00 |" in text
    assert len({line.count("|") for line in text.split("\n\n")[0].splitlines()}) == 1


@pytest.mark.parametrize(
    ("option", "value"), [("contexts", "0"), ("windows", "-1"), ("block_size", "1"), ("runs", "0")]
)
def test_a_value_that_is_too_small_is_refused(option, value, capsys):
    assert long_context.main([f"--{option.replace('_', '-')}", value]) == 2
    assert option in capsys.readouterr().err


def test_predictions_are_the_recorded_rounds_where_they_were_measured():
    model, shapes = long_context.RoundModel.of_record(), long_context.system_shapes("qwen3.6-35b-a3b")
    for row, block, context in (
        ("batch 1, width 1, context 2048, 8 experts", 1, 2048),
        ("batch 1, width 16, context 2048, 102 experts", 16, 2048),
        ("batch 1, width 16, context 8192, 102 experts", 16, 8192),
    ):
        measured = read_record(long_context.RECORD)["points"][row]
        assert 1e3 * model.seconds(shapes, "h200", block, context) == pytest.approx(measured["round_ms"], rel=1e-6)
        # Experts that were counted, and the shapes' own.
        assert sum(long_context.bytes_of_round(shapes, block, context)) == pytest.approx(
            1e9 * measured["gb_a_round"], rel=2e-3
        )


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3-coder-30b-a3b"])
def test_predicted_rounds_grow_with_context_and_block_and_not_with_a_window(name):
    model, shapes = long_context.RoundModel.of_record(), long_context.system_shapes(name)
    window = long_context.own_window(shapes)
    for card in long_context.CARDS:
        for context in long_context.LONG:
            rounds = [model.seconds(shapes, card, block, context) for block in (1, *long_context.BLOCKS)]
            assert rounds == sorted(rounds)
            seen = [model.seconds(shapes, card, block, context, window) for block in (1, *long_context.BLOCKS)]
            # Windows have whole pages.
            assert all(a <= 1.001 * b for a, b in zip(seen, rounds, strict=True))
            assert seen[0] == rounds[0], "a plain step has no drafter"
            assert model.seconds(shapes, card, 16, 2 * context) > rounds[-1]
            assert replace(model, context=0.7).seconds(shapes, card, 16, context) < rounds[-1]


def test_the_table_of_predictions_says_that_it_is_one(capsys):
    assert long_context.main(["--predict", "qwen3.6-35b-a3b", "--devices", "H200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Predicted, not measured")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| qwen")]
    assert len(rows) == 2 * len(long_context.LONG)
    for row in rows:
        plain, sixteen, pays = float(row[3]), float(row[6]), float(row[9])
        assert pays == pytest.approx(sixteen / plain, abs=0.01)
    assert long_context.main(["--predict", "nothing"]) == 2
