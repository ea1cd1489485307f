"""From prompts to sequences: the part of `LLM` that needs no engine, and no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dflash_jax.argument_checks import check_type, has_type, is_text, plain, shown
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.media import UnencodedMedia
from dflash_jax.engine.request import MaskProvider, RequestLimits, check_prompt
from dflash_jax.engine.token_rules import CombinedMasks, DraftRecord, Rules, ThinkingBudget, TokenRules
from dflash_jax.errors import InputError
from dflash_jax.frontend.media import MediaReader
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.media.parts import MediaPart
from dflash_jax.models.config import ModelConfig
from dflash_jax.sampling_params import SamplingParams

S = TypeVar("S", bound=TextSequence)
# A prompt: text, token ids, or vLLM's dict of either.
Prompt: TypeAlias = str | Sequence[int] | np.ndarray | Mapping[str, Any]
PROMPT_FORM = 'a string, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
# Keys of a prompt that is a dict.
PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")
MESSAGES_FORM = 'it must be a list of messages such as {"role": "user", "content": "…"}, or a list of such lists'


def split_prompts(prompts: Any, name: str = "prompts") -> list[Prompt]:
    """The prompts of a call: one alone, as text, token ids or a dict, or several in a list.

    Args:
        prompts: The prompts.
        name: Names them in errors.

    Raises:
        InputError: The form is none of these. What is in the list is not checked.
    """
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple | range):
        raise InputError(f"{name} is {shown(prompts)}: it must be {PROMPT_FORM}, or a list of these")
    is_one = bool(prompts) and has_type(prompts[0], int)
    return [list(prompts)] if is_one else list(prompts)  # pyright: ignore[reportReturnType]


def split_conversations(messages: Any) -> list[list[dict]]:
    """The conversations of a call: one alone, or several in a list. Raises InputError for another form."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InputError(f"messages is {shown(messages)}: {MESSAGES_FORM}")
    several = messages if isinstance(messages[0], list | tuple) else [messages]
    for conversation in several:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise InputError(f"messages has {shown(conversation)}: {MESSAGES_FORM}")
        for message in conversation:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InputError(f"messages has {shown(message)}: {MESSAGES_FORM}")
    return [list(conversation) for conversation in several]


def _checked_text(text: str, name: str) -> str:
    """The text. Raises InputError for one that UTF-8 cannot hold, which no tokenizer reads."""
    if not is_text(text):
        raise InputError(f"{name} is {shown(text)}: it is not text that UTF-8 can hold")
    return text


def _bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, and, as in vLLM, of the word after a space.

    The latter only where they are as many, with another first one.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise InputError("bad_words need a tokenizer, and this checkpoint has none: use logit_bias")
    result = []
    for word in words:
        plain, spaced = (tokenizer.encode_word(space + word.lstrip()) for space in ("", " "))
        if not plain:
            raise InputError(f"bad_words has {word!r}: it must have a character beside spaces")
        result.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            result.append(spaced)
    return tuple(result)


