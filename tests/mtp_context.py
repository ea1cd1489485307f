"""What the context of an MTP head must hold after anything: what one pass over the text gives."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.state import DecodeState
from dflash_jax.models.cache import init_cache
from dflash_jax.models.drafting import ContextTokens


@jax.jit
def one_pass(target, head, tokens, n):
    """The head's cache after the first ``n`` [B] of ``tokens`` [B, L], in one extension."""
    b, size = tokens.shape
    steps, embeddings = jnp.broadcast_to(jnp.arange(size), (b, size)), target.embed_tokens(tokens)
    caches = init_cache(target.config, b, size, target.dtype)
    _, features, _ = target.extend(embeddings, caches, jnp.zeros(b, jnp.int32), n, head.taps)
    new = ContextTokens(tokens, embeddings, features, steps, steps, steps < n[:, None])
    return head.extend(head.init_cache(b, size, target.dtype), new)


def assert_context(target, head, state: DecodeState, rows: Iterable[int]) -> None:
    """Keys, values and the pending feature of ``rows`` of a state are those of one pass over all but the last token.

    The first token of a context has no keys and values.
    """
    expected, right = one_pass(target, head, jnp.asarray(state.tokens), jnp.maximum(jnp.asarray(state.length) - 1, 0))
    (context, pending), compared = state.draft, 0
    for row in rows:
        first, end = int(state.draft_start[row]) + 1, int(state.length[row]) - 1
        for name in "kv":
            mine, wanted = (np.asarray(getattr(x, name))[row, :, first:end] for x in (context, expected))
            compared += mine.size
            np.testing.assert_allclose(mine, wanted, atol=2e-4, err_msg=f"row {row}: {name}")
        assert pending.position[row] == end - 1, row
        np.testing.assert_allclose(pending.feature[row], right.feature[row], atol=2e-4, err_msg=f"row {row}: pending")
    assert compared, "there is no context to compare"


def rows_with_context(state: DecodeState) -> list[int]:
    """The rows of an engine's state whose text is in the caches, and in the drafter's context at least in part.

    An aborted prompt is in no cache as a whole, and plain decoding may have left the drafter out.
    """
    is_cached = np.asarray(state.num_cached) == np.asarray(state.length) - 1
    return np.flatnonzero(is_cached & (np.asarray(state.length) - 2 > np.asarray(state.draft_start))).tolist()
