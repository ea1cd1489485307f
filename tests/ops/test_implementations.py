"""Every implementation of every operation against its reference in float64: odd sizes, rows past the end, counts."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from dflash_jax.ops import (
    argmax,
    attention,
    block_convolution,
    cache_write,
    frame_attention,
    gated_delta,
    interval_attention,
    linear,
    moe,
    rotation,
    sampling_noise,
    top_k,
)
from dflash_jax.ops.backend import XLA, Backend, choose
from dflash_jax.ops.cache import FP8
from dflash_jax.ops.card import HOPPER
from dflash_jax.ops.weights import PackedWeight
from tools.float64_reference import assert_tree_near, in_both_of
from tools.kernels import arguments
from tools.kernels.arguments import Source

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from tests import few_bits
from tests.helpers import in_one_program
from tools.triton_interpreter import interpreting, small_grids

BACKENDS = (Backend.detect(), Backend.for_card(HOPPER), Backend.xla("cuda"), Backend.xla("tpu"), XLA)
# Compared in tests/ops/kernels, with tolerances for bfloat16, which alone they support.
ELSEWHERE = {("gated_delta", "triton, chunks"), ("advance", "triton, chunks")}
# Compared in tests/ops/kernels/triton/test_fp4.py, with rounded activations.
ELSEWHERE |= {("linear", "triton, FP4"), ("mixture", "triton, FP4")}
# Compared in tests/ops/kernels/tpu, at sizes that a TPU's kernels support.
ELSEWHERE |= {(op, "pallas") for op in ("attention", "attention, FP8", "gated_delta", "advance", "replay")}


def attention_cases(cached=None):
    for rows, tokens, window, sinks in ((3, 5, None, 0), (1, 1, None, 0), (3, 4, 300, 0), (4, 3, 200, 50)):
        q, k, v, cache, length, bounds = arguments.attention(
            Source(tokens), rows, tokens, 6, 2, 16, 2000, window, sinks, cached=cached
        )
        gate = Source(1).normal(rows, tokens, 6, 2, 16)
        yield (q, k, v, None, cache, length, bounds, gate), {}


def rotation_cases():
    source, angles = Source(0), jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, 3, 4)), jnp.float32)
    q, k = source.normal(2, 3, 5, 2, 32), source.normal(2, 3, 2, 32)
    yield (q, k, tuple(angles), (source.normal(32), source.normal(32))), {"eps": 1e-6, "offset": 1.0}
    yield (None, k, tuple(angles), (None, None)), {}
    # One row of angles for all rows.
    yield (q, k, tuple(angles[:, :1]), (None, None)), {}


def write_cases(dtype=jnp.float32):
    for rows, tokens in ((1, 1), (3, 5), (2, 16)):
        cache, k, v, positions = arguments.written(Source(tokens), rows, tokens, 2, 16, 300, dtype)
        # Tokens that are not written have a place past the end.
        places = jnp.where(jnp.arange(tokens) % 3 != 1, positions, cache.capacity)
        yield (cache.k, cache.v, cache.table, k, v, cache.rows, places), {}
    # Places whose table names no page.
    yield (
        (
            cache.k,
            cache.v,
            jnp.full_like(cache.table, len(cache.k)).at[0].set(cache.table[0]),
            k,
            v,
            cache.rows,
            places,
        ),
        {},
    )


def delta_cases():
    for rows, tokens, keys in ((1, 1, 16), (3, 5, 128), (2, 16, 16), (2, 70, 16)):
        yield tuple(arguments.mixer(Source(tokens), rows, tokens, 1, 3, keys, 32)), {"eps": 1e-6}


def advance_cases():
    for args, options in delta_cases():
        rows, tokens = args[0].shape[:2]
        yield args, options | {"n": jnp.asarray(np.resize([tokens, 0, 1], rows), jnp.int32)}


plain_delta = in_one_program(partial(gated_delta.reference, XLA))


def replay_cases():
    for rows, tokens in ((1, 1), (4, 5), (2, 16)):
        args = arguments.mixer(Source(tokens), rows, tokens, 1, 3, 16, 32)
        record = plain_delta(*args, 1e-6)[1]
        count = np.resize([tokens, 0, max(tokens - 2, 1), 1], rows)
        yield (args[2], arguments.spoilt(record, count), jnp.asarray(count, jnp.int32)), {}


def layers_cases():
    """Two layers, whose rows are in other places."""
    for (state, record, n), options in replay_cases():
        more = jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else 2 * x, state)
        yield ([state, more], [record, record], n), options


def mixture_cases():
    for tokens, top, experts, idle in ((1, 2, 7, 0), (5, 3, 7, 2), (16, 4, 20, 3)):
        *args, options = arguments.experts(Source(tokens), tokens, top, experts, 32, 64, idle, shared=32)
        yield tuple(args), options
        # All experts on one device.
        yield (*args[:3], jnp.int32(0), *args[4:]), options


def packed_mixture_cases():
    rng = np.random.default_rng(0)
    x, logits = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((9, 64), (9, 8)))
    gate_up, down = (rng.standard_normal(s).astype(np.float32) / 8 for s in ((8, 2, 32, 64), (8, 64, 32)))
    packed = PackedWeight.of(gate_up, 1), PackedWeight.of(down, 1)
    options = {"experts_per_token": 2, "normalise": True}
    yield (x, logits, jnp.arange(9) != 4, jnp.int32(0), *packed, None, x), options


def few_bits_mixture_cases():
    rng = np.random.default_rng(0)
    for tokens, form, run in ((1, "fp8", 64), (9, "int4", 32), (70, "e2m1", 16), (70, "int8", 32)):
        x, logits = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((tokens, 64), (tokens, 8)))
        gate_up, down = (
            few_bits.weight(rng, rows, size, run if form != "fp8" else size, form)
            for rows, size in (((8, 2, 32), 64), ((8, 64), 32))
        )
        shared = [few_bits.weight(rng, rows, size, 16, form) for rows, size in (((2, 48), 64), ((64,), 48))]
        shared = (*(PackedWeight.of(w, 1) for w in shared), jnp.asarray(rng.standard_normal(tokens), jnp.float32))
        packed = PackedWeight.of(gate_up, 1), PackedWeight.of(down, 1)
        options = {"experts_per_token": 2, "normalise": True}
        yield (x, logits, jnp.arange(tokens) != 4, jnp.int32(0), *packed, shared, x), options


def linear_cases():
    for rows in (1, 3, 16):
        x, norm, weights = arguments.projections(Source(rows), rows, 192, ((6, 16), (48,)))
        yield (linear.DeferredNorm(x, norm, 1e-6, 1.0), weights), {"return_normed": True}
        yield (x, weights[1:]), {"residual": Source(9).normal(rows, 1, 48)}
        biases = [Source(7).normal(6, 16), Source(8).normal(48)]
        yield (linear.DeferredNorm(x, norm, 1e-6, 1.0), weights), {"return_normed": True, "biases": biases}
    yield (x, weights[1:]), {"residual": Source(9).normal(rows, 1, 48), "biases": biases[1:]}
    x, _, weights = arguments.projections(Source(2), 2, 192, ((2, 48),))
    yield (x, weights), {"swiglu": True}
    x, norm, weights = arguments.projections(Source(3), 3, 192, ((6, 16),))
    rest = {"biases": [Source(4).normal(6, 16)], "residual": Source(5).normal(3, 1, 6, 16)}
    yield (linear.DeferredNorm(x, norm, 1e-6), weights), {"gelu": True, **rest}
    yield (linear.DeferredNorm(x + 3, norm, 1e-6, bias=Source(6).normal(192)), weights), rest


def divided_cases():
    for rows in (1, 3, 16):
        heads, weight, squares = arguments.divided(Source(rows), rows, 8, 32, 48)
        divided = linear.DeferredDivision(heads, squares, 1e-6)
        yield (divided, (weight,)), {"contracted": 2, "residual": Source(9).normal(rows, 1, 48)}


def packed_linear_cases():
    for (x, weights), options in linear_cases():
        yield (x, [PackedWeight.of(np.asarray(w), 1) for w in weights]), options


def few_bits_linear_cases():
    """Every form in place of the weights, beside an array where there are two."""
    rng = np.random.default_rng(0)
    forms = [*few_bits.NUMBERS, "int4"]
    for i, ((x, weights), options) in enumerate(packed_linear_cases()):
        form, shape, run = forms[i % 5], weights[0].shape, (16, 192, 64, 32, 96)[i % 5]
        first = few_bits.weight(rng, shape[:-1], shape[-1], run, form, has_zero=i % 2 == 1, has_factor=i % 3 == 1)
        yield (x, [PackedWeight.of(first, 1), *weights[1:]]), options


def block_convolution_cases():
    """Tiles that are not full, taps that are no power of two, more taps than places."""
    for blocks, width, taps, group in ((1, 8, 2, 16), (5, 3, 3, 4), (9, 16, 2, 8), (1, 2, 4, 1)):
        yield arguments.block_convolution(Source(taps), blocks, width, 192, taps, group), {}


def noise_cases():
    positions = jnp.asarray([[0, 5, 70_000], [1, 2, 2**31 - 1]])
    yield (jnp.asarray([3, 2**32 - 1], jnp.uint32), positions, jnp.arange(501)), {}


def frame_cases():
    """Heads of two parts, of less than one, of one; frames that share tiles and that are longer; padding at the end."""
    shapes = ((2, 72, (60, 9, 170), 5), (1, 12, (16,), 0), (3, 64, (1, 70), 130), (1, 80, (193,), 1))
    for heads, size, lengths, padding in shapes:
        for dtype in (jnp.float32, jnp.bfloat16):
            ends = np.cumsum(lengths)
            low, high = (np.repeat(x, lengths).astype(np.int32) for x in (ends - lengths, ends))
            rows = len(low) + padding
            angles = np.random.default_rng(1).uniform(-3, 3, (rows, size // 2)).astype(np.float32)
            args = Source(0).draw(rows, 3, heads, size, dtype=dtype), (np.cos(angles), np.sin(angles))
            yield jax.tree.map(jnp.asarray, (*args, *(np.pad(x, (0, padding)) for x in (low, high)))), {}


def argmax_cases():
    x = np.round(np.random.default_rng(0).standard_normal((3, 5, 640)), 1).astype(np.float32)
    yield (jnp.asarray(x),), {}
    x[1, 2, [77, 300]] = np.nan
    yield (jnp.asarray(x),), {}


def top_k_cases():
    """Many equal values, and few that are finite."""
    ((x,), _), *_ = argmax_cases()
    yield (x,), {"k": 7}
    yield (x.at[0].set(-jnp.inf).at[1, 1, 70:].set(-jnp.inf),), {"k": 10}


OPERATIONS = {
    "linear": (linear.IMPLEMENTATIONS, linear_cases),
    "divided linear": (linear.IMPLEMENTATIONS[2:], divided_cases),
    "packed linear": (linear.IMPLEMENTATIONS[:1], packed_linear_cases),
    "few bits linear": (linear.IMPLEMENTATIONS[:1], few_bits_linear_cases),
    "attention": (attention.IMPLEMENTATIONS, attention_cases),
    "attention, FP8": (attention.IMPLEMENTATIONS, partial(attention_cases, FP8)),
    "rotate": (rotation.IMPLEMENTATIONS, rotation_cases),
    "write, FP8": (cache_write.IMPLEMENTATIONS, partial(write_cases, FP8)),
    "write": (cache_write.IMPLEMENTATIONS, write_cases),
    "gated_delta": (gated_delta.IMPLEMENTATIONS, delta_cases),
    "advance": (gated_delta.ADVANCES, advance_cases),
    "replay": (gated_delta.REPLAYS, replay_cases),
    "replay_layers": (gated_delta.LAYERS_REPLAYS, layers_cases),
    "mixture": (moe.IMPLEMENTATIONS, mixture_cases),
    "packed mixture": (moe.IMPLEMENTATIONS[:1], packed_mixture_cases),
    "few bits mixture": (moe.IMPLEMENTATIONS[:1], few_bits_mixture_cases),
    "block_convolution": (block_convolution.IMPLEMENTATIONS, block_convolution_cases),
    "sampling_noise": (sampling_noise.IMPLEMENTATIONS, noise_cases),
    "argmax": (argmax.IMPLEMENTATIONS, argmax_cases),
    "top_k": (top_k.IMPLEMENTATIONS, top_k_cases),
    "frame_attention": (frame_attention.IMPLEMENTATIONS, frame_cases),
}


FULL = {f"{form} linear": linear.IMPLEMENTATIONS for form in ("packed", "few bits")}
FULL |= {f"{form} mixture": moe.IMPLEMENTATIONS for form in ("packed", "few bits")}


@cache
def cases_of(operation: str) -> list[tuple]:
    """(arguments, options) of each case."""
    return list(OPERATIONS[operation][1]())


def reference_of(operation: str):
    return FULL.get(operation, OPERATIONS[operation][0])[-1]


@cache
def exact(operation: str, case: int):
    """What the reference gives, for all implementations."""
    args, options = cases_of(operation)[case]
    definition = partial(reference_of(operation).call, XLA, **options)
    return in_both_of(lambda *args: leaves(definition(*args)), *unpacked(args))


def unpacked(tree):
    def is_packed(x):
        return isinstance(x, PackedWeight)

    return jax.tree.map(lambda x: jnp.asarray(x.dense()) if is_packed(x) else x, tree, is_leaf=is_packed)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (op, each.name)
        for op, (implementations, _) in OPERATIONS.items()
        for each in implementations[:-1] or implementations
    ],
)
def test_an_implementation_is_its_reference(operation, name):
    implementation = next(each for each in OPERATIONS[operation][0] if each.name == name)
    if (operation, name) in ELSEWHERE or (name == "cpp" and operation in ("linear", "mixture")):
        # Packed weights have cases of their own.
        return
    compared = 0
    for case, (args, options) in enumerate(cases_of(operation)):
        with small_grids():
            supported = (b for b in BACKENDS if implementation.supports(b, *args, **options) is None)
            if (backend := next(supported, None)) is None:
                continue
        compared += 1
        with interpreting(), small_grids():
            # In one program: operation by operation, most of the time goes into compilation.
            call = jax.jit(partial(implementation.call, backend, **options))
            found = jax.block_until_ready(call(*args))
        if operation in ("argmax", "top_k", "write, FP8"):
            expected = reference_of(operation).call(XLA, *args, **options)
            assert all(map(np.array_equal, *map(jax.tree.leaves, (found, expected))))
            continue
        assert_tree_near(leaves(found), exact(operation, case))
    if not compared and name == "cpp" and Backend.detect().no_cpp:
        pytest.skip("no C++ compiler")
    assert compared, "no case is supported"


PUBLIC = {
    "linear": linear.linear,
    "attention": attention.attention,
    "rotate": rotation.rotate,
    "gated_delta": gated_delta.gated_delta,
    "advance": gated_delta.advance,
    "replay": gated_delta.replay,
    "replay_layers": gated_delta.replay_layers,
    "mixture": moe.mixture,
    "block_convolution": block_convolution.block_convolution,
    "sampling_noise": sampling_noise.gumbel_noise,
    "argmax": argmax.argmax,
    "top_k": top_k.top_k,
    "frame_attention": frame_attention.frame_attention,
}


@pytest.mark.parametrize("operation", PUBLIC)
def test_arguments_and_results_have_the_annotated_shapes(operation):
    args, options = cases_of(operation)[0]
    jax.eval_shape(partial(jaxtyped(typechecker=beartype)(PUBLIC[operation]), XLA, **options), *args)


def test_writing_and_interval_attention_have_the_annotated_shapes():
    """Their arguments are those of no list."""
    args = arguments.written(Source(0), 3, 5, 2, 16, 60)
    jax.eval_shape(partial(jaxtyped(typechecker=beartype)(cache_write.write), XLA), *args, jnp.ones((3, 5), bool))
    q, k, v = Source(0).normal(2, 7, 2, 3, 8), *(Source(1).normal(2, 9, 2, 8) for _ in "kv")
    low = jnp.zeros((2, 7), jnp.int32)
    jax.eval_shape(jaxtyped(typechecker=beartype)(interval_attention.interval_attention), q, k, v, low, low + 9)


def test_arguments_of_other_shapes_are_refused():
    checked = jaxtyped(typechecker=beartype)(sampling_noise.gumbel_noise)
    with pytest.raises(TypeCheckError, match="positions"):
        checked(XLA, jnp.zeros(3, jnp.uint32), jnp.zeros((2, 4), jnp.int32), jnp.arange(5))


def leaves(tree):
    """Arrays of numbers, heads after their division: a state's rows are indices."""

    def is_deferred(x):
        return isinstance(x, linear.DeferredDivision)

    tree = jax.tree.map(lambda x: x.apply() if is_deferred(x) else x, tree, is_leaf=is_deferred)
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


