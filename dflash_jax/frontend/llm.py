"""The library's entry: `LLM` continues text or token ids, all at once or as a stream."""

import copy
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import isnan
from pathlib import Path
from typing import cast

import jax
from tqdm import tqdm

from dflash_jax.engine.compile_cache import enable_disk_cache
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import plan_memory
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.errors import InputError
from dflash_jax.frontend.engine_setup import compiled_block_sizes, engine_setup
from dflash_jax.frontend.llm_config import LLMConfig
from dflash_jax.frontend.loading import Checkpoint, load_pair, placed_drafter, prepare_backend
from dflash_jax.frontend.outputs import Completion
from dflash_jax.frontend.prompts import Prompts
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.sync_engine import SyncEngine
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import DraftWindow
from dflash_jax.parallel.sharding import Layout
from dflash_jax.sampling_params import SamplingParams

log = logging.getLogger("dflash_jax")


class LLM(Prompts):
    """A target model and its drafter, ready to generate.

    The arguments are those of `LLMConfig`, which documents each.

    Attributes:
        config: The target's `ModelConfig`.
        directory: The target's directory.
        tokenizer: The `Tokenizer`; None where the checkpoint has none.
        defaults: The checkpoint's `SamplingDefaults`.
        target: The target model.
        drafter: The drafter, or None.
        dtype: "float32" or "bfloat16".
        block_size: Tokens that a round may yield, or "auto".
        largest_block: The largest block size; 1 without a drafter.
        max_len: Positions of a request.
        slots: Prompts that are continued at a time.
        programs: `Executables` with the drafter.
        plain_programs: `Executables` without it.
        loaded_bytes: Bytes of all weights.
        load_s: Seconds of loading them.

    Raises:
        InputError: A value is wrong, or files do not fit together.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        dtype: str | None = None,
        block_size: BlockSize = "auto",
        max_block_size: int | None = None,
        slots: int = 32,
        prefix_bytes: int | None = None,
        mem_fraction: float = 0.9,
        draft_window_size: int | None = None,
        draft_sink_size: int = 0,
        reproducible: bool = False,
        max_len: int | None = None,
        mesh: str | Layout = "",
        quantize: str | None = None,
        draft_tokens: str | Path | None = "auto",
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        download_dir: str | Path | None = None,
        generation_config: str | Path = "auto",
        sampling_defaults: dict | None = None,
        kernels: str = "auto",
    ):
        arguments = locals()
        given = LLMConfig(**{field.name: arguments[field.name] for field in fields(LLMConfig)})
        enable_disk_cache()
        checkpoint = Checkpoint.read(given)
        self.config, self.directory = checkpoint.config, checkpoint.directory
        self.defaults, self.tokenizer = checkpoint.defaults, checkpoint.tokenizer
        self.dtype, self.reproducible = given.dtype_name, given.reproducible
        self.max_len = given.positions(self.config.max_positions)
        self.largest_block = given.largest_block(checkpoint.draft_block_size)
        self.limits.check_block_size(given.block_size)
        self.block_size, self.slots = given.block_size, given.slots
        self.prefix_bytes, self.mem_fraction = given.prefix_budget, given.mem_fraction
        size, limit = given.draft_window_size, self.config.max_positions
        self.draft_window = DraftWindow(None if size is None else min(size, limit), min(given.draft_sink_size, limit))
        self.backend = prepare_backend(given.kernels)
        began = time.perf_counter()
        self.target, self.drafter = load_pair(given, checkpoint, self.backend)
        leaves = jax.block_until_ready(jax.tree.leaves((self.target, self.drafter)))
        self.loaded_bytes, self.load_s = sum(x.nbytes for x in leaves), time.perf_counter() - began
        self.programs = Executables(self.target, self.drafter)
        # These neither compute nor store anything of the drafter.
        self.plain_programs = Executables(self.target, None) if self.drafter is not None else self.programs
        self._sync_engine = SyncEngine(self)
        # Compiled programs of drafters from memory, by their configuration and dtypes.
        self._compiled: dict = {}

    @classmethod
    def from_config(cls, config: LLMConfig) -> "LLM":
        """An `LLM` of a configuration."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def engine(self) -> Engine | None:
        """The engine in use; None before the first request. Calls with other prompts may replace it."""
        return self._sync_engine.engine

    def with_drafter(self, drafter: Drafter) -> "LLM":
        """The same target with a drafter from memory. Reuses what was compiled for an earlier one of its kind."""
        drafter.config.check_fits(self.config)
        placed = placed_drafter(drafter, self.target, self.programs.mesh, self.dtype)
        placed.vocabulary = None if self.drafter is None else self.drafter.vocabulary
        other = self.with_programs(Executables(self.target, placed))
        other.drafter, other.largest_block = placed, drafter.config.block_size
        other.plain_programs = Executables(self.target, None)
        # Packing depends on the weights' values, and programs depend on it.
        dtypes = tuple(x.dtype.name for x in jax.tree.leaves(placed))
        compiled = self._compiled.setdefault((drafter.config, dtypes), ({}, {}))
        other.programs.compiled, other.plain_programs.compiled = compiled
        return other

    def with_programs(self, programs: Executables) -> "LLM":
        """The same models with other executables, and an engine of their own."""
        other = copy.copy(self)
        other.programs, other._sync_engine = programs, SyncEngine(other)
        return other

    @property
    def compile_s(self) -> float:
        """Seconds of all compilations."""
        return sum({id(p): p.compile_s for p in (self.programs, self.plain_programs)}.values())

    def check(self, prompts: Sequence[str | Sequence[int]], params=None) -> None:
        """Raises InputError where `generate` would."""
        self._sequences(prompts, params)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        block_size: BlockSize | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues every prompt, as many at a time as there are slots.

        Args:
            prompts: Text or token ids each.
            params: How they are continued; one for all, or one for each.
            block_size: Overrides the LLM's for this call; 1 decodes plainly.
            progress: Whether to show a bar on stderr; None shows one for more than eight prompts, on a terminal.

        Returns:
            One `Completion` for each prompt, in their order.

        Raises:
            InputError: A prompt or parameter is wrong, or the memory is not enough.
        """
        sequences = self._sequences(prompts, params, block_size, streamed=False)
        if progress is None:
            progress = len(sequences) > 8 and sys.stderr.isatty()
        with tqdm(total=len(sequences), unit="prompt", disable=not progress) as bar:
            for _ in self._finished(sequences):
                bar.update()
                if progress:
                    bar.set_postfix_str(f"{self.tokens_per_s(sequences):.0f} tok/s", refresh=False)
        return [sequence.completion() for sequence in sequences]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | None = None,
        thinking: bool | None = None,
        block_size: BlockSize | None = None,
    ) -> list[Completion]:
        """Answers one conversation, or each of several.

        Args:
            messages: ``{"role", "content"}`` of each message of a conversation, or a list of conversations.
            params: How they are answered.
            thinking: Whether the model thinks first; None leaves that to the template.
            block_size: As for `generate`.
        """
        is_several = bool(messages) and isinstance(messages[0], list)
        several = cast("list[list[dict]]", messages if is_several else [messages])
        return self.generate([self.encode_chat(m, thinking) for m in several], params, block_size)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the text of one prompt's continuation as it is generated."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so there is no text to stream: see pieces()")
        for piece in self.pieces(prompt, params):
            if isinstance(piece, Piece) and piece.text:
                yield piece.text

    def pieces(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, block_size: BlockSize | None = None
    ) -> Iterator[Piece | Completion]:
        """Yields a `Piece` for every dispatch of one prompt, and its `Completion` at the end.

        Several such iterators may be in use at once.
        """
        (sequence,) = self._sequences([prompt], params, block_size)
        self._submit([sequence])
        try:
            while True:
                while sequence.pieces:
                    yield sequence.pieces.popleft()
                if sequence.request.finish_reason:
                    break
                self._sync_engine.step()
            sequence.raise_failure()
            yield sequence.completion()
        finally:
            self._sync_engine.leave([sequence])

    def _finished(self, sequences: list[TextSequence]) -> Iterator[TextSequence]:
        """Runs sequences, and yields each when it ends."""
        self._submit(sequences)
        running = sequences
        try:
            while running:
                self._sync_engine.step()
                # Before the first is yielded: the caller may step the engine, and others then end.
                ended = [sequence for sequence in running if sequence.request.finish_reason]
                running = [sequence for sequence in running if sequence.request.finish_reason is None]
                for sequence in ended:
                    sequence.raise_failure()
                    yield sequence
        finally:
            self._sync_engine.leave(sequences)

    @staticmethod
    def tokens_per_s(sequences: list[TextSequence]) -> float:
        """New tokens of the sequences per second since the first prompt was in the caches."""
        begun = [s.request.times for s in sequences if not isnan(s.request.times.first_token)]
        ends = [t.finished for t in begun if not isnan(t.finished)]
        if not ends:
            return 0.0
        tokens = sum(len(s.request.tokens) for s in sequences)
        return tokens / max(max(ends) - min(t.ready for t in begun), 1e-9)

    def _sequences(self, prompts, params, block_size: BlockSize | None = None, **options) -> list[TextSequence]:
        if isinstance(prompts, str):
            raise InputError("prompts must be a list: for one prompt give [prompt]")
        each = list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one each")
        return [self.new_sequence(*pair, block_size, **options) for pair in zip(prompts, each, strict=True)]

    def _submit(self, sequences: list[TextSequence]) -> None:
        is_plain = not self.reproducible and all(s.request.block_size == 1 for s in sequences)
        self._sync_engine.submit(sequences, self.plain_programs if is_plain else self.programs)

    def new_engine(self, programs: Executables, slots: int, capacity: int, **options) -> Engine:
        """An engine for this pair of models, apart from the one behind `generate`.

        Args:
            programs: `programs` or `plain_programs`.
            slots: Sequences that run at a time.
            capacity: Positions of each.
            **options: Further fields of its `EngineConfig`.

        Raises:
            InputError: The memory is not enough.
        """
        has_drafter = self.drafter is not None and programs is self.programs
        config, settings = engine_setup(
            compiled_block_sizes(self.largest_block, self.block_size) if has_drafter else (1,),
            self.backend,
            reproducible=self.reproducible,
            vocab=self.config.vocab_size,
            draft_window=self.draft_window,
            prefix_bytes=self.prefix_bytes,
            markers=self.tokenizer.markers if self.tokenizer and self.prefix_bytes else frozenset(),
            **options,
        )
        memory = plan_memory(programs, slots, capacity, settings, config, self.mem_fraction)
        log.info("%d slots of %d positions: %s", slots, capacity, memory)
        return Engine(ModelRunner(programs, slots, capacity, settings), config)
