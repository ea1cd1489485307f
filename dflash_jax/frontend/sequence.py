"""A request with its text: what the library adds to the engine's tokens."""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dflash_jax.engine.request import Event, Request
from dflash_jax.engine.statistics import Rounds
from dflash_jax.engine.token_rules import DraftRecord
from dflash_jax.frontend.detokenizer import Detokenizer
from dflash_jax.frontend.outputs import Completion, Timings, WeightVersion, extended
from dflash_jax.frontend.tokenizer import Tokenizer
from dflash_jax.sampling_params import SamplingParams


@dataclass(frozen=True)
class Piece:
    """What a dispatch brought to one prompt.

    Attributes:
        text: Text since the last piece.
        token_ids: Tokens since the last piece.
        acceptance_lengths: Tokens that each round yielded.
        ends: Where each shown token ends, in characters of ``text``; empty without a tokenizer.
        starts: Where each shown token begins, in characters of the whole text; a token that continues a character
            begins where the character does. Empty without a tokenizer.
        logprobs: Where asked for, one entry for each token, as in `Completion`.
        finish_reason: With the last piece, "stop" or "length".
        proposals: Where recorded, the tokens that each round drafted.
    """

    text: str
    token_ids: list[int]
    acceptance_lengths: list[int]
    ends: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logprobs: list[dict] | None = None
    finish_reason: str | None = None
    proposals: list[list[int]] | None = None

    def joined(self, *later: "Piece") -> "Piece":
        """This piece and those after it as one."""
        pieces, ends, at = (self, *later), [], 0
        for piece in pieces:
            ends += [at + end for end in piece.ends]
            at += len(piece.text)
        return Piece(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.token_ids],
            [count for piece in pieces for count in piece.acceptance_lengths],
            ends,
            [start for piece in pieces for start in piece.starts],
            None if self.logprobs is None else [entry for piece in pieces for entry in piece.logprobs or ()],
            pieces[-1].finish_reason,
            None if self.proposals is None else [drafts for piece in pieces for drafts in piece.proposals or ()],
        )

    @property
    def segments(self) -> list[tuple[str, bool]]:
        """The text in parts: (text, whether it was drafted). The last token of each round is the target's own."""
        is_draft = [i < n - 1 for n in self.acceptance_lengths for i in range(n)]
        segments: list[tuple[str, bool]] = []
        for start, end, draft in zip([0, *self.ends], self.ends, is_draft, strict=False):
            if segments and segments[-1][1] == draft:
                segments[-1] = segments[-1][0] + self.text[start:end], draft
            else:
                segments.append((self.text[start:end], draft))
        if rest := self.text[self.ends[-1] if self.ends else 0 :]:
            segments.append((rest, False))
        return [segment for segment in segments if segment[0]]


