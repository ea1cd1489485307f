"""A request with its text: what the library adds to the engine's tokens."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dflash_jax.engine.request import Event, Request
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.outputs import Completion, Timings
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class Piece:
    """What a dispatch brought to one prompt: the text and tokens since the last piece, what each round yielded, where
    in ``text`` what each token showed ends and where in the whole text it begins (none without a tokenizer; a token
    that goes on with a character begins where that does), log-probabilities where asked for, and, with the last one,
    why it ended."""

    text: str
    token_ids: list[int]
    acceptance_lengths: list[int]
    ends: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logprobs: list[dict] | None = None
    finish_reason: str | None = None

    def joined(self, later: "Piece") -> "Piece":
        """This piece and the one behind it as one."""
        return Piece(
            self.text + later.text,
            self.token_ids + later.token_ids,
            self.acceptance_lengths + later.acceptance_lengths,
            self.ends + [len(self.text) + end for end in later.ends],
            self.starts + later.starts,
            None if self.logprobs is None else self.logprobs + (later.logprobs or []),
            later.finish_reason,
        )

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """The text by whether a draft brought it: of the n tokens of a round the last is the target's own."""
        is_draft = [i < n - 1 for n in self.acceptance_lengths for i in range(n)]
        found: list[tuple[str, bool]] = []
        for start, end, draft in zip([0, *self.ends], self.ends, is_draft, strict=False):
            if found and found[-1][1] == draft:
                found[-1] = found[-1][0] + self.text[start:end], draft
            else:
                found.append((self.text[start:end], draft))
        if rest := self.text[self.ends[-1] if self.ends else 0 :]:
            found.append((rest, False))
        return [segment for segment in found if segment[0]]


class TextSequence:
    """One prompt on its way through the engine: its request, its text so far, and the pieces that nobody took yet.

    It watches its own tokens for stop strings. One that is not ``streamed`` has no pieces, and without stop strings its
    text is made at its end. ``ends``: sees the text behind each token, what is new of it, and says whether it ends
    there. Like stop strings, that does not count behind the first min_tokens.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[int],
        tokenizer: Tokenizer | None,
        streamed: bool = True,
        ends: Callable[[str], bool] | None = None,
        **options,
    ):
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(os.urandom(4), "little"))
        self.text = None
        if tokenizer is not None:
            self.text = Detokenizer(
                tokenizer,
                params.stop,
                stop_regex=params.stop_regex,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        monitor = self._watch if self.text and (streamed or ends or params.stop or params.stop_regex) else None
        self._ends, self._has_ended = ends, False
        self.request = Request(prompt, params, stops, monitor=monitor, **options)
        self.is_streamed = streamed
        # What was told so far; the engine may be ahead of it.
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        self.logprobs: list[dict] | None = [] if params.wants_logprobs else None
        self.pieces: deque[Piece] = deque()
        self.error: Exception | None = None
        self.compile_s = 0.0
        # Rounds with drafts, and how many there were.
        self.drafts = self.draft_tokens = 0
        # Where in the text each token begins; filled where it is streamed.
        self.starts: list[int] = []
        # How much of the text has been told; where it ended behind each token of what was watched and not yet taken,
        # and where each of them begins.
        self._shown, self._watched = 0, deque()

    def _watch(self, tokens: Sequence[int]) -> int | None:
        ends, starts = [], []
        for token in tokens:
            known = len(self.text.text)
            starts.append(self.text.push(token) if self._is_shown(token) else self.text.end)
            ends.append(len(self.text.text))
            is_end = self._ends is not None and self._ends(self.text.text[known:])
            self._has_ended = is_end and len(self.request.tokens) + len(ends) > self.request.params.min_tokens
            if self.text.stopped or self._has_ended:
                break
        self._watched.append((ends, starts))
        return len(ends) if self.text.stopped or self._has_ended else None

    def _is_shown(self, token: int) -> bool:
        """Whether a token is part of the text: the one that ends it is not, unless that is asked for."""
        return self.request.params.include_stop_str_in_output or token not in self.request.stops

    def take(self, event: Event) -> None:
        self.token_ids += event.tokens
        self.accepted += event.accepted
        self.error = event.error
        if event.logprobs is not None:
            self.logprobs += event.logprobs
        if event.width > 1:
            self.drafts += len(event.accepted)
            self.draft_tokens += len(event.accepted) * (event.width - 1)
        if not self.is_streamed:
            self._take_end(event)
            return
        text, ends, starts = "", [], []
        if self.text:
            ends, starts = self._watched.popleft() if event.tokens else ([self._shown], [])
            if event.finish_reason:
                self.text.finish()
            upto = len(self.text.text) if event.finish_reason else ends[-1]
            text, ends = self.text.text[self._shown : upto], [end - self._shown for end in ends]
            self._shown = upto
        ends = ends if event.tokens else []
        self.starts += starts
        piece = Piece(text, event.tokens, event.accepted, ends, starts, event.logprobs, event.finish_reason)
        self.pieces.append(piece)

    def _take_end(self, event: Event) -> None:
        if self.text and event.finish_reason:
            if self.request.monitor is None:
                self.text.push(*(t for t in self.token_ids if self._is_shown(t)))
            self.text.finish()

    @property
    def told(self) -> str | None:
        """The text so far."""
        return self.text.text[: self._shown] if self.text else None

    @property
    def matched(self) -> str | int | None:
        """The stop string, expression or token that ended it; None where ``ends`` did."""
        if self.request.finish_reason != "stop":
            return None
        if self.text and self.text.stopped:
            return self.text.stop
        return None if self._has_ended else self.request.tokens[-1]

    def raise_failure(self) -> None:
        """Raises what ended it where that is an error: InputError where its own fault, else EngineError."""
        if self.error is not None:
            raise self.error

    def completion(self) -> Completion:
        r, times = self.request, self.request.times
        text = self.text.text if self.text else None
        timings = Timings(
            times.submitted, times.admitted, times.ready, times.first_token, times.finished, self.compile_s
        )
        return Completion(r.prompt, r.tokens, text, r.finish_reason, self.accepted, self.logprobs, timings, r.cached)
