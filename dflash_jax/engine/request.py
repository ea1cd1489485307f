"""Requests to the engine, what they may ask for, and the events that it returns."""

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import isnan
from typing import Protocol

import numpy as np

from dflash_jax.argument_checks import shown
from dflash_jax.engine.config import BlockSize
from dflash_jax.engine.media import PromptMedia
from dflash_jax.engine.statistics import Round
from dflash_jax.errors import InputError
from dflash_jax.sampling_params import MAX_LOGPROBS, MAX_STOPS, SamplingParams

# The version of the weights that an engine begins with, as SGLang names it.
FIRST_VERSION = "default"
# The slot of a request that has not been admitted.
NO_SLOT = -1


class Monitor(Protocol):
    """Callback on new tokens (stop strings, streaming)."""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Gets new tokens, each once. A number ends the request after that many of them; None lets it go on."""


class MaskProvider(Protocol):
    """Masks of the tokens that may come next, for example those of a grammar.

    `ask` and `answer` are separate so that masks are computed while the device works, and so that a late mask delays
    its own request only. Every method may raise InputError, which ends the request with that error.
    """

    @abstractmethod
    def take(self, tokens: Sequence[int]) -> None:
        """Advances by tokens that were drawn."""

    @abstractmethod
    def ask(self, drafts: Sequence[int]) -> None:
        """Begins to compute the masks after the tokens taken so far, and after each further draft."""

    @abstractmethod
    def answer(self, timeout_s: float) -> np.ndarray | None:
        """The masks that were asked for.

        Args:
            timeout_s: Seconds to wait for them.

        Returns:
            Packed bits uint32 [drafts + 1, ceil(V / 32)]; None where they are not ready in time. The mask after a
            draft that is itself forbidden is arbitrary.
        """

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether everything is allowed from here on."""

    @abstractmethod
    def close(self) -> None:
        """Frees what the masks hold. The request has ended."""


class ReadyMasks:
    """The part of a `MaskProvider` that computes masks at once.

    A subclass implements ``take`` and `masks`.
    """

    @property
    def is_over(self) -> bool:
        """See `MaskProvider`; False unless a subclass says otherwise."""
        return False

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """The packed bits that `MaskProvider.answer` returns for ``drafts``."""
        raise NotImplementedError

    def ask(self, drafts: Sequence[int]) -> None:
        """See `MaskProvider`."""
        self._drafts = drafts

    def answer(self, timeout_s: float) -> np.ndarray:
        """See `MaskProvider`; never late."""
        return self.masks(self._drafts)

    def close(self) -> None:
        """See `MaskProvider`."""
        self._drafts = ()


@dataclass(frozen=True)
class Times:
    """Seconds on the engine's clock, which stands still during compilation; nan where not yet reached.

    Attributes:
        submitted: Submission.
        admitted: Assignment of a slot.
        prefilled: End of the prompt's prefill.
        first_token: First new token.
        finished: End of the request.
    """

    submitted: float = float("nan")
    admitted: float = float("nan")
    prefilled: float = float("nan")
    first_token: float = float("nan")
    finished: float = float("nan")

    @property
    def is_submitted(self) -> bool:
        """Whether the request was submitted."""
        return not isnan(self.submitted)

    @property
    def ready(self) -> float:
        """When the prompt was in the caches."""
        return self.admitted if isnan(self.prefilled) else self.prefilled


