"""Loads modules from Hugging Face directories, and saves them."""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from dflash_jax import progress
from dflash_jax.checkpoint import orbax, quantization, quantized
from dflash_jax.checkpoint.config_files import parsed, read_raw
from dflash_jax.checkpoint.disk_array import DiskArray
from dflash_jax.checkpoint.files import TensorFiles, Tensors, tensor_names, write_json, write_tensors
from dflash_jax.checkpoint.given import GivenTensors
from dflash_jax.checkpoint.parameters import (
    C,
    Source,
    cast,
    check_quantize,
    finished,
    of_drafter,
    read_parameter,
    spread,
)
from dflash_jax.errors import InputError
from dflash_jax.models import families
from dflash_jax.models.config import DraftConfig, ModelConfig, VisionConfig
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.families import dflash, mtp
from dflash_jax.models.families.names import Entry, Tensor, whole_tensors
from dflash_jax.models.families.vision import vision_entries, vision_prefix
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.packing import plain_weight
from dflash_jax.models.vision import VisionTower, abstract_tower
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.weights import dense as dense_array
from dflash_jax.ops.weights import is_weight
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout, parameter_paths, parameter_specs, place

log = logging.getLogger("dflash_jax")
# The only token ids that a drafter drafts by default, in its directory.
DRAFT_TOKENS = "draft_tokens.json"


@dataclass(frozen=True)
class Forms:
    """What a plan reads of a checkpoint in few bits.

    Attributes:
        parameters: Paths of the parameters in few bits, each with its form.
        unused: Its scales of activations, keys and values, which no pass uses.
        caches: What its configuration says of keys and values; None: nothing.
        has_fp8_scales: Whether its scales of keys and values are of FP8, which uses them.
    """

    parameters: tuple[tuple[str, quantized.Form], ...] = ()
    unused: tuple[str, ...] = ()
    caches: str | None = None
    has_fp8_scales: bool = True

    def not_used(self, has_fp8_caches: bool) -> list[str]:
        """In words what the checkpoint has, or asks for, beside weights in few bits.

        Args:
            has_fp8_caches: Whether keys and values are in FP8, which is what the checkpoint may ask for.
        """
        of_caches = [name for name in self.unused if quantized.is_of_caches(name)]
        if has_fp8_caches:
            return quantized.counted(set(self.unused) - set(of_caches if self.has_fp8_scales else ()))
        asked = [f"keys and values as {self.caches}"] if self.caches else []
        hint = ["--kv-cache-dtype fp8 is off"] if asked or of_caches else []
        return [*quantized.counted(self.unused), *asked, *hint]


def _open(
    directory: Path, raw: dict, config: C, entries: list[Entry], files: Tensors, is_skipped: Callable[[str], bool]
) -> Source[C]:
    """Checks the names and shapes of all tensors.

    Raises:
        InputError: Tensors are missing, unexpected or of a wrong shape; its second argument is the list of all of them.
    """
    form = quantization.read(raw, directory)
    stored = parsed(lambda _: quantized.all_stored(entries, files, form), raw, directory)
    plain = {t.name: t.disk_shape for e in entries if e.path not in stored for t in e.tensors}
    in_few_bits = [part for parts in stored.values() for part in parts]
    problems = [f"missing {n!r} {list(s)}" for n, s in plain.items() if n not in files]
    problems += [
        f"{n!r} has shape {list(files[n])}, it must be {list(s)}"
        for n, s in plain.items()
        if n in files and files[n] != s
    ]
    problems += dict.fromkeys(problem for part in in_few_bits for problem in part.problems(files))
    expected = plain.keys() | {part.name for one in in_few_bits for part in one.parts}
    skipped = [n for n in files if n not in expected]
    weights = {t.name for e in entries for t in e.tensors}
    unused = tuple(n for n in skipped if form is not None and quantized.is_unused(n, weights))
    known = {*unused, *(part.name for one in in_few_bits for part in one.constants.values())}
    problems += [f"unexpected {n!r} {list(files[n])}" for n in skipped if n not in known and not is_skipped(n)]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        what = "the weights do not fit the" if isinstance(files, GivenTensors) else f"{directory} does not fit its"
        raise InputError(f"{what} config.json, {len(problems)} tensors are wrong: {shown}", problems)
    return Source(config, entries, files, skipped, stored, unused, form and form.caches)


