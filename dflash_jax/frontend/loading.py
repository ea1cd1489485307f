"""What an `LLM` reads from disk: first everything that can be wrong without the weights, then the weights."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflash_jax import progress
from dflash_jax.argument_checks import wrong
from dflash_jax.checkpoint import quantization, smollm2
from dflash_jax.checkpoint.config_files import published_drafters, read_raw
from dflash_jax.checkpoint.files import Tensors
from dflash_jax.checkpoint.hub import PATTERNS, resolve
from dflash_jax.checkpoint.load import (
    DRAFT_TOKENS,
    check_copies,
    check_drafter,
    check_target,
    dummy,
    load_drafter,
    load_target,
    load_tower,
    read_draft_tokens,
    read_fitting_drafter,
    read_kv_scales,
    read_target_config,
)
from dflash_jax.checkpoint.parameters import cast
from dflash_jax.checkpoint.quantization import without_format
from dflash_jax.engine.vision_encoder import VisionEncoder
from dflash_jax.errors import InputError
from dflash_jax.frontend.chat_template import read_chat_template
from dflash_jax.frontend.front_model import ModelFiles
from dflash_jax.frontend.llm_config import DTYPES, TINY, Draft, LLMConfig
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models.config import DraftConfig, ModelConfig
from dflash_jax.models.decoder import Decoder, abstract_decoder
from dflash_jax.models.drafter import Drafter, DraftVocabulary
from dflash_jax.models.drafters import OwnConfig, abstract_drafter, config_of, vocabulary_of
from dflash_jax.models.drafting import Drafting
from dflash_jax.models.kv_scales import is_scale, with_fp8_caches
from dflash_jax.models.mtp import Mtp
from dflash_jax.models.mtp_config import MtpConfig
from dflash_jax.models.packing import pack_weights, transpose_experts, unpack_weights
from dflash_jax.models.vision import VisionTower, abstract_tower
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.moe import transposes_experts
from dflash_jax.ops.weights import GROUPS, PackedWeight, QuantizedWeight, Weight, dense, is_nvfp4, is_weight
from dflash_jax.parallel import distributed
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout, parameter_paths, parameter_specs, place

M = TypeVar("M", bound=Decoder | Drafter | Mtp | DraftVocabulary | VisionTower)
D = TypeVar("D", bound=Drafting)
log = logging.getLogger("dflash_jax")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Checkpoint:
    """The files of a target and its drafter, without the weights.

    Attributes:
        directory: Of the target.
        files: What text and media are read from.
        drafts: Directories of the drafters, that of the target for its MTP head; or drafters from memory.
        draft_names: The drafters' names.
        config: The target's configuration.
        draft_block_sizes: The drafters' own block sizes.
        draft_vocabularies: Of each drafter, int32 [N], the only token ids that are drafted; None for all.
        defaults: The target's sampling defaults and stop ids.
        tokenizer: None where there is none.
    """

    directory: Path
    files: ModelFiles
    drafts: tuple[Path | Drafting, ...]
    draft_names: tuple[str, ...]
    config: ModelConfig
    draft_block_sizes: tuple[int, ...]
    draft_vocabularies: tuple[np.ndarray | None, ...]
    defaults: SamplingDefaults
    tokenizer: Tokenizer | None

    @classmethod
    def read(cls, given: LLMConfig) -> "Checkpoint":
        """Reads what a configuration names. Raises InputError for what does not fit together."""
        directory = TINY / "target"
        if given.target is not None:
            patterns = [p for p in PATTERNS if not (given.is_dummy and p.endswith(".safetensors"))]
            directory = resolve(given.target, given.revision, given.download_dir, tuple(patterns))
        if given.is_dummy:
            _check_dummy(directory, given.hf_overrides)
        config = (read_target_config if given.is_dummy else check_target)(directory, given.hf_overrides)
        if given.drafts != ("auto",):
            named = _named(given.drafts)
        elif smollm2.is_smollm2(given.target):
            named = {"smollm2": smollm2.DRAFTER}
        else:
            named = {"bundled": TINY / "draft"} if given.target is None else _published(given, config)

        def found(draft: Draft) -> Path | Drafting:
            if isinstance(draft, Drafting):
                return draft
            if smollm2.is_smollm2(draft):
                return smollm2.DRAFTER
            return directory if draft == "mtp" else resolve(draft, given.draft_revision, given.download_dir)

        drafts = tuple(map(found, named.values()))
        if not drafts and given.draft_tokens not in (None, "none", "auto"):
            raise InputError(f"draft tokens {given.draft_tokens}: there is no drafter")
        block_sizes = tuple(_check(draft, config, given, directory).block_size for draft in drafts)
        vocabularies = tuple(_draft_vocabulary(given, draft, config) for draft in drafts)
        files = _files(given, directory)
        defaults, tokenizer = files.defaults(), files.tokenizer()
        return cls(directory, files, drafts, tuple(named), config, block_sizes, vocabularies, defaults, tokenizer)


def _named(drafts: Sequence[Draft]) -> dict[str, Draft]:
    """Drafters by different names: repo ids, the last parts of paths, types of objects."""
    named: dict[str, Draft] = {}
    for draft in drafts:
        name = str(draft)
        if isinstance(draft, Drafting):
            name = type(draft).__name__
        elif os.path.exists(path := os.path.expanduser(name)):
            # A path of the machine is not for clients.
            name = Path(os.path.abspath(path)).name or name
        # The bytes of a file's name may be no text.
        name = name.encode(errors="replace").decode()
        unlike = next(each for each in (name, *(f"{name}-{i + 2}" for i in range(len(named)))) if each not in named)
        named[unlike] = draft
    return named


def _published(given: LLMConfig, target: ModelConfig) -> dict[str, Draft]:
    """The published drafter of a target by its name; none where it cannot be had or read, which is a warning."""
    assert given.target is not None
    names = [] if Path(given.target).exists() else published_drafters(given.target)
    if not names or names[0] == "mtp":
        return {name: name for name in names[:1]}
    name, *others = names
    try:
        directory = resolve(name, given.draft_revision, given.download_dir)
        check_drafter(directory, target)
    except InputError as e:
        known = f"; published, too: {', '.join(others)}" if others else ""
        log.warning(
            "%s has the drafter %s, which cannot be used, so decoding is plain: %s%s", given.target, name, e, known
        )
        return {}
    return {name: directory}


def _check(
    draft: Path | Drafting, target: ModelConfig, given: LLMConfig, directory: Path
) -> DraftConfig | MtpConfig | OwnConfig:
    """The configuration of a drafter. Raises InputError where it does not fit the target, whose directory is given."""
    if isinstance(draft, Path):
        is_dummy = given.is_dummy and draft.resolve() == directory.resolve()
        return (read_fitting_drafter if is_dummy else check_drafter)(draft, target, _overrides(given, draft, directory))
    config = config_of(draft)
    config.check_fits(target)
    return config


def _check_dummy(directory: Path, overrides: dict | None) -> None:
    """Raises InputError where a checkpoint is in few bits."""
    if quantization.read(read_raw(directory, overrides), directory) is not None:
        raise InputError(f"load_format is 'dummy': {directory} is in few bits, whose form only its tensors tell")


def _overrides(given: LLMConfig, draft: Path | Drafting, target: Path) -> dict | None:
    """What overrides a drafter's config.json: that of an MTP head is the target's."""
    return given.hf_overrides if isinstance(draft, Path) and draft.resolve() == target.resolve() else None


def _draft_vocabulary(given: LLMConfig, draft: Path | Drafting, config: ModelConfig) -> np.ndarray | None:
    name = given.draft_tokens
    if name in (None, "none"):
        return None
    if not isinstance(draft, Path):
        if name == "auto":
            return None
        raise InputError(f"draft tokens {name}: the drafter is an object, which drafts what it likes")
    path = draft / DRAFT_TOKENS if name == "auto" else Path(name).expanduser()
    if name == "auto" and not path.exists():
        return None
    return read_draft_tokens(path, config.vocab_size)


def _files(given: LLMConfig, directory: Path) -> ModelFiles:
    """What text and media are read from. Raises InputError where there is no tokenizer, and an option is for one."""
    where = directory if given.tokenizer is None else resolve(given.tokenizer, download_dir=given.download_dir)
    template = None if given.chat_template is None else read_chat_template(given.chat_template)
    has_tokenizer, local = any((where / name).exists() for name in TOKENIZER_FILES), given.allowed_local_media_path
    if not has_tokenizer and (given.tokenizer is not None or template is not None or given.chat_template_kwargs):
        raise InputError(f"{where} has no tokenizer")
    return ModelFiles(
        directory=str(directory),
        tokenizer_directory=str(where) if has_tokenizer else None,
        chat_template=template,
        chat_template_kwargs=given.chat_template_kwargs,
        hf_overrides=given.hf_overrides,
        generation_config=str(given.generation_config),
        sampling_defaults=given.sampling_defaults,
        logprobs_mode=given.logprobs_mode,
        limit_mm_per_prompt=given.limit_mm_per_prompt,
        allowed_media_domains=tuple(given.allowed_media_domains or ()),
        allowed_local_media_path=None if local is None else str(local),
    )


def prepare_backend(kernels: str, activations: str | None = None, reproducible: bool = False) -> Backend:
    """This machine's backend, a CPU's kernels compiled; warns where a GPU's are missing. Arguments: the options."""
    with progress.step("compiling the kernels for this CPU", in_library=True):
        backend = Backend.detect(kernels)
    if backend.is_gpu and kernels != "xla" and backend.no_triton:
        log.warning("without Triton kernels, which make decoding faster: %s", backend.no_triton)
    return replace(backend, fp4_activations=activations == "fp4", reproducible=reproducible)


