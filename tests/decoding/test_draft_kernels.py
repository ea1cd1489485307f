"""What a proposal of DFlash2 takes beyond one of DFlash, at full size, traced: products, launches, loops and sorts."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from dflash_jax.decoding.speculative import propose
from dflash_jax.decoding.state import Settings, empty_state
from dflash_jax.models.config import DraftConfig
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import Card
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.options.systems import read_system
from dflash_jax.parallel.sharding import ONE_DEVICE
from dflash_jax.planner import abstract_pair, read_shapes
from tools.compile_report import shorten

B200 = Card.of_capability(100)
# Without the kernels of convolutions; with them; without any.
BACKENDS = {
    "tried": Backend.for_card(B200),
    "all": Backend.for_card(B200, "all"),
    "xla": Backend.xla("cuda", B200),
}
LOOPS, SORTS = {"while", "scan"}, {"sort", "top_k", "approx_top_k"}


def traced(has_parts: bool, layers: int, slots: int, backend: Backend) -> tuple[Counter, int]:
    """Primitives and kernels of a proposal of Qwen3.8-27B's drafter, and the most values that are sorted together."""
    system = read_system("qwen3.8-27b").shapes
    shapes = shorten(read_shapes(str(system["target"]), str(system["draft"])), 1)
    assert isinstance(shapes.draft, DraftConfig)
    draft = replace(shapes.draft, layers=shapes.draft.layers[:layers])
    draft = draft if has_parts else replace(draft, conv=None, selector=None)
    target, drafter = abstract_pair(replace(shapes, draft=draft), ONE_DEVICE, jnp.bfloat16, None, backend)
    settings = Settings(draft.block_size)
    state = jax.eval_shape(partial(empty_state, target, drafter, slots, 4096, settings))
    found, largest = Counter(), 0

    def launch(one):
        found[one.kernel.__name__] += 1
        return tuple(jnp.zeros(x.shape, x.dtype) for x in (*(one.args[i] for i in one.in_place), *one.out))

    def count(jaxpr):
        nonlocal largest
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            found[name] += 1
            if name in SORTS:
                largest = max(largest, equation.invars[0].aval.shape[-1])
            for inner in jaxprs_in_params(equation.params):
                count(inner)

    with launching(launch):
        count(
            jax.make_jaxpr(lambda pair, state: propose(pair[0], pair[1], state, settings))(
                (target, drafter), state
            ).jaxpr
        )
    return found, largest


def test_candidates_sort_no_vocabulary_and_the_choice_has_no_loop():
    (of_dflash, _), (of_dflash2, largest) = (traced(parts, 1, 1, BACKENDS["xla"]) for parts in (False, True))
    assert 0 < largest <= 248320 // 64
    assert all(of_dflash2[loop] == of_dflash[loop] for loop in LOOPS)


@pytest.mark.parametrize("slots", [1, 32])
def test_a_sublayer_has_one_product_more(slots):
    """One gives the coefficients of both sides; the selector adds its gate's and that of the pairs."""
    for layers in (1, 2):
        before, after = (traced(parts, layers, slots, BACKENDS["xla"])[0] for parts in (False, True))
        assert after["dot_general"] - before["dot_general"] == 2 * layers + 2


@pytest.mark.parametrize("slots", [1, 32])
def test_the_kernel_of_convolutions_is_all_of_a_sublayer_before_its_own_products(slots):
    """It takes the norm, the coefficients and the first convolution, and only where all kernels are wanted."""
    pytest.importorskip("triton")
    name = "_convolve"
    before, tried, every = (
        traced(parts, 2, slots, BACKENDS[kernels])[0]
        for parts, kernels in ((False, "all"), (True, "tried"), (True, "all"))
    )
    assert tried[name] == before[name] == 0
    assert every[name] == 4
    # The last norm alone remains, and the products of the head, the gate and the pairs.
    assert before["rsqrt"] + before["_norm"] == 5
    assert every["rsqrt"] + every["_norm"] == 1
    assert every["dot_general"] - before["dot_general"] == 2
