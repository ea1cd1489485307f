"""What an `LLM` does between generations: it takes new weights, pauses, and gives its memory back for a while."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from dflash_jax.argument_checks import shown, wrong
from dflash_jax.checkpoint.files import tensor_names
from dflash_jax.checkpoint.load import read_entries, tensors_of
from dflash_jax.checkpoint.orbax import is_orbax
from dflash_jax.checkpoint.orbax import tensor_names as converted_names
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.vision_encoder import VisionEncoder
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.loading import Loader
from dflash_jax.frontend.new_weights import DraftWeights, NewWeights, Renewal, Weights
from dflash_jax.frontend.sync_engine import PAUSED, SyncEngine
from dflash_jax.models.drafting import together
from dflash_jax.ops.weights import is_weight
from dflash_jax.parallel.group import Group
from dflash_jax.parallel.sharding import parameter_paths, place

IN_FLIGHT = ("recompute", "wait", "abort")
PAUSES = ("keep", "wait", "abort")
# What takes memory on the devices, by the names of vLLM and SGLang.
TAGS = ("weights", "kv_cache")
ON_HOST = "the weights sleep on the host: wake(['weights']) brings them back; before new ones, sleep(2) drops them"
DROPPED = "the weights were dropped by sleep(2): update_weights() gives new ones"
READ_ONLY = "the models of an LLM cannot be set: update_weights() gives them new weights"


class Lifecycle:
    """The weights of an LLM and its engines. The attributes are documented with `LLM`."""

    weight_version: str
    is_paused: bool
    draft_names: Any
    programs: Executables
    plain_programs: Executables
    encoder: VisionEncoder | None
    loader: Loader
    _models: NewWeights
    _sync_engine: SyncEngine
    _group: Group | None
    # All that were made of this LLM and of those with other drafters, while they are in use.
    _engines: WeakSet[Engine]
    # The arrays that `sleep` has copied to the host; None: nothing, or they are dropped.
    _on_host: list[np.ndarray] | None
    _updates: int

    def update_weights(
        self,
        weights: Weights | None = None,
        *,
        drafter: DraftWeights | Mapping[str, DraftWeights] | None = None,
        version: str | None = None,
        in_flight: str = "recompute",
        partial: bool = False,
    ) -> str:
        """Replaces the weights of the target, of drafters, or of both, of all engines of this LLM.

        All prefixes are forgotten. Tokens that are drawn stay; what they have in caches is computed again by the new
        weights. Nothing is compiled again, but for a CPU's float32 weights, once, when they are no longer exact in
        bfloat16.

        Args:
            weights: A `Decoder`; arrays by name, of a checkpoint or of `parameter_paths`, as a mapping or as pairs; or
                a directory. Arrays of JAX go from device to device. None: the target stays.
            drafter: The same of the drafter, or a dict of them by the names of several. An MTP head that the target's
                checkpoint has comes with ``weights``.
            version: The name of these weights; None: the number of the update.
            in_flight: What becomes of requests that have not ended: "recompute" lets them go on under the new weights,
                "wait" finishes them before, and "abort" ends them.
            partial: Whether tensors of the target that are not given stay as they are; otherwise they are missing.

        Returns:
            The version.

        Raises:
            InputError: A name, a shape or an argument is wrong. Then nothing is changed.
            EngineError: The model runs on several processes, its weights sleep on the host, or requests are to be
                finished in a pause. Then nothing is changed either.
        """
        _check_choice("in_flight", in_flight, IN_FLIGHT)
        _check_version(version)
        new = self.new_weights(weights, drafter=drafter, partial=partial)
        if in_flight == "wait":
            self._sync_engine.finish()
        return self.take_weights(new, version=version, in_flight=in_flight)

    def new_weights(
        self,
        weights: Weights | None = None,
        *,
        drafter: DraftWeights | Mapping[str, DraftWeights] | None = None,
        partial: bool = False,
    ) -> NewWeights:
        """The first half of `update_weights`, which any thread may do: reads, checks and places; changes nothing."""
        self.check_alone()
        if weights is None and drafter is None:
            raise InputError("weights and drafter are None: give one of them")
        if self._on_host is not None:
            raise EngineError(ON_HOST)
        if partial and self.lacks_weights:
            raise InputError(f"partial is True: {DROPPED}")
        return Renewal(self.loader, self._models, partial, self.lacks_weights).of(weights, drafter)

    def take_weights(self, new: NewWeights, *, version: str | None = None, in_flight: str = "recompute") -> str:
        """The second half of `update_weights`, on the thread of the engines: the models of ``new`` take their place.

        Raises:
            EngineError: The models have changed since ``new`` was made, or sleep since.
        """
        _check_choice("in_flight", in_flight, IN_FLIGHT)
        _check_version(version)
        if new.base != self._models.base:
            raise EngineError("the weights have changed since new_weights(): make the new ones again")
        self._updates += 1
        self.weight_version = str(self._updates) if version is None else version
        for engine in self.engines:
            if in_flight == "abort":
                engine.abort_all()
            engine.forget()
            engine.version = self.weight_version
        self._install(new)
        return self.weight_version

    def _install(self, new: NewWeights) -> None:
        self._models = replace(new, base=self._models.base + 1)
        self.programs.replace(new.target, together(new.drafters))
        if self.plain_programs is not self.programs:
            self.plain_programs.replace(new.target, None)
        if self.encoder is not None and new.tower is not None:
            self.encoder.tower = new.tower

    def check_alone(self) -> None:
        """Raises EngineError where the model runs on several processes."""
        if self._group is not None:
            raise EngineError("the model runs on several processes, whose weights cannot be replaced: start them anew")

    @property
    def engines(self) -> list[Engine]:
        """The engines that run the models, in use now."""
        own = (self.programs, self.plain_programs)
        live = [engine for engine in self._engines if not engine.is_closed]
        return [engine for engine in live if any(engine.runner.programs is each for each in own)]

    def read_weights(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Tensors of the target by the names of its checkpoint, weights in few bits as float32.

        Raises:
            InputError: A name is of no tensor of the target.
            EngineError: The LLM sleeps.
        """
        self._check_awake()
        directory = self.loader.checkpoint.directory
        entries = read_entries(directory, (converted_names if is_orbax(directory) else tensor_names)(directory))
        known = {tensor.name for entry in entries for tensor in entry.tensors}
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"{shown(unknown[0])} is no tensor of the target")
        wanted = [entry for entry in entries if any(tensor.name in names for tensor in entry.tensors)]
        found = tensors_of(self._models.target, wanted)
        return {name: found[name] for name in names}

    def name_weights(self, version: str) -> None:
        """Gives the weights another version, on the thread of the engines: of the tokens from now on."""
        _check_version(version)
        self.weight_version = version
        for engine in self.engines:
            engine.version = version

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter as it is computed with, by our name; a drafter's begins with its own name.

        Raises:
            EngineError: The LLM sleeps.
        """
        self._check_awake()
        sums = {}
        for name, model in (("", self._models.target), *zip(self.draft_names, self._models.drafters, strict=True)):
            weights = jax.tree.leaves(model, is_leaf=is_weight)
            for path, weight in zip(parameter_paths(model, is_weight), weights, strict=True):
                digest = sha256()
                for array in jax.tree.leaves(weight):
                    digest.update(np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data)
                sums[f"{name}/{path}" if name else path] = digest.hexdigest()
        return sums

    def _check_awake(self) -> None:
        if self.lacks_weights:
            raise EngineError(DROPPED if self._on_host is None else ON_HOST)

    # Pauses.

    def pause(self, mode: str = "keep") -> None:
        """Lets nothing be generated until `resume`.

        Args:
            mode: What becomes of requests that have not ended: "keep" leaves them as they are, to go on then, "wait"
                finishes them before, and "abort" ends them.
        """
        _check_choice("mode", mode, PAUSES)
        if mode == "wait":
            self._sync_engine.finish()
        for engine in self.engines:
            if mode == "abort":
                engine.abort_all()
            engine.is_paused = True
        self.is_paused = True

    def resume(self) -> None:
        """Ends a pause.

        Raises:
            EngineError: The LLM sleeps.
        """
        if self.is_sleeping:
            raise EngineError(DROPPED if self.lacks_weights and self._on_host is None else PAUSED)
        for engine in self.engines:
            engine.is_paused = False
        self.is_paused = False

    # Sleep.

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or caches are not on the devices."""
        return self.lacks_weights or not all(engine.has_caches for engine in self.engines)

    @property
    def lacks_weights(self) -> bool:
        """Whether the weights are not on the devices."""
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in self.programs.weights)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pauses, and gives the devices' memory back to JAX for others, until `wake`.

        Args:
            level: 1 copies the weights to the host, 2 drops them; 0 is `pause` alone.
            mode: As of `pause`. Requests that are kept compute their tokens again.
        """
        if level not in (0, 1, 2) or isinstance(level, bool):
            raise wrong("level", level, "0, 1 or 2")
        if level:
            self.check_alone()
        self.pause(mode)
        if level:
            self.release(keep_weights=level == 1)

    def release(self, tags: Collection[str] = TAGS, keep_weights: bool = True) -> None:
        """The part of `sleep` that frees memory. The LLM must be paused.

        Args:
            tags: Of "weights" and "kv_cache", what is freed.
            keep_weights: Whether weights are copied to the host.
        """
        _check_tags(tags)
        self.check_alone()
        if not self.is_paused:
            raise EngineError("the LLM is not paused: pause() before release()")
        if "kv_cache" in tags:
            for engine in self.engines:
                engine.release_caches()
        if "weights" in tags and not self.lacks_weights:
            self._on_host = list(map(_copied, jax.tree.leaves(self._models))) if keep_weights else None
            self._install(jax.tree.map(_shape, self._models))
        elif "weights" in tags and not keep_weights:
            self._on_host = None

    def wake(self, tags: Collection[str] | None = None) -> None:
        """Ends a sleep, and the pause when all is there again.

        Args:
            tags: Of "weights" and "kv_cache", what is brought back; None: both. Weights that were dropped come by
                `update_weights`.

        Raises:
            EngineError: All is asked for, and the weights were dropped.
        """
        _check_tags(TAGS if tags is None else tags)
        if tags is None and self.lacks_weights and self._on_host is None:
            raise EngineError(DROPPED)
        tags = TAGS if tags is None else tags
        if "weights" in tags and self._on_host is not None:
            shapes, structure = jax.tree.flatten(self._models)
            pairs = zip(self._on_host, shapes, strict=True)
            self._install(jax.tree.unflatten(structure, [place(array, shape.sharding) for array, shape in pairs]))
            self._on_host = None
        if "kv_cache" in tags:
            for engine in self.engines:
                engine.restore_caches()
        if not self.is_sleeping:
            self.resume()


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise wrong(name, value, f"one of {', '.join(choices)}")


def _check_version(version: Any) -> None:
    if version is not None and not (isinstance(version, str) and 0 < len(version) <= 256):
        raise wrong("version", version, "text of 1 to 256 characters")


def _check_tags(tags: Any) -> None:
    if not isinstance(tags, list | tuple | set | frozenset) or not all(tag in TAGS for tag in tags):
        raise wrong("tags", tags, f"a list of {' and '.join(TAGS)}")


def _copied(array: jax.Array) -> np.ndarray:
    # A view of a CPU's array would keep it.
    is_view = any(device.platform == "cpu" for device in array.sharding.device_set)
    return np.array(array) if is_view else np.asarray(array)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
