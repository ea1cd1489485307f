"""From tensors on disk to one parameter on its devices."""

import math
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax.checkpoint import fp8
from dflash_jax.checkpoint.files import TensorFiles
from dflash_jax.models.config import DraftConfig, ModelConfig
from dflash_jax.models.families.names import Entry
from dflash_jax.ops.weights import QuantizedWeight
from dflash_jax.ops.weights import quantize as quantize_array
from dflash_jax.parallel.sharding import place

QUANTIZE = ("none", "int8", "fp8")
# Parameters that quantisation on loading takes: the large matrices.
QUANTIZED = ("q", "k", "v", "o", "qkvz", "out", "gate_up", "down")


@dataclass(frozen=True)
class Source:
    """A checkpoint, opened and checked, nothing read yet.

    ``skipped``: tensors that are knowingly left alone; ``block``: of FP8 scales, None in a checkpoint without.
    """

    config: ModelConfig | DraftConfig
    entries: list[Entry]
    files: TensorFiles
    skipped: list[str]
    block: tuple[int, int] | None


def read_parameter(entry: Entry, source: Source, dtype, quantize: str | None, cut: NamedSharding):
    """One parameter, cast (``dtype`` None: as it is) and placed on its devices: an array, or a `QuantizedWeight`."""
    files = source.files
    arrays = {"array": entry.read([files.read(t.name) for t in entry.tensors])}
    if source.block and fp8.is_scaled(entry, files):
        scale = fp8.read_scale(entry, files, source.block, _parts(cut, len(entry.shape)))
        arrays = {"values": arrays["array"], "scale": scale}
        if quantize == "none":
            arrays = {"array": _multiplied(**arrays)}
    if dtype is not None and "array" in arrays:
        arrays["array"] = arrays["array"].astype(dtype, copy=False)
    return finished({k: place(x, cut) for k, x in arrays.items()}, dtype, entry.path, quantize, cut)


def finished(arrays: dict[str, jax.Array], dtype, path: str, quantize: str | None, cut: NamedSharding):
    """A parameter from its arrays on the devices ("array", or "values" and "scale"), in the form that is asked for."""
    if "values" in arrays:
        scaled = QuantizedWeight(arrays["values"], arrays["scale"])
        return (
            scaled
            if quantize != "none"
            else jax.jit(QuantizedWeight.dense, static_argnums=1, out_shardings=cut)(scaled, dtype)
        )
    array = arrays["array"] if dtype is None else arrays["array"].astype(dtype)
    if quantize in ("int8", "fp8") and path.rsplit(".", 1)[-1] in QUANTIZED:
        runs = _parts(cut, array.ndim)
        return jax.jit(quantize_array, static_argnums=(1, 2), out_shardings=cut)(array, quantize, runs)
    return array


def _parts(cut: NamedSharding, ndim: int) -> int:
    """How many parts the last axis is cut into."""
    last = cut.spec[ndim - 1] if len(cut.spec) == ndim else None
    return math.prod(cut.mesh.shape[axis] for axis in last or ())


def _multiplied(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    runs = values.astype(np.float32).reshape(*scale.shape, -1) * scale.astype(np.float32)[..., None]
    return runs.reshape(values.shape)
