"""How arrays of weights in few bits are laid out on disk, and how they are kept here: each way there and back.

Here the matrices of an array are [outputs, ...], codes of four bits are uint8, two a byte, of which the low half is the
even input, and those of eight bits are int8 (`ops.weights.QuantizedWeight`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

# The outputs of the codes of one of AWQ's words, from the low bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Plain:
    """Numbers as they are here.

    Attributes:
        is_transposed: Whether the matrices on disk are [..., outputs].
    """

    is_transposed: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether the disk has output after output, so that matrices of several axes are one of more outputs."""
        return not self.is_transposed

    @property
    def steps(self) -> tuple[int, int]:
        """The outputs and the columns that are together on disk."""
        return 1, 1

    def disk_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape on disk of an array that has ``shape`` here."""
        *lead, rows, columns = shape
        return (*lead, columns, rows) if self.is_transposed else (*lead, rows, columns)

    def read(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """An array as it is here, of ``shape``, from what the disk has."""
        return np.swapaxes(array, -1, -2) if self.is_transposed else array.reshape(shape)

    def write(self, array: np.ndarray) -> np.ndarray:
        """What the disk has of an array: the inverse of `read`."""
        return np.swapaxes(array, -1, -2) if self.is_transposed else array


@dataclass(frozen=True)
class Exponents(Plain):
    """Powers of two, bfloat16 here, of which the disk has the exponent plus 127, uint8; 255 is no number."""

    def read(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """See `Plain`."""
        # 2^-127 has no implicit bit.
        bits = np.where(array == 0, np.uint16(0x0040), array.astype(np.uint16) << 7)
        bits = np.where(array == 255, np.uint16(0x7FC0), bits)
        return bits.view(BFLOAT16).reshape(shape)

    def write(self, array: np.ndarray) -> np.ndarray:
        """See `Plain`."""
        return (array.astype(BFLOAT16).view(np.uint16) >> 7).astype(np.uint8)


@dataclass(frozen=True)
class Words:
    """Codes in 32-bit words, which fill from the low bits, of matrices [outputs, n].

    Attributes:
        bits: Of a code: 4 or 8.
        of_outputs: Whether a word has the codes of several outputs, not of several of the n.
        is_transposed: Whether the matrices on disk are [n, outputs].
        order: The outputs of a word's codes; none: as they come.
        less: What the disk has is less than the code by this, modulo 2^bits.
        is_zero: Whether codes are zero points, which are int8 here; else four bits stay codes.
    """

    bits: int
    of_outputs: bool = False
    is_transposed: bool = False
    order: tuple[int, ...] = ()
    less: int = 0
    is_zero: bool = False

    @property
    def has_rows(self) -> bool:
        """See `Plain`."""
        return not (self.is_transposed or self.of_outputs)

    @property
    def steps(self) -> tuple[int, int]:
        """See `Plain`."""
        each = 32 // self.bits
        # Four bits that stay codes are two a column.
        halves = 2 if self.bits == 4 and not self.is_zero else 1
        return (each, 1) if self.of_outputs else (1, each // halves)

    def disk_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """See `Plain`."""
        *lead, rows, columns = shape
        each = 32 // self.bits
        if not self.is_zero and self.bits == 4:
            columns *= 2
        rows, columns = (-(-rows // each), columns) if self.of_outputs else (rows, -(-columns // each))
        return (*lead, columns, rows) if self.is_transposed else (*lead, rows, columns)

    def read(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """See `Plain`."""
        # Words become the last axis.
        words = np.swapaxes(array, -1, -2) if self.of_outputs != self.is_transposed else array
        octets = np.ascontiguousarray(words).view(np.uint8)
        if self.bits == 4 and not (self.of_outputs or self.is_zero):
            return octets[..., : shape[-1]]
        codes = np.stack([octets & 15, octets >> 4], -1).reshape(*octets.shape[:-1], -1) if self.bits == 4 else octets
        if self.order:
            places = np.argsort(self.order)
            codes = codes.reshape(*codes.shape[:-1], -1, len(places))[..., places].reshape(codes.shape)
        if self.of_outputs:
            codes = np.swapaxes(codes[..., : shape[-2]], -1, -2)
        if self.bits == 4 and not self.is_zero:
            return codes[..., ::2] | codes[..., 1::2] << 4
        if self.less:
            codes = codes + np.uint8(self.less) & np.uint8(2**self.bits - 1)
        codes = codes[..., : shape[-1]]
        return (codes - np.uint8(2 ** (self.bits - 1))).view(np.int8)

    def write(self, array: np.ndarray) -> np.ndarray:
        """See `Plain`."""
        each = 32 // self.bits
        if self.bits == 4 and not (self.of_outputs or self.is_zero):
            octets = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 4)])
            words = np.ascontiguousarray(octets).view(np.int32)
            return np.swapaxes(words, -1, -2) if self.is_transposed else words
        if self.bits == 4 and not self.is_zero:
            codes = np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], -1)
        else:
            codes = array.view(np.uint8) + np.uint8(2 ** (self.bits - 1) - self.less) & np.uint8(2**self.bits - 1)
        if self.of_outputs:
            codes = np.swapaxes(codes, -1, -2)
        if missing := -codes.shape[-1] % each:
            codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        if self.order:
            codes = codes.reshape(*codes.shape[:-1], -1, each)[..., list(self.order)].reshape(codes.shape)
        octets = codes[..., ::2] | codes[..., 1::2] << 4 if self.bits == 4 else codes
        words = np.ascontiguousarray(octets).view(np.int32)
        return np.swapaxes(words, -1, -2) if self.of_outputs != self.is_transposed else words


Layout = Plain | Words
PLAIN = Plain()
