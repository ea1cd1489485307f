"""Predicted costs of rounds: what must hold for any pair, and two pairs that were measured."""

import jax.numpy as jnp
import pytest

from dflash_jax.cli.ops import backend_for
from dflash_jax.engine.config import NO_DRAFTER, Speculation, speculations_of
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
    costs, plain = RoundCosts(target, [head], Platform(1e9, 0.0)), RoundCosts(target, [], Platform(1e9, 0.0))
    first, four, eight = (costs(1, Speculation(n)) - plain(1, Speculation(n, None)) for n in (2, 4, 8))
    assert first > 0
    assert four == pytest.approx(3 * first)
    assert eight == pytest.approx(7 * first)


def test_extensions_of_contexts_read_fc_and_keys_and_values_and_no_experts():
    """float32: of the head, whose layer has experts, and of the drafter, which has two layers and two taps."""
    target, platform, plain = tiny.target("da", moe="1"), Platform(1e9, 0.0), Speculation(1)
    drafters = [tiny.drafter(target), tiny.head(target)]
    contexts = [4 * (36 * 2 * 36 + 2 * 2 * (2 * 10 * 36)), 4 * (36 * 2 * 36 + 2 * (2 * 20 * 36))]
    both = RoundCosts(target, drafters, platform)
    for i, drafter in enumerate(drafters):
        alone = RoundCosts(target, [drafter], platform)
        # A step of an extension takes four tokens of plain rounds, and 16 of others.
        assert alone(2, plain) - alone(2, NO_DRAFTER) == pytest.approx(contexts[i] / 4)
        assert both(2, Speculation(8, i)) - alone(2, Speculation(8)) == pytest.approx(contexts[1 - i] / 2)
    assert both(2, plain) - both(2, NO_DRAFTER) == pytest.approx(sum(contexts) / 4)
    for i in (0, 1):
        # Of those of other drafters, one that drafts alone extends none.
        assert both(1, Speculation(8, i)) - both(1, Speculation(8, i, True)) == pytest.approx(contexts[1 - i] / 2)
        assert both(1, Speculation(1, i, True)) - both(1, NO_DRAFTER) == pytest.approx(contexts[i] / 4)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_costs_grow_with_batch_and_block_size(pair, platform):
    costs = RoundCosts(pair[0], pair[1:], platform_named(platform))
    without, plain, four, sixteen = NO_DRAFTER, Speculation(1), Speculation(4), Speculation(16)
    for small, large in ((without, plain), (plain, four), (four, sixteen)):
        assert 0 < costs(1, small) <= costs(1, large)
    assert 0 < costs(1, four) <= costs(8, four)
    assert 0 < costs(4, plain) <= costs(8, plain)


def test_without_a_drafter_a_round_is_a_pass_of_the_target(pair):
    platform = Platform(10.0, 0.0)
    alone = RoundCosts(pair[0], [], platform)(2, NO_DRAFTER)
    assert alone == RoundCosts(pair[0], pair[1:], platform)(2, NO_DRAFTER)


def test_a_pass_that_reads_for_longer_than_it_computes_costs_its_bytes(pair):
    costs, plain = RoundCosts(pair[0], [], Platform(1e9, 0.0)), Speculation(1)
    assert costs(1, plain) == costs(8, plain)
    computing = RoundCosts(pair[0], [], Platform(1e-6, 0.0))
    assert computing(8, plain) == pytest.approx(8 * computing(1, plain))


def test_qwen_on_an_h200_is_as_measured():
    """decode-h200-qwen3.6-35b-a3b-triton.md: 2.85 ms plain (batch 32: 15.1), 10.7 in rounds of 16; -mtp.md: 6.6."""
    target, drafter = "configs/hf/Qwen3.6-35B-A3B.json", "configs/hf/Qwen3.6-35B-A3B-DFlash.json"

    def costs_of(draft: str) -> RoundCosts:
        backend = backend_for("h200", "auto")
        pair = abstract_pair(read_shapes(target, draft), Layout(), jnp.bfloat16, None, backend)
        return RoundCosts(pair[0], pair[1:], platform_named("gpu"))

    costs = costs_of(drafter)
    plain = costs(1, Speculation(1))
    assert costs(1, Speculation(16)) / plain == pytest.approx(10.7 / 2.85, rel=0.1)
    assert costs_of(target)(1, Speculation(4)) / plain == pytest.approx(6.6 / 2.85, rel=0.2)
    assert costs(32, Speculation(1)) / plain == pytest.approx(15.1 / 2.85, rel=0.1)
    # A drafter without a record drafts at once.
    assert DraftLengthPolicy(speculations_of((8, 16)), costs).why_plain(1) is None
