"""The gated delta rule of a chunk, in a kernel for a TPU (arXiv 2412.06464, section 3.3; as `ops.delta_rule`).

N are value heads, M the tokens of the chunk. All heads are at the same operation, so that one fills the other's
latencies.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Tokens that substitution solves for one after another.
SOLVED = 16


def dot(x: Array, y: Array, exact: bool, contracted: tuple[int, int] = (2, 1)) -> Array:
    """Products of float32 matrices, by all their bits or, of models in 16 bits, by the first 16 of them.

    The matrix unit multiplies bfloat16. Three products of the first and second eight bits leave an error of 2⁻¹⁶; six
    are float32.
    """
    dims = (((contracted[0],), (contracted[1],)), ((0,), (0,)))
    product = partial(jax.lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
    if exact:
        return product(x, y, precision=jax.lax.Precision.HIGHEST)

    def halves(z: Array) -> tuple[Array, Array]:
        first = z.astype(jnp.bfloat16)
        return first, (z - first.astype(jnp.float32)).astype(jnp.bfloat16)

    (x, x_rest), (y, y_rest) = halves(x), halves(y)
    return product(x, y) + (product(x, y_rest) + product(x_rest, y))


def _solved(a: Float[Array, "N M M"], u: Float[Array, "N M Dv"], tokens: int, exact: bool) -> Float[Array, "N M Dv"]:
    """δ of (I + a) δ = u, with a strictly lower triangular and of M rows the first ``tokens`` at most not 0.

    By substitution in blocks of `SOLVED` tokens; a product subtracts what earlier blocks have.
    """
    blocks = []
    for start in range(0, u.shape[1], SOLVED):
        rows = slice(start, start + SOLVED)
        x = u[:, rows]
        if start:
            x = x - dot(a[:, rows, :start], jnp.concatenate(blocks, axis=1), exact)
        for j in range(min(SOLVED, tokens) - 1):
            x = x - a[:, rows, start + j : start + j + 1] * x[:, j : j + 1]
        blocks.append(x)
    return jnp.concatenate(blocks, axis=1)


def chunk_rule(
    kq: Float[Array, "N 2M Dk"],
    products: Float[Array, "N 2M M"],
    v: Float[Array, "N M Dv"],
    decays: Float[Array, "3 N M"],
    state: Float[Array, "N Dk Dv"],
    tokens: int,
    exact: bool,
) -> tuple[Array, Array, Array]:
    """The rule of a chunk.

    Args:
        kq: Keys, then queries.
        products: Their products with the keys.
        v: Values.
        decays: Both parts of `split_cumsum`, then step sizes.
        state: S before the chunk.
        tokens: Tokens of the whole pass.
        exact: As in `dot`.

    Returns:
        o, δ, [N, M, Dv], and S after the chunk.
    """
    n, m, _ = v.shape
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (n, m, m), axis) for axis in (1, 2))

    def columns(x: Array) -> Array:
        """[N, M] → [N, M, 1]."""
        x = x.T
        return jnp.stack([x[:, i : i + 1] for i in range(n)])

    (first, second, beta), parts = (columns(x) for x in decays), decays[:, :, None]
    # The exponent is masked before exp: above the diagonal it is positive and may overflow.
    between = (first - parts[0]) + (second - parts[1])
    decay, cumulative = jnp.exp(jnp.where(row >= column, between, -jnp.inf)), jnp.exp(first + second)
    recalled = dot(kq, state, exact)
    a = jnp.where(row > column, beta * products[:, :m] * decay, 0.0)
    delta = _solved(a, beta * (v - cumulative * recalled[:, :m]), tokens, exact)
    out = cumulative * recalled[:, m:] + dot(products[:, m:] * decay, delta, exact)
    to_end = jnp.exp((first[:, m - 1 :] - first) + (second[:, m - 1 :] - second))
    return out, delta, state * cumulative[:, m - 1 :] + dot(kq[:, :m] * to_end, delta, exact, (1, 1))
