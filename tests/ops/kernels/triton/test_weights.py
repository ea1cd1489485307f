"""Weights in four and eight bits in the Triton kernels: every number, every form, several forms in one call."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops import moe
from dflash_jax.ops.backend import Backend, choose
from dflash_jax.ops.card import HOPPER, KIB, Card
from dflash_jax.ops.kernels.triton import experts as triton_experts
from dflash_jax.ops.kernels.triton.launch import launching
from dflash_jax.ops.kernels.triton.tiles import Parts
from dflash_jax.ops.linear import IMPLEMENTATIONS, DeferredNorm, linear
from dflash_jax.ops.weights import QuantizedWeight
from tests.helpers import in_one_program
from tools.float64_reference import assert_as_near
from tools.kernels import arguments
from tools.kernels.arguments import FOUR_BITS, Source

CUDA, PLAIN = Backend.for_card(HOPPER), Backend.xla("cuda")
# Cards below this one have no float8: its bytes are decoded.
AMPERE = Backend.for_card(Card.of_capability(80))
FLOAT8 = jnp.float8_e4m3fn
# Inputs of a scale where a form does not say it.
RUNS = (32, 64, 128)


def by_kernel(backend, x, weights, **options):
    assert choose("linear", IMPLEMENTATIONS, backend, x, weights, **options).name == "triton"
    return linear(backend, x, weights, **options)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_e2m1_times_every_e4m3_is_exact(dtype, rows):
    """Scales from the smallest to the largest, subnormal ones too, by all codes: the rows of an identity bring them
    out one at a time, a row of ones brings out their sums."""
    values = np.arange(16, dtype=np.uint8).reshape(8, 2) @ np.array([1, 16], np.uint8)
    values = np.broadcast_to(np.resize(values, 32), (127, 32))
    scale = np.broadcast_to(np.arange(127, dtype=np.uint8)[:, None].view(FLOAT8), (127, 4))
    factor = np.exp2(np.arange(127)[:, None] % 5 - 2).astype(np.float32)
    weight = QuantizedWeight(*map(jnp.asarray, (values, scale)), factor=jnp.asarray(factor), code="e2m1")
    x = jnp.asarray(np.eye(16, 64) if rows > 1 else np.arange(64)[None] % 16 == 5, dtype)
    (found,) = by_kernel(CUDA, x, [weight], dtype=jnp.float32)
    np.testing.assert_array_equal(found, np.asarray(x, np.float32) @ np.asarray(weight.dense(jnp.float32)).T)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_byte_of_float8_is_exact_on_cards_without_it(dtype, rows):
    numbers = np.concatenate([np.arange(127, dtype=np.uint8), np.arange(128, 255, dtype=np.uint8)]).view(FLOAT8)
    weight = QuantizedWeight(
        jnp.asarray(np.broadcast_to(numbers[:, None], (254, 64))), jnp.full((254, 1), 0.5, jnp.float32)
    )
    assert Parts.of(weight, AMPERE.card).form[1] == "e4m3"
    x = jnp.asarray(np.eye(rows, 64), dtype)
    (found,) = by_kernel(AMPERE, x, [weight], dtype=jnp.float32)
    np.testing.assert_array_equal(found, np.asarray(x, np.float32) @ np.asarray(weight.dense(jnp.float32)).T)


@pytest.mark.parametrize(
    ("form", "run"), [(form, run) for form, (_, fixed, *_) in FOUR_BITS.items() for run in ([fixed] if fixed else RUNS)]
)
def test_a_form_in_sixteen_bits_is_as_near_as_its_definition(form, run):
    """Runs that are scaled in the tile and after the product, of two rows and of 16."""
    for rows, dtype in ((2, jnp.bfloat16), (16, jnp.float16)):
        x, _, weights = arguments.projections(Source(run), rows, 256, ((40,),), (form, 256 // run), dtype)
        (found,) = by_kernel(CUDA, x, weights)
        (expected,) = linear(PLAIN, x, weights)
        exact = np.einsum("rti,oi->rto", np.asarray(x, np.float64), np.asarray(weights[0].dense(jnp.float32)))
        apart, allowed = (np.abs(np.asarray(y, np.float64) - exact).max() for y in (found, expected))
        assert apart <= 2 * allowed + float(jnp.finfo(dtype).eps) * np.abs(exact).max(), (rows, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_scale_in_a_tile_is_rounded_with_its_product_only(dtype):
    """A step has two runs. In float16: the interpreter truncates to bfloat16."""
    rng = np.random.default_rng(0)
    values, scale = rng.integers(0, 256, (24, 80), np.uint8), rng.uniform(0.5, 2, (24, 10)).astype(dtype)
    weight = QuantizedWeight(jnp.asarray(values), jnp.asarray(scale), code="int4")
    (found,) = by_kernel(CUDA, jnp.asarray(np.eye(16, 160), jnp.float16), [weight], dtype=jnp.float32)
    np.testing.assert_array_equal(found, np.asarray(weight.dense(jnp.float16), np.float32)[:, :16].T)


def test_runs_of_no_power_of_two():
    x, _, weights = arguments.projections(Source(0), 5, 144, ((40,),), ("int4 with zeros", 3))
    assert weights[0].run == 48
    found = in_one_program(partial(by_kernel, CUDA))(x, weights)
    assert_as_near(found, partial(linear, PLAIN), x, weights)


@pytest.mark.parametrize("rows", [1, 8, 27])
def test_weights_of_several_forms_in_one_call(rows):
    """Three kinds, of one shape: each is computed as what it is, and a norm is kept once."""
    source = Source(rows)
    x, norm, (plain,) = arguments.projections(source, rows, 128, ((32,),))
    weights = [arguments.in_few_bits(source, plain, form, 2) for form in FOUR_BITS]
    weights = [*weights, plain, arguments.in_few_bits(source, plain, "fp8", 2), weights[0]]
    given = DeferredNorm(x, norm, 1e-6, 1.0)
    found = in_one_program(partial(by_kernel, CUDA, return_normed=True))(given, weights)
    assert_as_near(found, partial(linear, PLAIN, return_normed=True), given, weights)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_shared_expert_that_is_not_quantized_is_computed_apart(tokens):
    """Its weights have the experts' sizes, not their form."""
    *args, options = arguments.experts(Source(tokens), tokens, 2, 7, 64, 128, 0, ("nvfp4", 4), 64, plain_shared=True)
    gate_up, shared = args[4], args[6]
    assert not triton_experts.are_alike(gate_up, shared[0], HOPPER)
    found = in_one_program(partial(moe.mixture, CUDA, **options))(*args)
    assert_as_near(found, partial(moe.mixture, PLAIN, **options), *args)