def fill(
    module,
    source: Source,
    dtype,
    layout: Layout,
    quantize: str | None = None,
    given: Mapping[str, Any] = MappingProxyType({}),
):
    """Reads every parameter of an abstract module, one at a time.

    Args:
        module: The abstract module.
        source: The opened checkpoint.
        dtype: The parameters' dtype; None keeps each tensor's.
        layout: The mesh on which the parameters are placed.
        quantize: As in `load_target`.
        given: Parameters by path that the checkpoint may lack: arrays, or weights of another form, which stay as they
            are.

    Raises:
        InputError: The table of weight names lacks a parameter.
    """
    by_path, mesh = {e.path: e for e in source.entries}, layout.mesh()
    if missing := [path for path in parameter_paths(module) if path not in by_path and path not in given]:
        raise InputError(f"the table of weight names lacks {len(missing)} parameters of the model, first {missing[0]}")
    if inputs := [name for name in source.unused if not quantized.is_of_caches(name)]:
        log.info("not used, since only weights are in few bits: %s", ", ".join(quantized.counted(inputs)))
    if source.caches or len(inputs) < len(source.unused):
        said = source.caches or "numbers with scales"
        log.info("the checkpoint asks for keys and values as %s: kv_cache_dtype 'fp8' has them in FP8", said)
    if dense := [p for p, parts in source.stored.items() if not quantized.are_packed(parts, source.files)]:
        why = "their tensors are not alike, or their inputs not in the order of their groups (act-order)"
        log.warning("%d parameters are multiplied out, since %s, first %s", len(dense), why, dense[0])
    leaves, structure = jax.tree.flatten(module)
    arrays, sizes = [], [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    with progress.bar(description="loading weights", total=sum(sizes), unit="B", in_library=True) as bar:
        for path, leaf, spec, size in zip(parameter_paths(module), leaves, parameter_specs(module), sizes, strict=True):
            sharding = NamedSharding(mesh, spec)
            if path not in by_path:
                arrays.append(_given(given[path], leaf.dtype, sharding))
                continue
            if by_path[path].shape != leaf.shape:
                raise AssertionError(f"the table gives {path} the shape {by_path[path].shape}, the module {leaf.shape}")
            arrays.append(spread(read_parameter(by_path[path], source, dtype, quantize, sharding), sharding))
            # The parts are copies.
            source.files.release()
            bar.update(size)
    return jax.tree.unflatten(structure, arrays)


def _given(weight: Any, dtype: np.dtype, sharding: NamedSharding) -> Any:
    """A parameter that is no checkpoint's: a weight that is placed already as it is."""
    if not isinstance(weight, np.ndarray | jax.Array):
        return weight
    is_placed = isinstance(weight, jax.Array) and weight.sharding.is_equivalent_to(sharding, weight.ndim)
    return weight if is_placed and weight.dtype == dtype else place(weight.astype(dtype), sharding)


def read_target_config(directory: Path, overrides: dict | None = None) -> ModelConfig:
    """The configuration of a target's directory; ``overrides`` as of `read_raw`, here and below.

    Raises:
        InputError: It is invalid or of an unknown model type.
    """
    return parsed(families.read_target, read_raw(directory, overrides), directory)


def read_draft_config(directory: Path, overrides: dict | None = None) -> DraftConfig | MtpConfig:
    """The configuration of a drafter's directory: a DFlash drafter's, an MTP head's or a target's with one.

    Raises:
        InputError: It is invalid, or of a target whose kind has no MTP head.
    """
    raw = read_raw(directory, overrides)
    config = parsed(families.read_drafter, raw, directory)
    if isinstance(config, MtpConfig):
        return config
    names = draft_tensor_names(directory)
    return parsed(lambda raw: dflash.with_tables(config, raw, names), raw, directory)


def draft_tensor_names(directory: Path) -> Collection[str]:
    """The tensors of a drafter's directory: Hugging Face's, or one of `orbax.convert`."""
    return quantized.plain_names((orbax.tensor_names if orbax.is_orbax(directory) else tensor_names)(directory))


def open_target(
    directory: str | Path,
    overrides: dict | None = None,
    files: Tensors | None = None,
    kept: Collection[str] = (),
) -> Source[ModelConfig]:
    """Opens a target's checkpoint without reading weights.

    Args:
        directory: The checkpoint's directory.
        overrides: As of `read_target_config`.
        files: Its tensors, in place of the directory's.
        kept: Paths of parameters that it may lack.

    Raises:
        InputError: Names or shapes do not fit ``config.json``; its second argument is the list of all bad tensors.
    """
    directory = Path(directory)
    raw, config = read_raw(directory, overrides), read_target_config(directory, overrides)
    family, files = families.target_family(raw), TensorFiles(directory) if files is None else files
    # Some checkpoints carry the head that they tie to the embedding.
    tied = ("lm_head.",) if config.tied_embeddings else ()
    entries = [e for e in family.weight_names(config, quantized.plain_names(files)) if e.path not in kept]
    return _open(directory, raw, config, entries, files, lambda name: name.startswith(tied) or family.is_skipped(name))


def check_target(directory: str | Path, overrides: dict | None = None) -> ModelConfig:
    """The configuration of a target whose files are complete and fit it. No weights are read."""
    directory = Path(directory)
    if orbax.is_orbax(directory):
        return read_target_config(directory, overrides)
    return open_target(directory, overrides).config


def check_drafter(directory: str | Path, target: ModelConfig, overrides: dict | None = None) -> DraftConfig | MtpConfig:
    """The configuration of a drafter whose files are complete and fit it and ``target``. No weights are read."""
    directory, config = Path(directory), read_fitting_drafter(Path(directory), target, overrides)
    if orbax.is_orbax(directory) and isinstance(config, DraftConfig):
        return config
    return open_drafter(directory, target, overrides).config


def load_target(
    directory: str | Path,
    dtype=jnp.float32,
    layout: Layout = ONE_DEVICE,
    quantize: str | None = None,
    backend: Backend | None = None,
    overrides: dict | None = None,
    files: Tensors | None = None,
    kept: Mapping[str, Any] = MappingProxyType({}),
) -> Decoder:
    """Loads a target, its parameters on the mesh of ``layout``.

    Args:
        directory: A Hugging Face directory, or one of `orbax.convert`.
        dtype: Dtype of the parameters that are not quantized.
        layout: The mesh.
        quantize: None keeps weights in few bits as they are; "none" makes them ``dtype``; others of
            `quantize.QUANTIZE` quantize the other large matrices, "int8" and "fp8" with one scale an output,
            "int4" and "nvfp4" with one a group. Embedding, router, norms and small projections are never in few
            bits, and the head only where the checkpoint has it so.
        backend: Where it will run; this machine by default.
        overrides: Values in place of those of ``config.json``.
        files: Its tensors, in place of the directory's.
        kept: Parameters that are not read, by path, as they are.

    Raises:
        InputError: The checkpoint is invalid, or ``quantize`` is unknown.
    """
    backend = backend or Backend.detect()
    check_quantize(quantize)
    directory = Path(directory)
    if files is None and orbax.is_orbax(directory):
        module = abstract_decoder(read_target_config(directory, overrides), dtype, layout, backend)
        return orbax.load(module, directory, dtype, layout, quantize)
    source = open_target(directory, overrides, files, kept)
    return fill(abstract_decoder(source.config, dtype, layout, backend), source, dtype, layout, quantize, kept)


def dummy(module, dtype, layout: Layout, quantize: str | None = None):
    """An abstract module with random numbers that are near 0; arguments as of `fill`."""
    mesh, leaves = layout.mesh(), []
    # Repeated: they come from memory faster than from a generator. A prime: no two rows are alike.
    numbers = np.random.default_rng(0).uniform(-1e-3, 1e-3, 65537).astype(np.float32)
    for path, leaf, spec in zip(parameter_paths(module), jax.tree.leaves(module), parameter_specs(module), strict=True):
        sharding = NamedSharding(mesh, spec)

        def part(index: tuple[slice, ...], dtype=leaf.dtype) -> np.ndarray:
            shape = [cut.stop - cut.start for cut in index]
            whole = jnp.issubdtype(dtype, jnp.integer)
            return (np.arange(math.prod(shape)).reshape(shape) if whole else np.resize(numbers, shape)).astype(dtype)

        array = place(DiskArray(leaf.shape, leaf.dtype, part), sharding)
        leaves.append(spread(finished({"array": array}, dtype, path, quantize, sharding), sharding))
    return jax.tree.unflatten(jax.tree.structure(module), leaves)


def read_kv_scales(
    directory: Path, config: ModelConfig | DraftConfig | MtpConfig, overrides: dict | None = None
) -> dict[str, np.ndarray]:
    """The scales of keys and values in FP8 that a checkpoint has, for `kv_scales.with_fp8_caches`.

    Args:
        directory: A Hugging Face directory, or one of `orbax.convert`.
        config: Its configuration.
        overrides: As in `load_target`.

    Raises:
        InputError: A scale is out of range, or there are others than one of a layer or one a KV head.
    """
    raw, converted = read_raw(directory, overrides), orbax.is_orbax(directory)
    form = quantization.read(raw, directory)
    if form is not None and not form.has_fp8_scales:
        log.info("scales of keys and values are not the checkpoint's, since it has those of %s", form.caches)
        return {}
    names = quantized.plain_names(orbax.ConvertedTensors(directory) if converted else TensorFiles(directory))
    files = orbax.ExtraTensors(directory) if converted else TensorFiles(directory)
    return parsed(lambda _: quantized.kv_scales(_table(raw, config)(config, names), files), raw, directory)


def open_tower(
    directory: str | Path, overrides: dict | None = None, files: Tensors | None = None
) -> Source[VisionConfig] | None:
    """Opens the vision tower of a target's checkpoint without reading weights; ``files`` as in `open_target`.

    Returns:
        The tower; None for a target without one, or whose tower was left out of the files.

    Raises:
        InputError: The tower's tensors do not fit ``config.json``, some are missing, or the ids that place media in a
            prompt are out of vocabulary.
    """
    directory = Path(directory)
    raw, config = read_raw(directory, overrides), read_target_config(directory, overrides)
    if files is None:
        files = orbax.ExtraTensors(directory) if orbax.is_orbax(directory) else TensorFiles(directory)
    prefix = vision_prefix(files)
    if config.vision is None or prefix is None:
        return None
    parsed(lambda _: config.check_media_tokens(), raw, directory)
    entries = vision_entries(config.vision, prefix)
    return _open(directory, raw, config.vision, entries, files, lambda name: not name.startswith(prefix))


def load_tower(
    directory: str | Path,
    dtype=jnp.float32,
    layout: Layout = ONE_DEVICE,
    backend: Backend | None = None,
    overrides: dict | None = None,
    files: Tensors | None = None,
) -> VisionTower | None:
    """Loads the vision tower of a target, all of it on every device of the mesh of ``layout``.

    Args:
        directory: The target's directory: Hugging Face's, or one of `orbax.convert`.
        dtype: The parameters' dtype.
        layout: The mesh.
        backend: Where it will run; this machine by default.
        overrides: As in `load_target`.
        files: As in `load_target`.

    Returns:
        The tower; None where `open_tower` finds none.

    Raises:
        InputError: The checkpoint is invalid.
    """
    source = open_tower(directory, overrides, files)
    if source is None:
        return None
    return fill(abstract_tower(source.config, dtype, backend or Backend.detect()), source, dtype, layout)


def read_fitting_drafter(
    directory: Path, target: ModelConfig | None, overrides: dict | None = None
) -> DraftConfig | MtpConfig:
    """A drafter's configuration, checked against ``target`` unless that is None."""
    config = read_draft_config(directory, overrides)
    if target is not None:
        config.check_fits(target)
    return config


def open_drafter(
    directory: str | Path,
    target: ModelConfig | None = None,
    overrides: dict | None = None,
    files: Tensors | None = None,
) -> Source[DraftConfig] | Source[MtpConfig]:
    """Opens a drafter's checkpoint, or the MTP head of a target's, without reading weights; ``files`` as above.

    Raises:
        InputError: Names or shapes do not fit, the target has no head, or the drafter does not fit ``target``.
    """
    directory = Path(directory)
    config, raw = read_fitting_drafter(directory, target, overrides), read_raw(directory, overrides)
    if isinstance(config, MtpConfig):
        return _open_head(directory, raw, config, files)
    files = TensorFiles(directory) if files is None else files
    entries = dflash.weight_names(config, quantized.plain_names(files))
    return _open(directory, raw, config, entries, files, lambda name: dflash.is_skipped(config, name, files.read))


def _open_head(directory: Path, raw: dict, config: MtpConfig, files: Tensors | None) -> Source[MtpConfig]:
    """Opens an MTP head: all of its tensors, and the target's final norm where the files have it.

    A head alone may have copies of the target's tables beside it, which `check_copies` compares.
    """
    norms = dict.fromkeys(mtp.FINAL_NORMS, "norm.weight")
    if files is None:
        files = orbax.ExtraTensors(directory, norms) if orbax.is_orbax(directory) else TensorFiles(directory)
    prefix = mtp.head_prefix(files)
    if prefix is None:
        what = "is not a DFlash drafter, and has no MTP head"
        raise InputError(f"{directory} {what}: none of its tensors begins with {mtp.PREFIXES[0]}")
    # A conversion is of a whole target, whose other tensors are not among these.
    is_whole = not isinstance(files, orbax.ExtraTensors)
    entries, is_alone = mtp.weight_names(config, files), is_whole and mtp.is_alone(files)
    if is_alone:
        entries = [e for e in entries if e.path != "final_norm.weight" or e.tensors[0].name in files]
    return _open(
        directory, raw, config, entries, files, lambda n: n in mtp.TABLES if is_alone else not n.startswith(prefix)
    )


def check_copies(directory: Path, target: Path) -> None:
    """Checks that the tables beside an MTP head alone are copies of the target's, with which the head drafts.

    Args:
        directory: The drafter's.
        target: The target's.

    Raises:
        InputError: A table differs.
    """
    if orbax.is_orbax(directory) or not mtp.is_alone(files := TensorFiles(directory)):
        return
    targets = orbax.ExtraTensors(target, mtp.TABLES) if orbax.is_orbax(target) else TensorFiles(target)
    for name in [name for name in mtp.TABLES if name in files]:
        # A target without a head of its own has its embedding for one.
        kinds = (mtp.TABLES[name], "embed")
        found = next(n for kind in kinds for n, other in mtp.TABLES.items() if other == kind and n in targets)
        if not _are_equal(files.read(name), targets.read(found)):
            raise InputError(f"{directory} has {name!r}, which is not the target's: MTP heads draft with the target's")


def _are_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two tables have the same numbers; compared in pieces, which need little memory."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype:
        a, b = a.view(np.uint8), b.view(np.uint8)
    pieces = [slice(i, i + 4096) for i in range(0, len(a), 4096)]
    return all(np.array_equal(a[piece], b[piece]) for piece in pieces)


def read_entries(directory: Path, names) -> list[Entry]:
    """The table of parameters for the checkpoint in ``directory``, which has the tensors ``names``."""
    raw, names = read_raw(directory), quantized.plain_names(names)
    if parsed(dflash.is_drafter, raw, directory):
        config = read_draft_config(directory)
        assert isinstance(config, DraftConfig)
        return dflash.weight_names(config, names)
    return families.target_family(raw).weight_names(read_target_config(directory), names)


def open_any(directory: Path, layout: Layout = ONE_DEVICE) -> tuple[Source, Decoder | Drafter]:
    """Opens a target's or a drafter's checkpoint, and makes its abstract module."""
    if parsed(dflash.is_drafter, read_raw(directory), directory):
        source = open_drafter(directory)
        assert isinstance(source.config, DraftConfig)
        return source, abstract_drafter(source.config, layout=layout)
    source = open_target(directory)
    return source, abstract_decoder(source.config, layout=layout)


def read_forms(
    directory: Path, raw: dict, config: ModelConfig | DraftConfig | MtpConfig, overrides: dict | None = None
) -> Forms:
    """What parameters in few bits take: by a checkpoint's tensors, or, where it has no files, by its config.

    Args:
        directory: The checkpoint's directory, or a ``config.json``.
        raw: Its ``config.json``.
        config: What it says.
        overrides: As in `load_target`.

    Raises:
        InputError: A loader would refuse it.
    """
    form = quantization.read(raw, directory)
    table = _table(raw, config)

    def by_tensors(stored: Mapping[str, tuple[quantized.Stored, ...]], files: Tensors) -> dict[str, quantized.Form]:
        packed = {path: parts for path, parts in stored.items() if quantized.are_packed(parts, files)}
        return {path: quantized.form(parts, files) for path, parts in packed.items()}

    if directory.is_dir() and orbax.is_orbax(directory):
        files = orbax.ConvertedTensors(directory)
        entries = table(config, quantized.plain_names(files))
        # A head's tensors are there as they were.
        stored = parsed(lambda _: quantized.all_stored(entries, files, form), raw, directory)
        is_head = isinstance(config, MtpConfig)
        found = by_tensors(stored, orbax.ExtraTensors(directory)) if is_head else orbax.forms(directory)
        weights = {t.name for e in entries for t in e.tensors}
        unused = tuple(name for name in files if form is not None and quantized.is_unused(name, weights))
    elif form is None:
        return Forms()
    elif directory.is_dir() and any(directory.glob("*.safetensors")):
        source = (open_target if isinstance(config, ModelConfig) else open_drafter)(directory, overrides=overrides)
        found, unused = by_tensors(source.stored, source.files), source.unused
    else:
        claims = ((e.path, quantized.claimed_form(e, form)) for e in table(config))
        found, unused = {path: claim for path, claim in claims if claim}, ()
    return Forms(tuple(found.items()), unused, form and form.caches, form is None or form.has_fp8_scales)


def _table(raw: dict, config: ModelConfig | DraftConfig | MtpConfig) -> Callable[..., list[Entry]]:
    """The function for the table of weight names."""
    if isinstance(config, MtpConfig):
        return mtp.weight_names
    return dflash.weight_names if isinstance(config, DraftConfig) else families.target_family(raw).weight_names


def read_draft_tokens(path: Path, vocab: int) -> np.ndarray:
    """Reads a JSON list of token ids.

    Returns:
        Distinct ids, int32 [N], ascending.

    Raises:
        InputError: The file is unreadable, no list of ids, or has an id of ``vocab`` or above.
    """
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"draft tokens {path} cannot be read: {e.strerror}") from None
    except ValueError:
        ids = None
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise InputError(f"draft tokens {path} is not a JSON list of token ids")
    outside = [i for i in ids if not 0 <= i < vocab]
    if outside:
        raise InputError(f"draft tokens {path}: id {outside[0]} is out of vocabulary: ids are 0 to {vocab - 1}")
    return np.unique(np.asarray(ids, np.int32))


