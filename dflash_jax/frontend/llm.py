"""The library's entry: `LLM`, made of a checkpoint, with the engines that it runs on."""

import copy
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from weakref import WeakSet

import jax

from dflash_jax import __version__
from dflash_jax.argument_checks import caller_names, check_type
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.compile_cache import cache_directory, enable_disk_cache
from dflash_jax.engine.config import (
    BlockSize,
    EngineConfig,
    Speculation,
    has_large_chunks,
    prefill_config,
    speculations_of,
)
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.lead import Follower, Leader
from dflash_jax.engine.memory import allow_pinned_memory, free_memory, plan_memory
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.request import FIRST_VERSION
from dflash_jax.engine.round_costs import NO_RECORD, CostRecord, RoundCosts, platform_named, processors
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.front_model import ModelFacts
from dflash_jax.frontend.generation import Generation
from dflash_jax.frontend.keywords import signature, with_other_names
from dflash_jax.frontend.lifecycle import READ_ONLY, Lifecycle
from dflash_jax.frontend.llm_config import Draft, LLMConfig
from dflash_jax.frontend.loading import (
    Checkpoint,
    Loader,
    draft_vocabulary,
    load_encoder,
    placed_drafter,
    prepare_backend,
)
from dflash_jax.frontend.new_weights import NewWeights
from dflash_jax.frontend.sync_engine import SyncEngine
from dflash_jax.models.config import MoeSpec
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafters import config_of, vocabulary_of
from dflash_jax.models.drafting import Drafting, DraftWindow, check_complete, together
from dflash_jax.models.mtp import Mtp
from dflash_jax.ops.cache import page_size
from dflash_jax.parallel.group import joined
from dflash_jax.sampling_params import MAX_LOGPROBS

log = logging.getLogger("dflash_jax")

# Block sizes that rounds are compiled for, below the drafter's own. On a CPU each further token of a block costs time,
# and so it does where each draft is a step of the drafter.
BLOCK_SIZES, CPU_BLOCK_SIZES, STEPPED_BLOCK_SIZES = (1, 8, 16), (1, 4, 8, 16), (1, 2, 4, 6, 8)


def compiled_block_sizes(largest: int, block_size: BlockSize, is_stepped: bool) -> tuple[int, ...]:
    """Block sizes that are compiled for a drafter, ascending: the usual ones, the ``largest``, and ``block_size``.

    Args:
        largest: The drafter's largest block size.
        block_size: The LLM's own; left out where it is larger.
        is_stepped: Whether each draft is a step of the drafter.
    """
    usual = CPU_BLOCK_SIZES if jax.default_backend() == "cpu" else BLOCK_SIZES
    usual = STEPPED_BLOCK_SIZES if is_stepped else usual
    fixed = () if block_size == "auto" or block_size > largest else (block_size,)
    return tuple(sorted({*(b for b in usual if b < largest), largest, *fixed}))


