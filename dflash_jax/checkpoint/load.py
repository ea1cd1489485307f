"""Hugging Face directories ↔ modules with weights."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoint.files import TensorFiles, read_json, write_tensors
from dflash_jax.config import DraftConfig, ModelConfig
from dflash_jax.errors import InputError
from dflash_jax.models import families
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter, abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.models.families.names import Entry


def parameter_paths(module) -> list[str]:
    """Dotted names of a module's parameters, in the order of its leaves."""
    paths, _ = jax.tree_util.tree_flatten_with_path(module)
    names = []
    for path, _ in paths:
        parts = [str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", None)))) for key in path]
        names.append(".".join(p for p in parts if p != "value"))
    return names


def _check(entries: list[Entry], files: TensorFiles, is_skipped, directory: Path) -> list[str]:
    """Names of the tensors that are knowingly left alone. Raises InputError with the list of all that do not fit."""
    wanted = {t.name: t.shape for e in entries for t in e.tensors}
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
    return rest


def fill(module, entries: list[Entry], files: TensorFiles, dtype):
    """``module`` (abstract) with every parameter read from its tensors, one at a time, cast and placed on the
    device."""
    by_path = {e.path: e for e in entries}
    leaves, structure = jax.tree.flatten(module)
    arrays = []
    for path, leaf in zip(parameter_paths(module), leaves, strict=True):
        entry = by_path[path]
        array = entry.read([files.read(t.name) for t in entry.tensors])
        if array.shape != leaf.shape:
            raise AssertionError(f"the table gives {path} the shape {array.shape}, the module {leaf.shape}")
        arrays.append(jnp.asarray(array, dtype))
    return jax.tree.unflatten(structure, arrays)


def _read_raw(directory: Path) -> dict:
    if not (directory / "config.json").exists():
        raise InputError(f"{directory} is not a checkpoint: it has no config.json")
    raw = read_json(directory / "config.json")
    text = raw.get("text_config", {})
    if not isinstance(text, dict):
        raise InputError(f"{directory / 'config.json'}: text_config must be an object, it is {text!r}")
    quantised = raw.get("quantization_config") or text.get("quantization_config")
    if quantised:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise InputError(
            f"{directory} is quantised ({kind}): only float32, float16 and bfloat16 checkpoints are read here"
        )
    return raw


def read_target_config(directory: Path) -> ModelConfig:
    raw = _read_raw(directory)
    return families.target_family(raw).read_config(raw)


def read_draft_config(directory: Path) -> DraftConfig:
    raw = _read_raw(directory)
    if not dflash.is_drafter(raw):
        raise InputError(f"{directory} is not a DFlash drafter: its config.json has no dflash_config")
    return dflash.read_config(raw)


@dataclass(frozen=True)
class TargetSource:
    """A target's checkpoint, opened and checked, nothing read yet. ``skipped``: tensors that a text model does not
    run."""

    config: ModelConfig
    entries: list[Entry]
    files: TensorFiles
    skipped: list[str]


def open_target(directory: str | Path) -> TargetSource:
    """Raises InputError, listing every bad tensor, where names and shapes do not fit ``config.json``."""
    directory = Path(directory)
    raw = _read_raw(directory)
    family = families.target_family(raw)
    config, files = family.read_config(raw), TensorFiles(directory)
    entries = family.weight_names(config, files)
    # Some checkpoints carry the head that they tie to the embedding.
    tied = {"lm_head.weight"} if config.tied_embeddings else ()
    skipped = _check(entries, files, lambda name: name in tied or family.is_skipped(name), directory)
    return TargetSource(config, entries, files, skipped)


def load_target(directory: str | Path, dtype=jnp.float32) -> Decoder:
    """A target from a Hugging Face directory. Its config is ``.config``."""
    source = open_target(directory)
    return fill(abstract_decoder(source.config, dtype), source.entries, source.files, dtype)


def load_drafter(directory: str | Path, dtype=jnp.float32, target: ModelConfig | None = None) -> Drafter:
    """A drafter from a Hugging Face directory, checked against the target it is to work for."""
    directory = Path(directory)
    config, files = read_draft_config(directory), None
    if target is not None:
        config.check_fits(target)
    files = TensorFiles(directory)
    entries = dflash.weight_names(config, files)
    _check(entries, files, dflash.is_skipped, directory)
    return fill(abstract_drafter(config, dtype), entries, files, dtype)


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
