"""Hugging Face directories ↔ modules with weights."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax.checkpoint import fp8
from dflash_jax.checkpoint.files import TensorFiles, read_json, write_tensors
from dflash_jax.config import DraftConfig, ModelConfig
from dflash_jax.errors import InputError
from dflash_jax.models import families
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter, abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.models.families.names import Entry
from dflash_jax.models.scaled import Scaled
from dflash_jax.models.scaled import quantize as quantize_array
from dflash_jax.sharding import ONE_DEVICE, Layout, parameter_paths, parameter_specs, place

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


def _open(directory: Path, raw: dict, config, entries: list[Entry], files: TensorFiles, is_skipped) -> Source:
    """Raises InputError with the list of all tensors that do not fit."""
    block = _block(raw, directory)
    wanted = {t.name: t.shape for e in entries for t in e.tensors}
    if block:
        wanted |= {t.name: t.shape for t in fp8.scales(entries, files, block)}
    problems = [f"missing {n!r} {list(s)}" for n, s in wanted.items() if n not in files]
    problems += [
        f"{n!r} has shape {list(files[n])}, it must be {list(s)}"
        for n, s in wanted.items()
        if n in files and files[n] != s
    ]
    rest = [n for n in files if n not in wanted]
    problems += [f"unexpected {n!r} {list(files[n])}" for n in rest if not is_skipped(n)]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise InputError(
            f"{directory} does not fit its config.json, {len(problems)} tensors are wrong: {shown}", problems
        )
    return Source(config, entries, files, rest, block)


def _read_parameter(entry: Entry, source: Source, dtype, quantize: str | None, cut: NamedSharding):
    """One parameter, cast and placed on its devices: an array, or a `Scaled`."""
    files = source.files
    array = entry.read([files.read(t.name) for t in entry.tensors])
    last = cut.spec[array.ndim - 1] if len(cut.spec) == array.ndim else None
    parts = math.prod(cut.mesh.shape[axis] for axis in last or ())
    if source.block and fp8.is_scaled(entry, files):
        scale = fp8.read_scale(entry, files, source.block, parts)
        if quantize != "none":
            return Scaled(place(array, cut), place(scale, cut))
        runs = array.astype(np.float32).reshape(*scale.shape, -1) * scale.astype(np.float32)[..., None]
        array = runs.reshape(array.shape)
    placed = place(array.astype(dtype, copy=False), cut)
    if quantize in ("int8", "fp8") and entry.path.rsplit(".", 1)[-1] in QUANTIZED:
        return jax.jit(quantize_array, static_argnums=(1, 2), out_shardings=cut)(placed, quantize, parts)
    return placed


def fill(module, source: Source, dtype, layout: Layout, quantize: str | None = None):
    """``module`` (abstract) with every parameter read from its tensors, one at a time."""
    by_path, mesh = {e.path: e for e in source.entries}, layout.mesh()
    leaves, structure = jax.tree.flatten(module)
    arrays = []
    for path, leaf, cut in zip(parameter_paths(module), leaves, parameter_specs(module), strict=True):
        if by_path[path].shape != leaf.shape:
            raise AssertionError(f"the table gives {path} the shape {by_path[path].shape}, the module {leaf.shape}")
        arrays.append(_read_parameter(by_path[path], source, dtype, quantize, NamedSharding(mesh, cut)))
    return jax.tree.unflatten(structure, arrays)


def _read_raw(directory: Path) -> dict:
    if not (directory / "config.json").exists():
        raise InputError(f"{directory} is not a checkpoint: it has no config.json")
    raw = read_json(directory / "config.json")
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise InputError(f"{directory / 'config.json'}: text_config must be an object, it is {text!r}")
    return raw


def _block(raw: dict, directory: Path) -> tuple[int, int] | None:
    quantization = raw.get("quantization_config") or raw.get("text_config", {}).get("quantization_config")
    return fp8.read_block(quantization, directory) if quantization else None


def _read_config(read, raw: dict, directory: Path):
    """JSON has any type anywhere: what the reader did not expect is told in one line too."""
    try:
        return read(raw)
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as e:
        raise InputError(f"{directory / 'config.json'} is malformed: {type(e).__name__}: {e}") from None


def read_config_file(path: Path, read):
    """(raw config, ``read`` of it) of a directory or of a config.json file by any name."""
    if path.is_dir() or path.suffix != ".json":
        raw = _read_raw(path)
        return raw, _read_config(read, raw, path)
    raw = read_json(path)
    return raw, _read_config(read, raw, path.parent)


def read_target_config(directory: Path) -> ModelConfig:
    return _read_config(families.read_target, _read_raw(directory), directory)


def read_draft_config(directory: Path) -> DraftConfig:
    raw = _read_raw(directory)
    if not _read_config(dflash.is_drafter, raw, directory):
        raise InputError(f"{directory} is not a DFlash drafter: its config.json has no dflash_config")
    return _read_config(dflash.read_config, raw, directory)


def open_target(directory: str | Path) -> Source:
    """Raises InputError, listing every bad tensor, where names and shapes do not fit ``config.json``."""
    directory = Path(directory)
    raw, config = _read_raw(directory), read_target_config(directory)
    family, files = families.target_family(raw), TensorFiles(directory)
    # Some checkpoints carry the head that they tie to the embedding.
    tied = {"lm_head.weight"} if config.tied_embeddings else ()
    entries = family.weight_names(config, files)
    return _open(directory, raw, config, entries, files, lambda name: name in tied or family.is_skipped(name))


def load_target(
    directory: str | Path, dtype=jnp.float32, layout: Layout = ONE_DEVICE, quantize: str | None = None
) -> Decoder:
    """A target from a Hugging Face directory, its parameters on the mesh of ``layout``. Its config is ``.config``.

    FP8 weights stay in FP8. ``quantize``: "none" makes them ``dtype``; "int8" and "fp8" quantize what is not, with one
    scale an output (embedding, head, router, norms and the small projections stay).
    """
    if quantize not in (None, *QUANTIZE):
        raise InputError(f"quantize {quantize!r}: it must be one of {', '.join(QUANTIZE)}")
    source = open_target(directory)
    return fill(abstract_decoder(source.config, dtype, layout), source, dtype, layout, quantize)


def open_drafter(directory: str | Path, target: ModelConfig | None = None) -> Source:
    """Like `open_target`; also where the drafter cannot be one for ``target``."""
    directory = Path(directory)
    config = read_draft_config(directory)
    if target is not None:
        config.check_fits(target)
    files = TensorFiles(directory)
    entries = dflash.weight_names(config, files)
    return _open(directory, _read_raw(directory), config, entries, files, dflash.is_skipped)


def load_drafter(
    directory: str | Path, dtype=jnp.float32, target: ModelConfig | None = None, layout: Layout = ONE_DEVICE
) -> Drafter:
    """A drafter from a Hugging Face directory, checked against the target it is to work for."""
    source = open_drafter(directory, target)
    config = source.config
    return fill(abstract_drafter(config, dtype, layout), source, dtype, layout)


def save_module(module, entries: list[Entry], raw: dict, directory: str | Path, dtype=jnp.bfloat16) -> None:
    """Writes weights and ``config.json`` as a Hugging Face directory, in the layout of ``entries``."""
    directory = Path(directory)
    by_path = {e.path: e for e in entries}
    tensors = {}
    for path, leaf in zip(parameter_paths(module), jax.tree.leaves(module), strict=True):
        entry = by_path[path]
        for tensor, array in zip(entry.tensors, entry.write(np.asarray(leaf.astype(dtype))), strict=True):
            tensors[tensor.name] = array
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
