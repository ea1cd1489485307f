"""The Gated DeltaNet mixer of Qwen3-Next and Qwen3.5. Letters as in `ops.gated_delta`."""

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.config import GatedDeltaSpec
from dflash_jax.models.layers import constant, normal, output, parameter
from dflash_jax.ops.backend import XLA, Backend
from dflash_jax.ops.cache import DeltaRecord, DeltaState
from dflash_jax.ops.gated_delta import Weights, advance, gated_delta
from dflash_jax.ops.linear import linear
from dflash_jax.parallel.sharding import DATA, ONE_DEVICE, AxisSharding, Layout, spec


class GatedDelta(nnx.Module):
    """The mixer. It returns a record for `ops.gated_delta.replay`, or, where it is known beforehand how many tokens
    count, the new state."""

    def __init__(
        self,
        spec: GatedDeltaSpec,
        hidden: int,
        eps: float,
        rngs: nnx.Rngs | None,
        dtype,
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
        first, second = (self.key_heads,), (None, self.key_heads)
        return dict.fromkeys(("qkvz", "conv", "a_log", "dt_bias"), first) | {"beta_alpha": second, "out": second}

    def matrices(self) -> dict[str, int]:
        return {"qkvz": 1, "beta_alpha": 1, "out": 3}

    def cache_specs(self, state: DeltaState) -> DeltaState:
        return DeltaState(spec(DATA, self.key_heads), spec(DATA, None, self.key_heads))

    def forward_full(self, x, starts):
        """x [B, T, H] → y [B, T, H] over whole documents, each from its first token ``starts`` int [B, T] on."""
        spec, (g, channels, kernel) = self.spec, self.conv.get_value().shape
        shape = (x.shape[0], g, spec.values_per_key, spec.key_dim, spec.value_dim)
        empty = DeltaState(jnp.zeros(shape, jnp.float32), jnp.zeros((x.shape[0], kernel - 1, g, channels), x.dtype))
        return self(x, empty, starts)[0]

    def __call__(
        self, x, state: DeltaState, starts=None, residual=None, n=None
    ) -> tuple[jax.Array, DeltaRecord | DeltaState]:
        """One pass over tokens behind a state.

        Args:
            x: [B, T, H], an array or `ops.linear.DeferredNorm`.
            state: What was before; it stays as it is.
            starts: As in `ops.gated_delta.gated_delta`.
            residual: [B, T, H], added; None: nothing.
            n: int [B], how many of the tokens count; None where that is known later.

        Returns:
            y [B, T, H]; and the record, or with ``n`` the state after these tokens.
        """
        qkvz, gates = linear(self.backend, x, (self.qkvz[...], self.beta_alpha[...]))
        weights = Weights(self.conv[...], self.a_log[...], self.dt_bias[...], self.norm[...])
        if n is None:
            y, record = gated_delta(self.backend, qkvz, gates, state, weights, self.eps, starts)
        else:
            y, record = advance(self.backend, qkvz, gates, state, weights, self.eps, n)
        return output(self.backend, y, self.out[...], 3, self.key_heads, residual), record
