"""Processing and drawing against sorting, float64 and definitions."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dflash_jax.decoding.batch_init import Admission
from dflash_jax.decoding.sampling import _smallest_top_set, compute_logprobs, draw_processed, process_logits
from dflash_jax.decoding.sampling import draw as draw_at_once
from dflash_jax.decoding.sampling_state import (
    GREEDY,
    PENALISED,
    PROCESSED,
    RANDOM,
    TABLES,
    SamplingState,
    sampling_mode,
)
from dflash_jax.sampling_params import LOGPROBS_MODES
from tests.tiny import sampling
from tools.equality import options_of, processed_reference, with_counts

B, T, V = 3, 2, 41
OFF = {
    "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "frequency": 0.0, "presence": 0.0,
}  # fmt: skip
FILTERS = ("temperature", "top_k", "top_p", "min_p")

run = jax.jit(process_logits)
draw = jax.jit(draw_processed)
score = jax.jit(compute_logprobs, static_argnums=3)
at_once = jax.jit(draw_at_once, static_argnames="top")

row_options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, V - 1, V, V + 5]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05, 1e-4]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition": st.sampled_from([1.0, 1.3, 0.7]),
        "frequency": st.sampled_from([0.0, 0.4, -0.5]),
        "presence": st.sampled_from([0.0, 0.9, -0.6]),
    }
)


def rows_of(options: list[dict], **more) -> SamplingState:
    return sampling(len(options), V, **{k: [o[k] for o in options] for k in options[0]}, **more)


def pack(allowed) -> jnp.ndarray:
    """bool [..., V] → uint32 [..., ceil(V / 32)]."""
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, -V % 32)])
    words = padded.reshape(*allowed.shape[:-1], -1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
    return jnp.asarray(words.sum(-1).astype(np.uint32))


def reported(logits, rows: SamplingState, *place) -> jnp.ndarray:
    """The logits of each row's logprobs_mode."""
    uncut = replace(rows, top_k=0 * rows.top_k, top_p=jnp.ones_like(rows.top_p), min_p=0 * rows.min_p)
    processed = run(logits, rows, *place)
    modes = jnp.stack([logits, processed, run(logits, uncut, *place), logits, processed])
    return modes[rows.logprobs_mode, jnp.arange(len(logits))]


def assert_processed(found, expected):
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@settings(max_examples=80, derandomize=True)
@given(
    st.lists(row_options, min_size=B, max_size=B), st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans()
)
def test_process_follows_the_definitions(options, seed, tied, biased, masked):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (B, T, V)).astype(np.float32)
    logits = np.round(logits) if tied else logits
    rows = rows_of(options, logit_bias=biased * np.where(rng.random((B, V)) < 0.2, rng.normal(0, 5, (B, V)), 0))
    counts = rng.poisson(0.3, (2, B, V))
    rows = with_counts(rows, counts[0], counts[1])
    allowed = rng.random((B, T, V)) < 0.7
    allowed[..., rng.integers(V)] = True
    block, known = rng.integers(0, V, (B, T)), rng.integers(0, T + 1, B)
    found = np.asarray(
        run(jnp.asarray(logits), rows, jnp.asarray(block), jnp.asarray(known), pack(allowed | (not masked)))
    )
    for b in range(B):
        own = options_of(rows, b)
        for t in range(T):
            fresh = block[b, known[b] : t + 1]
            at = own | {"output_counts": own["output_counts"] + np.bincount(fresh, minlength=V)}
            expected, margin = processed_reference(logits[b, t], at, allowed[b, t] | (not masked))
            assume(margin > 1e-5)
            assert_processed(found[b, t], expected)


