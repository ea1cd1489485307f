"""Equality of two runs' tokens: they must be equal except where the reference itself was undecided.

In float32 a logit differs by a few 1e-7 when a matmul has another shape. Two runs then part only where the
draw's winner and runner-up, a token and a cut (top-k, top-p, min-p), or two experts at the router's cut are that near.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.sampling_state import OPTIONS, TABLES, SamplingState
from dflash_jax.decoding.state import DecodeState
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.layers import with_backend
from dflash_jax.ops import moe
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.sampling_noise import gumbel_noise

TIE = 1e-4


def equal_or_tie(expected: Iterable[int], actual: Iterable[int], margin_at: Callable[[int], float]) -> int | None:
    """Asserts that two runs' tokens are equal, or that the reference's own margin at the first difference i is a tie.

    ``margin_at(i)`` gives the margin. Returns i, or None where all tokens are equal.
    """
    expected, actual = [int(x) for x in expected], [int(x) for x in actual]
    for i, (a, b) in enumerate(zip(expected, actual, strict=False)):
        if a != b:
            margin = margin_at(i)
            assert margin < TIE, f"token {i} is {b}, not {a}, by a margin of {margin:.3g}"
            return i
    assert len(expected) == len(actual), f"{len(actual)} tokens, not {len(expected)}"
    return None


def processed_reference(logits, options: dict, allowed=None) -> tuple[np.ndarray, float]:
    """Processed logits float64 [V] at one position, by sorting; and the distance of the nearest token from a cut.

    The definitions are those of transformers; of frequency and presence, OpenAI's. A token that ties with the cut does
    not count in the distance.

    Args:
        logits: float [V].
        options: The fields of `SamplingState` of one sequence.
        allowed: bool [V], or None for all.
    """
    x = np.asarray(logits, np.float64) + options["logit_bias"]
    output = np.asarray(options["output_counts"])
    seen = (np.asarray(options["prompt_counts"]) > 0) | (output > 0)
    x = np.where(seen, np.where(x > 0, x / options["repetition"], x * options["repetition"]), x)
    x = x - options["frequency"] * output - options["presence"] * (output > 0)
    if allowed is not None:
        x = np.where(allowed, x, -np.inf)
    if options["temperature"] <= 0:
        return x, np.inf
    x, distances = x / options["temperature"], [np.inf]

    def cut(x, kept, distance):
        distance = distance[np.isfinite(x) & (distance > 0)]
        distances.extend(distance)
        return np.where(kept, x, -np.inf)

    if 0 < options["top_k"] < len(x):
        last = np.sort(x)[-options["top_k"]]
        x = cut(x, x >= last, np.abs(x - (last if np.isfinite(last) else 0.0)))
    weights = np.exp(x - x.max())
    if options["top_p"] < 1:
        above = np.array([weights[weights > w].sum() for w in weights]) / weights.sum()
        # A token that ties with the likeliest one has nothing above it and stays.
        x = cut(
            x, (above < options["top_p"]) | (above == 0), np.where(above > 0, np.abs(above - options["top_p"]), np.inf)
        )
    if options["min_p"] > 0:
        x = cut(x, weights >= options["min_p"], np.abs(weights - options["min_p"]))
    return x, float(min(distances))


def options_of(sampling: SamplingState, row: int) -> dict:
    """The fields of `SamplingState` of one sequence."""
    return {name: np.asarray(getattr(sampling, name)[row]) for name in (*OPTIONS, *TABLES)}


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def forward(target, tokens):
    """Logits [B, T, V] of whole sequences without caches, and the least router margin up to each token, [B, T]."""
    gaps, route = [jnp.full(tokens.size, jnp.inf)], moe.route

    def spy(logits, experts_per_token, normalise):
        best, _ = jax.lax.top_k(logits, experts_per_token + 1)
        gaps.append(best[:, -2] - best[:, -1])
        return route(logits, experts_per_token, normalise)

    with mock.patch.object(moe, "route", spy):
        hidden, _ = target(tokens)
    gap = jnp.min(jnp.stack(gaps), axis=0).reshape(tokens.shape)
    return target.logits(hidden), jax.lax.cummin(gap, axis=1)


_noise = jax.jit(gumbel_noise, static_argnums=0)


class Finished(Protocol):
    """A finished run, with the fields of `DecodeState`."""

    @property
    def sampling(self) -> SamplingState:
        """The sampling parameters of each sequence."""
        ...

    @property
    def tokens(self) -> jax.Array:
        """Prompt and new tokens, int32 [B, T]."""
        ...

    @property
    def prompt_length(self) -> jax.Array:
        """Tokens of each prompt, int32 [B]."""
        ...

    @property
    def length(self) -> jax.Array:
        """Tokens in all, int32 [B]."""
        ...


class Reference:
    """What the target, teacher-forced over a finished run's text without any cache, would draw at each position."""

    def __init__(self, target: Decoder, state: Finished):
        # On the host, where indexing compiles nothing.
        self.sampling, self.prompt_length = jax.device_get(state.sampling), np.asarray(state.prompt_length)
        self.tokens, self.length = np.asarray(state.tokens), np.asarray(state.length)
        self.logits, self.router = (np.asarray(x) for x in forward(with_backend(target, Backend.xla()), state.tokens))

    def scores(self, row: int, position: int) -> tuple[np.ndarray, float]:
        """What is maximised over the tokens that may stand at ``position``, and the margin of cuts and routers."""
        options, prompt = options_of(self.sampling, row), int(self.prompt_length[row])
        vocab = self.logits.shape[-1]
        options["prompt_counts"] = np.bincount(self.tokens[row, :prompt], minlength=vocab)
        options["output_counts"] = np.bincount(self.tokens[row, prompt:position], minlength=vocab)
        scores, margin = processed_reference(self.logits[row, position - 1], options)
        if options["temperature"] > 0:
            places = np.full((1, 1), position, np.int32), np.arange(vocab, dtype=np.int32)
            scores = scores + np.asarray(_noise(self.sampling.backend, options["seed"][None], *places))[0, 0]
        return scores, min(margin, float(self.router[row, position - 1]))

    def margin(self, row: int, position: int) -> float:
        """How far the second score is from the first, or a token or an expert from a cut."""
        scores, margin = self.scores(row, position)
        second, first = np.sort(scores)[-2:]
        return min(float(first - second), margin)

    def check(self, row: int, actual: Iterable[int]) -> int | None:
        """Asserts `equal_or_tie` of a row's new tokens."""
        start, end = int(self.prompt_length[row]), int(self.length[row])
        return equal_or_tie(self.tokens[row, start:end], actual, lambda i: self.margin(row, start + i))


def new_tokens(state: DecodeState, row: int) -> np.ndarray:
    """The new tokens of a sequence."""
    return np.asarray(state.tokens[row, int(state.prompt_length[row]) : int(state.length[row])])


def check_same(reference: Reference, actual: DecodeState, rows: Sequence[int] | None = None) -> None:
    """Asserts `equal_or_tie` for every row of a state that started from the same prompts."""
    for row in range(len(reference.length)) if rows is None else rows:
        reference.check(row, new_tokens(actual, row))


def with_counts(sampling: SamplingState, prompt, output) -> SamplingState:
    """Sampling parameters with these counts of tokens."""
    return replace(sampling, prompt_counts=jnp.asarray(prompt, jnp.int32), output_counts=jnp.asarray(output, jnp.int32))
