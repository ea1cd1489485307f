"""Calls of `launch_p`: which launches are joined into one, and what the driver gets for each launch."""

import ctypes
import ctypes.util
import itertools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")

import torch
import triton
import triton.language as tl

from dflash_jax.ops.backend import with_gradient_of
from dflash_jax.ops.card import HOPPER, Card
from dflash_jax.ops.kernels.library import find_compiler
from dflash_jax.ops.kernels.triton import call, join, linear
from dflash_jax.ops.kernels.triton.call import launch_p
from dflash_jax.ops.kernels.triton.launch import chained, launching, triton_call
from dflash_jax.ops.weights import quantize
from tools.triton_interpreter import interpreting

N = 8


@triton.jit
def _add(x, y, z, LEN: tl.constexpr):
    i = tl.arange(0, LEN)
    tl.store(z + i, tl.load(x + i) + tl.load(y + i))


@triton.jit
def _double(x, LEN: tl.constexpr, DEPENDENT: tl.constexpr):
    i = tl.arange(0, LEN)
    tl.store(x + i, 2 * tl.load(x + i))


@triton.jit
def _reverse(x, y, LEN: tl.constexpr):
    for i in range(LEN):
        tl.store(y + i, tl.load(x + LEN - 1 - i))


@pytest.fixture(autouse=True)
def joined():
    with interpreting(joined=True) as ran:
        yield ran


def add(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(HOPPER, _add, (x, y), (out,), (1,), LEN=N)[0]


def double(x):
    return triton_call(HOPPER, _double, (x,), (), (1,), in_place=(0,), LEN=N)[0]


def reversed_into(x, y):
    return triton_call(HOPPER, _reverse, (x, y), (), (1,), in_place=(1,), LEN=N)[0]


def calls(function, *args) -> list[int]:
    """The number of kernels of each call in the joined program, sub-programs included."""
    with launching(call.launch_by_call):
        traced = jax.make_jaxpr(lambda *args: function(*args))(*args).jaxpr

    def count(jaxpr):
        found = []
        for eqn in jaxpr.eqns:
            found += [len(eqn.params["kernels"])] if eqn.primitive is launch_p else []
            found += [n for inner in jax.extend.core.jaxprs_in_params(eqn.params) for n in count(inner)]
        return found

    return count(join.join(traced))


def case(function, kernels, *shapes):
    return pytest.param(function, kernels, shapes or ((N,), (N,)), id=function.__name__)


def follow(x, y):
    return add(add(x, y), y)


def through_a_view(x, y):
    return add(add(x, y).reshape(2, 4), y.reshape(2, 4)).reshape(4, 2)


def what_neither_needs(x, y):
    a = add(x, y)
    return add(a, y * 3), jnp.sin(x)


def what_the_second_needs(x, y):
    a = add(x, y)
    return add(jnp.sin(a), y)


def what_comes_after(x, y):
    a = add(x, y)
    b = jnp.sin(a)
    return add(a, x), b


def in_place(x, y):
    a = double(add(x, y))
    return add(a, double(a + 0.0)), double(double(x * 1.0))


def an_old_value_is_read_by_a_kernel(x, y):
    x = x + 1
    a = double(x)
    return add(a, x)


def an_old_value_is_read_later(x, y):
    a = add(x, y)
    b = double(a)
    return b + a


def an_old_value_is_a_result(x, y):
    a = add(x, y)
    return double(a), a


def an_old_value_is_read_before(x, y):
    x = x + 1
    a = add(x, y)
    b = jnp.sort(x)
    return double(x), a, b


def an_old_value_is_read_in_between(x, y):
    x = x + 1
    a = add(x, y)
    b = jnp.sin(a) + x
    return double(x), b


def an_update_of_what_a_kernel_reads(x, y):
    x = x + 1
    a = add(x, y)
    b = jax.lax.dynamic_update_slice(x, y[:2], (3,))
    return add(a, x), b, add(a, b)


def a_view_is_overwritten(x, y):
    a = add(x, y)
    b = double(a.reshape(2, 4))
    return b, add(b.reshape(N), y)


def an_old_view_is_read(x, y):
    a = add(x, y)
    v = a.reshape(2, 4)
    return double(a), v * 2


def a_view_of_an_argument_is_overwritten(x, y):
    a = double(x + 1)
    return double(a.reshape(2, 4)), y


def a_view_is_read_while_it_is_overwritten(x, y):
    a = add(x, y)
    return reversed_into(a.reshape(2, 4), a)


def in_a_loop(x, y):
    def body(i, carry):
        a, b = carry
        a = add(a, b)
        b = add(a, b) * 0.5
        return double(a), b

    return jax.lax.fori_loop(0, 3, body, (x, y))


def in_branches(x, y):
    a = add(x, y)
    return jax.lax.cond(a.sum() > 0, lambda: add(double(a), y), lambda: add(a, add(a, a)))


def called_twice(x, y):
    # A function that has been traced is not traced again, whatever launches kernels now.
    inner = jax.jit(lambda x, y: add(x, y))
    return inner(inner(x, y), inner(y, y))


def with_a_derivative(x, y):
    differentiable = with_gradient_of(jnp.add, lambda x, y: add(x, y))
    return double(differentiable(differentiable(x, y), x))


def results_of_others(x, y):
    a = add(x, y)
    return x, a, a, y.reshape(2, 4), jnp.float32(3)


CASES = [
    case(follow, [2]),
    case(through_a_view, [2]),
    case(what_neither_needs, [2]),
    case(what_the_second_needs, [1, 1]),
    case(what_comes_after, [2]),
    case(in_place, [2, 4]),
    case(an_old_value_is_read_by_a_kernel, [1, 1]),
    case(an_old_value_is_read_later, [1, 1]),
    case(an_old_value_is_a_result, [1, 1]),
    case(an_old_value_is_read_before, [2]),
    case(an_old_value_is_read_in_between, [1, 1]),
    case(an_update_of_what_a_kernel_reads, [1, 2]),
    case(a_view_is_overwritten, [3]),
    case(an_old_view_is_read, [1, 1]),
    case(a_view_of_an_argument_is_overwritten, [1, 1]),
    case(a_view_is_read_while_it_is_overwritten, [1, 1]),
    case(in_a_loop, [3]),
    case(in_branches, [1, 2, 2]),
    case(called_twice, [3]),
    case(with_a_derivative, [3]),
    case(results_of_others, [1]),
]


@pytest.mark.parametrize(("function", "kernels", "shapes"), CASES)
def test_launches_are_joined_and_results_are_those_of_single_launches(function, kernels, shapes):
    args = [jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32) for i, shape in enumerate(shapes)]
    with interpreting():
        expected = jax.jit(lambda *args: function(*args))(*args)
    found = jax.jit(chained(lambda *args: function(*args), dependent=False))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert sorted(calls(function, *args)) == sorted(kernels)


