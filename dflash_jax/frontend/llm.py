"""The library's front: `LLM` takes text or token ids and gives completions, all at once or as they are made."""

import copy
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import compress
from math import isnan
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from tqdm import tqdm

from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import check_drafter, check_target, load_drafter, load_target, read_draft_tokens
from dflash_jax.decoding.state import Settings
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.executables import Executables, enable_disk_cache
from dflash_jax.engine.memory import device_memory, plan_memory
from dflash_jax.engine.model_runner import ROW_SIZES, Device
from dflash_jax.engine.options import Options, prefill_options
from dflash_jax.engine.request import MaskProvider
from dflash_jax.engine.token_rules import CombinedMasks, Rules, ThinkingBudget, TokenRules
from dflash_jax.errors import InputError
from dflash_jax.frontend.chat_template import read_chat_template
from dflash_jax.frontend.outputs import Completion
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.sync_engine import SyncEngine
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models.drafter import Drafter, DraftVocabulary, DraftWindow, abstract_drafter
from dflash_jax.models.packing import pack_weights, unpack_weights
from dflash_jax.ops.backend import Backend
from dflash_jax.parallel.sharding import Layout, parameter_paths, parameter_specs, place
from dflash_jax.sampling_params import MAX_LOGPROBS, SamplingParams

log = logging.getLogger("dflash_jax")

