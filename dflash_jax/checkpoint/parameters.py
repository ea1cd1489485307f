"""One parameter from its tensors on disk to its devices."""

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax.checkpoint import fp8
from dflash_jax.checkpoint.files import Tensors
from dflash_jax.models.config import DraftConfig, ModelConfig, VisionConfig
from dflash_jax.models.families.names import Entry
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.ops.weights import QuantizedWeight
from dflash_jax.ops.weights import quantize as quantize_array
from dflash_jax.parallel.sharding import place

QUANTIZE = ("none", "int8", "fp8")
# Parameters that loading quantizes: the large matrices.
QUANTIZED = ("q", "k", "v", "o", "qkvz", "out", "gate_up", "down")


C = TypeVar("C", ModelConfig, DraftConfig, MtpConfig, VisionConfig)


@dataclass(frozen=True)
class Source(Generic[C]):
    """A checkpoint that is opened and checked; no weights are read.

    Attributes:
        config: Its configuration.
        entries: Its parameters.
        files: Its tensors.
        skipped: Tensors that the model does not use.
        block: Rows and columns of a block of FP8 scales; None without FP8.
    """

    config: C
    entries: list[Entry]
    files: Tensors
    skipped: list[str]
    block: tuple[int, int] | None


def read_parameter(entry: Entry, source: Source, dtype, quantize: str | None, sharding: NamedSharding):
    """Reads one parameter and places it on its devices.

    Args:
        entry: The parameter.
        source: The checkpoint.
        dtype: Dtype of the result; None keeps the tensors'.
        quantize: As in `load.load_target`.
        sharding: The parameter's sharding.

    Returns:
        An array or a `QuantizedWeight`.
    """
    files = source.files
    arrays = {"array": entry.read([files.read(t.name) for t in entry.tensors])}
    if source.block and fp8.is_scaled(entry, files):
        scale = fp8.read_scale(entry, files, source.block, _parts(sharding, len(entry.shape)))
        arrays = {"values": arrays["array"], "scale": scale}
        if quantize == "none":
            arrays = {"array": _multiplied(**arrays)}
    if dtype is not None and "array" in arrays:
        arrays["array"] = arrays["array"].astype(dtype, copy=False)
    return finished({k: place(x, sharding) for k, x in arrays.items()}, dtype, entry.path, quantize, sharding)


def finished(arrays: dict[str, jax.Array], dtype, path: str, quantize: str | None, sharding: NamedSharding):
    """A parameter in the requested form.

    Args:
        arrays: Its arrays on the devices: "array", or "values" and "scale".
        dtype: Dtype of a result that is not quantized; None keeps it.
        path: The parameter's path.
        quantize: As in `load.load_target`.
        sharding: The parameter's sharding.
    """
    if "values" in arrays:
        scaled = QuantizedWeight(arrays["values"], arrays["scale"])
        return (
            scaled
            if quantize != "none"
            else jax.jit(QuantizedWeight.dense, static_argnums=1, out_shardings=sharding)(scaled, dtype)
        )
    array = arrays["array"] if dtype is None else arrays["array"].astype(dtype)
    if quantize in ("int8", "fp8") and path.rsplit(".", 1)[-1] in QUANTIZED:
        runs = _parts(sharding, array.ndim)
        return jax.jit(quantize_array, static_argnums=(1, 2), out_shardings=sharding)(array, quantize, runs)
    return array


def _parts(sharding: NamedSharding, ndim: int) -> int:
    """Shards of the last axis."""
    last = sharding.spec[ndim - 1] if len(sharding.spec) == ndim else None
    return math.prod(sharding.mesh.shape[axis] for axis in last or ())


def _multiplied(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    runs = values.astype(np.float32).reshape(*scale.shape, -1) * scale.astype(np.float32)[..., None]
    return runs.reshape(values.shape)
