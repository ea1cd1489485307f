"""Kernels on arrays of more than 2³¹ elements, for a card.

Their results for the last part equal, to the bit, their results for that part in an array by itself.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.ops import gated_delta, moe
from dflash_jax.ops.cache import PAGE_SIZE, Bounds, DeltaState, KVCache
from tools.kernels import arguments
from tools.kernels.arguments import Source
from tools.kernels.cases import failed, same_bits
from tools.kernels.comparisons import kernel_of, tested_card

BF16 = jnp.bfloat16
LAST = 2**31


def room_for(size: float) -> None:
    """Raises InputError where the device has no room for ``size`` bytes."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if size > 0.9 * limit:
        raise InputError(f"{size / 1e9:.0f} GB do not fit into {limit / 1e9:.0f} GB")


def after_zeros(part, rows: int) -> jax.Array:
    """An array of ``rows`` along the first axis, the last of which are ``part``."""
    room_for(3 * rows * part[0].nbytes)

    def make(part):
        return jnp.zeros((rows, *part.shape[1:]), part.dtype).at[rows - len(part) :].set(part)

    return jax.jit(make)(part)


def equal(found, expected) -> dict:
    """The result of a case that compares to the bit."""
    leaves = ([np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (found, expected))
    return {"status": "exact"} if same_bits(*leaves) else failed("other bits than of an array of its own")


def attention(capacity: int = 4096) -> dict:
    """Reads and writes the last pages of a cache."""
    from dflash_jax.ops.kernels.triton.attention import attend_triton, write_triton

    source, card, (heads, dim) = Source(0, on_device=True), tested_card(), (2, 256)
    pages = LAST // (heads * PAGE_SIZE * dim) + 2
    q, k, v = (source.normal(2, 5, n, dim, dtype=BF16) for n in (16, heads, heads))
    cache = KVCache.create(2, heads, dim, capacity, BF16)
    small = [source.normal(*cache.k.shape, dtype=BF16) for _ in "kv"]
    length, bounds = jnp.asarray([3000, 500], jnp.int32), Bounds.none(2, 5)
    positions, rows = length[:, None] + jnp.arange(5, dtype=jnp.int32), jnp.asarray([0, 1], jnp.int32)

    def read_and_write(cached_k, cached_v, table):
        y = attend_triton(card, q, k, v, None, KVCache(cached_k, cached_v, table, rows), length, bounds)
        written = write_triton(card, cached_k, cached_v, table, k, v, rows, positions)
        return y, [x[-len(cache.k) :] for x in written]

    run = jax.jit(read_and_write)
    expected = jax.tree.map(np.asarray, run(*small, cache.table))
    large = [after_zeros(x, pages + len(cache.k)) for x in small]
    return equal(run(*large, cache.table + pages), expected)


def delta(tokens: int) -> dict:
    """Runs the mixer and, for few tokens, the replay on the last rows of a state."""
    inputs, gates, state, weights = arguments.mixer(Source(0), 2, tokens, 16, 2, 128, 128, BF16)
    small = [x[:2] for x in (state.recurrent, state.conv_inputs)]
    rows = LAST // small[0][0].size + 2

    def run(recurrent, conv, slots):
        state = DeltaState(recurrent, conv, slots)
        if tokens > 16:
            return kernel_of(gated_delta.IMPLEMENTATIONS, "triton, chunks")(inputs, gates, state, weights, 1e-6)
        y, record = kernel_of(gated_delta.IMPLEMENTATIONS, "triton, one chunk")(inputs, gates, state, weights, 1e-6)
        after = kernel_of(gated_delta.REPLAYS)(state, record, jnp.asarray([tokens, 1], jnp.int32))
        return y, record, [x[-2:] for x in (after.recurrent, after.conv_inputs)]

    run = jax.jit(run)
    expected = jax.tree.map(np.asarray, run(*small, jnp.asarray([1, 0], jnp.int32)))
    large = [after_zeros(x, rows) for x in small]
    return equal(run(*large, jnp.asarray([rows - 1, rows - 2], jnp.int32)), expected)


def mixture(tokens: int, experts: int = 640, used_experts: int = 128) -> dict:
    """Runs experts of Qwen3.5-397B-A17B's sizes for tokens that choose among the last ones."""
    source = Source(0, on_device=True)
    kernel = partial(kernel_of(moe.IMPLEMENTATIONS), experts_per_token=10, normalise=True)
    x, logits = source.normal(tokens, 4096, dtype=BF16), source.normal(tokens, experts)
    logits = logits.at[:, : experts - used_experts].add(-100)
    small = [source.normal(used_experts, *shape, dtype=BF16) / 64 for shape in ((2, 1024, 4096), (4096, 1024))]

    def run(first, gate_up, down):
        return kernel(x, logits, jnp.ones(tokens, bool), first, gate_up, down, None, None)

    run = jax.jit(run)
    expected = np.asarray(run(experts - used_experts, *small))
    return equal(run(0, *(after_zeros(x, experts) for x in small)), expected)


def products(rows: int, inner: int = 4096, last_outputs: int = 8192) -> dict:
    """Computes the last outputs of one weight."""
    from dflash_jax.ops.kernels.triton.linear import project_triton

    source, card = Source(0, on_device=True), tested_card()
    x, small = source.normal(rows, inner, dtype=BF16), source.normal(last_outputs, inner, dtype=BF16) / 64
    run = jax.jit(lambda weight: project_triton(x, [weight], card=card)[0][:, -last_outputs:])
    return equal(run(after_zeros(small, LAST // inner + 2 * last_outputs)), run(small))


def cases() -> Iterator[tuple[str, Callable[[], dict]]]:
    """(name, case) of all comparisons."""
    yield "more than 2^31 elements: a cache of keys and values", attention
    for tokens in (1, 16, 70):
        yield f"more than 2^31 elements: a recurrent state, T {tokens}", lambda tokens=tokens: delta(tokens)
    for tokens in (1, 5, 20):
        yield f"more than 2^31 elements: experts, {tokens} tokens", lambda tokens=tokens: mixture(tokens)
    for rows in (1, 8):
        yield f"more than 2^31 elements: one weight, {rows} rows", lambda rows=rows: products(rows)
