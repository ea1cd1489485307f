"""New weights for the models of a running `LLM`: checked as a whole, and placed as the old ones are."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from dflash_jax.argument_checks import shown, wrong
from dflash_jax.checkpoint.given import GivenTensors, Pairs
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import load_tower, read_entries, read_target_config, tensors_of
from dflash_jax.checkpoint.parameters import cast, finished, spread
from dflash_jax.checkpoint.quantized import plain_names
from dflash_jax.errors import InputError
from dflash_jax.frontend.llm_config import DTYPES
from dflash_jax.frontend.loading import Loader, draft_vocabulary, packed
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import vocabulary_of
from dflash_jax.models.drafting import Drafting
from dflash_jax.models.families.mtp import head_prefix
from dflash_jax.models.families.vision import vision_prefix
from dflash_jax.models.kv_scales import is_scale
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.packing import unpack_weights
from dflash_jax.models.vision import VisionTower
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, is_weight
from dflash_jax.parallel.sharding import parameter_paths, parameter_specs, place

# A module of ours, tensors by name, or a directory.
Weights = Decoder | Pairs | str | Path
DraftWeights = Drafting | Pairs | str | Path


@dataclass(frozen=True)
class NewWeights:
    """The models of an LLM, or those that take their place. A pytree.

    Attributes:
        target: The target.
        drafters: The drafters.
        tower: The vision tower; None for a model of text.
        base: The number of the change of the models that they follow.
    """

    target: Decoder
    drafters: tuple[Drafting, ...]
    tower: VisionTower | None = None
    base: int = 0


jax.tree_util.register_dataclass(NewWeights, ["target", "drafters", "tower"], ["base"])


@dataclass(frozen=True)
class Renewal:
    """What makes `NewWeights` for the models of an LLM.

    Attributes:
        loader: Loads the LLM's checkpoint.
        old: The models, which may have shapes in place of arrays unless ``is_partial``.
        is_partial: Whether tensors of the target that are not given stay as they are.
        is_dropped: Whether the models have no arrays. What is not given is read from the checkpoint then.
    """

    loader: Loader
    old: NewWeights
    is_partial: bool = False
    is_dropped: bool = False

    def of(self, weights: Weights | None, drafter: DraftWeights | Mapping[str, DraftWeights] | None) -> NewWeights:
        """Reads, checks and places new weights, and waits until they are on the devices.

        Args:
            weights: The target's; None: they stay.
            drafter: The drafter's, or by the name of each drafter; None: they stay.

        Raises:
            InputError: A name, a shape or a form is wrong; the message names it.
        """
        files = None
        if isinstance(weights, str | Path):
            files = resolve(weights, download_dir=self.loader.given.download_dir)
            self._check_config(read_target_config(files, self.loader.given.hf_overrides), str(files))
            target = self.loader.target(files, self.old.target)
        elif isinstance(weights, Decoder):
            self._check_config(weights.config, "the module")
            target = self._target_of(dict(_dense(weights)))
        elif weights is not None:
            files = GivenTensors(_pairs("weights", weights))
            target, files = self._target_of_tensors(files)
        elif self.is_dropped:
            raise InputError("weights is None: those of the target were dropped, so they must be given")
        else:
            target = self.old.target
        if weights is not None:
            _check_forms("the target", self.old.target, target)
        tower = self._tower(files)
        new = replace(self.old, target=target, drafters=self._drafters(target, drafter, files), tower=tower)
        jax.block_until_ready(jax.tree.leaves((new.target, new.drafters, new.tower)))
        return new

    @property
    def _directory(self) -> Path:
        return self.loader.checkpoint.directory

    def _check_config(self, config: Any, what: str) -> None:
        """Raises InputError where a target has another configuration."""
        own = self.loader.checkpoint.config
        if config == own:
            return
        names = [each.name for each in fields(own) if getattr(own, each.name) != getattr(config, each.name, None)]
        raise InputError(f"{what} is of another model: {', '.join(names) or 'its kind'} differs from the target's")

    # The target.

    def _target_of_tensors(self, files: GivenTensors) -> tuple[Decoder, GivenTensors | None]:
        """The target of named arrays, and these where they have the names of a checkpoint."""
        paths = dict(_leaves(self.old.target))
        if sum(name in paths for name in files) * 2 > len(files):
            return self._target_of({name: files.array(name) for name in files}), None
        kept = {}
        if self.is_partial:
            entries = read_entries(self._directory, files)
            names = plain_names(files)
            touched = [e for e in entries if any(t.name in names for t in e.tensors)]
            lacking = {t.name for e in touched for t in e.tensors if t.name not in names}
            sharing = [e for e in entries if any(t.name in lacking for t in e.tensors)]
            for name, array in tensors_of(self.old.target, sharing).items():
                if name in lacking:
                    files.add(name, array)
            read = {e.path for e in touched}
            kept = {path: leaf for path, leaf in _leaves(self.old.target) if path not in read and not is_scale(path)}
        return self.loader.target(self._directory, self.old.target, files=files, kept=kept), files

    def _target_of(self, given: dict[str, Any]) -> Decoder:
        """The target of arrays by our names."""
        loader = self.loader
        dtype, layout, quantize = DTYPES[loader.given.dtype_name], loader.given.layout, loader.quantize
        module = abstract_decoder(loader.checkpoint.config, dtype, layout, loader.backend)
        shapes = dict(zip(parameter_paths(module), (x.shape for x in jax.tree.leaves(module)), strict=True))
        old = dict(_leaves(self.old.target))
        problems = [f"unexpected {shown(name)}" for name in given if name not in shapes]
        problems += [f"missing {name!r}" for name in shapes if name not in given and not self.is_partial]
        problems += [
            f"{name!r} has shape {list(given[name].shape)}, it must be {list(shape)}"
            for name, shape in shapes.items()
            if name in given and given[name].shape != shape
        ]
        if problems:
            raise _wrong("the weights do not fit the model", problems)
        mesh, leaves = layout.mesh(), []
        for path, spec in zip(parameter_paths(module), parameter_specs(module), strict=True):
            if path not in given:
                leaves.append(old[path])
                continue
            sharding = NamedSharding(mesh, spec)
            array = place(cast(given[path], dtype), sharding)
            leaves.append(spread(finished({"array": array}, dtype, path, quantize, sharding), sharding))
        target = jax.tree.unflatten(jax.tree.structure(module), leaves)
        return loader.finished(target, self._directory, self.old.target)

    def _tower(self, files: GivenTensors | Path | None) -> VisionTower | None:
        """The vision tower, which stays. Raises InputError where another one is given."""
        tower = self.old.tower
        if tower is None:
            return None
        if self.is_dropped:
            tower = self._read_tower(self._directory, None)
        if isinstance(files, Path):
            given = self._read_tower(files, None)
        else:
            has_tower = files is not None and vision_prefix(files) is not None
            given = self._read_tower(self._directory, files) if has_tower else None
        pairs = () if given is None else zip(jax.tree.leaves(tower), jax.tree.leaves(given), strict=True)
        if not all(jnp.array_equal(one, other) for one, other in pairs):
            raise InputError("the weights of the vision tower are others: they cannot be replaced, so leave them out")
        return tower

    def _read_tower(self, directory: Path, files: GivenTensors | None) -> VisionTower | None:
        given = self.loader.given
        options = DTYPES[given.dtype_name], given.layout, self.loader.backend, given.hf_overrides
        tower = load_tower(directory, *options, files)
        return None if tower is None else packed(tower, given.dtype_name, self.old.tower)

    # The drafters.

    def _drafters(self, target: Decoder, given: Any, files: GivenTensors | Path | None) -> tuple[Drafting, ...]:
        checkpoint, drafters = self.loader.checkpoint, list[Drafting]()
        names = checkpoint.draft_names
        if given is not None and not names:
            raise InputError("drafter is given: there is no drafter")
        if not (isinstance(given, Mapping) and given and set(given) <= set(names)):
            if given is not None and len(names) > 1:
                raise InputError(
                    f"drafter must be a dict by the drafters' names, {', '.join(names)}: there are several"
                )
            given = {} if given is None else dict.fromkeys(names, given)
        for i, name in enumerate(names):
            old, source, ids = self.old.drafters[i], checkpoint.drafts[i], checkpoint.draft_vocabularies[i]
            drafter = self._drafter(name, old, source, target, given.get(name), files)
            if isinstance(drafter, Drafter | Mtp):
                # A copy, over the same arrays: what it has of the target's is new.
                drafter = jax.tree.map(lambda x: x, drafter) if drafter is old else drafter
                if isinstance(drafter, Mtp):
                    drafter.final_norm.weight = nnx.Param(target.norm.weight[...])
                options = ids, target, self.loader.given.dtype_name
                drafter.vocabulary = draft_vocabulary(drafter, *options, like=vocabulary_of(old))
            _check_forms(f"drafter {name}", old, drafter)
            drafters.append(drafter)
        return tuple(drafters)

    def _drafter(
        self,
        name: str,
        old: Drafting,
        source: Path | Drafting,
        target: Decoder,
        given: DraftWeights | None,
        files: GivenTensors | Path | None,
    ) -> Drafting:
        if given is None:
            # The head of a target comes with it.
            is_of_target = isinstance(old, Mtp) and source == self._directory and files is not None
            if is_of_target and not (isinstance(files, GivenTensors) and head_prefix(files) is None):
                return self._loaded(files, source, target, old)
            if self.is_dropped and jax.tree.leaves(old):
                if not isinstance(source, Path):
                    raise InputError(f"drafter {name} was dropped and is no directory's: give it, too")
                return self.loader.drafter(source, target, old)
            return old
        if isinstance(given, Drafting) and not isinstance(given, type):
            return self.loader.drafter(given, target, old)
        if isinstance(given, str | Path):
            directory = resolve(given, download_dir=self.loader.given.download_dir)
            return self.loader.drafter(directory, target, old)
        if not isinstance(source, Path):
            raise InputError(f"drafter {name} is an object: give another object of its type")
        return self._loaded(GivenTensors(_pairs("drafter", given)), source, target, old)

    def _loaded(self, files: Any, source: Any, target: Decoder, old: Drafting) -> Drafting:
        if isinstance(files, GivenTensors):
            return self.loader.drafter(source, target, old, files)
        return self.loader.drafter(files, target, old)


def _pairs(name: str, given: Any) -> Pairs:
    if isinstance(given, bytes | bytearray) or not hasattr(given, "__iter__"):
        raise wrong(name, given, "a module, arrays by name, or a directory")
    return given


def _leaves(module: Any) -> list[tuple[str, Any]]:
    """Path and weight of each parameter."""
    return list(zip(parameter_paths(module, is_weight), jax.tree.leaves(module, is_leaf=is_weight), strict=True))


def _dense(module: Any) -> list[tuple[str, jax.Array]]:
    """Path and array of each parameter, without those of `kv_scales`."""
    return [
        (path, weight.dense(np.float32) if isinstance(weight, QuantizedWeight) else weight)
        for path, weight in _leaves(unpack_weights(module))
        if not is_scale(path)
    ]


def _wrong(what: str, problems: list[str]) -> InputError:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return InputError(f"{what}: {'; '.join(problems[:5])}{more}", problems)


def _form(weight: Any) -> tuple:
    """What a program depends on. Panels of float32 numbers may be in 16 bits: they take programs of their own."""
    if isinstance(weight, PackedWeight) and weight.form is None:
        return "float32", weight.shape
    return jax.tree.structure(weight), [(x.shape, x.dtype.name) for x in jax.tree.leaves(weight)]


def _words(weight: Any) -> str:
    leaf = jax.tree.leaves(weight)[0]
    kind = f"in few bits ({leaf.dtype.name})" if isinstance(weight, QuantizedWeight) else leaf.dtype.name
    return f"{kind} {list(weight.shape)}"


def _check_forms(what: str, old: Any, new: Any) -> None:
    """Raises InputError where a weight has another form than the one that programs are compiled for."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    problems = [f"{path!r} is new" for path in after if path not in before]
    problems += [f"{path!r} is missing" for path in before if path not in after]
    problems += [
        f"{path!r} is {_words(after[path])}, it must be {_words(weight)}"
        for path, weight in before.items()
        if path in after and _form(after[path]) != _form(weight)
    ]
    if problems:
        raise _wrong(f"{what} has another form", problems)
