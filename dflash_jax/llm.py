"""The library's front: `LLM` takes text or token ids and gives completions, all at once or as they are made."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from dflash_jax.cache import CONTEXT_CHUNK
from dflash_jax.checkpoint.hub import resolve
from dflash_jax.checkpoint.load import check_drafter, check_target, load_drafter, load_target
from dflash_jax.errors import InputError
from dflash_jax.models.drafter import DraftWindow
from dflash_jax.params import Completion, Defaults, SamplingParams, Timings
from dflash_jax.programs import Programs, enable_disk_cache
from dflash_jax.rows import Piece, Row, sampling_rows, take
from dflash_jax.sharding import Layout
from dflash_jax.speculative import DecodeState, Settings
from dflash_jax.text import Tokenizer

TINY = Path(__file__).parent / "assets" / "tiny"
ROW_SIZES = (1, 2, 4, 8, 16, 32)
WINDOWS = (1, 8, 16)
PREFILL_CHUNKS = (64, 512)
LOGPROB_WIDTHS = (-1, 0, 5, 20)
# Rounds between two looks of the host: few while someone reads along.
STREAM_ROUNDS, BATCH_ROUNDS = 4, 32
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class LLM:
    """A target and its drafter, ready to generate.

    target: a Hugging Face directory or repo id; None for the tiny pair that ships with the package. draft: likewise,
    or None to decode without one; "auto" is the tiny drafter for the tiny target and None for any other. dtype:
    "float32" or "bfloat16"; None takes float32 on CPU and bfloat16 elsewhere. block_size: tokens a round may yield, at
    most the drafter's own (the default); 1 is plain decoding. draft_window_size and draft_sink_size bound the context
    that the drafter sees. reproducible: the same bits with any drafter, block size or batch, at some cost in speed;
    needed for that in bfloat16 only. max_len: prompt and new tokens, at most the model's positions. mesh: devices to
    share the work among, such as "data=2,tensor=4" (default: one). quantize: "int8" or "fp8" for a target whose
    checkpoint is not quantised; "none" makes an FP8 checkpoint ``dtype``, which else stays FP8. Raises InputError
    for whatever does not fit together.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = "auto",
        *,
        dtype: str | None = None,
        block_size: int | None = None,
        draft_window_size: int | None = None,
        draft_sink_size: int = 0,
        reproducible: bool = False,
        max_len: int | None = None,
        mesh: str | Layout = "",
        quantize: str | None = None,
    ):
        if draft == "auto":
            draft = TINY / "draft" if target is None else None
        directory = TINY / "target" if target is None else resolve(target)
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
        draft = resolve(draft) if draft is not None else None
        self._largest_block = check_drafter(draft, self.config).block_size if draft is not None else 1
        self.block_size = self._check_block(block_size)
        positions = self.config.max_positions
        self.max_len = positions if max_len is None else max_len
        if not 1 < self.max_len <= positions:
            raise InputError(f"max_len {max_len}: it must be 2 to {positions}, the model's positions")
        self.defaults = Defaults.read(directory)
        self.tokenizer = Tokenizer(directory) if self._has_tokenizer(directory) else None
        self.reproducible = reproducible
        bounded = None if draft_window_size is None else min(draft_window_size, positions)
        self._draft_window = DraftWindow(bounded, min(draft_sink_size, positions))
        began = time.perf_counter()
        self.target = load_target(directory, kind, layout, quantize)
        self.drafter = load_drafter(draft, kind, self.config, layout) if draft is not None else None
        leaves = jax.block_until_ready(jax.tree.leaves((self.target, self.drafter)))
        self.loaded_bytes, self.load_s = sum(x.nbytes for x in leaves), time.perf_counter() - began
        self.programs = Programs(self.target, self.drafter)

    @staticmethod
    def _has_tokenizer(directory: Path) -> bool:
        return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))

    def _check_block(self, block_size: int | None) -> int:
        largest = self._largest_block
        if block_size is None:
            return largest
        if not 1 <= block_size <= largest:
            whose = "the drafter's own" if largest > 1 else "there is no drafter"
            raise InputError(f"block size {block_size}: it must be 1 to {largest} ({whose})")
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
            raise InputError(f"prompt id {outside[0]} is outside the vocabulary: ids are 0 to {vocab - 1}")
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
        block_size: int | None = None,
    ) -> list[Completion]:
        """Continues every prompt (text or token ids). ``block_size`` overrides the LLM's for this call; 1 decodes
        plainly."""
        rows = self._rows(prompts, params)
        size = 1 if self.reproducible else ROW_SIZES[-1]
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [c for group in groups for c in self._complete(group, block_size)]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | None = None,
        thinking: bool | None = None,
        block_size: int | None = None,
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
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, block_size: int | None = None
    ) -> Iterator[Piece | Completion]:
        """Yields what every dispatch brought to one prompt, and the `Completion` at the end."""
        (row,) = self._rows([prompt], params)
        for event in self._run([row], block_size, STREAM_ROUNDS):
            yield event[0]

    def _complete(self, rows: list[Row], block_size: int | None) -> list[Completion]:
        *_, completions = self._run(rows, block_size, BATCH_ROUNDS)
        return completions

    def _rows(self, prompts, params) -> list[Row]:
        if isinstance(prompts, str):
            raise InputError("prompts must be a list: for one prompt give [prompt]")
        each = list(params) if isinstance(params, (list, tuple)) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise InputError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one each")
        rows = []
        for prompt, wanted in zip(prompts, each, strict=True):
            ids, filled = self.encode(prompt), self.defaults.fill(wanted)
            filled.check_vocabulary(self.config.vocab_size)
            if filled.stop and self.tokenizer is None:
                raise InputError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
            if len(ids) + filled.max_tokens > self.max_len:
                raise InputError(
                    f"{len(ids)} prompt tokens and {filled.max_tokens} new ones are {len(ids) + filled.max_tokens}: "
                    f"at most {self.max_len} fit"
                )
            rows.append(Row(ids, filled, self.defaults.stops(filled), self.tokenizer))
        return rows

    def _settings(self, rows: list[Row], block: int) -> Settings:
        window = WINDOWS[-1] if self.reproducible else next((w for w in WINDOWS if w >= block), block)
        wanted = max((r.params.logprobs for r in rows if r.params.logprobs is not None), default=-1)
        # Few widths, so that programs are shared.
        width = next((n for n in LOGPROB_WIDTHS if n >= wanted), wanted)
        return Settings(window, self.reproducible, min(width, self.config.vocab_size), self._draft_window)

    def _start(self, rows: list[Row], settings: Settings, block: int) -> DecodeState:
        """A state of the next row size, idle rows at the end; its capacity is one of few, so that programs are
        shared."""
        data = self.target.layout.data
        count = data * next(size for size in ROW_SIZES if size * data >= len(rows))
        idle = count - len(rows)
        need = max(len(r.prompt) + r.params.max_tokens for r in rows)
        capacity = CONTEXT_CHUNK
        while capacity < need:
            capacity *= 2
        return self.programs.start(
            [r.prompt for r in rows] + [[]] * idle,
            [r.params.max_tokens for r in rows] + [0] * idle,
            capacity,
            settings,
            drafts=block > 1,
            width=block,
            stops=[r.stops for r in rows] + [[]] * idle,
            sampling=sampling_rows([r.params for r in rows] + [SamplingParams()] * idle, self.config.vocab_size),
        )

    def _run(self, rows: list[Row], block_size: int | None, rounds: int) -> Iterator[list[Piece] | list[Completion]]:
        """Prefill, then dispatches until all rows are done: a list of pieces each, and the completions at the end."""
        block = self.block_size if block_size is None else self._check_block(block_size)
        settings, drafts, programs = self._settings(rows, block), block > 1, self.programs
        state = self._start(rows, settings, block)
        compiled, began = programs.compile_s, time.perf_counter()
        left = max(len(r.prompt) for r in rows)
        while left > 0:
            # Several short chunks cost less than a long one that is mostly padding.
            chunk = PREFILL_CHUNKS[-1] if left > PREFILL_CHUNKS[-1] // 2 else PREFILL_CHUNKS[0]
            state = programs.prefill_chunk(state, chunk, drafts)
            left -= chunk
        state, report = programs.first_token(state)
        report = jax.device_get(report)
        prefill_s = time.perf_counter() - began - (programs.compile_s - compiled)
        decode_s = 0.0
        yield take(rows, report)
        while any(r.finish_reason is None for r in rows):
            waited, began = programs.compile_s, time.perf_counter()
            state, report = programs.decode(state, rounds, settings, drafts)
            report = jax.device_get(report)
            decode_s += time.perf_counter() - began - (programs.compile_s - waited)
            yield take(rows, report)
        timings = Timings(prefill_s, decode_s, programs.compile_s - compiled)
        record = programs.fetch(state.logprobs)
        yield [self._completion(i, row, record, timings) for i, row in enumerate(rows)]

    @staticmethod
    def _completion(i: int, row: Row, record, timings: Timings) -> Completion:
        entries, wanted = None, row.params.logprobs
        if wanted is not None:
            entries = []
            for at, token in enumerate(row.token_ids, len(row.prompt)):
                ids, values = record.ids[i, at, :wanted], record.values[i, at, :wanted]
                top = {int(t): float(v) for t, v in zip(ids, values, strict=True)}
                entries.append({"token_id": token, "logprob": float(record.chosen[i, at]), "top": top})
        text = row.text.text if row.text else None
        return Completion(row.prompt, row.token_ids, text, row.finish_reason, row.accepted, entries, timings)
