"""The speculative loop against plain decoding, and plain decoding against the target without any cache."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding.batch_init import init_state
from dflash_jax.decoding.sampling_state import PROCESSED, RAW, SCALED
from dflash_jax.decoding.speculative import decide, propose
from dflash_jax.decoding.state import Settings, map_caches
from dflash_jax.models.drafting import DraftWindow, Proposal
from dflash_jax.ops import cache
from tests import tiny
from tests.tiny import VOCAB, coach, fast, sampling, yields
from tools.equality import Reference, check_same, equal_or_tie, new_tokens

# Drafters are coached throughout, and sampling is given: one structure of arguments, and so one program.
# One token; idle; longer than a prefill chunk and the draft window, and up to the buffer's last position; three more.
LENGTHS, NEW, CAPACITY = [1, 0, 38, 7, 9, 20], [24, 24, 26, 26, 23, 1], 64
ROWS, LIVE = range(6), [0, 2, 3, 4]
PLAIN = Settings(block_size=1, top_logprobs=2)
WINDOWED = Settings(block_size=8, top_logprobs=2, draft_window=DraftWindow(12, 2))
WIDE = replace(WINDOWED, block_size=16)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in LENGTHS]
BIAS = np.where(RNG.random((6, VOCAB)) < 0.2, RNG.normal(0, 2, (6, VOCAB)), 0) * np.array(
    [[0], [0], [0], [1], [1], [0]]
)
SAMPLING = {
    "greedy": sampling(6),
    "sampled": sampling(
        6,
        temperature=[0.9, 0.0, 1.2, 0.7, 0.0, 1.0],
        top_k=[10, 0, 0, 0, 3, 5],
        top_p=[1.0, 1.0, 0.9, 0.95, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.0],
        repetition=[1.0, 1.0, 1.3, 1.0, 1.4, 1.1],
        frequency=[0.0, 0.0, 0.0, 0.4, 0.3, 0.0],
        presence=[0.0, 0.0, 0.5, 0.6, 0.0, 0.0],
        seed=[3, 1, 2**32 - 1, 7, 8, 9],
        logprobs_mode=[RAW, RAW, PROCESSED, SCALED, PROCESSED, SCALED],
        logit_bias=BIAS,
    ),
}
MODES = sorted(SAMPLING)


@pytest.fixture(scope="module", autouse=True)
def short_chunks():
    """Context is read in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "PAGE_SIZE", 32)
        yield


@pytest.fixture(scope="module")
def target():
    return tiny.target("da", moe="01", seed=3)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny.drafter(target)


def generate(target, drafter, mode: str, settings: Settings, **options):
    options = {"capacity": CAPACITY, "sampling": SAMPLING[mode]} | options
    return fast.generate(target, drafter, PROMPTS, NEW, settings, **options)


@pytest.fixture(scope="module")
def plain(target, short_chunks):
    return {mode: generate(target, None, mode, PLAIN) for mode in MODES}


@pytest.fixture(scope="module")
def reference(target, plain):
    return {mode: Reference(target, state) for mode, state in plain.items()}


def random_runs(seed: int, most: int = 15) -> np.ndarray:
    """Accept counts for every place; rows 0 and 3 keep the random drafter's own proposals."""
    runs = np.random.default_rng(seed).integers(0, most + 1, (6, CAPACITY))
    runs[[0, 3]] = -1
    return runs


def check_statistics(state):
    """Tokens, log-probabilities and counters hold what was said, and nothing behind it."""
    length, start = np.asarray(state.length), np.asarray(state.prompt_length)
    yielded, rounds = np.asarray(state.yielded), np.asarray(state.rounds)
    behind = np.arange(CAPACITY) >= length[:, None]
    assert state.done.all()
    assert (length <= np.asarray(state.limit)).all()
    assert (np.asarray(state.tokens)[behind] == 0).all()
    assert (np.asarray(state.logprobs.chosen)[behind] == 0).all()
    np.testing.assert_array_equal(yielded.sum(1), length - start)
    np.testing.assert_array_equal((yielded > 0).sum(1), rounds)
    np.testing.assert_array_equal(np.arange(CAPACITY) < rounds[:, None], yielded > 0)
    assert (yielded <= np.asarray(state.block_sizes)[:, None]).all()
    for row in ROWS:
        counts = np.bincount(new_tokens(state, row), minlength=VOCAB)
        np.testing.assert_array_equal(state.sampling.output_counts[row], counts)