class Prompts:
    """Encodes prompts, checks their parameters and makes sequences. The attributes are documented with `LLM`."""

    config: ModelConfig
    draft_places: dict[str, int]
    directory: Path
    tokenizer: Tokenizer | None
    defaults: SamplingDefaults
    block_size: BlockSize
    largest_block: int
    max_len: int
    media: MediaReader | None
    slots: int
    dtype: str

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        return RequestLimits(self.max_len, self.largest_block)

    def encode(self, prompt: Prompt, name: str = "prompt") -> list[int]:
        """Token ids of a prompt; token ids are checked and returned.

        Args:
            prompt: Text, token ids, or a dict of either under "prompt" or "prompt_token_ids".
            name: Names the prompt in errors.

        Raises:
            InputError: It is neither, is empty, or has ids outside of the vocabulary.
        """
        if isinstance(prompt, Mapping):
            if unknown := [key for key in prompt if key not in PROMPT_KEYS]:
                raise InputError(f"{name} has {shown(unknown[0])}: it must be {PROMPT_FORM}")
            ids = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if ids is None else ids  # pyright: ignore[reportAssignmentType]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("this checkpoint has no tokenizer: give token ids")
            ids = self.tokenizer.encode(_checked_text(prompt, name))
        else:
            values = plain(prompt)
            if not has_type(values, Sequence[int]):
                raise InputError(f"{name} is {shown(prompt)}: it must be {PROMPT_FORM}")
            ids = list(map(int, values))
        vocab = self.config.vocab_size
        outside = [i for i in ids if not 0 <= i < vocab]
        if outside:
            raise InputError(f"prompt id {shown(outside[0])} is out of vocabulary: ids are 0 to {vocab - 1}")
        check_prompt(ids)
        return ids

    def media_reader(self) -> MediaReader:
        """Reads images and videos. Raises InputError for a model that takes none."""
        if self.media is None:
            raise InputError(
                "images and videos are not possible: the model is one of text, or runs with language_model_only "
                "(--language-model-only)"
            )
        return self.media

    def with_media(self, ids: Sequence[int], parts: Sequence[MediaPart]) -> tuple[list[int], UnencodedMedia]:
        """Puts images and videos into a prompt that has one pad for each.

        Args:
            ids: Token ids.
            parts: The images and videos, in order; at least one.

        Returns:
            As of `MediaReader.place`.

        Raises:
            InputError: The model takes no media, one cannot be read, or the numbers of pads and media differ.
        """
        reader = self.media_reader()
        reader.limits.check_counts(part.kind for part in parts)
        return reader.place(ids, [reader.read(part) for part in parts])

    def check_length(self, text: str, name: str = "prompt") -> None:
        """Refuses a text whose length alone shows that it has more tokens than a request may have, before it is read.

        Args:
            text: Not yet tokenised.
            name: Names it in errors.

        Raises:
            InputError: It does not fit.
        """
        # A token has at least one character, and the longest of the vocabulary is known only after a while.
        if self.tokenizer is None or len(text) <= self.max_len or (longest := self.tokenizer.longest_token) is None:
            return
        if len(text) > (most := longest * self.max_len):
            fits = f"at most {self.max_len} tokens fit, which have {most} characters at most"
            raise InputError(f"{name} has {len(text)} characters: {fits}")

    def encode_chat(
        self, messages: list[dict], thinking: bool | None = None, tools: list[dict] | None = None
    ) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template."""
        return self.encode_plain(self.render_chat(messages, thinking, tools=tools))

    def encode_plain(self, text: str, name: str = "the text of messages") -> list[int]:
        """Token ids of a text without special tokens added, such as a template's. Raises InputError for no UTF-8."""
        assert self.tokenizer is not None
        return self.tokenizer.encode_plain(_checked_text(text, name))

    def render_chat(self, messages: list[dict], thinking: bool | None = None, **options) -> str:
        """The text of a conversation through the checkpoint's chat template; options as in `Tokenizer.render_chat`."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so it has no chat template: give token ids")
        (conversation,) = split_conversations([messages] if messages and not isinstance(messages, str) else messages)
        return self.tokenizer.render_chat(conversation, thinking, **options)

    def sequence(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        block_size: BlockSize | None = None,
        *,
        must_end: bool = False,
        kind: type[S] = TextSequence,
        **options,
    ) -> S:
        """A checked prompt with its parameters, without masks.

        Args:
            prompt: Text or token ids.
            params: How it is continued; n must be 1. A max_tokens of None becomes as many as fit.
            block_size: Overrides the LLM's.
            must_end: Whether the checkpoint's stop ids end the text in any case: that of a form must be able to end.
            kind: What is made.
            **options: Further fields of the `TextSequence` and its `Request`.

        Raises:
            InputError: The prompt or a parameter is wrong.
        """
        check_type("params", params, SamplingParams)
        if params.n > 1:
            raise InputError(f"n is {params.n}: a sequence is one continuation: give n=1, or use generate()")
        if isinstance(prompt, str):
            self.check_length(prompt)
        ids, filled = self.encode(prompt), self.defaults.fill(params)
        if filled.max_tokens is None:
            # One at least: a prompt that leaves no room is refused below.
            filled = replace(filled, max_tokens=max(self.max_len - len(ids), filled.min_tokens, 1))
        filled.check_vocabulary(self.config.vocab_size)
        if (filled.stop or filled.stop_regex) and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        block_size = self.block_size if block_size is None else block_size
        stops = self.defaults.stops(filled, must_end=must_end)
        self.limits.check(ids, filled, block_size, stops)
        return kind(ids, filled, stops, self.tokenizer, block_size=block_size, **options)

    def new_sequence(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        block_size: BlockSize | None = None,
        *,
        mask: MaskProvider | None = None,
        must_end: bool | None = None,
        budget: ThinkingBudget | None = None,
        records_drafts: bool = False,
        **options,
    ) -> TextSequence:
        """A prompt as an engine takes it.

        Args:
            prompt: Text or token ids.
            params: As of `sequence`.
            block_size: As of `sequence`.
            mask: Masks beside those that follow from ``params``.
            must_end: Whether the checkpoint's stop ids always end the text; None: where there is a ``mask``.
            budget: The bound of the thought.
            records_drafts: Whether pieces have the drafts of each round. Each round is then a dispatch of its own; the
                tokens are the same.
            **options: As of `sequence`.

        Raises:
            InputError: The prompt or a parameter is wrong.
        """
        vocab = self.config.vocab_size
        record = DraftRecord(vocab) if records_drafts else None
        must_end = mask is not None if must_end is None else must_end
        sequence = self.sequence(prompt, params, block_size, must_end=must_end, draft_record=record, **options)
        request = sequence.request
        filled, bad_words = request.params, _bad_words(request.params.bad_words, self.tokenizer)
        allowed = None if filled.allowed_token_ids is None else tuple(filled.allowed_token_ids)
        rules = Rules(filled.min_tokens, tuple(request.stops), bad_words, allowed, budget)
        masks = [TokenRules(rules, vocab) if rules.are_needed else None, mask, record]
        needed = [each for each in masks if each is not None]
        request.mask = CombinedMasks(needed) if len(needed) > 1 else next(iter(needed), None)
        return sequence
