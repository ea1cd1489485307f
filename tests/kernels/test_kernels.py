"""Triton kernels against their plain definitions, over odd sizes, lengths, dtypes and windows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import random_decoder, tiny_config

from dflash_jax.models.cache import attend_in_pieces, through_gate
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, MoeSpec, RopeSpec
from dflash_jax.models.decoder import init_cache
from dflash_jax.models.layers import Attention, DeferredNorm, linear
from dflash_jax.models.moe import experts_gathered, mixture, mixture_by_platform, mixture_triton
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.ops.weights import quantize
from dflash_jax.parallel.sharding import ONE_DEVICE
from dflash_jax.tools.float64_reference import assert_as_near
from dflash_jax.tools.kernels import arguments
from dflash_jax.tools.kernels.arguments import Source


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
        (16, 4, 20, 3, None, 96),
        (16, 5, 24, 3, None, None),
        (70, 4, 5, 9, ("fp8", 2), 96),
        (3, 2, 8, 3, None, 96),
        (170, 2, 3, 5, None, 96),
    ],
)
def test_mixture(tokens, top, experts, idle, quantized, shared):
    """Routing with equal logits, experts of other devices, more choices than a program sorts, several blocks of an
    expert, experts that nobody chose, idle tokens; a shared expert of the experts' size and of another."""
    from dflash_jax.ops.kernels.triton.experts import fits

    *args, spec = arguments.experts(
        Source(tokens), tokens, top, experts, 96, 192, idle, quantized, shared, residual=tokens != 16
    )
    assert fits(tokens * top, *args[4:6])
    assert_as_near(mixture_triton(*args, spec), partial(mixture, spec=spec), *args)


def test_blocks_of_128_rows():
    """16-bit weights of which each expert has more than 64 choices on average, against float32 of the same values."""
    from dflash_jax.ops.kernels.triton.experts import _rows_of_a_block, experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 110, 64), normal(rng, 3, 2, 32, 64) / 8, normal(rng, 3, 64, 32) / 6
    chosen = jnp.asarray(rng.permuted(np.tile(np.arange(3), (110, 1)), axis=1)[:, :2], jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(110, 2)), jnp.float32)
    half = [a.astype(jnp.float16) for a in (x, gate_up, down)]
    assert _rows_of_a_block(chosen.size, 3, half[1]) == 128
    assert _rows_of_a_block(chosen.size, 3, gate_up) == 64
    found = experts_triton(half[0], weights, chosen, *half[1:])
    x, gate_up, down = (a.astype(jnp.float32) for a in half)
    exact = experts_gathered(x, weights, chosen, gate_up, down)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=4e-3)


def test_what_a_choice_of_no_weight_would_have_read_is_not_read():
    """Of one token: an expert of weight 0 may hold anything."""
    from dflash_jax.ops.kernels.triton.experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 1, 64), normal(rng, 4, 2, 32, 64), normal(rng, 4, 64, 32)
    weights, chosen = jnp.asarray([[0.5, 0.0]]), jnp.asarray([[1, 0]])
    spoilt = experts_triton(x, weights, chosen, gate_up.at[0].set(jnp.nan), down.at[0].set(jnp.nan))
    np.testing.assert_allclose(spoilt, experts_gathered(x, weights, chosen, gate_up, down), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_one_another():
    """The same bits for a token among others as among copies of itself."""
    from dflash_jax.ops.kernels.triton.experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    chosen = jnp.asarray([rng.permutation(8)[:2] for _ in range(6)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (6, 2)), jnp.float32)
    among = experts_triton(x, weights, chosen, gate_up, down)
    for i in range(6):
        copies = (jnp.repeat(y[i : i + 1], 6, axis=0) for y in (x, weights, chosen))
        np.testing.assert_array_equal(experts_triton(*copies, gate_up, down)[0], among[i])


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("hidden", "outputs", "quantized", "options"),
    [
        (192, ((6, 16), (48,)), None, {"norm"}),
        (128, ((2, 32), (16,), (32,), (16,)), None, {"norm", "kept"}),
        (64, ((20,),), None, {"residual"}),
        (192, ((70,), ()), None, {"norm", "kept", "float32"}),
        (128, ((2, 40),), None, {"norm", "gated"}),
        (128, ((2, 40),), ("fp8", 2), {"gated"}),
        (128, ((32,), (16,), (32,)), ("fp8", 2), {"norm", "kept"}),
        (128, ((48,), (16, 2)), ("int8", 1), set()),
        (128, ((48,),), ("int8", 1), {"residual"}),
    ],
)
@pytest.mark.parametrize("programs", [1, 1000])
def test_linear(monkeypatch, rows, hidden, outputs, quantized, options, programs):
    """One weight to four, of one kind or of several, by tokens or by their norm; more outputs than a program takes."""
    from dflash_jax.ops import backend
    from dflash_jax.ops.kernels.triton import linear as triton_project

    monkeypatch.setattr(triton_project, "PROGRAMS", (programs, programs))
    monkeypatch.setattr(triton_project, "MOST_NORMED", programs)
    source = Source(len(outputs))
    x, norm, weights = arguments.projections(source, rows, hidden, outputs, quantized)
    assert triton_project.fits(rows, hidden, weights)
    given = DeferredNorm(x, norm, 1e-6, 1.0) if "norm" in options else x
    chosen = {"kept": "kept" in options, "gated": "gated" in options}
    if "residual" in options:
        chosen["residual"] = source.normal(rows, 1, *outputs[0])
    if "float32" in options:
        chosen["kind"] = jnp.float32
    expected, calls = linear(given, weights, **chosen), []
    monkeypatch.setattr(backend, "_choice", "triton")
    monkeypatch.setattr(backend, "instead_of", lambda plain, kernel, *args: calls.append(kernel) or kernel(*args))
    got = linear(given, weights, **chosen)
    assert calls
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("contracted", [2, 3])
def test_linear_over_several_axes(monkeypatch, contracted):
    from dflash_jax.ops import backend

    rng = np.random.default_rng(contracted)
    inner = (4, 2, 16)[-contracted:]
    x, weight = normal(rng, 2, 3, *inner), normal(rng, 24, *inner)
    rest = normal(rng, 2, 3, 24)
    expected = linear(x, (weight,), contracted, residual=rest)
    monkeypatch.setattr(backend, "_choice", "triton")
    monkeypatch.setattr(backend, "instead_of", lambda plain, kernel, *args: kernel(*args))
    np.testing.assert_allclose(linear(x, (weight,), contracted, residual=rest)[0], expected[0], atol=2e-5)


