"""`commit(verify(x), n)` equals feeding the first n tokens one by one; and idle rows keep to themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models.cache import init_cache
from dflash_jax.ops.cache import DeltaState, KVCache
from tests.helpers import commit, extend, map_numbers, random_decoder, tiny_config, tokens_of, verify

ROWS, T, CAPACITY = 4, 16, 96
PREFILLED = np.asarray([40, 3, 0, 21], np.int32)
TAPS = (0, 2)


@pytest.fixture(scope="module")
def target():
    return random_decoder(tiny_config("dad"), seed=1)


@pytest.fixture(scope="module")
def prefilled(target):
    """Rows of unequal lengths, one of them empty."""
    cache, rng = init_cache(target.config, ROWS, CAPACITY, jnp.float32), np.random.default_rng(2)
    length = np.zeros(ROWS, np.int32)
    while any(length < PREFILLED):
        n = np.minimum(PREFILLED - length, T)
        cache = extend(target, tokens_of(rng, ROWS, T), cache, jnp.asarray(length), jnp.asarray(n), taps=TAPS)[2]
        length += n
    return cache


@pytest.fixture(scope="module")
def block():
    return tokens_of(np.random.default_rng(3), ROWS, T)


@pytest.fixture(scope="module")
def steps(target, prefilled, block):
    """Caches after 0 … T tokens fed one at a time, and what each step gave out."""
    caches, hiddens, features = [prefilled], [], []
    ones = jnp.ones(ROWS, jnp.int32)
    for t in range(T):
        length = jnp.asarray(PREFILLED, jnp.int32) + t
        hidden, feature, cache = extend(target, block[:, t : t + 1], caches[-1], length, ones, taps=TAPS)
        caches.append(cache)
        hiddens.append(hidden)
        features.append(feature)
    return jax.tree.map(np.asarray, caches), np.concatenate(hiddens, axis=1), np.concatenate(features, axis=1)


def full(value: int):
    return jnp.full(ROWS, value, jnp.int32)


def test_verify_sees_what_steps_see(target, prefilled, block, steps):
    hidden, features, _ = verify(target, block, prefilled, jnp.asarray(PREFILLED), full(T), taps=TAPS)
    np.testing.assert_allclose(hidden, steps[1], atol=2e-5)
    np.testing.assert_allclose(features, steps[2], atol=2e-5)


@pytest.mark.parametrize("call", ["commit", "extend"])
def test_any_prefix_in_a_mixed_batch(call, target, prefilled, block, steps):
    """Every n from 0 to T in every row, each beside other n: recurrent and convolution state, keys and values."""
    length = jnp.asarray(PREFILLED)
    _, _, record = verify(target, block, prefilled, length, full(T), taps=TAPS)
    before = jax.tree.map(np.asarray, prefilled)
    for shift in range(T + 1):
        n = [(shift + 5 * row) % (T + 1) for row in range(ROWS)]
        if call == "commit":
            got = commit(target, prefilled, record, length, jnp.asarray(n, jnp.int32))
        else:
            got = extend(target, block, prefilled, length, jnp.asarray(n, jnp.int32), taps=TAPS)[2]
        got = jax.tree.map(np.asarray, got)
        for row in range(ROWS):
            for old, mine, want in zip(before, got, steps[0][n[row]], strict=True):
                if isinstance(mine, DeltaState):
                    np.testing.assert_allclose(mine.recurrent[row], want.recurrent[row], atol=2e-5)
                    np.testing.assert_allclose(mine.conv_inputs[row], want.conv_inputs[row], atol=2e-5)
                else:
                    assert isinstance(mine, KVCache)
                    for a, b, o in ((mine.k, want.k, old.k), (mine.v, want.v, old.v)):
                        end = PREFILLED[row] + n[row]
                        np.testing.assert_allclose(a[row, :, :end], b[row, :, :end], atol=2e-5)
                        # What was not committed left no trace.
                        np.testing.assert_array_equal(a[row, :, end:], o[row, :, end:])


def test_nothing_committed_changes_nothing(target, prefilled, block):
    _, _, record = verify(target, block, prefilled, jnp.asarray(PREFILLED), full(T), taps=TAPS)
    got = commit(target, prefilled, record, jnp.asarray(PREFILLED), full(0))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(prefilled), strict=True):
        np.testing.assert_array_equal(a, b)


def test_conv_state_of_short_rows(target, prefilled, block):
    """Fewer tokens than the convolution is long: the state keeps what stood before them."""
    n = jnp.asarray([0, 1, 2, 3], jnp.int32)
    got = jax.tree.map(np.asarray, extend(target, block, prefilled, jnp.asarray(PREFILLED), n, taps=TAPS)[2])
    for row in range(ROWS):
        for i in (0, 2):
            np.testing.assert_array_equal(got[i].conv_inputs[row, : 3 - row], prefilled[i].conv_inputs[row, row:])
            assert not np.isclose(got[i].conv_inputs[row, 3 - row :], 0).all() or row == 0


@pytest.mark.parametrize(("call", "slots"), [("extend", 1), ("extend", T), ("verify", T)])
def test_nan_in_an_idle_row_stays_there(call, slots, target, prefilled, block):
    """A row with n_valid 0 whose caches hold NaN, whatever its length says."""
    idle = 1
    poisoned = map_numbers(lambda x: x.at[idle].set(jnp.nan), prefilled)
    length = jnp.asarray(PREFILLED).at[idle].set(90)
    n = full(slots).at[idle].set(0)
    run = {"extend": extend, "verify": verify}[call]
    clean = run(target, block[:, :slots], prefilled, length, n, taps=TAPS)
    dirty = run(target, block[:, :slots], poisoned, length, n, taps=TAPS)
    others = [row for row in range(ROWS) if row != idle]
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.isfinite(np.asarray(a)[others]).all()
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])


@pytest.mark.parametrize("run", [extend, verify])
def test_nan_behind_the_length_of_a_live_row_stays_there(run, target, prefilled, block):
    """What a slot's last user left in its K/V, past what the next one has written."""

    def poison(cache):
        if not isinstance(cache, KVCache):
            return cache
        stale = jnp.arange(cache.capacity) >= jnp.asarray(PREFILLED)[:, None]
        return map_numbers(lambda x: jnp.where(stale[:, None, :, None], jnp.nan, x), cache)

    dirty = tuple(poison(cache) for cache in prefilled)
    assert any(np.isnan(x).any() for x in jax.tree.leaves(dirty))
    clean, dirty = (
        run(target, block, cache, jnp.asarray(PREFILLED), full(T), taps=TAPS)[:2] for cache in (prefilled, dirty)
    )
    for a, b in zip(clean, dirty, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_rows_do_not_see_one_another(target, prefilled, block):
    """A row alone and the same row in a batch."""
    hidden, _, _ = verify(target, block, prefilled, jnp.asarray(PREFILLED), full(T), taps=TAPS)
    order = jnp.asarray([2, 0, 3, 1])
    mixed, _, _ = verify(
        target,
        block[order],
        map_numbers(lambda x: x[order], prefilled),
        jnp.asarray(PREFILLED)[order],
        full(T),
        taps=TAPS,
    )
    np.testing.assert_allclose(mixed, hidden[order], atol=1e-5)


def test_tokens_past_the_valid_ones_do_not_matter(target, prefilled, block):
    n = jnp.asarray([3, 16, 0, 7], jnp.int32)
    other = jnp.where(jnp.arange(T)[None] < n[:, None], block, (block + 17) % target.config.vocab_size)
    a = extend(target, block, prefilled, jnp.asarray(PREFILLED), n, taps=TAPS)
    b = extend(target, other, prefilled, jnp.asarray(PREFILLED), n, taps=TAPS)
    valid = np.arange(T)[None] < np.asarray(n)[:, None]
    np.testing.assert_allclose(a[0][valid], b[0][valid], atol=1e-6)
    for x, y in zip(jax.tree.leaves(a[2]), jax.tree.leaves(b[2]), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
