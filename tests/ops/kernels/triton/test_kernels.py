"""Triton kernels against their plain definitions, over odd sizes, lengths, dtypes and windows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.models.cache import init_cache
from dflash_jax.models.config import AttentionSpec, GatedDeltaSpec, MoeSpec, RopeSpec
from dflash_jax.models.layers import Attention, with_backend
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops import attention, cache_write, moe, rotation
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.kernels.triton import attention as triton_attention
from dflash_jax.ops.kernels.triton.attention import partial_softmaxes_triton
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.ops.linear import DeferredDivision, DeferredNorm, linear
from dflash_jax.ops.weights import quantize
from dflash_jax.parallel.sharding import ONE_DEVICE
from tests.helpers import in_one_program, random_decoder, tiny_config
from tools.float64_reference import assert_as_near
from tools.kernels import arguments
from tools.kernels.arguments import Source

CUDA, PLAIN = Backend.for_card(HOPPER), Backend.xla("cuda")


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("tokens", "top", "experts", "idle", "quantized", "shared"),
    [
        pytest.param(1, 2, 7, 0, None, None, marks=pytest.mark.long),
        (1, 8, 20, 0, None, 96),
        pytest.param(1, 2, 7, 0, ("fp8", 2), 96, marks=pytest.mark.long),
        (1, 2, 7, 0, ("fp8", 3), 96),
        (1, 2, 7, 0, ("fp8", 3), None),
        (1, 2, 7, 1, None, 96),
        (5, 3, 7, 2, None, 96),
        pytest.param(5, 3, 7, 1, ("int8", 1), None, marks=pytest.mark.long),
        (5, 3, 7, 1, ("fp8", 2), 96),
        pytest.param(5, 3, 7, 1, None, 64, marks=pytest.mark.long),
        (16, 4, 20, 3, None, 96),
        pytest.param(16, 5, 24, 3, None, None, marks=pytest.mark.long),
        (70, 4, 5, 9, ("fp8", 2), 96),
        pytest.param(3, 2, 8, 3, None, 96, marks=pytest.mark.long),
        (170, 2, 3, 5, None, 96),
        (1, 2, 7, 1, ("nvfp4", 6), 96),
        pytest.param(1, 2, 7, 0, ("int4", 3), 96, marks=pytest.mark.long),
        (1, 2, 7, 0, ("int4 with zeros", 3), 96),
        (5, 3, 7, 2, ("nvfp4", 6), 96),
        (5, 3, 7, 1, ("mxfp4", 3), None),
        (16, 4, 20, 3, ("int4 with zeros", 3), 96),
        (70, 4, 5, 9, ("nvfp4", 6), 96),
        pytest.param(70, 4, 5, 9, ("int4", 3), 96, marks=pytest.mark.long),
    ],
)
def test_mixture_in_triton_equals_its_definition(tokens, top, experts, idle, quantized, shared):
    """Routing with equal logits, experts of other devices, more choices than a program sorts, several blocks of an
    expert, experts that nobody chose, idle tokens; a shared expert of the experts' size and of another."""
    *args, options = arguments.experts(
        Source(tokens), tokens, top, experts, 96, 192, idle, quantized, shared, residual=tokens != 16
    )
    found = in_one_program(partial(moe.mixture, replace(CUDA, on_choice=assert_triton), **options))(*args)
    assert_as_near(found, partial(moe.mixture, PLAIN, **options), *args)