def test_the_reference_follows_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(0)
    for case in range(40):
        k, p, m, t, r = int(rng.integers(1, V)), rng.uniform(0.1, 1), rng.uniform(0, 0.4), rng.uniform(0.3, 2), 1.4
        logits = rng.normal(0, 2, V)
        prompt = rng.integers(0, V, 6)
        options = options_of(sampling(1, V), 0) | {
            "temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition": r,
            "prompt_counts": np.bincount(prompt, minlength=V),
        }  # fmt: skip
        scores, ids = torch.tensor(logits)[None], torch.tensor(prompt)[None]
        for step in (
            hf.RepetitionPenaltyLogitsProcessor(r),
            hf.TemperatureLogitsWarper(t),
            hf.TopKLogitsWarper(k),
            hf.TopPLogitsWarper(p),
            hf.MinPLogitsWarper(m),
        ):
            scores = step(ids, scores)
        expected, margin = processed_reference(logits, options)
        assert margin > 1e-9, case
        assert_processed(scores[0].numpy(), expected)


@pytest.mark.parametrize(
    "option",
    [
        {"top_k": 5},
        {"min_p": 0.1},
        {"top_p": 0.7},
        {"top_k": V + 1, "top_p": 0.7},
        {"top_k": 5, "min_p": 0.01},
        {"top_p": 1e-30},
        {},
    ],
)
def test_each_filter_alone_leaves_other_entries_uncut(option):
    """The others off: an option at its neutral value must not cut, in its own row or in a row beside it."""
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (B, T, V)).astype(np.float32)
    rows = rows_of([OFF | {"temperature": 1.0} | option, OFF | {"temperature": 0.7}, OFF])
    found = np.asarray(run(jnp.asarray(logits), rows))
    for b in range(B):
        for t in range(T):
            assert_processed(found[b, t], processed_reference(logits[b, t], options_of(rows, b))[0])
    assert np.isfinite(found[1:]).all()


def test_ties_at_a_cut_stay():
    logits = jnp.asarray([[[3.0, 1.0, 2.0, 2.0, -1.0, 2.0] + [-5.0] * (V - 6)]])
    by_k = run(logits, rows_of([OFF | {"temperature": 1.0, "top_k": 2}]))[0, 0]
    assert np.flatnonzero(np.isfinite(by_k)).tolist() == [0, 2, 3, 5]
    weights = np.exp(np.asarray(logits[0, 0]) - 3)
    inside = (weights[0] + 0.5 * weights[2]) / weights.sum()
    by_p = run(logits, rows_of([OFF | {"temperature": 1.0, "top_p": inside}]))[0, 0]
    assert np.flatnonzero(np.isfinite(by_p)).tolist() == [0, 2, 3, 5]


VALUES = st.one_of(
    st.floats(-10, 10, width=32),
    st.sampled_from([-np.inf, -3.0, -1.0, 1.0, 3.0, 0.0, 1e-30, -1e-30, 1e30, -1e30, -np.float32(3.4028235e38)]),
)
threshold = jax.jit(lambda x, k: _smallest_top_set(x, lambda m: m.sum(-1, keepdims=True) >= k))


@settings(max_examples=200, derandomize=True)
@given(st.lists(VALUES, min_size=V, max_size=V), st.integers(1, V))
def test_bisection_finds_the_kth_largest_exactly(values, k):
    values = np.array(values, np.float32) + np.float32(0)  # no negative zero: its order is the next test's
    expected = values >= np.sort(values)[-k]
    np.testing.assert_array_equal(np.asarray(threshold(jnp.asarray(values), k)), expected)


def test_bisection_at_the_ends():
    lowest, highest = np.float32(-np.inf), np.float32(np.inf)
    for values in ([lowest] * V, [highest] * V, [lowest] * (V - 1) + [highest], [0.5] * V):
        values = np.array(values, np.float32)
        for k in (1, 2, V):
            kept = np.asarray(threshold(jnp.asarray(values), k))
            np.testing.assert_array_equal(kept, values >= np.sort(values)[-k])


def test_top_p_of_1_keeps_the_tail_that_a_sum_loses():
    logits = jnp.asarray(np.linspace(0, -60, V, dtype=np.float32))[None, None]
    rows = rows_of([OFF | {"temperature": 1.0, "top_k": V - 1}])
    assert np.isfinite(run(logits, rows)[0, 0]).sum() == V - 1


