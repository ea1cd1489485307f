"""Operation: a mixture of experts (arXiv 2101.03961, with several experts a token).

    y = Σ_k w_k · SwiGLU_{e_k}(x) + σ(gate) · SwiGLU_shared(x) + residual

with the experts e_k of the largest router probabilities w_k (softmax in float32), which are normalised to a sum of 1 if
the model's config says so. The reference implementation is transformers' Qwen3MoeSparseMoeBlock and
Qwen3NextSparseMoeBlock. Letters: N tokens, H hidden, E experts, F features of an expert, K experts per token.
"""

# jax's own annotations are partial: members such as jnp.where, and the results of loops, have unknown types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dflash_jax.ops.backend import Backend, Implementation, choose, supports_everything, with_gradient_of
from dflash_jax.ops.kernels.cpu import calls as cpp
from dflash_jax.ops.linear import TPU_ROWS, linear, project, rounded, takes_fp4
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, TransposedWeight, Weight, dense

# Experts' weights that XLA computes with, and a shared expert: gate_up, down and the logits of its gate.
ExpertWeight: TypeAlias = Array | QuantizedWeight
SharedExpert: TypeAlias = tuple[Weight, Weight, Array]
ExpertAxes: TypeAlias = tuple[Sequence[str], Sequence[str]]
# Rows of each expert's product: this many times the mean, and at least `MIN_GROUP_ROWS`: products of fewer rows take
# as long.
GROUP_ROWS, MIN_GROUP_ROWS = 4, 32
# On a TPU in the reproducible mode more tokens than these are computed by the loop over experts.
TPU_GATHERED_TOKENS = 16
# Rows of a block of `experts_in_blocks`: fewer take as long, and more are bound by their operations.
BLOCK_ROWS = (32, 256)
# Numbers of gathered rows that a TPU's compiler keeps in VMEM: 16 MiB in bfloat16.
ELEMENTS_OF_PASS = 2**23
# An iteration of the loop takes as many experts as make a product of about this many outputs: products of single tiny
# experts are slow.
GROUP_WIDTH = 512


def route(
    logits: Float[Array, "*batch E"], experts_per_token: int, normalise: bool
) -> tuple[Float[Array, "*batch K"], Int[Array, "*batch K"]]:
    """The experts of each token: the largest probabilities of a softmax over the router's logits.

    Args:
        logits: [..., E].
        experts_per_token: K.
        normalise: Whether the weights of a token sum to 1.

    Returns:
        Weights, float32, and ids of the chosen experts, both [..., K].
    """
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), experts_per_token)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, chosen


# Σ_k weights[n, k] · SwiGLU of expert chosen[n, k] on x[n]: x [N, H] → [N, H], in five forms.