def check_logprobs(expected, found):
    """Equal as far as the tokens are."""
    same = np.cumprod(np.asarray(expected.tokens == found.tokens), axis=1).astype(bool)
    for a, b in [
        (expected.logprobs.chosen, found.logprobs.chosen),
        (expected.logprobs.values, found.logprobs.values),
    ]:
        np.testing.assert_allclose(np.asarray(b)[same], np.asarray(a)[same], atol=1e-4)


def test_equal_or_tie_tells_a_tie_from_a_mistake():
    margins = {2: 1e-5, 3: 0.1}
    assert equal_or_tie([1, 2, 3], [1, 2, 3], margins.get) is None
    assert equal_or_tie([1, 2, 3, 4], [1, 2, 9, 9, 9], margins.get) == 2
    with pytest.raises(AssertionError, match="token 3 is 9"):
        equal_or_tie([1, 2, 3, 4], [1, 2, 3, 9], margins.get)
    with pytest.raises(AssertionError, match="2 tokens, not 3"):
        equal_or_tie([1, 2, 3], [1, 2], margins.get)


@pytest.mark.parametrize("mode", MODES)
def test_plain_decoding_draws_what_the_target_says_without_caches(plain, reference, mode):
    state = plain[mode]
    check_statistics(state)
    for row in ROWS:
        start, end = LENGTHS[row], int(state.length[row])
        assert end - start == (NEW[row] if LENGTHS[row] else 0)
        for position in range(start, end):
            scores, _ = reference[mode].scores(row, position)
            if scores.argmax() != state.tokens[row, position]:
                assert reference[mode].margin(row, position) < 1e-4, (row, position)
    # The texts are no loops of a few tokens, which would be easy to agree on.
    assert min(len(set(new_tokens(state, row).tolist())) for row in LIVE) >= 9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "widths"),
    [(WINDOWED, range(1, 9)), (WIDE, (1, 2, 8, 9, 12, 15, 16))],
    ids=["window8", "window16"],
)
def test_every_width_gives_the_plain_tokens(target, drafter, plain, reference, mode, settings, widths):
    for width in widths:
        coached = coach(drafter, plain[mode].tokens, random_runs(width, width))
        found = generate(target, coached, mode, settings, block_sizes=width)
        check_same(reference[mode], found)
        check_statistics(found)
        check_logprobs(plain[mode], found)
        for row in (2, 4):
            assert found.yielded[row, : found.rounds[row]].tolist() == yields(coached, found, row)


@pytest.mark.parametrize("mode", MODES)
def test_every_accept_count_occurs_and_gives_the_plain_tokens(target, drafter, plain, reference, mode):
    for run in range(16):
        coached = coach(drafter, plain[mode].tokens, run)
        found = generate(target, coached, mode, WIDE)
        check_same(reference[mode], found)
        check_logprobs(plain[mode], found)
        for row in LIVE:
            expected = yields(coached, found, row)
            assert found.yielded[row, : found.rounds[row]].tolist() == expected
            assert expected[0] == run + 1


def test_the_random_drafters_own_proposals_are_accepted_now_and_then(target, drafter, plain, reference):
    found = generate(target, coach(drafter, plain["sampled"].tokens), "sampled", WINDOWED)
    check_same(reference["sampled"], found)
    check_statistics(found)
    yielded = np.asarray(found.yielded)
    assert yielded.max() > 1
    assert (yielded == 1).sum() > 10


@pytest.mark.parametrize("mode", MODES)
def test_widths_may_differ_between_rows(target, drafter, plain, reference, mode):
    width = [16, 3, 1, 16, 5, 9]
    coached = coach(drafter, plain[mode].tokens, 15)
    found = generate(target, coached, mode, WIDE, block_sizes=width)
    check_same(reference[mode], found)
    check_statistics(found)
    for row in LIVE:
        yielded = found.yielded[row, : found.rounds[row]].tolist()
        assert yielded == yields(coached, found, row)
        assert yielded[0] == width[row]


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_inside_an_accepted_run_ends_the_row_there(target, drafter, plain, mode):
    texts = [new_tokens(plain[mode], row).tolist() for row in ROWS]
    # Behind 5 or more tokens, and for row 3 at once.
    stops = [[t[9], t[12]] if len(t) > 1 else [] for t in texts]
    stops[3] = [texts[3][0]]
    for run, window in ((7, WINDOWED), (15, WIDE), (2, WIDE)):
        found = generate(target, coach(drafter, plain[mode].tokens, run), mode, window, stops=stops)
        check_statistics(found)
        for row in LIVE:
            end = min(texts[row].index(stop) for stop in stops[row]) + 1
            assert new_tokens(found, row).tolist() == texts[row][:end]
            # The stop's own log-probability is there.
            assert found.logprobs.chosen[row, LENGTHS[row] + end - 1] < 0
        assert found.rounds[3] == 1


