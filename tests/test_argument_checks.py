"""Checks of arguments: how messages show values, and NumPy's values as Python's."""

import pickle
from fractions import Fraction

import numpy as np
import pytest

from dflash_jax.argument_checks import ArgumentError, plain, shown, wrong
from tests.odd_values import HUGE, Unprintable


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HUGE, "an integer of 16610 bits"),
        ([HUGE], "[an integer of 16610 bits]"),
        (Unprintable(), "<Unprintable instance at "),
        (type("list", (), {"__repr__": Unprintable.__repr__})(), "a value of type list"),
        ("a\nb" * 50, "'a\\nba"),
    ],
    ids=["integer", "list", "no repr", "no list", "long"],
)
def test_shown_gives_every_value_on_one_short_line(value, message):
    assert shown(value).startswith(message)
    assert len(shown(value)) <= 60


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((np.bool_(True), True), (np.int64(1), 1), (np.float16(0.5), 0.5), (np.longdouble(0.5), 0.5)),
        *((np.array([1, 2]), [1, 2]), (np.array("a"), "a"), (np.str_("a"), "a"), (Fraction(1, 2), 0.5)),
        *((Fraction(HUGE), Fraction(HUGE)), (np.int64, np.int64), ("a", "a"), (None, None)),
    ],
)
def test_plain_gives_pythons_value_of_numpys(value, expected):
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_an_argument_error_survives_pickling():
    error = pickle.loads(pickle.dumps(wrong("slots", 0, "1 to 256")))
    assert (type(error), str(error)) == (ArgumentError, "slots is 0: it must be 1 to 256")
