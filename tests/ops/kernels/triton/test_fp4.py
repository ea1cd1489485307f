"""Activations in NVFP4: how they are rounded, and products of them by tensor cores of FP4."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

from dflash_jax.ops import moe
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.card import Card
from dflash_jax.ops.linear import DeferredNorm, linear
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, activations_in_nvfp4, is_nvfp4, quantize
from tests.helpers import in_one_program
from tools.float64_reference import assert_as_near
from tools.kernels import arguments
from tools.kernels.arguments import Source

BLACKWELL, PLAIN = (
    replace(backend, fp4_activations=True)
    for backend in (Backend.for_card(Card.of_capability(100), "all"), Backend.xla("cuda"))
)


def rounded(x: np.ndarray) -> np.ndarray:
    """Rows in NVFP4 by the numbers of ml_dtypes."""
    split = x.reshape(len(x), -1, 16).astype(np.float32)
    top = np.abs(split).max(-1)
    factor = np.exp2(np.frexp(top.max(-1) * np.float32(1 / (6 * 448)))[1]).astype(np.float32)[:, None]
    scale = (top / factor * np.float32(1 / 6)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
    numbers = np.clip(split / np.where(scale == 0, 1, scale)[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (numbers.astype(np.float32) * scale[..., None]).reshape(x.shape)


def drawn(rows: int, inputs: int) -> np.ndarray:
    """Rows of many magnitudes, runs that are zero or tiny beside others, and ties."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)) * np.exp2(rng.integers(-20, 20, (rows, 1)))
    x *= np.exp2(rng.integers(-25, 1, (rows, inputs // 16))).repeat(16, axis=1)
    x[0], x[-1, :16] = np.resize(np.arange(-24, 25) / 4, inputs), 0
    return x.astype(ml_dtypes.bfloat16)


def test_activations_are_the_nearest_numbers_under_the_scale_of_the_largest():
    x = drawn(40, 192)
    of_all = activations_in_nvfp4(jnp.asarray(x))
    np.testing.assert_array_equal(of_all.dense(jnp.float32), rounded(x))
    # Exactly, in 16 bits too.
    np.testing.assert_array_equal(of_all.dense(jnp.bfloat16).astype(jnp.float32), rounded(x))
    apart, largest = (np.abs(y).max(1) for y in (rounded(x) - x.astype(np.float32), x.astype(np.float32)))
    # Half of the step from 4 to 6, and what a rounded scale adds.
    assert np.all(apart <= largest / 5)


def test_a_row_does_not_depend_on_the_others():
    x = np.concatenate([drawn(5, 64), np.full((1, 64), np.nan, ml_dtypes.bfloat16), np.zeros((1, 64), np.float32)])
    together = activations_in_nvfp4(jnp.asarray(x)).dense(jnp.float32)
    alone = [activations_in_nvfp4(jnp.asarray(row)[None]).dense(jnp.float32)[0] for row in x]
    np.testing.assert_array_equal(together, alone)
    assert np.isfinite(together[jnp.asarray([0, 1, 2, 3, 4, 6])]).all()


def weights_of(source: Source, inputs: int, *outputs: tuple[int, ...]) -> list[QuantizedWeight]:
    return [arguments.in_few_bits(source, source.normal(*shape, inputs), "nvfp4", 0) for shape in outputs]


def test_only_inputs_of_nvfp4_are_rounded():
    source = Source(0)
    x, norm = source.normal(3, 64), source.normal(64)
    plain = source.normal(16, 64)
    weights = [plain, *weights_of(source, 64, (16,), (4, 8)), quantize(plain, "int4"), quantize(plain, "fp8")]
    assert [is_nvfp4(w) for w in weights] == [False, True, True, False, False]
    assert [is_nvfp4(PackedWeight.of(w if i else np.asarray(w), 1)) for i, w in enumerate(weights)] == [
        False, True, True, False, False,
    ]  # fmt: skip
    *found, normed = linear(PLAIN, DeferredNorm(x, norm, 1e-6), weights, return_normed=True)
    x = DeferredNorm(x, norm, 1e-6).apply()
    np.testing.assert_array_equal(normed, x)
    for weight, y in zip(weights, found, strict=True):
        inputs = rounded(np.asarray(x)) if is_nvfp4(weight) else x
        np.testing.assert_array_equal(y, linear(Backend.xla("cuda"), jnp.asarray(inputs), [weight])[0])
    assert not np.array_equal(found[1], linear(Backend.xla("cuda"), x, weights[1:2])[0])


def in_fp4(choice):
    """For `Backend.on_choice`: the kernel of FP4 was taken for what has its form."""
    assert choice.implementation == ("triton, FP4" if choice.op in ("linear", "mixture") else "triton"), choice


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "options"),
    [
        (1, 64, ((40,), (130,)), {"norm": True, "return_normed": True}),
        (3, 512, ((300,),), {"residual": True}),
        (16, 192, ((2, 150),), {"swiglu": True, "norm": True}),
        (40, 256, ((130,), (5, 6)), {"biases": True}),
        (150, 64, ((140,),), {}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_is_its_definition(dtype, rows, inputs, outputs, options):
    """A product of few outputs sums parts of its inputs."""
    source, options = Source(rows), dict(options)
    x, norm = source.normal(rows, inputs, dtype=dtype), source.normal(inputs, dtype=dtype)
    if options.pop("norm", False):
        x = DeferredNorm(x, norm, 1e-6, 1.0)
    if options.pop("residual", False):
        options["residual"] = source.normal(rows, *outputs[0], dtype=dtype)
    if options.pop("biases", False):
        options["biases"] = [source.normal(*shape) for shape in outputs]
    weights = weights_of(source, inputs, *outputs)
    found = in_one_program(partial(linear, replace(BLACKWELL, on_choice=in_fp4), **options))(x, weights)
    assert_as_near(found, partial(linear, PLAIN, **options), x, weights)


def test_several_contracted_axes_have_a_factor_for_each_part():
    source = Source(1)
    x, (weight,) = source.normal(5, 3, 64), weights_of(source, 64, (140, 3))
    weight = replace(weight, factor=jnp.asarray(source.rng.uniform(0.001, 0.01, (140, 3, 1)), jnp.float32))
    found = in_one_program(partial(linear, replace(BLACKWELL, on_choice=in_fp4), contracted=2))(x, [weight])
    assert_as_near(found, partial(linear, PLAIN, contracted=2), x, [weight])


@pytest.mark.parametrize(
    ("tokens", "top", "experts", "idle", "shared"),
    [(1, 2, 7, 0, 64), (5, 3, 7, 2, 192), (16, 4, 20, 3, None), (70, 4, 5, 9, 64), (170, 2, 3, 5, None)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixture_is_its_definition(dtype, tokens, top, experts, idle, shared):
    """Experts of other devices, several blocks of an expert, idle tokens; a shared expert of the experts' size and of
    another."""
    *args, options = arguments.experts(
        Source(tokens), tokens, top, experts, 64, 192, idle, ("nvfp4", 0), shared, tokens != 16, jnp.dtype(dtype)
    )
    found = in_one_program(partial(moe.mixture, replace(BLACKWELL, on_choice=in_fp4), **options))(*args)
    assert_as_near(found, partial(moe.mixture, PLAIN, **options), *args)


@pytest.mark.parametrize(("axes", "others"), [((("t",), ("t",)), []), (((), ("t",)), ["linear", "linear"])])
def test_a_shared_expert_over_further_devices_is_not_of_the_experts_kernel(axes, others):
    """That would round its activations by a factor of each device."""
    ops, source = [], Source(1)
    *args, options = arguments.experts(source, 5, 3, 7, 64, 192, 0, ("nvfp4", 0), 64, False)
    mix = partial(moe.mixture, replace(BLACKWELL, on_choice=lambda choice: ops.append(choice.op)), **options, axes=axes)
    mesh = Mesh(np.array(jax.devices()[:1]), ("t",))
    jax.eval_shape(jax.shard_map(mix, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), *args)
    assert ops == ["mixture", *others]


@pytest.mark.parametrize("form", [moe.experts_gathered, moe.experts_grouped, moe.experts_looped])
def test_each_form_of_experts_rounds_what_both_products_take(form):
    """Few and many experts of a token, against products one by one."""
    source, tokens = Source(2), 6
    x, *weights = source.normal(tokens, 64), *weights_of(source, 64, (8, 2, 32))
    (down,) = weights_of(source, 32, (8, 64))
    chosen = jnp.asarray([source.rng.permutation(8)[:2] for _ in range(tokens)], jnp.int32)
    of_choice = jnp.asarray(source.rng.uniform(0.1, 1, (tokens, 2)), jnp.float32)
    found = form(PLAIN, x, of_choice, chosen, weights[0], down)
    plain = Backend.xla("cuda")
    for i in range(tokens):
        total = 0
        for weight, e in zip(of_choice[i], chosen[i], strict=True):
            (h,) = linear(plain, jnp.asarray(rounded(np.asarray(x[i : i + 1]))), [weights[0][e]], swiglu=True)
            total += weight * linear(plain, jnp.asarray(rounded(np.asarray(h))), [down[e]])[0]
        np.testing.assert_allclose(found[i], total[0], rtol=2e-5, atol=2e-5 * float(jnp.abs(total).max()))


@pytest.mark.parametrize(
    ("backend", "inputs", "reason"),
    [
        (BLACKWELL, 32, "32 inputs"),
        (replace(BLACKWELL, fp4_activations=False), 64, "not in FP4"),
        (replace(Backend.for_card(Card.of_capability(90), "all"), fp4_activations=True), 64, "need 10.0"),
    ],
)
def test_what_the_kernels_do_not_support_is_computed_otherwise(backend, inputs, reason):
    passed_over = {}

    def keep(choice):
        passed_over.update(choice.passed_over)

    source = Source(3)
    x, weights = source.normal(2, inputs), weights_of(source, inputs, (16,))
    linear(replace(backend, on_choice=keep), x, weights)
    assert reason in passed_over["triton, FP4"]
