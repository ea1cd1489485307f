"""The table of equal work: its arithmetic, and that the committed page is what the script writes."""

from pathlib import Path

import pytest

from tests.helpers import load_script

equal_work = load_script("bench/equal_work.py")

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_script_writes(tmp_path):
    assert equal_work.main(["--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == (ROOT / "benchmarks/equal_work.md").read_text()


def test_round_times_follow_from_published_throughput():
    """1,000 tokens/s of 4 requests at 5 tokens a round are 200 rounds of all four in 4 s: 20 ms each."""
    published = {
        "throughput": [
            {"task": "a", "concurrency": 4, "block_size": 8, "autoregressive": 500.0, "dflash": 1000.0},
            {"task": "a", "concurrency": 1, "block_size": 8, "autoregressive": 1.0, "dflash": 1.0},
        ],
        "acceptance_length": {"a": {"8": {"dflash": 5.0}}},
    }
    assert equal_work.published_rounds(published, 4, 8) == [20.0]
    assert equal_work.published_rounds(published, 4, 1) == [8.0]


def test_a_round_on_another_card():
    """10 GB at 1,000 GB/s are a floor of 10 ms, of which 15 were measured. With two more experts of 1 GB and twice the
    bandwidth the floor is 6 ms: 9 at the same fraction, 11 with the same 5 ms above it."""
    point = {"gb_a_round": 10.0, "experts_touched": 3, "round_ms": 15.0}
    assert equal_work.scaled(point, 5, 1.0, 1000.0, 2000.0) == pytest.approx((9.0, 11.0))


def test_the_size_of_an_expert():
    """Qwen3.6-35B-A3B: three matrices of 2,048 by 512 in 40 layers."""
    assert equal_work.gigabytes_of_an_expert(equal_work.target()) == pytest.approx(3 * 2048 * 512 * 2 * 40 / 1e9)
