"""A comparison for each operation: its arguments, its definition, and a kernel or another implementation of it.

Kernels are Triton's, on a card or in its interpreter, but where a block is `testing` an implementation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.errors import InputError
from dflash_jax.models.config import RopeSpec
from dflash_jax.models.rope import rope_angles
from dflash_jax.ops import attention as attention_op
from dflash_jax.ops import block_convolution, cache_write, frame_attention, gated_delta, linear, moe
from dflash_jax.ops import rotation as rotation_op
from dflash_jax.ops.backend import Backend, Implementation, choose
from dflash_jax.ops.cache import FP8
from dflash_jax.ops.card import HOPPER, OLDEST_FP4, Card
from dflash_jax.ops.weights import TransposedWeight, common_outputs
from tools.kernels import arguments

BF16, F32, F16 = jnp.bfloat16, jnp.float32, jnp.float16


@dataclass(frozen=True)
class Sizes:
    """Sizes of models whose parts are checked, and of their arguments.

    Attributes:
        target: Query heads, key heads and size of a head of the target's attention.
        draft: The same of the drafter's attention.
        delta: Key heads, value heads on each, sizes of keys and values.
        experts: Number of experts, experts of a token, features, hidden size.
        vision: Heads of the vision tower, and their size.
        vocab: Outputs of the head.
        run: Inputs of a scale, where the form does not say it.
        context: Positions of a cache.
        batches: (rows, new tokens). The first are what decoding runs: a verified block, one token.
        wide: Number of batches, the first ones, that are checked in float32.
    """

    target: tuple[int, int, int]
    draft: tuple[int, int, int]
    delta: tuple[int, int, int, int]
    experts: tuple[int, int, int, int]
    vision: tuple[int, int]
    vocab: int
    run: int
    context: int
    batches: tuple[tuple[int, int], ...]
    wide: int

    def few(self, dtype) -> list[tuple[int, int]]:
        """Batches of up to 16 tokens a row, those of decoding."""
        return [batch for batch in self.all(dtype) if batch[1] <= 16]

    def all(self, dtype) -> tuple[tuple[int, int], ...]:
        """(rows, tokens) of the batches of a dtype."""
        return self.batches[: self.wide] if dtype == F32 else self.batches


# Qwen3.6-35B-A3B's.
REAL = Sizes(
    (16, 2, 256), (32, 8, 128), (16, 2, 128, 128), (256, 8, 512, 2048), (16, 72), 248320, 128, 8192,
    ((1, 16), (32, 1), (7, 5), (1, 1), (32, 16), (7, 17), (1, 65), (1, 300), (7, 130), (1, 1024), (1, 4096)), 11,
)  # fmt: skip
SMALL = Sizes(
    (4, 2, 32), (6, 2, 16), (1, 2, 16, 32), (20, 3, 32, 64), (2, 20), 150, 32, 100,
    ((1, 16), (7, 5), (1, 1), (32, 1), (7, 17), (1, 65)), 3,
)  # fmt: skip
# With heads that a TPU's kernels take.
SMALL_OF_A_TPU = replace(SMALL, target=(4, 2, 128), draft=(6, 2, 128), delta=(1, 2, 128, 128))


@dataclass(frozen=True)
class Comparison:
    """A kernel with its arguments and its definition.

    Attributes:
        dtype: Dtype of the computation.
        kernel: A function of ``args``.
        definition: A function of ``plain``.
        args: Arrays.
        plain: The same arrays where the definition may read elements that the kernel must not; None: ``args``.
        permuted: (``args``, an order of the rows) → arguments in this order; None: rows have no order.
        in_place: The result is a state, which does not depend on the order of rows.
        to_the_bit: The result is copied, not computed.
        joined: The kernel's launches are one call where they follow one another, as with ``--kernels all``.
        on_tpu: The implementation is one of a TPU: it is compiled, and the definition runs on the host's processor.
        by_row: Whether the bits of a row must not depend on the rows beside it.
        asks: It is only asked whether they do.
    """

    dtype: jnp.dtype
    kernel: Callable
    definition: Callable
    args: tuple
    permuted: Callable
    plain: tuple | None = None
    in_place: bool = False
    to_the_bit: bool = False
    joined: bool = False
    on_tpu: bool = False
    by_row: bool = True
    asks: bool = False


XLA = Backend.xla("cuda")


class NotSupportedError(InputError):
    """An implementation does not support arguments; the message says why."""


@dataclass(frozen=True)
class Tested:
    """What is compared in place of Triton's kernels.

    Attributes:
        backend: Where it runs.
        name: The implementation's name; None: what the operation chooses.
        lists: Gets the implementations among which comparisons take one.
    """

    backend: Backend
    name: str | None = None
    lists: list[tuple[Implementation, ...]] = field(default_factory=list, compare=False)


_tested: ContextVar[Tested | None] = ContextVar("tested", default=None)


@contextmanager
def testing(tested: Tested) -> Iterator[None]:
    """Makes comparisons of an implementation meanwhile."""
    token = _tested.set(tested)
    try:
        yield
    finally:
        _tested.reset(token)


def tested_card() -> Card:
    """This machine's card; Hopper where it has none, for the interpreter."""
    device = jax.devices()[0]
    return Card.of_device(device) if hasattr(device, "compute_capability") else HOPPER