@dataclass(frozen=True)
class Loader:
    """Loads the weights of a checkpoint, or others in their place.

    Attributes:
        given: The options.
        checkpoint: The checkpoint.
        backend: Where operations run.
    """

    given: LLMConfig
    checkpoint: Checkpoint
    backend: Backend

    @property
    def _dtype(self):
        return DTYPES[self.given.dtype_name]

    @property
    def quantize(self) -> str | None:
        """What loading does to the checkpoint's weights, as in `load_target`."""
        return self._quantize(self.checkpoint.directory)

    def _quantize(self, directory: Path) -> str | None:
        return without_format(self.given.quantize, read_raw(directory, self.given.hf_overrides), directory)

    def models(self) -> tuple[Decoder, tuple[Drafting, ...]]:
        """The target and its drafters."""
        directory, given, drafters = self.checkpoint.directory, self.given, list[Drafting]()
        if given.is_dummy:
            module = abstract_decoder(self.checkpoint.config, self._dtype, given.layout, self.backend)
            target = self.finished(dummy(module, self._dtype, given.layout, self.quantize), directory)
        else:
            target = self.target(directory)
        for draft, ids in zip(self.checkpoint.drafts, self.checkpoint.draft_vocabularies, strict=True):
            drafter = self.drafter(draft, target)
            if isinstance(drafter, Drafter | Mtp):
                drafter.vocabulary = draft_vocabulary(drafter, ids, target, self.given.dtype_name)
            drafters.append(drafter)
        return target, tuple(drafters)

    def target(self, directory: Path, like: Decoder | None = None, **options) -> Decoder:
        """The target of a directory.

        Args:
            directory: Its directory.
            like: As of `packed`.
            **options: ``files`` and ``kept`` of `load_target`.
        """
        load = self._dtype, self.given.layout, self._quantize(directory), self.backend, self.given.hf_overrides
        return self.finished(load_target(directory, *load, **options), directory, like)

    def finished(self, target: Decoder, directory: Path, like: Decoder | None = None) -> Decoder:
        """A target as it runs, with the scales of keys and values of a directory; ``like`` as of `packed`."""
        if self.backend.fp4_activations:
            _check_fp4(target)
        if self.given.has_fp8_caches:
            scales = self._kv_scales(directory, self.checkpoint.config, self.given.hf_overrides)
            target = with_fp8_caches(target, scales)
        return packed(target, self.given.dtype_name, like)

    def drafter(
        self, draft: Path | Drafting, target: Decoder, like: Drafting | None = None, files: Tensors | None = None
    ) -> Drafting:
        """A drafter, without its draft vocabulary.

        Args:
            draft: Its directory, or a drafter from memory.
            target: Its target.
            like: A drafter whose tables of its own it has, and no others; and as of `packed`.
            files: Its tensors, in place of the directory's.
        """
        given, directory = self.given, self.checkpoint.directory
        if not isinstance(draft, Path):
            mesh = given.layout.mesh()
            return placed_drafter(draft, target, mesh, given.dtype_name, given.has_fp8_caches, like)
        overrides = _overrides(given, draft, directory)
        options = (self.checkpoint.config, given.layout, self.backend, self.quantize, overrides)
        if given.is_dummy and files is None and draft.resolve() == directory.resolve() and like is None:
            module = abstract_drafter(MtpConfig(self.checkpoint.config), self._dtype, given.layout, self.backend)
            drafter = dummy(module, self._dtype, given.layout, self.quantize)
        else:
            drafter = load_drafter(draft, self._dtype, *options, target.norm.weight[...], files)
            if isinstance(drafter, Mtp) and files is None:
                check_copies(draft, directory)
        drafter = without_copies(drafter, target, like)
        if given.has_fp8_caches:
            drafter = with_fp8_caches(drafter, self._kv_scales(draft, drafter.config, overrides))
        return packed(drafter, given.dtype_name, like)

    def _kv_scales(self, directory: Path, *options: Any) -> dict[str, np.ndarray]:
        """`read_kv_scales`; none where a target has no tensors but random weights."""
        is_dummy = self.given.is_dummy and directory.resolve() == self.checkpoint.directory.resolve()
        return {} if is_dummy else read_kv_scales(directory, *options)


