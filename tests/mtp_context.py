"""What the contexts of drafters must hold after anything: what one pass over the text gives."""

from collections.abc import Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.state import DecodeState, is_kv_cache, map_caches
from dflash_jax.models.cache import init_cache
from dflash_jax.models.drafting import NO_WINDOW, ContextTokens
from dflash_jax.models.mtp import Mtp
from dflash_jax.ops.cache import KVCache


@jax.jit
def one_pass(target, drafter, tokens, n):
    """The drafter's cache after the first ``n`` [B] of ``tokens`` [B, L], in one extension."""
    b, size = tokens.shape
    steps, embeddings = jnp.broadcast_to(jnp.arange(size), (b, size)), target.embed_tokens(tokens)
    caches = init_cache(target.config, b, size, target.dtype)
    _, features, _ = target.extend(embeddings, caches, jnp.zeros(b, jnp.int32), n, drafter.taps)
    new = ContextTokens(tokens, embeddings, features, steps, steps, steps < n[:, None])
    return drafter.extend(drafter.init_cache(b, size, target.dtype, NO_WINDOW), new)


def assert_context(target, head, state: DecodeState, rows: Iterable[int], drafter: int = 0) -> None:
    """Keys, values and the pending feature of ``rows`` of a state are those of one pass over all but the last token.

    The first token of a context has no keys and values; ``drafter``: the head's index among several drafters.
    """
    expected, right = one_pass(target, head, jnp.asarray(state.tokens), jnp.maximum(jnp.asarray(state.length) - 1, 0))
    (context, pending), compared = state.draft, 0
    for row in rows:
        first, end = int(state.draft_start[row, drafter]) + 1, int(state.length[row]) - 1
        for mine, wanted in zip(of_row(context, row), of_row(expected, row), strict=True):
            mine, wanted = mine[:, first:end], wanted[:, first:end]
            compared += mine.size
            np.testing.assert_allclose(mine, wanted, atol=2e-4, err_msg=f"row {row}")
        assert pending.position[row] == end - 1, row
        np.testing.assert_allclose(pending.feature[row], right.feature[row], atol=2e-4, err_msg=f"row {row}: pending")
    assert compared, "there is no context to compare"


def assert_contexts(target, drafters, state: DecodeState) -> list[list[int]]:
    """The contexts in the caches of ``drafters``, heads or DFlash drafters, are those of one pass.

    Returns:
        The rows that were compared, by drafter, as `rows_with_context` gives them.
    """
    tokens, length = jnp.asarray(state.tokens), jnp.asarray(state.length)
    compared = [rows_with_context(state, i) for i in range(len(drafters))]
    for i, (drafter, draft, rows) in enumerate(zip(drafters, state.draft, compared, strict=True)):
        assert rows, f"there is no context of drafter {i} to compare"
        if isinstance(drafter, Mtp):
            assert_context(target, drafter, replace(state, draft=draft), rows, i)
            continue
        expected = one_pass(target, drafter, tokens, jnp.maximum(length - 1, 0))
        for row in rows:
            first, end = int(state.draft_start[row, i]), int(state.length[row]) - 1
            # The last layer has full attention: no window leaves out a part of its cache.
            for mine, right in zip(of_row(draft[-1], row), of_row(expected[-1], row), strict=True):
                np.testing.assert_allclose(mine[:, first:end], right[:, first:end], atol=2e-4, err_msg=f"row {row}")
    return compared


def of_row(cache: KVCache, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a row, [K, positions, D] each; arbitrary where it has no page."""
    cache = replace(jax.tree.map(jnp.asarray, cache), rows=jnp.asarray([row]))
    k, v = cache.read(jnp.arange(cache.table.shape[1])[None])
    return np.asarray(k[0]), np.asarray(v[0])


def of_one_device(state: DecodeState, shards: int) -> DecodeState:
    """A state whose pages are numbered through the data shards."""

    def numbered(cache: KVCache) -> KVCache:
        pages, rows = len(cache.k) // shards, len(cache.table) // shards
        first = pages * (np.arange(len(cache.table)) // rows)
        table = np.where(cache.table < pages, cache.table + first[:, None], len(cache.k))
        return replace(cache, table=table.astype(np.int32))

    return map_caches(numbered, state)


def rows_with_context(state: DecodeState, drafter: int = 0) -> list[int]:
    """The rows of an engine's state whose text is in the caches, and in a drafter's context at least in part.

    An aborted prompt is in no cache as a whole, rounds may have left the drafter out, and a request that has ended may
    have given its pages back.
    """
    is_cached = np.asarray(state.num_cached) == np.asarray(state.length) - 1
    for cache in jax.tree.leaves((state.target, state.draft), is_leaf=is_kv_cache):
        if is_kv_cache(cache) and cache.window is None:
            is_cached &= np.asarray(cache.table)[:, 0] < len(cache.k)
    has_context = np.asarray(state.length) - 2 > np.asarray(state.draft_start)[:, drafter]
    return np.flatnonzero(is_cached & has_context).tolist()
