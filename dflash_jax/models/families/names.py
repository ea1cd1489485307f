"""Parameters of a module and their tensors on disk: a table of reversible entries, shared by all families."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk.

    Attributes:
        name: Its name.
        shape: Its shape on disk.
    """

    name: str
    shape: tuple[int, ...]


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
    """

    path: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray] = _only
    split: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda array: [array]

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


def same(path: str, shape: tuple[int, ...], name: str, disk: tuple[int, ...] | None = None) -> Entry:
    """The entry of a parameter that is one tensor, reshaped from ``disk``."""
    return Entry(path, shape, (Tensor(name, disk or shape),))


def stacked(path: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Entry:
    """The entry of a parameter that is tensors of one shape, stacked along leading axes."""
    return Entry(path, shape, tuple(tensors), np.stack, lambda array: list(array.reshape(len(tensors), -1)))
