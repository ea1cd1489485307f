"""Every Triton kernel, and every implementation of a TPU, against its definition.

Over dtypes, lengths and batches, with permuted rows, rows past the end and NaN where nothing may be read. On a device
at a published model's sizes, interpreted at small ones.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.ops.backend import Backend
from dflash_jax.ops.kernels.triton import call
from dflash_jax.ops.kernels.triton.launch import chained, launch_by_default, launching
from dflash_jax.parallel.devices import DEVICES
from tools import float64_reference
from tools.kernels import arguments
from tools.kernels.arguments import Source
from tools.kernels.comparisons import (
    BF16,
    F16,
    F32,
    FP8,
    SMALL_OF_A_TPU,
    Comparison,
    NotSupportedError,
    Sizes,
    Tested,
    attention,
    convolutions,
    delta,
    divided,
    fp4_backend,
    frames,
    mixtures,
    parts,
    prefilling,
    products,
    replaying,
    rotation,
    tested_card,
    testing,
    writing,
)

# What was compared on a card, in the form of the check's own report.
RECORD = Path(__file__).resolve().parents[2] / "benchmarks/card-h200.json"
# How the names of comparisons of joined launches end.
JOINED = ", in one call"


def check(comparison: Comparison, on_card: bool) -> dict:
    """Runs a kernel twice and once with its rows permuted, and compares with the definition in float64.

    Joined launches are also compared with single ones, to the bit: those of jax-triton where it can be used.

    Returns:
        {"status": "exact"} with the distance as a share of what is allowed, or {"status": "failed", "why"}.

    Raises:
        InputError: This machine cannot join launches.
    """
    c = comparison
    # Interpreted, a Triton kernel runs as it is called.
    kernel = joined(c) if c.joined else jax.jit(c.kernel) if on_card or c.on_tpu else c.kernel
    if c.joined and on_card and (reason := call.why_not()):
        raise InputError(f"launches cannot be joined: {reason}")
    rows = next(x for x in jax.tree.leaves(c.args) if x.ndim).shape[0] if not c.in_place else len(c.args[0].rows)
    order = np.random.default_rng(0).permutation(rows)

    def run(args, kernel=kernel):
        with jax.default_matmul_precision("highest" if c.dtype == F32 else "default"):
            return [np.asarray(x) for x in jax.tree.leaves(kernel(*args))]

    result = run(c.args)
    if not same_bits(result, run(c.args)):
        return failed("two runs gave other bits")
    if c.asks:
        companies = {"in another order": order, "beside other rows": _repeated(rows), **_fewer(rows)}
        same = {name: same_bits([x[o] for x in result], run(c.permuted(c.args, o))) for name, o in companies.items()}
        return {"status": "measured"} | {f"the same bits {name}": "yes" if one else "no" for name, one in same.items()}
    if c.joined:
        if f"{call.launch_p.name}[" not in str(jax.make_jaxpr(kernel)(*c.args)):
            return failed("there is no call of joined launches")
        # A function of its own: JAX would take what it has traced of the kernel, with other launches.
        if not same_bits(result, run(c.args, jax.jit(lambda *args: c.kernel(*args)))):
            return failed("single launches gave other bits")
    if c.in_place:
        # A state's last leaf is its rows.
        is_same = same_bits(result[:-1], run(c.permuted(c.args, order))[:-1])
    else:
        is_same = not c.by_row or same_bits([x[order] for x in result], run(c.permuted(c.args, order)))
    if not is_same:
        return failed("rows in another order gave other bits")
    if c.on_tpu and c.by_row and not c.in_place:
        some = _repeated(rows)
        if not same_bits([x[some] for x in result], run(c.permuted(c.args, some))):
            return failed("beside other rows a row has other bits")

    def definition(*args):
        expected = jax.jit(c.definition)(*args)
        # The arrays of a state.
        return jax.tree.leaves(expected)[: -1 if c.in_place else None]

    plain, result = c.args if c.plain is None else c.plain, result[: -1 if c.in_place else None]
    with ExitStack() as stack:
        if c.on_tpu:
            # The host's processor has float64, and another compiler.
            stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
            plain = jax.tree.map(np.asarray, plain)
        if c.to_the_bit:
            expected = [np.asarray(x) for x in definition(*plain)]
            return {"status": "exact", "of_allowed": 0.0} if same_bits(result, expected) else failed("other bits")
        stack.enter_context(jax.default_matmul_precision("highest" if c.dtype == F32 else "default"))
        exact = float64_reference.in_both_of(definition, *plain)
    return verdict(result, exact, c.dtype)


def _repeated(rows: int) -> np.ndarray:
    """As many rows, some of them several times: each has others beside it."""
    return np.random.default_rng(1).integers(0, rows, rows)


def _fewer(rows: int) -> dict[str, np.ndarray]:
    """Some of the rows."""
    order = np.random.default_rng(2).permutation(rows)
    return {f"of {count} of {rows} rows": order[:count] for count in (rows // 2, 1) if 0 < count < rows}


def joined(comparison: Comparison) -> Callable:
    """The kernel with its launches joined, compiled."""

    def kernel(*args):
        with launching(launch_by_default):
            return chained(comparison.kernel)(*args)

    return jax.jit(kernel)


def launched(comparison: Comparison) -> dict:
    """{"status": "exact"} once the kernel has run."""
    kernel = joined(comparison) if comparison.joined else jax.jit(comparison.kernel)
    jax.block_until_ready(kernel(*comparison.args))
    return {"status": "exact"}


def verdict(result: list[np.ndarray], exact: list[float64_reference.Exact], dtype) -> dict:
    """Largest distance of the results from float64, as a share of the allowed one."""
    farthest = 0.0
    for i, (one, right) in enumerate(zip(result, exact, strict=True)):
        one, missing = np.asarray(one, np.float64), np.isnan(right.value)
        if one.shape != right.value.shape or (np.isnan(one) != missing).any():
            return failed(f"result {i} has another shape than its definition's, or NaN elsewhere")
        single = np.where(missing, 0, right.single)
        right = float64_reference.Exact(np.where(missing, 0, right.value), single)
        for name, (apart, allowed) in float64_reference.distances(np.where(missing, 0, one), right, dtype).items():
            if not apart <= allowed:
                return failed(f"result {i} is {apart:.2e} from float64 ({name}): {allowed:.2e} is allowed")
            farthest = max(farthest, apart / allowed if allowed else 0.0)
    return {"status": "exact", "of_allowed": round(farthest, 3)}


def failed(why: str) -> dict:
    """The result of a case that failed."""
    return {"status": "failed", "why": why}


def same_bits(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether two lists of arrays are equal to the bit."""
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def remaining_first(sizes: Sizes) -> list[tuple[str, Callable[[Source], Comparison]]]:
    """As `comparisons`, with those last that `RECORD` has as exact, unless the kernel was replaced since."""
    cases = json.loads(RECORD.read_text())["stages"]["kernels"]["cases"]
    exact = {name for name, case in cases.items() if case["status"] == "exact" and "replaced" not in case}
    return sorted(comparisons(sizes), key=lambda each: each[0] in exact)