@pytest.mark.parametrize(("tokens", "kind"), [(5, "int8"), (20, "fp8"), (170, "fp8")])
def test_mixtures_of_weights_of_one_scale_an_output_with_all_kernels(tokens, kind):
    """Their sums are scaled, in blocks of up to 128 rows."""
    *args, options = arguments.experts(Source(tokens), tokens, 2, 3, 96, 192, tokens // 9, (kind, 1), 96)
    backend = replace(CUDA, kernels="all", on_choice=assert_triton)
    found = in_one_program(partial(moe.mixture, backend, **options))(*args)
    assert_as_near(found, partial(moe.mixture, PLAIN, **options), *args)


def assert_triton(choice):
    """For `Backend.on_choice`: a kernel was taken."""
    assert choice.implementation.startswith("triton"), choice


def test_blocks_of_128_rows():
    """16-bit weights of which each expert has more than 64 choices on average, against float32 of the same values."""
    from dflash_jax.ops.kernels.triton.experts import _rows_of_a_block, experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 110, 64), normal(rng, 3, 2, 32, 64) / 8, normal(rng, 3, 64, 32) / 6
    chosen = jnp.asarray(rng.permuted(np.tile(np.arange(3), (110, 1)), axis=1)[:, :2], jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(110, 2)), jnp.float32)
    half = [a.astype(jnp.float16) for a in (x, gate_up, down)]
    assert _rows_of_a_block(chosen.size, 3, half[1], HOPPER) == 128
    assert _rows_of_a_block(chosen.size, 3, gate_up, HOPPER) == 64
    found = experts_triton(HOPPER, half[0], weights, chosen, *half[1:])
    x, gate_up, down = (a.astype(jnp.float32) for a in half)
    exact = moe.experts_gathered(XLA, x, weights, chosen, gate_up, down)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=4e-3)


def test_what_a_choice_of_no_weight_would_have_read_is_not_read():
    """Of one token: an expert of weight 0 may hold anything."""
    from dflash_jax.ops.kernels.triton.experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 1, 64), normal(rng, 4, 2, 32, 64), normal(rng, 4, 64, 32)
    weights, chosen = jnp.asarray([[0.5, 0.0]]), jnp.asarray([[1, 0]])
    spoilt = experts_triton(HOPPER, x, weights, chosen, gate_up.at[0].set(jnp.nan), down.at[0].set(jnp.nan))
    np.testing.assert_allclose(
        spoilt, moe.experts_gathered(XLA, x, weights, chosen, gate_up, down), rtol=1e-5, atol=1e-5
    )


def test_rows_do_not_depend_on_one_another():
    """The same bits for a token among others as among copies of itself."""
    from dflash_jax.ops.kernels.triton.experts import experts_triton

    rng = np.random.default_rng(0)
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    chosen = jnp.asarray([rng.permutation(8)[:2] for _ in range(6)], jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (6, 2)), jnp.float32)
    among = experts_triton(HOPPER, x, weights, chosen, gate_up, down)
    for i in range(6):
        copies = (jnp.repeat(y[i : i + 1], 6, axis=0) for y in (x, weights, chosen))
        np.testing.assert_array_equal(experts_triton(HOPPER, *copies, gate_up, down)[0], among[i])


# One row has a kernel of its own, which computes several rows where there are few outputs.
@pytest.mark.parametrize(
    ("rows", "programs", "by_row"), [(1, 1, 0), (1, 1000, 0), (3, 1, 0), (16, 1000, 0), (5, 1000, 1000)]
)
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
        (128, ((32,), (16,), (32,)), ("nvfp4", 8), {"norm", "kept"}),
        (128, ((2, 40),), ("int4", 4), {"norm", "gated"}),
        (128, ((48,), (16, 2)), ("int4 with zeros", 1), set()),
        (192, ((48,),), ("mxfp4", 6), {"residual"}),
    ],
)
def test_linear_in_triton_equals_its_definition(
    monkeypatch, rows, hidden, outputs, quantized, options, programs, by_row
):
    """One weight to four, of one kind or of several, by tokens or by their norm; more outputs than a program takes."""
    from dflash_jax.ops.kernels.triton import linear as triton_project

    monkeypatch.setattr(triton_project, "PROGRAMS", (programs, programs))
    monkeypatch.setattr(triton_project, "MAX_NORMED_OUTPUTS", programs)
    monkeypatch.setattr(triton_project, "BY_ROW_OUTPUTS", by_row)
    source = Source(len(outputs))
    x, norm, weights = arguments.projections(source, rows, hidden, outputs, quantized)
    given = DeferredNorm(x, norm, 1e-6, 1.0) if "norm" in options else x
    chosen = {"return_normed": "kept" in options, "swiglu": "gated" in options}
    if "residual" in options:
        chosen["residual"] = source.normal(rows, 1, *outputs[0])
    if "float32" in options:
        chosen["dtype"] = jnp.float32
    expected = linear(PLAIN, given, weights, **chosen)
    got = linear(replace(CUDA, on_choice=assert_triton), given, weights, **chosen)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("rows", [2, 16])
