"""Predicted costs of rounds: what must hold for any pair, and two pairs that were measured."""

import jax.numpy as jnp
import pytest

from dflash_jax.cli.ops import backend_for
from dflash_jax.engine.draft_length import DraftLengthPolicy
from dflash_jax.engine.round_costs import Platform, RoundCosts, platform_named
from dflash_jax.parallel.sharding import Layout
from dflash_jax.planner import abstract_pair, read_shapes
from tests import tiny


@pytest.fixture(scope="module")
def pair():
    target = tiny.target("da", moe="")
    return target, tiny.drafter(target)


def test_each_draft_of_an_mtp_head_is_a_pass_over_one_token_a_sequence(pair):
    target, head = pair[0], tiny.head(pair[0])
    costs, plain = RoundCosts(target, head, Platform(1e9, 0.0)), RoundCosts(target, None, Platform(1e9, 0.0))
    first = costs(1, 2) - plain(1, 2)
    assert first > 0
    assert costs(1, 4) - plain(1, 4) == pytest.approx(3 * first)
    assert costs(1, 8) - plain(1, 8) == pytest.approx(7 * first)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_costs_grow_with_batch_and_block_size(pair, platform):
    costs = RoundCosts(*pair, platform_named(platform))
    for small, large in (((1, 0), (1, 1)), ((1, 1), (1, 4)), ((1, 4), (1, 16)), ((1, 4), (8, 4)), ((4, 1), (8, 1))):
        assert 0 < costs(*small) <= costs(*large)


def test_without_a_drafter_a_round_is_a_pass_of_the_target(pair):
    platform = Platform(10.0, 0.0)
    assert RoundCosts(pair[0], None, platform)(2, 1) == RoundCosts(*pair, platform)(2, 0)


def test_a_pass_that_reads_for_longer_than_it_computes_costs_its_bytes(pair):
    costs = RoundCosts(pair[0], None, Platform(1e9, 0.0))
    assert costs(1, 1) == costs(8, 1)
    computing = RoundCosts(pair[0], None, Platform(1e-6, 0.0))
    assert computing(8, 1) == pytest.approx(8 * computing(1, 1))


def test_qwen_on_an_h200_is_as_measured():
    """benchmarks/decode-h200-qwen3.6-35b-a3b-triton.md: 3.1 ms plain, 7.3 and 9.6 ms in rounds of 8 and 16."""
    names = ("Qwen3.6-35B-A3B", "Qwen3.6-35B-A3B-DFlash")
    shapes = read_shapes(*(f"configs/hf/{name}.json" for name in names))
    pair = abstract_pair(shapes, Layout(), jnp.bfloat16, None, backend_for("h200", "auto"))
    costs = RoundCosts(*pair, platform_named("gpu"))
    assert costs(1, 8) / costs(1, 1) == pytest.approx(7.3 / 3.1, rel=0.2)
    assert costs(1, 16) / costs(1, 1) == pytest.approx(9.6 / 3.1, rel=0.2)
    # A drafter without a record drafts at once.
    assert DraftLengthPolicy((1, 8, 16), costs).why_plain(1) is None