def test_an_array_that_is_written_in_place_is_one_argument():
    with pytest.raises(ValueError, match="argument 1 of _reverse"):
        jax.jit(lambda x: reversed_into(x, x))(jnp.zeros(N))


def test_a_literal_can_be_written_in_place():
    assert calls(lambda x: (add(x, x), double(np.float32(3))), jnp.zeros(N)) == [2]


# The driver.

TESTS = itertools.count()
ABOUT = {"num_warps": 4, "shared": 1024, "num_ctas": 1, "global_scratch_size": 0}


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """A library that stands for libcuda, and computes `_add`, `_double` and `_reverse`."""
    if reason := call.why_not():
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("driver") / "libcuda.so"
    (include,) = call.library().includes
    source = Path(__file__).with_name("driver_stub.cc")
    command = [*find_compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    call.library().load().DflashDriver(str(path).encode())
    library = ctypes.CDLL(str(path))
    library.StubWritten.restype = ctypes.c_char_p
    return library


@pytest.fixture
def written(stub, monkeypatch):
    """What the driver was asked since the last call, where Triton compiled each kernel to what `ABOUT` says."""
    about, test = {name: dict(ABOUT) for name in ("_add", "_double", "_reverse")}, next(TESTS)

    def compiled(kernel, dtypes, meta, warps, stages, capability):
        name = kernel.fn.__name__
        image = f"{name} {' '.join(dtypes)} {dict(sorted(meta))}\0{test}"
        return SimpleNamespace(
            asm={"cubin": image.encode() + b"\0"}, metadata=SimpleNamespace(name=name, **about[name])
        )

    monkeypatch.setattr(call, "_compiled", compiled)
    stub.StubFail(b"")
    stub.StubContext(1)
    stub.StubWritten()
    lines = SimpleNamespace(about=about, lines=lambda: stub.StubWritten().decode().splitlines())
    with call.calling(call._call):
        yield lines


def arrays(seed: int):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=N), jnp.float32) for _ in range(2)]


