"""Mixture of experts: a float32 router, SwiGLU experts, and an optional gated shared expert."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.config import MoeSpec
from dflash_jax.models.layers import Mlp, linear, normal, project, swiglu
from dflash_jax.ops import backend
from dflash_jax.ops.kernels.cpu import calls as cpu
from dflash_jax.ops.kernels.cpu.calls import LANES
from dflash_jax.ops.weights import PackedWeight, QuantizedWeight, dense
from dflash_jax.parallel.sharding import ONE_DEVICE, AxisSharding, Layout

# Rows that a product holds for each expert: so many times the mean, and at least so many, which a product of a few rows
# costs anyway.
GROUP_ROWS, LEAST_GROUP_ROWS = 4, 32
# On a TPU the loop is for more tokens than these.
TPU_GATHERED_TOKENS = 16
# The loop takes as many experts a step as make a product of about this many rows: tiny experts alone do not pay.
GROUP_WIDTH = 512


def route(logits, spec: MoeSpec):
    """Router logits [..., E] → the chosen experts' weights (float32) and ids, [..., experts_per_token]."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), spec.experts_per_token)
    if spec.normalise_top_k:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights, chosen


def experts_gathered(x, weights, chosen, gate_up, down):
    """Few tokens: each token meets its own experts' rows, read once from where they lie.

    Product and sum in float32, so that XLA fuses gather, product and reduction and copies no weight (on GPU).
    """
    # A choice of no weight follows the first that has one: no expert is read for it alone.
    flat = chosen.reshape(-1)
    chosen = jnp.where(weights != 0, chosen, flat[jnp.argmax(weights.reshape(-1) != 0)])
    pick = dense(gate_up[chosen], jnp.float32)
    h = jnp.sum(pick * x.astype(jnp.float32)[:, None, None, None, :], axis=-1)
    h = jax.nn.silu(h[:, :, 0]) * h[:, :, 1]
    # Over features first, each choice by itself: one sum over both axes leaves a GPU too few rows to be busy with.
    y = jnp.sum(dense(down[chosen], jnp.float32) * h[:, :, None, :], axis=-1)
    return jnp.sum(y * weights[..., None], axis=1).astype(x.dtype)