@pytest.mark.parametrize(("heads", "gated", "rotated"), [(4, True, 8), (3, False, 32), (0, False, 12)])
def test_rotation(heads, gated, rotated):
    """Queries with their gates beside them, or none; all of a head or its first places; with norms and without."""
    from dflash_jax.ops.kernels.triton.attention import rotate_triton, rotates

    rng = np.random.default_rng(heads)
    q = normal(rng, 2, 3, heads, 2 if gated else 1, 32) if heads else None
    k, rope = normal(rng, 2, 3, 2, 32), RopeSpec(theta=100.0, dim=rotated)
    angles = rope_angles(jnp.asarray([[3, 4, 5], [70, 71, 72]]), rope)
    assert rotates(k)
    for norm in (False, True):
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, rope=rope, qk_norm=norm, gated=gated)
        layer = Attention(spec, 16, 1e-6, 1.0, nnx.Rngs(0), jnp.float32, ONE_DEVICE)
        norms = [None, None]
        if norm:
            norms = [normal(rng, 32), normal(rng, 32)]
            layer.q_norm.weight.set_value(norms[0])
            layer.k_norm.weight.set_value(norms[1])
        expected = layer.rotated(q, k, angles)
        for one, other in zip(rotate_triton(q, k, angles, norms, 1e-6, 1.0), expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "dim", "capacity", "window", "sinks"),
    [
        (3, 1, 4, 2, 16, 300, None, 0),
        (3, 5, 6, 2, 32, 700, None, 0),
        (2, 16, 4, 1, 16, 300, None, 0),
        (3, 4, 4, 2, 16, 2000, 300, 0),
        (4, 3, 4, 2, 16, 2000, 200, 50),
        (2, 33, 2, 1, 16, 300, None, 0),
        (1, 70, 2, 2, 128, 40, None, 0),
        (3, 2, 4, 2, 16, 120, 100, 50),
        (3, 2, 4, 2, 16, 60, 100, 50),
        (2, 3, 4, 2, 256, 100, None, 0),
        (2, 9, 6, 2, 128, 300, None, 0),
    ],
)
@pytest.mark.parametrize("form", ["triton", "cpu"])
def test_attention(form, rows, tokens, heads, kv_heads, dim, capacity, window, sinks):
    """Empty, partly filled and full contexts; rings with and without sinks; rows of a larger cache; what was never
    written is NaN."""
    source = Source(tokens)
    args = arguments.attention(source, rows, tokens, heads, kv_heads, dim, capacity, window, sinks)
    q, k, v, cache, length, bounds = args
    own = jnp.tril(jnp.ones((tokens, tokens), bool))
    if form == "triton":
        from dflash_jax.ops.kernels.triton import attention as triton_attention

        assert triton_attention.fits(q)
        attend = triton_attention.attend_triton
    else:
        assert cpu.attends(q, cache)
        if not cpu.is_here():
            pytest.skip("no C++ compiler")

        def attend(*args):
            return through_gate(cpu.attend(*args[:-1]), args[-1])

    for mask in (None, own, jnp.broadcast_to(own, (rows, tokens, tokens)).at[0].set(True)):
        both = source.normal(rows, tokens, heads, 2, dim) if mask is None else None
        expected = through_gate(attend_in_pieces(q, k, v, mask, cache, length, bounds, 256), both)
        np.testing.assert_allclose(attend(q, k, v, mask, cache, length, bounds, both), expected, atol=1e-6)


