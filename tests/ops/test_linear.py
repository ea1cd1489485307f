"""The product behind every linear map of arrays, and its gradients; logits of heads in few bits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import linear
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.linear import product
from dflash_jax.ops.weights import quantize
from tests import few_bits


def arguments(dtype):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((70, 48), (130, 48), (70, 130))]


def with_gradients(f, x, w, given):
    def total(x, w):
        return jnp.sum(f(x, w).astype(jnp.float32) * given)

    return f(x, w), *jax.jit(jax.grad(total, (0, 1)))(x, w)


@pytest.mark.parametrize("kind", [None, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_its_gradients_equal_those_in_float32(dtype, kind):
    """In bfloat16 what is wanted is float32's, rounded; a wrong product would be off by its own size."""
    x, w, given = arguments(dtype)
    got = with_gradients(lambda x, w: product(XLA, x, w, kind), x, w, given.astype(jnp.float32))
    wide = [v.astype(jnp.float32) for v in (x, w, given)]
    expected = with_gradients(lambda x, w: x @ w.T, *wide)
    assert [y.dtype for y in got] == [kind or dtype, dtype, dtype]
    for one, other in zip(got, expected, strict=True):
        off = np.abs(np.asarray(one, np.float32) - other)
        # Half a unit of bfloat16's eight bits, and once more for what was rounded before.
        assert (off <= (2e-6 if dtype == jnp.float32 else 2.0**-7) * np.abs(other).max()).all()


def products(jaxpr):
    """The dtypes of both operands of each, in whatever is called."""
    for e in jaxpr.eqns:
        if e.primitive.name == "dot_general":
            yield tuple(v.aval.dtype.name for v in e.invars)
        for inner in jax.tree.leaves(list(e.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def test_gradients_of_bfloat16_operands_are_products_in_it():
    """Though a float32 comes out, and its gradient comes in."""
    x, w, given = arguments(jnp.bfloat16)

    def total(x, w):
        return jnp.sum(product(XLA, x, w, jnp.float32) * given.astype(jnp.float32))

    found = set(products(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, w).jaxpr))
    assert found == {("bfloat16", "bfloat16")}


def test_of_two_dtypes_it_is_the_wider_one():
    x, w, given = arguments(jnp.bfloat16)
    y, dx, dw = with_gradients(partial(product, XLA), x, w.astype(jnp.float32), given.astype(jnp.float32))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(y, x.astype(jnp.float32) @ w.astype(jnp.float32).T, rtol=1e-5, atol=1e-4)


# Logits.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("form", "run"), [("e2m1", 16), ("int4", 64), ("int8", 32), ("fp8", 96)])
def test_logits_of_a_head_in_few_bits_are_float32_and_unpack_a_part_at_a_time(form, run, dtype, monkeypatch):
    """1,003 outputs in 11 parts, of which the last begins within the one before it; of few rows and of many."""
    head = few_bits.weight(np.random.default_rng(0), (1003,), 192, run, form, has_factor=form == "e2m1")
    size, whole = jnp.dtype(dtype).itemsize, few_bits.of(head)
    for rows in (1, 70):
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 1, 192)), dtype)
        results, temporaries = [], []
        for limit in (whole.size * size, whole.size * size // 11 + 1):
            monkeypatch.setattr(linear, "UNPACKED_BYTES", limit)
            compiled = jax.jit(lambda x, head: linear.logits(XLA, x, head)).lower(x, head).compile()
            results.append(compiled(x, head))
            temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        right = np.asarray(x, np.float64) @ whole.T
        # Half a unit of bfloat16's eight bits in each weight.
        off = (2.0**-8 if dtype == jnp.bfloat16 else 1e-6) * (np.abs(np.asarray(x, np.float64)) @ np.abs(whole).T)
        # Activations in FP4 are not the head's.
        np.testing.assert_array_equal(linear.logits(replace(XLA, fp4_activations=True), x, head), results[1])
        for found in results:
            assert found.dtype == jnp.float32
            assert (np.abs(found - right) <= off).all()
            assert np.any(found != found.astype(jnp.bfloat16).astype(jnp.float32))
        # XLA's CPU makes 16 bits of all float8.
        assert form == "fp8" or temporaries[1] < max(whole.size * size / 2, 2 * right.size * 4), temporaries


@pytest.mark.parametrize(("form", "run", "rows"), [("e2m1", 16, 1), ("int4", 64, 32), ("fp8", 192, 16)])
def test_a_cards_kernels_take_the_rows_that_they_may(form, run, rows):
    """Up to 32 of a head in four bits and 16 of one in eight; an array's and more rows are XLA's."""
    pytest.importorskip("triton.runtime.interpreter")
    from tools.triton_interpreter import interpreting

    seen, rng = [], np.random.default_rng(0)
    backend = replace(Backend.for_card(HOPPER), on_choice=seen.append)
    head = few_bits.weight(rng, (75,), 192, run, form, has_factor=form == "e2m1")
    x = jnp.asarray(rng.standard_normal((rows, 192)), jnp.bfloat16)
    with interpreting() as ran:
        found = linear.logits(backend, x, head)
    assert len(ran) == 1
    assert found.dtype == jnp.float32
    right = np.asarray(x, np.float64) @ few_bits.of(head).T
    off = 2.0**-8 * (np.abs(np.asarray(x, np.float64)) @ np.abs(few_bits.of(head)).T)
    assert (np.abs(found - right) <= off).all()
    jax.eval_shape(partial(linear.logits, backend), jnp.zeros((33 if form != "fp8" else 17, 192), x.dtype), head)
    jax.eval_shape(partial(linear.logits, backend), x, jnp.zeros((75, 192), x.dtype))
    assert [(choice.op, choice.implementation) for choice in seen] == [("linear", "triton"), ("linear", "reference")]


@pytest.mark.parametrize(
    ("backend", "tokens", "converts"),
    [
        (Backend.for_card(HOPPER, "all"), 65, True),
        (Backend.for_card(HOPPER, "all"), 64, False),
        (Backend.for_card(HOPPER), 65, False),
        (XLA, 65, False),
    ],
)
def test_with_all_kernels_a_card_converts_a_weight_before_the_product_of_many_tokens(backend, tokens, converts):
    """A barrier keeps XLA from converting in the product, once for each tile of tokens."""
    weight = few_bits.weight(np.random.default_rng(0), (32,), 64, 64, "fp8")
    x = jnp.ones((tokens, 64), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda x, weight: linear.project(backend, x, weight))(x, jax.tree.map(jnp.asarray, weight))
    assert ("optimization_barrier" in str(traced)) == converts


@pytest.mark.parametrize("kind", [None, "fp8", "nvfp4"])
def test_one_row_has_its_numbers_on_a_tpu_that_pads_it(kind):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 1, 2, 32), (3, 5, 2, 32)))
    weight = weight if kind is None else quantize(weight.reshape(3, 5, 64), kind).reshape(3, 5, 64)
    contracted = 2 if kind is None else 1
    x = x if kind is None else x.reshape(1, 1, 64)
    found, right = (linear.project(backend, x, weight, contracted) for backend in (Backend.xla("tpu"), XLA))
    assert found.shape == (1, 1, 3, 5)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
