"""The delta rule in chunks, and the replay of a record, against the recurrence itself in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import delta_rule as module
from dflash_jax.ops.backend import XLA
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.delta_rule import delta_rule, unit_lower_inverse
from dflash_jax.ops.gated_delta import replay

B, G, R, DK, DV = 2, 2, 3, 10, 7

rule = jax.jit(delta_rule)
rule_in_chunks_of_8 = jax.jit(lambda *x: delta_rule(*x, chunk=8))
replayed = jax.jit(lambda *args: replay(XLA, *args))


def recurrence(q, k, v, beta, log_decay, state):
    """Step by step: S ← e^g S; δ = β (v - Sᵀk); S ← S + k ⊗ δ; o = Sᵀq. Returns o, δ and the state after every step."""
    q, k, v, beta, log_decay, s = (np.asarray(x, np.float64) for x in (q, k, v, beta, log_decay, state))
    out, deltas, states = np.zeros(v.shape), np.zeros(v.shape), [s.copy()]
    for t in range(q.shape[1]):
        s = s.copy()
        for b in range(s.shape[0]):
            for g in range(s.shape[1]):
                for r in range(s.shape[2]):
                    s[b, g, r] *= np.exp(log_decay[b, t, g, r])
                    delta = beta[b, t, g, r] * (v[b, t, g, r] - s[b, g, r].T @ k[b, t, g])
                    s[b, g, r] += np.outer(k[b, t, g], delta)
                    out[b, t, g, r] = s[b, g, r].T @ q[b, t, g]
                    deltas[b, t, g, r] = delta
        states.append(s)
    return out, deltas, np.stack(states)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(t: int, seed: int = 0, decay=lambda rng, shape: -rng.gamma(0.5, 0.3, shape), beta=None, keys=None):
    rng = np.random.default_rng(seed)
    arrays = (
        unit(rng.standard_normal((B, t, G, DK))) * DK**-0.5,
        unit(rng.standard_normal((B, t, G, DK))) if keys is None else keys,
        rng.standard_normal((B, t, G, R, DV)),
        rng.uniform(0, 1, (B, t, G, R)) if beta is None else np.full((B, t, G, R), beta),
        decay(rng, (B, t, G, R)),
        rng.standard_normal((B, G, R, DK, DV)),
    )
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def assert_equals_recurrence(arrays, run=rule, atol=2e-5):
    out, delta = run(*arrays)
    want_out, want_delta, _ = recurrence(*arrays)
    assert np.isfinite(out).all()
    assert np.isfinite(delta).all()
    np.testing.assert_allclose(out, want_out, atol=atol, rtol=1e-5)
    np.testing.assert_allclose(delta, want_delta, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("t", [1, 5, 64, 65, 150])
def test_chunked_mixer_equals_the_recurrence(t):
    assert_equals_recurrence(inputs(t, seed=t))


def test_delta_rule_in_other_chunks_equals_the_recurrence():
    assert_equals_recurrence(inputs(150, seed=1), rule_in_chunks_of_8)


@pytest.mark.parametrize("t", [16, 64, 150, 88])
def test_as_a_gpu_runs_it(t, monkeypatch):
    """2, 8, 19 and 11 chunks: in one turn of the loop, in several, one at a time; where all of it is written over."""
    arrays = inputs(t, seed=t)
    expected = rule_in_chunks_of_8(*arrays)
    monkeypatch.setattr(module, "UNROLLED", 4)
    found = jax.jit(lambda *x: delta_rule(*x, chunk=8, unrolled=True))(*arrays)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    "decay",
    [
        lambda rng, shape: np.full(shape, -50.0),
        lambda rng, shape: np.where(rng.uniform(size=shape) < 0.3, -50.0, -0.01),
        lambda rng, shape: np.where(rng.uniform(size=shape) < 0.02, -1e4, 0.0),
        lambda rng, shape: np.zeros(shape),
    ],
    ids=["always_strong", "strong_and_weak", "resets", "none"],
)
def test_delta_rule_with_any_decay_equals_the_recurrence(decay):
    """Decays whose products underflow, and whose inverses overflow, give neither NaN nor error. Those within a chunk
    are differences of a sum that reaches -2,000 here, whose rounding of 1e-4 must not show."""
    assert_equals_recurrence(inputs(150, seed=2, decay=decay))


def test_identical_keys_with_full_beta():
    """Then every step replaces the value under one key: δ is the difference of successive values."""
    keys = np.broadcast_to(unit(np.ones(DK)), (B, 150, G, DK))
    arrays = inputs(150, seed=3, decay=lambda rng, shape: np.zeros(shape), beta=1.0, keys=keys)
    assert_equals_recurrence(arrays)
    _, delta = rule(*arrays)
    np.testing.assert_allclose(delta[:, 1:], arrays[2][:, 1:] - arrays[2][:, :-1], atol=1e-5)


def test_alternating_keys_with_full_beta():
    """Opposite keys: the signs in the triangular system alternate, its inverse does not shrink."""
    sign = np.where(np.arange(150) % 2, 1.0, -1.0)[None, :, None, None]
    keys = np.broadcast_to(unit(np.ones(DK)) * sign, (B, 150, G, DK))
    assert_equals_recurrence(inputs(150, seed=4, decay=lambda rng, shape: np.zeros(shape), beta=1.0, keys=keys))


@pytest.mark.parametrize("m", [1, 2, 16, 64])
def test_unit_lower_inverse_equals_numpy_and_is_triangular(m):
    rng = np.random.default_rng(m)
    a = np.eye(m) + np.tril(rng.uniform(-1, 1, (3, 2, m, m)) * m**-0.5, -1)
    got = unit_lower_inverse(jnp.asarray(a, jnp.float32))
    np.testing.assert_allclose(got, np.linalg.inv(a), atol=1e-5)
    # The part above the diagonal is zero, not small: it would let the future in.
    assert not np.triu(np.asarray(got), 1).any()


@pytest.mark.parametrize("strong", [False, True])
def test_replay_equals_the_state_after_n_steps(strong):
    """Any prefix of a record, mixed in a batch; what was not kept may hold anything."""
    t, kernel, channels = 21, 4, 5
    decay = (lambda rng, shape: np.where(rng.uniform(size=shape) < 0.3, -50.0, -0.1)) if strong else None
    arrays = inputs(t, seed=6, **({"decay": decay} if strong else {}))
    _, k, _, _, log_decay, start = arrays
    _, delta = rule(*arrays)
    _, _, states = recurrence(*arrays)
    rng = np.random.default_rng(7)
    old = jnp.asarray(rng.standard_normal((B, kernel - 1, G, channels)), jnp.float32)
    new = jnp.asarray(rng.standard_normal((B, t, G, channels)), jnp.float32)
    window = np.concatenate([old, new], axis=1)
    for n in [(0, t), (1, t - 1), (2, 3), (t, 0), (10, 7)]:
        dropped = np.arange(t)[None] >= np.asarray(n)[:, None]

        def poison(x, dropped=dropped):
            return jnp.where(dropped.reshape(B, t, *[1] * (x.ndim - 2)), jnp.nan, x)

        record = DeltaRecord(poison(k), poison(delta), poison(log_decay), poison(new))
        got = replayed(DeltaState(start, old), record, jnp.asarray(n, jnp.int32))
        for b in range(B):
            np.testing.assert_allclose(got.recurrent[b], states[n[b], b], atol=2e-5)
            np.testing.assert_array_equal(got.conv_inputs[b], window[b, n[b] : n[b] + kernel - 1])
            if n[b] == 0:
                np.testing.assert_array_equal(got.recurrent[b], start[b])
