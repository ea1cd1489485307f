"""Checkpoints as sharded Orbax, written a parameter at a time and resumable.

A directory holds ``parameters/PATH`` for each parameter (of one in few bits the arrays of `quantized.read`, or
those of what was quantized on the way, so that every mesh reads them), ``extra/NAME`` for each tensor that the text
model does not run, those of a vision tower among them, ``records/`` of what is written and verified, and unchanged
copies of config, tokenizer and chat template. ``manifest.json`` comes last: a directory without it is an unfinished
conversion and is refused.
"""

import hashlib
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from dflash_jax.checkpoint import quantized
from dflash_jax.checkpoint.config_files import read_json
from dflash_jax.checkpoint.disk_array import DiskArray
from dflash_jax.checkpoint.files import DescribedTensors, write_json
from dflash_jax.checkpoint.parameters import (
    Source,
    array_shardings,
    arrays_of,
    finished,
    placed,
    read_parameter,
    spread,
    stays_quantized,
)
from dflash_jax.errors import InputError
from dflash_jax.ops.weights import CODES, QuantizedWeight
from dflash_jax.parallel.sharding import Layout, parameter_paths, parameter_specs
from dflash_jax.progress import bar

MANIFEST, STARTED = "manifest.json", "conversion.json"
# A host of another mesh reads whole pieces of this size at most.
CHUNK_BYTES = 2**24
CARRIED = ("*.json", "*.jinja", "*.txt", "*.model")


def is_orbax(directory: Path) -> bool:
    """Whether ``directory`` is a finished conversion.

    Raises:
        InputError: It is an unfinished conversion.
    """
    if (directory / MANIFEST).exists():
        return True
    if (directory / STARTED).exists():
        raise InputError(
            f"{directory} is half a conversion: run dflash convert hf-to-orbax again with the same arguments"
        )
    return False


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def _tree(value) -> dict:
    return value.arrays() if isinstance(value, QuantizedWeight) else {"array": value}


@dataclass(frozen=True)
class Record:
    """A parameter or tensor that was written and verified.

    Attributes:
        arrays: Dtype and shape of each array.
        digest: Hex digest of all of them.
    """

    arrays: dict[str, tuple[str, list[int]]]
    digest: str


@dataclass
class Conversion:
    """A conversion, new or resumed.

    Attributes:
        directory: Where it is written.
        plan: What it depends on. A conversion is resumed only with the same plan.
        checkpointer: Orbax's writer.
    """

    directory: Path
    plan: dict
    checkpointer: ocp.Checkpointer = field(default_factory=lambda: ocp.Checkpointer(ocp.PyTreeCheckpointHandler()))

    def begin(self) -> None:
        """Creates or resumes the directory.

        Raises:
            InputError: The directory has other files, or a conversion with another plan.
        """
        started = self.directory / STARTED
        if started.exists():
            previous = read_json(started)
            changed = [key for key in self.plan if previous.get(key) != self.plan[key]]
            if changed:
                raise InputError(
                    f"{self.directory} was begun with another {', '.join(changed)}: give what it was, or an empty "
                    f"directory"
                )
            for leftover in self.directory.glob("*/*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)
            return
        if self.directory.exists() and any(self.directory.iterdir()):
            raise InputError(f"{self.directory} is not empty: give a new directory, or one of a conversion to resume")
        (self.directory / "records").mkdir(parents=True)
        write_json(started, self.plan)

    def _record(self, kind: str, name: str) -> Path:
        return self.directory / "records" / f"{kind} {name}.json"

    def is_done(self, kind: str, name: str) -> bool:
        """Whether an item was written and verified."""
        return self._record(kind, name).exists()

    def write(self, kind: str, name: str, arrays: dict) -> None:
        """Saves the arrays of an item, reads them back, compares and records them.

        ``arrays`` is emptied before the comparison, so that only one copy is in memory.

        Raises:
            InputError: They cannot be written, or read back differently.
        """
        path = (self.directory / kind / name).absolute()
        if path.exists():
            shutil.rmtree(path)
        shapes = {k: (str(v.dtype), list(v.shape)) for k, v in arrays.items()}
        expected = _digest({k: np.asarray(v) for k, v in arrays.items()})
        try:
            pieces = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
            self.checkpointer.save(path, args=ocp.args.PyTreeSave(arrays, save_args=pieces))
        except (ValueError, OSError) as e:  # what the storage library says of a full disk is a ValueError
            raise InputError(f"{path} cannot be written: {str(e).splitlines()[0][-200:]}") from None
        arrays.clear()
        actual = _digest(read_arrays(path, list(shapes)))
        if actual != expected:
            raise InputError(f"{path} does not read back as it was written: is the disk sound?")
        write_json(self._record(kind, name), asdict(Record(shapes, expected)))

    def finish(self, manifest: dict) -> None:
        """Writes the manifest with all records."""
        records = {p.stem: read_json(p) for p in sorted((self.directory / "records").glob("*.json"))}
        write_json(self.directory / MANIFEST, {**self.plan, **manifest, "records": records})
        self.checkpointer.close()


def read_arrays(path: Path, names: list[str], shardings: dict | None = None) -> dict:
    """Reads the arrays of a saved item.

    Args:
        path: The item's directory.
        names: Its arrays.
        shardings: Where each array goes; None: NumPy arrays on the host.

    Raises:
        InputError: It cannot be read.
    """
    if shardings is None:
        kinds = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
    else:
        kinds = {name: ocp.ArrayRestoreArgs(sharding=shardings[name]) for name in names}
    # Waits for no other process, which may read other items.
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(own, {own}, f"process {own}")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=alone) as checkpointer:
        try:
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=kinds))
        except (ValueError, OSError, KeyError) as e:
            raise InputError(f"{path} cannot be read: {str(e).splitlines()[0]}") from None