class TextSequence:
    """One prompt with its request, its text so far, and its pieces.

    The engine may be ahead of a sequence: tokens of events that are not yet taken do not count here.

    Args:
        prompt: Token ids.
        params: Sampling parameters; a seed of None is replaced by a random one.
        stops: Token ids that end the text.
        tokenizer: None for a sequence without text.
        streamed: Whether there are pieces. Without them, and without stop strings, the text is decoded once, at the
            end.
        ends: Gets the new text of each token, and returns whether the text ends there. As with stop strings, the result
            does not count for the first min_tokens tokens.
        draft_record: The part of the request's mask that records drafts; None where pieces have no proposals.
        preparation: Seconds of steps before the request, such as those of its images, by name.
        **options: Further fields of `Request`.

    Attributes:
        request: The engine's request.
        text: The `Detokenizer`; None without a tokenizer.
        has_given_seed: Whether the parameters have a seed.
        is_streamed: Whether there are pieces.
        num_tokens: New tokens so far.
        versions: The weights that drew them.
        yielded: Tokens that each round yielded.
        drafted: Drafts that each verified.
        rounds: The numbers of rounds.
        logprobs: An entry for each new token, as in `Completion`; None where not asked for.
        pieces: Pieces that the consumer has not removed.
        error: What ended the sequence, where that is an error.
        compile_s: Seconds of compilation that the sequence waited for.
        starts: Where each token begins in the text; only where streamed.
        preparation: Seconds of steps before the request, by name.
    """

    def __init__(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[int],
        tokenizer: Tokenizer | None,
        streamed: bool = True,
        ends: Callable[[str], bool] | None = None,
        draft_record: DraftRecord | None = None,
        preparation: Mapping[str, float] | None = None,
        **options,
    ):
        self.preparation = preparation or {}
        self.has_given_seed = params.seed is not None
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
        monitor = (
            partial(self._watch, self.text)
            if self.text and (streamed or ends or params.stop or params.stop_regex)
            else None
        )
        self._ends, self._has_ended, self._draft_record = ends, False, draft_record
        self.request = Request(prompt, params, stops, monitor=monitor, **options)
        self._hidden = frozenset(() if params.include_stop_str_in_output else stops)
        self.is_streamed = streamed
        self.num_tokens = 0
        self.versions: list[WeightVersion] = []
        self.yielded: list[int] = []
        self.drafted: list[int] = []
        self.rounds = Rounds()
        self.logprobs: list[dict] | None = [] if params.wants_logprobs else None
        self.pieces: deque[Piece] = deque()
        self.error: Exception | None = None
        self.compile_s = 0.0
        self.starts: list[int] = []
        # Characters of the text that pieces have. For each event that is monitored but not yet taken: where the text
        # ended after each token, and where the token begins.
        self._shown, self._watched = 0, deque()

    def _watch(self, text: Detokenizer, tokens: Sequence[int]) -> int | None:
        """The request's monitor: decodes new tokens and looks for the end of the text."""
        ends, starts = [], []
        # One by one where each may end the text.
        step = max(1, len(tokens)) if self._ends is None and self._hidden.isdisjoint(tokens) else 1
        for first in range(0, len(tokens), step):
            known, part = len(text.text), tokens[first : first + step]
            begins, upto = text.push_each(part) if self._is_shown(part[0]) else ([text.end], [known])
            starts += begins
            ends += upto
            is_end = self._ends is not None and self._ends(text.text[known:])
            self._has_ended = is_end and len(self.request.tokens) + len(ends) > self.request.params.min_tokens
            if text.stopped or self._has_ended:
                break
        if self.is_streamed:
            self._watched.append((ends, starts))
        return len(ends) if text.stopped or self._has_ended else None

    def _is_shown(self, token: int) -> bool:
        """Whether a token is part of the text. One that ends it is only where the params ask for that."""
        return token not in self._hidden

    def take(self, event: Event) -> None:
        """Adds an event of the engine."""
        self.num_tokens += len(event.tokens)
        if event.tokens:
            self.versions = extended(self.versions, event.version, self.num_tokens)
        self.yielded += event.yielded
        self.drafted += event.drafted or [0] * len(event.yielded)
        self.rounds.update(event.rounds)
        self.error = event.error
        if event.logprobs is not None and self.logprobs is not None:
            self.logprobs += event.logprobs
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
        proposals = self.proposals(event)
        self.pieces.append(
            Piece(text, event.tokens, event.yielded, ends, starts, event.logprobs, event.finish_reason, proposals)
        )

    def proposals(self, event: Event) -> list[list[int]] | None:
        """The drafts of an event's rounds, each once; None where they are not recorded."""
        if self._draft_record is None:
            return None
        # After the drafts that a slot may use, a block is padding.
        return [self._draft_record.rounds.popleft()[:drafted] for _, drafted, _ in event.rounds]

    def _take_end(self, event: Event) -> None:
        if self.text and event.finish_reason:
            if self.request.monitor is None:
                self.text.push(*(t for t in self.token_ids if self._is_shown(t)))
            self.text.finish()

    def fail(self, error: Exception) -> None:
        """Ends the sequence with an error where no event follows."""
        self.request.finish_reason, self.error = "error", error

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far."""
        return self.request.tokens[: self.num_tokens]

    @property
    def shown_text(self) -> str | None:
        """The text of all pieces so far; None without a tokenizer."""
        return self.text.text[: self._shown] if self.text else None

    @property
    def matched(self) -> str | int | None:
        """The stop string, expression or token that ended the text; None where ``ends`` did."""
        if self.request.finish_reason != "stop":
            return None
        if self.text and self.text.stopped:
            return self.text.stop
        return None if self._has_ended else self.request.tokens[-1]

    def raise_failure(self) -> None:
        """Raises the error that ended the sequence: InputError where the request is at fault, else EngineError."""
        if self.error is not None:
            raise self.error

    def completion(self) -> Completion:
        """The result of a sequence that has ended."""
        r, times = self.request, self.request.times
        text = self.text.text if self.text else None
        timings = Timings(
            times.submitted, times.admitted, times.ready, times.first_token, times.finished, self.compile_s
        )
        assert r.finish_reason is not None, "the sequence has not ended"
        # The checkpoint's own stop tokens are no reason, as in vLLM.
        is_given = isinstance(self.matched, str) or self.matched in r.params.stop_token_ids
        reason = self.matched if is_given else None
        parts = r.prompt, r.tokens, text, r.finish_reason, self.yielded, self.logprobs, timings, r.cached, reason
        return Completion(*parts, weight_versions=self.versions)