@pytest.mark.parametrize("heads", [0, 8])
@pytest.mark.parametrize(
    ("outputs", "quantized"),
    [(48, None), (20, None), (48, ("fp8", 1)), (48, ("int4 with zeros", 1)), (20, ("mxfp4", 2)), (48, ("nvfp4", 4))],
)
def test_products_in_sums_equal_their_definition(rows, heads, outputs, quantized, monkeypatch):
    """Scales and factors of each sum's inputs; heads that are divided, two in each sum; outputs that do not fill a
    program."""
    from dflash_jax.ops.kernels.triton import linear as triton_project

    monkeypatch.setattr(triton_project, "BY_ROW_OUTPUTS", 0)
    source, seen = Source(rows), []
    x, weight, squares = arguments.divided(source, rows, 8, 64, outputs)
    if quantized:
        weight = jax.tree.map(jnp.asarray, arguments.in_few_bits(source, np.asarray(weight), *quantized))
    given = DeferredDivision(x, squares, 1e-6) if heads else x
    rest = source.normal(rows, 1, outputs)
    expected = linear(PLAIN, given, (weight,), 2, residual=rest)[0]
    all_kernels = replace(CUDA, kernels="all", on_choice=seen.append)
    found = linear(all_kernels, given, (weight,), 2, residual=rest)[0]
    assert seen[0].implementation == "triton, in sums"
    np.testing.assert_allclose(found, expected, atol=3e-5)
    # One sum divides heads too, and a row has the same bits among other rows.
    np.testing.assert_allclose(linear(CUDA, given, (weight,), 2, residual=rest)[0], expected, atol=3e-5)
    among_others = jax.tree.map(lambda x: x[::-1], (given, rest))
    other = linear(all_kernels, among_others[0], (weight,), 2, residual=among_others[1])[0]
    np.testing.assert_array_equal(other[::-1], found)


@pytest.mark.parametrize("contracted", [2, 3])
def test_linear_over_several_axes(contracted):
    rng = np.random.default_rng(contracted)
    inner = (4, 2, 16)[-contracted:]
    x, weight = normal(rng, 2, 3, *inner), normal(rng, 24, *inner)
    rest = normal(rng, 2, 3, 24)
    expected = linear(PLAIN, x, (weight,), contracted, residual=rest)
    found = linear(replace(CUDA, on_choice=assert_triton), x, (weight,), contracted, residual=rest)
    np.testing.assert_allclose(found[0], expected[0], atol=2e-5)


@pytest.mark.parametrize(("heads", "gated", "rotated"), [(4, True, 8), (3, False, 32), (0, False, 12)])
def test_rotation_in_triton_equals_its_definition(heads, gated, rotated):
    """Queries with their gates beside them, or none; all of a head or its first places; with norms and without."""
    rng = np.random.default_rng(heads)
    q = normal(rng, 2, 3, heads, 2 if gated else 1, 32) if heads else None
    k, rope = normal(rng, 2, 3, 2, 32), RopeSpec(theta=100.0, dim=rotated)
    angles = rope_angles(jnp.asarray([[3, 4, 5], [70, 71, 72]]), rope)
    for norm in (False, True):
        norms = [normal(rng, 32), normal(rng, 32)] if norm else [None, None]
        expected = rotation.rotate(PLAIN, q, k, angles, norms, 1e-6, 1.0)
        found = rotation.rotate(replace(CUDA, on_choice=assert_triton), q, k, angles, norms, 1e-6, 1.0)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "dim", "capacity", "window", "sinks"),
    [
        pytest.param(3, 1, 4, 2, 16, 300, None, 0, marks=pytest.mark.long),
        (3, 5, 6, 2, 32, 700, None, 0),
        pytest.param(2, 16, 4, 1, 16, 300, None, 0, marks=pytest.mark.long),
        pytest.param(3, 4, 4, 2, 16, 2000, 300, 0, marks=pytest.mark.long),
        (4, 3, 4, 2, 16, 2000, 200, 50),
        pytest.param(2, 33, 2, 1, 16, 300, None, 0, marks=pytest.mark.long),
        (1, 70, 2, 2, 128, 40, None, 0),
        pytest.param(3, 2, 4, 2, 16, 120, 100, 50, marks=pytest.mark.long),
        (3, 2, 4, 2, 16, 60, 100, 50),
        (2, 3, 4, 2, 256, 100, None, 0),
        (2, 9, 6, 2, 128, 300, None, 0),
    ],
)
@pytest.mark.parametrize("form", ["triton", "triton, long contexts", "cpp"])
def test_attention_of_a_kernel_equals_its_definition(form, rows, tokens, heads, kv_heads, dim, capacity, window, sinks):
    """Empty, partly filled and full contexts; windows with and without sinks; pages in any order, rows of a larger
    cache; what no token sees is NaN."""
    source = Source(tokens)
    args = arguments.attention(source, rows, tokens, heads, kv_heads, dim, capacity, window, sinks)
    q, k, v, cache, length, bounds = args
    own = jnp.tril(jnp.ones((tokens, tokens), bool))
    if form == "cpp" and cpu.why_not():
        pytest.skip("no C++ compiler")

    if "long" in form and tokens > triton_attention.FEW_TOKENS:
        return

    def is_form(choice):
        assert choice.implementation == form, choice

    kernels = "all" if "long" in form else "auto"
    on_card = form != "cpp"
    backend = replace(CUDA if on_card else Backend.detect(), kernels=kernels, on_choice=is_form)
    ours = in_one_program(partial(attention.attention, backend))
    plain = in_one_program(partial(attention.reference, XLA))
    for mask in (None, own, jnp.broadcast_to(own, (rows, tokens, tokens)).at[0].set(True)):
        both = source.normal(rows, tokens, heads, 2, dim) if mask is None else None
        args = (q, k, v, mask, cache, length, bounds, both)
        np.testing.assert_allclose(ours(*args), plain(*args), atol=1e-6)