@pytest.mark.parametrize(("rows", "tokens", "window"), [(1, 1, None), (3, 5, None), (2, 16, 20)])
def test_writing(rows, tokens, window):
    """Into rows of a larger cache, or one that is past its end; kept tokens only, in a ring only the newest of a
    slot."""
    from dflash_jax.ops.kernels.triton.attention import write_triton, writes

    cache, k, v, positions = arguments.written(Source(tokens), rows, tokens, 2, 16, 40, window)
    assert writes(k)
    for kept in range(tokens + 1):
        expected = cache.write(k, v, positions, jnp.arange(tokens) < jnp.full((rows, 1), kept))
        found = []

        def record(*args, found=found):
            found.extend(write_triton(*args))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dflash_jax.models.cache.put", record)
            cache.write(k, v, positions, jnp.arange(tokens) < jnp.full((rows, 1), kept))
        for one, other in zip(found, (expected.k, expected.v), strict=True):
            np.testing.assert_array_equal(one, other)


def mixture_and_arguments(rng):
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    shared = (normal(rng, 2, 32, 64), normal(rng, 64, 32), normal(rng, 6))
    live, spec = jnp.ones(6, bool), MoeSpec(num_experts=8, experts_per_token=2, intermediate_size=32)

    def function(x, logits, gate_up, down, shared):
        return mixture_by_platform(x, logits, live, 0, gate_up, down, shared, x, spec)

    return function, (x, normal(rng, 6, 8), gate_up, down, shared)


def attention_and_arguments(rng):
    rope = RopeSpec(theta=100.0, dim=8)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=rope, gated=True)
    layer = Attention(spec, 64, 1e-6, 1.0, nnx.Rngs(0), jnp.float32, ONE_DEVICE)
    starts, angles = jnp.zeros((1, 6), jnp.int32), rope_angles(jnp.arange(6)[None], rope)

    def function(x, norm, layer):
        return x + layer.whole(DeferredNorm(x, norm, 1e-6, 1.0), starts, angles)

    return function, (normal(rng, 1, 6, 64), normal(rng, 64), layer)


@pytest.mark.parametrize("part", [mixture_and_arguments, attention_and_arguments])
def test_what_a_kernel_computes_has_a_gradient(monkeypatch, part):
    """That of a plain form: a target can be trained where kernels are."""
    from dflash_jax.ops import backend
    from dflash_jax.ops.kernels.triton import attention as triton_attention
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import linear as triton_project
    from dflash_jax.ops.kernels.triton import routing as triton_routing

    function, args = part(np.random.default_rng(0))

    def gradient():
        every = tuple(range(len(args)))
        return jax.jit(jax.grad(lambda *args: jnp.sum(function(*args) ** 2), argnums=every))(*args)

    plain, calls = gradient(), []

    def absent(kernel, args, out, grid, **meta):
        # Like a kernel, it cannot be differentiated.
        calls.append(kernel)
        return jax.pure_callback(lambda *args: None, tuple(out), *args)

    for module in (triton_attention, triton_experts, triton_project, triton_routing):
        monkeypatch.setattr(module, "triton_call", absent)
    monkeypatch.setattr(backend, "_choice", "triton")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient(), plain)
    assert calls


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize("quantized", [None, ("int8", 1), ("fp8", 2)])
def test_a_kernel_gives_what_its_definition_gives(monkeypatch, dtype, tokens, quantized):
    """Shapes and dtypes, which a GPU's compiler would check: whole layers with their caches, and what is accepted."""
    from dflash_jax.ops import backend

    called = set()

    def stub(launch):
        called.add(launch.kernel.fn.__name__)
        written = [launch.args[i] for i in launch.in_place] + list(launch.out)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in written)

    monkeypatch.setattr(backend, "_choice", "triton")
    delta = GatedDeltaSpec(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_kernel=4)
    config = tiny_config("da", vocab_size=61, hidden_size=64)
    layers = [replace(spec, ffn=MoeSpec(8, 2, 32, 32)) for spec in config.layers]
    attention = replace(layers[1].mixer, head_dim=16)
    layers = (replace(layers[0], mixer=delta), replace(layers[1], mixer=attention))
    config = replace(config, hidden_size=64, layers=layers)
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

    # What was traced of a kernel by an earlier test is kept.
    jax.clear_caches()
    with backend.without():
        plain = jax.eval_shape(step, cache, length)
    # Another function: what is traced of one is kept.
    with launching(stub):
        found = jax.eval_shape(lambda *args: step(*args), cache, length)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    wanted = {"_route", "_rotate", "_attend", "_join", "_write"}
    wanted |= {"_gate_up_one", "_down_one", "_project_one"} if tokens == 1 else {"_gate_up", "_down"}
    wanted |= {"_project"} if tokens == 5 else set()
    wanted |= {"_mix_one" if tokens == 1 else "_mix", "_replay"} if tokens <= 16 else set()
    wanted |= {"_prepare", "_chunks"} if tokens > 16 and dtype == jnp.bfloat16 else set()
    assert wanted <= called
