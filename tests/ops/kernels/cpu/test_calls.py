"""The CPU's kernels: options of a linear map, one result for any number of rows and of callers; being without them.

Attention: most cases in tests/ops/kernels/triton/test_kernels.py.
"""

import logging
import os
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.ops import attention
from dflash_jax.ops.backend import XLA
from dflash_jax.ops.cache import Bounds, KVCache
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.linear import DeferredNorm, linear
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight
from tests.float64 import assert_as_near


def product_of(panels, x):
    return cpu.linear(x, [panels])[0]


needs_kernel = pytest.mark.skipif(bool(cpu.why_not()), reason="no C++ compiler")


def a_product(outputs: int, inputs: int, rows: int, short: bool):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((outputs, inputs)).astype(jnp.bfloat16 if short else np.float32).astype(np.float32)
    # NumPy's, which is sliced without a compilation.
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    return x, jax.device_put(PackedWeight.of(weight, 1)), weight


@needs_kernel
@pytest.mark.parametrize("short", [True, False])
def test_a_row_is_the_same_alone_and_among_others(short):
    x, panels, weight = a_product(300, 131, 41, short)
    alone = np.concatenate([product_of(panels, x[i : i + 1]) for i in range(41)])
    assert_as_near(alone, lambda x, weight: x @ weight.T, x, weight)
    for rows in (2, 3, 4, 5, 7, 8, 12, 13, 25, 41):
        np.testing.assert_array_equal(product_of(panels, x[:rows]), alone[:rows])
    # Nothing of a row is read for the one before it.
    x[7] = np.nan
    np.testing.assert_array_equal(np.asarray(product_of(panels, x))[:7], alone[:7])


@needs_kernel
# Each number of rows in both forms of panels: the test above.
@pytest.mark.parametrize(("rows", "short"), [(1, True), (5, False), (40, True), (40, False)])
@pytest.mark.parametrize(
    ("shapes", "contracted", "options"),
    [
        ([(4, 2, 9), (50,), (2, 20)], 1, {"normed": True}),
        ([(300, 2), (70,)], 1, {"normed": True, "return_normed": True}),
        ([(40,), (3,)], 1, {"return_normed": True}),
        ([(130,)], 2, {"residual": True}),
        ([(2, 96)], 1, {"normed": True, "swiglu": True}),
        ([(2, 208)], 1, {"swiglu": True, "residual": True}),
        ([(2, 1024)], 1, {"normed": True, "swiglu": True, "residual": True}),
        ([(900,), (2, 331)], 1, {"normed": True, "return_normed": True}),
        ([(2, 20)], 1, {"swiglu": True}),
        ([(70,)], 1, {"biases": True}),
        ([(4, 2, 9), (50,), (2, 20)], 1, {"normed": True, "biases": True}),
        ([(130,)], 2, {"biases": True, "gelu": True, "residual": True}),
    ],
)
def test_linear_in_cpp_equals_its_definition(shapes, contracted, options, short, rows):
    rng, options = np.random.default_rng(rows), dict(options)
    inner = (37,) if contracted == 1 else (6, 11)

    def draw(*shape):
        return rng.standard_normal(shape).astype(jnp.bfloat16 if short else np.float32).astype(np.float32) / 4

    x, weights = jnp.asarray(draw(rows, *inner)), [draw(*shape, *inner) for shape in shapes]
    residual = draw(rows, *shapes[0][options.get("swiglu", False) :]) if options.pop("residual", False) else None
    norm = draw(*inner) if options.pop("normed", False) else None
    biases = [draw(*shape) for shape in shapes] if options.pop("biases", False) else None

    def run(x, weights, norm, biases, residual):
        x = x if norm is None else DeferredNorm(x, norm, 1e-5, 1.0)
        return linear(XLA, x, tuple(weights), contracted, biases=biases, residual=residual, **options)

    args = (weights, *rest) = jax.tree.map(jnp.asarray, (weights, norm, biases, residual))
    got = jax.jit(run)(x, [jax.device_put(PackedWeight.of(w, contracted)) for w in weights], *rest)
    assert_as_near(got, run, x, *args)


