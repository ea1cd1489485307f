"""Mixture of experts: a float32 router, SwiGLU experts, and an optional gated shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.config import MoeSpec
from dflash_jax.models.parts import Mlp, normal, project
from dflash_jax.models.scaled import dense
from dflash_jax.sharding import ONE_DEVICE, Cut, Layout

# Up to this many tokens a pass reads each token's experts by themselves; beyond, most experts are read anyway.
GATHERED_TOKENS = 16
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
    pick = dense(gate_up[chosen], jnp.float32)
    h = jnp.sum(pick * x.astype(jnp.float32)[:, None, None, None, :], axis=-1)
    h = jax.nn.silu(h[:, :, 0]) * h[:, :, 1] * weights[..., None]
    return jnp.sum(dense(down[chosen], jnp.float32) * h[:, :, None, :], axis=(1, 3)).astype(x.dtype)


def experts_looped(x, weights, chosen, gate_up, down):
    """Many tokens: one dense product per group of experts that any token chose, the tokens that did not choose an
    expert selected away."""
    e, _, f, hidden = gate_up.shape
    size = next(g for g in range(e, 0, -1) if e % g == 0 and (g * f <= GROUP_WIDTH or g == 1))
    ids = jnp.arange(e).reshape(-1, size)

    def add(total, group):
        gate_up, down, ids = group
        mine = chosen[:, :, None] == ids
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

    On CPU the products of the loop go to a matrix library and the gathered form does not.
    """
    accelerated = experts_gathered if x.shape[0] <= GATHERED_TOKENS else experts_looped
    return jax.lax.platform_dependent(x, weights, chosen, gate_up, down, cpu=experts_looped, default=accelerated)


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

    def cuts(self) -> dict[str, tuple[Cut | None, ...]]:
        return {"gate_up": (self.experts, None, self.features), "down": (self.experts, None, self.features)}

    def __call__(self, x, valid):
        """x [B, T, H] → [B, T, H]; tokens where ``valid`` [B, T] is False go to no expert of their own."""
        flat = x.reshape(-1, x.shape[-1])
        logits = jnp.einsum("th,eh->te", flat, self.router[...], preferred_element_type=jnp.float32)
        weights, chosen = route(logits, self.spec)
        live = valid.reshape(-1, 1)
        # An idle token follows the first live one: it then reads no expert that is not read anyway.
        chosen = jnp.where(live, chosen, chosen[jnp.argmax(live[:, 0])])
        gate_up, down = self.gate_up[...], self.down[...]
        local, mine = self.experts.own(chosen, gate_up.shape[0])
        # Another device's expert: no share here, and the row that is read for it is one that is there.
        weights, local = jnp.where(mine, weights, 0.0), jnp.where(mine, local, 0)
        y = experts(flat, weights, local, gate_up, down).reshape(x.shape)
        routed = Cut(self.features.axes + self.experts.axes)
        if self.spec.shared_intermediate_size is None:
            return routed.sum(y)
        gate = jax.nn.sigmoid(jnp.einsum("bth,h->bt", x, self.shared_gate[...]))[..., None]
        if routed == self.shared.features:
            return routed.sum(y + gate * self.shared.partial(x))
        return routed.sum(y) + gate * self.shared(x)