def on_card(kernels: str = "auto") -> Backend:
    """The backend of the tested card, with kernels; where a block is `testing`, that of its implementation."""
    tested = _tested.get()
    return Backend.for_card(tested_card(), kernels) if tested is None else tested.backend


def fp4_backend() -> Backend | None:
    """As `on_card`, with activations in FP4; a B200's where there is no card; None where the card has no FP4."""
    card = tested_card() if hasattr(jax.devices()[0], "compute_capability") else Card.of_capability(100)
    has_fp4 = card.capability >= OLDEST_FP4
    return replace(Backend.for_card(card, "all"), fp4_activations=True) if has_fp4 else None


def kernel_of(
    implementations: tuple[Implementation, ...], name: str = "triton", backend: Backend | None = None
) -> Callable:
    """The implementation of this name, on the card, or on another backend; or the one that a block is `testing`."""
    tested = _tested.get()
    if tested is None:
        return partial(next(each.call for each in implementations if each.name == name), backend or on_card())

    tested.lists.append(implementations)

    def kernel(*args, **options):
        if tested.name is None:
            return choose("", implementations, tested.backend, *args, **options).call(tested.backend, *args, **options)
        found = next(each for each in implementations if each.name == tested.name)
        if (reason := found.supports(tested.backend, *args, **options)) is not None:
            raise NotSupportedError(reason)
        return found.call(tested.backend, *args, **options)

    return kernel


def attention(
    source, sizes: Sizes, rows, tokens, dtype, heads, mask, window=None, sinks=0, cached=None, kernel="triton"
) -> Comparison:
    """Attention over a cache and a block, with keys and values in ``dtype`` or, ``cached`` "fp8", in FP8."""
    n, kv_heads, dim = getattr(sizes, heads)
    capacity = sizes.context if tokens > 16 or rows == 1 else sizes.context // 4
    of_cache = FP8 if cached else dtype
    args = arguments.attention(source, rows, tokens, n, kv_heads, dim, capacity, window, sinks, dtype, of_cache)
    block_mask = {
        "causal": None,
        "open": jnp.ones((tokens, tokens), bool),
        "by row": jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool)), (rows, tokens, tokens)).at[0].set(True),
    }[mask]
    both = source.normal(rows, tokens, n, 2, dim, dtype=dtype) if mask == "causal" else None

    definition, kernel = partial(attention_op.reference, XLA), kernel_of(attention_op.IMPLEMENTATIONS, kernel)

    def permuted(args, order):
        q, k, v, block_mask, cache, length, bounds, both = args
        q, k, v, length, bounds, both = jax.tree.map(lambda x: x[order], (q, k, v, length, bounds, both))
        block_mask = block_mask[order] if block_mask is not None and block_mask.ndim == 3 else block_mask
        return q, k, v, block_mask, replace(cache, rows=cache.rows[order]), length, bounds, both

    q, k, v, cache, length, bounds = args
    return Comparison(dtype, kernel, definition, (q, k, v, block_mask, cache, length, bounds, both), permuted)