def load_drafter(
    directory: str | Path,
    dtype=jnp.float32,
    target: ModelConfig | None = None,
    layout: Layout = ONE_DEVICE,
    backend: Backend | None = None,
    quantize: str | None = None,
    overrides: dict | None = None,
    final_norm: jax.Array | None = None,
    files: Tensors | None = None,
) -> Drafter | Mtp:
    """Loads a drafter.

    Args:
        directory: A Hugging Face directory, or one of `orbax.convert`: a DFlash drafter's, that of a target with an
            MTP head, or of such a head alone.
        dtype: The parameters' dtype.
        target: Configuration that the drafter must fit; None: unchecked.
        layout: The mesh.
        backend: Where it will run; this machine by default.
        quantize: Of an MTP head, as in `load_target`. DFlash drafters are never quantized; "none" makes them ``dtype``.
        overrides: As in `load_target`.
        final_norm: The target's, for an MTP head alone, whose files need not have it.
        files: Its tensors, in place of the directory's.

    Raises:
        InputError: The checkpoint is invalid or does not fit ``target``.
    """
    backend = backend or Backend.detect()
    directory = Path(directory)
    config = read_fitting_drafter(directory, target, overrides)
    module = abstract_drafter(config, dtype, layout, backend)
    quantize = of_drafter(config, quantize)
    if files is None and isinstance(config, DraftConfig) and orbax.is_orbax(directory):
        return orbax.load(module, directory, dtype, layout, quantize)
    source = open_drafter(directory, target, overrides, files)
    given = {} if final_norm is None else {"final_norm.weight": final_norm}
    if isinstance(config, MtpConfig) and not given and all(e.path != "final_norm.weight" for e in source.entries):
        raise InputError(f"{directory} is an MTP head alone: give its target's final_norm, too")
    return fill(module, source, dtype, layout, quantize, given)


