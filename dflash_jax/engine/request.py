"""What an engine is asked, and what it tells."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

import numpy as np

from dflash_jax.sampling_params import SamplingParams


class Monitor(Protocol):
    """Watches a request's tokens from above: stop strings, say."""

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """Sees new tokens, each once. A number ends the request there: so many of these tokens are kept."""


class MaskProvider(Protocol):
    """Says which tokens may come next: a grammar, say.

    `ask` and `answer` are apart so that masks are computed while the device works, and so that one that is late delays
    its own request only. Any call may raise InputError, which ends the request with that error.
    """

    def take(self, tokens: Sequence[int]) -> None:
        """Tokens that were drawn."""

    def ask(self, drafts: Sequence[int]) -> None:
        """Begins to compute the masks behind what was taken, and behind each further draft."""

    def answer(self, timeout_s: float) -> np.ndarray | None:
        """What was asked for, packed bits uint32 [drafts + 1, ceil(V / 32)]; None where that is not there within
        ``timeout_s``. Behind a draft that is itself forbidden, anything."""

    @property
    def is_over(self) -> bool:
        """Whether everything is allowed from here on."""

    def close(self) -> None:
        """The request has ended."""


class ReadyMasks:
    """The part of a `MaskProvider` that computes masks at once: by ``masks(drafts)``, which a subclass has beside
    ``take``."""

    is_over = False

    def ask(self, drafts: Sequence[int]) -> None:
        self._asked = drafts

    def answer(self, timeout_s: float) -> np.ndarray:
        return self.masks(self._asked)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Times:
    """Seconds on the engine's clock, which stands still while programs are compiled; nan: not yet."""

    submitted: float
    admitted: float = float("nan")
    prefilled: float = float("nan")
    first_token: float = float("nan")
    finished: float = float("nan")

    @property
    def ready(self) -> float:
        """When the prompt was in the caches."""
        return self.admitted if isnan(self.prefilled) else self.prefilled


@dataclass(eq=False)
class Request:
    """A prompt to be continued.

    params and stops (token ids) filled in: nothing is None. priority: lower goes first. block_size: tokens a round may
    yield; "auto" leaves it to the engine. draft_window_size and draft_sink_size bound what the drafter sees. monitor
    and mask are optional. prompt_logprobs: log-probabilities of the prompt's own tokens, of so many likeliest ones and
    of the params' logprob_token_ids; then nothing of it is taken from known prefixes. cache_salt: prefixes are shared
    only between requests of one salt. The rest is the engine's: tokens so far; of the prompt, those in the caches,
    those that were there already, and log-probabilities of all but the first; "stop", "length", "abort" or "error" at
    the end.
    """

    prompt: list[int]
    params: SamplingParams
    stops: Sequence[int] = ()
    priority: int = 0
    block_size: int | str = "auto"
    draft_window_size: int | None = None
    draft_sink_size: int = 0
    monitor: Monitor | None = None
    mask: MaskProvider | None = None
    prompt_logprobs: int | None = None
    cache_salt: str = ""

    slot: int | None = field(default=None, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    prefilled: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    prompt_entries: list[dict] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    times: Times | None = field(default=None, init=False)

    def close(self) -> None:
        """Ends what its mask holds. The engine closes the requests that are submitted."""
        if self.mask is not None:
            self.mask.close()

    @property
    def need(self) -> int:
        """Positions it may come to."""
        return len(self.prompt) + self.params.max_tokens


@dataclass(frozen=True)
class Event:
    """What a dispatch brought to a request: new tokens, what each round of ``width`` yielded of them,
    log-probabilities where asked for (``{"token_id", "logprob", "top"}`` a token, and ``"named"`` for the params'
    logprob_token_ids), and at the end ``finish_reason`` (with ``error``: why, an InputError where the request itself is
    the reason)."""

    request: Request
    tokens: list[int]
    accepted: list[int]
    logprobs: list[dict] | None = None
    finish_reason: str | None = None
    error: Exception | None = None
    width: int = 1
