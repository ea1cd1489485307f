"""What comes back for a prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """When a prompt was submitted, got a slot, was in the caches, had its first token and its last: seconds on a clock
    that stands still while programs are compiled. compile_s: what it waited for compilation."""

    submitted: float
    admitted: float
    prefilled: float
    first_token: float
    finished: float
    compile_s: float

    @property
    def prefill_s(self) -> float:
        return self.prefilled - self.admitted

    @property
    def decode_s(self) -> float:
        return self.finished - self.prefilled


@dataclass(frozen=True)
class Completion:
    """One prompt's result.

    token_ids: the new tokens, with the stop token where one ended the row. text: None without a tokenizer.
    finish_reason: "stop" or "length". acceptance_lengths: tokens that each round yielded. logprobs, where asked for:
    per token ``{"token_id", "logprob", "top": {token id: logprob}}``, and ``"named"``, as ``"top"``, for
    logprob_token_ids. cached_tokens: of the prompt, those that were known from earlier prompts.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_lengths: list[int]
    logprobs: list[dict] | None
    timings: Timings
    cached_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return sum(self.acceptance_lengths) / max(1, len(self.acceptance_lengths))