def comparisons(sizes: Sizes) -> Iterator[tuple[str, Callable[[Source], Comparison]]]:
    """(name, function that makes the comparison) of all Triton kernels, in the order of `listed`."""
    return ((case.name, case.make) for case in listed(sizes))


@dataclass(frozen=True)
class Case:
    """A comparison that is not made yet.

    Attributes:
        name: Its name.
        make: Makes it.
        dtype: Dtype of the computation.
        function: The function of `comparisons` that does.
        options: The function's options.
    """

    name: str
    make: Callable[[Source], Comparison]
    dtype: jnp.dtype
    function: Callable
    options: dict


def of_a_tpu(sizes: Sizes) -> Iterator[tuple[str, Callable[[Source], Comparison]]]:
    """(name, function that makes the comparison) of all implementations that a TPU may take.

    What each operation chooses comes first, then those of the operations' lists that no TPU has run, then the others.
    """
    groups: dict[int, list[tuple[str, Callable]]] = {0: [], 1: [], 2: []}
    for case in listed(sizes):
        is_of_triton = case.name.endswith(JOINED) or case.options.keys() & {"untried", "kernel", "activations"}
        # No model runs in float16.
        if is_of_triton or case.dtype == F16:
            continue
        for tested, group in _implementations(case.function, "layers" in case.options):

            def make(source, case=case, tested=tested, asks=False):
                with testing(tested):
                    # Experts are in the order of their tokens, but in the reproducible mode.
                    by_row = case.function is not mixtures or tested.backend.reproducible
                    return replace(case.make(source), on_tpu=True, by_row=by_row, asks=asks)

            name = f"{case.name}: {tested.name or f'kernels {tested.backend.kernels}'}"
            name += ", reproducible" * tested.backend.reproducible
            groups[group].append((name, make))
            if case.function is mixtures:
                groups[group].append((f"{name}, does a token depend on others", partial(make, asks=True)))
    return (each for group in groups.values() for each in group)


