"""Triton kernels against their plain definitions, over odd sizes, lengths, dtypes and windows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import random_decoder, tiny_config

from dflash_jax.cache import Bounds, DeltaRecord, DeltaState, KVCache, attend_in_pieces, replay_plain
from dflash_jax.config import GatedDeltaSpec, MoeSpec
from dflash_jax.models.decoder import init_cache
from dflash_jax.models.gated_delta import mix
from dflash_jax.models.moe import experts_gathered, mixture, mixture_by_platform, mixture_triton
from dflash_jax.models.parts import Normed, projections
from dflash_jax.models.weights import quantize


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("tokens", "top", "experts", "idle", "quantized", "shared"),
    [
        (1, 2, 7, 0, None, None),
        (1, 8, 20, 0, None, 96),
        (1, 2, 7, 0, ("fp8", 2), 96),
        (1, 2, 7, 0, ("fp8", 3), 96),
        (1, 2, 7, 0, ("fp8", 3), None),
        (1, 2, 7, 1, None, 96),
        (5, 3, 7, 2, None, 96),
        (5, 3, 7, 1, ("int8", 1), None),
        (5, 3, 7, 1, ("fp8", 2), 96),
        (5, 3, 7, 1, None, 64),
        (16, 8, 20, 3, None, 96),
        (16, 10, 24, 3, None, None),
        (70, 4, 5, 9, ("fp8", 2), 96),
        (3, 2, 8, 3, None, 96),
        (170, 2, 3, 5, None, 96),
    ],
)
def test_mixture(tokens, top, experts, idle, quantized, shared):
    """Routing with equal logits, experts of other devices, more choices than a program sorts, several blocks of an
    expert, experts that nobody chose, idle tokens; a shared expert of the experts' size and of another."""
    from dflash_jax.kernels.triton_experts import fits

    rng, features, hidden = np.random.default_rng(tokens), 96, 192
    there = experts - experts // 4
    x, gate_up = normal(rng, tokens, hidden), normal(rng, there, 2, features, hidden) / 20
    down = normal(rng, there, hidden, features) / 14
    if shared:
        shared = (normal(rng, 2, shared, hidden) / 20, normal(rng, hidden, shared) / 14, normal(rng, tokens))
    if quantized:
        gate_up, down = quantize(gate_up, *quantized), quantize(down, *quantized)
        shared = shared and (*(quantize(w, *quantized) for w in shared[:2]), shared[2])
    spec = MoeSpec(num_experts=experts, experts_per_token=top, intermediate_size=features, normalise_top_k=top != 3)
    logits = jnp.round(normal(rng, tokens, experts) * 2) / 2
    live = jnp.arange(tokens) < tokens - idle
    assert fits(tokens * top, gate_up, down)
    for residual in (None, normal(rng, tokens, hidden)):
        args = (x, logits, live, experts // 4, gate_up, down, shared, residual, spec)
        np.testing.assert_allclose(mixture_triton(*args), mixture(*args), atol=3e-6)


def test_what_a_choice_of_no_weight_would_have_read_is_not_read():
    """Of one token: an expert of weight 0 may hold anything."""
    from dflash_jax.kernels.triton_experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 1, 64), normal(rng, 4, 2, 32, 64), normal(rng, 4, 64, 32)
    weights, chosen = jnp.asarray([[0.5, 0.0]]), jnp.asarray([[1, 0]])
    spoilt = experts_triton(x, weights, chosen, gate_up.at[0].set(jnp.nan), down.at[0].set(jnp.nan))
    np.testing.assert_allclose(spoilt, experts_gathered(x, weights, chosen, gate_up, down), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_one_another():
    """The same bits for a token among others as among copies of itself."""
    from dflash_jax.kernels.triton_experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    chosen = jnp.asarray([rng.permutation(8)[:2] for _ in range(6)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (6, 2)), jnp.float32)
    among = experts_triton(x, weights, chosen, gate_up, down)
    for i in range(6):
        copies = (jnp.repeat(y[i : i + 1], 6, axis=0) for y in (x, weights, chosen))
        np.testing.assert_array_equal(experts_triton(*copies, gate_up, down)[0], among[i])


@pytest.mark.parametrize(
    ("hidden", "outputs", "quantized", "is_normed"),
    [
        (192, ((6, 16), (48,)), None, True),
        (128, ((2, 32), (16,), (32,), (16,)), None, True),
        (64, ((20,),), None, False),
        (128, ((32,), (16,), (32,)), ("fp8", 2), True),
        (128, ((48,), (16, 2)), ("int8", 1), False),
    ],
)
def test_projections(hidden, outputs, quantized, is_normed):
    """One weight to four, of one kind or of two, by one token or by its norm."""
    from dflash_jax.kernels.triton_project import fits, project_triton

    rng = np.random.default_rng(len(outputs))
    x, norm = 3 * normal(rng, 1, 1, hidden), normal(rng, hidden) if is_normed else None
    weights = [normal(rng, *size, hidden) / 10 for size in outputs]
    if quantized:
        weights[:-1] = [quantize(w, *quantized) for w in weights[:-1]]
    assert fits(1, weights)
    given = Normed(x, norm, 1e-6, 1.0) if is_normed else x
    for got, expected in zip(project_triton(x, norm, weights, 1e-6, 1.0), projections(given, *weights), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "dim", "capacity", "window", "sinks"),
    [
        (3, 1, 4, 2, 16, 300, None, 0),
        (3, 5, 6, 2, 32, 700, None, 0),
        (2, 16, 8, 1, 16, 512, None, 0),
        (3, 4, 4, 2, 16, 2000, 300, 0),
        (4, 3, 4, 2, 16, 2000, 200, 50),
        (2, 33, 4, 2, 16, 300, None, 0),
        (3, 2, 4, 2, 16, 120, 100, 50),
        (3, 2, 4, 2, 16, 60, 100, 50),
    ],
)
def test_attention(rows, tokens, heads, kv_heads, dim, capacity, window, sinks):
    """Empty, partly filled and full contexts; rings with and without sinks; rows of a larger cache; what was never
    written is NaN."""
    from dflash_jax.kernels.triton_attention import attend_triton, fits

    rng = np.random.default_rng(tokens)
    q, k, v = (normal(rng, rows, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
    cache = KVCache.create(rows + 1, kv_heads, dim, capacity, jnp.float32, window, sinks)
    length = np.array([capacity * 2 // 3, capacity, 0, 30][:rows])
    held = np.full((2, *cache.k.shape), np.nan, np.float32)
    # The first is a compiled row that nobody has: its number is past the end.
    taken = np.array([rows + 1, 0, 2, 3][:rows])
    for b, row in enumerate(np.minimum(taken, rows)):
        held[:, row, :, : min(length[b], cache.capacity)] = rng.standard_normal(
            (2, kv_heads, min(length[b], cache.capacity), dim)
        )
    cache = KVCache(jnp.asarray(held[0]), jnp.asarray(held[1]), jnp.asarray(taken), cache.sinks, cache.ring)
    length = jnp.asarray(length, jnp.int32)
    bounds = Bounds.none(rows, tokens)
    if window is not None:
        size = 120 if sinks else None
        positions = length[:, None] + jnp.arange(tokens)
        zero = jnp.zeros(rows, jnp.int32)
        bounds = Bounds(
            jnp.zeros_like(positions) if sinks else positions - 250,
            length - size if sinks else zero,
            zero + sinks,
        )
    own = jnp.tril(jnp.ones((tokens, tokens), bool))
    assert fits(q)
    for mask in (own, jnp.broadcast_to(own, (rows, tokens, tokens)).at[0].set(True)):
        got = attend_triton(q, k, v, mask, cache, length, bounds)
        np.testing.assert_allclose(got, attend_in_pieces(q, k, v, mask, cache, length, bounds, 256), atol=1e-6)


def test_what_a_kernel_computes_has_a_gradient(monkeypatch):
    """That of a plain form: a target can be trained where kernels are."""
    from dflash_jax import kernels
    from dflash_jax.kernels import triton_experts, triton_routing

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    shared = (normal(rng, 2, 32, 64), normal(rng, 64, 32), normal(rng, 6))
    logits, live = normal(rng, 6, 8), jnp.ones(6, bool)
    spec = MoeSpec(num_experts=8, experts_per_token=2, intermediate_size=32)

    def gradient():
        def loss(x, logits, gate_up, down, shared):
            return jnp.sum(mixture_by_platform(x, logits, live, 0, gate_up, down, shared, x, spec) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(x, logits, gate_up, down, shared)

    plain, calls = gradient(), []

    def absent(kernel, args, out, grid, **meta):
        # Like a kernel, it cannot be differentiated.
        calls.append(kernel)
        return jax.pure_callback(lambda *args: None, tuple(out), *args)

    for module in (triton_experts, triton_routing):
        monkeypatch.setattr(module, "triton_call", absent)
    monkeypatch.setattr(kernels, "_choice", "triton")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient(), plain)
    assert calls


@pytest.mark.parametrize(
    ("rows", "tokens", "key_heads", "values", "key_dim", "value_dim", "alike"),
    [
        (1, 1, 2, 2, 16, 32, False),
        (2, 5, 1, 3, 16, 16, False),
        (1, 16, 2, 1, 32, 16, False),
        (2, 16, 1, 2, 16, 16, True),
    ],
)
def test_delta_rule(rows, tokens, key_heads, values, key_dim, value_dim, alike):
    """Convolution, gates, rule and norm; then the state after every count of tokens. ``alike``: the same token again
    and again with hardly any decay, where the inverse of a chunk is worst conditioned."""
    from dflash_jax.kernels.triton_delta import fits, mix_triton, replay_triton

    rng = np.random.default_rng(tokens)
    g, r, channels = key_heads, values, 2 * key_dim + values * value_dim
    state = DeltaState(normal(rng, rows, g, r, key_dim, value_dim), normal(rng, rows, 3, g, channels))
    qkvz, gates = normal(rng, rows, tokens, g, channels + r * value_dim), normal(rng, rows, tokens, 2, g, r)
    if alike:
        qkvz, state = jnp.broadcast_to(qkvz[:, :1], qkvz.shape), DeltaState(state.recurrent, 0 * state.conv)
        gates = jnp.full_like(gates, 8).at[:, :, 1].set(-12)
    weights = (
        normal(rng, g, channels, 4), jnp.log(jnp.asarray(rng.uniform(1, 16, (g, r)), jnp.float32)),
        normal(rng, g, r) - 3, normal(rng, value_dim),
    )  # fmt: skip
    assert fits(tokens, state)
    y, record = mix_triton(qkvz, gates, state, *weights, 1e-6)
    expected, plain = mix(qkvz, gates, state, *weights, 1e-6)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), DeltaRecord(*record), plain)
    for n in range(tokens + 1):
        # What is not kept may hold anything.
        left = jnp.arange(tokens) >= n
        spoilt = DeltaRecord(
            *(jnp.where(left.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in jax.tree.leaves(plain))
        )
        count = jnp.asarray([n, max(n - 1, 0)][:rows], jnp.int32)
        for a, b in zip(
            jax.tree.leaves(replay_triton(state, spoilt, count)),
            jax.tree.leaves(replay_plain(state, plain, count)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize("quantized", [None, ("int8", 1), ("fp8", 2)])
def test_a_kernel_gives_what_its_definition_gives(monkeypatch, dtype, tokens, quantized):
    """Shapes and dtypes, which a GPU's compiler would check: whole layers with their caches, and what is accepted."""
    from dflash_jax import kernels
    from dflash_jax.kernels import triton_attention, triton_delta, triton_experts, triton_project, triton_routing

    called = set()

    def stub(kernel, args, out, grid, **meta):
        called.add(kernel.fn.__name__)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out)

    for module in (triton_attention, triton_delta, triton_experts, triton_project, triton_routing):
        monkeypatch.setattr(module, "triton_call", stub)
    monkeypatch.setattr(kernels, "_choice", "triton")
    delta = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_kernel=4)
    config = tiny_config("da", vocab_size=61, hidden_size=64)
    layers = [replace(spec, ffn=MoeSpec(8, 2, 32, 32)) for spec in config.layers]
    config = replace(config, hidden_size=64, layers=(replace(layers[0], mixer=delta), layers[1]))
    model = jax.tree.map(lambda x: x.astype(dtype), random_decoder(config, 0))
    if quantized:
        ffn = model.layers[0].ffn
        for name in ("gate_up", "down"):
            for part in (ffn, ffn.shared):
                getattr(part, name).set_value(quantize(getattr(part, name)[...], *quantized))
    cache, length = init_cache(config, 2 if tokens > 1 else 1, 64, dtype), jnp.zeros(2 if tokens > 1 else 1, jnp.int32)

    def step(cache, length):
        block = jnp.zeros((len(length), tokens), jnp.int32)
        hidden, features, record = model.verify(block, cache, length, length + tokens, (0,))
        return hidden, features, model.commit(cache, record, length, length + tokens)

    with kernels.without():
        plain = jax.eval_shape(step, cache, length)
    # Another function: what is traced of one is kept.
    found = jax.eval_shape(lambda *args: step(*args), cache, length)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    wanted = {"_route"} | ({"_gate_up_one", "_down_one", "_project"} if tokens == 1 else {"_gate_up", "_down"})
    assert wanted | ({"_mix_one" if tokens == 1 else "_mix", "_replay"} if tokens <= 16 else set()) <= called
