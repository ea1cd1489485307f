"""The delta rule of few tokens in Triton: the mixer, and what is accepted of it, against their plain definitions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops import gated_delta
from dflash_jax.ops.backend import XLA
from tests.helpers import in_one_program
from tools.kernels.arguments import Source, mixer, spoilt
from tools.kernels.comparisons import kernel_of

mix = in_one_program(kernel_of(gated_delta.IMPLEMENTATIONS, "triton, one chunk"))
plain_mix = in_one_program(partial(gated_delta.reference, XLA))
replay = in_one_program(kernel_of(gated_delta.REPLAYS))
plain_replay = in_one_program(partial(gated_delta.replay_reference, XLA))


def assert_near(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    ("rows", "tokens", "key_heads", "values", "key_dim", "value_dim", "alike"),
    [
        (1, 1, 2, 2, 16, 32, False),
        (4, 1, 1, 2, 16, 16, False),
        (2, 5, 1, 3, 16, 16, False),
        pytest.param(4, 3, 1, 2, 16, 16, False, marks=pytest.mark.long),
        pytest.param(1, 16, 2, 1, 32, 16, False, marks=pytest.mark.long),
        (2, 16, 1, 2, 16, 16, True),
    ],
)
def test_delta_kernels_equal_their_definitions(rows, tokens, key_heads, values, key_dim, value_dim, alike):
    """Convolution, gates, rule and norm of some rows of a state, in another order, one of them past its end; then the
    state after every count of tokens. Rows of which nothing is kept stay as they are, to the bit."""
    args = mixer(Source(tokens), rows, tokens, key_heads, values, key_dim, value_dim, alike=alike)
    state = args[2]
    (y, record), (expected, plain) = (f(*args, 1e-6) for f in (mix, plain_mix))
    np.testing.assert_allclose(y, expected, atol=2e-5)
    assert_near(record, plain)
    for n in range(tokens + 1):
        count = jnp.asarray(np.resize([n, max(n - 1, 0)], rows), jnp.int32)
        # What is not kept may hold anything.
        after = replay(state, spoilt(plain, count), count)
        assert_near(after, plain_replay(state, plain, count))
        written = [row for row, kept in zip(state.rows.tolist(), count.tolist(), strict=True) if kept]
        others = np.setdiff1d(np.arange(rows + 2), written)
        for new, old in ((after.recurrent, state.recurrent), (after.conv_inputs, state.conv_inputs)):
            np.testing.assert_array_equal(new[others], old[others])