def experts_grouped(x, weights, chosen, gate_up, down):
    """Many tokens: batched products over all experts, each with the tokens that chose it, C rows at a time.

    As many passes as the fullest expert has C rows: nothing is dropped, and one pass is the rule. A token's weight of
    zero goes to no expert.
    """
    tokens, hidden = x.shape
    (e, _, f, _), k = gate_up.shape, chosen.shape[1]
    rows = max(LEAST_GROUP_ROWS, GROUP_ROWS << max(tokens * k // e - 1, 0).bit_length())
    rows = min(rows, tokens)
    expert = jnp.where(weights != 0, chosen, e).reshape(-1)
    # Each choice's place among those of its expert, by comparing all: one kernel, where sorting takes many.
    choice = jnp.arange(tokens * k)
    earlier = (expert[:, None] == expert) & (choice < choice[:, None])
    place = jnp.where(expert < e, earlier.sum(1), -1)

    def visit(carry):
        first, total = carry
        slot = jnp.where((place >= first) & (place < first + rows), expert * rows + place - first, e * rows)
        source = jnp.full(e * rows, tokens).at[slot].set(choice // k, mode="drop")
        mine = x.at[source].get(mode="fill", fill_value=0).reshape(e, rows, hidden)
        # As one axis of outputs: XLA transposes a weight with two.
        h = jnp.einsum("ech,eih->eci", mine, dense(gate_up.reshape(e, -1, hidden), x.dtype))
        h = jax.nn.silu(h[..., :f]) * h[..., f:]
        y = jnp.einsum("ecf,ehf->ech", h, dense(down, x.dtype)).reshape(e * rows, hidden)
        y = y.at[slot].get(mode="fill", fill_value=0).astype(jnp.float32).reshape(tokens, k, hidden)
        return first + rows, total + jnp.sum(y * weights[..., None], axis=1)

    start = (0, jnp.zeros((tokens, hidden), jnp.float32))
    if rows == tokens:
        return visit(start)[1].astype(x.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] <= place.max(), visit, start)[1].astype(x.dtype)


def experts_looped(x, weights, chosen, gate_up, down):
    """Many tokens, on a CPU or TPU: one dense product per group of experts that any token chose, those that did not
    choose an expert selected away."""
    e, _, f, hidden = gate_up.shape
    size = next(g for g in range(e, 0, -1) if e % g == 0 and (g * f <= GROUP_WIDTH or g == 1))
    ids = jnp.arange(e).reshape(-1, size)

    def add(total, group):
        gate_up, down, ids = group
        mine = (chosen[:, :, None] == ids) & (weights[:, :, None] != 0)
        weight = jnp.where(mine, weights[:, :, None], 0.0).sum(1)

        def visit(total):
            h = project(x, gate_up.reshape(size, 2, f, hidden))
            h = (jax.nn.silu(h[:, :, 0]) * h[:, :, 1]).astype(jnp.float32) * weight[..., None]
            h = jnp.where(mine.any(1)[..., None], h, 0.0).astype(x.dtype)
            matrix = dense(down, x.dtype)
            # One product over expert and feature is the faster where its transposed copy of the weights is paid for.
            if x.shape[0] > GROUP_WIDTH:
                return total + jnp.einsum("tef,ehf->th", h, matrix, preferred_element_type=jnp.float32)
            return total + jnp.einsum("tef,ehf->eth", h, matrix, preferred_element_type=jnp.float32).sum(0)

        return jax.lax.cond(mine.any(), visit, lambda total: total, total), None

    total = jnp.zeros(x.shape, jnp.float32)
    if size == e:
        return add(total, (gate_up, down, ids[0]))[0].astype(x.dtype)
    groups = (gate_up.reshape(-1, size, 2, f, hidden), down.reshape(-1, size, hidden, f), ids)
    return jax.lax.scan(add, total, groups)[0].astype(x.dtype)


def experts(x, weights, chosen, gate_up, down):
    """Σ_k weights[t, k] · SwiGLU of expert chosen[t, k] on x[t]: x [T, H] → [T, H], in the form that suits platform
    and size.

    The gathered form reads an expert for each choice, the others once at most. On CPU the products of the loop go to a
    matrix library and the gathered form does not; on TPU the grouped form's scatter is dear.
    """
    few = chosen.size < gate_up.shape[0]
    forms = {
        "cpu": experts_looped,
        "tpu": experts_gathered if x.shape[0] <= TPU_GATHERED_TOKENS else experts_looped,
        "default": experts_gathered if few else experts_grouped,
    }
    return jax.lax.platform_dependent(x, weights, chosen, gate_up, down, **forms)


def mixture(x, logits, live, first, gate_up, down, shared, residual, spec: MoeSpec):
    """Routing, experts and the shared expert: x [N, H], router logits [N, E], ``live`` bool [N] (other tokens go to no
    expert) → [N, H].

    gate_up and down hold the experts from ``first`` on; choices of others bring nothing. ``shared``: the shared
    expert's gate_up [2, F, H] and down [H, F], and the float32 logits [N] of its gate, or None. ``residual`` [N, H] is
    added, where it is not None.
    """
    weights, chosen = route(logits, spec)
    local = chosen - first
    mine = (local >= 0) & (local < gate_up.shape[0])
    # Idle tokens, and experts of another device, which stand for one that is there.
    weights, local = jnp.where(mine & live[:, None], weights, 0.0), jnp.where(mine, local, 0)
    y = with_shared(experts(x, weights, local, gate_up, down), x, shared)
    return y if residual is None else residual + y


def with_shared(y, x, shared):
    """y [N, H] and the gated shared expert's output of x; ``shared`` as in `mixture`."""
    return y if shared is None else y + share(shared[2], x.dtype) * swiglu(x, *shared[:2])


def share(gate, dtype):
    """Of a shared expert, float32 logits [N] of its gate → [N, 1]."""
    return jax.nn.sigmoid(gate)[:, None].astype(dtype)


def mixture_triton(x, logits, live, first, gate_up, down, shared, residual, spec: MoeSpec):
    """`mixture` by kernels."""
    from dflash_jax.ops.kernels.triton import experts as triton_experts
    from dflash_jax.ops.kernels.triton import routing as triton_routing

    weights, chosen = triton_routing.route_triton(
        logits, live, first, gate_up.shape[0], spec.experts_per_token, spec.normalise_top_k
    )
    if shared is None or all(map(triton_experts.are_alike, (gate_up, down), shared)):
        return triton_experts.experts_triton(x, weights, chosen, gate_up, down, shared, residual)
    return with_shared(triton_experts.experts_triton(x, weights, chosen, gate_up, down, None, residual), x, shared)


def mixture_by_platform(x, logits, live, first, gate_up, down, shared, residual, spec: MoeSpec):
    """`mixture`, by kernels where they are wanted, whose gradient on a GPU is that of the plain form."""
    if isinstance(gate_up, PackedWeight):
        # On one device, which has all experts.
        y = cpu.mixture(x, logits, live, gate_up, down, spec.experts_per_token, spec.normalise_top_k)
        y = with_shared(y, x, shared)
        return y if residual is None else residual + y
    args, plain = (x, logits, live, first, gate_up, down, shared, residual), partial(mixture, spec=spec)
    if backend.are_wanted():
        from dflash_jax.ops.kernels.triton import experts as triton_experts

        if triton_experts.fits(x.shape[0] * spec.experts_per_token, gate_up, down):
            return backend.instead_of(plain, partial(mixture_triton, spec=spec), *args)
    return plain(*args)


class Moe(nnx.Module):
    def __init__(self, spec: MoeSpec, hidden: int, rngs: nnx.Rngs | None, dtype, layout: Layout = ONE_DEVICE):
        self.spec = spec
        e, f = spec.num_experts, spec.intermediate_size
        self.experts, self.features = layout.experts(e), layout.expert_features(f)
        self.router = normal(rngs, (e, hidden), dtype)
        self.gate_up = normal(rngs, (e, 2, f, hidden), dtype)
        self.down = normal(rngs, (e, hidden, f), dtype)
        if spec.shared_intermediate_size is not None:
            self.shared = Mlp(spec.shared_intermediate_size, hidden, rngs, dtype, layout)
            self.shared_gate = normal(rngs, (hidden,), dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        return {"gate_up": (self.experts, None, self.features), "down": (self.experts, None, self.features)}

    def matrices(self) -> dict[str, int]:
        maps = {"router": 1, "shared_gate": 1} if self.spec.shared_intermediate_size is not None else {"router": 1}
        both = self.gate_up.get_value(), self.down.get_value()
        whole = all(n % LANES == 0 for n in both[1].shape[1:]) and not any(isinstance(x, QuantizedWeight) for x in both)
        return maps | {"gate_up": 1, "down": 1} if whole else maps

    def __call__(self, x, valid, residual=None):
        """x [B, T, H] or `DeferredNorm` → [B, T, H], with ``residual`` [B, T, H] if given; tokens where ``valid``
        [B, T] is False go to no expert of their own."""
        weights = (self.router[...],)
        if self.spec.shared_intermediate_size is not None:
            weights += (self.shared_gate[...],)
        logits, *gates, x = linear(x, weights, kind=jnp.float32, kept=True)
        flat, logits = x.reshape(-1, x.shape[-1]), logits.reshape(-1, logits.shape[-1])
        rest = None if residual is None else residual.reshape(flat.shape)
        gate_up, down = self.gate_up[...], self.down[...]
        first = self.experts.index() * gate_up.shape[0]
        routed, shared, gate = AxisSharding(self.features.axes + self.experts.axes), None, None
        if self.spec.shared_intermediate_size is not None:
            gate = gates[0].reshape(-1)
            if routed == self.shared.features:
                shared = (self.shared.gate_up[...], self.shared.down[...], gate)
        # Added once: by the backend, or behind the sum over devices, where aligned windows keep their bits on a CPU.
        is_last = backend.are_wanted() and not routed.axes and (gate is None or shared is not None)
        args = (flat, logits, valid.reshape(-1), first, gate_up, down, shared, rest if is_last else None)
        y = routed.sum(mixture_by_platform(*args, self.spec))
        if gate is not None and shared is None:
            y = y + share(gate, y.dtype) * self.shared(flat)
        y = y.reshape(x.shape)
        return y if is_last or residual is None else residual + y