def _check_fp4(target: Decoder) -> None:
    """Raises InputError where a target has no weight in NVFP4, or has one whose runs of inputs devices share."""
    leaves = zip(parameter_paths(target, is_weight), jax.tree.leaves(target, is_leaf=is_weight), strict=True)
    weights = {path: w for path, w in leaves if isinstance(w, QuantizedWeight) and path != "head"}
    if not any(map(is_nvfp4, weights.values())):
        raise InputError("activations 'fp4': no weight of the target is in NVFP4; quantize 'nvfp4' rounds them so")
    for path, weight in weights.items():
        # A run that several devices share became several shorter ones; inputs that are no multiple have them anyway.
        is_shared = weight.run < GROUPS["nvfp4"] and weight.shape[-1] % GROUPS["nvfp4"] == 0
        if is_shared and weight.code == "e2m1" and weight.factor is not None:
            fault = f"devices of mesh {target.layout} share runs of inputs of {path}: fewer devices leave each whole"
            raise InputError(f"activations 'fp4': {fault}")


def load_encoder(given: LLMConfig, checkpoint: Checkpoint, backend: Backend) -> VisionEncoder | None:
    """Loads the vision tower; None for a model of text, and in a follower."""
    config = checkpoint.config
    if given.language_model_only or config.vision is None:
        return None
    layout = given.layout
    if jax.process_count() > 1:
        if not distributed.is_first():
            return None
        # The leader computes the rows by itself, and sends them with the prompt's chunks.
        layout = ONE_DEVICE
    dtype = DTYPES[given.dtype_name]
    if given.is_dummy:
        tower = dummy(abstract_tower(config.vision, dtype, backend), dtype, layout)
    else:
        tower = load_tower(checkpoint.directory, dtype, layout, backend, given.hf_overrides)
    return None if tower is None else VisionEncoder(packed(tower, given.dtype_name), layout, given.media_cache_bytes)


