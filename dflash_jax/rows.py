"""The host's side of prompts under way: tokens and text so far, and their sampling options as arrays."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from dflash_jax.params import SamplingParams
from dflash_jax.programs import Report
from dflash_jax.sampling import SamplingRows
from dflash_jax.text import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What a dispatch brought to one prompt: the text and tokens since the last piece, and what each round yielded."""

    text: str
    token_ids: list[int]
    acceptance_lengths: list[int]


class Row:
    """The host's side of one prompt under way."""

    def __init__(self, prompt: list[int], params: SamplingParams, stops: list[int], tokenizer: Tokenizer | None):
        self.prompt, self.params, self.stops = prompt, params, stops
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        self.text = Detokenizer(tokenizer, params.stop) if tokenizer else None
        self.finish_reason: str | None = None

    def take(self, tokens: Sequence[int], accepted: Sequence[int], done: bool) -> Piece:
        """Adds a dispatch's tokens, up to a stop string."""
        if self.finish_reason:
            return Piece("", [], [])
        shown = len(self.text.text) if self.text else 0
        before, rounds = len(self.token_ids), len(self.accepted)
        self.accepted += accepted
        for token in tokens:
            self.token_ids.append(token)
            if self.text:
                self.text.push(token)
                if self.text.stopped:
                    break
        if done or (self.text and self.text.stopped):
            self._finish()
        # Statistics end where the output ends: the first token is not a round's.
        surplus = sum(self.accepted) - (len(self.token_ids) - 1)
        while surplus > 0 and self.accepted:
            last = self.accepted.pop()
            if last > surplus:
                self.accepted.append(last - surplus)
            surplus -= last
        text = self.text.text[shown:] if self.text else ""
        return Piece(text, self.token_ids[before:], self.accepted[rounds:])

    def _finish(self) -> None:
        if self.text:
            self.text.finish()
        stopped = self.token_ids[-1] in self.stops or (self.text is not None and self.text.stopped)
        self.finish_reason = "stop" if stopped else "length"


def take(rows: list[Row], report: Report) -> list[Piece]:
    return [
        row.take(
            report.tokens[i, : report.count[i]].tolist(),
            report.accepted[i, : report.rounds[i]].tolist(),
            report.done[i],
        )
        for i, row in enumerate(rows)
    ]


def sampling_rows(params: Sequence[SamplingParams], vocab: int) -> SamplingRows:
    """Filled-in options of several rows as arrays."""

    def column(name, dtype=np.float32):
        return jnp.asarray(np.array([getattr(p, name) or 0 for p in params], dtype))

    bias = np.zeros((len(params), vocab), np.float32)
    for i, p in enumerate(params):
        for token, value in p.logit_bias.items():
            bias[i, token] = value
    seeds = [int.from_bytes(os.urandom(4), "little") if p.seed is None else p.seed for p in params]
    return replace(
        SamplingRows.greedy(len(params), vocab),
        temperature=column("temperature"),
        top_k=jnp.asarray(np.array([min(p.top_k or 0, vocab) for p in params], np.int32)),
        top_p=jnp.asarray(np.array([1.0 if p.top_p is None else p.top_p for p in params], np.float32)),
        min_p=column("min_p"),
        repetition=jnp.asarray(np.array([p.repetition_penalty or 1.0 for p in params], np.float32)),
        frequency=column("frequency_penalty"),
        presence=column("presence_penalty"),
        seed=jnp.asarray(np.array(seeds, np.uint32)),
        processed_logprobs=jnp.asarray([p.logprobs_mode == "processed" for p in params]),
        logit_bias=jnp.asarray(bias),
    )
