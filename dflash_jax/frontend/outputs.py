"""Results of a prompt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Timings:
    """Seconds on a clock that stands still during compilation.

    Attributes:
        submitted: Submission.
        admitted: Assignment of a slot.
        prefilled: End of the prompt's prefill.
        first_token: First new token.
        finished: Last token.
        compile_s: Seconds of compilation that the prompt waited for, which are not part of the others.
    """

    submitted: float
    admitted: float
    prefilled: float
    first_token: float
    finished: float
    compile_s: float

    @property
    def prefill_s(self) -> float:
        """Seconds from the slot to the end of prefill."""
        return self.prefilled - self.admitted

    @property
    def decode_s(self) -> float:
        """Seconds from the end of prefill to the last token."""
        return self.finished - self.prefilled


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        prompt_ids: The prompt's token ids.
        token_ids: The new tokens, with the stop token where one ended the text.
        text: Their text; None without a tokenizer.
        finish_reason: "stop" or "length".
        acceptance_lengths: Tokens that each round yielded.
        logprobs: Where asked for, ``{"token_id", "logprob", "top": {token id: logprob}}`` for each token, and
            ``"named"``, of the same form as ``"top"``, for logprob_token_ids. Natural logarithms.
        timings: When the prompt reached each stage.
        cached_tokens: Prompt tokens that came from the prefix cache.
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
        """Mean tokens of a round."""
        return sum(self.acceptance_lengths) / max(1, len(self.acceptance_lengths))
