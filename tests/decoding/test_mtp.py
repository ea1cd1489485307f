"""The MTP head in the speculative loop: the target's text at every width, and the context of one pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.speculative import propose
from dflash_jax.decoding.state import Settings
from dflash_jax.models.drafting import DraftWindow
from tests import tiny
from tests.mtp_context import assert_context
from tests.tiny import VOCAB, coach, fast, sampling, yields
from tools.equality import Reference, check_same

LENGTHS, NEW, CAPACITY = [1, 29, 7, 0, 18], [20, 19, 23, 9, 20], 48
ROWS = [0, 1, 2, 4]
SETTINGS = Settings(block_size=8)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in LENGTHS]
SAMPLING = {
    "greedy": sampling(5),
    "sampled": sampling(
        5,
        temperature=[0.8, 0.8, 0.0, 0.8, 0.8],
        top_k=[0, 10, 0, 0, 0],
        repetition=[1.0, 1.3, 1.4, 1.0, 1.0],
        presence=[0.0, 0.5, 0.3, 0.0, 0.0],
        seed=[3, 1, 2, 7, 8],
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny.target("da", moe="1")


@pytest.fixture(scope="module")
def head(target):
    return tiny.head(target)


@pytest.fixture(scope="module")
def plain(target):
    settings = Settings(block_size=1)
    return {
        mode: fast.generate(target, None, PROMPTS, NEW, settings, sampling=rows, capacity=CAPACITY)
        for mode, rows in SAMPLING.items()
    }


def start(target, drafter, mode: str = "greedy", settings: Settings = SETTINGS, **options):
    options = {"settings": settings, "sampling": SAMPLING[mode], "capacity": CAPACITY} | options
    return init_state(target, drafter, PROMPTS, NEW, **options)


@pytest.mark.parametrize("mode", SAMPLING)
def test_every_width_gives_the_plain_tokens_and_the_context_of_one_pass(mode, target, head, plain):
    """Rows 0 and 2 keep the head's own drafts; of the others any number is right."""
    reference = Reference(target, plain[mode])
    for drafts in range(1, 8):
        runs = np.random.default_rng(drafts).integers(0, drafts + 1, (5, CAPACITY))
        runs[[0, 2]] = -1
        coached = coach(head, plain[mode].tokens, runs)
        state = fast.prefill(target, coached, start(target, coached, mode, block_sizes=drafts + 1), 5)
        for rounds in (2, 1000):
            state = jax.device_get(fast.decode(target, coached, state, rounds, None, settings=SETTINGS))
            assert_context(target, head, state, ROWS)
        check_same(reference, state)
        for row in (1, 4):
            assert state.yielded[row, : state.rounds[row]].tolist() == yields(coached, state, row)


def test_a_wide_block_begins_with_the_drafts_of_a_narrow_one(target, head):
    state = fast.prefill(target, head, start(target, head), 8)
    propose_jit = jax.jit(propose, static_argnames="settings")

    def blocks(drafts: int, size: int) -> np.ndarray:
        sized = replace(state, block_sizes=jnp.full(5, drafts + 1))
        return np.asarray(propose_jit(target, head, sized, replace(SETTINGS, block_size=size)))[ROWS]

    wide = blocks(7, 8)
    np.testing.assert_array_equal(blocks(2, 3), wide[:, :3])
    # More than a head has steps for.
    np.testing.assert_array_equal(blocks(7, 16)[:, :8], wide)


def test_a_window_hides_what_is_before_it(target, head):
    settings = replace(SETTINGS, draft_window=DraftWindow(9, 2))
    windowed = fast.prefill(target, head, start(target, head, settings=settings), 5)
    linear = fast.prefill(target, head, start(target, head), 8)
    linear = replace(linear, draft_window=windowed.draft_window, draft_sinks=windowed.draft_sinks)
    drafts = jax.jit(propose, static_argnames="settings")

    def blocks(state):
        return np.asarray(drafts(target, head, state, SETTINGS))[[1, 4]]

    def with_values(place_of) -> np.ndarray:
        context, pending = linear.draft
        # A slot has one page.
        chosen = place_of(jnp.arange(context.page_size))[:, None]
        return blocks(replace(linear, draft=(replace(context, v=jnp.where(chosen, 1e4, context.v)), pending)))

    (context, _), expected = windowed.draft, blocks(linear)
    assert (context.window, context.sinks) == (9, 2)
    np.testing.assert_array_equal(blocks(windowed), expected)
    # Place 0 belongs to no token; row 4, the shorter, sees positions from 8 on.
    np.testing.assert_array_equal(with_values(lambda place: (place == 0) | (place >= 2) & (place < 8)), expected)
    assert (with_values(lambda place: place == 1) != expected).any()


@pytest.mark.parametrize("size", [1, 8])
def test_plain_rounds_keep_the_context(size, target, head):
    """They extend it at the end of a dispatch, by the features that they kept."""
    settings = replace(SETTINGS, block_size=size)
    state = fast.prefill(target, head, start(target, head, settings=settings, block_sizes=1), 8)
    for rounds in (1, 4, 9):
        state = fast.decode(target, head, state, rounds, None, settings=settings)
        assert_context(target, head, jax.device_get(state), ROWS)


def test_a_context_that_begins_late_has_what_came_since(target, head, plain):
    """The first round has neither context nor pending feature: what an earlier prompt left in the slot is not read."""
    state = fast.prefill(target, None, start(target, head), 8)
    context, pending = state.draft
    drafts, left = jax.jit(propose, static_argnames="settings"), []
    for value in (3.0, -5.0):
        stale = replace(pending, feature=jnp.full_like(pending.feature, value), position=state.length - 2)
        left.append(replace(state, draft=(replace(context, v=jnp.full_like(context.v, value)), stale)))
    blocks = [np.asarray(drafts(target, head, each, SETTINGS)) for each in left]
    np.testing.assert_array_equal(blocks[0][ROWS], blocks[1][ROWS])
    state = left[0]
    while not state.done.all():
        state = fast.decode(target, head, state, 2, None, settings=SETTINGS)
    assert_context(target, head, jax.device_get(state), ROWS)
    check_same(Reference(target, plain["greedy"]), jax.device_get(state))


def test_aligned_blocks_give_the_same_bits_and_the_context_of_one_pass(target, head):
    settings = Settings(block_size=8, aligned=True)

    def run(drafter):
        state = fast.prefill(target, drafter, start(target, drafter, "sampled", settings), 8)
        return jax.device_get(fast.decode(target, drafter, state, 1000, None, settings=settings))

    expected = run(None)
    for runs in (-1, 2, 7):
        found = run(coach(head, expected.tokens, runs))
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert_context(target, head, found, ROWS)
