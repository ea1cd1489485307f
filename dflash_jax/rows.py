"""A request with its text: what the library adds to the engine's tokens."""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_jax.engine.engine import EngineError
from dflash_jax.engine.request import Event, Request
from dflash_jax.params import Completion, SamplingParams, Timings
from dflash_jax.text import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What a dispatch brought to one prompt: the text and tokens since the last piece, and what each round yielded."""

    text: str
    token_ids: list[int]
    acceptance_lengths: list[int]


class Row:
    """One prompt on its way through the engine: its request, its text so far, and the pieces that nobody took yet.

    It watches its own tokens for stop strings.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[int],
        tokenizer: Tokenizer | None,
        **options,
    ):
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(os.urandom(4), "little"))
        self.text = Detokenizer(tokenizer, params.stop) if tokenizer else None
        monitor = self._watch if self.text else None
        self.request = Request(prompt, params, stops, monitor=monitor, **options)
        self.accepted: list[int] = []
        self.logprobs: list[dict] | None = None if params.logprobs is None else []
        self.pieces: deque[Piece] = deque()
        self.error: str | None = None
        self.compile_s = 0.0
        self._shown = 0

    def _watch(self, tokens: Sequence[int]) -> int | None:
        for i, token in enumerate(tokens, 1):
            self.text.push(token)
            if self.text.stopped:
                return i
        return None

    def take(self, event: Event) -> None:
        self.accepted += event.accepted
        self.error = event.error
        if event.logprobs is not None:
            self.logprobs += event.logprobs
        text = ""
        if self.text:
            if event.finish_reason:
                self.text.finish()
            text, self._shown = self.text.text[self._shown :], len(self.text.text)
        self.pieces.append(Piece(text, event.tokens, event.accepted))

    def raise_failure(self) -> None:
        """Raises EngineError where the engine failed it."""
        if self.error is not None:
            raise EngineError(self.error)

    def completion(self) -> Completion:
        r, times = self.request, self.request.times
        text = self.text.text if self.text else None
        timings = Timings(
            times.submitted, times.admitted, times.ready, times.first_token, times.finished, self.compile_s
        )
        return Completion(r.prompt, r.tokens, text, r.finish_reason, self.accepted, self.logprobs, timings, r.cached)
