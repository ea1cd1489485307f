"""Mixture of experts: a float32 router, SwiGLU experts, and an optional gated shared expert."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from dflash_jax.models.config import MoeSpec
from dflash_jax.models.layers import Mlp, normal
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.linear import DeferredNorm, linear, takes_fp4
from dflash_jax.ops.moe import can_transpose, fuses_residual, mixture, shared_weight
from dflash_jax.ops.weights import TransposedWeight, can_pack_experts, common_outputs
from dflash_jax.parallel.sharding import ONE_DEVICE, AxisSharding, Layout


class Moe(nnx.Module):
    """A router, routed experts and an optional shared expert.

    E is the number of experts, F the features of each, H the hidden size.

    Attributes:
        spec: Its configuration.
        backend: Where operations run.
        experts: How the experts are divided over devices.
        features: How the features of each expert are divided.
        router: [E, H].
        gate_up: [E, 2, F, H].
        down: [E, H, F].
        shared: The shared expert; absent without one.
        shared_gate: Its gate, [H]; absent without one.
    """

    def __init__(
        self,
        spec: MoeSpec,
        hidden: int,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.spec, self.backend = spec, backend
        e, f = spec.num_experts, spec.intermediate_size
        self.experts, self.features = layout.experts(e), layout.expert_features(f)
        self._feature_parts = layout.parts(self.features)
        self.router = normal(rngs, (e, hidden), dtype)
        self.gate_up = normal(rngs, (e, 2, f, hidden), dtype)
        self.down = normal(rngs, (e, hidden, f), dtype)
        if spec.shared_intermediate_size is not None:
            self.shared = Mlp(spec.shared_intermediate_size, hidden, rngs, dtype, layout, backend)
            self.shared_gate = normal(rngs, (hidden,), dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        features_third, features_second = (self.experts, None, self.features), (self.experts, self.features)
        gate_up, down = (w.get_value() for w in (self.gate_up, self.down))
        gate_up_has_parts = isinstance(gate_up, TransposedWeight) and gate_up.has_parts
        down_has_none = isinstance(down, TransposedWeight) and not down.has_parts
        return {
            "gate_up": features_second if gate_up_has_parts else features_third,
            "down": features_second if down_has_none else features_third,
        }

    def of_experts(self) -> dict[str, int | None]:
        """Parameter → outputs that should share scales, by `common_outputs`, for `packing.transpose_experts`.

        None where it cannot be transposed: both can, or neither.
        """
        gate_up, down = (w.get_value() for w in (self.gate_up, self.down))
        if not (can_transpose(self.backend, gate_up) and can_transpose(self.backend, down)):
            return {"gate_up": None, "down": None}
        features = self.spec.intermediate_size // self._feature_parts
        return {
            "gate_up": common_outputs(gate_up, features),
            "down": common_outputs(down, down.shape[1], self._feature_parts),
        }

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        maps = {"router": 1, "shared_gate": 1} if self.spec.shared_intermediate_size is not None else {"router": 1}
        experts = self.gate_up.get_value(), self.down.get_value()
        # The C++ kernel of experts rounds no activations.
        can_pack = can_pack_experts(*experts) and not any(takes_fp4(self.backend, w) for w in experts)
        return maps | {"gate_up": 1, "down": 1} if can_pack else maps

    def __call__(
        self,
        x: Float[Array, "B T H"] | DeferredNorm,
        valid: Bool[Array, "B T"],
        residual: Float[Array, "B T H"] | None = None,
    ) -> Float[Array, "B T H"]:
        """The mixture for each token.

        Args:
            x: [B, T, H], an array or `DeferredNorm`.
            valid: Which tokens count, bool [B, T]; the others touch no further experts.
            residual: [B, T, H], added; None adds nothing.

        Returns:
            [B, T, H].
        """
        weights = (self.router[...],)
        if self.spec.shared_intermediate_size is not None:
            weights += (self.shared_gate[...],)
        logits, *gates, x = linear(self.backend, x, weights, dtype=jnp.float32, return_normed=True)
        flat, logits = x.reshape(-1, x.shape[-1]), logits.reshape(-1, logits.shape[-1])
        flat_residual = None if residual is None else residual.reshape(flat.shape)
        gate_up, down = self.gate_up[...], self.down[...]
        first = self.experts.index() * gate_up.shape[0]
        routed, shared, gate = AxisSharding(self.features.axes + self.experts.axes), None, None
        if self.spec.shared_intermediate_size is not None:
            gate = gates[0].reshape(-1)
            if routed == self.shared.features:
                shared = (self.shared.gate_up[...], self.shared.down[...], gate)
        # The residual is added once: by `mixture`, or after it where a sum over devices or a shared expert follows, or
        # where no kernel fuses it.
        in_mixture = fuses_residual(self.backend) and not routed.axes and (gate is None or shared is not None)
        args = (flat, logits, valid.reshape(-1), first, gate_up, down, shared, flat_residual if in_mixture else None)
        options = {"experts_per_token": self.spec.experts_per_token, "normalise": self.spec.normalise_top_k}
        options |= {"axes": (self.features.axes, routed.axes)}
        y = routed.sum(mixture(self.backend, *args, **options))
        if gate is not None and shared is None:
            y = y + shared_weight(gate, y.dtype) * self.shared(flat)
        y = y.reshape(x.shape)
        return y if in_mixture or residual is None else residual + y