def packed(module: M, dtype: str, like: Any = None) -> M:
    """``module`` with its weights in the layout that this platform's kernels read fastest.

    Args:
        module: The module.
        dtype: "float32" or "bfloat16".
        like: As of `pack_weights`.
    """
    if transposes_experts(module.backend):
        return transpose_experts(module)
    devices = set().union(*(x.sharding.device_set for x in jax.tree.leaves(module)))
    is_wanted = [device.platform for device in devices] == ["cpu"] and dtype == "float32" and module.backend.has_cpp
    return pack_weights(module, like) if is_wanted else module


def without_copies(drafter: D, target: Decoder, like: Drafting | None = None) -> D:
    """``drafter`` without the tables of its own that equal the target's, which it then uses.

    With ``like`` it is without those that this drafter lacks, whatever they are.
    """
    if not isinstance(drafter, Drafter):
        return drafter
    config, embed = drafter.config, target.embed[...]
    others = like.config if isinstance(like, Drafter) else None

    def head() -> Weight:
        if config.draft_vocab_size is not None:
            return head_rows(target, drafter.head_ids[...], target.layout)
        return target.head_weight

    def is_own(has_one: bool, others_has: bool, equals: Callable[[], jax.Array]) -> bool:
        return has_one and (not equals() if others is None else others_has)

    of_embedding = others is not None and others.own_embedding
    of_head = others is not None and others.own_head
    config = replace(
        config,
        own_embedding=is_own(config.own_embedding, of_embedding, lambda: _are_equal(drafter.embed[...], embed)),
        own_head=is_own(config.own_head, of_head, lambda: _are_equal(drafter.head[...], head())),
    )
    if config == drafter.config:
        return drafter
    # Weights in few bits are leaves here, in a structure of arrays.
    shape = abstract_drafter(config, embed.dtype, target.layout, target.backend)
    leaves = dict(zip(parameter_paths(drafter, is_weight), jax.tree.leaves(drafter, is_leaf=is_weight), strict=True))
    return jax.tree.unflatten(jax.tree.structure(shape), [leaves[path] for path in parameter_paths(shape)])