@dataclass(eq=False)
class Request:
    """A prompt to be continued.

    Attributes:
        prompt: Token ids, at least one.
        params: Sampling parameters with no None among the sampling options.
        stops: Token ids that end the text.
        priority: Lower values go first, of one client.
        client: Whose request it is; clients take turns (`engine.turns`).
        block_size: Tokens that a round may yield; "auto" leaves the choice to the engine.
        draft_window_size: The last positions that the drafter sees; None: those of the engine's settings, which are the
            most in any case.
        draft_sink_size: The first positions that it sees beside them, where draft_window_size is given.
        monitor: Callback on new tokens.
        mask: Masks of the tokens that may come next.
        scales_prompt: Whether the log-probabilities of the prompt are of the logits over the temperature; only without
            new tokens.
        cache_salt: Only requests with the same salt share prefixes.
        media: The images and videos of the prompt; None for text.
        slot: The slot, once admitted; `NO_SLOT` before. This field and those below are written by the engine.
        tokens: New tokens so far. A request that is submitted with tokens goes on after them.
        resumed: How many tokens it was submitted with, or had when it last gave up its slot.
        order: Number of its submission.
        level: Its priority, where priorities of clients are trusted; otherwise 0.
        ahead: New tokens at most that started dispatches bring and that are not in ``tokens``.
        swapped: Its pages, while they are on the host, and what else its slot had if that was taken; None otherwise.
        must_recompute: Whether its pages are given up without a copy. It goes back into the queue.
        is_recomputed: Whether its pages were given up once. What the prefix cache then has of it is not counted.
        prefilled: Prompt tokens in the caches.
        cached: Prompt tokens that came from the prefix cache.
        prompt_entries: Log-probabilities of the prompt's tokens but the first, as in `Event.logprobs`.
        finish_reason: "stop", "length", "abort" or "error" at the end.
        times: When the request reached each stage.
    """

    prompt: list[int]
    params: SamplingParams
    stops: Sequence[int] = ()
    priority: int = 0
    client: Hashable = None
    block_size: BlockSize = "auto"
    draft_window_size: int | None = None
    draft_sink_size: int = 0
    monitor: Monitor | None = None
    mask: MaskProvider | None = None
    scales_prompt: bool = False
    cache_salt: str = ""
    media: PromptMedia | None = None

    slot: int = field(default=NO_SLOT, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    resumed: int = field(default=0, init=False)
    order: int = field(default=0, init=False)
    level: int = field(default=0, init=False)
    ahead: int = field(default=0, init=False)
    swapped: object = field(default=None, init=False, repr=False)
    must_recompute: bool = field(default=False, init=False)
    is_recomputed: bool = field(default=False, init=False)
    prefilled: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    prompt_entries: list[dict] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    times: Times = field(default_factory=Times, init=False)

    @property
    def prompt_logprobs(self) -> int | None:
        """That of the parameters, which report ``logprob_token_ids``, too. With it, the prefix cache is not used."""
        return self.params.prompt_logprobs

    @property
    def is_read(self) -> bool:
        """Whether all that it asks for of its prompt is known, once the prompt is in the caches."""
        return self.prompt_logprobs is None or len(self.prompt_entries) == len(self.prompt) - 1

    def close(self) -> None:
        """Closes the mask. The engine closes the requests that are submitted."""
        if self.mask is not None:
            self.mask.close()

    @property
    def context(self) -> list[int]:
        """The prompt, and the tokens that it had when it was queued."""
        return [*self.prompt, *self.tokens[: self.resumed]]

    @property
    def is_resident(self) -> bool:
        """Whether it has a slot, and pages on the device where it needs some."""
        has_left = self.swapped is not None or self.must_recompute
        return self.slot != NO_SLOT and not has_left and self.finish_reason is None

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the order of requests: lower goes first."""
        return self.level, self.order

    @property
    def need(self) -> int:
        """Positions that the request takes at most."""
        assert self.params.max_tokens is not None, "max_tokens is not filled in"
        return len(self.prompt) + self.params.max_tokens


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
    ) -> None:
        """Raises InputError, which names the value and the limit, for a request that exceeds one.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            block_size: Tokens that a round may yield, or "auto".
            stops: All token ids that end the text.
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
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
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


@dataclass(frozen=True)
class Event:
    """What a dispatch brought to a request.

    Attributes:
        request: The request.
        tokens: New tokens.
        yielded: Tokens that each round yielded; they sum to the number of ``tokens``.
        logprobs: Where asked for, ``{"token_id", "logprob", "top"}`` for each token, and ``"named"`` for the params'
            logprob_token_ids. Natural logarithms.
        finish_reason: With the last event, why the request ended.
        error: With the finish reason "error", its cause: an InputError where the request itself is at fault.
        drafted: Drafts that each round verified; empty where none has any.
        drafter: The name of the drafter.
        version: The version of the weights that drew the tokens.
    """

    request: Request
    tokens: list[int]
    yielded: list[int]
    logprobs: list[dict] | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    drafted: Sequence[int] = ()
    drafter: str | None = None
    version: str = ""

    @property
    def rounds(self) -> Iterator[Round]:
        """The rounds, as `Rounds` counts them."""
        return zip(repeat(self.drafter), self.drafted or repeat(0), self.yielded, strict=False)
