"""Values of messages between processes: they come back equal, and no bytes do harm."""

import struct
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.parallel.encoding import DTYPES, MAX_DEPTH, Codec, DecodingError


@dataclass(frozen=True)
class Point:
    x: int
    rest: object


CODEC = Codec((Point,))
SINGLE = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SINGLE,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.builds(Point, st.integers(-5, 5), inner),
    max_leaves=12,
).filter(lambda value: depth(value) <= MAX_DEPTH)


def depth(value) -> int:
    if isinstance(value, Point):
        return 1 + depth(value.rest)
    return 1 + max(map(depth, value), default=0) if isinstance(value, tuple) else 0


@given(VALUES)
def test_values_come_back(value):
    found = CODEC.decode(CODEC.encode(value))
    # An int is no bool, and 1 is not 1.0.
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_arrays_come_back(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    for given_array in (array, array.T):
        found = CODEC.decode(CODEC.encode((given_array,)))[0]
        assert found.dtype == dtype
        assert found.shape == given_array.shape
        np.testing.assert_array_equal(found, given_array)
        assert not found.flags.writeable


ALIEN = [[1], {1: 2}, b"x", object(), np.int32(3), print, (1, [2])]
ALIEN += [np.array(["x"]), np.zeros(2, ">f4"), np.zeros((1,) * 9)]


@pytest.mark.parametrize("value", ALIEN, ids=lambda value: type(value).__name__)
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        CODEC.encode(value)


def test_a_subclass_of_a_record_is_refused():
    class Other(Point):
        pass

    with pytest.raises(TypeError, match="Other"):
        CODEC.encode(Other(1, 2))


def test_large_numbers_and_deep_values_are_refused():
    with pytest.raises(OverflowError):
        CODEC.encode(2**63)
    value = ()
    for _ in range(MAX_DEPTH):
        value = (value,)
    with pytest.raises(TypeError, match="inside more than"):
        CODEC.encode(value)
    assert CODEC.decode(CODEC.encode(value[0])) == value[0]


EVIL = {
    "empty": b"",
    "unknown kind": b"?",
    "pickle": b"\x80\x04\x95.",
    "a tuple of four billion": b"L\xff\xff\xff\xff",
    "ints of 32 GB": b"P\xff\xff\xff\xff",
    "text of 4 GB": b"S\xff\xff\xff\xffx",
    "bad UTF-8": b"S\x00\x00\x00\x01\xff",
    "unknown record": b"R\x07",
    "a record cut short": b"R\x00I",
    "unknown dtype": b"A\x63\x00",
    "dimensions": b"A\x00\xff",
    "an array of 2^96": b"A\x01\x03" + b"\xff" * 12,
    "zero times huge": b"A\x01\x03" + struct.pack("!3I", 0, 2**32 - 1, 2**32 - 1) + b"x",
    "deep": b"L\x00\x00\x00\x01" * 100_000,
    "deep records": b"R\x00N" * 100_000,
    "more behind the value": b"NN",
}


@pytest.mark.parametrize("data", EVIL.values(), ids=EVIL)
def test_bytes_of_no_value_are_refused(data):
    with pytest.raises(DecodingError):
        CODEC.decode(data)


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.tuples(VALUES, st.integers(0, 10**6), st.binary(min_size=1, max_size=4)))
def test_any_bytes_are_a_value_or_refused(data):
    if isinstance(data, tuple):
        # A valid message, damaged at one place.
        value, at, damage = data
        whole = CODEC.encode(value)
        at %= len(whole)
        data = whole[:at] + damage + whole[at + len(damage) :]
    with suppress(DecodingError):
        CODEC.decode(data)


def test_both_sides_list_the_same_records():
    assert CODEC.decode(CODEC.encode(replace(Point(1, (2.0, "x")), x=4))) == Point(4, (2.0, "x"))
    with pytest.raises(DecodingError, match="record 0"):
        Codec().decode(CODEC.encode(Point(1, 2)))