def run(function, *args, dependent=False):
    return jax.jit(chained(lambda *args: function(*args), dependent))(*args)


def test_the_driver_gets_each_launch_in_order_with_its_arrays(written):
    x, y = arrays(0)
    (a, b) = run(lambda x, y: (add(double(add(x, y)), y), x - y), x, y)
    np.testing.assert_array_equal(a, 2 * (x + y) + y)
    np.testing.assert_array_equal(b, x - y)
    assert written.lines() == [
        "load _add float32 float32 float32 {'LEN': 8}",
        "load _double float32 {'DEPENDENT': False, 'LEN': 8}",
        "_add grid 1,1,1 threads 128 shared 1024 none none",
        "_double grid 1,1,1 threads 128 shared 1024 none none",
        "_add grid 1,1,1 threads 128 shared 1024 none none",
    ]


@pytest.mark.parametrize(("function", "kernels", "shapes"), CASES)
def test_programs_on_the_driver_are_right(function, kernels, shapes, written):
    args = arrays(1)
    with interpreting():
        expected = jax.jit(lambda *args: function(*args))(*args)
    found = run(function, *args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_only_a_kernel_that_waits_is_dependent_and_never_the_first(written):
    x, y = arrays(2)
    run(lambda x, y: double(double(add(double(x * 1), y))), x, y, dependent=True)
    lines = [line for line in written.lines() if not line.startswith("load")]
    assert [(line.split()[0], "dependent" in line) for line in lines] == [
        ("_double", False), ("_add", False), ("_double", True), ("_double", True)
    ]  # fmt: skip


def test_a_card_before_hopper_has_no_dependent_launches(written):
    def on_ampere(x):
        x = triton_call(Card.of_capability(80), _double, (x * 1,), (), (1,), in_place=(0,), LEN=N)[0]
        return triton_call(Card.of_capability(80), _double, (x,), (), (1,), in_place=(0,), LEN=N)[0]

    run(on_ampere, arrays(2)[0], dependent=True)
    assert not any("dependent" in line or "'DEPENDENT': True" in line for line in written.lines())


def test_much_shared_memory_is_asked_for_and_clusters_and_scratch_are_passed(written):
    written.about["_add"] |= {"shared": 60000, "num_ctas": 2, "num_warps": 8, "global_scratch_size": 128}
    x, y = arrays(3)
    np.testing.assert_array_equal(run(lambda x, y: add(add(x, y), y), x, y), x + y + y)
    assert written.lines()[1:] == [
        "set _add 8 60000",
        "_add grid 2,1,1 threads 256 shared 60000 cluster 2 own none",
        "_add grid 2,1,1 threads 256 shared 60000 cluster 2 own none",
    ]


def test_images_are_loaded_once_a_context(written, stub):
    x, y = arrays(4)
    program = jax.jit(chained(lambda x, y: double(add(x, y)) + 4, dependent=False))
    loads = []
    for context in (1, 1, 2, 2, 1):
        stub.StubContext(context)
        program(x, y).block_until_ready()
        loads.append(sum(line.startswith("load") for line in written.lines()))
    assert loads == [2, 0, 2, 0, 0]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("cuCtxGetCurrent", "the context"),
        ("cuModuleLoadData", "loading"),
        ("cuModuleGetFunction", "finding the function"),
        ("cuFuncSetAttribute", "shared memory (50000 bytes)"),
        ("cuLaunchKernelEx", "the launch"),
    ],
)
def test_an_error_of_the_driver_names_the_kernel_and_the_next_call_can_go_well(function, says, written, stub):
    written.about["_double"] |= {"shared": 50000}
    x, _ = arrays(5)
    program = jax.jit(chained(lambda x: double(x * 3), dependent=False))
    stub.StubFail(function.encode())
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(says)) as raised:
        program(x).block_until_ready()
    assert "kernel _double failed: too many resources requested (CUDA error 701)" in str(raised.value)
    stub.StubFail(b"")
    np.testing.assert_array_equal(program(x), 2 * (x * 3))