def frames(source, sizes: Sizes, rows, tokens, dtype) -> Comparison:
    """Attention within frames of ``tokens`` patches each, and a last frame of half as many."""
    lengths = [*[tokens] * rows, -(-tokens // 2)]
    ends = np.cumsum(lengths)
    low, high = (jnp.asarray(np.repeat(x, lengths), jnp.int32) for x in (ends - lengths, ends))
    heads, size = sizes.vision
    qkv = source.normal(int(ends[-1]), 3, heads, size, dtype=dtype)
    # Without rotation, so that queries in another order are the same queries.
    angles = jnp.ones((len(qkv), size // 2)), jnp.zeros((len(qkv), size // 2))
    definition, kernel = partial(frame_attention.reference, XLA), kernel_of(frame_attention.IMPLEMENTATIONS)

    def permuted(args, order):
        qkv, angles, low, high = args
        return qkv.at[:, 0].set(qkv[order, 0]), angles, low[order], high[order]

    return Comparison(dtype, kernel, definition, (qkv, angles, low, high), permuted)


def writing(source, sizes: Sizes, rows, tokens, dtype) -> Comparison:
    """Writing of keys and values."""
    _, heads, dim = sizes.target
    cache, k, v, positions = arguments.written(source, rows, tokens, heads, dim, 64, dtype)
    # Each row keeps another number of tokens.
    keep = jnp.arange(tokens) < jnp.asarray(np.arange(rows) % (tokens + 1))[:, None] + (rows == 1)

    def permuted(args, order):
        cache, *rest = args
        return replace(cache, rows=cache.rows[order]), *(x[order] for x in rest)

    args = cache, *(jnp.where(keep[:, :, None, None], x, jnp.nan) for x in (k, v)), positions, keep
    return Comparison(
        dtype, partial(cache_write.write, on_card()), partial(cache_write.write, XLA), args, permuted,
        in_place=True, to_the_bit=True,
    )  # fmt: skip


def rotation(source, sizes: Sizes, rows, tokens, dtype, heads) -> Comparison:
    """Rotation of queries and keys."""
    n, kv_heads, dim = getattr(sizes, heads)
    rope = RopeSpec(theta=1e7, dim=dim // 4 if heads == "target" else dim)
    q = source.normal(rows, tokens, n, 2 if heads == "target" else 1, dim, dtype=dtype)
    k = source.normal(rows, tokens, kv_heads, dim, dtype=dtype)
    positions = jnp.asarray(np.resize([3, 700, 8000], rows))[:, None] + jnp.arange(tokens)
    norms = [source.normal(dim, dtype=dtype) for _ in "qk"]

    options = {"eps": 1e-6, "offset": 1.0}
    definition = partial(rotation_op.reference, XLA, **options)
    kernel = partial(kernel_of(rotation_op.IMPLEMENTATIONS), **options)

    def permuted(args, order):
        return *jax.tree.map(lambda x: x[order], args[:3]), args[3]

    return Comparison(dtype, kernel, definition, (q, k, rope_angles(positions, rope), norms), permuted)


def delta(source, sizes: Sizes, rows, tokens, dtype, alike=False) -> Comparison:
    """The delta rule: few tokens by one kernel, many by the kernels of chunks."""
    args = arguments.mixer(source, rows, tokens, *sizes.delta, dtype, alike=alike)
    definition = partial(gated_delta.reference, XLA, eps=1e-6)
    name = "triton, chunks" if tokens > 16 else "triton, one chunk"
    kernel = partial(kernel_of(gated_delta.IMPLEMENTATIONS, name), eps=1e-6)

    def permuted(args, order):
        qkvz, gates, state, *weights = args
        return qkvz[order], gates[order], replace(state, rows=state.rows[order]), *weights

    args[2] = arguments.poisoned(args[2])
    return Comparison(dtype, kernel, definition, tuple(args), permuted)


def parts(source, sizes: Sizes, rows, tokens, dtype, alike=False) -> Comparison:
    """The delta rule of few tokens, of few heads in parts, with the division that these leave to `linear`."""
    kernel = kernel_of(gated_delta.IMPLEMENTATIONS, "triton, parts of heads")

    def divided(*args):
        y, record = kernel(*args, eps=1e-6)
        return y.apply() if isinstance(y, linear.DeferredDivision) else y, record

    return replace(delta(source, sizes, rows, tokens, dtype, alike), kernel=divided)


def prefilling(source, sizes: Sizes, rows, tokens, dtype, untried=False) -> Comparison:
    """The delta rule over many tokens of which some count, and the state after these; ``untried``: with all kernels."""
    args = arguments.mixer(source, rows, tokens, *sizes.delta, dtype)
    n = jnp.asarray(np.resize([tokens, 2 * tokens // 3, 1, 0], rows), jnp.int32)

    def counted(y, after, n):
        # A row past the end reads a state that another may have written.
        is_counted = (jnp.arange(tokens) < n[:, None]) & (after.rows < len(after.recurrent))[:, None]
        return jnp.where(is_counted[..., None, None, None], y, 0), after.copied()

    advance = kernel_of(gated_delta.ADVANCES, "triton, chunks", on_card("all" if untried else "auto"))

    def kernel(inputs, gates, state, weights, n):
        y, after = advance(inputs, gates, state, weights, 1e-6, n)
        return counted(y, after, n)

    def definition(inputs, gates, state, weights, n):
        y, record = gated_delta.reference(XLA, inputs, gates, state, weights, 1e-6)
        return counted(y, gated_delta.replay_reference(XLA, state, record, n), n)

    def permuted(args, order):
        qkvz, gates, state, *weights, n = args
        return qkvz[order], gates[order], replace(state, rows=state.rows[order]), *weights, n[order]

    args[2] = arguments.poisoned(args[2])
    left = (jnp.arange(tokens) >= n[:, None])[..., None, None]
    spoilt = jnp.where(left, jnp.nan, args[0]).astype(dtype)
    return Comparison(dtype, kernel, definition, (spoilt, *args[1:], n), permuted, plain=(*args, n))


def replaying(source, sizes: Sizes, rows, tokens, dtype, layers=0) -> Comparison:
    """Replay of a record; of so many ``layers`` together, whose states differ, where there are any."""
    args = arguments.mixer(source, rows, tokens, *sizes.delta, dtype)
    _, record = jax.jit(partial(gated_delta.reference, XLA, eps=1e-6))(*args)
    count = np.arange(tokens, tokens + rows) % (tokens + 1)
    state, record = arguments.poisoned(args[2]), arguments.spoilt(record, count)

    def of_layers(replay_layers, state, record, n):
        scales = [1 + i / 8 for i in range(layers)]
        states = [
            replace(state, recurrent=state.recurrent * scale, conv_inputs=state.conv_inputs * scale) for scale in scales
        ]
        after = replay_layers(states, [record] * layers, n)
        recurrent, conv = (jnp.stack(x) for x in zip(*((s.recurrent, s.conv_inputs) for s in after), strict=True))
        return replace(state, recurrent=recurrent, conv_inputs=conv)

    definition, kernel = partial(gated_delta.replay_reference, XLA), kernel_of(gated_delta.REPLAYS)
    if layers:
        definition = partial(of_layers, partial(gated_delta.replay_layers_reference, XLA))
        kernel = partial(of_layers, kernel_of(gated_delta.LAYERS_REPLAYS))

    def permuted(args, order):
        state, record, n = args
        return replace(state, rows=state.rows[order]), jax.tree.map(lambda x: x[order], record), n[order]

    args = state, record, jnp.asarray(count, jnp.int32)
    return Comparison(dtype, kernel, definition, args, permuted, in_place=True)


def products(
    source, sizes: Sizes, rows, tokens, dtype, weights, quantized=None, activations=None, untried=False
) -> Comparison:
    """Products of one input with several weights: after a norm, through a gate, or with a residual.

    ``activations``: "fp4 activations", or None. ``untried``: with all kernels.
    """
    hidden = sizes.experts[3]
    heads, kv_heads, dim = sizes.target
    outputs = {
        "inputs of attention": [(heads, 2, dim), (kv_heads, dim), (kv_heads, dim)],
        "router": [(sizes.experts[0],), ()],
        "gated": [(2, 3 * hidden)],
        "residual": [(hidden,)],
        "head": [(sizes.vocab,)],
    }[weights]
    scales = (quantized, hidden // sizes.run) if quantized else None
    x, norm, matrices = arguments.projections(source, rows, hidden, outputs, scales, dtype)
    rest = source.normal(rows, 1, hidden, dtype=dtype) if weights == "residual" else None
    is_gated, is_router = weights == "gated", weights == "router"
    is_wide = weights in ("router", "head")

    def maps(backend, x, norm, matrices, rest):
        # jnp.float32 is looked up here: the reference is float64.
        dtype = jnp.float32 if is_wide else None
        x = linear.DeferredNorm(x, norm, 1e-6, 1.0) if is_router or is_gated else x
        return linear.linear(
            backend, x, tuple(matrices), dtype=dtype, return_normed=is_router, swiglu=is_gated, residual=rest
        )

    def permuted(args, order):
        x, norm, matrices, rest = args
        return x[order], norm, matrices, None if rest is None else rest[order]

    # The head's logits are sums in float32 of exact products.
    plain = XLA if activations is None else replace(XLA, fp4_activations=True)
    kernel = partial(maps, on_card("all" if untried else "auto") if activations is None else fp4_backend())
    definition = partial(maps, plain)
    return Comparison(F32 if weights == "head" else dtype, kernel, definition, (x, norm, matrices, rest), permuted)


def divided(source, sizes: Sizes, rows, tokens, dtype, quantized=None) -> Comparison:
    """An output projection that divides the heads of its input, with all kernels."""
    g, r, _, size = sizes.delta
    x, weight, squares = arguments.divided(source, rows, max(g * r, 4), size, sizes.experts[3], dtype)
    if quantized:
        weight = jax.tree.map(jnp.asarray, arguments.in_few_bits(source, weight, quantized, 1))
    rest = source.normal(rows, 1, sizes.experts[3], dtype=dtype)

    def maps(backend, x, weight, squares, rest):
        return linear.linear(backend, linear.DeferredDivision(x, squares, 1e-6), (weight,), 2, residual=rest)

    def permuted(args, order):
        x, weight, squares, rest = args
        return x[order], weight, squares[order], rest[order]

    kernel, definition = partial(maps, on_card("all")), partial(maps, XLA)
    return Comparison(dtype, kernel, definition, (x, weight, squares, rest), permuted)


def convolutions(source, sizes: Sizes, rows, tokens, dtype) -> Comparison:
    """Norm, coefficients and convolution of a DFlash2 drafter's blocks."""
    args = arguments.block_convolution(source, rows, tokens, sizes.experts[3], 2, 16, dtype)
    definition = partial(block_convolution.reference, XLA)

    def permuted(args, order):
        x, *weights = args
        return replace(x, x=x.x[order]), *weights

    return Comparison(dtype, kernel_of(block_convolution.IMPLEMENTATIONS), definition, args, permuted)


def _in_blocks(weight):
    """Experts' weights, with the scales that outputs share in a checkpoint's blocks, and the outputs of a block."""
    if not (width := common_outputs(weight, weight.shape[-2])):
        return weight, width
    scale = weight.scale.reshape(-1, width, weight.scale.shape[-1])
    return replace(weight, scale=jnp.broadcast_to(scale[:, :1], scale.shape).reshape(weight.scale.shape)), width


def mixtures(
    source, sizes: Sizes, rows, tokens, dtype, quantized=None, routed_only=False, activations=None, one_scale=False,
    untried=False,
) -> Comparison:  # fmt: skip
    """Mixtures of experts; ``activations`` as in `products`.

    ``one_scale``: each output has one. ``untried``: as with all kernels.
    """
    count, top, features, hidden = sizes.experts
    n = rows * tokens
    scales = (quantized, 1 if one_scale else features // sizes.run) if quantized else None
    idle = n // 5
    *args, options = arguments.experts(
        source, n, top, count, features, hidden, idle, scales, None if routed_only else features, rows != 7, dtype
    )
    plain: tuple[Any, ...] = tuple(args)
    _, logits, live, first, gate_up, down, *_ = plain
    chosen = np.asarray(moe.route(logits, **options)[1])[np.asarray(live)] - int(first)
    unused = np.setdiff1d(np.arange(gate_up.shape[0]), chosen)

    def spoil(weight):
        if quantized:
            # A kernel reads scales of 8 bits without NaN.
            name = "scale" if weight.factor is None else "factor"
            return replace(weight, **{name: getattr(weight, name).at[unused].set(jnp.nan)})
        return weight.at[unused].set(jnp.nan)

    tested = _tested.get()
    if tested is None:
        args[4:6] = spoil(gate_up), spoil(down)
    elif moe.transposes_experts(tested.backend) and tested.name in (None, "ragged") and all(
        moe.can_transpose(tested.backend, weight) for weight in (gate_up, down)
    ):  # fmt: skip
        # As weights are placed there. XLA's products may read experts that no token has chosen.
        pairs = [_in_blocks(weight) for weight in (gate_up, down)]
        plain = (*plain[:4], *(weight for weight, _ in pairs), *plain[6:])
        args[4:6] = (TransposedWeight.of(weight, width) for weight, width in pairs)

    def permuted(args, order):
        x, logits, live, first, gate_up, down, shared, rest = args
        shared = shared and (*shared[:2], shared[2][order])
        return x[order], logits[order], live[order], first, gate_up, down, shared, None if rest is None else rest[order]

    if activations is None:
        kernel, backend = kernel_of(moe.IMPLEMENTATIONS, backend=on_card("all" if untried else "auto")), XLA
    else:
        kernel = kernel_of(moe.IMPLEMENTATIONS, "triton, FP4", fp4_backend())
        backend = replace(XLA, fp4_activations=True)
    grouped = next(each.call for each in moe.IMPLEMENTATIONS if each.name == "grouped")
    kernel, definition = partial(kernel, **options), partial(grouped, backend, **options)
    return Comparison(dtype, kernel, definition, tuple(args), permuted, plain)
