"""One parameter from its tensors on disk to its devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.checkpoint import quantized
from dflash_jax.checkpoint.disk_array import DiskArray, joined
from dflash_jax.checkpoint.files import DTYPES, Tensors
from dflash_jax.checkpoint.given import GivenTensors
from dflash_jax.checkpoint.quantize import QUANTIZE
from dflash_jax.errors import InputError
from dflash_jax.models.config import DraftConfig, ModelConfig, VisionConfig
from dflash_jax.models.families.names import Entry
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.ops.weights import CODES, QuantizedWeight
from dflash_jax.ops.weights import quantize as quantize_array
from dflash_jax.parallel.sharding import parts_of, place

# Parameters that loading quantizes: the large matrices. Of a checkpoint in few bits these stay so, and the head, whose
# numbers are the checkpoint's maker's choice.
QUANTIZED = ("q", "k", "v", "o", "qkvz", "out", "gate_up", "down")
FEW_BITS = (*QUANTIZED, "head")


def check_quantize(quantize: str | None) -> None:
    """Raises InputError for a form of weights that loading does not know."""
    if quantize not in (None, *QUANTIZE):
        raise InputError(f"quantize {quantize!r}: it must be one of {', '.join(QUANTIZE)}")


A = TypeVar("A", jax.Array, np.ndarray, DiskArray)
C = TypeVar("C", ModelConfig, DraftConfig, MtpConfig, VisionConfig)


@dataclass(frozen=True)
class Source(Generic[C]):
    """A checkpoint that is opened and checked; no weights are read.

    Attributes:
        config: Its configuration.
        entries: Its parameters.
        files: Its tensors.
        skipped: Tensors that the model does not use.
        stored: Path → how the tensors of a parameter are stored, where any is in few bits.
        unused: Of ``skipped``, scales of activations, keys and values.
        caches: What its configuration says of keys and values; None: nothing.
    """

    config: C
    entries: list[Entry]
    files: Tensors
    skipped: list[str]
    stored: dict[str, tuple[quantized.Stored, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    caches: str | None = None


def read_parameter(entry: Entry, source: Source, dtype, quantize: str | None, sharding: NamedSharding):
    """Reads one parameter and places it on its devices.

    Args:
        entry: The parameter.
        source: The checkpoint.
        dtype: Dtype of the result; None keeps the tensors'.
        quantize: As in `load.load_target`.
        sharding: The parameter's sharding.

    Returns:
        What `finished` returns.
    """
    files = source.files
    if entry.path not in source.stored and isinstance(files, GivenTensors):
        array = files.on_device(entry, dtype, sharding)
        if array is not None:
            return finished({"array": array}, dtype, entry.path, quantize, sharding)
    arrays = quantized.without_divisor(arrays_of(entry, source, dtype), not stays_quantized(entry.path, quantize))
    return finished(placed(arrays, sharding, entry.shape), dtype, entry.path, quantize, sharding)


def stays_quantized(path: str, quantize: str | None) -> bool:
    """Whether a parameter that is in few bits in its checkpoint stays so; ``quantize`` as in `load.load_target`."""
    return quantize != "none" and path.rsplit(".", 1)[-1] in FEW_BITS


def of_drafter(config: DraftConfig | MtpConfig, quantize: str | None) -> str | None:
    """``quantize`` of a target for its drafter: loading quantizes MTP heads, and not DFlash drafters."""
    return quantize if isinstance(config, MtpConfig) or quantize == "none" else None


def arrays_of(entry: Entry, source: Source, dtype) -> dict[str, DiskArray]:
    """The arrays of one parameter as a checkpoint has them; arguments as of `read_parameter`.

    Returns:
        "array", or what `quantized.read` returns.
    """
    files = source.files
    if parts := source.stored.get(entry.path):
        arrays = quantized.read(entry, parts, files)
        return {"array": cast(arrays["array"], dtype)} if "array" in arrays else arrays
    # Of a dtype that is not known, reading says more.
    dtypes = [DTYPES[d] if (d := files.dtype(t.name)) in DTYPES else files.read(t.name).dtype for t in entry.tensors]
    for tensor, stored in zip(entry.tensors, dtypes, strict=True):
        if stored.kind in "bu" or (stored.kind == "i") != entry.is_integer:
            right = "whole numbers" if entry.is_integer else "floating-point numbers"
            raise InputError(f"tensor {tensor.name!r} has dtype {files.dtype(tensor.name)}: it must have {right}")

    def section(i: int, rows: slice, columns: slice) -> np.ndarray:
        tensor = entry.tensors[i]
        return files.section(tensor.name, tensor.disk_shape, tensor.rows_on_disk(rows), columns)

    return {"array": joined(entry, dtypes, section, dtype=None if entry.is_integer else dtype)}


def placed(
    arrays: Mapping[str, np.ndarray | DiskArray], sharding: NamedSharding, shape: Sequence[int]
) -> dict[str, jax.Array]:
    """The arrays of one parameter on its devices; arguments as of `array_shardings`."""
    shardings = array_shardings({name: array.shape for name, array in arrays.items()}, sharding, shape)
    return {name: place(array, shardings[name]) for name, array in arrays.items()}


def cast(array: A, dtype) -> A:
    """An array in ``dtype``; as it is where that is None, or where it has whole numbers."""
    return array if dtype is None or jnp.issubdtype(array.dtype, jnp.integer) else array.astype(dtype)


def array_shardings(
    shapes: Mapping[str, Sequence[int]], sharding: NamedSharding, shape: Sequence[int]
) -> dict[str, NamedSharding]:
    """The shardings of a parameter's arrays as a checkpoint has them.

    Args:
        shapes: Shapes of "array", or of the arrays of `quantized.read`, by name.
        sharding: The parameter's sharding.
        shape: The parameter's shape.

    Raises:
        InputError: A device would have half a byte.
    """
    parts = parts_of(sharding.mesh.shape, sharding.spec, len(shape) - 1)
    if shape[-1] // parts % 2 and not set(CODES).isdisjoint(shapes):
        raise InputError(f"{shape[-1]} inputs in four bits on {parts} devices: each must have an even number of them")
    # Runs of the last axis belong to the checkpoint, and need not divide as the values do.
    of_rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape) - 1]))
    return {name: sharding if one[-1] % parts == 0 else of_rows for name, one in shapes.items()}


def finished(arrays: dict[str, jax.Array], dtype, path: str, quantize: str | None, sharding: NamedSharding):
    """A parameter in the requested form.

    Args:
        arrays: Its arrays, placed as `array_shardings` says.
        dtype: Dtype of a result that is not quantized; None keeps it.
        path: The parameter's path.
        quantize: As in `load.load_target`.
        sharding: The parameter's sharding.

    Returns:
        An array, or a `QuantizedWeight` whose scales are the checkpoint's, or one for each row: the same on every mesh.
        Of a checkpoint in few bits only `FEW_BITS` stay so.
    """
    if "array" not in arrays:
        weight = QuantizedWeight.of(arrays)
        if stays_quantized(path, quantize):
            return weight
        return _dense(sharding)(spread(weight, sharding), jnp.float32 if dtype is None else dtype)
    array = cast(arrays["array"], dtype)
    if quantize not in (None, "none") and path.rsplit(".", 1)[-1] in QUANTIZED:
        return QuantizedWeight.of(_quantizer(quantize, sharding, array.shape, array.dtype)(array))
    return array


def spread(weight: jax.Array | QuantizedWeight, sharding: NamedSharding) -> jax.Array | QuantizedWeight:
    """A parameter of `finished`, each device with all scales of its part."""
    parts = parts_of(sharding.mesh.shape, sharding.spec, weight.ndim - 1)
    if not isinstance(weight, QuantizedWeight) or parts == 1:
        return weight
    scales = _scales(sharding)(weight, parts)
    return QuantizedWeight.of(weight.arrays() | scales)


@cache
def _quantizer(kind: str, sharding: NamedSharding, shape: tuple[int, ...], dtype: np.dtype) -> Callable:
    """A function for the arrays of a weight in few bits; one for all alike, which new weights use again."""
    quantized_to = partial(_quantized, kind=kind)
    arrays = jax.eval_shape(quantized_to, jax.ShapeDtypeStruct(shape, dtype))
    shardings = array_shardings({name: one.shape for name, one in arrays.items()}, sharding, shape)
    return jax.jit(quantized_to, out_shardings=shardings)


def _quantized(array: jax.Array, kind: str) -> dict[str, jax.Array]:
    return quantize_array(array, kind).arrays()


@cache
def _dense(sharding: NamedSharding) -> Callable:
    return jax.jit(_multiplied, static_argnums=1, out_shardings=sharding)


@cache
def _scales(sharding: NamedSharding) -> Callable:
    return jax.jit(_scales_of_parts, static_argnums=1, out_shardings=sharding)


def _scales_of_parts(weight: QuantizedWeight, parts: int) -> dict[str, jax.Array]:
    arrays = weight.spread(parts).arrays()
    return {name: array for name, array in arrays.items() if name not in ("values", *CODES)}


def _multiplied(weight: QuantizedWeight, dtype) -> jax.Array:
    return weight.dense(jnp.float32).astype(dtype)