def test_without_a_driver_the_error_says_so(written, stub, tmp_path):
    library = call.library().load()
    try:
        library.DflashDriver(str(tmp_path / "none.so").encode())
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"none\.so"):
            run(lambda x: double(x * 7), arrays(6)[0]).block_until_ready()
        not_cuda = ctypes.util.find_library("m")
        library.DflashDriver(not_cuda.encode())
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"{not_cuda} has no cu"):
            run(lambda x: double(x * 9), arrays(6)[0]).block_until_ready()
    finally:
        library.DflashDriver(stub._name.encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan[:-1],
        lambda plan: plan[:1],
        lambda plan: np.append(plan[:2], [1 << 40, *plan[3:]]),
        lambda plan: np.append(plan[:3], [7, *plan[4:]]),
        lambda plan: np.append(plan[:-2], [99, plan[-1]]),
    ],
)
def test_a_damaged_plan_is_an_error(change, written, monkeypatch):
    attributes = call.Plan.attributes

    def damaged(self):
        found = attributes(self)
        plan = np.asarray(change(found["plan"]), np.int64)
        return found | {"plan": plan, "digest": str(plan)}

    monkeypatch.setattr(call.Plan, "attributes", damaged)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"plan|buffer"):
        run(lambda x: double(x * 3), arrays(7)[0]).block_until_ready()


def program(seed: int):
    """A function of random launches and operations, each of any earlier values."""
    rng = np.random.default_rng(seed)
    steps = [(int(rng.integers(7)), *map(int, rng.integers(0, 2 + i, 2))) for i in range(int(rng.integers(3, 14)))]
    kept = rng.permutation(2 + len(steps))[:3]

    def function(add, double, x, y):
        forms = (
            add,
            lambda a, b: add(b.reshape(2, 4), a.reshape(2, 4)),
            lambda a, b: double(a),
            lambda a, b: double(add(a, b)),
            jnp.maximum,
            lambda a, b: jax.lax.dynamic_update_slice(a, b[:3], (2,)),
            lambda a, b: jax.lax.fori_loop(0, 2, lambda _, c: add(double(c), b) / 4, a),
        )
        values = [x, y]
        for form, i, j in steps:
            values.append(forms[form](values[i].reshape(N), values[j].reshape(N)))
        return [values[i] for i in kept]

    return function


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(written, seed):
    function, args = program(seed), arrays(seed)
    expected = jax.jit(lambda x, y: function(jnp.add, lambda x: 2 * x, x, y))(*args)
    found = run(lambda x, y: function(add, double, x, y), *args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "quantized", "swiglu"),
    [
        (1, (64, 40, 24), None, False),
        (5, (2048, 100, 60, 37), None, False),
        (1, (96,), ("fp8", 1), True),
        (5, (128, 64), ("nvfp4", 1), False),
        (16, (640,), None, True),
    ],
)
def test_programs_prefetch_the_beginning_of_their_own_rows(rows, outputs, quantized, swiglu, monkeypatch):
    """Of each weight all rows, once, and nothing else."""
    hidden, rng = 128, np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(n << swiglu, hidden)), jnp.bfloat16) for n in outputs]
    if quantized:
        weights = [quantize(w, *quantized) for w in weights]
    asked, bases = [], {}

    def prefetch(address, size, dependent):
        asked.append((int(address.handle.data.reshape(-1)[0]), int(np.asarray(size.handle.data).reshape(-1)[0])))

    monkeypatch.setattr(linear, "prefetch", prefetch)
    monkeypatch.setattr(linear, "wait_for_inputs", lambda dependent: None)

    def launcher(launch):
        # A place without a weight has another one's arrays.
        held = {id(x): torch.from_numpy(np.array(x).view(np.uint8)) for x in launch.args[3:15]}
        tensors = [held[id(x)] for x in launch.args[3:15]]
        bases.update({t.data_ptr(): t.nbytes for t in tensors[::3]})
        out = [torch.zeros(tuple(x.shape)) for x in launch.out]
        args = [torch.zeros(tuple(x.shape)) for x in launch.args[:3]]
        views = [t.view(getattr(torch, str(x.dtype))) for t, x in zip(tensors, launch.args[3:15], strict=True)]
        launch.kernel[launch.grid](*args, *views, *out, **launch.meta | {"DEPENDENT": True})
        return tuple(jnp.zeros(x.shape, x.dtype) for x in launch.out)

    with launching(launcher):
        linear.project_triton(jnp.zeros((rows, hidden), jnp.bfloat16), weights, swiglu=swiglu, card=HOPPER)
    for base, size in bases.items():
        inside = sorted({(at, n) for at, n in asked if base <= at < base + size})
        assert inside[0][0] == base
        assert all(at + n == following for (at, n), (following, _) in itertools.pairwise(inside))
        assert sum(inside[-1]) == base + size
    assert len(asked) == sum(any(base <= at < base + size for base, size in bases.items()) for at, _ in asked)
