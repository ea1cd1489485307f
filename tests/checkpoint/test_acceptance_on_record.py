"""The acceptance that the configs of drafters have on record."""

import json

import pytest

from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.families.dflash import equal_rates, recorded_acceptance


@pytest.mark.parametrize("block_size", [2, 4, 16])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_equal_rates_follow_from_the_acceptance_length(rate, block_size):
    length = sum(rate**i for i in range(block_size))
    expected = [rate**i for i in range(1, block_size)]
    assert equal_rates(length, block_size) == pytest.approx(expected, abs=1e-4)


def test_rates_by_place_come_before_the_length():
    assert recorded_acceptance({"acceptance_rates": [0.9, 0.5, 0], "acceptance_length": 3}, 4) == (0.9, 0.5, 0.0)
    # A drafter that was measured in shorter blocks.
    assert recorded_acceptance({"acceptance_rates": [1]}, 4) == (1.0,)
    assert recorded_acceptance({"acceptance_length": 4}, 4) == pytest.approx((1, 1, 1), abs=1e-4)
    assert recorded_acceptance({}, 4) is None


@pytest.mark.parametrize(
    "rates",
    [
        *([], [0.5] * 4, [0.5, 0.6], [1.1], [-0.1], [float("nan")], [0.5, float("nan")], [float("inf")], [10**400]),
        *([True], ["0.5"], [None], [[0.5]], {"0": 0.5}, "0.5", 0.5, None),
    ],
)
def test_rates_that_no_block_can_have_are_no_record(rates):
    assert recorded_acceptance({"acceptance_rates": rates}, 4) is None
    assert recorded_acceptance({"acceptance_rates": rates, "acceptance_length": 3}, 4) == equal_rates(3, 4)


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan"), float("inf"), 10**400, True, "3", None, [3]])
def test_a_length_that_no_block_can_have_is_no_record(length):
    assert recorded_acceptance({"acceptance_length": length}, 4) is None
    assert recorded_acceptance({"acceptance_length": 1}, 1) is None


@pytest.mark.parametrize(("directory", "block_size"), [("draft", 16), ("target", 8)], ids=["dflash", "mtp"])
def test_both_bundled_drafters_have_a_record_by_place(directory, block_size):
    raw = json.loads((TINY / directory / "config.json").read_text(encoding="utf-8"))
    rates = recorded_acceptance(raw, block_size)
    assert rates == tuple(raw["acceptance_rates"])
    assert len(rates) == block_size - 1
    # Each is rounded to 4 digits, the length to 2.
    assert raw["acceptance_length"] == pytest.approx(1 + sum(rates), abs=0.006)
