"""The product behind every linear map of arrays, and its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops.backend import XLA
from dflash_jax.ops.linear import product


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
