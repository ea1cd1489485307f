"""The Gated DeltaNet mixer (arXiv 2412.06464) of Qwen3-Next and Qwen3.5. Letters as in `ops.gated_delta`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.models.config import GatedDeltaSpec
from dflash_jax.models.layers import constant, normal, output, parameter
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.gated_delta import Weights, advance, gated_delta
from dflash_jax.ops.linear import DeferredNorm, linear
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, AxisSharding, Layout, spec


class GatedDelta(nnx.Module):
    """The mixer.

    It returns a record for `ops.gated_delta.replay`, or the new state where the number of tokens that count is known
    beforehand.

    Attributes:
        backend: Where operations run.
        spec: Its configuration.
        eps: Epsilon of the norm.
        key_heads: How the key heads are divided over devices.
        qkvz: Projection to query, key, values and output gates of each key head, [G, C + R Dv, H].
        conv: Depthwise convolution, [G, C, kernel].
        beta_alpha: Projections to write strength and decay, [2, G, R, H].
        a_log: Logarithm of the decay rate, [G, R].
        dt_bias: Bias of the decay, [G, R].
        norm: Weight of the gated norm, [Dv].
        out: Output projection, [H, G, R, Dv].
    """

    def __init__(
        self,
        spec: GatedDeltaSpec,
        hidden: int,
        eps: float,
        rngs: nnx.Rngs | None,
        dtype: DTypeLike,
        layout: Layout = ONE_DEVICE,
        backend: Backend = XLA,
    ):
        self.backend = backend
        self.spec, self.eps, self.key_heads = spec, eps, layout.wide(spec.num_key_heads)
        g, r, dv = spec.num_key_heads, spec.values_per_key, spec.value_dim
        self.qkvz = normal(rngs, (g, spec.channels_per_key + r * dv, hidden), dtype)
        self.conv = normal(rngs, (g, spec.channels_per_key, spec.conv_kernel), dtype, 0.5)
        self.beta_alpha = normal(rngs, (2, g, r, hidden), dtype)
        self.a_log = parameter(
            rngs, (g, r), dtype, lambda key: jnp.log(jax.random.uniform(key, (g, r), minval=1.0, maxval=16.0))
        )
        self.dt_bias = constant(rngs, (g, r), dtype, -3.0)
        self.norm = constant(rngs, (dv,), dtype, 1.0)
        self.out = normal(rngs, (hidden, g, r, dv), dtype)

    def shardings(self) -> dict[str, tuple[AxisSharding | None, ...]]:
        """Parameter → how its leading dimensions are divided."""
        heads = self.key_heads
        first = {"qkvz": (heads,), "conv": (heads,), "a_log": (heads,), "dt_bias": (heads,)}
        return {**first, "beta_alpha": (None, heads), "out": (None, heads)}

    def matrices(self) -> dict[str, int]:
        """Parameter → number of its contracted last axes, for `packing.pack_weights`."""
        return {"qkvz": 1, "beta_alpha": 1, "out": 3}

    def cache_specs(self, state: DeltaState) -> DeltaState:
        """PartitionSpecs in the shape of ``state``."""
        return replace(
            state, recurrent=spec(DATA, self.key_heads), conv_inputs=spec(DATA, None, self.key_heads), rows=None
        )

    def forward_full(self, x: Float[Array, "B T H"], starts: Int[Array, "B T"]) -> Float[Array, "B T H"]:
        """One pass over whole documents, without a state.

        Args:
            x: [B, T, H].
            starts: First token of each token's document, int [B, T].

        Returns:
            [B, T, H].
        """
        spec, (g, channels, kernel) = self.spec, self.conv.get_value().shape
        shape = (x.shape[0], g, spec.values_per_key, spec.key_dim, spec.value_dim)
        empty = DeltaState(jnp.zeros(shape, jnp.float32), jnp.zeros((x.shape[0], kernel - 1, g, channels), x.dtype))
        return self(x, empty, starts)[0]

    def __call__(
        self,
        x: Float[Array, "B T H"] | DeferredNorm,
        state: DeltaState,
        starts: Int[Array, "B T"] | None = None,
        residual: Float[Array, "B T H"] | None = None,
        n: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T H"], DeltaRecord | DeltaState]:
        """One pass over tokens after a state, which is only read.

        Args:
            x: [B, T, H], an array or `ops.linear.DeferredNorm`.
            state: The state before these tokens.
            starts: As in `ops.gated_delta.gated_delta`.
            residual: [B, T, H], added; None adds nothing.
            n: Number of tokens that count, int [B]; None where it is not known yet.

        Returns:
            [B, T, H]; and the record, or the state after the n tokens.
        """
        qkvz, gates = linear(self.backend, x, (self.qkvz[...], self.beta_alpha[...]))
        weights = Weights(self.conv[...], self.a_log[...], self.dt_bias[...], self.norm[...])
        if n is None:
            y, record = gated_delta(self.backend, qkvz, gates, state, weights, self.eps, starts)
        else:
            y, record = advance(self.backend, qkvz, gates, state, weights, self.eps, n)
        return output(self.backend, y, self.out[...], 3, self.key_heads, residual), record
