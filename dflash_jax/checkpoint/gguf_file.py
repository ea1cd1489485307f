"""Reads GGUF, the file format of llama.cpp. Other kinds of tensors than those of `SIZES` need the package gguf."""

import math
import mmap
import re
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
F32, F16, Q4_0, Q4_1, Q8_0, I32, I64, BF16 = 0, 1, 2, 3, 8, 26, 27, 30
SIZES = {
    F32: (1, 4),
    F16: (1, 2),
    BF16: (1, 2),
    I32: (1, 4),
    I64: (1, 8),
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q8_0: (32, 34),
}
# Kinds whose numbers stand in the file as they are, and what becomes of them.
PLAIN = {F32: ("<f4", "f4"), F16: ("<f2", "f4"), I32: ("<i4", "i8"), I64: ("<i8", "i8")}
# Kinds with one scale for each 32 numbers and no minimum: their bits.
BITS = {Q4_0: 4, Q8_0: 8}
# Most bytes of a header, its keys and tensors, and the items of all arrays.
MOST_BYTES, MOST_ENTRIES, MOST_ITEMS = 2**28, 2**17, 2**23
# Most dimensions of a tensor, letters of its name, and bytes of alignment. No published file has more of any of these.
MOST_DIMENSIONS, MOST_LETTERS, MOST_ALIGNMENT = 8, 200, 2**20
# The name of one of several files of a model, which count from 1.
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


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


@np.errstate(all="ignore")
def dequantize(data: np.ndarray, kind: int) -> np.ndarray:
    """Unpacks a tensor as dequantize_row of ggml-quants.c of llama.cpp does.

    Args:
        data: uint8 [..., bytes of a row].
        kind: The ggml type.

    Returns:
        float32 [..., numbers of a row]; int64 of whole numbers.

    Raises:
        InputError: The package gguf is missing, or cannot unpack the type.
    """
    data = np.ascontiguousarray(data)
    if kind in PLAIN:
        stored, dtype = PLAIN[kind]
        return data.view(stored).astype(dtype)
    if kind == BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind in BITS:
        codes, scale = split_blocks(data, kind)
        values = codes.astype(np.float32) - np.float32(2 ** (BITS[kind] - 1))
        blocks = scale.astype(np.float32)[..., None] * values.reshape(*scale.shape, 32)
        return blocks.reshape(values.shape)
    if kind == Q4_1:
        blocks = data.reshape(*data.shape[:-1], -1, SIZES[kind][1])
        ends = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
        values = ends[..., :1] * _halves(blocks[..., 4:]) + ends[..., 1:]
        return values.reshape(*data.shape[:-1], -1)
    gguf = import_gguf()
    kinds = gguf.GGMLQuantizationType
    try:
        return gguf.quants.dequantize(data, kinds(kind))
    except NotImplementedError:
        raise InputError(f"tensors of {kinds(kind).name} cannot be unpacked by the package gguf") from None