@cache
def _implementations(function: Callable, of_layers: bool) -> list[tuple[Tested, int]]:
    """What of a function of `comparisons` is compared on a TPU, and its group in `of_a_tpu`."""
    # Triton's alone.
    if function in (parts, divided):
        return []
    device = jax.devices()[0]
    kind = device.device_kind if device.platform == "tpu" else DEVICES["tpu7x"].kind
    auto, every = (Backend.for_tpu(kernels, kind) for kernels in ("auto", "all"))
    chosen: dict[str, list[str]] = {}
    for backend in (every, auto):
        names = chosen[backend.kernels] = []
        asked = Tested(replace(backend, on_choice=lambda choice, names=names: names.append(choice.implementation)))
        _trace(function, asked, of_layers)
    found = [(Tested(auto), 0)]
    if function is mixtures:
        found.append((Tested(replace(auto, reproducible=True)), 0))
    if not asked.lists and chosen["all"] != chosen["auto"]:
        found.append((Tested(every), 1))
    # Of a function that makes two kernels, it takes the last.
    for each in (each for implementations in asked.lists[-1:] for each in implementations):
        tested, reason = Tested(auto if each.is_tried else every, each.name), ""
        try:
            _trace(function, tested, of_layers)
        except NotSupportedError as e:
            reason = str(e)
        # Others are of other platforms.
        if reason not in (auto.no_cpp, auto.no_triton) and not reason.startswith("the platform is tpu"):
            found.append((tested, 2 if each.is_tried else 1))
    return found


def _trace(function: Callable, tested: Tested, of_layers: bool) -> None:
    """Traces an implementation for small arguments."""
    options = {
        attention: {"heads": "target", "mask": "causal"},
        rotation: {"heads": "target"},
        products: {"weights": "gated"},
        replaying: {"layers": 2} if of_layers else {},
    }
    with testing(tested):
        comparison = function(Source(0), SMALL_OF_A_TPU, 7, 5, F32, **options.get(function, {}))
    jax.eval_shape(comparison.kernel, *comparison.args)