def test_alone_or_in_a_batch(target, drafter, plain, reference):
    """All other rows are idle, in the programs of the batch: those of one row are in tests/engine/test_engine.py."""
    row = 2
    prompts = [prompt if i == row else [] for i, prompt in enumerate(PROMPTS)]
    for run in (-1, 4):
        coached = coach(drafter, plain["sampled"].tokens, run)
        found = fast.generate(target, coached, prompts, NEW, WINDOWED, sampling=SAMPLING["sampled"], capacity=CAPACITY)
        assert [i for i in ROWS if found.length[i] > 0] == [row]
        reference["sampled"].check(row, new_tokens(found, row))
        np.testing.assert_allclose(found.logprobs.chosen[row], plain["sampled"].logprobs.chosen[row], atol=1e-4)


def test_prefill_chunks_give_the_same_tokens_and_caches(target, drafter, plain, reference):
    coached = coach(drafter, plain["sampled"].tokens)
    states = []
    for size in (3, 8, 64):
        state = init_state(
            target, coached, PROMPTS, NEW, settings=WINDOWED, capacity=CAPACITY, sampling=SAMPLING["sampled"]
        )
        state = fast.prefill(target, coached, state, size)
        np.testing.assert_array_equal(state.num_cached, np.maximum(np.array(LENGTHS) - 1, 0))
        states.append(state)
        state = fast.decode(target, coached, state, 1000, None, settings=WINDOWED)
        check_same(reference["sampled"], state)
    for state in states[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), states[0].target, state.target)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), states[0].draft, state.draft)


def test_penalties_see_the_drafts_before_a_place(target, drafter):
    """Under a penalty that forbids a second use, a draft that repeats a token of its own block must not be accepted."""
    rows = sampling(6, presence=[50.0] * 6, temperature=[0, 0, 1, 1, 0, 0], seed=[1] * 6)
    once = generate(target, None, "greedy", PLAIN, sampling=rows)
    unpenalised = generate(target, None, "greedy", PLAIN)
    repeats = new_tokens(unpenalised, 0).tolist()
    assert any(token in repeats[max(0, i - 7) : i] for i, token in enumerate(repeats))
    expected = Reference(target, once)
    for tokens in (once.tokens, unpenalised.tokens):
        found = generate(target, coach(drafter, tokens, 15), "greedy", WINDOWED, sampling=rows)
        check_same(expected, found)
        for row in LIVE:
            text = new_tokens(found, row)
            assert len(set(text.tolist())) == len(text)


def test_a_drafted_token_that_the_mask_forbids_is_not_accepted(target, drafter, plain):
    """Another set of tokens is allowed at even positions than at odd ones."""
    tokens = plain["sampled"].tokens
    allowed = np.stack([np.arange(VOCAB) % 3 != 0, np.arange(VOCAB) % 3 != 1])
    words = np.pad(allowed, [(0, 0), (0, 64 - VOCAB)]).reshape(2, 2, 32).astype(np.uint64)
    packed = jnp.asarray((words << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32))

    def run(coached, width):
        state = init_state(
            target,
            coached,
            PROMPTS,
            NEW,
            settings=WINDOWED,
            capacity=CAPACITY,
            sampling=SAMPLING["sampled"],
            block_sizes=width,
        )
        state = fast.prefill(target, coached, state)
        while not state.done.all():
            places = state.num_cached[:, None] + 1 + jnp.arange(WINDOWED.block_size)
            state = fast.decode_round(target, coached, state, settings=WINDOWED, mask=packed[places % 2])
        return state

    expected = run(coach(drafter, tokens), 1)
    for row in LIVE:
        places = np.arange(LENGTHS[row], int(expected.length[row]))
        assert allowed[places % 2, new_tokens(expected, row)].all()
    forbidden = ~allowed[np.arange(CAPACITY) % 2, np.asarray(tokens)]
    assert all(forbidden[row, LENGTHS[row] : LENGTHS[row] + NEW[row]].sum() > 2 for row in LIVE)
    for drafted in (tokens, expected.tokens):
        found = run(coach(drafter, drafted, 7), 8)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        check_logprobs(expected, found)
    assert (found.rounds < expected.rounds / 4).any()