@pytest.mark.parametrize(("rows", "tokens", "window", "sinks"), [(4, 3, 100, 50), (1, 70, None, 0)])
def test_softmaxes_over_context_and_block_join_to_attention(rows, tokens, window, sinks):
    """What devices that have parts of each page compute: the context alone, and the new tokens alone."""
    args = arguments.attention(Source(tokens), rows, tokens, 6, 2, 16, 300, window, sinks)
    q, k, v, cache, length, bounds = args
    queries = q.reshape(rows, tokens, 2, 3, 16)

    def part(*args):
        splits = partial_softmaxes_triton(CUDA.triton_card, queries, cache, *args)
        return attention.PartialSoftmax.empty(queries).join(attention.PartialSoftmax(*splits))

    context, block = part(length, bounds), part(jnp.zeros_like(length), bounds, (k, v), None)
    found = block.join(jax.tree.map(lambda x: x[None], context)).output(q.dtype)
    np.testing.assert_allclose(found, attention.reference(XLA, q, k, v, None, cache, length, bounds), atol=1e-6)


@pytest.mark.parametrize("form", ["triton", "triton, long contexts", "cpp"])
def test_attention_over_pages_in_any_order_has_the_same_bits(form):
    if form == "cpp" and cpu.why_not():
        pytest.skip("no C++ compiler")
    backend = Backend.detect() if form == "cpp" else replace(CUDA, kernels="all" if "long" in form else "auto")
    q, k, v, cache, length, bounds = arguments.attention(Source(5), 3, 2, 4, 2, 16, 600)
    order = np.random.default_rng(1).permutation(len(cache.k))
    table = jnp.asarray(np.append(np.argsort(order), len(order)), jnp.int32)[cache.table]
    run = in_one_program(partial(attention.attention, backend))
    found = [
        run(q, k, v, None, each, length, bounds)
        for each in (cache, replace(cache, k=cache.k[order], v=cache.v[order], table=table))
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("rows", "tokens", "capacity"), [(1, 1, 40), (3, 5, 40), (2, 70, 300)])
def test_writing_in_triton_equals_its_definition(rows, tokens, capacity):
    """Into rows of a larger cache, or one that is past its end; kept tokens only; in pages that exist only."""
    cache, k, v, positions = arguments.written(Source(tokens), rows, tokens, 2, 16, capacity)
    for kept in {*range(min(tokens, 6)), tokens}:
        args = cache, k, v, positions, jnp.arange(tokens) < jnp.full((rows, 1), kept)
        expected = cache_write.write(PLAIN, *args)
        found = cache_write.write(replace(CUDA, on_choice=assert_triton), *args)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def mixture_and_arguments(rng):
    x, gate_up, down = normal(rng, 6, 64), normal(rng, 8, 2, 32, 64), normal(rng, 8, 64, 32)
    shared = (normal(rng, 2, 32, 64), normal(rng, 64, 32), normal(rng, 6))
    live, options = jnp.ones(6, bool), {"experts_per_token": 2, "normalise": True}

    def function(backend, x, logits, gate_up, down, shared):
        return moe.mixture(backend, x, logits, live, 0, gate_up, down, shared, x, **options)

    return function, (x, normal(rng, 6, 8), gate_up, down, shared)