def split_blocks(data: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a tensor of a kind of `BITS`: (code - half the codes) · scale.

    Args:
        data: uint8 [..., bytes of a row].
        kind: The ggml type.

    Returns:
        Codes, uint8 [..., N], and scales, float16 [..., N / 32].
    """
    blocks = data.reshape(*data.shape[:-1], -1, SIZES[kind][1])
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    codes = _halves(blocks[..., 2:]) if kind == Q4_0 else blocks[..., 2:] ^ 128
    return codes.reshape(*data.shape[:-1], -1), scale


def _halves(data: np.ndarray) -> np.ndarray:
    """Codes of four bits: the low bits of the bytes of a block are its first half."""
    return np.concatenate([data & 15, data >> 4], -1)


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
    """A mapped GGUF file, or several that are one model.

    Attributes:
        path: The file; of several, the first.
        metadata: Key → value.
        tensors: Name → tensor.
    """

    def __init__(self, path: str | Path):
        """Reads the header; of a file that is one of several in its directory, the headers of all.

        Raises:
            InputError: A file is missing, unreadable, truncated or corrupt.
        """
        first = _Header(path)
        names = _parts(path, first.metadata.get("split.count", 1))
        self._headers = [first if Path(path).name == Path(name).name else _Header(name) for name in names]
        self.path, self.metadata = names[0], self._headers[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for number, (name, header) in enumerate(zip(names, self._headers, strict=True)):
            if len(names) > 1:
                header.check_part(number, len(names))
            if both := header.tensors.keys() & self.tensors.keys():
                raise InputError(f"{name} has the tensor {min(both)!r}, which a part before it has, too")
            self.tensors |= header.tensors

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Unpacks a tensor, see `dequantize`.

        Args:
            name: The tensor.
            index: Which of the tensors stacked along the first axis; None: all.

        Raises:
            InputError: The package gguf cannot unpack its type.
        """
        tensor = self.tensors[name]
        return dequantize(tensor.data if index is None else tensor.data[index], tensor.kind)

    def release(self) -> None:
        """Drops the pages that were read, since mapped pages count as memory of the process."""
        for header in self._headers:
            header.release()


def _parts(path: str | Path, count: object) -> list[str | Path]:
    """The files of a model of which ``path`` is one."""
    if type(count) is not int:
        raise InputError(f"{path}: split.count is {reprlib.repr(count)}: it must be a whole number")
    if count <= 1:
        return [path]
    named = PART.fullmatch(Path(path).name)
    if named is None or int(named[3]) != count:
        raise InputError(
            f"{path} is one of {count} parts: their names must be NAME-00001-of-{count:05d}.gguf to "
            f"NAME-{count:05d}-of-{count:05d}.gguf"
        )
    paths = [Path(path).with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [each.name for each in paths if not each.exists()]
    if missing:
        raise InputError(
            f"{path} is one of {count} parts: {len(missing)} of them are not beside it, first {missing[0]}"
        )
    return list(paths)


class _Header:
    """The header of one mapped file; attributes as of `GgufFile`."""

    def __init__(self, path: str | Path):
        self.path = path
        try:
            self._map = np.memmap(path, mode="r")
        except OSError as e:
            raise InputError(f"{path} cannot be read: {e.strerror}") from None
        except ValueError:
            raise InputError(f"{path} is not a GGUF file: it is empty") from None
        self._bytes = np.asarray(self._map)
        if self._bytes[:4].tobytes() != b"GGUF":
            raise InputError(f"{path} is not a GGUF file: it does not start with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise InputError(f"{path} is GGUF of version {version}, or big-endian: known are little-endian 2 and 3")
        tensors, pairs = self._number("Q"), self._number("Q")
        for what, count in (("tensors", tensors), ("keys", pairs)):
            if count > MOST_ENTRIES:
                raise InputError(f"{path} is corrupt: it has {count} {what}, at most {MOST_ENTRIES} are read")
        self.metadata, self._items = {}, 0
        for _ in range(pairs):
            key = self._string()
            if key in self.metadata:
                raise InputError(f"{path} is corrupt: it has the key {reprlib.repr(key)} twice")
            self.metadata[key] = self._value(key, self._number("I"))
        places = {}
        for _ in range(tensors):
            name = self._string()
            if len(name) > MOST_LETTERS:
                raise InputError(f"{path} is corrupt: the name of a tensor has {len(name)} letters")
            if name in places:
                raise InputError(f"{path} is corrupt: it has two tensors {name!r}")
            places[name] = self._place()
        alignment = self.metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= MOST_ALIGNMENT:
            message = f"general.alignment is {reprlib.repr(alignment)}, it must be 1 to {MOST_ALIGNMENT}"
            raise InputError(f"{path}: {message}")
        start = -(-self._at // alignment) * alignment
        self._ends: list[tuple[int, int, str]] = []
        self.tensors = {name: self._tensor(name, shape, kind, start + at) for name, (shape, kind, at) in places.items()}
        self._ends.sort()
        for (_, end, name), (begin, _, after) in zip(self._ends, self._ends[1:], strict=False):
            if begin < end:
                raise InputError(f"{path} is corrupt: the tensors {name!r} and {after!r} overlap")

    def check_part(self, number: int, count: int) -> None:
        """Raises InputError where the file says that it is another part than its name."""
        for key, right in (("split.no", number), ("split.count", count)):
            if (found := self.metadata.get(key)) != right:
                raise InputError(f"{self.path} has {key} {reprlib.repr(found)}: by its name it must be {right}")

    def release(self) -> None:
        if isinstance(self._map.base, mmap.mmap):
            self._map.base.madvise(mmap.MADV_DONTNEED)

    def _take(self, size: int) -> bytes:
        """The next ``size`` bytes of the header. Every length in the file is checked here against the file's size."""
        if self._at + size > len(self._bytes):
            raise InputError(f"{self.path} is truncated or corrupt: it ends inside its header")
        if self._at + size > MOST_BYTES:
            raise InputError(f"{self.path} is corrupt: its header has more than {MOST_BYTES} bytes")
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

    def _value(self, key: str, kind: int):
        what = "a value"
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item, count = self._number("I"), self._number("Q")
            self._items += count
            if self._items > MOST_ITEMS:
                what = f"its arrays have {self._items} items up to {reprlib.repr(key)}"
                raise InputError(f"{self.path} is corrupt: {what}, at most {MOST_ITEMS} are read")
            if item in NUMBERS:
                size = struct.calcsize(f"<{NUMBERS[item]}")
                return np.frombuffer(self._take(count * size), f"<{NUMBERS[item]}").tolist()
            if item == STRING:
                return [self._string() for _ in range(count)]
            kind, what = item, "an array"
        if kind not in NUMBERS:
            raise InputError(f"{self.path} is corrupt: {reprlib.repr(key)} is {what} of the unknown kind {kind}")
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
        self._ends.append((start, end, name))
        return GgufTensor(shape, kind, self._bytes[start:end].reshape(stored))