@jax.jit
def _are_equal(own: jax.Array | QuantizedWeight, table: Weight) -> jax.Array:
    """Whether a drafter's table has the numbers of the target's, whatever form either has."""
    dtype = jnp.float32 if isinstance(own, QuantizedWeight) else own.dtype
    table = table.unpacked() if isinstance(table, PackedWeight) else table
    return jnp.array_equal(dense(own, dtype), dense(table, dtype))


def head_owner(drafter: Drafting | None, target: Decoder) -> Drafter | Decoder:
    """Whose head ``drafter`` drafts with."""
    return drafter if isinstance(drafter, Drafter) and drafter.config.own_head else target


def head_rows(owner: Drafter | Decoder, ids: jax.Array | np.ndarray, layout: Layout) -> jax.Array | QuantizedWeight:
    """The rows of the tokens ``ids`` int [N] of a head, which may be divided, on every device: [N, H]."""
    specs = jax.tree.unflatten(jax.tree.structure(owner), parameter_specs(owner))
    options = {"mesh": layout.mesh(), "in_specs": (specs, PartitionSpec()), "out_specs": PartitionSpec()}
    rows = jax.shard_map(lambda owner, ids: owner.head_rows(ids), **options, check_vma=False)
    return jax.jit(rows)(owner, ids)


def draft_vocabulary(
    drafter: Drafter | Mtp,
    ids: np.ndarray | jax.Array | None,
    target: Decoder,
    dtype: str,
    other: Drafting | None = None,
    like: DraftVocabulary | None = None,
) -> DraftVocabulary | None:
    """The tokens that a drafter drafts, with their rows of its head.

    Args:
        drafter: The drafter, without copies of the target's tables.
        ids: The only tokens to draft, int [N], ascending; None for all that its head has.
        target: The target.
        dtype: As of `packed`.
        other: A drafter that may have what is asked for already.
        like: As of `packed`.

    Returns:
        None where the head that it drafts with has these tokens and no others.

    Raises:
        InputError: Its head has none of ``ids``.
    """
    owner = head_owner(drafter, target)
    if isinstance(drafter, Drafter) and drafter.config.draft_vocab_size is not None:
        of_head = drafter.head_ids[...]
        if ids is not None:
            ids = np.intersect1d(ids, of_head)
            if not len(ids):
                raise InputError(f"none of the draft tokens is among the {len(of_head)} of the drafter's head")
        elif owner is target:
            ids = of_head
    if ids is None:
        return None
    known = vocabulary_of(other)
    if known is not None and owner is head_owner(other, target) and np.array_equal(known.ids[...], ids):
        return known
    layout = target.layout
    rows = head_rows(owner, ids, layout)
    if isinstance(ids, np.ndarray):
        ids = place(ids.astype(np.int32), NamedSharding(layout.mesh(), PartitionSpec()))
    return packed(DraftVocabulary(ids, rows, owner.backend), dtype, like)


def placed_drafter(
    drafter: D, target: Decoder, mesh: Mesh, dtype: str, has_fp8_caches: bool, like: Drafting | None = None
) -> D:
    """A drafter from memory as `Loader` loads one, without its draft vocabulary; ``like`` as of `Loader.drafter`.

    One that is neither a `Drafter` nor an `Mtp` keeps its arrays as they are. Raises InputError where it is no tree of
    arrays.
    """
    if not isinstance(drafter, Drafter | Mtp):
        try:
            return jax.tree.map(jnp.asarray, drafter)
        except (TypeError, ValueError):
            right = "a pytree of arrays: jax.tree_util.register_dataclass or, without arrays, register_static makes one"
            raise wrong("draft", drafter, right) from None
    shape = abstract_drafter(drafter.config, DTYPES[dtype], target.layout, target.backend)
    shardings = [NamedSharding(mesh, spec) for spec in parameter_specs(shape)]
    dense = jax.tree.map(
        lambda x: x.dense(DTYPES[dtype]) if isinstance(x, QuantizedWeight) else x,
        unpack_weights(drafter),
        is_leaf=is_weight,
    )
    is_kept = [not path.startswith("vocabulary.") and not is_scale(path) for path in parameter_paths(dense)]
    leaves = [cast(x, DTYPES[dtype]) for x in compress(jax.tree.leaves(dense), is_kept)]
    placed = [place(x, sharding) for x, sharding in zip(leaves, shardings, strict=True)]
    module = without_copies(jax.tree.unflatten(jax.tree.structure(shape), placed), target, like)
    return packed(with_fp8_caches(module) if has_fp8_caches else module, dtype, like)
