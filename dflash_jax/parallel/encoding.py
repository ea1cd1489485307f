"""Values as bytes, for messages between the processes of one model. Reading executes nothing.

A value is None, a bool, an int of 64 bits, a float, text, an array of a listed dtype, a tuple of values, or a record:
an instance of a dataclass or named tuple that both sides have listed. Each begins with a byte that says which. Integers
are big-endian, arrays are in the order of the machine: those that JAX runs on are all little-endian.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: tuple[np.dtype, ...] = (
    *(np.dtype(name) for name in ("bool", "int32", "uint32", "int64", "float32", "float16")),
    np.dtype(ml_dtypes.bfloat16),
)
# Tuples and records inside each other.
MAX_DEPTH = 8
# Dimensions of an array.
MAX_DIMENSIONS = 8

_NONE, _FALSE, _TRUE, _INT, _FLOAT, _TEXT, _TUPLE, _INTS, _ARRAY, _RECORD = b"NFTIDSLPAR"
_COUNT, _LONG, _DOUBLE = struct.Struct("!I"), struct.Struct("!q"), struct.Struct("!d")


class DecodingError(ValueError):
    """Bytes that `Codec.encode` does not write."""


class Codec:
    """Encodes and decodes values.

    Args:
        records: Dataclasses and named tuples whose instances are values. Both sides list the same ones in one order.
    """

    def __init__(self, records: Sequence[type] = ()):
        self._records = tuple(records)
        self._numbers = {record: i for i, record in enumerate(records)}
        self._names: dict[type, tuple[str, ...]] = {
            record: getattr(record, "_fields", None) or tuple(field.name for field in fields(record))
            for record in records
        }

    @property
    def layout(self) -> list[tuple[str, tuple[str, ...]]]:
        """Name and fields of each record, in order."""
        return [(record.__name__, names) for record, names in self._names.items()]

    def encode(self, value: Any) -> bytes:
        """The bytes of a value.

        Raises:
            TypeError: It is of another type, or inside more than `MAX_DEPTH` tuples and records.
            OverflowError: An int has more than 64 bits.
        """
        parts: list[bytes] = []
        self._write(value, parts.append, MAX_DEPTH)
        return b"".join(parts)

    def _write(self, value: Any, add: Callable[[bytes], None], depth: int) -> None:
        kind = type(value)
        if value is None:
            add(b"N")
        elif kind is bool:
            add(b"T" if value else b"F")
        elif kind is int:
            if not -(2**63) <= value < 2**63:
                raise OverflowError(f"{value} has more than 64 bits")
            add(b"I" + _LONG.pack(value))
        elif kind is float:
            add(b"D" + _DOUBLE.pack(value))
        elif kind is str:
            text = value.encode()
            add(b"S" + _COUNT.pack(len(text)) + text)
        elif isinstance(value, np.ndarray):
            self._write_array(value, add)
        elif depth == 0:
            raise TypeError(f"a value inside more than {MAX_DEPTH} others cannot be sent")
        elif kind is tuple:
            if value and all(type(x) is int for x in value):
                # One call for all: slots and block sizes are long.
                add(b"P" + struct.pack(f"!I{len(value)}q", len(value), *value))
                return
            add(b"L" + _COUNT.pack(len(value)))
            for part in value:
                self._write(part, add, depth - 1)
        elif kind in self._numbers:
            add(bytes((_RECORD, self._numbers[kind])))
            for name in self._names[kind]:
                self._write(getattr(value, name), add, depth - 1)
        else:
            raise TypeError(f"a value of type {kind.__name__} cannot be sent")

    def _write_array(self, value: np.ndarray, add: Callable[[bytes], None]) -> None:
        if value.dtype not in DTYPES or value.ndim > MAX_DIMENSIONS:
            raise TypeError(f"an array of {value.dtype} with {value.ndim} dimensions cannot be sent")
        add(bytes((_ARRAY, DTYPES.index(value.dtype), value.ndim)) + struct.pack(f"!{value.ndim}I", *value.shape))
        add(value.tobytes())

    def decode(self, data: bytes) -> Any:
        """The value of bytes that `encode` has returned. Its arrays are read-only.

        Raises:
            DecodingError: The bytes are those of no value. No more memory was taken than a few times their length.
        """
        reader = _Reader(data)
        try:
            value = self._read(reader, MAX_DEPTH)
        except (ValueError, TypeError, OverflowError) as e:
            raise DecodingError(str(e)) from None
        if reader.left:
            raise DecodingError(f"{reader.left} bytes too many")
        return value

    def _read(self, reader: "_Reader", depth: int) -> Any:
        kind = reader.byte()
        if kind in (_NONE, _FALSE, _TRUE):
            return {_NONE: None, _FALSE: False, _TRUE: True}[kind]
        if kind == _INT:
            return _LONG.unpack(reader.take(8))[0]
        if kind == _FLOAT:
            return _DOUBLE.unpack(reader.take(8))[0]
        if kind == _TEXT:
            return str(reader.take(reader.count()), "utf-8")
        if kind == _ARRAY:
            return self._read_array(reader)
        if kind == _INTS:
            count = reader.count()
            return struct.unpack(f"!{count}q", reader.take(8 * count))
        if depth == 0:
            raise DecodingError(f"values inside more than {MAX_DEPTH} others")
        if kind == _TUPLE:
            count = reader.count()
            if count > reader.left:
                raise DecodingError(f"{count} values in {reader.left} bytes")
            return tuple(self._read(reader, depth - 1) for _ in range(count))
        if kind == _RECORD:
            number = reader.byte()
            if number >= len(self._records):
                raise DecodingError(f"record {number} is not known")
            record = self._records[number]
            return record(*(self._read(reader, depth - 1) for _ in self._names[record]))
        raise DecodingError(f"byte {kind} begins no value")

    def _read_array(self, reader: "_Reader") -> np.ndarray:
        number, dimensions = reader.byte(), reader.byte()
        if number >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
            raise DecodingError(f"an array of dtype {number} with {dimensions} dimensions")
        shape = struct.unpack(f"!{dimensions}I", reader.take(4 * dimensions))
        count = 1
        for size in shape:
            count *= size
        dtype = DTYPES[number]
        return np.frombuffer(reader.take(count * dtype.itemsize), dtype, count).reshape(shape)


class _Reader:
    """Reads bytes from the front.

    Attributes:
        left: Bytes that are left.
    """

    def __init__(self, data: bytes):
        self._data, self._at, self.left = memoryview(data), 0, len(data)

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes."""
        if size > self.left:
            raise DecodingError(f"{size} bytes are needed, {self.left} are left")
        self._at += size
        self.left -= size
        return self._data[self._at - size : self._at]

    def byte(self) -> int:
        """The next byte."""
        return self.take(1)[0]

    def count(self) -> int:
        """The next 4 bytes as a number."""
        return _COUNT.unpack(self.take(4))[0]