def listed(sizes: Sizes) -> Iterator[Case]:
    """All comparisons, the likeliest to fail and the most used first."""

    def named(function, rows, tokens, dtype, **options):
        text = ", ".join(k if v is True else f"{v} {k}" if isinstance(v, int) else v for k, v in options.items() if v)
        name = f"{function.__name__} {jnp.dtype(dtype).name}, B {rows}, T {tokens}{', ' * bool(text)}{text}"
        # An option that the function lacks is an error here, not where the case runs.
        inspect.signature(function).bind(None, sizes, rows, tokens, dtype, **options)
        make = partial(function, sizes=sizes, rows=rows, tokens=tokens, dtype=dtype, **options)
        return Case(name, make, dtype, function, options)

    def in_one_call(*args, **options):
        case = named(*args, **options)
        return replace(case, name=case.name + JOINED, make=lambda source: replace(case.make(source), joined=True))

    # A block and a token of one sequence, as decoding launches them.
    for tokens in (16, 1):
        for function, options in (
            (attention, {"heads": "target", "mask": "causal"}),
            (attention, {"heads": "draft", "mask": "open"}),
            (delta, {}),
            (replaying, {}),
            (replaying, {"layers": 30}),
            (mixtures, {}),
            (rotation, {"heads": "target"}),
            (rotation, {"heads": "draft"}),
            (writing, {}),
            (convolutions, {}),
        ):
            yield in_one_call(function, 1, tokens, BF16, **options)
        for weights in ("inputs of attention", "router", "gated", "residual", "head"):
            yield in_one_call(products, tokens, 1, BF16, weights=weights)
    for rows, tokens in sizes.all(BF16):
        yield named(attention, rows, tokens, BF16, heads="target", mask="causal")
    for rows, tokens in sizes.all(BF16):
        yield named(delta, rows, tokens, BF16)
    for rows, tokens in sizes.all(BF16):
        yield named(prefilling if tokens > 16 else replaying, rows, tokens, BF16)
    # Of 30 layers in two launches.
    for rows, tokens, dtype, layers in ((1, 16, BF16, 30), (1, 1, BF16, 30), (7, 5, BF16, 2), (1, 16, F32, 2)):
        yield named(replaying, rows, tokens, dtype, layers=layers)
    for rows, tokens in sizes.all(BF16):
        yield named(mixtures, rows, tokens, BF16)
    for rows, tokens in sizes.all(BF16):
        yield named(frames, rows, tokens, BF16)
    for rows in (1, 7, 16):
        for weights in ("inputs of attention", "router", "gated", "residual", "head"):
            yield named(products, rows, 1, BF16, weights=weights)
    for rows, tokens in sizes.few(BF16):
        yield named(parts, rows, tokens, BF16)
    for rows in (1, 7, 16):
        yield named(divided, rows, 1, BF16)
        yield named(divided, rows, 1, BF16, quantized="fp8")
        yield named(products, rows, 1, BF16, weights="residual", untried=True)
    for rows, tokens in sizes.all(F32):
        yield named(attention, rows, tokens, F32, heads="target", mask="causal")
    for rows, tokens in sizes.few(F32):
        yield named(delta, rows, tokens, F32)
        yield named(parts, rows, tokens, F32)
        yield named(replaying, rows, tokens, F32)
        yield named(frames, rows, tokens, F32)
        yield named(attention, rows, tokens, BF16, heads="draft", mask="open")
        yield named(attention, rows, tokens, F32, heads="draft", mask="by row")
    window, sinks = sizes.context // 8, sizes.context // 40
    for dtype in (BF16, F32):
        yield named(attention, 7, 5, dtype, heads="target", mask="causal", window=window, sinks=sinks)
        yield named(attention, 7, 5, dtype, heads="draft", mask="open", window=window)
        yield named(delta, 7, 16, dtype, alike=True)
        yield named(parts, 1, 16, dtype, alike=True)
        yield named(divided, 16, 1, dtype, quantized="int4")
        yield named(attention, 7, 5, dtype, heads="target", mask="causal", cached="fp8")
        yield named(attention, 1, 16, dtype, heads="draft", mask="open", cached="fp8")
        yield named(attention, 7, 17, dtype, heads="target", mask="causal", window=window, sinks=sinks, cached="fp8")
    yield named(delta, 1, 65, BF16, alike=True)
    for dtype in (BF16, F32):
        for rows, tokens in sizes.few(dtype):
            yield named(rotation, rows, tokens, dtype, heads="target")
            yield named(rotation, rows, tokens, dtype, heads="draft")
            yield named(writing, rows, tokens, dtype)
            yield named(convolutions, rows, tokens, dtype)
    yield named(writing, 7, 5, FP8)
    for rows, tokens in sizes.all(BF16):
        yield named(mixtures, rows, tokens, BF16, quantized="fp8")
    for rows, tokens in (*sizes.few(BF16), sizes.all(BF16)[-1]):
        yield named(mixtures, rows, tokens, BF16, quantized="fp8", one_scale=True, untried=True)
    for rows, tokens in dict.fromkeys((sizes.batches[4], sizes.batches[-2])):
        yield named(mixtures, rows, tokens, BF16, untried=True)
    for rows, tokens in sizes.all(BF16)[-2:]:
        yield named(prefilling, rows, tokens, BF16, untried=True)
    for rows, tokens in sizes.all(F32):
        yield named(mixtures, rows, tokens, F32)
    for rows in (1, 7, 16):
        for dtype in (BF16, F32):
            yield named(products, rows, 1, dtype, weights="inputs of attention", quantized="fp8")
            yield named(products, rows, 1, dtype, weights="gated", quantized="fp8")
        for weights in ("inputs of attention", "router", "gated", "residual", "head"):
            yield named(products, rows, 1, F32, weights=weights)
    for form in arguments.FOUR_BITS:
        for rows, tokens in sizes.all(BF16)[:4] if form == "nvfp4" else sizes.batches[1:3]:
            yield named(mixtures, rows, tokens, BF16, quantized=form)
        for rows in (1, 16):
            yield named(products, rows, 1, BF16, weights="inputs of attention", quantized=form)
            yield named(products, rows, 1, BF16, weights="gated", quantized=form)
    if tested_card().reads_shared:
        long = {"kernel": "triton, long contexts"}
        for rows, tokens in sizes.few(BF16):
            yield named(attention, rows, tokens, BF16, heads="target", mask="causal", **long)
        yield named(attention, 1, 16, BF16, heads="draft", mask="open", **long)
        yield named(attention, 7, 5, BF16, heads="draft", mask="open", window=window, **long)
        yield named(attention, 1, 16, BF16, heads="target", mask="causal", cached="fp8", **long)
    if fp4_backend() is not None:
        fp4 = {"quantized": "nvfp4", "activations": "fp4 activations"}
        for rows, tokens in sizes.all(BF16)[:4]:
            yield named(mixtures, rows, tokens, BF16, **fp4)
        for rows in (1, 16, 300):
            yield named(products, rows, 1, BF16, weights="gated", **fp4)
            yield named(products, rows, 1, BF16, weights="residual", **fp4)
    for rows, tokens in sizes.batches[:2]:
        yield named(attention, rows, tokens, F16, heads="target", mask="causal")
        yield named(mixtures, rows, tokens, F16)
        yield named(mixtures, rows, tokens, BF16, quantized="int8")
    for rows in (1, 7):
        for weights in ("inputs of attention", "gated"):
            yield named(products, rows, 1, F16, weights=weights)
            yield named(products, rows, 1, BF16, weights=weights, quantized="int8")
    yield named(mixtures, 1, 1, BF16, routed_only=True)
    yield named(mixtures, 1, 16, F32, quantized="fp8", routed_only=True)
