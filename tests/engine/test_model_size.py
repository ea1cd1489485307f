"""What a pass reads of the weights of a model."""

import jax.numpy as jnp
import pytest

from dflash_jax.engine.model_size import weigh
from dflash_jax.frontend.llm_config import TINY
from dflash_jax.models.drafters import abstract_drafter
from dflash_jax.models.families import dflash
from dflash_jax.ops.backend import XLA
from dflash_jax.parallel.sharding import ONE_DEVICE, Layout
from dflash_jax.planner import abstract_pair, read_shapes
from tests.parity.test_drafter import VOCAB, config


def test_a_pass_reads_single_rows_of_a_selector():
    section = config()["dflash_config"]
    keys = {"selector_rank": 7, "selector_top_k": 5}
    plain, chosen = (
        weigh(abstract_drafter(dflash.read_config(config(dflash_config=section | more))), ONE_DEVICE)
        for more in ({}, keys)
    )
    assert chosen.lookup - plain.lookup == 2 * VOCAB * 7 * 4
    assert chosen.read(8) - plain.read(8) == chosen.total - plain.total - 2 * VOCAB * 7 * 4


@pytest.mark.parametrize("quantize", [None, "fp8", "nvfp4"])
@pytest.mark.parametrize("mesh", ["", "tensor=2", "expert=2"])
def test_products_have_the_bytes_that_a_pass_reads(quantize, mesh):
    """Of a model with experts and one without; operations are two for each parameter and token on the device."""
    layout = Layout.parse(mesh)
    for name in ("target", "draft"):
        paths = (str(TINY / each / "config.json") for each in ("target", "draft"))
        module = abstract_pair(read_shapes(*paths), layout, jnp.bfloat16, quantize, XLA)[name == "draft"]
        weights = weigh(module, layout)
        for tokens, touched in ((1, None), (7, None), (64, float(weights.experts))):
            work = weights.work(tokens, touched)
            assert sum(size for size, _ in work) == pytest.approx(weights.read(tokens, touched))
        if not mesh:
            chosen = weights.expert_parameters * weights.per_token
            dense = sum(parameters for _, parameters in weights.dense) + weights.head_parameters
            assert sum(operations for _, operations in weights.work(7)) == pytest.approx(2 * 7 * (dense + chosen))
            # Tables stay in bfloat16.
            every = dense + weights.experts * weights.expert_parameters
            assert every == pytest.approx(weights.parameters - weights.lookup / 2)
