"""Attention of a block on a TPU, in Pallas' interpreter, against the reference in float64."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.attention import IMPLEMENTATIONS, reference
from dflash_jax.ops.backend import XLA, Backend, choose
from dflash_jax.ops.cache import FP8, Bounds
from dflash_jax.ops.kernels.tpu import attention as tpu_attention
from dflash_jax.ops.kernels.tpu.attention import why_not
from dflash_jax.parallel.sharding import AxisSharding
from tests.ops.kernels.tpu.interpreter import pallas
from tools.float64_reference import distances, in_both_of
from tools.kernels import arguments
from tools.kernels.arguments import Source

attend = pallas("attention", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def two_pages_in_flight(monkeypatch):
    """Buffers are used again, in a row and from row to row."""
    monkeypatch.setattr(tpu_attention, "IN_FLIGHT", 1)


def case(rows, tokens, window=None, sinks=0, capacity=600, **options):
    """Rows of empty, short, long and full contexts, of which one is past the end of the cache."""
    q, k, v, cache, length, bounds = arguments.attention(
        Source(tokens), rows, tokens, 6, 2, 128, capacity, window, sinks, **options
    )
    return q, k, v, None, cache, length, bounds


def assert_near_reference(args):
    dtype = args[0].dtype
    (exact,) = jax.tree.leaves(in_both_of(partial(reference, XLA), *args), is_leaf=lambda x: hasattr(x, "single"))
    for name, (apart, allowed) in distances(attend(*args), exact, dtype).items():
        assert apart <= allowed, name


@pytest.mark.parametrize(("dtype", "cached"), [("float32", None), ("bfloat16", None), ("bfloat16", FP8)])
@pytest.mark.parametrize(
    ("rows", "tokens", "window", "sinks"), [(4, 5, None, 0), (1, 1, None, 0), (2, 16, 300, 0), (4, 3, 200, 50)]
)
def test_a_block_is_its_reference(rows, tokens, window, sinks, dtype, cached):
    """Positions that no token sees are NaN, and pages without a visible position are absent."""
    assert_near_reference(case(rows, tokens, window, sinks, dtype=jnp.dtype(dtype), cached=cached))


@pytest.mark.parametrize("shared", [True, False])
def test_a_block_with_a_mask_of_its_own_is_its_reference(shared):
    q, k, v, _, *rest = case(3, 7)
    seen = np.random.default_rng(0).random((1 if shared else 3, 7, 7)) < 0.5
    assert_near_reference((q, k, v, jnp.asarray(seen | np.eye(7, dtype=bool)), *rest))


def test_a_row_is_the_same_in_any_company():
    """To the bit: alone, with the others in another order, and with pages in other places."""
    q, k, v, _, cache, length, bounds = case(4, 5)
    together = np.asarray(attend(q, k, v, None, cache, length, bounds))
    order = np.array([2, 0, 3, 1])

    def of(rows, cache=cache):
        some = (jax.tree.map(lambda x: x[rows], x) for x in (q, k, v, length, bounds))
        q_, k_, v_, length_, bounds_ = some
        return attend(q_, k_, v_, None, replace(cache, rows=cache.rows[rows]), length_, bounds_)

    np.testing.assert_array_equal(of(order), together[order])
    np.testing.assert_array_equal(of(np.array([1])), together[1:2])
    moved = np.random.default_rng(0).permutation(len(cache.k))
    elsewhere = replace(
        cache,
        k=jnp.zeros_like(cache.k).at[moved].set(cache.k),
        v=jnp.zeros_like(cache.v).at[moved].set(cache.v),
        table=jnp.where(cache.table < len(moved), moved[np.minimum(cache.table, len(moved) - 1)], cache.table),
    )
    np.testing.assert_array_equal(of(np.arange(4), elsewhere), together)


def test_a_token_may_not_see_itself():
    q, k, v, _, cache, length, bounds = case(2, 5)
    mask = jnp.tril(jnp.ones((1, 5, 5), bool), -1)
    found, right = attend(q, k, v, mask, cache, length, bounds), reference(XLA, q, k, v, mask, cache, length, bounds)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_is_the_same_in_a_block_of_any_length(dtype):
    q, k, v, _, cache, length, _ = case(2, 16, dtype=dtype)
    whole = np.asarray(attend(q, k, v, None, cache, length, Bounds.none(2, 16)), np.float32)
    for tokens in (1, 2, 7, 15):
        some = (x[:, :tokens] for x in (q, k, v))
        got = attend(*some, None, cache, length, Bounds.none(2, tokens))
        np.testing.assert_array_equal(np.asarray(got, np.float32), whole[:, :tokens])


def test_what_is_not_supported_has_a_reason_and_goes_to_xla():
    q, k, v, mask, cache, *rest = case(2, 5)

    def chosen(kernels, *args):
        return choose("attention", IMPLEMENTATIONS, Backend.for_tpu(kernels), *args).name

    args = q, k, v, mask, cache, *rest
    assert [chosen(kernels, *args) for kernels in ("all", "auto", "xla")] == ["pallas", "wide pieces", "wide pieces"]
    assert chosen("all", q, k, v, mask, None, *rest) == "reference"
    assert why_not(q, k, cache) is None
    assert "17 tokens" in why_not(jnp.zeros((2, 17, 6, 128)), k, cache)
    assert "heads of 96" in why_not(q[..., :96], k[..., :96], cache)
    assert "float16" in why_not(q.astype(jnp.float16), k, cache)
    assert "keys in bfloat16" in why_not(q, k.astype(jnp.bfloat16), cache)
    assert "divided" in why_not(q, k, replace(cache, positions=AxisSharding(("tensor",))))
    long = replace(cache, table=jax.ShapeDtypeStruct((3, 2**16), jnp.int32))
    assert why_not(q, k, long) is None
    assert "page table" in why_not(jnp.zeros((3, 5, 6, 128)), k, long)
