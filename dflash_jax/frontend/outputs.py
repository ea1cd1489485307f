"""Results of a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


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


class WeightVersion(NamedTuple):
    """The weights that drew some of a continuation's tokens.

    Attributes:
        version: Their version, as `LLM.update_weights` has it.
        start: The first of the tokens.
        end: The place after the last one.
    """

    version: str
    start: int
    end: int


def extended(versions: Sequence[WeightVersion], version: str, end: int) -> list[WeightVersion]:
    """``versions`` of tokens, and ``version`` of those after them, up to ``end``."""
    *others, last = versions or [WeightVersion(version, 0, 0)]
    if last.version == version:
        return [*others, last._replace(end=end)]
    return [*versions, WeightVersion(version, last.end, end)]


class Logprob(NamedTuple):
    """A log-probability in vLLM's form.

    Attributes:
        logprob: The natural logarithm.
        rank: 1 for the likeliest token; None where the token is not among the likeliest that were asked for.
        decoded_token: The token's text; None without a tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


def vllm_logprobs(entries: Sequence[dict], text_of: Callable[[int], str | None]) -> list[dict[int, Logprob]]:
    """Log-probabilities in vLLM's form: for each token its own and the likeliest, by token id."""
    result = []
    for entry in entries:
        ranks = {token: rank for rank, token in enumerate(sorted(entry["top"], key=lambda t: -entry["top"][t]), 1)}
        values = {entry["token_id"]: entry["logprob"], **entry["top"], **entry.get("named", {})}
        result.append({token: Logprob(v, ranks.get(token), text_of(token)) for token, v in values.items()})
    return result


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n continuations of a prompt, with the names of vLLM.

    Attributes:
        index: Which of the n, from 0.
        text: As in `Completion`; empty without a tokenizer.
        token_ids: As in `Completion`.
        finish_reason: As in `Completion`.
        stop_reason: As in `Completion`.
        logprobs: Where asked for, a dict of `Logprob` by token id for each token.
        cumulative_logprob: Sum of the log-probabilities of the tokens; None where they were not asked for.
        acceptance_lengths: As in `Completion`.
        timings: As in `Completion`.
        reasoning: As in `Completion`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    acceptance_lengths: list[int]
    timings: Timings
    reasoning: str | None = None


@dataclass(frozen=True)
class Completion:
    """The continuation of one prompt; for several (n of `SamplingParams`) the first, and all in ``outputs``.

    Attributes:
        prompt_ids: The prompt's token ids.
        token_ids: The new tokens, with the stop token where one ended the text.
        text: Their text; None without a tokenizer. Of `LLM.chat` without the reasoning.
        finish_reason: "stop" or "length"; "abort" where `LLM.pause` or `LLM.update_weights` has ended it.
        acceptance_lengths: Tokens that each round yielded.
        logprobs: Where asked for, ``{"token_id", "logprob", "top": {token id: logprob}}`` for each token, and
            ``"named"``, of the same form as ``"top"``, for logprob_token_ids. Natural logarithms.
        timings: When the prompt reached each stage.
        cached_tokens: Prompt tokens that came from the prefix cache.
        stop_reason: The stop string, expression or token id of the request that ended the text; None for any other end.
        prompt: The prompt's text; None where it was given as token ids.
        request_id: Numbers the prompts of an `LLM`, from "0".
        outputs: All continuations of the prompt, in the form of vLLM.
        finished: True: a completion has ended.
        reasoning: Of `LLM.chat`: the text of the thought, without its tags; None where there is none.
        prompt_logprobs: Where asked for, in the form of vLLM: a dict of `Logprob` by token id for each token of the
            prompt, and None for the first.
        weight_versions: The weights that drew the tokens, in order.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_lengths: list[int]
    logprobs: list[dict] | None
    timings: Timings
    cached_tokens: int = 0
    stop_reason: str | int | None = None
    prompt: str | None = None
    request_id: str = ""
    outputs: list[CompletionOutput] = field(default_factory=list, repr=False)
    finished: bool = True
    reasoning: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    weight_versions: list[WeightVersion] = field(default_factory=list)

    @property
    def prompt_token_ids(self) -> list[int]:
        """The name of ``prompt_ids`` in vLLM."""
        return self.prompt_ids

    @property
    def num_cached_tokens(self) -> int:
        """The name of ``cached_tokens`` in vLLM."""
        return self.cached_tokens

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of the tokens; None where they were not asked for."""
        return None if self.logprobs is None else sum(entry["logprob"] for entry in self.logprobs)

    def output(self, index: int, text_of: Callable[[int], str | None]) -> CompletionOutput:
        """This continuation in the form of vLLM.

        Args:
            index: Which of the prompt's it is.
            text_of: Gives a token's text.
        """
        return CompletionOutput(
            index,
            self.text or "",
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            None if self.logprobs is None else vllm_logprobs(self.logprobs, text_of),
            self.cumulative_logprob,
            self.acceptance_lengths,
            self.timings,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens of a round."""
        return sum(self.acceptance_lengths) / max(1, len(self.acceptance_lengths))