def experts_gathered(
    backend: Backend,
    x: Float[Array, "N H"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    gate_up: ExpertWeight,
    down: ExpertWeight,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """Few tokens: the weights of each choice, read once and in place.

    Product and sum are in float32, so that XLA fuses gather, product and reduction and copies no weight (on GPU).
    """
    # A choice of weight 0 takes the expert of the first other choice, so that no further expert is read.
    flat = chosen.reshape(-1)
    chosen = jnp.where(weights != 0, chosen, flat[jnp.argmax(weights.reshape(-1) != 0)])
    pick = dense(gate_up[chosen], jnp.float32)
    h = jnp.sum(pick * rounded(backend, x, gate_up).astype(jnp.float32)[:, None, None, None, :], axis=-1)
    h = rounded(backend, jax.nn.silu(h[:, :, 0]) * h[:, :, 1], down, axes=axes)
    # Over features first, for each choice: one sum over both axes has too few rows to keep a GPU busy.
    y = jnp.sum(dense(down[chosen], jnp.float32) * h[:, :, None, :], axis=-1)
    return jnp.sum(y * weights[..., None], axis=1).astype(x.dtype)


def experts_grouped(
    backend: Backend,
    x: Float[Array, "N H"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    gate_up: ExpertWeight,
    down: ExpertWeight,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """Many tokens: batched products over all experts, each with the tokens that chose it, some rows at a time.

    Passes repeat until the expert with the most tokens is done, so that no token is dropped; as a rule there is one
    pass. A choice of weight 0 goes to no expert.
    """
    tokens, hidden = x.shape
    (e, _, f, _), k = gate_up.shape, chosen.shape[1]
    rows = max(MIN_GROUP_ROWS, GROUP_ROWS << max(tokens * k // e - 1, 0).bit_length())
    rows = min(rows, tokens)
    expert = jnp.where(weights != 0, chosen, e).reshape(-1)
    x = rounded(backend, x, gate_up)
    # The rank of each choice among its expert's choices. Comparing all pairs is one kernel; a sort is several.
    choice = jnp.arange(tokens * k)
    earlier = (expert[:, None] == expert) & (choice < choice[:, None])
    rank = jnp.where(expert < e, earlier.sum(1), -1)

    def visit(carry: tuple[Any, Array]) -> tuple[Any, Array]:
        first, total = carry
        block_row = jnp.where((rank >= first) & (rank < first + rows), expert * rows + rank - first, e * rows)
        token = jnp.full(e * rows, tokens).at[block_row].set(choice // k, mode="drop")
        inputs = x.at[token].get(mode="fill", fill_value=0).reshape(e, rows, hidden)
        # One axis of outputs: XLA transposes a weight that has two.
        h = jnp.einsum("ech,eih->eci", inputs, dense(gate_up.reshape(e, -1, hidden), x.dtype))
        h = rounded(backend, jax.nn.silu(h[..., :f]) * h[..., f:], down, axes=axes)
        y = jnp.einsum("ecf,ehf->ech", h, dense(down, x.dtype)).reshape(e * rows, hidden)
        y = y.at[block_row].get(mode="fill", fill_value=0).astype(jnp.float32).reshape(tokens, k, hidden)
        return first + rows, total + jnp.sum(y * weights[..., None], axis=1)

    start = (0, jnp.zeros((tokens, hidden), jnp.float32))
    if rows == tokens:
        return visit(start)[1].astype(x.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] <= rank.max(), visit, start)[1].astype(x.dtype)


def _by_expert(weights: Array, chosen: Array, experts: int) -> tuple[Array, Array, Array]:
    """Choices [N, K] in the order of their experts, those of weight 0 last.

    Returns:
        The choices, int [N K]; the place of each in this order, int [N, K]; and how many each expert has, int
        [experts].
    """
    expert, choice = jnp.where(weights != 0, chosen, experts).reshape(-1), jnp.arange(chosen.size)
    counts = jnp.sum(expert == jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    # One unstable sort of distinct numbers: a TPU's compiler takes several times as long for a stable one of pairs.
    order = jax.lax.sort(expert * chosen.size + choice, is_stable=False) % chosen.size
    places = jnp.zeros_like(choice).at[order].set(choice, unique_indices=True)
    return order, places.reshape(chosen.shape), counts


def _weighted_sum(y: Array, places: Array, weights: Array) -> Array:
    """The weighted sum of each token's rows: y [N K or more, H] in the order of `_by_expert` → [N, H]."""
    tokens, k = weights.shape

    def weighted(places: Array, weights: Array) -> Array:
        # A row that no expert has written may be NaN.
        return jnp.where(weights[..., None] != 0, y[places].astype(jnp.float32) * weights[..., None], 0.0)

    # Some tokens at a time, whose rows stay out of a TPU's memory.
    size = max(1, _rows_of_pass(y.shape[1]) // k)
    if tokens <= size:
        return jnp.sum(weighted(places, weights), axis=1).astype(y.dtype)

    def summed(part: tuple[Array, Array]) -> Array:
        # One choice after the other: a TPU would move the rows of a token to stand beside one another. Last bits may be
        # others than those of few tokens.
        rows = (weighted(*choice) for choice in zip(part[0].T, part[1].T, strict=True))
        return sum(rows, jnp.zeros((), jnp.float32)).astype(y.dtype)

    places, weights = (jnp.pad(x, ((0, -tokens % size), (0, 0))).reshape(-1, size, k) for x in (places, weights))
    return jax.lax.map(summed, (places, weights)).reshape(-1, y.shape[1])[:tokens]


def _rows_of_pass(numbers: int) -> int:
    """How many rows of so many numbers a TPU keeps out of its memory, a multiple of what it multiplies at once."""
    return max(ELEMENTS_OF_PASS // numbers // 128 * 128, 128)


def _of_experts(x: Float[Array, "R I"], weight: TransposedWeight, counts: Int[Array, " E"]) -> Float[Array, "R O"]:
    """Rows in the order of their experts times their experts' matrices; the first ``counts[0]`` are the first one's.

    Scales of inputs are for the rows: once for each part of an expert's outputs, whose matrix is one by itself.
    """
    matrices, scale = weight.matrices, weight.scale
    if scale is None:
        return jax.lax.ragged_dot(x, matrices, counts)
    row, starts = jnp.arange(x.shape[0]), jnp.cumsum(counts) - counts
    expert = _group(row, counts)
    if not weight.has_parts:
        y = jax.lax.ragged_dot(x, matrices, counts, preferred_element_type=jnp.float32)
        return (y * scale.reshape(len(counts), -1)[expert].astype(jnp.float32)).astype(x.dtype)
    experts, parts, runs = scale.shape
    of_parts, copy = jnp.repeat(counts, parts, total_repeat_length=experts * parts), jnp.arange(parts * x.shape[0])
    part = _group(copy, of_parts)
    source = copy - (jnp.cumsum(of_parts) - of_parts)[part] + starts[part // parts]
    scale = scale.reshape(-1, runs)[part].astype(jnp.float32)
    # A product with ones repeats the scales: a TPU writes a broadcast into rows to memory.
    ones = jnp.repeat(jnp.eye(runs), x.shape[1] // runs, axis=1)
    scaled = (x[source] * jnp.matmul(scale, ones, precision=jax.lax.Precision.HIGHEST)).astype(x.dtype)
    y = jax.lax.ragged_dot(scaled, matrices.reshape(-1, *matrices.shape[2:]), of_parts)
    places = (row + (parts - 1) * starts[expert])[:, None] + jnp.arange(parts) * counts[expert][:, None]
    return y[places].reshape(x.shape[0], -1)


def _group(row: Int[Array, " R"], counts: Int[Array, " G"]) -> Int[Array, " R"]:
    """The group of each row, of groups of ``counts`` rows; that of a row after all of them is the last one."""
    return jnp.sum(jnp.cumsum(counts)[:-1] <= row[:, None], axis=1)


def experts_ragged(
    backend: Backend,
    x: Float[Array, "N H"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    gate_up: Array | TransposedWeight,
    down: Array | TransposedWeight,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """`jax.lax.ragged_dot` of the rows in the order of their experts: a TPU reads each chosen expert once.

    Some rows at a time, which stay out of the TPU's memory. Arrays that are not transposed are so in the call, by a
    copy.
    """
    gate_up, down = (w if isinstance(w, TransposedWeight) else TransposedWeight.of(w) for w in (gate_up, down))
    experts, _, f, _ = gate_up.shape
    k, choices = chosen.shape[1], chosen.size
    order, places, counts = _by_expert(weights, chosen, experts)

    def outputs(order: Array, counts: Array) -> Array:
        h = _of_experts(x[order // k], gate_up, counts)
        return _of_experts(jax.nn.silu(h[:, :f]) * h[:, f:], down, counts)

    rows = _rows_of_pass(x.shape[1] * gate_up.parts)
    if choices <= rows:
        # Of another number of rows XLA multiplies all experts, and masks them.
        return _weighted_sum(outputs(jnp.pad(order, (0, -choices % TPU_ROWS)), counts), places, weights)
    order, ends = jnp.pad(order, (0, rows)), jnp.cumsum(counts)

    def visit(i: Array, y: Array) -> Array:
        first = i * rows
        parts = jnp.diff(jnp.clip(ends, first, first + rows), prepend=first)
        new = outputs(jax.lax.dynamic_slice_in_dim(order, first, rows), parts)
        return jax.lax.dynamic_update_slice_in_dim(y, new, first, 0)

    y = jax.lax.fori_loop(0, -(-ends[-1] // rows), visit, jax.lax.empty((choices + rows, x.shape[1]), x.dtype))
    return _weighted_sum(y, places, weights)


def experts_in_blocks(
    backend: Backend,
    x: Float[Array, "N H"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    gate_up: ExpertWeight,
    down: ExpertWeight,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """A loop over blocks of rows of one expert each, whose weights are converted where the product reads them.

    A block may reach past its expert's rows: the next one, of a later expert, writes these rows again.
    """
    experts, _, f, hidden = gate_up.shape
    k, choices = chosen.shape[1], chosen.size
    least, most = BLOCK_ROWS
    rows = min(most, max(least, 1 << (2 * choices // experts).bit_length()))
    order, places, counts = _by_expert(weights, chosen, experts)
    blocks = -(-counts // rows)
    last = jnp.cumsum(blocks)
    block = jnp.arange(experts + choices // rows)
    # Of each block its expert and its first row: one array, since each read of a scalar takes a TPU long.
    expert = jnp.minimum(jnp.sum(last <= block[:, None], axis=1), experts - 1)
    first = (jnp.cumsum(counts) - counts)[expert] + (block - (last - blocks)[expert]) * rows
    of_block = jnp.stack([expert, first], axis=1)
    x, order = rounded(backend, x, gate_up), jnp.pad(order, (0, rows))

    def visit(i: Array, y: Array) -> Array:
        expert, first = of_block[i]
        one, other = (w[expert] for w in (gate_up, down))
        inputs = x[jax.lax.dynamic_slice_in_dim(order, first, rows) // k]
        h = project(backend, inputs, one.reshape(-1, hidden))
        h = rounded(backend, jax.nn.silu(h[:, :f]) * h[:, f:], down, axes=axes)
        return jax.lax.dynamic_update_slice_in_dim(y, project(backend, h, other), first, 0)

    y = jax.lax.fori_loop(0, last[-1], visit, jax.lax.empty((choices + rows, hidden), x.dtype))
    return _weighted_sum(y, places, weights)


def experts_looped(
    backend: Backend,
    x: Float[Array, "N H"],
    weights: Float[Array, "N K"],
    chosen: Int[Array, "N K"],
    gate_up: ExpertWeight,
    down: ExpertWeight,
    axes: Sequence[str] = (),
) -> Float[Array, "N H"]:
    """One dense product for each group of experts that any token chose; results of other tokens are masked."""
    e, _, f, hidden = gate_up.shape
    size = next(g for g in range(e, 0, -1) if e % g == 0 and (g * f <= GROUP_WIDTH or g == 1))
    ids = jnp.arange(e).reshape(-1, size)
    x = rounded(backend, x, gate_up)

    def add(total: Array, group: tuple[ExpertWeight, ExpertWeight, Array]) -> tuple[Array, None]:
        gate_up, down, ids = group
        is_chosen = (chosen[:, :, None] == ids) & (weights[:, :, None] != 0)
        weight = jnp.where(is_chosen, weights[:, :, None], 0.0).sum(1)

        def visit(total: Array) -> Array:
            h = project(backend, x, gate_up.reshape(size, 2, f, hidden))
            h = rounded(backend, jax.nn.silu(h[:, :, 0]) * h[:, :, 1], down, axes=axes)
            h = h.astype(jnp.float32) * weight[..., None]
            h = jnp.where(is_chosen.any(1)[..., None], h, 0.0).astype(x.dtype)
            matrix = dense(down, x.dtype)
            # One product over expert and feature is faster where it outweighs its transposed copy of the weights.
            if x.shape[0] > GROUP_WIDTH:
                return total + jnp.einsum("tef,ehf->th", h, matrix, preferred_element_type=jnp.float32)
            return total + jnp.einsum("tef,ehf->eth", h, matrix, preferred_element_type=jnp.float32).sum(0)

        def skip(total: Array) -> Array:
            return total

        return jax.lax.cond(is_chosen.any(), visit, skip, total), None

    total = jnp.zeros(x.shape, jnp.float32)
    if size == e:
        return add(total, (gate_up, down, ids[0]))[0].astype(x.dtype)
    groups = (gate_up.reshape(-1, size, 2, f, hidden), down.reshape(-1, size, hidden, f), ids)
    return jax.lax.scan(add, total, groups)[0].astype(x.dtype)


def shared_weight(gate: Float[Array, " N"], dtype: DTypeLike) -> Float[Array, "N 1"]:
    """The weight of the shared expert: the sigmoid of its gate's float32 logits."""
    return jax.nn.sigmoid(gate)[:, None].astype(dtype)


def _with_shared(backend: Backend, y: Array, x: Array, shared: SharedExpert | None, axes: Sequence[str] = ()) -> Array:
    """Adds the gated output of the shared expert to y [N, H]; ``axes``: those that its features are divided over."""
    if shared is None:
        return y
    gate_up, down, gate = shared
    h = linear(backend, x, (gate_up,), swiglu=True)[0]
    return y + shared_weight(gate, x.dtype) * linear(backend, h, (down,), axes=axes)[0]


def _by_xla(
    experts: Callable[..., Array],
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: ExpertWeight | TransposedWeight,
    down: ExpertWeight | TransposedWeight,
    shared: SharedExpert | None,
    residual: Array | None,
    *,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> Array:
    """Routing, then ``experts``, one of the five forms."""
    weights, chosen = route(logits, experts_per_token, normalise)
    local = chosen - first
    is_here = (local >= 0) & (local < gate_up.shape[0])
    # Idle tokens and experts of other devices get weight 0; the id is then that of a local expert.
    weights, local = jnp.where(is_here & live[:, None], weights, 0.0), jnp.where(is_here, local, 0)
    y = experts(backend, x, weights, local, gate_up, down, axes[0])
    y = _with_shared(backend, y, x, shared, axes[1])
    return y if residual is None else residual + y


reference = partial(_by_xla, experts_looped)


def transposes_experts(backend: Backend) -> bool:
    """Whether experts' weights are to be placed as `TransposedWeight`, where `can_transpose` says so."""
    return backend.platform == "tpu" and not backend.reproducible


def can_transpose(backend: Backend, weight: Weight) -> bool:
    """Whether a `TransposedWeight` can have a weight's numbers, and the backend multiplies with them as they are."""
    if not isinstance(weight, QuantizedWeight):
        return True
    is_plain = weight.code is None and weight.zero is None and weight.factor is None
    return is_plain and weight.values.dtype.name == backend.eight_bits


def _supports_ragged(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: Weight | TransposedWeight,
    down: Weight | TransposedWeight,
    *args: Any,
    **options: Any,
) -> str | None:
    if isinstance(gate_up, TransposedWeight):
        return None
    if reason := _not_by_row(backend):
        return reason
    return "a weight is in few bits" if any(isinstance(w, QuantizedWeight) for w in (gate_up, down)) else None


def _supports_blocks(backend: Backend, *args: Any, **options: Any) -> str | None:
    return _not_by_row(backend)


def _not_by_row(backend: Backend) -> str | None:
    """Why products of rows in the order of their experts are not used; None where they are."""
    if backend.platform != "tpu":
        return f"the platform is {backend.platform}, where it is slow"
    return "no TPU has shown that a token does not depend on others: reproducible" if backend.reproducible else None


def _supports_gathered(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: Weight,
    *args: Any,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> str | None:
    if backend.platform == "cpu":
        return "the platform is cpu: its matrix library does not take gathered weights"
    if backend.platform == "tpu":
        return f"more than {TPU_GATHERED_TOKENS} tokens on a TPU" if x.shape[0] > TPU_GATHERED_TOKENS else None
    choices = x.shape[0] * experts_per_token
    return f"{choices} choices of {gate_up.shape[0]} experts" if choices >= gate_up.shape[0] else None


def _supports_grouped(backend: Backend, *args: Any, **options: Any) -> str | None:
    return None if backend.is_gpu else f"the platform is {backend.platform}, where its scatter is slow"


def _supports_cpp(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: Weight,
    *args: Any,
    **options: Any,
) -> str | None:
    # Packed weights exist only where the kernels do, so that no_cpp is not consulted for them.
    return None if isinstance(gate_up, PackedWeight) else backend.no_cpp or "the experts' weights are not packed"


def _cpp(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: PackedWeight,
    down: PackedWeight,
    shared: SharedExpert | None,
    residual: Array | None,
    *,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> Array:
    # Weights are packed on one device only, which has all experts: ``first`` is 0.
    y = cpp.mixture(x, logits, live, gate_up, down, experts_per_token, normalise)
    y = _with_shared(backend, y, x, shared)
    return y if residual is None else residual + y


def _supports_triton(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *args: Any,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if takes_fp4(backend, gate_up) or takes_fp4(backend, down):
        return "the kernel rounds no activations"
    from dflash_jax.ops.kernels.triton import experts as triton_experts

    return triton_experts.why_not(x.shape[0] * experts_per_token, gate_up, down)


def _supports_triton_fp4(
    backend: Backend,
    x: Array,
    logits: Array,
    live: Array,
    first: Array | int,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *args: Any,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> str | None:
    if not backend.has_triton:
        return backend.no_triton
    if not (takes_fp4(backend, gate_up) and takes_fp4(backend, down)):
        return "activations are not in FP4"
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import fp4

    reasons = (fp4.why_not(backend.triton_card, w.shape[-1], [w], one_factor=True) for w in (gate_up, down))
    return next(filter(None, reasons), triton_experts.why_not(x.shape[0] * experts_per_token, gate_up, down))


def _triton(
    backend: Backend, *args: Any, experts_per_token: int, normalise: bool, axes: ExpertAxes = ((), ())
) -> Array:
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import fp4
    from dflash_jax.ops.kernels.triton import routing as triton_routing

    def kernel(
        x: Array,
        logits: Array,
        live: Array,
        first: Array | int,
        gate_up: Any,
        down: Any,
        shared: tuple[Any, Any, Array] | None,
        residual: Array | None,
    ) -> Array:
        card, local = backend.triton_card, gate_up.shape[0]
        weights, chosen = triton_routing.route_triton(card, logits, live, first, local, experts_per_token, normalise)
        is_fp4 = takes_fp4(backend, gate_up)
        fused = shared is None or all(
            triton_experts.are_alike(w, other, card) for w, other in zip((gate_up, down), shared[:2], strict=True)
        )
        # All rows of the kernel are rounded over the same axes.
        fused = fused and (shared is None or not is_fp4 or tuple(axes[0]) == tuple(axes[1]))
        rest = shared if fused else None, residual
        if is_fp4:
            y = fp4.experts(card, x, weights, chosen, gate_up, down, *rest, axes=axes[0])
        else:
            y = triton_experts.experts_triton(
                card, x, weights, chosen, gate_up, down, *rest, untried=backend.kernels == "all"
            )
        return y if fused else _with_shared(backend, y, x, shared, axes[1])

    # The gradient is that of XLA's form for GPUs.
    plain = partial(
        _by_xla, experts_grouped, backend, experts_per_token=experts_per_token, normalise=normalise, axes=axes
    )
    return with_gradient_of(plain, kernel)(*args)


IMPLEMENTATIONS = (
    Implementation("cpp", _supports_cpp, _cpp),
    Implementation("triton, FP4", _supports_triton_fp4, _triton, is_tried=False),
    Implementation("triton", _supports_triton, _triton),
    Implementation("ragged", _supports_ragged, partial(_by_xla, experts_ragged)),
    Implementation("blocks", _supports_blocks, partial(_by_xla, experts_in_blocks)),
    Implementation("gathered", _supports_gathered, partial(_by_xla, experts_gathered)),
    Implementation("grouped", _supports_grouped, partial(_by_xla, experts_grouped)),
    Implementation("reference", supports_everything, reference),
)


def fuses_residual(backend: Backend) -> bool:
    """Whether a kernel of `mixture` adds the residual.

    Elsewhere the caller adds it in the shape of the block. XLA on a CPU rounds a sum of flat bfloat16 tokens elsewhere,
    and aligned blocks would lose their bits.
    """
    return backend.has_triton


def mixture(
    backend: Backend,
    x: Float[Array, "N H"],
    logits: Float[Array, "N E"],
    live: Bool[Array, " N"],
    first: Int[Array, ""] | int,
    gate_up: Weight | TransposedWeight,
    down: Weight | TransposedWeight,
    shared: SharedExpert | None = None,
    residual: Float[Array, "N H"] | None = None,
    *,
    experts_per_token: int,
    normalise: bool,
    axes: ExpertAxes = ((), ()),
) -> Float[Array, "N H"]:
    """Routing, the chosen experts and the shared expert.

    Args:
        backend: Where it runs.
        x: [N, H].
        logits: Router logits, [N, E].
        live: bool [N], tokens that count; other tokens go to no expert.
        first: The id of the first expert of ``gate_up`` and ``down``. Choices of other experts add nothing.
        gate_up: Weights of the local experts, [E or fewer, 2, F, H].
        down: [E or fewer, H, F].
        shared: gate_up [2, F, H], down [H, F] and the gate's logits float32 [N] of the shared expert, or None.
        residual: [N, H], added; None: nothing.
        experts_per_token: How many experts a token goes to.
        normalise: Whether the weights of a token's experts are normalised to a sum of 1.
        axes: The mesh axes that F is divided over, of the experts and of the shared expert; the caller sums the results
            of the devices.

    Returns:
        [N, H] in x's dtype.
    """
    args = (x, logits, live, first, gate_up, down, shared, residual)
    options = {"experts_per_token": experts_per_token, "normalise": normalise, "axes": axes}
    return choose("mixture", IMPLEMENTATIONS, backend, *args, **options).call(backend, *args, **options)
