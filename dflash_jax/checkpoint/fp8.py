"""Official FP8 checkpoints.

``X.weight`` is float8_e4m3fn, and ``X.weight_scale_inv`` has one factor for each block of 128 × 128.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax.checkpoint.files import Tensors
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Entry, Tensor
from dflash_jax.models.families.reading import LIMIT, shown

SUFFIX = "_scale_inv"


def read_block(raw: dict, directory: Path) -> tuple[int, int] | None:
    """The block size (rows, columns) of a ``config.json``; None where nothing is quantized.

    Raises:
        InputError: The checkpoint is quantized, and not FP8 in blocks.
    """
    quantization = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8":
        kind = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise InputError(f"{directory} is quantized by {shown(kind)}: only fp8 in blocks is read here")
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= LIMIT for n in block):
        raise InputError(
            f"{directory} is fp8 with weight_block_size {shown(block)}: it must be two sizes, like [128, 128]"
        )
    return block[0], block[1]


def scale_of(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """The tensor of factors that belongs to ``tensor``."""
    *lead, rows, columns = tensor.disk_shape
    return Tensor(tensor.name + SUFFIX, (*lead, -(-rows // block[0]), -(-columns // block[1])))


def scales(entries: Sequence[Entry], files: Tensors, block: tuple[int, int]) -> list[Tensor]:
    """The scales that a checkpoint must have: one for every tensor that is in FP8 or that has a scale."""
    tensors = [t for e in entries for t in e.tensors if t.name in files and len(t.shape) >= 2]
    return [scale_of(t, block) for t in tensors if files.dtype(t.name) == "F8_E4M3" or t.name + SUFFIX in files]


def is_scaled(entry: Entry, files: Tensors) -> bool:
    """Whether the tensors of a parameter are in FP8.

    Raises:
        InputError: Some are and some are not.
    """
    has_scale = {t.name + SUFFIX in files for t in entry.tensors}
    if len(has_scale) > 1:
        raise InputError(f"some tensors of {entry.path} are in FP8 and some are not, first {entry.tensors[0].name!r}")
    return has_scale == {True}


def disk_scales(entry: Entry, factors: np.ndarray, block: tuple[int, int]):
    """Yields (tensor, scale) of each tensor, of rows those that begin in them: the inverse of `read_scale`."""
    run = entry.shape[-1] // factors.shape[-1]
    wide = [dataclasses.replace(t, shape=(*t.shape[:-1], t.shape[-1] // run)) for t in entry.tensors]
    parts = dataclasses.replace(entry, tensors=tuple(wide)).write(factors)
    for tensor, part in zip(entry.tensors, parts, strict=True):
        begin = -tensor.first % block[0]
        scale = np.ascontiguousarray(part[..., begin :: block[0], :: max(1, block[1] // run)])
        yield dataclasses.replace(tensor, name=tensor.name + SUFFIX), scale


def runs(inputs: int, block: tuple[int, int]) -> int:
    """The number of scales of an output of so many inputs: equal runs, each within one block, as long as can be."""
    return inputs // math.gcd(block[1], inputs)


def read_scale(entry: Entry, files: Tensors, block: tuple[int, int]) -> np.ndarray:
    """The factors of a parameter, one for each of the `runs` of its last axis: [..., runs]."""
    count = runs(entry.shape[-1], block)
    run = entry.shape[-1] // count

    def spread(tensor: Tensor) -> np.ndarray:
        rows, columns = tensor.disk_shape[-2:]
        factors = files.read(tensor.name + SUFFIX)
        factors = tensor.of(np.repeat(factors, block[0], axis=-2)[..., :rows, :])
        return np.repeat(factors, block[1] // run, axis=-1)[..., : columns // run]

    return entry.read([spread(t) for t in entry.tensors], count)