def attention_and_arguments(rng):
    rope = RopeSpec(theta=100.0, dim=8)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=rope, gated=True)
    layer = Attention(spec, 64, 1e-6, 1.0, nnx.Rngs(0), jnp.float32, ONE_DEVICE, XLA)
    starts, angles = jnp.zeros((1, 6), jnp.int32), rope_angles(jnp.arange(6)[None], rope)

    def function(backend, x, norm, layer):
        return x + with_backend(layer, backend).forward_full(DeferredNorm(x, norm, 1e-6, 1.0), starts, angles)

    return function, (normal(rng, 1, 6, 64), normal(rng, 64), layer)


@pytest.mark.parametrize(
    ("part", "kernels"),
    [
        (mixture_and_arguments, ["_route", "_gate_up", "_down"]),
        (attention_and_arguments, ["_project", "_rotate", "_project"]),
    ],
)
def test_what_a_kernel_computes_has_a_gradient(monkeypatch, part, kernels):
    """That of a plain form: a target can be trained where kernels are."""
    from dflash_jax.ops.kernels.triton import attention as triton_attention
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import linear as triton_project
    from dflash_jax.ops.kernels.triton import routing as triton_routing

    function, args = part(np.random.default_rng(0))

    def gradient(backend):
        every = tuple(range(len(args)))
        return jax.jit(jax.grad(lambda *args: jnp.sum(function(backend, *args) ** 2), argnums=every))(*args)

    plain, calls = gradient(PLAIN), []

    def absent(card, kernel, args, out, grid, **meta):
        # Like a kernel, it cannot be differentiated.
        calls.append(kernel)
        return jax.pure_callback(lambda *args: None, tuple(out), *args)

    for module in (triton_attention, triton_experts, triton_project, triton_routing):
        monkeypatch.setattr(module, "triton_call", absent)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient(CUDA), plain)
    # What is differentiated is computed by the reference; the kernels compute the rest.
    jax.eval_shape(partial(function, CUDA), *args)
    assert [kernel.fn.__name__ for kernel in calls] == kernels


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize("quantized", [None, pytest.param(("int8", 1), marks=pytest.mark.long), ("fp8", 2)])
def test_a_kernel_gives_what_its_definition_gives(dtype, tokens, quantized):
    """Shapes and dtypes, which a GPU's compiler would check: whole layers with their caches, and what is accepted."""
    called = set()

    def stub(launch):
        called.add(launch.kernel.fn.__name__)
        written = [launch.args[i] for i in launch.in_place] + list(launch.out)
        return tuple(jnp.zeros(x.shape, x.dtype) for x in written)

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

    def step(model, cache, length):
        block = jnp.zeros((len(length), tokens), jnp.int32)
        hidden, features, record = model.verify(block, cache, length, length + tokens, (0,))
        return hidden, features, model.commit(cache, record, length, length + tokens)

    plain = jax.eval_shape(step, with_backend(model, PLAIN), cache, length)
    # Another backend than that of any test: what was traced of a kernel for the same one is kept.
    backend = replace(CUDA, no_cpp=f"{dtype} {tokens} {quantized}")
    with launching(stub):
        found = jax.eval_shape(step, with_backend(model, backend), cache, length)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), plain)
    wanted = {"_route", "_rotate", "_attend", "_join", "_write"}
    wanted |= {"_gate_up_one", "_down_one", "_project_one"} if tokens == 1 else {"_gate_up", "_down"}
    wanted |= {"_project"} if tokens == 5 else set()
    wanted |= {"_mix_one" if tokens == 1 else "_mix", "_replay"} if tokens <= 16 else set()
    wanted |= {"_prepare", "_chunks"} if tokens > 16 and dtype == jnp.bfloat16 else set()
    assert wanted <= called
