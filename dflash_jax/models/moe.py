"""Mixture of experts: a float32 router, SwiGLU experts, and an optional gated shared expert."""

import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.config import MoeSpec
from dflash_jax.models.layers import Mlp, normal
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.linear import linear
from dflash_jax.ops.moe import mixture, shared_weight
from dflash_jax.ops.weights import LANES, QuantizedWeight
from dflash_jax.parallel.sharding import ONE_DEVICE, AxisSharding, Layout


class Moe(nnx.Module):
    """The layer's router and experts."""

    def __init__(
        self,
        spec: MoeSpec,
        hidden: int,
        rngs: nnx.Rngs | None,
        dtype,
        layout: Layout = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.spec, self.backend = spec, backend
        e, f = spec.num_experts, spec.intermediate_size
        self.experts, self.features = layout.experts(e), layout.expert_features(f)
        self.router = normal(rngs, (e, hidden), dtype)
        self.gate_up = normal(rngs, (e, 2, f, hidden), dtype)
        self.down = normal(rngs, (e, hidden, f), dtype)
        if spec.shared_intermediate_size is not None:
            self.shared = Mlp(spec.shared_intermediate_size, hidden, rngs, dtype, layout, backend)
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
        logits, *gates, x = linear(self.backend, x, weights, dtype=jnp.float32, return_normed=True)
        flat, logits = x.reshape(-1, x.shape[-1]), logits.reshape(-1, logits.shape[-1])
        rest = None if residual is None else residual.reshape(flat.shape)
        gate_up, down = self.gate_up[...], self.down[...]
        first = self.experts.index() * gate_up.shape[0]
        routed, shared, gate = AxisSharding(self.features.axes + self.experts.axes), None, None
        if self.spec.shared_intermediate_size is not None:
            gate = gates[0].reshape(-1)
            if routed == self.shared.features:
                shared = (self.shared.gate_up[...], self.shared.down[...], gate)
        # Added once: by the kernels, or behind the sum over devices, where aligned windows keep their bits on a CPU.
        is_last = self.backend.has_triton and not routed.axes and (gate is None or shared is not None)
        args = (flat, logits, valid.reshape(-1), first, gate_up, down, shared, rest if is_last else None)
        options = {"experts_per_token": self.spec.experts_per_token, "normalise": self.spec.normalise_top_k}
        y = routed.sum(mixture(self.backend, *args, **options))
        if gate is not None and shared is None:
            y = y + shared_weight(gate, y.dtype) * self.shared(flat)
        y = y.reshape(x.shape)
        return y if is_last or residual is None else residual + y
