"""Arrays on disk of which only parts are read: those that devices of this host hold."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from dflash_jax.models.families.names import Entry

Index = tuple[slice, ...]
# (Number of a tensor, rows, columns) → these of the tensor, whose axes before the last are one.
Section = Callable[[int, slice, slice], np.ndarray]


@dataclass(frozen=True)
class DiskArray:
    """An array that is read where it is indexed.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        read: Reads a part, by a slice with a beginning and an end for each axis.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]

    def __getitem__(self, index: Index) -> np.ndarray:
        """A part, by a slice for each axis."""
        return self.read(tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, self.shape, strict=True)))

    def astype(self, dtype) -> "DiskArray":
        """The array in another dtype."""
        return DiskArray(self.shape, np.dtype(dtype), lambda index: self.read(index).astype(dtype, copy=False))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        """All of it."""
        return np.asarray(self[(slice(None),) * len(self.shape)], dtype)


def combined(function: Callable[..., np.ndarray], *arrays) -> DiskArray:
    """A function of arrays, element by element, float32; the last axis of all but the first may have one for all."""

    def read(index: Index) -> np.ndarray:
        first, *rest = arrays
        return function(first[index], *(a[(*index[:-1], slice(None) if a.shape[-1] == 1 else index[-1])] for a in rest))

    return DiskArray(arrays[0].shape, np.dtype(np.float32), read)


def joined(entry: Entry, dtypes: Sequence[np.dtype], section: Section, last: int | None = None, dtype=None):
    """The array of a parameter, or of its scales, from its tensors.

    Args:
        entry: The parameter.
        dtypes: Dtypes of what ``section`` gives.
        section: Reads a part of a tensor of the entry.
        last: As of `Entry.read`.
        dtype: The array's dtype; None: that of the tensors.
    """
    size, last = entry.shape[-1], entry.shape[-1] if last is None else last
    dtype = np.dtype(np.result_type(*dtypes) if dtype is None else dtype)

    @cache
    def whole() -> np.ndarray:
        parts = []
        for i, tensor in enumerate(entry.tensors):
            shape = (*tensor.shape[:-1], tensor.shape[-1] * last // size)
            parts.append(section(i, slice(0, math.prod(shape[:-1])), slice(0, shape[-1])).reshape(shape))
        return entry.read(parts, last)

    def read(index: Index) -> np.ndarray:
        units = _units(entry)
        if units is None:
            return whole()[index].astype(dtype)
        box, columns = units[index[:-1]], index[-1]
        result = np.empty((box.size, len(range(*columns.indices(last)))), dtype)
        at = 0
        for i, rows, first, count in _rectangles(entry, box.reshape(-1)):
            # The columns of one unit of a row, or all columns of several.
            wanted = columns if count == 1 else slice(0, count * last)
            part = section(i, rows, slice(first * last + wanted.start, first * last + wanted.stop))
            if count > 1:
                part = part.reshape(-1, last)[:, columns]
            result[at : at + len(part)] = part
            at += len(part)
        return result.reshape(*box.shape, result.shape[-1])

    return DiskArray((*entry.shape[:-1], last), dtype, read)


@lru_cache(maxsize=1)
def _units(entry: Entry) -> np.ndarray | None:
    return entry.units()


def _rectangles(entry: Entry, units: np.ndarray) -> Iterator[tuple[int, slice, int, int]]:
    """Splits units, in order, into rectangles: a tensor, its rows, the first unit of each row, and their number."""
    size = entry.shape[-1]
    wide = np.array([t.shape[-1] // size for t in entry.tensors])
    first = np.cumsum([0, *(math.prod(t.shape) // size for t in entry.tensors)])
    tensor = np.searchsorted(first, units, "right") - 1
    local = units - first[tensor]
    row, place = np.divmod(local, wide[tensor])
    # Runs of successive units of one row where rows have several, else of successive rows.
    is_next = (np.diff(tensor) == 0) & (np.diff(local) == 1) & ((place[1:] > 0) | (wide[tensor[1:]] == 1))
    starts = np.flatnonzero(np.concatenate([[True], ~is_next]))
    counts = np.diff(starts, append=len(units))
    waiting: tuple[int, int, int, int, int] | None = None
    for at, length in zip(starts.tolist(), counts.tolist(), strict=True):
        i, begin, one = int(tensor[at]), int(row[at]), int(place[at])
        rows, count = (length, 1) if wide[i] == 1 else (1, length)
        if waiting is not None:
            j, from_, to, other, width = waiting
            if (i, begin, one, count) == (j, to, other, width):
                waiting = j, from_, to + rows, other, width
                continue
            yield j, slice(from_, to), other, width
        waiting = i, begin, begin + rows, one, count
    if waiting is not None:
        j, from_, to, other, width = waiting
        yield j, slice(from_, to), other, width