def save_module(
    module, entries: list[Entry], raw: dict, directory: str | Path, dtype=jnp.bfloat16, tower: VisionTower | None = None
) -> None:
    """Writes a module as a Hugging Face directory.

    Args:
        module: A target, a drafter or an MTP head.
        entries: Its parameters' tensors on disk.
        raw: The ``config.json``.
        directory: Where to write.
        dtype: Dtype on disk.
        tower: The vision tower of a target, written beside it; None writes none.
    """
    directory = Path(directory)
    tensors = _disk_tensors(module, entries, dtype)
    if tower is not None:
        tensors |= _disk_tensors(tower, vision_entries(tower.config), dtype)
    write_tensors(directory, tensors)
    write_json(directory / "config.json", raw)


def _disk_tensors(module, entries: list[Entry], dtype) -> dict[str, np.ndarray]:
    """Name → array of each tensor on disk."""
    # Those of the vocabulary are copies of rows of the target's head: the file of draft tokens describes them.
    paths = [path for path in parameter_paths(module, is_weight) if not path.startswith("vocabulary.")]
    by_path = {e.path: e for e in entries}
    return tensors_of(module, [by_path[path] for path in paths], dtype)


def tensors_of(module, entries: Iterable[Entry], dtype=None) -> dict[str, np.ndarray]:
    """Name → array of the tensors of some parameters of a module, as a checkpoint has them.

    Args:
        module: The module. Weights in few bits are multiplied out, to float32.
        entries: The parameters; tensors that others share are left out.
        dtype: Dtype of the tensors; None keeps that of the parameters.
    """
    leaves = dict(zip(parameter_paths(module, is_weight), jax.tree.leaves(module, is_leaf=is_weight), strict=True))
    parts: list[tuple[Tensor, np.ndarray]] = []
    for entry in entries:
        array = np.asarray(dense_array(plain_weight(leaves[entry.path])))
        parts += zip(entry.tensors, entry.write(cast(array, dtype)), strict=True)
    return dict(whole_tensors(parts))
