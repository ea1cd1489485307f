"""Tensors that a caller gives in memory, in place of a directory's files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dflash_jax.argument_checks import shown
from dflash_jax.checkpoint.files import DTYPES, Tensors
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry
from dflash_jax.parallel.sharding import place

Pairs = Mapping[str, Any] | Iterable[tuple[str, Any]]
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class GivenTensors(Tensors):
    """Tensors in memory. Those of JAX stay on their devices.

    Args:
        arrays: Name → array, or pairs of both. An array is NumPy's, JAX's, or gives itself by DLPack, as torch's do.

    Raises:
        InputError: A name is no text or is given twice, or what it names is no array of a dtype in `DTYPES`.
    """

    def __init__(self, arrays: Pairs):
        self._arrays: dict[str, np.ndarray | jax.Array] = {}
        pairs: Iterable[Any] = arrays.items() if isinstance(arrays, Mapping) else arrays
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(name := pair[0], str):
                raise InputError(f"weights have {shown(pair)}: each must be a name with an array")
            array = pair[1]
            if name in self._arrays:
                raise InputError(f"weights have {shown(name)} twice")
            self._arrays[name] = _array(name, array)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def array(self, name: str) -> np.ndarray | jax.Array:
        """The array, where it is."""
        return self._arrays[name]

    def add(self, name: str, array: np.ndarray) -> None:
        """Adds a tensor that was not given."""
        self._arrays[name] = array

    def dtype(self, name: str) -> str:
        """See `Tensors`."""
        return NAMES[self._arrays[name].dtype]

    def read(self, name: str) -> np.ndarray:
        """See `Tensors`."""
        return np.asarray(self._arrays[name])

    def on_device(self, entry: Entry, dtype: Any, sharding: NamedSharding) -> jax.Array | None:
        """The array of a parameter, made on the devices without a copy through the host.

        Args:
            entry: The parameter.
            dtype: The array's; None keeps that of the tensors.
            sharding: The array's.

        Returns:
            None where a tensor is on the host, or where its numbers are not just moved.
        """
        arrays = [self._arrays[tensor.name] for tensor in entry.tensors]
        kind = jnp.integer if entry.is_integer else jnp.floating
        if not all(isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, kind) for array in arrays):
            return None
        if any(tensor.rows for tensor in entry.tensors) or (units := entry.units()) is None:
            return None
        order = units if _is_moved(units) else None
        if len(arrays) == 1 and order is None:
            array = arrays[0] if arrays[0].shape == entry.shape else _reshaped(arrays[0], entry.shape)
            array = place(array, sharding)
        else:
            whole = NamedSharding(sharding.mesh, PartitionSpec())
            array = _joined(sharding, entry.shape)([jax.device_put(each, whole) for each in arrays], order)
        return array if dtype is None or entry.is_integer else _cast(sharding, jnp.dtype(dtype))(array)


def _array(name: str, array: Any) -> np.ndarray | jax.Array:
    if not isinstance(array, np.ndarray | jax.Array) and hasattr(array, "__dlpack__"):
        try:
            array = jax.dlpack.from_dlpack(array)
        except Exception as e:  # any that another library raises
            raise InputError(f"weights have {shown(name)}, which cannot be taken by DLPack: {shown(e)}") from None
    if getattr(array, "dtype", None) not in NAMES or not isinstance(array, np.ndarray | jax.Array):
        right = f"an array of NumPy or JAX of a dtype of {', '.join(DTYPES)}"
        raise InputError(f"weights have {shown(name)}: {shown(array)}: it must be {right}")
    return array


def _is_moved(units: np.ndarray) -> bool:
    """Whether the pieces of the last axis come in another order than on disk."""
    return not np.array_equal(units.reshape(-1), np.arange(units.size))


_reshaped = jax.jit(jnp.reshape, static_argnums=1)


@cache
def _joined(sharding: Sharding, shape: tuple[int, ...]) -> Callable:
    def joined(arrays: Sequence[jax.Array], order: jax.Array | None) -> jax.Array:
        rows = jnp.concatenate([array.reshape(-1, shape[-1]) for array in arrays])
        return (rows if order is None else rows[order]).reshape(shape)

    return jax.jit(joined, out_shardings=sharding)


@cache
def _cast(sharding: Sharding, dtype: np.dtype) -> Callable:
    return jax.jit(lambda array: array.astype(dtype), out_shardings=sharding)
