"""Writes Hugging Face directories: an Orbax one's, tensor for tensor, and a target's with its weights in four bits."""

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dflash_jax.checkpoint import orbax, quantization, quantized
from dflash_jax.checkpoint.config_files import read_json, read_raw
from dflash_jax.checkpoint.files import INDEX, DescribedTensors, Tensors, new_directory, write_json
from dflash_jax.checkpoint.load import open_target, read_entries
from dflash_jax.checkpoint.parameters import QUANTIZED, read_parameter
from dflash_jax.errors import InputError
from dflash_jax.models import families
from dflash_jax.models.families.names import Entry, Tensor, whole_tensors
from dflash_jax.ops.weights import GROUPS
from dflash_jax.parallel.sharding import ONE_DEVICE


def disk_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of the tensors that a conversion was made from, one parameter at a time."""
    tensors, in_few_bits = orbax.ConvertedTensors(directory), {}
    yield from _whole(_disk_parts(directory, tensors, in_few_bits), tensors, in_few_bits)


def _whole(
    parts: Iterable[tuple[Tensor, np.ndarray]], tensors: Tensors, in_few_bits: Mapping[str, quantized.Part]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of the tensors of ``parts`` as the disk has them.

    Args:
        parts: Tensors or some rows of them; those of ``in_few_bits`` as they are here.
        tensors: Their shapes and dtypes on disk, of which those may lack that have their shapes already.
        in_few_bits: Filled as ``parts`` goes on.
    """
    for name, array in whole_tensors(parts):
        if name in in_few_bits:
            array = quantized.on_disk(in_few_bits[name], array, tensors.dtype(name))
        yield name, array.reshape(tensors[name]) if name in tensors else array


