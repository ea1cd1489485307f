"""Drafts that are not worth their verification are not verified, and the text stays the same."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.decoding import widths
from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.speculative import decode_by_widths, propose_scored
from dflash_jax.decoding.state import Settings
from dflash_jax.decoding.widths import (
    BINS,
    GREATEST_LOGIT,
    LEAST_LOGIT,
    LENGTHS,
    bins_of,
    choose_widths,
    count_outcomes,
    lengths_of,
)
from dflash_jax.models.config import ConvSpec, SelectorSpec
from tests import tiny
from tests.helpers import random_drafter, tiny_draft_config
from tests.tiny import VOCAB, coach, fast, sampling
from tools.equality import Reference, check_same

SIZE, NEW = 8, 20
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, n).tolist() for i, n in enumerate([1, 30, 7, 20])]
SETTINGS = Settings(block_size=SIZE, top_logprobs=2, has_widths=True)
SAMPLING = {
    "greedy": sampling(4),
    "sampled": sampling(
        4, temperature=[0.9, 1.6, 0.7, 0.0], repetition=[1.0, 1.3, 1.0, 1.4], seed=[3, 2**32 - 1, 7, 8]
    ),
}
decode = jax.jit(decode_by_widths, static_argnums=5, compiler_options={"xla_backend_optimization_level": 0})
rounds_apart = jax.jit(partial(propose_scored, settings=SETTINGS, mode=None))


@pytest.fixture(autouse=True, scope="module")
def bounds():
    """Those of short contexts, so that the sequences here have all lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widths, "LENGTH_BOUNDS", (5, 12, 24, 36))
        yield widths.LENGTH_BOUNDS


def test_scores_are_told_apart_by_their_log_odds():
    scores = np.array([0.0, 1e-30, 0.018, 0.5, 0.98, 1.0, np.nan, np.inf, -1.0])
    odd = [0, 0, 0, None, None, BINS - 1, 0, 0, 0]
    bins = np.asarray(bins_of(jnp.asarray(scores, jnp.float32)[None]))[0]
    assert [b for b, want in zip(bins, odd, strict=True) if want is not None] == [w for w in odd if w is not None]
    middles = LEAST_LOGIT + (GREATEST_LOGIT - LEAST_LOGIT) * (np.arange(BINS) + 0.5) / BINS
    assert bins_of(jnp.asarray(1 / (1 + np.exp(-middles)), jnp.float32)[None]).tolist() == [list(range(BINS))]


