"""The library's entry: `LLM` continues text or token ids, all at once or as a stream."""

import copy
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from math import isnan
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import jax
from tqdm import tqdm

from dflash_jax.argument_checks import checked
from dflash_jax.engine.compile_cache import enable_disk_cache
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.draft_length import USUAL_RATE, DraftLengthPolicy, rate_of
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.memory import plan_memory
from dflash_jax.engine.model_runner import ModelRunner
from dflash_jax.engine.round_costs import RoundCosts, platform_named
from dflash_jax.errors import InputError
from dflash_jax.frontend.chat_template import template_options
from dflash_jax.frontend.engine_setup import compiled_block_sizes, engine_setup
from dflash_jax.frontend.keywords import with_other_names
from dflash_jax.frontend.llm_config import LLMConfig
from dflash_jax.frontend.loading import Checkpoint, load_pair, placed_drafter, prepare_backend
from dflash_jax.frontend.outputs import Completion
from dflash_jax.frontend.prompts import Prompt, Prompts, split_conversations, split_prompts
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.sync_engine import SyncEngine
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.drafting import DraftWindow
from dflash_jax.parallel.sharding import Layout
from dflash_jax.sampling_params import SamplingParams

log = logging.getLogger("dflash_jax")
T = TypeVar("T")


def _either(name: str, value: T | None, other: str, other_value: T | None) -> T | None:
    """The value of an argument with two names. Raises InputError where both are given."""
    if value is not None and other_value is not None:
        raise InputError(f"{name} and {other} are one argument: give one of them")
    return other_value if value is None else value


