"""Reads GGUF, the file format of llama.cpp. Other kinds of tensors than those of `SIZES` need the package gguf."""

import math
import reprlib
import struct
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from dflash_jax.errors import InputError

VERSIONS = (2, 3)
# Types of metadata values: numbers with their letter in `struct`, then the types without a fixed size.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT32 = 8, 9, 6
# Kinds of tensors that are unpacked here: (numbers of a block, its bytes), as in ggml-common.h of llama.cpp.
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
SIZES = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}
# Most items of an array, dimensions of a tensor, and bytes of alignment: more than any published file has.
MOST_ITEMS, MOST_DIMENSIONS, MOST_ALIGNMENT = 2**23, 8, 2**20


def import_gguf() -> ModuleType:
    """The package gguf.

    Raises:
        InputError: It is not installed.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise InputError(
            'reading this kind of GGUF tensors needs the package gguf: pip install "dflash-jax[gguf]"'
        ) from None
    return gguf


def dequantize(data: np.ndarray, kind: int) -> np.ndarray:
    """Unpacks a tensor of a kind of `SIZES`, as dequantize_row of ggml-quants.c of llama.cpp does.

    Args:
        data: uint8 [..., bytes of a row].
        kind: The ggml type.

    Returns:
        float32 [..., numbers of a row].
    """
    if kind in (F32, F16):
        return data.view("<f4" if kind == F32 else "<f2").astype(np.float32)
    numbers, size = SIZES[kind]
    blocks = data.reshape(*data.shape[:-1], -1, size)
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float32)
    if kind == Q8_0:
        values = scale * blocks[..., 2:].view(np.int8)
    else:
        minimum = np.ascontiguousarray(blocks[..., 2:4]).view("<f2").astype(np.float32)
        # The low four bits of the bytes are the first half of a block.
        values = scale * np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1) + minimum
    return values.reshape(*data.shape[:-1], data.shape[-1] // size * numbers)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as stored.

    Attributes:
        shape: Its shape, rows first.
        kind: Its ggml type.
        data: Its bytes, uint8 [..., bytes of a row].
    """

    shape: tuple[int, ...]
    kind: int
    data: np.ndarray


class GgufFile:
    """A mapped GGUF file.

    Attributes:
        path: The file.
        metadata: Key → value.
        tensors: Name → tensor.
    """

    def __init__(self, path: str | Path):
        """Reads the header.

        Raises:
            InputError: The file is unreadable, truncated or corrupt.
        """
        self.path = path
        try:
            self._bytes = np.asarray(np.memmap(path, mode="r"))
        except OSError as e:
            raise InputError(f"{path} cannot be read: {e.strerror}") from None
        except ValueError:
            raise InputError(f"{path} is not a GGUF file: it is empty") from None
        if self._bytes[:4].tobytes() != b"GGUF":
            raise InputError(f"{path} is not a GGUF file: it does not start with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise InputError(f"{path} is GGUF of version {version}, or big-endian: known are little-endian 2 and 3")
        tensors, pairs = self._number("Q"), self._number("Q")
        self.metadata = {self._string(): self._value(self._number("I")) for _ in range(pairs)}
        places = [(self._string(), *self._place()) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= MOST_ALIGNMENT:
            message = f"general.alignment is {reprlib.repr(alignment)}, it must be 1 to {MOST_ALIGNMENT}"
            raise InputError(f"{path}: {message}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in places}

    def _take(self, size: int) -> bytes:
        """The next ``size`` bytes of the header. Every length in the file is checked here against the file's size."""
        if self._at + size > len(self._bytes):
            raise InputError(f"{self.path} is truncated or corrupt: it ends inside its header")
        self._at += size
        return self._bytes[self._at - size : self._at].tobytes()

    def _number(self, letter: str):
        (value,) = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))
        return value

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError:
            raise InputError(f"{self.path} is corrupt: its header has text that is not UTF-8") from None

    def _value(self, kind: int):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._number("I"), self._number("Q")
            if count > MOST_ITEMS:
                raise InputError(f"{self.path} has an array of {count} items: at most {MOST_ITEMS} are possible")
            if item in NUMBERS:
                size = struct.calcsize(f"<{NUMBERS[item]}")
                return np.frombuffer(self._take(count * size), f"<{NUMBERS[item]}").tolist()
            if item == STRING:
                return [self._string() for _ in range(count)]
        if kind not in NUMBERS:
            raise InputError(f"{self.path} is corrupt: its header has a value of an unknown kind")
        value = self._number(NUMBERS[kind])
        # The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        dimensions = self._number("I")
        if dimensions > MOST_DIMENSIONS:
            raise InputError(f"{self.path} is corrupt: a tensor has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        if kind in SIZES:
            block, size = SIZES[kind]
        else:
            gguf = import_gguf()
            try:
                block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            except (KeyError, ValueError):
                raise InputError(f"{self.path}: tensor {name!r} has the unknown type {kind}: a newer gguf?") from None
        if not all(shape):
            raise InputError(f"{self.path}: tensor {name!r} {list(shape)} is empty")
        if not shape or shape[-1] % block:
            raise InputError(f"{self.path}: tensor {name!r} {list(shape)} does not divide into blocks of {block}")
        stored = (*shape[:-1], shape[-1] // block * size)
        end = start + math.prod(stored)
        if end > len(self._bytes):
            raise InputError(f"{self.path} is truncated: {name!r} ends at byte {end} of {len(self._bytes)}")
        return GgufTensor(shape, kind, self._bytes[start:end].reshape(stored))

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Unpacks a tensor to float32.

        Args:
            name: The tensor.
            index: Which of the tensors stacked along the first axis; None: all.

        Raises:
            InputError: The package gguf cannot unpack its type.
        """
        tensor = self.tensors[name]
        data = tensor.data if index is None else tensor.data[index]
        data = np.ascontiguousarray(data)
        if tensor.kind in SIZES:
            return dequantize(data, tensor.kind)
        gguf = import_gguf()
        kind = gguf.GGMLQuantizationType(tensor.kind)
        try:
            return gguf.quants.dequantize(data, kind)
        except NotImplementedError:
            raise InputError(f"{self.path}: {name!r} is {kind.name}, which the package gguf cannot unpack") from None