def test_a_dispatch_ends_at_its_rounds_or_tokens_and_goes_on(target, drafter, plain, reference):
    coached = coach(drafter, plain["sampled"].tokens, 2)
    state = init_state(
        target, coached, PROMPTS, NEW, settings=WINDOWED, capacity=CAPACITY, sampling=SAMPLING["sampled"]
    )
    state = fast.prefill(target, coached, state)
    state = fast.decode(target, coached, state, 3, None, settings=WINDOWED)
    assert [int(state.length[row]) - LENGTHS[row] for row in LIVE] == [9] * 4
    before = state.length
    state = fast.decode(target, coached, state, 1000, 12, settings=WINDOWED)
    # A round of up to 8 is begun while it cannot lead past 12.
    assert np.asarray(state.length - before)[LIVE].tolist() == [6] * 4
    while not state.done.all():
        state = fast.decode(target, coached, state, 1, None, settings=WINDOWED)
    check_same(reference["sampled"], state)
    check_statistics(state)


def test_plain_rounds_keep_the_drafters_context(target, drafter, plain):
    """They extend it at the end of a dispatch, by what rounds of width one would have."""
    found, coached = [], coach(drafter, plain["greedy"].tokens)
    for window in (1, 8):
        state = init_state(
            target,
            coached,
            PROMPTS,
            NEW,
            settings=replace(WINDOWED, block_size=window),
            capacity=CAPACITY,
            sampling=SAMPLING["greedy"],
            block_sizes=1,
        )
        state = fast.prefill(target, coached, state)
        for rounds in (1, 4, 9):
            state = fast.decode(target, coached, state, rounds, None, settings=replace(WINDOWED, block_size=window))
        found.append(state)
    np.testing.assert_array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_array_equal(found[0].num_cached, found[1].num_cached)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0].draft, found[1].draft)
    assert all(np.abs(x[0]).sum() > 0 for x in jax.tree.leaves(found[0].draft))


@jax.tree_util.register_static
@dataclass(frozen=True)
class Tapless:
    """A drafter that reads no layer of the target. Its cache holds the verified tokens, and it drafts token 0."""

    taps: tuple[int, ...] = ()

    def init_cache(self, slots, capacity, dtype, window):
        return (jnp.full((slots, capacity), -1, jnp.int32),)

    def extend(self, cache, new):
        assert new.features is None
        places = jnp.where(new.valid, new.positions, cache[0].shape[1])
        return (cache[0].at[jnp.arange(len(cache[0]))[:, None], places].set(new.tokens, mode="drop"),)

    def propose(self, cache, last, start, block_sizes, size, heads, window):
        return Proposal(jnp.zeros((len(last), size - 1), jnp.int32))


@pytest.mark.parametrize("size", [1, 4])
def test_a_drafter_without_taps_gets_no_features(target, plain, reference, size):
    """In prefill, in rounds and in the extension after plain rounds; its cache gets every verified token."""
    settings = Settings(block_size=size, top_logprobs=2)
    state = generate(target, Tapless(), "greedy", settings)
    while not state.done.all():
        state = jax.device_get(fast.decode(target, Tapless(), state, 100, None, settings=settings))
    check_same(reference["greedy"], state)
    for row in LIVE:
        # The last token was never fed.
        last = state.length[row] - 1
        np.testing.assert_array_equal(state.draft[0][row, :last], state.tokens[row, :last])
        assert (state.draft[0][row, last:] == -1).all()


def test_a_context_that_begins_late_is_a_bounded_one(target, drafter, plain, reference):
    """What went by without the drafter is as if its window ended there: what an earlier prompt left is not read."""
    drafter, options = coach(drafter, plain["greedy"].tokens), {"sampling": SAMPLING["greedy"], "block_sizes": 8}
    late, full = (
        init_state(target, drafter, PROMPTS, NEW, settings=WINDOWED, capacity=CAPACITY, **options) for _ in range(2)
    )
    full = fast.prefill(target, drafter, full)
    late = fast.prefill(target, None, late)
    late = replace(late, draft=map_caches(lambda cache: replace(cache, v=jnp.full_like(cache.v, 9.0)), late.draft))
    full = replace(full, draft_window=jnp.full_like(full.draft_window, CAPACITY))
    one, drafts = replace(WINDOWED, block_size=1), jax.jit(partial(propose, settings=WINDOWED))
    full, late = (fast.decode(target, d, s, 3, None, settings=one) for d, s in ((drafter, full), (None, late)))
    np.testing.assert_array_equal(late.draft_start[:, 0], late.num_cached)
    for rounds in (1, 2):
        first = np.asarray(late.draft_start[:, 0])
        size = np.where(late.done, 1, np.asarray(late.length) - 1 - first)
        bounded = replace(full, draft_window=jnp.asarray(size), draft_sinks=jnp.zeros_like(full.draft_sinks))
        late = replace(late, draft_window=jnp.full_like(late.draft_window, CAPACITY))
        blocks = [np.asarray(drafts(target, drafter, s))[LIVE] for s in (bounded, late, full)]
        np.testing.assert_array_equal(blocks[0], blocks[1])
        assert (blocks[0] != blocks[2]).any()
        full, late = (fast.decode(target, drafter, s, rounds, None, settings=WINDOWED) for s in (full, late))
        np.testing.assert_array_equal(late.draft_start[:, 0], first)
    while not late.done.all():
        late = fast.decode(target, drafter, late, 8, None, settings=WINDOWED)
    for row in ROWS:
        equal_or_tie(
            new_tokens(plain["greedy"], row),
            new_tokens(late, row),
            lambda i, row=row: reference["greedy"].margin(row, LENGTHS[row] + i),
        )