class LLM(Lifecycle, Generation):
    """A target model and its drafter, ready to generate.

    The arguments are those of `LLMConfig`, the options that the commands have, too: docs/flags.md lists them. The names
    of vLLM and SGLang are accepted, too: ``model``, ``tensor_parallel_size``, ``max_model_len`` and others (see "For
    vLLM and SGLang users").

    Attributes:
        config: The target's `ModelConfig`.
        directory: The target's directory.
        tokenizer: The `Tokenizer`; None where the checkpoint has none.
        defaults: The checkpoint's `SamplingDefaults`.
        target: The target model. `update_weights` replaces it.
        drafters: The drafters. Likewise.
        weight_version: The version of the weights.
        is_paused: Whether nothing is generated until `resume`.
        draft_names: The name of each: a repo id, the last part of a path, "mtp", "bundled", or the type of an object.
        draft_places: The largest draft length of each that drafts by its name.
        dtype: "float32" or "bfloat16".
        block_size: Tokens that a round may yield, or "auto".
        largest_block: The largest block size; 1 without a drafter.
        media: Reads images and videos; None for a model of text.
        encoder: Runs the vision tower on them; likewise.
        max_len: Positions of a request.
        slots: Prompts that are continued at a time.
        programs: `Executables` with the drafter.
        plain_programs: `Executables` without it.
        loaded_bytes: Bytes of all weights.
        load_s: Seconds of loading them.

    Raises:
        InputError: A value is wrong, or files do not fit together.
    """

    __signature__ = signature()

    def __init__(
        self, target: str | Path | None = None, draft: Draft | Sequence[Draft] | None = "auto", **keywords: Any
    ):
        self._open({"target": target, "draft": draft, **keywords})
        self.load()

    @classmethod
    def unloaded(cls, **keywords: Any) -> "LLM":
        """An `LLM` without its weights, until `load`.

        Every keyword is checked, and `check`, `encode` and `encode_chat` work: what is wrong in a command is found
        before anything takes long.
        """
        llm = cls.__new__(cls)
        llm._open(keywords)
        return llm

    def _open(self, keywords: dict[str, Any]) -> None:
        """Checks the keywords, and reads what is not weights."""
        values, names = with_other_names(keywords)
        with caller_names(names):
            given = LLMConfig(**values)
            enable_disk_cache()
            allow_pinned_memory()
            # From here on, a process that ends is noticed.
            self._group, self._leader = joined(free := free_memory(), given.shared()), None
            # Raises where there are too few devices.
            given.layout.mesh()
            checkpoint = Checkpoint.read(given)
            self.has_fp8_caches = given.has_fp8_caches
            self.max_len = given.positions(checkpoint.config.max_positions)
            self.largest_block = given.largest_block(max(checkpoint.draft_block_sizes, default=1))
            lengths = [min(self.largest_block, size) - 1 for size in checkpoint.draft_block_sizes]
            self.draft_names = checkpoint.draft_names
            self.draft_places = {name: n for name, n in zip(self.draft_names, lengths, strict=True) if n}
        self._given, self._checkpoint = given, checkpoint
        self.config, self.directory = checkpoint.config, checkpoint.directory
        self.defaults, self.tokenizer = checkpoint.defaults, checkpoint.tokenizer
        self.dtype, self.reproducible = given.dtype_name, given.reproducible
        self.limits.check_block_size(given.block_size)
        self.block_size, self.slots = given.block_size, given.slots
        free = free if self._group is None else self._group.free_memory
        self.prefix_bytes, self.prefix_host_bytes = given.prefix_budget, given.prefix_host_budget(free)
        self.swap_bytes = given.swap_budget(free)
        self.mem_fraction = given.mem_fraction
        size, limit = given.draft_window_size, self.config.max_positions
        self.draft_window = DraftWindow(None if size is None else min(size, limit), min(given.draft_sink_size, limit))
        self.media, self.encoder, self._is_loaded = None, None, False
        self.weight_version, self.is_paused = FIRST_VERSION, False
        self._updates, self._on_host, self._engines = 0, None, WeakSet()
        self._seeds, self._request_ids = Random(given.seed) if given.seed is not None else None, count()

    def load(self) -> None:
        """Compiles a CPU's kernels and loads the weights of an `LLM` that is `unloaded`; nothing for any other."""
        if self._is_loaded:
            return
        given, checkpoint = self._given, self._checkpoint
        self.backend = prepare_backend(given.kernels, given.activations, given.reproducible)
        began = time.perf_counter()
        self.loader = Loader(given, checkpoint, self.backend)
        target, drafters = self.loader.models()
        self.encoder = load_encoder(given, checkpoint, self.backend)
        self.media = self.encoder and checkpoint.files.media_reader(self.config, self.tokenizer)
        self._models = NewWeights(target, drafters, self.encoder and self.encoder.tower)
        leaves = jax.block_until_ready(jax.tree.leaves(self._models))
        if self._group is not None:
            self._group.loaded()
        self.loaded_bytes, self.load_s = sum(x.nbytes for x in leaves), time.perf_counter() - began
        self.programs = Executables(self.target, together(self.drafters))
        # These neither compute nor store anything of the drafters.
        self.plain_programs = Executables(self.target, None) if self.drafters else self.programs
        self._sync_engine, self._is_loaded = SyncEngine(self), True
        # Compiled programs of drafters from memory, by their structure and shapes.
        self._compiled: dict = {}

    @property
    def target(self) -> Decoder:
        """The target model."""
        return self._models.target

    @target.setter
    def target(self, _: Any) -> None:
        raise AttributeError(READ_ONLY)

    @property
    def drafters(self) -> tuple[Drafting, ...]:
        """The drafters."""
        return self._models.drafters

    @drafters.setter
    def drafters(self, _: Any) -> None:
        raise AttributeError(READ_ONLY)

    @property
    def engine(self) -> Engine | None:
        """The engine in use; None before the first request. Calls with other prompts may replace it."""
        return self._sync_engine.engine

    @property
    def drafter(self) -> Drafting | None:
        """The drafter, the first of several; None without one."""
        return next(iter(self.drafters), None)

    def with_drafter(self, drafter: Drafting) -> "LLM":
        """The same target with a drafter from memory. Reuses what was compiled for an earlier one of its kind.

        Raises:
            InputError: It does not fit the target, or is no whole `Drafting`.
        """
        self.load()
        check_complete(drafter)
        check_type("draft", drafter, Drafting)
        config = config_of(drafter)
        config.check_fits(self.config)
        ids = next(iter(self._checkpoint.draft_vocabularies), None)
        placed = placed_drafter(drafter, self.target, self.programs.mesh, self.dtype, self.has_fp8_caches)
        if isinstance(placed, Drafter | Mtp):
            placed.vocabulary = draft_vocabulary(placed, ids, self.target, self.dtype, self.drafter)
        ids = ids if isinstance(placed, Drafter | Mtp) else None
        other = self.with_programs(Executables(self.target, placed))
        other._models = replace(self._models, drafters=(placed,))
        other.largest_block = min(config.block_size, self._given.max_block_size or config.block_size)
        other.draft_names = (type(drafter).__name__,)
        drafts = {"drafts": (drafter,), "draft_names": other.draft_names, "draft_vocabularies": (ids,)}
        other.loader = replace(self.loader, checkpoint=replace(self._checkpoint, **drafts))
        other.draft_places = dict.fromkeys(other.draft_names, other.largest_block - 1)
        other.plain_programs = Executables(self.target, None)
        # Packing depends on the weights' values, and programs depend on it.
        shapes = tuple((x.shape, x.dtype.name) for x in jax.tree.leaves(placed))
        compiled = self._compiled.setdefault((jax.tree.structure(placed), shapes), ({}, {}))
        other.programs.compiled, other.plain_programs.compiled = compiled
        return other

    def with_programs(self, programs: Executables) -> "LLM":
        """The same models with other executables, and an engine of their own."""
        other = copy.copy(self)
        other.programs, other._sync_engine, other._leader = programs, SyncEngine(other), None
        # One may sleep without the other.
        other.encoder = copy.copy(self.encoder)
        return other

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """A turn of the first of several processes, in which the others make its calls.

        Every process runs the same program up to here, and enters the block. In the first one the block does its work:
        only there, and only inside, the model can be used. In the others, which give False, the block begins when that
        work has ended. Where a process ends or fails meanwhile, all end. One process alone leads itself.

        Yields:
            Whether this process leads.
        """
        if self._group is None:
            yield True
            return
        programs = (self.programs, self.plain_programs)
        if not self._group.leads:
            Follower(self._group, programs).run()
            yield False
            return
        with self._group.turn():
            leader = self._leader = Leader(self._group, programs)
            try:
                yield True
            finally:
                # The engine is of this turn.
                self._sync_engine, self._leader = SyncEngine(self), None
                leader.close()

    @property
    def drafting_method(self) -> str | None:
        """What drafts, by SGLang's name: "DFLASH", or "NEXTN" for an MTP head, or several; None without a drafter.

        An object of the caller's has the name of its type.
        """
        known = ((Mtp, "NEXTN"), (Drafter, "DFLASH"))
        names = [next((n for kind, n in known if isinstance(d, kind)), type(d).__name__) for d in self.drafters]
        return ",".join(names) or None

    @property
    def facts(self) -> ModelFacts:
        """What a `FrontModel` of this model is made of."""
        return ModelFacts(
            **vars(self._checkpoint.files),
            max_len=self.max_len,
            slots=self.slots,
            block_size=self.block_size,
            largest_block=self.largest_block,
            dtype=self.dtype,
            drafting_method=self.drafting_method,
            draft_places=self.draft_places,
            takes_media=self.media is not None,
        )

    @property
    def compile_s(self) -> float:
        """Seconds of all compilations."""
        return sum({id(p): p.compile_s for p in (self.programs, self.plain_programs)}.values())

    def get_tokenizer(self):
        """The checkpoint's tokenizer as transformers reads it. Raises InputError where there is none."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer")
        return self.tokenizer.transformers_tokenizer

    @property
    def drafting_block_size(self) -> int:
        """The block size greater than 1 that "auto" favours for one sequence; 1 without a drafter.

        With ``reproducible``, "auto" always takes the largest.
        """
        return self.largest_block if self.reproducible else self._policy().favoured_draft(1).block_size

    def why_plain(self) -> str | None:
        """A sentence that says why "auto" decodes one sequence plainly; None where it drafts or is ``reproducible``."""
        return None if self.drafter is None or self.reproducible else self._policy().why_plain(1)

    def _policy(self) -> DraftLengthPolicy:
        """The policy that has measured rounds with the drafter; a new one before the first."""
        self.load()
        return self._sync_engine.policy(self.programs) or self._new_policy(self.programs)

    def _new_policy(self, programs: Executables) -> DraftLengthPolicy:
        if programs.pair[1] is None:
            return DraftLengthPolicy((Speculation(1),))
        costs = RoundCosts(self.target, self.drafters, platform_named(jax.default_backend()))
        rates, block_sizes = {}, []
        for i, drafter in enumerate(self.drafters):
            config = config_of(drafter)
            if config.acceptance_rates is not None:
                rates[i] = config.acceptance_rates
            largest, is_stepped = min(self.largest_block, config.block_size), isinstance(drafter, Mtp)
            block_sizes.append(compiled_block_sizes(largest, self.block_size, is_stepped))
        models = [(x.shape, x.dtype.name) for x in jax.tree.leaves((self.target, self.drafters))]
        listed = [v and len(v.ids) for v in map(vocabulary_of, self.drafters)]
        # Not the reasons why kernels are missing, which name temporary files.
        backend = self.backend
        kernels = backend.kernels, backend.no_cpp is None, backend.no_triton is None, backend.fp4_activations
        device = jax.devices()[0].device_kind, processors(), kernels, str(self.target.layout), self.reproducible
        versions = __version__, jax.__version__
        record = CostRecord(cache_directory(), versions, device, models, listed, self.draft_window)
        if not all(isinstance(drafter, Drafter | Mtp) for drafter in self.drafters):
            # What an object of the caller's computes has no name.
            record = NO_RECORD
        return DraftLengthPolicy(speculations_of(*block_sizes), costs, rates, record, costs.saved)

    def new_engine(
        self,
        programs: Executables,
        slots: int,
        capacity: int,
        policy: DraftLengthPolicy | None = None,
        max_total_tokens: int | None = None,
        max_num_batched_tokens: int | None = None,
        **options,
    ) -> Engine:
        """An engine for this pair of models, apart from the one behind `generate`.

        Args:
            programs: `programs` or `plain_programs`.
            slots: Sequences that run at a time.
            capacity: Positions of each at most.
            policy: Chooses block sizes; None: a new one.
            max_total_tokens: Tokens that all pages of keys and values have room for, which the slots and the prefix
                cache share; None: as many as they can use, or as fit.
            max_num_batched_tokens: As in `EngineConfig`; None takes the platform's default.
            **options: Further fields of its `EngineConfig`, which override the platform's.

        Raises:
            InputError: The memory is not enough.
        """
        policy = policy or self._new_policy(programs)
        exact, has_triton = self.reproducible, self.backend.has_triton
        block_size = max(BLOCK_SIZES[-1], policy.speculations[-1].block_size) if exact else 1
        # A draft that is not verified saves its experts; everything else reads the same weights without it.
        has_experts = any(isinstance(layer.ffn, MoeSpec) for layer in self.config.layers)
        has_widths = has_experts and self.block_size == "auto" and not exact and programs.pair[1] is not None
        top = min(MAX_LOGPROBS, self.config.vocab_size)
        settings = Settings(block_size, exact, top, self.draft_window, has_widths=has_widths)
        platform, layout = jax.default_backend(), self.target.layout
        is_large = has_large_chunks(platform, has_triton, 1 if exact else layout.tensor * layout.expert)
        options = prefill_config(platform, is_large, exact, max_num_batched_tokens) | options
        config = EngineConfig(
            speculations=policy.speculations,
            drafters=self.draft_names,
            max_decode_batch=1 if exact else None,
            prefix_bytes=self.prefix_bytes,
            prefix_host_bytes=self.prefix_host_bytes,
            swap_bytes=self.swap_bytes,
            markers=self.tokenizer.markers if self.tokenizer and self.prefix_bytes else frozenset(),
            adaptive=not exact,
            media=self.encoder is not None,
            recomputes_exactly=exact or self.dtype == "float32",
            **options,
        )
        tower = 0 if self.encoder is None else self.encoder.device_bytes(capacity)
        memory = plan_memory(programs, slots, capacity, settings, config, self.mem_fraction, tower, max_total_tokens)
        text = "%d slots of at most %d positions, which share %d pages of %d: %s"
        log.info(text, slots, capacity, memory.counts[0] * programs.data, page_size(capacity), memory)
        engine = Engine(self.new_runner(programs, slots, capacity, settings, memory.counts), config, policy)
        engine.version, engine.is_paused = self.weight_version, self.is_paused
        self._engines.add(engine)
        return engine

    def new_runner(
        self,
        programs: Executables,
        slots: int,
        capacity: int,
        settings: Settings,
        pages: tuple[int, int] | None = None,
    ) -> ModelRunner:
        """A `ModelRunner` with a decoding state of its own; ``programs``: `programs` or `plain_programs`.

        Raises:
            EngineError: One of several processes is not `leading`.
        """
        if self._group is None:
            return ModelRunner(programs, slots, capacity, settings, pages)
        if self._leader is None:
            raise EngineError("one of several processes uses the model: `with llm.leading() as leads`, where it leads")
        return self._leader.runner(programs, slots, capacity, settings, pages)