def test_biases_are_one_for_each_weight_and_none_with_swiglu():
    x, _, weights = arguments.projections(Source(0), 2, 192, ((2, 48), (7,)))
    for given, options, named in ((weights, {}, "2 weights"), (weights[:1], {"swiglu": True}, "SwiGLU")):
        with pytest.raises(ValueError, match=f"1 biases with {named}"):
            linear.linear(XLA, x, given, biases=[jnp.zeros((2, 48))], **options)


def test_a_bias_and_a_residual_together_are_added_in_the_order_of_the_definition():
    """The kernel would add the residual first, which rounds otherwise in 16 bits."""
    x, _, weights = arguments.projections(Source(0), 2, 192, ((2, 48),))
    backend, both = Backend.for_card(HOPPER), {"biases": [jnp.zeros((2, 48))], "residual": jnp.zeros((2, 2, 48))}
    for options in ({name: both[name]} for name in both):
        assert choose("linear", linear.IMPLEMENTATIONS, backend, x, weights, **options).name == "triton"
    assert choose("linear", linear.IMPLEMENTATIONS, backend, x, weights, **both).name == "reference"


def test_divided_heads_are_not_returned_by_the_kernel_and_have_sizes_of_a_power_of_two():
    backend = Backend.for_card(HOPPER)
    for size, options, name in ((32, {}, "triton"), (32, {"return_normed": True}, "reference"), (48, {}, "reference")):
        heads, weight, squares = arguments.divided(Source(0), 2, 4, size, 8)
        divided = linear.DeferredDivision(heads, squares, 1e-6)
        assert choose("linear", linear.IMPLEMENTATIONS, backend, divided, (weight,), 2, **options).name == name
        outputs = linear.linear(XLA, divided, (weight,), 2, **options)
        for one, other in zip(outputs, linear.linear(XLA, divided.apply(), (weight,), 2, **options), strict=True):
            np.testing.assert_array_equal(one, other)