def test_a_kind_is_form_and_dtypes():
    """What differs in anything that a kernel's code depends on shares no kernel's code."""
    plain = jnp.zeros((2, 32, 128))
    source = Source(0)
    weights = {form: arguments.in_few_bits(source, plain, form, 2) for form in (*FOUR_BITS, "fp8", "int8")}
    one = weights["int4"]
    weights |= {
        "array": plain,
        "half": plain.astype(jnp.bfloat16),
        "other runs": arguments.in_few_bits(source, plain, "int4", 4),
        "other scales": replace(one, scale=one.scale.astype(jnp.float32)),
        "other zeros": replace(one, zero=jnp.zeros(one.scale.shape, jnp.int8)),
        "factors": replace(one, factor=jnp.ones((2, 32, 1))),
        "more factors": replace(one, factor=jnp.ones((2, 32, 2))),
    }
    kinds = [Parts.of(w, HOPPER).kind for w in weights.values()]
    assert len(set(kinds)) == len(kinds)
    for name, weight in weights.items():
        alike = [other for other in weights if triton_experts.are_alike(weight, weights[other][0], HOPPER)]
        assert alike == [name]


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (1, 4), (5, 1), (5, 4)])
def test_factors_of_parts(rows, parts):
    """A row that is several of a checkpoint, or a device's, has a factor for each."""
    source = Source(parts)
    x, _, (plain,) = arguments.projections(source, rows, 256, ((40,),))
    weight = arguments.in_few_bits(source, plain, "nvfp4", 0)
    factor = source.rng.uniform(0.001, 0.01, (40, parts)).astype(np.float32)
    weight = replace(weight, factor=jnp.asarray(factor))
    found = in_one_program(partial(by_kernel, CUDA))(x, [weight])
    assert_as_near(found, partial(linear, PLAIN), x, [weight])


def test_zeros_with_factors_or_of_e2m1_are_refused():
    """In bfloat16 numbers of e2m1 are 2**-126 times too small where zeros would be taken from them."""
    weight = arguments.in_few_bits(Source(0), np.zeros((32, 160), np.float32), "int4 with zeros", 10)
    e2m1 = replace(weight, code="e2m1", scale=weight.scale.astype(FLOAT8))
    triton = next(each for each in IMPLEMENTATIONS if each.name == "triton")
    for rows in (1, 16):
        for wrong, named in ((replace(weight, factor=jnp.ones((32, 1))), "zeros and factors"), (e2m1, "e2m1 with")):
            assert named in triton.supports(CUDA, jnp.zeros((rows, 160), jnp.bfloat16), [wrong])


def test_rows_of_a_block_where_each_warp_would_convert_the_weights():
    ada, bytes_, halves = Card.of_capability(89), jnp.zeros(1, jnp.uint8), jnp.zeros(1, jnp.bfloat16)
    for card, weight, expected in ((ada, bytes_, 32), (ada, halves, 64), (HOPPER, bytes_, 64), (HOPPER, halves, 128)):
        assert triton_experts._rows_of_a_block(1000, 10, weight, card) == expected
    # Scaled after the sums, they leave registers for as many rows.
    assert triton_experts._rows_of_a_block(1000, 10, bytes_, HOPPER, scales_after=True) == 128
    assert triton_experts._rows_of_a_block(1000, 10, bytes_, ada, scales_after=True) == 32


@pytest.mark.parametrize(("tokens", "rows"), [(500, 32), (2000, 64)])
def test_with_all_kernels_two_programs_of_experts_share_a_multiprocessor(tokens, rows):
    """A stage more than one program's memory has room for would take the other one's."""

    def memory(untried: bool) -> int:
        found = []

        def record(launch):
            if launch.kernel.__name__ in ("_gate_up", "_down"):
                m, f, n, k = (launch.meta.get(name, 0) for name in ("M", "BF", "BN", "BH"))
                outputs, inputs = (n, f) if n else (2 * f, k)
                # Products of 64 rows and more read operands in shared memory, which then holds one stage more.
                stages = launch.num_stages - (m < 64)
                assert (m, stages >= 2) == (rows, True)
                found.append(stages * inputs * 2 * (m + outputs))
            return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.out)

        kernel = partial(triton_experts.experts_triton, HOPPER, untried=untried)
        shapes = ((tokens, 2048), jnp.bfloat16), ((tokens, 2), jnp.float32), ((tokens, 2), jnp.int32)
        weights = ((64, 2, 512, 2048), jnp.bfloat16), ((64, 2048, 512), jnp.bfloat16)
        with launching(record):
            jax.eval_shape(kernel, *(jax.ShapeDtypeStruct(*each) for each in (*shapes, *weights)))
        return max(found)

    assert memory(untried=True) <= (HOPPER.shared_memory + KIB) // 2 - KIB < memory(untried=False)
