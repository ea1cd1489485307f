"""Prefill: prompts into the caches, a chunk at a time.

Dimension letters: B sequences.
"""

# Most functions of JAX have partial annotations.
# pyright: reportUnknownMemberType=false

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from dflash_jax.decoding.sampling import Logprobs, compute_logprobs
from dflash_jax.decoding.state import DecodeState
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import Drafting


def prefill_chunk(
    target: Decoder, drafter: Drafting | None, state: DecodeState, size: int, n: Int[Array, " B"] | None = None
) -> DecodeState:
    """Feeds the next tokens of every prompt into the caches, all but its last token.

    Args:
        target: The target.
        drafter: Its cache gets the same tokens; with None, its context begins after them.
        state: The state.
        size: Tokens of the pass (static).
        n: Upper bounds of the tokens of each sequence, int [B], at most ``size``; None is ``size``.

    Returns:
        The state with these tokens in its caches.
    """
    num_left = jnp.maximum(state.prompt_length - 1 - state.num_cached, 0)
    n = jnp.minimum(num_left, size if n is None else n)
    tokens = state.uncached_tokens(size)
    taps = drafter.taps if drafter is not None else ()
    _, features, caches = target.extend(tokens, state.target, state.num_cached, n, taps, state.rotary_positions(size))
    draft = state.draft
    if drafter is not None:
        steps = jnp.arange(size)[None]
        draft = drafter.extend(draft, features, tokens, state.num_cached[:, None] + steps, steps < n[:, None])
    state = replace(state, target=caches, draft=draft, num_cached=state.num_cached + n)
    return state if drafter is not None else state.restart_draft_context(n > 0)


def score_chunk(
    target: Decoder, state: DecodeState, size: int, n: Int[Array, " B"], top: int
) -> tuple[DecodeState, Logprobs]:
    """`prefill_chunk` without a drafter that also scores the prompt.

    Args:
        target: The target.
        state: The state.
        size: Tokens of the pass (static).
        n: Upper bounds of the tokens of each sequence, int [B], at most ``size``.
        top: Most likely tokens at each position.

    Returns:
        The state, and raw `Logprobs` [B, size] of the token after each one that is fed.
    """
    n = jnp.minimum(jnp.maximum(state.prompt_length - 1 - state.num_cached, 0), n)
    tokens, positions = state.uncached_tokens(size), state.rotary_positions(size)
    hidden, _, caches = target.extend(tokens, state.target, state.num_cached, n, (), positions)
    logits, next_tokens = target.logits(hidden), replace(state, num_cached=state.num_cached + 1).uncached_tokens(size)
    sampling = replace(state.sampling, processed_logprobs=jnp.zeros_like(state.sampling.processed_logprobs))
    logprobs = compute_logprobs(logits, logits, next_tokens, sampling, top)
    state = replace(state, target=caches, num_cached=state.num_cached + n)
    return state.restart_draft_context(n > 0), logprobs