class LLM(Prompts):
    """A target model and its drafter, ready to generate.

    The arguments are those of `LLMConfig`, which documents each. The names of vLLM and SGLang are accepted, too:
    ``model``, ``tensor_parallel_size``, ``max_model_len`` and others (see "For vLLM and SGLang users").

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
        seed: int | None = None,
        **other_names: Any,
    ):
        arguments = locals()
        values = {field.name: arguments[field.name] for field in fields(LLMConfig)}
        given = LLMConfig(**with_other_names(values, other_names))
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
        self._seeds, self._request_ids = Random(given.seed) if given.seed is not None else None, count()
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

    def get_tokenizer(self):
        """The checkpoint's tokenizer as transformers reads it. Raises InputError where there is none."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer")
        return self.tokenizer.transformers_tokenizer

    @checked("prompts")
    def check(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> None:
        """Raises InputError where `generate` would."""
        self._sequences(prompts, params)

    @checked("prompts")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        block_size: BlockSize | None = None,
        progress: bool | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[Completion]:
        """Continues every prompt, as many at a time as there are slots.

        Args:
            prompts: A prompt, or a list of them. A prompt is text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            params: How they are continued; one for all, or one for each.
            block_size: Overrides the LLM's for this call; 1 decodes plainly.
            progress: Whether to show a bar on stderr; None shows one for more than eight prompts, on a terminal.
            sampling_params: vLLM's name of ``params``.
            use_tqdm: vLLM's name of ``progress``.

        Returns:
            One `Completion` for each prompt, in their order.

        Raises:
            InputError: A prompt or parameter is wrong, or the memory is not enough.
        """
        params = _either("params", params, "sampling_params", sampling_params)
        progress = _either("progress", progress, "use_tqdm", use_tqdm)
        groups = self._sequences(prompts, params, block_size, streamed=False)
        sequences = [sequence for _, group in groups for sequence in group]
        if progress is None:
            progress = len(sequences) > 8 and sys.stderr.isatty()
        with tqdm(total=len(sequences), unit="prompt", disable=not progress) as bar:
            for _ in self._finished([group for _, group in groups]):
                bar.update()
                if progress:
                    bar.set_postfix_str(f"{self.tokens_per_s(sequences):.0f} tok/s", refresh=False)
        return [self._completion(text, group) for text, group in groups]

    @checked("messages")
    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        thinking: bool | None = None,
        block_size: BlockSize | None = None,
        progress: bool | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
    ) -> list[Completion]:
        """Answers one conversation, or each of several.

        Args:
            messages: ``{"role", "content"}`` of each message of a conversation, or a list of conversations.
            params: How they are answered; one for all, or one for each.
            thinking: Whether the model thinks first; None leaves that to the template.
            block_size: As for `generate`.
            progress: As for `generate`.
            sampling_params: vLLM's name of ``params``.
            use_tqdm: vLLM's name of ``progress``.
            chat_template: A Jinja file, or the template itself, in place of the LLM's.
            chat_template_kwargs: The template's options, such as ``{"enable_thinking": False}``.
            add_generation_prompt: Whether the text goes on to where an answer begins.
            continue_final_message: Whether the last message is continued instead.
            tools: Tools that the model may call, as JSON schemas.
        """
        params = _either("params", params, "sampling_params", sampling_params)
        progress = _either("progress", progress, "use_tqdm", use_tqdm)
        options = template_options(chat_template, chat_template_kwargs, continue_final_message)
        options |= {"tools": tools, "ask": add_generation_prompt and not continue_final_message}
        texts = [self.render_chat(talk, thinking, **options) for talk in split_conversations(messages)]
        prompts = [{"prompt": text, "prompt_token_ids": self.encode_plain(text)} for text in texts]
        return self.generate(prompts, params, block_size, progress)

    @checked("prompt")
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[str]:
        """Yields the text of one prompt's continuation as it is generated."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so there is no text to stream: see pieces()")
        pieces = self.pieces(prompt, params, sampling_params=sampling_params)
        return (piece.text for piece in pieces if isinstance(piece, Piece) and piece.text)

    @checked("prompt")
    def pieces(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        block_size: BlockSize | None = None,
        *,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[Piece | Completion]:
        """Yields a `Piece` for every dispatch of one prompt, and its `Completion` at the end.

        Several such iterators may be in use at once.
        """
        params = _either("params", params, "sampling_params", sampling_params)
        if params is not None and params.n > 1:
            raise InputError(f"n is {params.n}: a stream is of one continuation: give n=1, or use generate()")
        text, (sequence,) = self._sequences_of(prompt, "prompt", params or SamplingParams(), block_size)
        return self._pieces(text, sequence)

    def _pieces(self, text: str | None, sequence: TextSequence) -> Iterator[Piece | Completion]:
        self._submit([[sequence]])
        try:
            while True:
                while sequence.pieces:
                    yield sequence.pieces.popleft()
                if sequence.request.finish_reason:
                    break
                self._sync_engine.step()
            sequence.raise_failure()
            yield self._completion(text, [sequence])
        finally:
            self._sync_engine.leave([sequence])

    def _finished(self, groups: list[list[TextSequence]]) -> Iterator[TextSequence]:
        """Runs the sequences of prompts, and yields each when it ends."""
        self._submit(groups)
        running = sequences = [sequence for group in groups for sequence in group]
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

    def _sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        block_size: BlockSize | None = None,
        **options,
    ) -> list[tuple[str | None, list[TextSequence]]]:
        """`_sequences_of` of every prompt."""
        several = split_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise InputError(f"{len(each)} SamplingParams for {len(several)} prompts: give one, or one each")
        pairs = enumerate(zip(several, each, strict=True))
        return [self._sequences_of(prompt, f"prompts[{i}]", one, block_size, **options) for i, (prompt, one) in pairs]

    def _sequences_of(
        self, prompt: Prompt, name: str, params: SamplingParams, block_size: BlockSize | None, **options
    ) -> tuple[str | None, list[TextSequence]]:
        """(text of a prompt, None where it was not given as text, and its n sequences)."""
        ids = self.encode(prompt, name)
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        sequences = [self.new_sequence(ids, each, block_size, **options) for each in self._choices(params)]
        return text if isinstance(text, str) else None, sequences

    def _choices(self, params: SamplingParams) -> list[SamplingParams]:
        """The parameters of each of the n continuations of a prompt."""
        seed = params.seed
        if seed is None and self._seeds is None and params.n > 1:
            seed = int.from_bytes(os.urandom(4), "little")
        return [replace(params, n=1, seed=None if seed is None else (seed + i) % 2**32) for i in range(params.n)]

    def _completion(self, text: str | None, group: list[TextSequence]) -> Completion:
        """The result of a prompt whose sequences have ended."""
        completions = [sequence.completion() for sequence in group]
        outputs = [completion.output(i, self._text_of) for i, completion in enumerate(completions)]
        return replace(completions[0], prompt=text, request_id=str(next(self._request_ids)), outputs=outputs)

    def _text_of(self, token: int) -> str | None:
        return self.tokenizer.token_bytes(token).decode(errors="replace") if self.tokenizer else None

    def _submit(self, groups: list[list[TextSequence]]) -> None:
        """Submits the sequences of prompts. A call that is refused takes none of the LLM's seeds."""
        seeds = copy.copy(self._seeds)
        for group in groups:
            if seeds is not None and not group[0].has_given_seed:
                first = seeds.getrandbits(32)
                for i, sequence in enumerate(group):
                    sequence.request.params = replace(sequence.request.params, seed=(first + i) % 2**32)
        sequences = [sequence for group in groups for sequence in group]
        is_plain = not self.reproducible and all(s.request.block_size == 1 for s in sequences)
        self._sync_engine.submit(sequences, self.plain_programs if is_plain else self.programs)
        if self._seeds is not None and seeds is not None:
            self._seeds.setstate(seeds.getstate())

    @property
    def drafting_block_size(self) -> int:
        """The block size greater than 1 that "auto" favours for one sequence; 1 without a drafter.

        With ``reproducible``, "auto" always takes the largest.
        """
        return self.largest_block if self.reproducible else self._policy().favoured_draft(1)

    def why_plain(self) -> str | None:
        """A sentence that says why "auto" decodes one sequence plainly; None where it drafts or is ``reproducible``."""
        return None if self.drafter is None or self.reproducible else self._policy().why_plain(1)

    def _policy(self) -> DraftLengthPolicy:
        """The policy that has measured rounds with the drafter; a new one before the first."""
        return self._sync_engine.policy(self.programs) or self._new_policy(self.programs)

    def _new_policy(self, programs: Executables) -> DraftLengthPolicy:
        drafter = self.drafter
        if drafter is None or programs.pair[1] is None:
            return DraftLengthPolicy((1,))
        costs = RoundCosts(self.target, drafter, platform_named(jax.default_backend()))
        length, block_size = drafter.config.acceptance_length, drafter.config.block_size
        rate = USUAL_RATE if length is None else rate_of(length, block_size)
        return DraftLengthPolicy(compiled_block_sizes(self.largest_block, self.block_size), costs, rate)

    def new_engine(
        self,
        programs: Executables,
        slots: int,
        capacity: int,
        policy: DraftLengthPolicy | None = None,
        **options,
    ) -> Engine:
        """An engine for this pair of models, apart from the one behind `generate`.

        Args:
            programs: `programs` or `plain_programs`.
            slots: Sequences that run at a time.
            capacity: Positions of each.
            policy: Chooses block sizes; None: a new one.
            **options: Further fields of its `EngineConfig`.

        Raises:
            InputError: The memory is not enough.
        """
        policy = policy or self._new_policy(programs)
        config, settings = engine_setup(
            policy.block_sizes,
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
        return Engine(ModelRunner(programs, slots, capacity, settings), config, policy)