def fingerprint(directory: Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of every weight file. It changes when the checkpoint does."""
    files = sorted(directory.glob("*.safetensors"))
    return {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in files}


def convert(source: Source, module, directory: Path, target: Path, layout: Layout, options: dict, progress) -> None:
    """Converts a Hugging Face checkpoint.

    Args:
        source: The opened checkpoint.
        module: Its abstract module for ``layout``.
        directory: The checkpoint's directory.
        target: Where to write.
        layout: The mesh to shard for.
        options: ``dtype`` (None keeps each tensor's) and ``quantize``.
        progress: ``progress(iterable, total)`` wraps the loop.

    Raises:
        InputError: ``target`` cannot be written or resumed.
    """
    plan = {"format": 1, "source": fingerprint(directory), "mesh": str(layout), **options}
    conversion, mesh = Conversion(target, plan), layout.mesh()
    conversion.begin()
    entries = {e.path: e for e in source.entries}
    specs = dict(zip(parameter_paths(module), parameter_specs(module), strict=True))
    extra = dict.fromkeys(source.skipped)
    if options["quantize"] is None:
        # What is multiplied out has no way back: its tensors are there as they were, too.
        multiplied_out = [p for p in source.stored.values() if not quantized.are_packed(p, source.files)]
        extra |= {part.name: None for parts in multiplied_out for one in parts for part in one.parts}
    todo = [("parameters", path) for path in entries] + [("extra", name) for name in extra]
    for kind, name in progress(todo):
        if conversion.is_done(kind, name):
            continue
        if kind == "extra":
            conversion.write(kind, name, {"array": source.files.read(name)})
            source.files.release()
        else:
            sharding = NamedSharding(mesh, specs[name])
            if options["quantize"] is None:
                arrays = placed(arrays_of(entries[name], source, options["dtype"]), sharding, entries[name].shape)
            else:
                arrays = _tree(read_parameter(entries[name], source, options["dtype"], options["quantize"], sharding))
            jax.block_until_ready(arrays)
            source.files.release()
            conversion.write(kind, name, arrays)
    for pattern in CARRIED:
        for path in directory.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, target / path.name)
    tensors = {n: [source.files.dtype(n), list(source.files[n])] for n in source.files}
    conversion.finish({"tensors": tensors})


def tensor_names(directory: Path) -> Collection[str]:
    """Names of the tensors of the checkpoint that was converted."""
    return read_json(directory / MANIFEST)["tensors"]


class ConvertedTensors(DescribedTensors):
    """The tensors of the checkpoint that was converted, with their shapes and dtypes.

    Args:
        directory: The conversion.

    Raises:
        InputError: The manifest cannot be read.
    """

    def __init__(self, directory: Path):
        super().__init__(read_json(directory / MANIFEST)["tensors"])


class ExtraTensors(ConvertedTensors):
    """The tensors of a conversion that the text model does not run, as they were in the checkpoint.

    Args:
        directory: The conversion.
        parameters: Further tensors, each with the parameter that it is whole; those that are not there are left out.

    Raises:
        InputError: The manifest cannot be read.
    """

    def __init__(self, directory: Path, parameters: Mapping[str, str] | None = None):
        super().__init__(directory)
        records = read_json(directory / MANIFEST)["records"]
        items = {n: ("extra", n) for n in self._tensors}
        items |= {n: ("parameters", path) for n, path in (parameters or {}).items()}
        self._tensors = {n: t for n, t in self._tensors.items() if " ".join(items[n]) in records}
        self._paths = {n: (directory / items[n][0] / items[n][1]).absolute() for n in self._tensors}
        # Each device's part may be of every tensor of a parameter.
        self._read = cache(lambda name: read_arrays(self._paths[name], ["array"])["array"])

    def read(self, name: str) -> np.ndarray:
        """See `Tensors`."""
        return self._read(name)

    def release(self) -> None:
        """See `Tensors`."""
        self._read.cache_clear()


def _shape(arrays: Mapping[str, list]) -> tuple[int, ...]:
    """The shape of a parameter by the dtypes and shapes of its arrays."""
    name = next(name for name in ("array", "values", *CODES) if name in arrays)
    *rows, size = arrays[name][1]
    return (*rows, 2 * size if name in CODES else size)


def forms(directory: Path) -> dict[str, quantized.Form]:
    """Path → form of the parameters that `load` finds in few bits, also those that were quantized on the way."""
    found = {}
    for key, record in read_json(directory / MANIFEST)["records"].items():
        kind, path = key.split(" ", 1)
        arrays = record["arrays"]
        if kind == "parameters" and "array" not in arrays:
            code, (dtype, scales) = next((c for c in CODES if c in arrays), None), arrays["scale"]
            has_factor = not arrays.keys().isdisjoint(("factor", "divisor"))
            columns = _shape(arrays)[-1] // scales[-1]
            found[path] = quantized.Form(code or arrays["values"][0], columns, dtype, has_factor, "zero" in arrays)
    return found


def _on_host(array: jax.Array) -> DiskArray:
    """The parts of an array that devices of this host have."""
    parts = {}
    for shard in array.addressable_shards:
        parts[tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True))] = shard.data
    return DiskArray(array.shape, array.dtype, lambda index: np.asarray(parts[tuple((s.start, s.stop) for s in index)]))


def load(module, directory: Path, dtype, layout: Layout, quantize: str | None):
    """Reads every parameter of an abstract module straight to its devices.

    Args:
        module: The abstract module.
        directory: A directory of `convert`.
        dtype: The parameters' dtype.
        layout: The mesh.
        quantize: As in `load.load_target`.

    Raises:
        InputError: The directory does not fit the module.
    """
    manifest, mesh = read_json(directory / MANIFEST), layout.mesh()
    leaves, structure = jax.tree.flatten(module)
    parameters = []
    table = list(zip(parameter_paths(module), leaves, parameter_specs(module), strict=True))
    for path, leaf, spec in bar(table, description="loading weights", unit="parameter", in_library=True):
        record = manifest["records"].get(f"parameters {path}")
        shape = record and _shape(record["arrays"])
        if shape != leaf.shape:
            raise InputError(f"{directory} does not fit its config.json: {path} has shape {shape}, not {leaf.shape}")
        sharding = NamedSharding(mesh, spec)
        where, names = (directory / "parameters" / path).absolute(), list(record["arrays"])
        shapes = {name: shape for name, (_, shape) in record["arrays"].items()}
        arrays = read_arrays(where, names, array_shardings(shapes, sharding, leaf.shape))
        if "divisor" in names:
            scales = {name: _on_host(arrays.pop(name)) for name in ("scale", "divisor")}
            scales = quantized.without_divisor(scales, not stays_quantized(path, quantize))
            arrays |= placed(scales, sharding, leaf.shape)
        parameters.append(spread(finished(arrays, dtype, path, quantize, sharding), sharding))
    return jax.tree.unflatten(structure, parameters)