@settings(max_examples=20, derandomize=True)
@given(
    st.lists(st.integers(-1, 7), min_size=4, max_size=24),
    st.lists(st.integers(1, 8), min_size=6, max_size=6),
    st.sampled_from(MODES),
)
def test_any_accept_lengths_give_the_plain_tokens(target, drafter, plain, reference, runs, width, mode):
    coached = coach(drafter, plain[mode].tokens, np.resize(runs, CAPACITY))
    found = generate(target, coached, mode, WINDOWED, block_sizes=width)
    check_same(reference[mode], found)
    check_statistics(found)
    check_logprobs(plain[mode], found)
    if min(runs) >= 0:
        for row in LIVE:
            assert found.yielded[row, : found.rounds[row]].tolist() == yields(coached, found, row)


def conditionals(jaxpr) -> list:
    """The outermost ones; a choice by platform is made before anything runs."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond" and not equation.params.get("branches_platforms"):
            found.append(equation)
            continue
        inner = (x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,)))
        found += [e for x in inner if hasattr(x, "eqns") for e in conditionals(x)]
    return found


@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
def test_a_greedy_row_pays_one_conditional_and_no_logits_come_out_of_it(target, drafter, masked):
    """On an accelerator each costs as much as a small kernel, and what it returns is written."""
    state = init_state(target, drafter, PROMPTS, NEW, settings=WINDOWED, capacity=CAPACITY)
    block, logits = jnp.zeros((6, 8), jnp.int32), jnp.zeros((6, 8, VOCAB))
    mask = jnp.zeros((6, 8, 2), jnp.uint32) if masked else None
    for function in (lambda s: decide(s, block, logits, mask), lambda s: propose(target, drafter, s, WINDOWED)):
        (draw,) = conditionals(jax.make_jaxpr(function)(state).jaxpr)
        assert VOCAB not in [n for x in draw.outvars for n in x.aval.shape]
        greedy, other = (branch.jaxpr for branch in draw.params["branches"])
        assert not conditionals(greedy)
        assert conditionals(other)


@pytest.mark.parametrize(
    "dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16], ids=["float32", "bfloat16"]
)
def test_aligned_windows_give_the_same_bits_with_any_drafter_and_none(dtype):
    model = tiny.cast(tiny.target("da"), dtype)
    random = tiny.cast(tiny.drafter(model), dtype)
    settings = Settings(block_size=8, aligned=True, top_logprobs=2)
    rows = jax.tree.map(lambda x: x[1:], SAMPLING["sampled"])
    rows = replace(rows, seed=rows.seed + 1)

    def run(drafter, **options):
        options |= {"sampling": rows, "capacity": CAPACITY, "settings": settings}
        state = init_state(model, drafter, PROMPTS[1:], NEW[1:], **options)
        state = fast.prefill(model, drafter, state)
        return jax.device_get(tiny.exact.decode(model, drafter, state, 1000, None, settings=settings))

    expected = run(None)
    assert int(expected.length[1]) == CAPACITY
    full = coach(random, expected.tokens, 7)
    mixed = replace(full, runs=jnp.asarray(random_runs(0, 7)[1:]))
    drafted = {"bad": run(replace(full, runs=-jnp.ones_like(full.runs))), "oracle": run(full), "mixed": run(mixed)}
    drafted["narrow"] = run(full, block_sizes=[2, 8, 1, 5, 3])
    for name, found in drafted.items():
        np.testing.assert_array_equal(found.tokens, expected.tokens, err_msg=name)
        jax.tree.map(np.testing.assert_array_equal, found.logprobs, expected.logprobs)
        np.testing.assert_array_equal(found.yielded.sum(1), expected.yielded.sum(1))
    assert int(expected.rounds[1]) == NEW[2]
    assert int(drafted["oracle"].rounds[1]) < 6
    assert drafted["bad"].rounds[1] > 3 * drafted["oracle"].rounds[1]
