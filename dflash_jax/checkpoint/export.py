"""Writes a Hugging Face directory from an Orbax one: the inverse of `orbax.convert`, tensor for tensor."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dflash_jax.checkpoint import orbax, quantization, quantized
from dflash_jax.checkpoint.config_files import read_json, read_raw
from dflash_jax.checkpoint.files import INDEX, new_directory
from dflash_jax.checkpoint.load import read_entries
from dflash_jax.errors import InputError
from dflash_jax.models.families.names import Tensor, whole_tensors


def disk_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of the tensors that a conversion was made from, one parameter at a time."""
    shapes = {name: shape for name, (_, shape) in read_json(directory / orbax.MANIFEST)["tensors"].items()}
    for name, array in whole_tensors(_disk_parts(directory)):
        yield name, array.reshape(shapes[name])


def _disk_parts(directory: Path) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yields the tensors of `disk_tensors`, of some only rows at a time."""
    manifest = read_json(directory / orbax.MANIFEST)
    tensors, form = orbax.ConvertedTensors(directory), quantization.read(read_raw(directory), directory)
    entries = {e.path: e for e in read_entries(directory, tensors)}
    for key, record in manifest["records"].items():
        kind, name = key.split(" ", 1)
        arrays = orbax.read_arrays((directory / kind / name).absolute(), list(record["arrays"]))
        if kind == "extra":
            yield Tensor(name, arrays["array"].shape), arrays["array"]
            continue
        entry = entries[name]
        if "array" in arrays:
            yield from zip(entry.tensors, entry.write(arrays["array"]), strict=True)
        else:
            yield from quantized.write(entry, quantized.stored_of(entry, tensors, form), arrays, tensors)


def to_hf(source: Path, target: Path, shard_bytes: int, progress: Callable[[Iterable, int], Iterable]) -> int:
    """Writes a Hugging Face directory with shards and an index.

    Args:
        source: A directory of `orbax.convert`.
        target: A new directory.
        shard_bytes: Size of a shard, about.
        progress: ``progress(iterable, total)`` wraps the loop over tensors.

    Returns:
        The number of tensors.

    Raises:
        InputError: ``source`` is no conversion or was quantized on the way, or ``target`` cannot be written.
    """
    if not orbax.is_orbax(source):
        raise InputError(f"{source} is not a checkpoint of dflash convert hf-to-orbax: it has no {orbax.MANIFEST}")
    manifest = read_json(source / orbax.MANIFEST)
    if manifest["quantize"] not in (None, "none"):
        raise InputError(
            f"{source} was quantized to {manifest['quantize']} when it was converted: that has no way back"
        )
    with new_directory(target) as half:
        shards: list[list[str]] = []
        waiting: dict[str, np.ndarray] = {}

        def write() -> None:
            shards.append(list(waiting))
            path = half / f"{len(shards)}.safetensors"
            try:
                save_file(waiting, path, metadata={"format": "pt"})
            except SafetensorError as e:  # a full disk, which the library does not report as an OSError
                raise InputError(f"{target} cannot be written: {e}") from None
            waiting.clear()

        for name, array in progress(disk_tensors(source), len(manifest["tensors"])):
            if waiting and sum(x.nbytes for x in waiting.values()) + array.nbytes > shard_bytes:
                write()
            waiting[name] = array
        write()
        name_shards(half, shards)
        for pattern in orbax.CARRIED:
            for path in source.glob(pattern):
                if path.name not in (orbax.MANIFEST, orbax.STARTED):
                    shutil.copyfile(path, half / path.name)
    return sum(map(len, shards))


def name_shards(directory: Path, shards: list[list[str]]) -> None:
    """Renames ``1.safetensors`` … as transformers names shards, and writes the index of several."""
    if len(shards) == 1:
        (directory / "1.safetensors").rename(directory / "model.safetensors")
        return
    where = {}
    for i, names in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        (directory / f"{i}.safetensors").rename(directory / name)
        where |= dict.fromkeys(names, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=2) + "\n")
