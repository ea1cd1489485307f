"""From prompts to sequences: the part of `LLM` that an engine has no part in."""

from collections.abc import Sequence

from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.limits import RequestLimits, check_prompt
from dflash_jax.engine.request import MaskProvider
from dflash_jax.engine.token_rules import CombinedMasks, DraftRecord, ThinkingBudget, TokenRules
from dflash_jax.errors import InputError
from dflash_jax.frontend.rules import token_rules
from dflash_jax.frontend.sampling_defaults import SamplingDefaults
from dflash_jax.frontend.sequence import TextSequence
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.models.config import ModelConfig
from dflash_jax.models.drafting import DraftWindow
from dflash_jax.sampling_params import SamplingParams


class Prompts:
    """Encodes prompts, checks their parameters and makes sequences. The attributes are documented with `LLM`."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    defaults: SamplingDefaults
    block_size: BlockSize
    largest_block: int
    max_len: int
    draft_window: DraftWindow

    @property
    def limits(self) -> RequestLimits:
        """What a request may ask for."""
        return RequestLimits(self.max_len, self.largest_block)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; token ids are checked and returned."""
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
        check_prompt(ids)
        return ids

    def encode_chat(self, messages: list[dict], thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer, so it has no chat template: give token ids")
        return self.tokenizer.chat(messages, thinking)

    def new_sequence(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        block_size: BlockSize | None = None,
        *,
        mask: MaskProvider | None = None,
        budget: ThinkingBudget | None = None,
        records_drafts: bool = False,
        **options,
    ) -> TextSequence:
        """A prompt as an engine takes it.

        Args:
            prompt: Text or token ids.
            params: How it is continued.
            block_size: Overrides the LLM's.
            mask: Masks beside those that follow from ``params``. The checkpoint's stop ids then always end the text,
                since a text that is complete must be able to end.
            budget: The bound of the thought.
            records_drafts: Whether pieces have the drafts of each round. Each round is then a dispatch of its own; the
                tokens are the same.
            **options: Further fields of the `TextSequence` and its `Request`.

        Raises:
            InputError: The prompt or a parameter is wrong.
        """
        ids, filled = self.encode(prompt), self.defaults.fill(params)
        filled.check_vocabulary(self.config.vocab_size)
        if (filled.stop or filled.stop_regex) and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
        block_size = self.block_size if block_size is None else block_size
        stops = self.defaults.stops(filled, must_end=mask is not None)
        self.limits.check(ids, filled, block_size, stops, options.get("prompt_logprobs"))
        rules = token_rules(filled, stops, self.tokenizer, budget)
        if rules.are_needed:
            masks = TokenRules(rules, self.config.vocab_size)
            mask = masks if mask is None else CombinedMasks([masks, mask])
        if records_drafts:
            options["draft_record"] = record = DraftRecord(self.config.vocab_size)
            mask = record if mask is None else CombinedMasks([mask, record])
        window = {"draft_window_size": self.draft_window.size, "draft_sink_size": self.draft_window.sinks}
        return TextSequence(ids, filled, stops, self.tokenizer, block_size=block_size, mask=mask, **window, **options)