@needs_kernel
@pytest.mark.parametrize("options", [{}, {"swiglu": True}])
def test_a_weight_of_a_stack_has_the_bits_of_the_weight_alone(options):
    rng = np.random.default_rng(0)
    stack, x = (
        rng.standard_normal((3, 2, 80, 37)).astype(np.float32),
        jnp.asarray(rng.standard_normal((5, 37)), jnp.float32),
    )
    whole = jax.device_put(PackedWeight.of(stack, 1))
    of_stack = jax.jit(lambda i: cpu.linear(x, [whole.of_stack(i).reshape(160, 37)], **options)[0])
    for i, weight in enumerate(stack):
        alone = cpu.linear(x, [PackedWeight.of(weight, 1).reshape(160, 37)], **options)[0]
        np.testing.assert_array_equal(of_stack(i), alone)
        np.testing.assert_array_equal(whole.of_stack(jnp.int32(i)).dense(), weight)
    for i in (-1, 3):
        with pytest.raises(Exception, match="more outputs than panels hold"):
            of_stack(i).block_until_ready()


@needs_kernel
def test_only_live_rows_are_computed_and_each_has_the_bits_of_fewer_rows():
    """More rows than a part of a product or of a norm has."""
    rng = np.random.default_rng(0)
    x, weight, norm, norm_bias, bias, residual = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((530, 131), (70, 131), 131, 131, 70, (530, 70))
    )
    panels = jax.device_put(PackedWeight.of(weight, 1))

    @partial(jax.jit, static_argnames="is_centred")
    def mapped(x, residual, live=None, is_centred=True):
        norms = norm, 1e-5, 0.5, norm_bias if is_centred else None
        return cpu.linear(x, [panels], *norms, biases=[bias], residual=residual, live=live)[0]

    for is_centred in (True, False):
        whole = np.asarray(mapped(x, residual, is_centred=is_centred))
        for rows in (1, 17, 300):
            np.testing.assert_array_equal(mapped(x[:rows], residual[:rows], is_centred=is_centred), whole[:rows])
    whole = np.asarray(mapped(x, residual))
    for live in (300, 1, 0, -5):
        # Of rows that no call before had: memory that is not written cannot have their results.
        count = max(live, 0)
        fresh = np.concatenate([x[:count], rng.standard_normal((530 - count, 131)).astype(np.float32)])
        got = np.asarray(mapped(fresh, residual, jnp.int32(live)))
        np.testing.assert_array_equal(got[:count], whole[:count])
        assert (got[count:] != np.asarray(mapped(fresh, residual))[count:]).any(axis=1).all(), "a dead row was computed"
    np.testing.assert_array_equal(mapped(x, residual, jnp.int32(9999)), whole)


@needs_kernel
@pytest.mark.parametrize(("name", "shape"), [("biases", (1,)), ("biases", (41,)), ("residual", (1, 40))])
def test_a_bias_or_residual_of_another_size_is_refused(name, shape):
    weight = PackedWeight.of(np.ones((40, 8), np.float32), 1)
    given = jnp.ones(shape) if name == "residual" else [jnp.ones(shape)]
    with pytest.raises(Exception, match=r"a (bias|residual) of another size"):
        jax.block_until_ready(cpu.linear(jnp.ones((2, 8)), [weight], **{name: given}))