@given(st.data())
def test_widths_end_before_the_first_draft_that_is_not_worth_its_price(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, drafts = rng.integers(1, 6), rng.integers(1, 9)
    bins, rates = rng.integers(0, BINS, (rows, drafts)), rng.random((LENGTHS, drafts, BINS)).astype(np.float32)
    lengths = rng.integers(0, LENGTHS, rows)
    prices, sizes = rng.choice([0.0, 0.1, 0.4, 2.0], rows).astype(np.float32), rng.integers(1, drafts + 2, rows)
    chosen = np.asarray(choose_widths(*map(jnp.asarray, (bins, lengths, rates, prices, sizes))))
    for row in range(rows):
        survival, width = np.float32(1), 1
        while width < sizes[row]:
            survival = survival * rates[lengths[row], width - 1, bins[row, width - 1]]
            if survival < prices[row]:
                break
            width += 1
        assert chosen[row] == width or abs(survival - prices[row]) < 1e-6


def test_outcomes_are_of_verified_drafts_after_accepted_ones():
    bins = jnp.asarray([[3, 4, 5], [3, 4, 5], [3, 3, 3], [1, 1, 1], [2, 2, 2]])
    # All verified and one accepted; all that are verified accepted; nothing verified; ended; took no part.
    chosen, yielded = jnp.asarray([4, 3, 1, 4, 4]), jnp.asarray([2, 3, 1, 2, 0])
    lengths, ended = jnp.asarray([0, 0, 2, 4, 1]), jnp.asarray([0, 0, 0, 1, 0], bool)
    reached, accepted = np.asarray(count_outcomes(bins, lengths, chosen, yielded, ended))
    want = np.zeros((2, LENGTHS, 3, BINS), int)
    for length, place, bin_, is_accepted in [(0, 0, 3, 1), (0, 1, 4, 0), (0, 0, 3, 1), (0, 1, 4, 1), (4, 0, 1, 1)]:
        want[:, length, place, bin_] += [1, is_accepted]
    np.testing.assert_array_equal([reached, accepted], want)


def test_lengths_are_told_apart_at_the_bounds(bounds):
    tokens = sorted({0, *(bound + i for bound in bounds for i in (-1, 0)), 10**7})
    expected = [sum(n >= bound for bound in bounds) for n in tokens]
    assert lengths_of(jnp.asarray(tokens)).tolist() == expected
    assert set(expected) == set(range(LENGTHS))


@pytest.fixture(scope="module")
def target():
    return tiny.target("da", moe="01", seed=3)


@pytest.fixture(scope="module", params=["dflash", "dflash2", "mtp", "without scores"])
def drafter(request, target):
    if request.param == "mtp":
        return tiny.head(target)
    config = tiny_draft_config(target.config)
    if request.param == "dflash2":
        config = replace(config, conv=ConvSpec(2, 4), selector=SelectorSpec(5, 6))
    return random_drafter(config, 1)


@pytest.mark.parametrize("mode", SAMPLING)
def test_every_price_gives_the_plain_tokens(request, target, drafter, mode):
    options = {"capacity": 64, "sampling": SAMPLING[mode]}
    plain = fast.generate(target, None, PROMPTS, NEW, Settings(block_size=1, top_logprobs=2), **options)
    if "without scores" in request.node.callspec.id:
        # Others' rounds are short: these drafts are right up to the fourth.
        drafter = coach(drafter, plain.tokens, 4)
    start = init_state(target, drafter, PROMPTS, NEW, settings=SETTINGS, **options)
    rates, seen = np.random.default_rng(5).uniform(0.3, 1.0, (LENGTHS, SIZE - 1, BINS)).astype(np.float32), set()
    for prices in ([0.0] * 4, [0.2, 0.5, 0.0, 0.1], [2.0] * 4):
        state = fast.prefill(target, drafter, start, 8)
        prices = jnp.asarray(prices, jnp.float32)
        state, outcomes = jax.device_get(decode(target, drafter, state, 1000, None, SETTINGS, rates, prices))
        check_same(Reference(target, plain), state)
        accepted = 0
        for row in range(4):
            yielded, verified = (x[row, : state.rounds[row]] for x in (state.yielded, state.verified))
            assert (yielded <= verified).all()
            assert sum(yielded) == state.length[row] - state.prompt_length[row]
            accepted += sum(yielded - 1)
            seen |= {*verified.tolist()} if prices[row] else set()
            assert prices[row] or set(verified) == {SIZE}
            assert prices[row] < 1 or set(verified) == {1}
        reached, taken = outcomes
        assert taken.sum() == accepted
        assert all(reached[length].any() for length in range(LENGTHS)) or max(prices) > 1
        assert (reached >= taken).all()
        assert (state.block_sizes == SIZE).all()
    assert len(seen) > 2


def test_a_round_verifies_what_its_scores_say(target, drafter):
    start = init_state(target, drafter, PROMPTS, NEW, settings=SETTINGS, capacity=64, sampling=SAMPLING["sampled"])
    state = fast.prefill(target, drafter, start, 8)
    rates = jnp.asarray(np.random.default_rng(6).uniform(0.5, 1.0, (LENGTHS, SIZE - 1, BINS)), jnp.float32)
    prices, lengths, traced = jnp.full(4, 0.3), set(), decode._cache_size()
    for _ in range(4):
        scores = rounds_apart(target, drafter, state)[1]
        assert scores is not None
        want = choose_widths(bins_of(scores), lengths_of(state.length), rates, prices, state.block_sizes)
        lengths |= {*lengths_of(state.length).tolist()}
        before = state.rounds
        state, _ = decode(target, drafter, state, 1, None, SETTINGS, rates, prices)
        rows = np.flatnonzero(np.asarray(state.rounds > before))
        np.testing.assert_array_equal(state.verified[rows, before[rows]], want[rows])
    assert len(lengths) > 2
    # Other lengths, rates and prices are not another program.
    assert decode._cache_size() <= traced + 1