@settings(max_examples=100, derandomize=True)
@given(
    st.sampled_from([1e-330, 1e-46, 1e-45, 1e-40, 1e-39, 1e-38, 1.1754944e-38, 3e-38, 1e-30, 1e-12]),
    st.sampled_from([1e-5, 0.3, 1.0, 50.0]),
    st.sampled_from([0, 1, 3, V]),
    st.sampled_from([0.0, 1e-45, 0.5, 1.0]),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_the_smallest_top_p_is_greedy(top_p, temperature, top_k, min_p, seed, tied):
    """Denormals, and what float32 takes for 0, too: the likeliest token always stays, and what ties with it."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (B, T, V)).astype(np.float32)
    logits = np.round(logits) if tied else logits
    option = OFF | {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    rows = rows_of([option, OFF | {"temperature": 1.0, "min_p": 1.0}, option])
    found = run(jnp.asarray(logits), rows)
    for b in range(B):
        for t in range(T):
            expected, margin = processed_reference(logits[b, t], options_of(rows, b))
            assume(margin > 1e-5)
            assert_processed(np.asarray(found[b, t]), expected)
    tokens = np.asarray(draw(found, rows, jnp.asarray([[0, 1]] * B)))
    chosen = np.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    np.testing.assert_array_equal(chosen, logits.max(-1))


SMALL = [1.2e-38, 2e-38, 1e-37, 1e-30, 1e-20, 1e-10, 1e-3]
extreme_options = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, *SMALL, 0.7, 1.0, 1e30]),
        "top_k": st.sampled_from([0, 1, 3]),
        "top_p": st.sampled_from([1.0, 0.9, 1e-38]),
        "min_p": st.sampled_from([0.0, 1e-38, 0.3, 1.0]),
        "repetition": st.sampled_from([1.0, 1.3, 1e-30, 1e30]),
        "frequency": st.sampled_from([0.0, 2.0, -2.0, 1e30, -1e30]),
        "presence": st.sampled_from([0.0, 2.0, 1e30, -1e30]),
    }
)


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(extreme_options, min_size=B, max_size=B),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    st.sampled_from([0.0, 100.0, 1e30]),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
)
def test_extreme_numbers_draw_an_allowed_token_and_small_temperatures_the_best(
    options, scale, bias, seed, tied, masked
):
    """No quotient or product is too large for float32: not of one option, and not of all of them together."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (B, T, V))
    logits = ((np.round(logits) if tied else logits) * scale).astype(np.float32)
    rows = rows_of(
        options,
        logit_bias=bias * rng.integers(-1, 2, (B, V)) * (rng.random((B, V)) < 0.2),
        logprobs_mode=[PROCESSED] * B,
        seed=rng.integers(0, 2**32, B),
    )
    rows = with_counts(rows, *rng.poisson(0.3, (2, B, V)))
    allowed = (rng.random((B, T, V)) < 0.7) | (not masked)
    allowed[..., rng.integers(V)] = True
    positions, mode = jnp.asarray(rng.integers(0, 1000, (B, T))), sampling_mode(rows)
    place = jnp.zeros((B, T), jnp.int32), jnp.full(B, T), pack(allowed)
    tokens, logprobs = at_once(jnp.asarray(logits), rows, positions, mode, *place, jnp.ones(B, bool), top=2)
    processed = np.asarray(run(jnp.asarray(logits), rows, *place))
    assert not np.isnan(processed).any()
    assert not np.isposinf(processed).any()
    for values in (logprobs.chosen, logprobs.values, logprobs.named):
        assert not np.isnan(values).any()
        assert (np.asarray(values) <= 1e-5).all()
    greedy = replace(rows, temperature=jnp.zeros(B))
    best_tokens, _ = at_once(jnp.asarray(logits), greedy, positions, sampling_mode(greedy), *place)
    for b, t in np.ndindex(B, T):
        token = int(tokens[b, t])
        assert allowed[b, t, token]
        assert np.isfinite(logprobs.chosen[b, t])
        scores, _ = processed_reference(logits[b, t], options_of(greedy, b), allowed[b, t])
        scores = np.clip(scores, -1e38, 1e38)
        near = scores >= scores.max() - 1e-5 * np.abs(scores.max())
        rest = scores[~near].max(initial=-np.inf)
        if options[b]["temperature"] * 60 < scores.max() - rest:
            assert near[token]
            if near.sum() == 1:
                assert token == best_tokens[b, t]


def test_a_temperature_that_float32_has_not_is_greedy():
    numbers = dict.fromkeys(
        ("num_resumed", "limit", "rope_delta", "draft_window", "draft_sinks", "top_k", "seed", "logprobs_mode",
         "wants_logprobs", "top_p", "min_p", "repetition", "frequency", "presence"), 1
    )  # fmt: skip
    for temperature, expected in ((1e-46, 0), (1e-39, 0), (2e-38, np.float32(2e-38)), (0.7, np.float32(0.7))):
        packed = Admission.pack([1], 4, [], {}, [], **numbers, temperature=temperature)
        assert packed.floats[0] == expected


def test_a_temperature_scales_before_the_cuts():
    logits = jnp.asarray(np.linspace(3, -3, V, dtype=np.float32))[None, None]
    kept = [np.isfinite(run(logits, rows_of([OFF | {"temperature": t, "top_p": 0.5}]))).sum() for t in (0.3, 1, 3)]
    assert kept[0] < kept[1] < kept[2]


def test_mask_beats_bias_and_reaches_the_last_token():
    allowed = np.zeros((1, 1, V), bool)
    allowed[..., V - 1] = True
    bias = np.full((1, V), 100.0)
    bias[0, V - 1] = -100
    for temperature in (0.0, 1.0):
        rows = rows_of([OFF | {"temperature": temperature, "top_k": 3, "top_p": 0.9}], logit_bias=bias)
        found = run(jnp.zeros((1, 1, V)), rows, None, None, pack(allowed))
        assert int(draw(found, rows, jnp.zeros((1, 1), jnp.int32))[0, 0]) == V - 1


def test_penalties_see_the_block_before_a_place_and_nothing_behind_it():
    rows = rows_of([OFF | {"frequency": 1.0, "presence": 0.25}])
    block = jnp.asarray([[4, 7, 4, 4]])
    found = np.asarray(run(jnp.zeros((1, 4, V)), rows, block, jnp.asarray([1])))[0]
    # The first is in the counts already (none here), so places 0 … 3 hold 0, {7}, {7, 4}, {7, 4, 4}.
    np.testing.assert_allclose(found[:, 4], [0, 0, -1.25, -2.25])
    np.testing.assert_allclose(found[:, 7], [0, -1.25, -1.25, -1.25])
    assert (np.delete(found, [4, 7], axis=1) == 0).all()


def test_a_block_without_num_known_is_refused():
    """Its tokens would be left out of the counts."""
    rows, logits, block = rows_of([OFF]), jnp.zeros((1, 2, V)), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="num_known"):
        at_once(logits, rows, block, jnp.zeros(1, jnp.int32), block)