def _disk_parts(
    directory: Path, tensors: orbax.ConvertedTensors, in_few_bits: dict[str, quantized.Part]
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yields the tensors of `disk_tensors` as they are here, of some only rows at a time.

    Those that are in few bits are put in ``in_few_bits`` before.
    """
    manifest = read_json(directory / orbax.MANIFEST)
    form = quantization.read(read_raw(directory), directory)
    entries = {e.path: e for e in read_entries(directory, tensors)}
    for key, record in manifest["records"].items():
        kind, name = key.split(" ", 1)
        arrays = orbax.read_arrays((directory / kind / name).absolute(), list(record["arrays"]))
        if kind == "extra":
            yield Tensor(name, arrays["array"].shape), arrays["array"]
            continue
        entry = entries[name]
        parts = quantized.stored_of(entry, tensors, form)
        if "array" not in arrays:
            in_few_bits |= {part.name: part for stored in parts for part in stored.parts}
            yield from quantized.write(entry, parts, arrays)
        elif not parts:
            yield from zip(entry.tensors, entry.write(arrays["array"]), strict=True)
        elif f"extra {parts[0].values.name}" not in manifest["records"]:
            raise InputError(f"{directory} was multiplied out when it was converted: that has no way back")


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
        InputError: ``source`` is no conversion, or was quantized or multiplied out on the way, or ``target`` cannot be
            written.
    """
    if not orbax.is_orbax(source):
        raise InputError(f"{source} is not a checkpoint of dflash convert hf-to-orbax: it has no {orbax.MANIFEST}")
    manifest = read_json(source / orbax.MANIFEST)
    if manifest["quantize"] not in (None, "none"):
        raise InputError(
            f"{source} was quantized to {manifest['quantize']} when it was converted: that has no way back"
        )
    count = len(manifest["tensors"])
    with new_directory(target) as half:
        _write_shards(progress(disk_tensors(source), count), half, target, shard_bytes)
        _carry(source, half, (orbax.MANIFEST, orbax.STARTED))
    return count


def _write_shards(tensors: Iterable[tuple[str, np.ndarray]], half: Path, target: Path, shard_bytes: int) -> None:
    """Writes tensors to the directory ``half``, which becomes ``target``, in files of about ``shard_bytes``."""
    shards: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    size = 0

    def write() -> None:
        shards.append(list(waiting))
        path = half / f"{len(shards)}.safetensors"
        try:
            save_file(waiting, path, metadata={"format": "pt"})
        except SafetensorError as e:  # a full disk, which the library does not report as an OSError
            raise InputError(f"{target} cannot be written: {e}") from None
        # The library makes the file private, as in `files.write_tensors`.
        path.chmod(0o644)
        waiting.clear()

    for name, array in tensors:
        if waiting and size + array.nbytes > shard_bytes:
            write()
            size = 0
        waiting[name] = array
        size += array.nbytes
    write()
    name_shards(half, shards)


def _carry(source: Path, half: Path, left_out: Collection[str]) -> None:
    """Copies what lies beside the weights."""
    for pattern in orbax.CARRIED:
        for path in source.glob(pattern):
            if path.name not in left_out:
                shutil.copyfile(path, half / path.name)


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


# Weights in four bits.


def _planned(entries: Iterable[Entry], kind: str) -> DescribedTensors:
    """Names, shapes and dtypes of the tensors that compressed-tensors has for matrices [O, I] of ``kind``."""
    tensors = {}
    for entry in entries:
        for tensor in entry.tensors:
            rows, columns = tensor.disk_shape
            tensors |= _of_matrix(tensor.name, rows, columns, kind, _run(entry, kind))
    return DescribedTensors(tensors)


def _run(entry: Entry, kind: str) -> int:
    """Inputs of a parameter that share a scale."""
    return math.gcd(entry.shape[-1], GROUPS[kind])


def _of_matrix(name: str, rows: int, columns: int, kind: str, run: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name → dtype and shape of the tensors of a matrix [rows, columns]."""
    if kind == "nvfp4":
        return {
            f"{name}_packed": ("U8", (rows, columns // 2)),
            f"{name}_scale": ("F8_E4M3", (rows, columns // run)),
            f"{name}_global_scale": ("F32", (1,)),
        }
    return {
        f"{name}_packed": ("I32", (rows, columns // 8)),
        f"{name}_scale": ("BF16", (rows, columns // run)),
        f"{name}_shape": ("I64", (2,)),
    }


def _group(kind: str, run: int, targets: list[str]) -> dict:
    """An entry of ``config_groups``."""
    weights = {"num_bits": 4, "symmetric": True, "dynamic": False, "group_size": run}
    if kind == "nvfp4":
        weights |= {"type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
        form = "nvfp4-pack-quantized"
    else:
        weights |= {"type": "int", "strategy": "group"}
        form = "pack-quantized"
    return {"targets": targets, "weights": weights, "input_activations": None, "format": form}


def _check_matrices(entry: Entry, kind: str) -> None:
    """Raises InputError where the tensors of a parameter cannot be written in ``kind``."""
    tensor, reason = entry.tensors[0], None
    if any(len(t.disk_shape) != 2 for t in entry.tensors):
        reason = "it must be a matrix"
    elif entry.shape[-1] % 2:
        reason = "its rows must divide into bytes of two inputs"
    elif kind == "nvfp4" and entry.shape[-1] % GROUPS[kind]:
        reason = f"its rows must be in groups of {GROUPS[kind]}"
    elif kind == "nvfp4" and any(t.rows for t in entry.tensors):
        reason = "its parts must have one scale of scales"
    if reason:
        raise InputError(f"{tensor.name!r} {list(tensor.disk_shape)} cannot be written in {kind}: {reason}")


def _joined(entry: Entry) -> str:
    """The path of a parameter, the same for q, k and v of a layer."""
    parent, _, name = entry.path.rpartition(".")
    return parent if name in ("q", "k", "v") else entry.path


def _with_one_factor(weights: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """The arrays of weights of `ops.weights.quantize`, with the largest of their factors for all."""
    found = [{name: np.asarray(array) for name, array in arrays.items()} for arrays in weights]
    if "factor" not in found[0]:
        return found
    largest = max(arrays["factor"].max() for arrays in found)
    return [
        arrays
        | {
            # Factors are powers of two.
            "scale": (arrays["scale"].astype(np.float32) * (arrays["factor"] / largest)).astype(arrays["scale"].dtype),
            "factor": np.full_like(arrays["factor"], largest),
        }
        for arrays in found
    ]


def quantize_to_hf(
    source: Path, target: Path, kind: str, shard_bytes: int, progress: Callable[[Iterable, int], Iterable]
) -> int:
    """Writes a target with its large matrices in four bits, as compressed-tensors has them.

    They are those, and the numbers are those, that loading with ``quantize`` has. Experts are written one by one, as
    other engines read them. Those join q, k and v to one matrix, which has one divisor there: so these have the same
    one, with which scales far below the largest may be rounded.

    Args:
        source: A Hugging Face directory of a target.
        target: A new directory.
        kind: A key of `ops.weights.GROUPS`.
        shard_bytes: Size of a shard, about.
        progress: ``progress(iterable, total)`` wraps the loop over these matrices and further tensors.

    Returns:
        The number of matrices in four bits.

    Raises:
        InputError: ``source`` is no target's, or is in few bits already, or ``target`` cannot be written.
    """
    opened, raw = open_target(source), read_raw(source)
    if opened.stored:
        raise InputError(f"{source} is in few bits already: quantize the checkpoint that it was made from")
    one_by_one = {*opened.files, *(f"{n.rpartition('.')[0]}.0." for n in opened.files if ".mlp.experts." in n)}
    entries = {e.path: e for e in families.target_family(raw).weight_names(opened.config, one_by_one)}
    large = {e.path: entries[e.path] for e in opened.entries if e.path.rsplit(".", 1)[-1] in QUANTIZED}
    for entry in large.values():
        _check_matrices(entry, kind)
    modules = {t.name.removesuffix(".weight"): _run(e, kind) for e in large.values() for t in e.tensors}
    kept = {t.name for e in opened.entries if e.path not in large for t in e.tensors} | set(opened.skipped)
    ignored = {n.removesuffix(".weight") for n in kept if n.endswith(".weight") and len(opened.files[n]) == 2}
    # A head that is tied to the embedding has no tensor, and is a module all the same.
    ignored.add("lm_head")
    # Other engines ask for each of the experts of an MTP head, which are stacked.
    experts = {n.rpartition(".")[0] for n in kept if len(opened.files[n]) == 3 and ".experts." in n}
    ignored |= {f"re:{re.escape(name)}[.].*" for name in experts}
    runs = {run: sorted(m for m, r in modules.items() if r == run) for run in sorted(set(modules.values()))}
    usual = max(runs, key=lambda run: len(runs[run]), default=0)
    groups = [_group(kind, run, ["Linear"] if run == usual else names) for run, names in runs.items()]
    written = {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if groups else "dense",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": sorted(ignored),
    }
    planned, form = _planned(large.values(), kind), quantization.read({"quantization_config": written}, source)
    joined: dict[str, list[Entry]] = {}
    for entry in opened.entries:
        if entry.path in large:
            joined.setdefault(_joined(entry), []).append(entry)
    todo, in_few_bits = [*joined.values(), *sorted(kept)], {}

    def parts() -> Iterator[tuple[Tensor, np.ndarray]]:
        one = NamedSharding(ONE_DEVICE.mesh(), PartitionSpec())
        for item in progress(todo, len(todo)):
            if isinstance(item, str):
                yield Tensor(item, opened.files[item]), opened.files.read(item)
                continue
            weights: list[Any] = [read_parameter(entry, opened, None, kind, one) for entry in item]
            arrays_of = _with_one_factor([weight.arrays() for weight in weights])
            for read, arrays in zip(item, arrays_of, strict=True):
                entry = large[read.path]
                stored = quantized.stored_of(entry, planned, form)
                in_few_bits.update({part.name: part for matrix in stored for part in matrix.parts})
                yield from quantized.write(entry, stored, quantized.as_compressed(arrays))
                for matrix in stored:
                    for part in matrix.constants.values():
                        yield Tensor(part.name, part.shape), np.array(matrix.tensor.disk_shape)
            opened.files.release()

    with new_directory(target) as half:
        _write_shards(_whole(parts(), planned, in_few_bits), half, target, shard_bytes)
        _carry(source, half, ("config.json", INDEX))
        write_json(half / "config.json", raw | {"quantization_config": written})
    return len(modules)
