"""How parameters of a module and tensors on disk correspond: a table of reversible entries, shared by all families."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk: its name and its shape there."""

    name: str
    shape: tuple[int, ...]


def _only(arrays: Sequence[np.ndarray]) -> np.ndarray:
    (array,) = arrays
    return array


@dataclass(frozen=True)
class Entry:
    """One parameter of a module, and the tensors on disk that it is made of.

    ``path``: the parameter, dotted. ``shape``: its shape in the module. ``join`` makes the parameter (up to a reshape)
    from the tensors, ``split`` makes the tensors (up to a reshape) from the parameter.
    """

    path: str
    shape: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    join: Callable[[Sequence[np.ndarray]], np.ndarray] = _only
    split: Callable[[np.ndarray], Sequence[np.ndarray]] = lambda array: [array]

    def read(self, arrays: Sequence[np.ndarray], last: int | None = None) -> np.ndarray:
        """The parameter. ``last``: the length of its last axis where the arrays are not the tensors but their
        scales."""
        shape = self.shape if last is None else (*self.shape[:-1], last)
        return np.ascontiguousarray(self.join(arrays)).reshape(shape)

    def write(self, array: np.ndarray) -> list[np.ndarray]:
        parts = self.split(array)
        return [np.ascontiguousarray(p).reshape(t.shape) for p, t in zip(parts, self.tensors, strict=True)]


def same(path: str, shape: tuple[int, ...], name: str, disk: tuple[int, ...] | None = None) -> Entry:
    """A parameter that is one tensor, reshaped."""
    return Entry(path, shape, (Tensor(name, disk or shape),))


def stacked(path: str, shape: tuple[int, ...], tensors: Sequence[Tensor]) -> Entry:
    """A parameter that is tensors of one shape, stacked in order along leading axes."""
    return Entry(path, shape, tuple(tensors), np.stack, lambda array: list(array.reshape(len(tensors), -1)))