def test_repetition_counts_the_prompt_and_frequency_does_not():
    counts = np.zeros((2, 1, V), int)
    counts[0, 0, 3] = counts[1, 0, 5] = 2
    rows = with_counts(rows_of([OFF | {"repetition": 2.0, "frequency": 1.0}]), *counts)
    found = np.asarray(run(jnp.ones((1, 1, V)), rows))[0, 0]
    assert (found[3], found[5], found[0]) == (0.5, -1.5, 1.0)


@settings(max_examples=30, derandomize=True)
@given(st.lists(row_options, min_size=B, max_size=B), st.integers(0, 10**6))
def test_a_row_does_not_depend_on_its_neighbours(options, seed):
    """Bit for bit: processed logits, token and log-probabilities, greedy rows with filters set included."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(0, 3, (B, T, V)), jnp.float32)
    more = {"seed": rng.integers(0, 2**32, B, dtype=np.uint32), "logprobs_mode": rng.integers(0, 5, B)}
    rows = with_counts(rows_of(options, **more), *rng.poisson(0.3, (2, B, V)))
    positions = jnp.asarray(rng.integers(0, 5000, (B, T)))

    def results(logits, rows, positions):
        processed = run(logits, rows)
        tokens = draw(processed, rows, positions)
        return processed, tokens, score(reported(logits, rows), tokens, rows, 2)

    together = results(logits, rows, positions)
    for b in range(B):
        alone = results(logits[b : b + 1], jax.tree.map(lambda x, b=b: x[b : b + 1], rows), positions[b : b + 1])
        jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y[0]), together, alone)


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.just(OFF) | row_options, min_size=B, max_size=B),
    st.integers(0, 10**6),
    st.booleans(),
    st.booleans(),
    st.lists(st.booleans(), min_size=B, max_size=B),
)
def test_a_draw_at_once_is_the_draw_in_parts(options, seed, biased, masked, wanted):
    """Bit for bit, whichever branch is taken; and a row among others is the row alone."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(np.round(rng.normal(0, 3, (B, T, V)), 1), jnp.float32)
    bias = biased * np.where(rng.random((B, V)) < 0.1, 4.0, 0.0) * np.array([[0], [1], [0]])
    more = {"seed": rng.integers(0, 2**32, B, dtype=np.uint32), "logprobs_mode": rng.integers(0, 5, B)}
    rows = with_counts(rows_of(options, logit_bias=bias, **more), *rng.poisson(0.3, (2, B, V)))
    allowed = rng.random((B, T, V)) < 0.7
    allowed[..., rng.integers(V)] = True
    block, known = rng.integers(0, V, (B, T)), rng.integers(0, T + 1, B)
    place = [jnp.asarray(x) for x in (block, known)] + [pack(allowed | (not masked))]
    positions, wanted = jnp.asarray(rng.integers(0, 5000, (B, T))), jnp.asarray(wanted)
    modes = sampling_mode(rows)
    penalised = [any(o[k] != OFF[k] for k in OFF if k not in FILTERS) for o in options] | bias.any(-1)
    random = [o["temperature"] > 0 for o in options]
    np.testing.assert_array_equal(modes, np.where(penalised, PENALISED, np.where(random, RANDOM, GREEDY)))
    tokens, found = at_once(logits, rows, positions, modes, *place, wanted, top=2)
    processed = run(logits, rows, *place)
    np.testing.assert_array_equal(tokens, draw(processed, rows, positions))
    expected = score(reported(logits, rows, *place), tokens, rows, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[wanted], b[wanted]), found, expected)
    assert wanted.any() or not any(x.any() for x in jax.tree.leaves(found))
    # The same by rows of larger tables, whose other rows hold anything.
    where = rng.permutation(B + 2)[:B]
    larger = {name: jnp.full((B + 2, V), 7, getattr(rows, name).dtype) for name in TABLES}
    larger = {name: x.at[where].set(getattr(rows, name)) for name, x in larger.items()}
    among = replace(rows, slots=jnp.asarray(where), **larger)
    np.testing.assert_array_equal(at_once(logits, among, positions, sampling_mode(among), *place)[0], tokens)
    silent, nothing = at_once(logits, rows, positions, modes, *place)
    np.testing.assert_array_equal(silent, tokens)
    assert nothing is None
    for b in range(B):
        own = jax.tree.map(lambda x, b=b: x[b : b + 1], (logits, rows, positions, modes, *place, wanted))
        mine, theirs = at_once(*own, top=2)
        np.testing.assert_array_equal(mine[0], tokens[b])
        if wanted[b]:
            jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y[0]), found, theirs)