def test_packed_weights_take_divided_heads():
    if (backend := Backend.detect()).no_cpp:
        pytest.skip("no C++ compiler")
    heads, weight, squares = arguments.divided(Source(0), 2, 4, 32, 48)
    divided, packed = linear.DeferredDivision(heads, squares, 1e-6), PackedWeight.of(np.asarray(weight), 2)
    found, expected = (linear.linear(backend, x, (packed,), 2)[0] for x in (divided, divided.apply()))
    np.testing.assert_array_equal(found, expected)


def test_the_first_that_supports_is_taken_and_reasons_are_told():
    told = []
    backend = Backend("cpu", no_cpp="no compiler", no_triton="no card", on_choice=told.append)
    x = jnp.zeros((2, 65))
    assert choose("argmax", argmax.IMPLEMENTATIONS, backend, x).name == "reference"
    assert told[0].op == "argmax"
    assert told[0].passed_over == (("blocks", "65 values are not blocks of 64"),)
    assert told[0].shapes == ("float32[2, 65]",)


def test_a_backend_is_a_value():
    assert Backend.xla("cuda", HOPPER) == Backend.xla("cuda", HOPPER)
    assert hash(Backend.for_card(HOPPER)) == hash(Backend.for_card(HOPPER))
    assert Backend.for_card(HOPPER) != Backend.xla("cuda", HOPPER)
