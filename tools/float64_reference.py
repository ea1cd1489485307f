"""The distance of a computation from the truth: at most three times that of a reference in the same dtype.

An absolute tolerance holds on the machine that it was measured on: another one adds in another order. So the truth is
the reference in float64, the measure is the reference in float32 or bfloat16 on this very machine, and ours is held to
that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

# Times the reference's own distance, both as a root mean square and at the single worst value, which shows a fault in
# one place that a mean dilutes. Ours adds in other orders (pieces, chunks, kernels): as a root mean square it comes to
# 0.3 to 1.2 times. Which value is worst is luck for both sides: over six seeds of a model it comes to 0.2 to 1.5 times,
# once to 3.3, of which all but 2.2 are the roundings below.
FACTOR = 3
# Roundings that are allowed whatever the reference does, which may be exact by luck: one of the result itself is half
# an eps, and a sum of n terms is off by about sqrt(n) halves, of n = 100 or so in these models.
LEAST_ROUNDINGS = 4


@dataclass(frozen=True)
class Exact:
    """An array in float64, and the result of the same computation in fewer bits.

    Attributes:
        value: In float64.
        single: In fewer bits. It may be near by luck, where the computation is not.
        shaken: In float64 from `shaken` arguments: how far roundings may lead. None: it was not computed.
    """

    value: np.ndarray
    single: np.ndarray
    shaken: np.ndarray | None = None

    def __getitem__(self, at) -> "Exact":
        return Exact(self.value[at], self.single[at], None if self.shaken is None else self.shaken[at])


def shaken(x: np.ndarray, rng: np.random.Generator, dtype=np.float32) -> np.ndarray:
    """``x`` in float64, each value off by up to `LEAST_ROUNDINGS` halves of an eps, as sums of ``dtype`` leave it."""
    most = LEAST_ROUNDINGS / 2 * np.finfo(dtype).eps
    return np.asarray(x, np.float64) * (1 + rng.uniform(-most, most, np.shape(x)))


def distances(actual, exact: Exact, dtype=np.float32) -> dict[str, tuple[float, float]]:
    """{"root mean square": (distance of ``actual`` from float64, what is allowed), "worst": the same}.

    Args:
        actual: The result.
        exact: Its reference.
        dtype: Dtype of the computation, whose roundings count; the result may be in a wider one.
    """
    references = [x for x in (exact.single, exact.shaken) if x is not None]
    ours, *others = (np.asarray(x, np.float64) - exact.value for x in (actual, *references))
    rounding = float(jnp.finfo(dtype).eps)
    return {
        name: (size(ours), FACTOR * max(map(size, others)) + LEAST_ROUNDINGS * rounding * size(exact.value))
        for name, size in (("root mean square", _rms), ("worst", _worst))
    }


def assert_near(actual, exact: Exact, what: str) -> None:
    """Asserts that float32 ``actual`` is as near to float64 as the reference's own float32 (module docstring)."""
    assert actual.shape == exact.value.shape, f"{what}: shape {actual.shape}, not {exact.value.shape}"
    for name, (apart, allowed) in distances(actual, exact).items():
        # Not "apart > allowed": a NaN must fail.
        assert apart <= allowed, f"{what}: {apart:.2e} from float64 ({name}), {allowed:.2e} is allowed"


def assert_sum_near(actual: float, terms: Exact, what: str) -> None:
    """`assert_near` of a sum of ``terms``. The reference's distance is added up: in its sum it may cancel by luck."""
    apart = abs(actual - terms.value.sum())
    rounding = np.finfo(np.float32).eps * np.abs(terms.value).sum()
    allowed = FACTOR * np.abs(terms.single - terms.value).sum() + LEAST_ROUNDINGS * rounding
    assert apart <= allowed, f"{what}: {apart:.2e} from float64, {allowed:.2e} is allowed"


def in_both_of(definition: Callable, *args):
    """The results of ``definition``, a function in JAX, in float64 and in the dtypes of ``args``: a tree of `Exact`."""
    # In one program: operation by operation, most of the time goes into hundreds of compilations.
    single = jax.jit(definition)(*args)
    wider: dict = dict.fromkeys(map(jnp.dtype, ("float32", "bfloat16", "float16")), np.float64)
    # JAX makes indices of 64 bits, and joins them to none of fewer.
    wider[np.dtype(np.int32)] = np.int64

    def widened(x):
        # On the host: JAX would compile a conversion of each shape.
        return np.asarray(x).astype(wider[x.dtype]) if x.dtype in wider else x

    # float64 where the definition asks for float32 by name; kernels know no other.
    with jax.enable_x64(True), mock.patch.object(jnp, "float32", jnp.float64):
        double = jax.jit(definition)(*jax.tree.map(widened, args))
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(double))
    return jax.tree.map(lambda a, b: Exact(np.asarray(a), np.asarray(b, np.float64)), double, single)


def assert_as_near(actual, definition: Callable, *args) -> None:
    """`assert_near` of arrays ``actual`` to what ``definition``, a function in JAX, makes of ``args``."""
    assert_tree_near(actual, in_both_of(definition, *args))


def assert_tree_near(actual, exact) -> None:
    """`assert_near` of a tree of arrays to a tree of `Exact`."""
    references = jax.tree.leaves(exact, is_leaf=lambda x: isinstance(x, Exact))
    for (path, got), each in zip(jax.tree.leaves_with_path(actual), references, strict=True):
        assert_near(np.asarray(got), each, jax.tree_util.keystr(path) or "the result")


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x)))


def _worst(x: np.ndarray) -> float:
    return float(np.abs(x).max())