def test_draws_follow_the_processed_distribution():
    rng = np.random.default_rng(3)
    logits, n = rng.normal(0, 1.5, V).astype(np.float32), 20_000
    rows = sampling(n, V, temperature=np.full(n, 1.3), top_k=np.full(n, 12), seed=np.arange(n))
    expected, _ = processed_reference(logits, options_of(rows, 0))
    processed = run(jnp.asarray(logits)[None, None], jax.tree.map(lambda x: x[:1], rows))
    tokens = np.asarray(draw(jnp.broadcast_to(processed, (n, 1, V)), rows, jnp.full((n, 1), 17)))
    p = scipy.special.softmax(expected)
    counts = np.bincount(tokens.ravel(), minlength=V)
    assert counts[p == 0].sum() == 0
    assert scipy.stats.chisquare(counts[p > 0], n * p[p > 0]).pvalue > 1e-3


def test_a_greedy_row_takes_the_largest_beside_a_hot_one():
    rng = np.random.default_rng(4)
    logits = jnp.asarray(rng.normal(0, 1, (2, 50, V)), jnp.float32)
    rows = rows_of([OFF, OFF | {"temperature": 3.0}])
    tokens = np.asarray(draw(run(logits, rows), rows, jnp.tile(jnp.arange(50), (2, 1))))
    largest = np.asarray(logits.argmax(-1))
    assert (tokens[0] == largest[0]).all()
    assert (tokens[1] != largest[1]).mean() > 0.5