DRAFT_TOKENS = "draft_tokens.json"  # beside a drafter
TINY = Path(__file__).parents[1] / "assets" / "tiny"
# Widths that rounds are compiled for, below the drafter's own block. On a CPU rows cost sooner than elsewhere.
WINDOWS, CPU_WINDOWS = (1, 8, 16), (1, 4, 8, 16)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class LLM:
    """A target and its drafter, ready to generate.

    target: a Hugging Face directory or repo id; None for the tiny pair that ships with the package. draft: likewise,
    or None to decode without one; "auto" is the tiny drafter for the tiny target and None for any other. dtype:
    "float32" or "bfloat16"; None takes float32 on CPU and bfloat16 elsewhere. block_size: tokens a round may yield, at
    most the drafter's own; 1 is plain decoding; "auto" chooses what is fastest from load and acceptance.
    max_block_size bounds all choices. slots:
    prompts that are continued at a time. prefix_bytes: memory for beginnings that prompts share (None: a twentieth of
    the device's; 256 MiB on CPU). mem_fraction: of a device's memory, for all of it. draft_window_size and
    draft_sink_size bound the context that the drafter sees. reproducible: the same bits with any drafter, block size
    or batch, at some cost in speed; needed for that in bfloat16 only. max_len: prompt and new tokens, at most the
    model's positions. mesh: devices to share the work among, such as "data=2,tensor=4" (default: one). quantize:
    "int8" or "fp8" for a target whose checkpoint is not quantised; "none" makes an FP8 checkpoint ``dtype``, which
    else stays FP8. draft_tokens: a JSON list of the only token ids that are drafted, which spares the drafter most of
    the head; "auto" is the drafter's own draft_tokens.json where it has one and the head is not cut over devices, None
    is all tokens. tokenizer: a directory or repo id in place of the target's. chat_template: a Jinja file, or the
    template itself, in place of the tokenizer's; chat_template_kwargs: defaults of its options, such as
    {"enable_thinking": False}. revision and draft_revision: a branch, tag or commit of the target's and the drafter's
    repos; download_dir: where repos are kept. generation_config: "auto" takes sampling defaults from the target's
    generation_config.json, "vllm" takes none, a path takes another file's; sampling_defaults: values that override
    them. kernels: "auto", or "xla" for none of this package's own. Raises InputError for whatever does not fit
    together.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        dtype: str | None = None,
        block_size: int | str = "auto",
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
        for name, value, repo in (("revision", revision, target), ("draft_revision", draft_revision, draft)):
            if value is not None and repo in (None, "auto"):
                raise InputError(f"{name} {value}: there is no repo that it could be of")
        if draft == "auto":
            draft = TINY / "draft" if target is None else None
        self.directory = directory = TINY / "target" if target is None else resolve(target, revision, download_dir)
        self.dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        if draft_window_size is not None and draft_window_size < 1:
            raise InputError(f"draft window size {draft_window_size}: it must be 1 or more")
        if draft_sink_size < 0:
            raise InputError(f"draft sink size {draft_sink_size}: it must be 0 or more")
        if draft_sink_size and draft_window_size is None:
            raise InputError(
                f"draft sink size {draft_sink_size} without a draft window size: sinks are kept beside one"
            )
        enable_disk_cache()
        layout, kind = Layout.parse(mesh) if isinstance(mesh, str) else mesh, DTYPES[self.dtype]
        # What can be wrong without a weight read comes first.
        self.config = check_target(directory)
        draft = resolve(draft, draft_revision, download_dir) if draft is not None else None
        self.largest_block = check_drafter(draft, self.config).block_size if draft is not None else 1
        if max_block_size is not None and max_block_size < 1:
            raise InputError(f"max block size {max_block_size}: it must be 1 or more")
        self.largest_block = min(self.largest_block, max_block_size or self.largest_block)
        self.block_size = self._check_block(block_size)
        vocabulary = self._draft_tokens(draft_tokens, draft, layout)
        positions = self.config.max_positions
        self.max_len = positions if max_len is None else max_len
        if not 1 < self.max_len <= positions:
            raise InputError(f"max_len {max_len}: it must be 2 to {positions}, the model's positions")
        if not 1 <= slots <= ROW_SIZES[-1]:
            raise InputError(f"slots {slots}: it must be 1 to {ROW_SIZES[-1]}")
        if prefix_bytes is None:
            prefix_bytes = 2**28 if jax.default_backend() == "cpu" else device_memory() // 20
        if prefix_bytes < 0:
            raise InputError(f"prefix_bytes {prefix_bytes}: it must be 0 (none) or more")
        if not 0 < mem_fraction <= 1:
            raise InputError(f"mem_fraction {mem_fraction}: it must be above 0 and at most 1")
        self.slots, self.prefix_bytes, self.mem_fraction = slots, prefix_bytes, mem_fraction
        self.defaults = SamplingDefaults.read(directory, generation_config).overridden(sampling_defaults or {})
        self.tokenizer = None
        text_directory = directory if tokenizer is None else resolve(tokenizer, download_dir=download_dir)
        template = None if chat_template is None else read_chat_template(chat_template)
        if self._has_tokenizer(text_directory):
            self.tokenizer = Tokenizer(text_directory, template, chat_template_kwargs)
        elif tokenizer is not None or template is not None or chat_template_kwargs:
            raise InputError(f"{text_directory} has no tokenizer")
        self.reproducible = reproducible
        bounded = None if draft_window_size is None else min(draft_window_size, positions)
        self._draft_window = DraftWindow(bounded, min(draft_sink_size, positions))
        # Compilation of its kernels is no part of loading.
        self.backend = Backend.detect(kernels)
        if self.backend.is_gpu and kernels == "auto" and (reason := self.backend.no_triton):
            log.warning("without Triton kernels, which make decoding faster: %s", reason)
        began = time.perf_counter()
        self.target = self._arranged(load_target(directory, kind, layout, quantize, self.backend))
        if reason := self.backend.no_triton_for({x.dtype for x in jax.tree.leaves(self.target)}):
            log.warning("products of weights without Triton kernels: %s", reason)
        self.drafter = (
            self._arranged(load_drafter(draft, kind, self.config, layout, self.backend)) if draft is not None else None
        )
        if vocabulary is not None:
            self.drafter.vocabulary = self._arranged(
                DraftVocabulary(vocabulary, self.target.head_rows(vocabulary), self.backend)
            )
        leaves = jax.block_until_ready(jax.tree.leaves((self.target, self.drafter)))
        self.loaded_bytes, self.load_s = sum(x.nbytes for x in leaves), time.perf_counter() - began
        self.programs = Executables(self.target, self.drafter)
        # Without the drafter, nothing of it is computed or held.
        self.plain_programs = Executables(self.target, None) if self.drafter is not None else self.programs
        self._pool = SyncEngine(self)
        # Executables by what a drafter from memory is.
        self._compiled: dict = {}

    def with_drafter(self, drafter: Drafter) -> "LLM":
        """The same target with a drafter from memory. What was compiled for an earlier one of its kind is used
        again."""
        drafter.config.check_fits(self.config)
        other, kind = copy.copy(self), DTYPES[self.dtype]
        shape, mesh = abstract_drafter(drafter.config, kind, self.target.layout, self.backend), self.programs.mesh
        cuts = [NamedSharding(mesh, spec) for spec in parameter_specs(shape)]
        dense = unpack_weights(drafter)
        # The list of this LLM is kept, whatever the other one had.
        own = [not path.startswith("vocabulary.") for path in parameter_paths(dense)]
        leaves = [np.asarray(x).astype(kind) for x in compress(jax.tree.leaves(dense), own)]
        placed = [place(x, cut) for x, cut in zip(leaves, cuts, strict=True)]
        other.drafter = self._arranged(jax.tree.unflatten(jax.tree.structure(shape), placed))
        other.drafter.vocabulary = None if self.drafter is None else self.drafter.vocabulary
        other.largest_block = drafter.config.block_size
        other.programs, other.plain_programs = Executables(self.target, other.drafter), Executables(self.target, None)
        # Weights that bfloat16 holds are kept otherwise than others.
        kinds = tuple(x.dtype.name for x in jax.tree.leaves(other.drafter))
        programs = self._compiled.setdefault((drafter.config, kinds), ({}, {}))
        other.programs.compiled, other.plain_programs.compiled = programs
        other._pool = SyncEngine(other)
        return other

    def _draft_tokens(self, name: str | Path | None, draft: Path | None, layout: Layout):
        """int32 [N], the only tokens that are drafted, or None for all."""
        if name in (None, "none"):
            return None
        if draft is None:
            if name != "auto":
                raise InputError(f"draft tokens {name}: there is no drafter")
            return None
        path = draft / DRAFT_TOKENS if name == "auto" else Path(name).expanduser()
        is_cut = layout.wide(self.config.vocab_size).axes
        if name == "auto" and (is_cut or not path.exists()):
            return None
        if is_cut:
            raise InputError(f"draft tokens {path}: the target's head is cut over devices, and is drafted with whole")
        return jnp.asarray(read_draft_tokens(path, self.config.vocab_size))

    def _arranged(self, module):
        """``module`` as this platform reads it fastest."""
        devices = set().union(*(x.sharding.device_set for x in jax.tree.leaves(module)))
        wanted = [device.platform for device in devices] == ["cpu"] and self.dtype == "float32" and self.backend.has_cpp
        return pack_weights(module) if wanted else module

    @property
    def compile_s(self) -> float:
        """Seconds of all compilation so far."""
        return sum({id(p): p.compile_s for p in (self.programs, self.plain_programs)}.values())

    @staticmethod
    def _has_tokenizer(directory: Path) -> bool:
        return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))

    def _check_block(self, block_size: int | str) -> int | str:
        largest = self.largest_block
        if block_size == "auto":
            return block_size
        if not isinstance(block_size, int) or not 1 <= block_size <= largest:
            whose = "the drafter's own" if largest > 1 else "there is no drafter"
            raise InputError(f"block size {block_size}: it must be 1 to {largest} ({whose}), or auto")
        return block_size

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; ids are checked and given back."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("this checkpoint has no tokenizer: give token ids")
            try:
                ids = self.tokenizer.encode(prompt)
            except (TypeError, UnicodeEncodeError):
                raise InputError("a prompt is not text that UTF-8 can hold") from None
        else:
            ids = [int(i) for i in prompt]
        vocab = self.config.vocab_size
        outside = [i for i in ids if not 0 <= i < vocab]
        if outside:
            raise InputError(f"prompt id {outside[0]} is out of vocabulary: ids are 0 to {vocab - 1}")
        if not ids:
            raise InputError("a prompt is empty: it must have at least one token")
        return ids

    def encode_chat(self, messages: list[dict], thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so it has no chat template: give token ids")
        return self.tokenizer.chat(messages, thinking)

    def check(self, prompts: Sequence[str | Sequence[int]], params=None) -> None:
        """Raises InputError where `generate` would."""
        self._rows(prompts, params)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        block_size: int | str | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues every prompt (text or token ids), as many at a time as there are slots.

        ``block_size`` overrides the LLM's for this call; 1 decodes plainly. ``progress``: a bar on stderr; None shows
        one for more than eight prompts, on a terminal.
        """
        rows = self._rows(prompts, params, block_size, streamed=False)
        if progress is None:
            progress = len(rows) > 8 and sys.stderr.isatty()
        with tqdm(total=len(rows), unit="prompt", disable=not progress) as bar:
            for _ in self._finished(rows):
                bar.update()
                if progress:
                    bar.set_postfix_str(f"{self.tokens_per_s(rows):.0f} tok/s", refresh=False)
        return [row.completion() for row in rows]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | None = None,
        thinking: bool | None = None,
        block_size: int | str | None = None,
    ) -> list[Completion]:
        """Answers one conversation, or each of several."""
        several = messages if messages and isinstance(messages[0], list) else [messages]
        return self.generate([self.encode_chat(m, thinking) for m in several], params, block_size)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the text of one prompt's continuation as it is made."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so there is no text to stream: see pieces()")
        for piece in self.pieces(prompt, params):
            if isinstance(piece, Piece) and piece.text:
                yield piece.text

    def pieces(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, block_size: int | str | None = None
    ) -> Iterator[Piece | Completion]:
        """Yields what every dispatch brought to one prompt, and the `Completion` at the end. Several may be under way
        at once."""
        (row,) = self._rows([prompt], params, block_size)
        self._submit([row])
        try:
            while True:
                while row.pieces:
                    yield row.pieces.popleft()
                if row.request.finish_reason:
                    break
                self._pool.step()
            row.raise_failure()
            yield row.completion()
        finally:
            self._pool.leave([row])

    def _finished(self, rows: list[TextSequence]) -> Iterator[TextSequence]:
        """The rows as they end."""
        self._submit(rows)
        left = rows
        try:
            while left:
                self._pool.step()
                for row in left:
                    if row.request.finish_reason:
                        row.raise_failure()
                        yield row
                left = [row for row in left if row.request.finish_reason is None]
        finally:
            self._pool.leave(rows)

    @staticmethod
    def tokens_per_s(rows: list[TextSequence]) -> float:
        """New tokens of these rows by the time since the first of them was ready."""
        begun = [r.request.times for r in rows if not isnan(r.request.times.first_token)]
        ends = [t.finished for t in begun if not isnan(t.finished)]
        if not ends:
            return 0.0
        return sum(len(r.request.tokens) for r in rows) / max(max(ends) - min(t.ready for t in begun), 1e-9)

    def _rows(self, prompts, params, block_size: int | str | None = None, **options) -> list[TextSequence]:
        if isinstance(prompts, str):
            raise InputError("prompts must be a list: for one prompt give [prompt]")
        each = list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one each")
        return [
            self.new_row(prompt, wanted, block_size, **options) for prompt, wanted in zip(prompts, each, strict=True)
        ]

    def new_row(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        block_size: int | str | None = None,
        *,
        mask: MaskProvider | None = None,
        budget: ThinkingBudget | None = None,
        **options,
    ) -> TextSequence:
        """A prompt as an engine takes it.

        Args:
            prompt: Text or token ids.
            params: How it is continued.
            block_size: Overrides the LLM's.
            mask: Which tokens may come, beside what ``params`` say. The checkpoint's stop ids then end the text in any
                case: a finished one must be able to end.
            budget: The bound of the thought.
            **options: Further fields of the `TextSequence` and its `Request`.

        Raises:
            InputError: Something does not fit.
        """
        ids, filled = self.encode(prompt), self.defaults.fill(params)
        filled.check_vocabulary(self.config.vocab_size)
        if (filled.stop or filled.stop_regex) and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        if len(ids) + filled.max_tokens > self.max_len:
            raise InputError(
                f"{len(ids)} prompt tokens and {filled.max_tokens} new ones are {len(ids) + filled.max_tokens}: "
                f"at most {self.max_len} fit"
            )
        block = self.block_size if block_size is None else self._check_block(block_size)
        window = {"draft_window_size": self._draft_window.size, "draft_sink_size": self._draft_window.sinks}
        stops = self.defaults.stops(filled, must_end=mask is not None)
        rules = Rules(
            filled.min_tokens, tuple(stops), self._bad_words(filled.bad_words), filled.allowed_token_ids, budget
        )
        if rules.are_needed:
            own = TokenRules(rules, self.config.vocab_size)
            mask = own if mask is None else CombinedMasks([own, mask])
        return TextSequence(ids, filled, stops, self.tokenizer, block_size=block, mask=mask, **window, **options)

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word at a text's beginning and, as in vLLM, behind a space: where that is as many tokens,
        of which the first is another one."""
        if words and self.tokenizer is None:
            raise InputError("bad_words need a tokenizer, and this checkpoint has none: use logit_bias")
        found = []
        for word in words:
            plain, spaced = (self.tokenizer.encode_word(space + word.lstrip()) for space in ("", " "))
            if not plain:
                raise InputError(f"bad_words has {word!r}: it must have a character beside spaces")
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return tuple(found)

    def _submit(self, rows: list[TextSequence]) -> None:
        plain = not self.reproducible and all(row.request.block_size == 1 for row in rows)
        self._pool.submit(rows, self.plain_programs if plain else self.programs)

    def new_engine(self, programs: Executables, slots: int, capacity: int, **options) -> Engine:
        """An engine of its own; ``options``: further fields of its `Options`. Raises InputError where it does not fit
        into the memory."""
        widths = (1,)
        if self.drafter is not None and programs is self.programs:
            known = CPU_WINDOWS if jax.default_backend() == "cpu" else WINDOWS
            own = () if self.block_size == "auto" else (self.block_size,)
            widths = tuple(sorted({*(w for w in known if w < self.largest_block), self.largest_block, *own}))
        settings = Settings(
            max(WINDOWS[-1], widths[-1]) if self.reproducible else 1,
            self.reproducible,
            min(MAX_LOGPROBS, self.config.vocab_size),
            self._draft_window,
        )
        most = options.pop("max_num_batched_tokens", None)
        sizes = prefill_options(jax.default_backend(), self.backend.has_triton, self.reproducible, most)
        chosen = Options(
            widths=widths,
            rows_per_dispatch=1 if self.reproducible else None,
            prefix_bytes=self.prefix_bytes,
            markers=self.tokenizer.markers if self.tokenizer and self.prefix_bytes else frozenset(),
            adaptive=not self.reproducible,
            **(sizes | options),
        )
        memory = plan_memory(programs, slots, capacity, settings, chosen, self.mem_fraction)
        log.info("%d slots of %d positions: %s", slots, capacity, memory)
        return Engine(Device(programs, slots, capacity, settings), chosen)
