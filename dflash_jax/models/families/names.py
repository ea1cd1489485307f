"""Parameters of a module and their tensors on disk: a table of reversible entries, shared by all families."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk, or some rows of one.

    Attributes:
        name: Its name.
        shape: Its shape on disk; where the parameter is some of its rows, the shape of those rows.
        first: The first of the rows.
        rows: All rows of the tensor on disk; None: those of ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0
    rows: int | None = None

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Shape of the tensor on disk, with all its rows."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    def rows_on_disk(self, rows: slice) -> slice:
        """Rows of the last axis, its other axes taken as one, as the whole tensor counts them."""
        first = self.first * math.prod(self.shape[1:-1])
        return slice(rows.start + first, rows.stop + first)


def rows_of(name: str, counts: Sequence[int], columns: int) -> list[Tensor]:
    """The tensor ``name`` [sum of ``counts``, columns] in parts of so many rows, one after another."""
    starts = np.cumsum([0, *counts]).tolist()
    return [Tensor(name, (count, columns), first, starts[-1]) for first, count in zip(starts, counts, strict=False)]


def whole_tensors(parts: Iterable[tuple[Tensor, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Joins rows to tensors.

    Args:
        parts: Tensors or some rows of them, with their arrays.

    Yields:
        Name and array of each tensor on disk, as soon as all its rows are there.
    """
    waiting: dict[str, dict[int, tuple[int, np.ndarray]]] = {}
    for tensor, array in parts:
        if tensor.rows is not None:
            found = waiting.setdefault(tensor.name, {})
            found[tensor.first] = tensor.shape[0], array
            if sum(rows for rows, _ in found.values()) < tensor.rows:
                continue
            array = np.concatenate([part for _, (_, part) in sorted(waiting.pop(tensor.name).items())])
        yield tensor.name, array


def _only(arrays: Sequence[np.ndarray]) -> np.ndarray:
    (array,) = arrays
    return array


@dataclass(frozen=True)
class Entry:
    """One parameter of a module and its tensors on disk.

    Attributes:
        path: The parameter's path, dotted.
        shape: Its shape in the module.
        tensors: Its tensors on disk.
        join: Makes the parameter, up to a reshape, from the tensors.
        split: Makes the tensors, up to a reshape, from the parameter.
        is_integer: Whether it has whole numbers, whose dtype stays as it is.
    """

    path: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray] = _only
    split: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda array: [array]
    is_integer: bool = False

    def read(self, arrays: Sequence[np.ndarray], last: int | None = None) -> np.ndarray:
        """Makes the parameter.

        Args:
            arrays: The arrays of its tensors, or their scales.
            last: Length of the last axis where ``arrays`` are scales; None: as in ``shape``.
        """
        shape = self.shape if last is None else (*self.shape[:-1], last)
        return np.ascontiguousarray(self.join(arrays)).reshape(shape)

    def write(self, array: np.ndarray) -> list[np.ndarray]:
        """Makes the arrays of the tensors from the parameter: the inverse of `read`."""
        parts = self.split(array)
        return [np.ascontiguousarray(p).reshape(t.shape) for p, t in zip(parts, self.tensors, strict=True)]

    def units(self) -> np.ndarray | None:
        """Where the pieces of the last axis are on disk.

        Returns:
            [*shape[:-1]], whole numbers: the pieces of all tensors are numbered one after another. None where `join`
            changes numbers, or their order within a piece.
        """
        size = self.shape[-1]
        if self.is_integer or any(t.shape[-1] % size for t in self.tensors):
            return None
        starts = np.cumsum([0, *(2 * math.prod(t.shape) // size for t in self.tensors)]).tolist()
        ends = zip(self.tensors, starts[:-1], starts[1:], strict=True)
        numbered = [np.arange(start, stop).reshape(*t.shape[:-1], -1) for t, start, stop in ends]
        try:
            # Pieces of two, an even number and the next one: what is not just moved is seen.
            first, second = np.moveaxis(self.read(numbered, 2), -1, 0)
        except (ValueError, IndexError):
            return None
        return first // 2 if ((first % 2 == 0) & (second == first + 1)).all() else None


def same(path: str, shape: tuple[int, ...], name: str, disk: tuple[int, ...] | None = None) -> Entry:
    """The entry of a parameter that is one tensor, reshaped from ``disk``."""
    return Entry(path, shape, (Tensor(name, disk or shape),))


def stacked(path: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Entry:
    """The entry of a parameter that is tensors of one shape, stacked along leading axes."""
    return Entry(path, shape, tuple(tensors), np.stack, lambda array: list(array.reshape(len(tensors), -1)))