@needs_kernel
def test_arrays_of_shapes_that_differ_are_refused():
    """The kernels would read past the ends of some."""
    weight, x, eight = PackedWeight.of(np.ones((40, 8), np.float32), 1), jnp.ones((2, 8)), jnp.ones(8)
    angles, k, buffer = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 1, 8)), jnp.zeros((4, 1, 64, 8))
    table, rows, places = jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32)
    qkv, patch_angles, bounds = jnp.ones((5, 3, 2, 8)), jnp.ones((5, 4)), jnp.zeros(5, jnp.int32)
    few = PackedWeight.of(QuantizedWeight(np.ones((40, 8), np.int8), np.ones((40, 2), np.float32)), 1)
    longer, shorter, none = (replace(few, form=replace(few.form, runs=runs)) for runs in (1, 4, 0))
    for message, call in (
        ("panels of another number of inputs", lambda: cpu.linear(x[:, :6], [weight])),
        ("panels of another number of inputs", lambda: cpu.linear(x[:, :4], [few])),
        ("panels of another number of inputs", lambda: cpu.linear(x, [longer])),
        ("panels of another number of inputs", lambda: cpu.linear(x, [shorter])),
        ("runs of other sizes", lambda: cpu.linear(x, [none])),
        ("runs of other sizes", lambda: cpu.linear(x[:, :7], [few])),
        ("a norm of another size than the inputs", lambda: cpu.linear(x, [weight], jnp.ones(7))),
        ("a norm of another size than the inputs", lambda: cpu.linear(x, [weight], eight, norm_bias=jnp.ones(9))),
        ("angles of another number", lambda: rotated(k, (angles[:, :1], angles[:, :1]))),
        ("sines of another shape", lambda: rotated(k, (angles, angles[:1]))),
        ("a norm of another size than a head", lambda: rotated(k, (angles, angles), jnp.ones(7))),
        ("values of another shape", lambda: cpu.write(buffer, buffer, table, k, k[..., :4], rows, places)),
        ("heads of another number", lambda: cpu.write(buffer, buffer, table, k[..., :4], k[..., :4], rows, places)),
        ("rows or positions", lambda: cpu.write(buffer, buffer, table, k, k, rows[:1], places)),
        ("rows or positions", lambda: cpu.write(buffer, buffer, table, k, k, rows, places[:1])),
        ("another number of patches", lambda: cpu.attend_frames(qkv, (patch_angles[:4],) * 2, bounds, bounds)),
        ("another number of patches", lambda: cpu.attend_frames(qkv, (patch_angles,) * 2, bounds, bounds[:4])),
        ("sines of another shape", lambda: cpu.attend_frames(qkv, (patch_angles, patch_angles[:, :3]), bounds, bounds)),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(call())


@needs_kernel
def test_a_call_with_fewer_forms_than_weights_is_refused(monkeypatch):
    weight = PackedWeight.of(np.ones((40, 8), np.float32), 1)
    one = cpu.forms_of(weight)
    monkeypatch.setattr(cpu, "forms_of", lambda *weights: one)
    with pytest.raises(Exception, match="fewer forms than weights"):
        jax.block_until_ready(cpu.linear(jnp.ones((2, 8)), [weight, weight]))


def rotated(k, angles, norm=None):
    return cpu.rotate(None, k, angles, (None, norm), 1e-6, 0.0)[1]


@needs_kernel
@pytest.mark.parametrize("size", [64, 30])
def test_a_rotated_token_has_the_same_bits_alone_and_among_others(size):
    """Also in calls that are large enough for several threads."""
    rng = np.random.default_rng(0)
    k, norm = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 300, 3, size), size))
    at = rng.uniform(-3, 3, (2, 300, size // 2 - 2)).astype(np.float32)
    angles = np.cos(at), np.sin(at)
    for weight in (None, norm):
        together = np.asarray(rotated(k, angles, weight))
        for b, t in ((0, 0), (1, 0), (1, 299)):
            alone = rotated(k[b : b + 1, t : t + 1], tuple(x[b : b + 1, t : t + 1] for x in angles), weight)
            np.testing.assert_array_equal(np.asarray(alone)[0, 0], together[b, t])


@needs_kernel
@pytest.mark.parametrize("options", [{"swiglu": True}, {"gelu": True}])
def test_activations_of_large_numbers_and_of_none(options):
    x = jnp.asarray([[-1e30], [-1e4], [-90.0], [-1.0], [0.0], [1.0], [30.0], [1e4], [np.nan]], jnp.float32)
    weight = np.ones((2, 16, 1) if "swiglu" in options else (16, 1), np.float32)
    expected = linear(XLA, x, (jnp.asarray(weight),), **options)[0]
    np.testing.assert_allclose(
        linear(XLA, x, (PackedWeight.of(weight, 1),), **options)[0], expected, rtol=1e-6, atol=1e-30
    )


@needs_kernel
@pytest.mark.parametrize("dim", [80, 96])
def test_attention_of_other_sizes_and_what_is_no_number(dim):
    rng = np.random.default_rng(dim)
    shapes = ((1, 5, 6, dim), (1, 5, 2, dim), (1, 5, 2, dim), (2, 2, 256, dim), (2, 2, 256, dim))
    q, k, v, *held = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    length, bounds = jnp.array([200], jnp.int32), Bounds.none(1, 5)
    table = jnp.array([[1, 0]], jnp.int32)
    for where in (None, 10, 150, 250):
        # A key that is no number, seen by all; past the length it is not seen.
        keys = held[0] if where is None else held[0].at[1, 1, where, 3].set(jnp.nan)
        cache = KVCache(keys, held[1], table)
        got = np.asarray(cpu.attend(q, k, v, None, cache, length, bounds))
        wrong = np.isnan(got)
        assert wrong.any() == (where in (10, 150))

        def definition(q, k, v, keys, values):
            cache = KVCache(keys, values, table)
            return attention.reference(XLA, q, k, v, None, cache, length, bounds)

        def of_numbers(*args, wrong=wrong, definition=definition):
            return jnp.where(wrong, 0.0, definition(*args))

        args = (q, k, v, keys, held[1])
        np.testing.assert_array_equal(np.isnan(jax.jit(definition)(*args)), wrong)
        assert_as_near(np.where(wrong, 0.0, got), of_numbers, *args)


def some_frames(lengths, heads=2, size=20, dtype=np.float32):
    """Queries, keys and values of frames with the angles of their rotation, and the rows that each sees."""
    rng, ends = np.random.default_rng(size), np.cumsum(lengths)
    qkv = jnp.asarray(rng.standard_normal((ends[-1], 3, heads, size)), dtype)
    angles = jnp.asarray(rng.uniform(-3, 3, (ends[-1], size // 2)), jnp.float32)
    seen = (jnp.asarray(np.repeat(x, lengths), jnp.int32) for x in (ends - lengths, ends))
    return qkv, (jnp.cos(angles), jnp.sin(angles)), *seen


@needs_kernel
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_row_of_a_frame_has_the_same_bits_anywhere(dtype):
    """Alone, in its frame, and behind other frames."""
    qkv, angles, low, high = some_frames((7, 430, 50), dtype=dtype)
    together = np.asarray(cpu.attend_frames(qkv, angles, low, high))
    frame = slice(7, 437)
    qkv, angles = jax.tree.map(lambda x: x[frame], (qkv, angles))
    alone = np.asarray(cpu.attend_frames(qkv, angles, low[frame] - 7, high[frame] - 7))
    np.testing.assert_array_equal(alone, together[frame])
    # Each other row of the frame sees nothing.
    for kept in (0, 17, 429):
        only = jnp.where(jnp.arange(430) == kept, 430, 0)
        row = np.asarray(cpu.attend_frames(qkv, angles, jnp.zeros(430, jnp.int32), only))
        np.testing.assert_array_equal(row[kept], alone[kept])
        assert not np.delete(row, kept, 0).any()


@needs_kernel
def test_rows_without_keys_are_zero_and_no_other_row_reads_them():
    qkv, angles, low, high = some_frames((40, 3, 60))
    before = np.asarray(cpu.attend_frames(qkv, angles, low, high))
    gap = (jnp.arange(103) >= 40) & (jnp.arange(103) < 43)
    after = np.asarray(
        cpu.attend_frames(qkv.at[40:43].set(jnp.nan), angles, *(jnp.where(gap, 0, x) for x in (low, high)))
    )
    np.testing.assert_array_equal(after, np.where(gap[:, None, None], 0.0, before))


@needs_kernel
def test_callers_at_one_time_do_not_mix():
    x, panels, _ = a_product(2000, 512, 3, True)
    product, expected, wrong = jax.jit(partial(product_of, panels)), product_of(panels, x), []

    def call(i):
        for _ in range(50):
            if not np.array_equal(product(x * 2.0**i), expected * 2.0**i):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("compiler", "said"), [("no-such-compiler", "no C++ compiler is here"), ("false", "cannot compile")]
)
def test_without_a_compiler_it_says_so_and_goes_on(compiler, said, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _: tmp_path)
    with caplog.at_level(logging.WARNING, logger="dflash_jax"):
        assert cpu.why_not.__wrapped__()
    assert said in caplog.text
    assert len(caplog.records) == 1


@needs_kernel
@pytest.mark.parametrize("size", [1, 1000, 4096, 3 * 4096 + 5, 2**20 + 3])
def test_zeros_are_zero_in_memory_that_was_used_and_each_array_is_its_own(size):
    like = jax.ShapeDtypeStruct((size,), jnp.int8)
    call = jax.jit(lambda: (cpu.zeros(like), cpu.zeros(like)))
    for _ in range(20):
        first, second = call()
        assert not np.any(first)
        assert not np.any(second)
        assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
        del first, second
        # Freed at once: the next zeros get its memory.
        jax.block_until_ready([jnp.full((size,), n, jnp.int8) for n in (1, 2)])


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages back as zeros")
def test_zeros_take_memory_only_where_they_are_written():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    size, before = 2**29, resident()
    like = jax.ShapeDtypeStruct((size,), jnp.int8)
    zeros, _ = jax.block_until_ready(jax.jit(lambda: (cpu.zeros(like), cpu.zeros(like)))())
    assert resident() - before < size / 4
    write = jax.jit(lambda x: x.at[:: size // 8].set(1), donate_argnums=0)
    assert int(write(zeros)[:: size // 8].sum()) == 8
    assert resident() - before < size / 4
