"""Prefill: prompts into the caches, a chunk at a time.

Dimension letters: B sequences, T tokens of a chunk, H hidden size.
"""

# Most functions of JAX have partial annotations.
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.decoding.sampling import Logprobs, compute_logprobs, scale_logits
from dflash_jax.decoding.sampling_state import SCALED_PROMPT
from dflash_jax.decoding.state import DecodeState
from dflash_jax.models.decoder import Decoder
from dflash_jax.models.drafting import ContextTokens, Drafting, extended_contexts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MediaChunk:
    """Tokens of a chunk that stand for images and videos.

    Attributes:
        embeddings: What takes the place of the tokens' embeddings, [B, T, H].
        is_media: Where it does, bool [B, T].
        positions: Rotary positions of all tokens of the chunk (time, height, width), int32 [B, 3, T].
    """

    embeddings: Float[Array, "B T H"]
    is_media: Bool[Array, "B T"]
    positions: Int[Array, "B 3 T"]

    def inputs(self, target: Decoder, tokens: Int[Array, "B T"]) -> tuple[Float[Array, "B T H"], Int[Array, "3 B T"]]:
        """Embeddings [B, T, H] and rotary positions [3, B, T] of the chunk's tokens, int [B, T]."""
        embeddings = target.embed_tokens(tokens)
        rows = self.embeddings.astype(embeddings.dtype)
        return jnp.where(self.is_media[..., None], rows, embeddings), jnp.moveaxis(self.positions, 1, 0)


def _inputs(
    target: Decoder, state: DecodeState, size: int, media: MediaChunk | None
) -> tuple[Float[Array, "B T H"], Int[Array, "B T"] | Int[Array, "3 B T"]]:
    """(embeddings, rotary positions) of the next ``size`` tokens of every prompt."""
    tokens = state.uncached_tokens(size)
    if media is None:
        return target.embed_tokens(tokens), state.rotary_positions(size)
    return media.inputs(target, tokens)


def prefill_chunk(
    target: Decoder,
    drafter: Drafting | None,
    state: DecodeState,
    size: int,
    n: Int[Array, " B"] | None = None,
    media: MediaChunk | None = None,
) -> DecodeState:
    """Feeds the next tokens of every prompt into the caches, all but its last token.

    Args:
        target: The target.
        drafter: Its cache gets the same tokens; with None, the contexts of drafters begin after them.
        state: The state.
        size: Tokens of the pass (static).
        n: Upper bounds of the tokens of each sequence, int [B], at most ``size``; None is ``size``.
        media: Images and videos of the chunk.

    Returns:
        The state with these tokens in its caches.
    """
    num_left = jnp.maximum(state.prompt_length - 1 - state.num_cached, 0)
    n = jnp.minimum(num_left, size if n is None else n)
    embeddings, rotary = _inputs(target, state, size, media)
    taps = drafter.taps if drafter is not None else ()
    _, features, caches = target.extend(embeddings, state.target, state.num_cached, n, taps, rotary)
    draft = state.draft
    if drafter is not None:
        steps = jnp.arange(size)[None]
        positions, tokens = state.num_cached[:, None] + steps, state.uncached_tokens(size)
        draft = drafter.extend(
            draft, ContextTokens(tokens, embeddings, features, positions, rotary, steps < n[:, None])
        )
    after = replace(state, target=caches, draft=draft, num_cached=state.num_cached + n)
    return after.restart_draft_contexts(state, extended_contexts(drafter))


def score_chunk(
    target: Decoder, state: DecodeState, size: int, n: Int[Array, " B"], top: int, media: MediaChunk | None = None
) -> tuple[DecodeState, Logprobs]:
    """`prefill_chunk` without a drafter that also scores the prompt.

    Args:
        target: The target.
        state: The state.
        size: Tokens of the pass (static).
        n: Upper bounds of the tokens of each sequence, int [B], at most ``size``.
        top: Most likely tokens at each position.
        media: As in `prefill_chunk`.

    Returns:
        The state, and `Logprobs` [B, size] of the token after each one that is fed: raw, but by the temperature where
        the mode is SCALED_PROMPT.
    """
    n = jnp.minimum(jnp.maximum(state.prompt_length - 1 - state.num_cached, 0), n)
    embeddings, rotary = _inputs(target, state, size, media)
    hidden, _, caches = target.extend(embeddings, state.target, state.num_cached, n, (), rotary)
    logits, next_tokens = target.logits(hidden), replace(state, num_cached=state.num_cached + 1).uncached_tokens(size)
    sampling = state.sampling
    is_scaled = sampling.logprobs_mode == SCALED_PROMPT
    scaled = scale_logits(logits, replace(sampling, temperature=jnp.where(is_scaled, sampling.temperature, 0.0)))
    logprobs = compute_logprobs(scaled, next_tokens, sampling, top)
    after = replace(state, target=caches, num_cached=state.num_cached + n)
    return after.restart_draft_contexts(state, ()), logprobs
