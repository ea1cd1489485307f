"""Generation: what `LLM` does with prompts, all at once or as a stream."""

import copy
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from math import isnan
from random import Random
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tqdm import tqdm

from dflash_jax.argument_checks import checked, plain
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.executables import Executables
from dflash_jax.engine.vision_encoder import VisionEncoder
from dflash_jax.errors import EngineError, InputError
from dflash_jax.frontend.chat_template import template_options
from dflash_jax.frontend.media import by_kind, media_parts
from dflash_jax.frontend.outputs import Completion, vllm_logprobs
from dflash_jax.frontend.prompts import Prompt, Prompts, split_conversations, split_prompts
from dflash_jax.frontend.reasoning import ReasoningSplitter, is_cut_in_thought, is_open, split_reasoning
from dflash_jax.frontend.sequence import Piece, TextSequence
from dflash_jax.frontend.sync_engine import PAUSED, SyncEngine
from dflash_jax.media.parts import split_media
from dflash_jax.sampling_params import SamplingParams

T = TypeVar("T")
# Whether there is a bar, or what makes one: tqdm or a function with its keywords.
Progress: TypeAlias = bool | Callable[..., Any]


class ChatPiece(NamedTuple):
    """The next text of an answer: of its reasoning, of what follows, or of both.

    Attributes:
        reasoning: Text of the thought.
        text: Text of the answer.
    """

    reasoning: str
    text: str


def _split(completion: Completion, is_started: bool) -> Completion:
    """The answer to a conversation with its reasoning apart; ``is_started``: whether the prompt has opened it."""
    outputs = []
    for output in completion.outputs:
        reasoning, text = split_reasoning(output.text, is_started)
        outputs.append(replace(output, reasoning=reasoning, text=text))
    return replace(completion, outputs=outputs, reasoning=outputs[0].reasoning, text=outputs[0].text)


def _either(name: str, value: T | None, other: str, other_value: T | None) -> T | None:
    """The value of an argument with two names. Raises InputError where both are given."""
    if value is not None and other_value is not None:
        raise InputError(f"{name} and {other} are one argument: give one of them")
    return other_value if value is None else value