@pytest.mark.parametrize("top", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
def test_logprobs_of_every_mode_are_those_of_their_definition(top, temperature):
    """SGLang's rule is scaled_logprobs: penalties, bias and temperature, no cuts; greedy at temperature 1."""
    rng, count = np.random.default_rng(5), len(LOGPROBS_MODES)
    logits = rng.normal(0, 3, (count, T, V)).astype(np.float32)
    options = OFF | {"temperature": temperature, "top_k": 6, "top_p": 0.8, "min_p": 0.01}
    options |= {"repetition": 1.3, "frequency": 0.4, "presence": -0.6}
    bias = np.where(rng.random((count, V)) < 0.2, 3.0, 0.0)
    rows = rows_of(
        [options] * count, logprobs_mode=np.arange(count), logit_bias=bias, logprob_ids=[[2, V - 1] + [-1] * 18] * count
    )
    rows, allowed = with_counts(rows, *rng.poisson(0.3, (2, count, V))), rng.random((count, T, V)) < 0.8
    allowed[..., :8] = True
    positions = jnp.arange(count * T).reshape(count, T)
    place = jnp.zeros((count, T), jnp.int32), jnp.full(count, T), pack(allowed)
    tokens, found = at_once(
        jnp.asarray(logits), rows, positions, sampling_mode(rows), *place, jnp.ones(count, bool), top=top
    )
    for b, t in np.ndindex(count, T):
        row, kind = options_of(rows, b), LOGPROBS_MODES[b]
        uncut = row | {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        used = {"raw": None, "processed": row, "scaled": uncut}[kind.split("_")[0]]
        expected = logits[b, t].astype(np.float64)
        if used is not None:
            expected, margin = processed_reference(logits[b, t], used, allowed[b, t])
            assert margin > 1e-4
        if kind.endswith("logprobs"):
            expected = scipy.special.log_softmax(expected)
        np.testing.assert_allclose(found.chosen[b, t], expected[tokens[b, t]], atol=1e-5)
        order = np.argsort(-expected)[:top]
        # Tokens that are cut have no order.
        kept = np.isfinite(expected[order])
        np.testing.assert_array_equal(found.ids[b, t][kept], order[kept])
        np.testing.assert_allclose(found.values[b, t], expected[order], atol=1e-5)
        np.testing.assert_allclose(found.named[b, t, :2], expected[[2, V - 1]], atol=1e-5)
