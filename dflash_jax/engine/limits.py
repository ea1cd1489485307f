"""Limits of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_jax.argument_checks import shown
from dflash_jax.engine.config import BlockSize
from dflash_jax.errors import InputError
from dflash_jax.sampling_params import MAX_LOGPROBS, MAX_STOPS, SamplingParams


def check_prompt(prompt: Sequence[int]) -> None:
    """Raises InputError for an empty prompt."""
    if not prompt:
        raise InputError("a prompt is empty: it must have at least one token")


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        positions: Prompt and new tokens together.
        block_size: The largest block size; 1 where there is no drafter.
    """

    positions: int
    block_size: int

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        block_size: BlockSize,
        stops: Sequence[int],
        prompt_logprobs: int | None,
    ) -> None:
        """Raises InputError, which names the value and the limit, for a request that exceeds one.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            block_size: Tokens that a round may yield, or "auto".
            stops: All token ids that end the text.
            prompt_logprobs: Number of likeliest tokens to report for each prompt token.
        """
        check_prompt(prompt)
        if params.max_tokens is None:
            raise InputError("max_tokens is None: it must be a whole number; LLM.new_sequence replaces None")
        need = len(prompt) + params.max_tokens
        if need > self.positions:
            tokens = f"{len(prompt)} prompt tokens and {shown(params.max_tokens)} new ones are {shown(need)}"
            raise InputError(f"{tokens}: at most {self.positions} fit")
        self.check_block_size(block_size)
        if len(stops) > MAX_STOPS:
            message = f"stop_token_ids and the checkpoint's own are {len(stops)}: at most {MAX_STOPS} are possible"
            raise InputError(message)
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", prompt_logprobs)):
            if (count or 0) > MAX_LOGPROBS:
                raise InputError(f"{name} is {shown(count)}: it must be at most {MAX_LOGPROBS}")

    def check_block_size(self, block_size: BlockSize) -> None:
        """Raises InputError for a block size that is neither possible nor "auto"."""
        if block_size == "auto":
            return
        if not isinstance(block_size, int) or not 1 <= block_size <= self.block_size:
            reason = "the drafter's own" if self.block_size > 1 else "there is no drafter"
            given = block_size if isinstance(block_size, str) else shown(block_size)
            raise InputError(f"block size {given}: it must be 1 to {self.block_size} ({reason}), or auto")