def _params_of(prompts: Sequence, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """The parameters of each prompt. Raises InputError where they are not as many."""
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
    if len(each) != len(prompts):
        raise InputError(f"{len(each)} SamplingParams for {len(prompts)} prompts: give one, or one each")
    return each


class Generation(Prompts):
    """Continues prompts on an engine. The attributes are documented with `LLM`."""

    programs: Executables
    plain_programs: Executables
    encoder: VisionEncoder | None
    reproducible: bool
    is_paused: bool
    load: Callable[[], None]
    _sync_engine: SyncEngine
    _request_ids: count
    # Of requests that have no seed; None: each gets a random one.
    _seeds: Random | None

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
        progress: Progress | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress | None = None,
    ) -> list[Completion]:
        """Continues every prompt, as many at a time as there are slots.

        Args:
            prompts: A prompt, or a list of them. A prompt is text, token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``. Beside either, ``"multi_modal_data": {"image": [...], "video": [...]}``
                has images and videos (paths, bytes, PIL images, frames), for each of which the prompt has one pad.
            params: How they are continued; one for all, or one for each.
            block_size: Overrides the LLM's for this call; 1 decodes plainly.
            progress: Whether to show a bar on stderr, or a callable that makes the bar, with tqdm's keywords and
                methods; None shows one for more than eight prompts, on a terminal.
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
        make_bar = progress if callable(progress) else partial(tqdm, disable=not progress)
        with closing(make_bar(total=len(sequences), unit="prompt")) as bar:
            for _ in self._finished([group for _, group in groups]):
                bar.update()
                if progress:
                    bar.set_postfix_str(f"{self.tokens_per_s(sequences):.0f} tok/s", refresh=False)
        return [self._completion(text, group) for text, group in groups]

    @checked("prompts", "continuations")
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[list[float]]:
        """Log-probabilities of given continuations. No token is drawn.

        Args:
            prompts: As of `generate`.
            continuations: One for each prompt: token ids, or text, which is encoded by itself. One without tokens gets
                an empty list.
            params: How they were drawn; one for all, or one for each. ``logprobs_mode`` and ``temperature`` count:
                "raw_logprobs" are log_softmax(logits), "processed_logprobs" and "scaled_logprobs" are
                log_softmax(logits / temperature) as a trainer computes them, without penalties, biases and cuts; at
                temperature 0 they are raw.

        Returns:
            For each prompt, the log-probability of each token of its continuation.

        Raises:
            InputError: A prompt, continuation or parameter is wrong, or the memory is not enough.
        """
        firsts, lasts = split_prompts(prompts), split_prompts(continuations, "continuations")
        if len(lasts) != len(firsts):
            raise InputError(f"{len(lasts)} continuations for {len(firsts)} prompts: give one each")
        groups, sizes = list[list[TextSequence]](), list[int]()
        for i, each in enumerate(_params_of(firsts, params)):
            each = self.defaults.fill(each)
            assert each.logprobs_mode is not None
            if each.logprobs_mode.endswith("logits"):
                raise InputError(f"logprobs_mode is {each.logprobs_mode}: score() gives log-probabilities")
            _, ids, media = self._encoded(firsts[i], f"prompts[{i}]")
            more = self._continuation(lasts[i], f"continuations[{i}]")
            sizes.append(len(more))
            # With a seed, none of the LLM's is taken.
            fields = {"temperature": each.temperature, "max_tokens": 0, "prompt_logprobs": 0, "seed": 0}
            is_scaled = each.logprobs_mode != "raw_logprobs"
            sequence = self.new_sequence([*ids, *more], SamplingParams(**fields), scales_prompt=is_scaled, **media)
            groups.append([sequence] if more else [])
        deque(self._finished([group for group in groups if group]), maxlen=0)
        scores = [[entry["logprob"] for each in group for entry in each.request.prompt_entries] for group in groups]
        return [each[len(each) - size :] for each, size in zip(scores, sizes, strict=True)]

    def _continuation(self, text: Prompt, name: str) -> list[int]:
        """Token ids of a continuation, which may be empty."""
        if isinstance(text, str) and self.tokenizer is not None:
            self.check_length(text, name)
            return self.encode_plain(text, name)
        ids = plain(text)
        return [] if isinstance(ids, Sequence) and not ids else self.encode(text, name)

    @checked("messages")
    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        thinking: bool | None = None,
        block_size: BlockSize | None = None,
        progress: Progress | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
    ) -> list[Completion]:
        """Answers one conversation, or each of several.

        Args:
            messages: ``{"role", "content"}`` of each message of a conversation, or a list of conversations. A content
                is text, or a list of parts such as ``{"type": "text", "text": …}``, ``{"type": "image", "image":
                a path, bytes or a PIL image}``, ``{"type": "image_url", "image_url": {"url": …}}``, and the same of
                videos.
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
        prompts = self._chat_prompts(messages, thinking, options)
        starts = [is_open(prompt["prompt"]) for prompt in prompts]
        if continue_final_message:
            lasts = [talk[-1].get("content") for talk in split_conversations(messages)]
            starts = [isinstance(content, str) and is_cut_in_thought(content) for content in lasts]
        completions = self.generate(prompts, params, block_size, progress)
        return [_split(each, is_started) for each, is_started in zip(completions, starts, strict=True)]

    @checked("messages")
    def stream_chat(
        self,
        messages: Sequence,
        params: SamplingParams | None = None,
        thinking: bool | None = None,
        *,
        chat_template_kwargs: dict | None = None,
        tools: list[dict] | None = None,
    ) -> Iterator[ChatPiece]:
        """Yields the answer to one conversation as it is generated, its reasoning apart; arguments as for `chat`."""
        options = template_options(None, chat_template_kwargs, False) | {"tools": tools}
        prompts = self._chat_prompts(messages, thinking, options)
        if len(prompts) != 1:
            raise InputError(f"{len(prompts)} conversations: a stream is of one: use chat()")
        splitter = ReasoningSplitter(is_open(prompts[0]["prompt"]))

        def pieces() -> Iterator[ChatPiece]:
            for piece in self.pieces(prompts[0], params):
                split = splitter.push(piece.text) if isinstance(piece, Piece) else splitter.finish()
                if any(split):
                    yield ChatPiece(*split)

        return pieces()

    def _chat_prompts(self, messages: Sequence, thinking: bool | None, options: dict) -> list[dict]:
        """Conversations as `generate` takes them."""
        talks = [split_media(talk) for talk in split_conversations(messages)]
        if any(parts for _, parts in talks):
            self.media_reader()
        texts = [self.render_chat(talk, thinking, **options) for talk, _ in talks]
        for i, text in enumerate(texts):
            self.check_length(text, f"the text of messages[{i}]" if len(texts) > 1 else "the text of messages")
        return [
            {"prompt": text, "prompt_token_ids": self.encode_plain(text), "multi_modal_data": by_kind(parts)}
            for text, (_, parts) in zip(texts, talks, strict=True)
        ]

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

    def _completion(self, text: str | None, group: list[TextSequence]) -> Completion:
        """The result of a prompt whose sequences have ended."""
        completions, first = [sequence.completion() for sequence in group], group[0].request
        outputs = [completion.output(i, self._text_of) for i, completion in enumerate(completions)]
        fields = {"prompt": text, "request_id": str(next(self._request_ids)), "outputs": outputs}
        if first.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [None, *vllm_logprobs(first.prompt_entries, self._text_of)]
        return replace(completions[0], **fields)

    def _text_of(self, token: int) -> str | None:
        return self.tokenizer.token_bytes(token).decode(errors="replace") if self.tokenizer else None

    def _sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        block_size: BlockSize | None = None,
        **options,
    ) -> list[tuple[str | None, list[TextSequence]]]:
        """`_sequences_of` of every prompt."""
        several = split_prompts(prompts)
        pairs = enumerate(zip(several, _params_of(several, params), strict=True))
        return [self._sequences_of(prompt, f"prompts[{i}]", one, block_size, **options) for i, (prompt, one) in pairs]

    def _sequences_of(
        self, prompt: Prompt, name: str, params: SamplingParams, block_size: BlockSize | None, **options
    ) -> tuple[str | None, list[TextSequence]]:
        """(text of a prompt, None where it was not given as text, and its n sequences)."""
        text, ids, media = self._encoded(prompt, name)
        sequences = [self.new_sequence(ids, each, block_size, **media, **options) for each in self._choices(params)]
        return text, sequences

    def _encoded(self, prompt: Prompt, name: str) -> tuple[str | None, list[int], dict[str, Any]]:
        """(text of a prompt, None where it was not given as text, its token ids, and its images and videos)."""
        fields = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        if isinstance(text := fields.get("prompt"), str) and fields.get("prompt_token_ids") is None:
            self.check_length(text, name)
        ids, options = self.encode(prompt, name), {}
        if fields.get("multi_modal_data"):
            ids, media = self.with_media(ids, media_parts(fields["multi_modal_data"], name))
            assert self.encoder is not None
            options["media"] = self.encoder.prompt_media(media)
        return text if isinstance(text, str) else None, ids, options

    def _choices(self, params: SamplingParams) -> list[SamplingParams]:
        """The parameters of each of the n continuations of a prompt, of which the first has its log-probabilities."""
        seed = params.seed
        if seed is None and self._seeds is None and params.n > 1:
            seed = int.from_bytes(os.urandom(4), "little")
        seeds = [None if seed is None else (seed + i) % 2**32 for i in range(params.n)]
        first, *others = [replace(params, n=1, seed=each) for each in seeds]
        return [first, *(replace(each, prompt_logprobs=None) for each in others)]

    def _submit(self, groups: list[list[TextSequence]]) -> None:
        """Submits the sequences of prompts. A call that is refused takes none of the LLM's seeds."""
        self.load()
        if self.is_paused:
            raise EngineError(PAUSED)
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
